"""Plug-ins in real planner processes: what they do wrong stays in their own process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from planner_harness import Worker, comes_true, dialled, report, running_planner
from plugin_packages import install_bad, install_broken, install_example
from processes import Command, alive, eventually
from structlog.testing import capture_logs

from nightjar.v1 import planner_pb2 as pb
from planner_service.policies import BUILT_IN, off

LIMIT_MS = 30  # generous: what is tested must not hang on how busy this machine is


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example and a bad package installed."""
    target = tmp_path_factory.mktemp("plugins") / "installed"
    install_example(target)
    install_bad(target)
    return target


@contextlib.contextmanager
def planner(packages: Path, *flags: str) -> Iterator[tuple[Command, str]]:
    """A planner process that finds these packages, and its address."""
    environ = {"PYTHONPATH": str(packages)}
    limit = f"--plugin-timeout-ms={LIMIT_MS}"
    command = Command("-m", "nightjar", "planner", "--policy=fixed", limit, *flags, environ=environ)
    with command:
        command.shows("listening on ")
        yield command, command.stdout.split("listening on ")[1].split()[0]


class Shared(NamedTuple):
    """A planner that several tests use; each has workers of its own."""

    command: Command
    address: str


@pytest.fixture(scope="module")
def shared(packages: Path) -> Iterator[Shared]:
    """A planner process with both packages."""
    with planner(packages, "--probe-share=0") as (command, address):
        yield Shared(command, address)


async def activate(stub: Any, name: str, *workers: str, **parameters: str) -> str:
    """Make a version for some workers; its id."""
    scope = pb.PolicyScope(worker_ids=workers)
    request = pb.ActivatePolicyRequest(name=name, parameters=parameters, scope=scope)
    return str((await stub.ActivatePolicy(request)).version.version)


async def num_faults(stub: Any) -> int:
    """Faults that the planner counts."""
    state = await stub.GetPolicyState(pb.GetPolicyStateRequest())
    return int(state.num_policy_faults)


async def run(worker: Worker, batch_size: int = 2) -> pb.Decision:
    """Run one step of the decision and ask again."""
    done = report(worker.gamma, batch_size, 1, decision_id=worker.decision.decision_id)
    return await worker.ask(batch_size, done)


def itself(worker: Worker) -> bool:
    """Whether the plug-in answered; while it is away the hold is 8, its own is 16."""
    return worker.decision.hold_steps > 8 or worker.decision.decision_id.endswith("-probe")


async def test_the_example_decides_learns_and_is_listed(shared: Shared) -> None:
    """Installed with pip, it is there after a start; it follows the acceptance by its own sums."""
    async with dialled(shared.address) as stub:
        listed = await stub.ListPolicies(pb.ListPoliciesRequest())
        policies = {policy.name: policy for policy in listed.policies}
        assert policies["patience"].summary.endswith("(plug-in of nightjar-patience 0.1.0)")
        assert [p.name for p in policies["patience"].parameters] == ["start", "target"]
        worker = Worker(stub, "a")
        await worker.ask(2, hello=True)
        version = await activate(stub, "patience", "a", target="0.4")
        await worker.next()

        async def grown() -> bool:
            for _ in range(20):
                await run(worker)
            assert worker.decision.policy_version == version == "2-patience"
            return worker.gamma == 5

        await comes_true(grown)
        with pytest.raises(grpc.aio.AioRpcError, match="a whole number in"):
            await activate(stub, "patience", start="99")
        assert await num_faults(stub) == 0
    assert shared.command.stdout.splitlines() == [f"listening on {shared.address}"]


async def test_bad_plugins_are_refused_in_their_trial(shared: Shared) -> None:
    """The sentence says what it did; the version that decides stays."""
    async with dialled(shared.address) as stub:
        for fault, words in (
            ("negative", "gamma -1 is not a whole number in"),
            ("far", "gamma 1000000 is not a whole number in"),
            ("hangs", "gave no answer within 0.6 s"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await activate(stub, "bad", "b", fault=fault, when="always")
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "'bad' was tried and refused" in str(caught.value.details())
            assert words in str(caught.value.details())
        with pytest.raises(grpc.aio.AioRpcError, match="raised SystemExit"):
            await activate(stub, "bad", "b", fault="leaves", when="made")
        worker = Worker(stub, "b")
        assert (await worker.ask(2, hello=True)).policy_version == "1-fixed"
        assert await num_faults(stub) == 0


LATER = [
    ("raises", "raised ArithmeticError: it was asked to"),
    ("nan", "gamma nan is not a whole number in [0, 5]"),
    ("hangs", "gave no answer within 0.6 s"),
    ("slow", "took longer than 30 ms too often"),
    ("exits", "ended the process of the plug-ins"),
    ("object", "answered what cannot be sent"),
]


async def test_a_plugin_that_turns_bad_is_rolled_back_and_others_go_on(shared: Shared) -> None:
    """No stream breaks, none waits long, the reason is kept, and the good plug-in comes back."""
    async with dialled(shared.address) as stub:
        good_version = await activate(stub, "patience", "a")
        good, bad = Worker(stub, "a"), Worker(stub, "b")
        await good.ask(2, hello=True)
        await bad.ask(2, hello=True)

        async def both_answer() -> bool:
            await run(good)
            await run(bad)
            return itself(good) and itself(bad)

        for number, (fault, words) in enumerate(LATER):
            version = await activate(stub, "bad", "b", fault=fault)
            assert (await bad.next()).policy_version == version
            await comes_true(both_answer)
            started, slowest = time.monotonic(), 0.0
            while bad.decision.policy_version == version:
                assert time.monotonic() < started + 15, fault
                before = time.monotonic()
                await run(bad, 13)
                slowest = max(slowest, time.monotonic() - before)
                assert good.decision.policy_version == good_version
                await run(good)
            assert bad.decision.policy_version == "1-fixed"
            assert slowest < 1, fault
            listed = await stub.ListPolicies(pb.ListPoliciesRequest())
            gone = listed.versions[0]
            assert (gone.version, gone.active) == (version, False)
            assert words in gone.withdrawn_because, fault
            assert gone.withdrawn_at_ms > 0
            assert await num_faults(stub) == number + 1
        await comes_true(lambda: _answers(good))
        assert good.decision.policy_version == good_version
    eventually(lambda: len(shared.command.children()) == 1, "one process of plug-ins is left")


async def test_a_killed_host_comes_back_and_nobody_is_blamed(shared: Shared) -> None:
    """Kill -9 between two calls: decisions go on under the same version, from a new process."""
    command = shared.command
    async with dialled(shared.address) as stub:
        faults = await num_faults(stub)
        version = await activate(stub, "patience", "c")
        worker = Worker(stub, "c")
        await worker.ask(2, hello=True)

        async def answers() -> bool:
            await run(worker)
            assert worker.decision.policy_version == version
            return itself(worker)

        for _ in range(2):
            await comes_true(answers)
            (host,) = command.children()
            os.kill(host, signal.SIGKILL)
            eventually(lambda host=host: not alive(host), "the host is gone")
            assert not (await answers())
        await comes_true(answers)
        assert command.children() != [host]
        assert await num_faults(stub) == faults
        command.shows("it is started again", times=2)


async def test_a_host_ends_with_its_planner_whatever_it_does(packages: Path) -> None:
    """Kill -9 of the planner while a plug-in spins for ever leaves nothing behind."""
    with planner(packages) as (command, address):
        async with dialled(address) as stub:
            await activate(stub, "bad", fault="hangs")
            worker = Worker(stub)
            await worker.ask(2, hello=True)
            await comes_true(lambda: _answers(worker))
            (host,) = command.children()
            await worker.ask(13)
            command.signal(signal.SIGKILL)
            eventually(lambda: not alive(host), "the host is gone", 5)


async def _answers(worker: Worker) -> bool:
    await run(worker)
    return itself(worker)


async def test_broken_entry_points_are_said_and_left_out(tmp_path: Path) -> None:
    """Import errors, exits while importing, other objects, taken and wrong names: never fatal."""
    install_bad(tmp_path)
    names = install_broken(tmp_path)
    with planner(tmp_path) as (command, address):
        async with dialled(address) as stub:
            listed = await stub.ListPolicies(pb.ListPoliciesRequest())
            plugins = [p.name for p in listed.policies if "plug-in of" in p.summary]
            assert plugins == ["bad"]
            worker = Worker(stub)
            assert (await worker.ask(hello=True)).policy_version == "1-fixed"
            await activate(stub, "bad")
            await worker.next()
            await comes_true(lambda: _answers(worker))
        command.shows("plug-in left out", times=len(names))
        for name in names:
            assert f": {name}'" in command.stderr
        assert "plug-ins of a package left out" in command.stderr
        assert "package=unreadable" in command.stderr
        assert "a library is missing" in command.stderr
        assert "there is another policy 'off'" in command.stderr


async def test_a_version_of_a_package_that_is_gone_is_left_out(store: str) -> None:
    """A planner without it goes on with the version below, and says so."""
    registry = {**BUILT_IN, "gone": dataclasses.replace(off.SPEC, name="gone")}
    async with running_planner(registry, store=store, policy="fixed") as stub:
        assert await activate(stub, "gone") == "2-gone"
    with capture_logs() as lines:
        async with running_planner(store=store, policy="fixed") as stub:
            worker = Worker(stub)
            assert (await worker.ask(hello=True)).policy_version == "1-fixed"
    assert any(line["event"].startswith("version left out") for line in lines)
