"""Swaps under load, a planner process over a real store: no stream breaks, no worker notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from planner_harness import Worker, comes_true, dialled, gamma_of, report
from processes import Command

from nightjar.v1 import planner_pb2 as pb
from planner_service.ledger import Ledger
from planner_service.planner import Planner
from planner_service.policies import BUILT_IN
from planner_service.store import RedisStore, connect
from planner_service.sync import Sync
from planner_service.versions import EVERYONE, Book

NUM_STREAMS = 8


@contextlib.contextmanager
def planner(*flags: str) -> Iterator[str]:
    """A planner process; its address."""
    with Command("-m", "nightjar", "planner", *flags) as command:
        command.shows("listening on ")
        yield command.stdout.split("listening on ")[1].split()[0]


class Load:
    """A worker that runs steps and asks without end, and notes what it was told."""

    def __init__(self, stub: Any, number: int) -> None:
        self.worker = Worker(stub, f"worker-{number}")
        self.size = 1 + number % 4
        self.steps: Counter[str] = Counter()
        self.version = ""

    async def run(self) -> None:
        """Until cancelled; a stream that breaks raises."""
        worker = self.worker
        await worker.ask(self.size, hello=True)
        while True:
            decision = worker.decision
            self.version = decision.policy_version
            self.steps[self.version] += decision.hold_steps
            gamma = gamma_of(decision)
            assert 0 <= gamma <= 5
            done = report(gamma, self.size, decision.hold_steps, decision_id=decision.decision_id)
            await worker.ask(self.size, done)
            while worker.decision.policy_version != self.version:
                # This one was pushed by the swap; the answer is still to come.
                self.version = worker.decision.policy_version
                await worker.next()


async def test_swaps_under_load_break_nothing(store: str) -> None:
    """Twenty swaps with eight streams asking: each is in use everywhere at once, none is lost."""
    with planner("--store", store, "--policy", "off") as address:
        async with dialled(address) as stub:
            loads = [Load(stub, number) for number in range(NUM_STREAMS)]
            running = [asyncio.create_task(load.run()) for load in loads]
            try:
                for number in range(2, 22):
                    name = ("fixed", "nightjar", "off")[number % 3]
                    answer = await stub.ActivatePolicy(pb.ActivatePolicyRequest(name=name))
                    version = f"{number}-{name}"
                    assert answer.version.version == version

                    async def everywhere(version: str = version) -> bool:
                        assert not any(task.done() for task in running)
                        return all(load.version == version for load in loads)

                    await comes_true(everywhere, timeout_s=5)
            finally:
                for task in running:
                    task.cancel()
                ended = await asyncio.gather(*running, return_exceptions=True)
            assert {type(error) for error in ended} == {asyncio.CancelledError}
            state = await stub.GetPolicyState(pb.GetPolicyStateRequest())
            assert state.num_policy_faults == 0


async def run_policy(*arguments: str) -> tuple[int, str, str]:
    """Run `nightjar policy`; returns status, standard output, standard error."""

    def run() -> tuple[int, str, str]:
        with Command("-m", "nightjar", "policy", *arguments) as command:
            return command.wait(), command.stdout, command.stderr

    return await asyncio.to_thread(run)


async def test_the_command_makes_canaries_with_a_floor_and_tells_the_history(store: str) -> None:
    """A canary that does not pay goes by itself, and the history says when and why."""
    flags = ("--store", store, "--policy", "off", "--probe-share", "0.2")
    with planner(*flags) as address:
        async with dialled(address) as stub:
            worker = Worker(stub)
            await worker.ask(1, hello=True)
            canary = ("activate", "fixed", "--canary", "0.5", "--planner", address)
            status, out, err = await run_policy(*canary, "--min-net-benefit=0", "--for=300ms")
            assert (status, err) == (0, "")
            assert "2-fixed        gamma=3  for 0.5 of the steps" in out
            assert "floor +0.0% for 0.3 s" in out
            gone: list[Any] = []
            async with asyncio.timeout(30):
                while not gone:
                    for _ in range(50):
                        decision, gamma = worker.decision, worker.gamma
                        slow = {"step_us": 10**7} if gamma else {}
                        slow["decision_id"] = decision.decision_id
                        await worker.ask(1, report(gamma, 1, decision.hold_steps, **slow))
                    listed = await stub.ListPolicies(pb.ListPoliciesRequest())
                    gone = [v for v in listed.versions if v.withdrawn_at_ms]
            status, out, _ = await run_policy("history", "--planner", address)
            assert status == 0
            assert "  2-fixed" in out
            assert "    withdrawn 20" in out
            assert "stayed below its floor of +0.0%" in out
            assert "* 1-off" in out
            status, out, _ = await run_policy("history", "--json", "--planner", address)
            shown = json.loads(out)["versions"]
            assert [v["version"] for v in shown] == ["2-fixed", "1-off"]
            assert shown[0]["floor"] == {"min_net_benefit": 0.0, "for_s": 0.3}
            status, out, _ = await run_policy("state", "--planner", address)
            assert "net benefit against plain decoding -" in out


async def test_a_planner_that_is_told_of_a_swap_as_it_stops_still_stops(store: str) -> None:
    """Whatever it is in the middle of, the end is not missed."""
    planner = Planner(
        registry=BUILT_IN,
        ledger=Ledger(stored=True),
        incarnation="i",
        rng=random.Random(0),
        clock=time.monotonic,
    )
    first = Book().activate("off", {}, EVERYONE, 0, "default")
    sync = Sync(planner, RedisStore(connect(store), "i"), first=first, clock=time.monotonic)
    await sync.start()
    for num_turns in range(40):
        running = asyncio.create_task(sync.run())
        for _ in range(num_turns):
            await asyncio.sleep(0.0005 if num_turns % 2 else 0)
        sync.withdraw("9-none", "", 0)
        await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=5)
        assert done
    await sync.finish()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--canary", "1.5"), "does not lie between 0 and 1"),
        (("--canary", "nan"), "does not lie between 0 and 1"),
        (("--min-net-benefit", "-0.05"), "a floor needs both"),
        (("--min-net-benefit", "0", "--for", "60"), "is no time like"),
    ],
)
async def test_the_command_refuses_what_it_cannot_mean(
    arguments: tuple[str, ...], words: str
) -> None:
    """Status 2, with a sentence, before anything is asked of a planner."""
    activate = ("activate", "fixed", "--planner", "127.0.0.1:1")
    status, _, err = await run_policy(*activate, *arguments)
    assert (status, words in err) == (2, True), err
