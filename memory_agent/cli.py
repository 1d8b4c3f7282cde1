"""`nightjar memory ADDRESS`: what a memory agent knows of its worker's pool, on the terminal."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from nightjar.rpc import dial
from nightjar.v1 import memory_pb2, memory_pb2_grpc, worker_pb2

TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Ask once and print; returns 0, or raises what the call raises."""
    parser = argparse.ArgumentParser(
        prog="nightjar memory",
        description="Shows where the draft is, who owns which blocks, and what happened last.",
    )
    parser.add_argument("address", help="of the memory agent")
    print(shown(asyncio.run(_asked(parser.parse_args(argv).address))))
    return 0


async def _asked(address: str) -> memory_pb2.GetMemoryStatusResponse:
    async with dial(address) as channel:
        stub = memory_pb2_grpc.MemoryServiceStub(channel)
        request = memory_pb2.GetMemoryStatusRequest(include_pool_map=True)
        status = await stub.GetMemoryStatus(request, timeout=TIMEOUT_S)
        assert isinstance(status, memory_pb2.GetMemoryStatusResponse)
        return status


def shown(status: memory_pb2.GetMemoryStatusResponse) -> str:
    """The status in lines."""
    lines = [f"agent    {status.agent_id}"]
    if status.worker_id:
        pressure = status.pressure
        lines += [
            f"worker   {status.worker_id}",
            f"draft    {_short(worker_pb2.DraftResidency.Name(status.state))}; "
            f"{status.num_expansions} expansions, {status.num_contractions} contractions, "
            f"{status.num_bytes_copied >> 20} MB copied",
            f"blocks   {pressure.num_free_blocks} of {pressure.num_total_blocks} free; the draft "
            f"leaves below {status.tau_low}, returns above {status.tau_high} and its own",
            f"requests {pressure.num_running} running, {pressure.num_waiting} waiting; the policy "
            f"says gamma {pressure.exploit_gamma}",
        ]
    else:
        lines.append("worker   none")
    for part in status.pool_map.ranges:
        end = part.first_block + part.num_blocks
        owner = _short(memory_pb2.BlockOwner.Name(part.owner))
        lines.append(f"map      [{part.first_block}, {end}) {owner}")
    lines += [_event(event) for event in status.events]
    return "\n".join(lines)


def _event(event: memory_pb2.MemoryEvent) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.unix_ms / 1000))
    kind = _short(memory_pb2.MemoryEventKind.Name(event.kind)).replace("_", " ")
    work = f", {event.num_bytes} bytes in {event.elapsed_us} us" if event.elapsed_us else ""
    reason = f": {event.reason}" if event.reason else ""
    return f"event    {at} {event.worker_id} {kind}{work}{reason}"


def _short(name: str) -> str:
    for prefix in ("DRAFT_RESIDENCY_", "BLOCK_OWNER_", "MEMORY_EVENT_KIND_"):
        name = name.removeprefix(prefix)
    return name.lower()
