"""Replicas over one store, as real processes: what any of them learned counts once, everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from typing import Any

import pytest
import redis
import remembering_planner
from planner_harness import (
    Chatter,
    Worker,
    comes_true,
    context,
    dialled,
    in_store,
    planner,
    report,
    state,
    stored,
)
from store_proxy import StoreProxy
from store_server import StoreServer

from nightjar.v1 import planner_pb2 as pb
from planner_service.own_sums import OwnSums

REMEMBERING = (remembering_planner.__file__,)
NUM_PLANNERS, NUM_STREAMS, NUM_ASKS = 3, 3, 200


def groups(url: str) -> dict[str, dict[str, str]]:
    """Sums of the store by kind of group: "p", one profile's, and "a", the models'."""
    with redis.Redis.from_url(url, decode_responses=True) as raw:
        keys = list(raw.scan_iter("nightjar:*:sums"))
        found = {key.partition("{")[2][0]: raw.hgetall(key) for key in keys}
    assert len(found) == len(keys)
    return found


async def test_concurrent_updates_of_three_replicas_merge_without_loss(store: str) -> None:
    """Sums in the store and in every replica are what all streams sent, to the unit."""
    sent: Counter[str] = Counter()
    kept: list[tuple[float, float]] = []  # clock, value

    async def teach(stub: Any, seed: int) -> None:
        rng, worker = random.Random(seed), Worker(stub, f"worker-{seed}")
        await worker.ask(hello=True)
        for _ in range(NUM_ASKS):
            gamma, size, steps = rng.randint(0, 4), rng.randint(1, 3), rng.randint(1, 5)
            ran = context(size, num_kv_tokens=rng.randint(0, 1000))
            value = rng.randint(1, 10**6)
            message = report(gamma, size, steps, context=ran, num_prefill_tokens=value)
            await worker.ask(size, message)
            kept.append((ran.num_kv_tokens, value))
            sent["total:steps"] += steps
            sent["total:emitted"] += message.num_emitted
            for name in ("step_us", "num_timed_rows", "num_timed_emitted"):
                part = name.removeprefix("num_timed_")
                sent[f"arm:{size}:{gamma}:{part}"] += getattr(message, name)
            for i in range(gamma):
                sent[f"reached:{i}"] += message.reached[i]
                sent[f"accepted:{i}"] += message.accepted[i]

    async with contextlib.AsyncExitStack() as stack:
        stubs = []
        for _ in range(NUM_PLANNERS):
            _, address = stack.enter_context(planner(store, argv=REMEMBERING))
            stubs.append(await stack.enter_async_context(dialled(address)))
        streams = [teach(stubs[i % NUM_PLANNERS], i) for i in range(NUM_PLANNERS * NUM_STREAMS)]
        await asyncio.gather(*streams)
        for stub in stubs:
            await stored(stub, sent["total:steps"])
        found = groups(store)
        profile, models = found["p"], found["a"]
        for name, value in sent.items():
            if value:
                assert float(profile[name]) == value, name
            if name.startswith(("reached", "accepted")):
                assert float(models[name]) == value, name
        plain = [float(word) for word in profile["own:inf:remembering/plain"].split()]
        assert plain == [0, len(kept), sum(value for _, value in kept)]
        at = max(clock for clock, _ in kept)
        expected = OwnSums((0.0, 0.0), remembering_planner.HALF_LIFE, at)
        for clock, value in kept:
            expected = expected.plus(OwnSums((1.0, value), remembering_planner.HALF_LIFE, clock))
        field = expected.field("remembering/forgets")
        forgets = [float(word) for word in profile[field].split()]
        assert forgets == pytest.approx([at, *expected.values], rel=1e-9)
        last = [float(word) for word in profile["latest:remembering/last"].split()]
        assert (last[1], last[0]) in kept
        shown = []
        for stub in stubs:
            (known,) = (await state(stub)).profiles
            known.num_prior_steps = 0
            shown.append(known)
        assert shown[0] == shown[1] == shown[2]


async def test_a_flush_that_is_sent_again_counts_once(store_server: StoreServer) -> None:
    """The store applies flushes whose answers are lost on the way: each still counts once."""
    async with StoreProxy(store_server.path).serving() as proxy:
        with planner(proxy.url) as (_, address):
            async with dialled(address) as stub, Chatter(stub).chatting() as chatter:
                for lost in (2, 4, 6):
                    taught, proxy.lose_answers = chatter.num_taught, 2
                    await comes_true(lambda n=lost: _value(proxy.num_lost >= n))
                    await comes_true(
                        lambda n=taught: asyncio.to_thread(_at_least, store_server.url, n)
                    )
            async with dialled(address) as stub:
                await stored(stub, chatter.num_taught)
                assert not (await state(stub)).num_dropped_updates
    assert in_store(store_server.url) == chatter.num_taught


async def _value(value: bool) -> bool:
    return value


def _at_least(url: str, steps: int) -> bool:
    return in_store(url) >= steps


async def test_a_killed_planner_loses_at_most_a_second(store: str) -> None:
    """Of what streams reported until the kill, the store holds all but the last second."""
    lost_s = []
    before = 0
    for enough in (150, 190):
        with planner(store) as (command, address):
            async with dialled(address) as stub:
                chatter = Chatter(stub)
                with contextlib.suppress(Exception):  # the stream breaks
                    async with chatter.chatting():
                        await comes_true(lambda c=chatter, n=enough: _value(len(c.taught) > n))
                        command.signal(signal.SIGKILL)
                        killed = time.monotonic()
                        command.wait()
        held = in_store(store) - before
        before += held
        missing = [when for when, steps in chatter.taught if steps > held]
        lost_s.append(killed - min(missing, default=killed))
        assert held > 0
    print("seconds of learning lost to a kill:", [round(lost, 3) for lost in lost_s])
    assert max(lost_s) <= 1.0


async def test_a_new_planner_starts_from_what_the_fleet_knows(store: str) -> None:
    """It reads the profile's sums, and takes acceptance of other profiles for prior only."""
    with planner(store) as (_, address):
        async with dialled(address) as stub:
            worker = Worker(stub, profile=_profile("here"))
            await worker.ask(3, hello=True)
            for _ in range(10):
                await worker.ask(3, report(2, 3, 4, reached=[12, 6], accepted=[6, 3]))
            await stored(stub, 40)
    with planner(store) as (_, address):
        async with dialled(address) as stub:
            (known,) = (await state(stub)).profiles
            assert (known.num_steps, known.num_prior_steps) == (40, 40)
            assert list(known.acceptance_by_position) == [0.5, 0.5]
            assert not known.prior_acceptance_by_position
            there = Worker(stub, profile=_profile("there"))
            await there.ask(3, hello=True)
            await there.ask(3, report(1, 3, 2, reached=[6], accepted=[6]))
            await stored(stub, 42)
            shown = {known.profile.device: known for known in (await state(stub)).profiles}
            assert (shown["there"].num_steps, shown["there"].num_prior_steps) == (2, 0)
            assert list(shown["there"].acceptance_by_position) == [1.0]
            assert list(shown["there"].prior_acceptance_by_position) == [0.5, 0.5]
            assert list(shown["here"].acceptance_by_position) == [0.5, 0.5]
            assert list(shown["here"].prior_acceptance_by_position) == [1.0]


def _profile(device: str) -> pb.Profile:
    return pb.Profile(
        target="t", draft="d", proposer="draft_model", device=device, tensor_parallel_size=1
    )
