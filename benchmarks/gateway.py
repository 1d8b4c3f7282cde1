"""What the gateway adds: latency, processor time and memory, before an echo worker; prints JSON.

    python benchmarks/gateway.py                   all sections; some eleven minutes, machine idle
    python benchmarks/gateway.py --only latency --rounds 3
    python benchmarks/gateway.py --tiny            seconds: proves the program, measures nothing

Gateway, worker and client are processes of their own. latency: one stream at a time; the worker
called directly, through the gateway's gRPC, through its HTTP, and through a relay that copies
bytes from gRPC to gRPC, and so shows what the library alone takes, in turns. throughput: many
streams; the gateway's processor time, which other load disturbs little, over what was streamed.
memory: clients that take 128 bytes a second of answers that the worker has long finished, once
8 KB a second have turned all buffers over; of every token that it passed on the gateway keeps the
four bytes of its id, with which another worker could go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from gateway_clients import (
    FIRST_BYTES,
    SLOW_BYTES,
    Heard,
    HttpClient,
    SlowReader,
    ask_grpc,
    http_request,
)
from gateway_system import Services, cpu_s, rss_mib, system

from nightjar.rpc import dial

SECTIONS = ("latency", "throughput", "memory")
FLOORS = {
    "added_ttft_p50_us": 2000,
    "added_per_message_p50_us": 300,
    "tokens_per_core_s": 8000,
    "memory_growth_beyond_token_ids_mib": 2.0,
}
STREAM_INTERVAL_MS = 20  # of a worker under load
PACE = 125  # tokens a second of a stream: 64 of them make the floor's 8,000


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    rounds: int
    asks: int  # of each arm, in a round of latency
    messages: int  # of each of them, about
    streams: int  # at once
    seconds: float  # of each of them
    readers: int  # slow ones
    slow_tokens: int  # of an answer to a slow reader
    hold_s: float  # of which memory is watched


TINY = Size(
    rounds=1, asks=2, messages=3, streams=4, seconds=0.2, readers=4, slow_tokens=4096, hold_s=0.6
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS, help="sections")
    parser.add_argument("--rounds", type=int, default=5, help="of latency and throughput")
    parser.add_argument("--asks", type=int, default=20, help="of each arm, in a round of latency")
    parser.add_argument("--streams", type=int, default=64, help="at once, for throughput")
    parser.add_argument("--seconds", type=float, default=10, help="of an arm of throughput")
    parser.add_argument("--readers", type=int, default=256, help="slow ones, for memory")
    parser.add_argument("--hold-s", type=float, default=120, help="that memory is watched")
    parser.add_argument("--tiny", action="store_true", help="a few requests of everything")
    options = parser.parse_args()
    size = Size(
        rounds=options.rounds,
        asks=options.asks,
        messages=20,
        streams=options.streams,
        seconds=options.seconds,
        readers=options.readers,
        slow_tokens=131_072,
        hold_s=options.hold_s,
    )
    print(json.dumps(asyncio.run(measured(options.only, TINY if options.tiny else size)), indent=1))


async def measured(sections: Sequence[str], size: Size) -> dict[str, Any]:
    """The figures of some sections, beside what they must reach."""
    load = [round(one, 2) for one in psutil.getloadavg()]
    figures: dict[str, Any] = {
        "floors": FLOORS,
        "python": platform.python_version(),
        "cores": psutil.cpu_count(),
        "load_average_before": load,
    }
    with system() as services:
        if "latency" in sections:
            figures["latency"] = await latency(services, size)
        if "throughput" in sections:
            figures["throughput"] = await throughput(services, size)
        if "memory" in sections:
            figures["memory"] = await memory(services, size)
    return figures


async def latency(services: Services, size: Size) -> dict[str, Any]:
    """Microseconds to the first token and of each message, by way; one stream at a time."""
    manner = f"pace:{PACE}:{STREAM_INTERVAL_MS}"
    num_tokens = round(size.messages * PACE * STREAM_INTERVAL_MS / 1000)
    found: list[dict[str, float]] = []
    async with contextlib.AsyncExitStack() as stack:
        ways: dict[str, Callable[[], Awaitable[Heard]]] = {}
        for name, address in (
            ("direct", services.worker_address),
            ("relay", services.relay_address),
            ("grpc", services.grpc_address),
        ):
            channel = await stack.enter_async_context(dial(address))
            ways[name] = functools.partial(ask_grpc, channel, manner, num_tokens)
        http = await HttpClient.connect(services.http_address)
        stack.callback(http.close)
        ways["http"] = functools.partial(http.ask, manner, num_tokens)
        for way in ways.values():
            await way()  # connects, and warms up
        for number in range(size.rounds):
            heard: dict[str, list[Heard]] = {name: [] for name in ways}
            for _ in range(size.asks):
                for name, way in ways.items():
                    heard[name].append(await way())
            found.append(_of_round(heard))
            say(f"latency {number + 1}/{size.rounds}: {found[-1]}")
    return {name: spread([one[name] for one in found]) for name in found[0]}


def _of_round(heard: dict[str, list[Heard]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, answers in heard.items():
        # A stream's first message waits for more than the message: it is the TTFT's.
        delays = [delay for answer in answers for delay in answer.delays_us[1:]]
        for figure, values in (("ttft", [one.ttft_us for one in answers]), ("message", delays)):
            deciles = statistics.quantiles(values, n=10, method="inclusive")
            figures[f"{name}_{figure}_p50_us"] = round(deciles[4])
            figures[f"{name}_{figure}_p90_us"] = round(deciles[8])
    for name in ("relay", "grpc", "http"):
        for figure in ("ttft", "message"):
            added = figures[f"{name}_{figure}_p50_us"] - figures[f"direct_{figure}_p50_us"]
            figures[f"{name}_added_{figure}_p50_us"] = added
    return figures


async def throughput(services: Services, size: Size) -> dict[str, Any]:
    """Processor time of the gateway by door and manner; many streams at once."""
    paces = [(f"pace:{rate}:{STREAM_INTERVAL_MS}", rate) for rate in (PACE, 2 * PACE)]
    arms = {f"http {rate} tokens/s a stream": ("http", manner, rate) for manner, rate in paces}
    arms[f"grpc {PACE} tokens/s a stream"] = ("grpc", *paces[0])
    arms["http as fast as read, 8 tokens a message"] = ("http", "read:8", 4 * PACE)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for number in range(size.rounds):
        for name, (door, manner, rate) in arms.items():
            num_tokens = max(16, round(rate * size.seconds))
            figures = await _streamed(services, door, manner, num_tokens, size.streams)
            found[name].append(figures)
            say(f"throughput {number + 1}/{size.rounds}, {name}: {figures}")
    return {
        name: {figure: spread([one[figure] for one in rounds]) for figure in rounds[0]}
        for name, rounds in found.items()
    }


async def _streamed(
    services: Services, door: str, manner: str, num_tokens: int, num_streams: int
) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        asks = []
        if door == "http":
            for _ in range(num_streams):
                client = await HttpClient.connect(services.http_address)
                stack.callback(client.close)
                asks.append(client.ask)
        else:
            channel = await stack.enter_async_context(dial(services.grpc_address))

            async def ask(manner: str, num_tokens: int) -> Heard:
                return await ask_grpc(channel, manner, num_tokens)

            asks = [ask] * num_streams
        await asyncio.gather(*(ask("read:16", 16) for ask in asks))
        before, begin = cpu_s(services.gateway), time.perf_counter()
        answers = await asyncio.gather(*(ask(manner, num_tokens) for ask in asks))
        wall = time.perf_counter() - begin
        cpu = cpu_s(services.gateway) - before
    total = sum(answer.num_tokens for answer in answers)
    if total != num_streams * num_tokens:
        raise SystemExit(f"{total} tokens of {num_streams * num_tokens} arrived")
    num_messages = sum(answer.num_messages for answer in answers)
    cpu = max(cpu, 0.01)  # the clock's own grain
    return {
        "tokens_per_core_s": round(total / cpu),
        "cpu_us_per_message": round(1e6 * cpu / num_messages, 1),
        "tokens_per_message": round(total / num_messages, 2),
        "gateway_cores": round(cpu / wall, 3),
        "tokens_per_s": round(total / wall),
    }


async def memory(services: Services, size: Size) -> dict[str, Any]:
    """Resident memory while slow readers hold answers that are complete at the worker."""
    pace = size.slow_tokens / 10  # tokens a second: complete after ten, or as soon as it can
    request = http_request(f"pace:{pace:g}:{STREAM_INTERVAL_MS}", size.slow_tokens)
    watched = {"gateway": services.gateway, "worker": services.worker}
    rss: dict[str, list[float]] = {name: [] for name in watched}
    idle = {name: rss_mib(process) for name, process in watched.items()}
    readers: list[SlowReader] = []
    times: list[float] = []
    tokens: list[int] = []
    begin = time.perf_counter()
    period_s = min(1.0, size.hold_s / 4)
    settle_s = min(45.0, size.hold_s)
    watch_s = settle_s + min(15.0, size.hold_s / 4)  # what was on its way has come to rest
    try:
        for _ in range(size.readers):
            readers.append(SlowReader(services.http_address, request))
            await asyncio.sleep(0)
        while (now := time.perf_counter() - begin) < watch_s + size.hold_s:
            for reader in readers:
                reader.read(SLOW_BYTES if now >= settle_s else FIRST_BYTES)
            if now >= watch_s:
                times.append(now)
                tokens.append(sum(reader.num_tokens for reader in readers))
                for name, process in watched.items():
                    rss[name].append(rss_mib(process))
                if len(times) % 10 == 1:
                    say(f"memory, {now:.0f} s: { {name: one[-1] for name, one in rss.items()} }")
            await asyncio.sleep(period_s)
        taken = sum(reader.num_bytes for reader in readers)
        cut_off = sum(reader.cut_off for reader in readers)
        finished = sum(reader.finished for reader in readers)
    finally:
        for reader in readers:
            reader.close()
    kept = [4 * (one - tokens[0]) / 2**20 for one in tokens]
    beyond = [one - ids for one, ids in zip(rss["gateway"], kept, strict=True)]
    return {
        "readers": size.readers,
        "readers_cut_off": cut_off,
        "readers_that_finished": finished,  # must be none: who has all is slow no more
        "bytes_taken_per_reader": round(taken / size.readers),
        "token_ids_kept_mib": round(kept[-1], 2),  # while watched
        "growth_beyond_token_ids_mib": _grown(idle["gateway"], times, beyond)["growth"],
        **{f"{name}_rss_mib": _grown(idle[name], times, rss[name]) for name in watched},
    }


def _grown(idle: float, times: list[float], rss: list[float]) -> dict[str, float]:
    slope, _ = statistics.linear_regression(times, rss)
    third = max(1, len(rss) // 3)
    first, last = statistics.median(rss[:third]), statistics.median(rss[-third:])
    return {
        "before": idle,
        "first_third": first,
        "last_third": last,
        "most": max(rss),
        "growth": round(last - first, 2),
        "slope_mib_per_min": round(60 * slope, 3),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
