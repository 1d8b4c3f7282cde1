"""What operators do to the running system: swap policies, lose processes, stop it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from processes import alive, eventually, shared_memory_files
from whole_system import START_TIMEOUT_S, Start, System

from nightjar.v1 import generation_pb2 as pb


class Load:
    """Requests that follow each other until the end of the block; failures end the test."""

    def __init__(self, system: System) -> None:
        self.answers: list[tuple[str, pb.Usage]] = []
        self.failures: list[Exception] = []
        self._system, self._stopped = system, threading.Event()

    def run(self, text: str) -> None:
        """Ask again and again."""
        while not self._stopped.is_set():
            try:
                self.answers.append(self._system.generate(text))
            except Exception as error:
                self.failures.append(error)
                return

    def more(self, number: int) -> None:
        """Wait for so many further answers."""
        enough = len(self.answers) + number
        eventually(lambda: len(self.answers) >= enough or bool(self.failures), "answers", 90)

    def stop(self) -> None:
        """No further requests."""
        self._stopped.set()


@contextmanager
def load(system: System) -> Iterator[Load]:
    """Two clients that stream without a pause."""
    running = Load(system)
    clients = [threading.Thread(target=running.run, args=(text,)) for text in ("one", "two")]
    for client in clients:
        client.start()
    try:
        yield running
    finally:
        running.stop()
        for client in clients:
            client.join(90)
    assert not running.failures


def test_a_policy_is_swapped_while_requests_stream(system: System) -> None:
    """The next answers report the new gamma; the worker's processes and every request live on."""
    before = system.status()
    with load(system) as running:
        running.more(2)
        told = system.nightjar("policy", "activate", "fixed", "--param", "gamma=2")
        assert "fixed" in told
        fixed = lambda: running.answers[-1][1].policy_version.endswith("-fixed")  # noqa: E731
        eventually(fixed, "an answer under the new policy", 60)
        running.more(4)  # those that began under the old policy are out
        first = len(running.answers)
        running.more(4)
        for _, usage in running.answers[first:]:
            assert usage.policy_version.endswith("-fixed")
            assert usage.gamma_histogram[2] > 0
            assert not any(usage.gamma_histogram[3:])
    after = system.status()
    assert (before.pid, before.engine_pid) == (after.pid, after.engine_pid)
    assert "nightjar" in system.nightjar("policy", "rollback")


def test_killing_the_planner_changes_nothing_a_client_sees(system: System) -> None:
    """Answers stay the same to the character while it is away; it comes back and decides again."""
    system.nightjar("policy", "activate", "fixed", "--param", "gamma=1")
    expected = {text: system.generate(text)[0] for text in ("one", "two")}
    restarts = system.stderr.count("planner ended (SIGKILL); starting it again")
    with load(system) as running:
        running.more(2)
        os.kill(system.pid_of("planner"), signal.SIGKILL)
        again = "planner ended (SIGKILL); starting it again"
        eventually(lambda: system.stderr.count(again) > restarts, "the message")
        running.more(2)
        eventually(lambda: system.status().planner_connected, "the worker finds it again")
        version = lambda: system.generate("three")[1].policy_version  # noqa: E731
        eventually(lambda: version().endswith("-fixed"), "its version outlives it")
        running.more(2)
    assert {text for text, _ in running.answers} == set(expected.values())


def test_a_killed_agent_and_gateway_come_back_where_they_were(system: System) -> None:
    """Clients reconnect to the same address, and the worker attaches to the new agent."""
    addresses = system.addresses
    for service in ("memory-agent", "gateway"):
        pid = system.pid_of(service)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: system.pid_of(service) not in (0, pid), f"a new {service}")  # noqa: B023
    everyone = [addresses["memory_agents"], addresses["gateway_grpc"]]
    system.nightjar("healthcheck", "--wait=60", *everyone)
    assert system.addresses == addresses
    eventually(lambda: system.status().draft.agent_attached, "the worker attaches", 60)
    assert system.generate("one")[1].num_completion_tokens == 32


def test_a_killed_engine_is_replaced(system: System) -> None:
    """Its worker ends with it, is started again at the same address, and answers as before."""
    expected = system.generate("one")[0]
    before = system.status()
    os.kill(before.engine_pid, signal.SIGKILL)
    eventually(lambda: not alive(before.pid), "the worker ends")
    line = "worker-0 ended (exit status 1); starting it again"
    eventually(lambda: line in system.stderr, "it is started again")
    everyone = [system.addresses["workers"], system.addresses["gateway_grpc"]]
    eventually(lambda: system.pid_of("worker") not in (0, before.pid), "a new worker")
    system.nightjar("healthcheck", f"--wait={START_TIMEOUT_S}", *everyone)
    assert system.generate("one")[0] == expected
    files = shared_memory_files(system.folder / "shm")
    assert files
    assert not [path for path in files if f"-{before.engine_pid}-" in path]


def test_ctrl_c_leaves_nothing(start: Start, flags: tuple[str, ...]) -> None:
    """No process, no file in shared memory, no socket, no note; what was learned stays."""
    system = start(*flags).ready()
    assert system.generate("one")[1].num_completion_tokens == 32
    family = system.children()
    assert len(family) >= 6
    system.signal(signal.SIGINT)
    assert system.wait() == 0
    assert not [pid for pid in family if alive(pid)]
    assert not list((system.folder / "shm").iterdir())
    left = {path.name for path in (system.folder / "run").iterdir()}
    assert left == {"lock", "store.log", "appendonlydir"}


def test_a_killed_supervisor_leaves_no_process(start: Start, flags: tuple[str, ...]) -> None:
    """Killed while the model loads: every process ends by itself, and the pool's files go."""
    system = start(*flags)
    system.shows("pool", START_TIMEOUT_S)
    family = system.children()
    assert len(family) >= 6
    system.signal(signal.SIGKILL)
    eventually(lambda: not any(alive(pid) for pid in family), "every process ends", 60)
    assert not shared_memory_files(system.folder / "shm")


def test_a_taken_port_is_a_clear_error(start: Start, flags: tuple[str, ...]) -> None:
    """The message names flag and address; everything that had been started is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        system = start(f"--http-listen={address}", *flags[1:])
        assert system.wait(START_TIMEOUT_S) != 0
    assert f"--http-listen='{address}'" in system.stderr
    assert "gateway ended (exit status 2) before the system was ready" in system.stderr
    assert not system.children()


def test_one_run_folder_serves_one_system(system: System, flags: tuple[str, ...]) -> None:
    """A second `nightjar up` on the same folder is refused; the first is not disturbed."""
    second = System.__new__(System)
    super(System, second).__init__(
        "-m", "nightjar", "up", *flags, environ={"NIGHTJAR_RUN_DIR": str(system.folder / "run")}
    )
    with second:
        assert second.wait() == 2
    assert "another `nightjar up` uses it" in second.stderr
    assert system.generate("one")[1].num_completion_tokens == 32
