"""`nightjar memory ADDRESS`: what a memory agent knows of its worker's pool, on the terminal."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

import grpc

from memory_agent.attachment import MAP_TIMEOUT_S
from memory_agent.layout import size_in_words
from nightjar.errors import NightjarError, Unavailable
from nightjar.rpc import check_address, dial
from nightjar.v1 import memory_pb2, memory_pb2_grpc, worker_pb2

TIMEOUT_S = 10.0
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_UNKNOWN_CALL = (  # of another service; the gateway asks for keys before it looks
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


def main(argv: Sequence[str]) -> int:
    """Ask once and print; returns 0.

    Raises:
        ConfigError: The address is none.
        NightjarError: Nothing answers there, or something that is no memory agent.
    """
    parser = argparse.ArgumentParser(
        prog="nightjar memory",
        description="Shows where the draft is, who owns which blocks, and what happened last.",
    )
    parser.add_argument("address", help="of the memory agent")
    address = parser.parse_args(argv).address
    check_address(address)
    try:
        status = asyncio.run(_asked(address))
    except grpc.aio.AioRpcError as error:
        raise _translated(error, address) from None
    print(shown(status))
    return 0


def _translated(error: grpc.aio.AioRpcError, address: str) -> NightjarError:
    code, details = error.code(), error.details()
    if code in _SILENT:
        return Unavailable(f"no memory agent answers at {address}; is it running? ({details})")
    if code in _UNKNOWN_CALL:
        return NightjarError(f"what answers at {address} is no memory agent ({details})")
    return NightjarError(f"{code.name}: {details}")


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
            f"{size_in_words(status.num_bytes_copied)} copied",
            f"blocks   {pressure.num_free_blocks} of {pressure.num_total_blocks} free; the draft "
            f"leaves below {status.tau_low}, returns above {status.tau_high} and its own",
            f"requests {pressure.num_running} running, {pressure.num_waiting} waiting; the policy "
            f"says gamma {pressure.exploit_gamma}",
        ]
    else:
        lines.append("worker   none")
    if status.worker_id and not status.HasField("pool_map"):
        lines.append(
            f"map      unknown: the worker did not say within {MAP_TIMEOUT_S:g} s who owns which "
            "block; it answers between two steps"
        )
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
    if event.kind == memory_pb2.MEMORY_EVENT_KIND_DONE:
        reason = f": the draft is {_short(worker_pb2.DraftResidency.Name(event.state))}"
    return f"event    {at} {event.worker_id} {kind}{work}{reason}"


def _short(name: str) -> str:
    for prefix in ("DRAFT_RESIDENCY_", "BLOCK_OWNER_", "MEMORY_EVENT_KIND_"):
        name = name.removeprefix(prefix)
    return name.lower()
