"""Real planner processes over a real store: nothing learned is lost, replicas learn together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from planner_harness import (
    Worker,
    comes_true,
    dialled,
    in_store,
    num_steps,
    planner,
    report,
    state,
    stored,
)
from processes import Command
from store_server import StoreServer

from nightjar.v1 import planner_pb2 as pb


async def test_a_killed_planner_remembers(store: str) -> None:
    """Kill -9, start again: the sums, the version and its history are those of before."""
    with planner(store) as (command, address):
        async with dialled(address) as stub:
            worker = Worker(stub)
            await worker.ask(3, hello=True)
            for _ in range(50):
                await worker.ask(3, report(2, 3, 4))
            await stub.ActivatePolicy(pb.ActivatePolicyRequest(name="fixed"))
            await stored(stub, 200)
            before = await state(stub)
        command.signal(signal.SIGKILL)
        command.wait()
    with planner(store, "--policy", "off") as (_, address):
        async with dialled(address) as stub:
            after = await state(stub)
            assert after.store_connected
            assert after.version.version == "2-fixed"
            for known in after.profiles:
                assert known.num_prior_steps == 200
                known.num_prior_steps = 0
            assert after.profiles == before.profiles
            listed = await stub.ListPolicies(pb.ListPoliciesRequest())
            assert [v.version for v in listed.versions] == ["2-fixed", "1-nightjar"]
            answer = await stub.RollbackPolicy(pb.RollbackPolicyRequest())
            assert answer.version.version == "1-nightjar"
            worker = Worker(stub)
            decision = await worker.ask(3, hello=True)
            assert {row.bucket for row in decision.table} == {3}
    assert in_store(store) == 200


async def test_a_planner_told_to_stop_writes_what_it_knows(store: str) -> None:
    """SIGTERM ends streams, flushes and exits 0; only the address was said on standard output."""
    with planner(store) as (command, address):
        async with dialled(address) as stub:
            worker = Worker(stub)
            await worker.ask(1, hello=True)
            await worker.ask(1, report(0, 1, 77))
            command.signal(signal.SIGTERM)
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await worker.stream.read() == grpc.aio.EOF
        started = time.monotonic()
        assert command.wait() == 0
        assert time.monotonic() - started < 5
        assert command.stdout.splitlines() == [f"listening on {address}"]
    assert in_store(store) == 77


async def test_replicas_learn_from_each_other_and_swap_together(store: str) -> None:
    """Sums merge both ways, and a version activated at one decides at the other soon after."""
    with planner(store) as (_, first), planner(store) as (_, second):
        async with dialled(first) as one, dialled(second) as two:
            workers = [Worker(one, "worker-1"), Worker(two, "worker-2")]
            for worker in workers:
                await worker.ask(1, hello=True)
            for worker in workers * 20:
                await worker.ask(1, report(0, 1, 3))
            for stub in (one, two):
                await stored(stub, 120)
            shown = [(await state(stub)).profiles[0] for stub in (one, two)]
            for known in shown:
                assert known.num_prior_steps <= 60  # who came second may find what the first wrote
                known.num_prior_steps = 0
            assert shown[0] == shown[1]
            await one.ActivatePolicy(pb.ActivatePolicyRequest(name="off"))
            started = time.monotonic()
            for worker in workers:
                assert (await worker.next()).policy_version == "2-off"
            assert time.monotonic() - started < 5
            answers = [
                stub.ActivatePolicy(pb.ActivatePolicyRequest(name="fixed")) for stub in (one, two)
            ]
            versions = {(await answer).version.version for answer in answers}
            assert versions == {"3-fixed", "4-fixed"}

            async def agree() -> bool:
                shown = {(await state(stub)).version.version for stub in (one, two)}
                return shown == {"4-fixed"}

            await comes_true(agree)
    assert in_store(store) == 120


async def test_decisions_go_on_while_the_store_is_away(store_server: StoreServer) -> None:
    """No answer waits for it; a swap works; when it is back, everything is in it once."""
    with planner(store_server.url) as (command, address):
        async with dialled(address) as stub:
            worker, taught = Worker(stub), 0
            await worker.ask(1, hello=True)

            async def teach(times: int) -> float:
                nonlocal taught
                slowest = 0.0
                for _ in range(times):
                    started = time.monotonic()
                    await worker.ask(1, report(1, 1, 2))
                    slowest, taught = max(slowest, time.monotonic() - started), taught + 2
                return slowest

            await teach(20)
            await stored(stub, taught)
            assert store_server.process is not None
            store_server.process.send_signal(signal.SIGSTOP)
            assert await teach(20) < 1.5
            await comes_true(lambda: _lags(stub))
            store_server.process.send_signal(signal.SIGCONT)
            await stored(stub, taught)
            store_server.kill()
            assert await teach(20) < 1.5
            await comes_true(lambda: _away(stub))
            answer = await stub.ActivatePolicy(pb.ActivatePolicyRequest(name="fixed"))
            assert (await worker.next()).policy_version == answer.version.version == "2-fixed"
            store_server.start()
            await stored(stub, taught)
            with redis.Redis.from_url(store_server.url) as raw:
                raw.script_flush()
            await teach(5)
            await stored(stub, taught)
            command.shows("the store is away", times=1)
        assert in_store(store_server.url) == taught
        with redis.Redis.from_url(store_server.url, decode_responses=True) as raw:
            book = json.loads(raw.hget("nightjar:policy", "book"))
        assert [(v["number"], v["name"]) for v in book["versions"]] == [
            (1, "nightjar"),
            (2, "fixed"),
        ]


async def _away(stub: Any) -> bool:
    return not (await state(stub)).store_connected


async def _lags(stub: Any) -> bool:
    return (await state(stub)).store_lag_ms > 500


async def test_a_planner_starts_without_its_store_and_finds_it_later() -> None:
    """It decides from memory and says so; what it learned meanwhile is then stored."""
    server = StoreServer()
    with planner(server.url) as (command, address):
        command.shows("the store is away; decisions go on from memory")
        async with dialled(address) as stub:
            worker = Worker(stub)
            assert (await worker.ask(1, hello=True)).policy_version == "1-nightjar"
            await worker.ask(1, report(0, 1, 5))
            assert not (await state(stub)).store_connected
            server.start()
            try:
                await stored(stub, 5)
                assert in_store(server.url) == 5
            finally:
                server.close()


async def test_a_store_that_comes_back_empty_is_given_what_a_planner_knows(store: str) -> None:
    """Versions, and the sums that it confirmed lately; the planner itself forgets nothing."""
    with planner(store) as (command, address):
        async with dialled(address) as stub:
            worker = Worker(stub)
            await worker.ask(1, hello=True)
            for _ in range(5):
                await worker.ask(1, report(0, 1, 10))
                await stored(stub, 10 * (1 + _))
            with redis.Redis.from_url(store) as raw:
                raw.flushall()
                command.shows("the store lost what it had confirmed", timeout_s=10)
                assert await num_steps(stub) == 50
                await comes_true(lambda: asyncio.to_thread(raw.exists, "nightjar:policy"))
                await comes_true(lambda: asyncio.to_thread(lambda: in_store(store) == 50))
                await comes_true(lambda: asyncio.to_thread(raw.exists, "nightjar:profiles"))
            assert (await state(stub)).version.version == "1-nightjar"
            assert await num_steps(stub) == 50


async def test_a_store_full_of_rubbish_stops_nothing(store: str) -> None:
    """Values of other programs under our names are left out, said, and replaced where possible."""
    with redis.Redis.from_url(store) as raw:
        raw.hset("nightjar:policy", mapping={"book": "[1,2", "revision": "7"})
        raw.sadd("nightjar:profiles", "x", "y")
        raw.set("nightjar:{x}:profile", '{"target": 7}')
        raw.set("nightjar:{y}:profile", "\xff")
    with planner(store) as (command, address):
        async with dialled(address) as stub:
            worker = Worker(stub)
            assert (await worker.ask(1, hello=True)).policy_version == "1-nightjar"
            await worker.ask(1, report(0, 1, 5))
            await stored(stub, 5)
            command.shows("the store's versions are unreadable")
            await stub.ActivatePolicy(pb.ActivatePolicyRequest(name="off"))
            assert (await worker.next()).policy_version == "2-off"


@pytest.mark.parametrize("flags", [["--policy", "nope"], ["--store", "x"], ["--gamma-max", "9"]])
def test_bad_flags_exit_with_status_2(flags: list[str]) -> None:
    """The sentence is on standard error, and nothing on standard output."""
    with Command("-m", "nightjar", "planner", *flags) as command:
        assert command.wait() == 2
        assert command.stdout == ""
        assert flags[0] in command.stderr


def policy(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """Run `nightjar policy`; returns status, standard output, standard error."""
    with Command("-m", "nightjar", "policy", *arguments, environ=environ) as command:
        return command.wait(), command.stdout, command.stderr


async def test_the_policy_command_against_a_real_planner(store: str, tmp_path: Path) -> None:
    """List, activate, state and rollback work, by flag, by variable and by the address file."""
    with planner(store) as (_, address):
        (tmp_path / "addresses.json").write_text(json.dumps({"planner": address}))
        here = {"NIGHTJAR_RUN_DIR": str(tmp_path), "NIGHTJAR_PLANNER": ""}

        async def run(*arguments: str, **environ: str) -> tuple[int, str, str]:
            return await asyncio.to_thread(policy, *arguments, **{**here, **environ})

        async with dialled(address) as stub:
            worker = Worker(stub)
            await worker.ask(4, hello=True)
            await worker.ask(4, report(2, 4, 3))
            status, out, _ = await run("activate", "fixed", "--param", "gamma=2")
            assert (status, "2-fixed" in out, "gamma=2" in out) == (0, True, True)
            assert (await worker.next()).policy_version == "2-fixed"
            status, out, _ = await run("list", NIGHTJAR_PLANNER=address)
            assert status == 0
            assert "* 2-fixed" in out
            assert "gamma=3: draft tokens per row and step (a whole number in [0, 8])" in out
            status, out, _ = await run("state", "--planner", address)
            assert status == 0
            assert "target, draft draft (draft_model)" in out
            assert "1.00" in out or "2.00" in out
            status, out, _ = await run("state", "--json")
            shown = json.loads(out)
            assert shown["version"]["version"] == "2-fixed"
            assert shown["profiles"][0]["arms"][0]["bucket"] == 4
            key = shown["profiles"][0]["profile_key"]
            scope = ("--profile", key, "--worker", "worker-1")
            status, out, _ = await run("activate", "off", *scope, "--json")
            assert json.loads(out)["version"]["scope"]["worker_ids"] == ["worker-1"]
            assert (await worker.next()).policy_version == "3-off"
            assert (await run("rollback", *scope))[0] == 0
            assert (await worker.next()).policy_version == "2-fixed"
            for arguments, status, words in (
                (("activate", "fixed", "--param", "gamma=99"), 1, "parameters.gamma: must be"),
                (("activate", "nope"), 1, "unknown policy 'nope'"),
                (("activate", "fixed", "--param", "gamma"), 2, "NAME=VALUE"),
                (("rollback", "--profile", "p0"), 1, "no profile 'p0'"),
                (("rollback", *scope), 1, "exactly this scope"),
                (("state", "--planner", "127.0.0.1:1"), 1, "no planner answers at 127.0.0.1:1"),
            ):
                got, _, err = await run(*arguments)
                assert (got, words in err) == (status, True), err


def test_the_policy_command_says_where_a_planner_is_looked_for(tmp_path: Path) -> None:
    """Without an address it exits with a sentence; its help teaches with examples."""
    here = {"NIGHTJAR_RUN_DIR": str(tmp_path), "NIGHTJAR_PLANNER": ""}
    status, _, err = policy("state", **here)
    assert (status, "nightjar up" in err) == (2, True)
    (tmp_path / "addresses.json").write_text("{")
    status, _, err = policy("state", **here)
    assert (status, "addresses.json" in err) == (2, True)
    status, out, _ = policy("--help")
    assert (status, "nightjar policy activate fixed --param gamma=2" in out) == (0, True)
