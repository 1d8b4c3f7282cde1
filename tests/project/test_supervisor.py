"""The supervisor over small commands: order, addresses, restarts, and nothing left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import Command, alive, eventually

FAKE = str(Path(__file__).parent.parent / "support" / "fake_children.py")
Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the fake system; what is left of it is killed at the end."""
    running: list[Command] = []

    def run(kind: str = "plain") -> Command:
        running.append(Command(FAKE, str(tmp_path), kind))
        return running[-1]

    yield run
    for command in running:
        command.__exit__(None, None, None)


def starts(folder: Path, name: str) -> list[tuple[int, list[str]]]:
    """Pid and flags of each start of a child."""
    try:
        lines = (folder / f"{name}.starts").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(int(pid), flags.split()) for pid, _, flags in (line.partition(" ") for line in lines)]


def test_peers_get_the_addresses_that_children_chose(start: Start, tmp_path: Path) -> None:
    """A child is started with the addresses of its peers, and with its own where it is given."""
    start().shows("ready")
    first, second = (f"127.0.0.1:{starts(tmp_path, name)[0][0]}" for name in ("first", "second"))
    eventually(lambda: len(starts(tmp_path, "third")) == 1, "third writes its flags")
    assert starts(tmp_path, "second")[0][1] == ["--listen=127.0.0.1:0", f"--first={first}"]
    assert starts(tmp_path, "third")[0][1] == ["--listen=127.0.0.1:7", f"--both={first},{second}"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_in_reverse_order(start: Start, tmp_path: Path, number: int) -> None:
    """Children stop last to first, grandchildren end too, and the status is 0."""
    system = start()
    system.shows("ready")
    family = system.children()
    assert len(family) == 4
    system.signal(number)
    assert system.wait() == 0
    assert (tmp_path / "order").read_text().split() == ["third", "second", "first"]
    assert not [pid for pid in family if alive(pid)]


def test_a_killed_child_is_started_again_at_its_address(start: Start, tmp_path: Path) -> None:
    """The message names child and signal; its address stays, its leftovers go, others live on."""
    system = start()
    system.shows("ready")
    (pid, _), (other, _) = starts(tmp_path, "second")[0], starts(tmp_path, "first")[0]
    (tmp_path / "scratch" / "left").touch()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(starts(tmp_path, "second")) == 2, "second starts again")
    assert "second ended (SIGKILL); starting it again in 0.5 s" in system.stderr
    new_pid, flags = starts(tmp_path, "second")[1]
    assert f"--listen=127.0.0.1:{pid}" in flags
    assert new_pid != pid
    assert not (tmp_path / "scratch" / "left").exists()
    assert alive(other)
    assert len(starts(tmp_path, "first")) == 1


def test_a_grandchild_does_not_outlive_its_killed_parent(start: Start, tmp_path: Path) -> None:
    """What a killed child had started is killed before the child is started again."""
    system = start()
    system.shows("ready")
    before = set(system.children())
    os.kill(starts(tmp_path, "first")[0][0], signal.SIGKILL)
    eventually(lambda: len(starts(tmp_path, "first")) == 2, "first starts again")
    eventually(lambda: len([pid for pid in before if alive(pid)]) == 2, "both old ones are gone")


def test_a_killed_supervisor_leaves_no_child(start: Start, tmp_path: Path) -> None:
    """Children get SIGTERM, hence stop as they should, when the supervisor is killed."""
    system = start()
    system.shows("ready")
    pids = [starts(tmp_path, name)[0][0] for name in ("first", "second", "third")]
    family = system.children()
    system.signal(signal.SIGKILL)
    eventually(lambda: not any(alive(pid) for pid in pids), "children end")
    assert sorted((tmp_path / "order").read_text().split()) == ["first", "second", "third"]
    for pid in family:  # the grandchild has no deathsig of its own: services see to theirs
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_child_that_cannot_start_stops_all(start: Start, tmp_path: Path) -> None:
    """Before the system is ready an exit ends it, with a status and a sentence."""
    system = start("failing")
    assert system.wait() != 0
    assert "no model here" in system.stderr
    assert "second ended (exit status 1) before the system was ready" in system.stderr


def test_a_child_that_dies_early_is_tried_a_few_times(start: Start, tmp_path: Path) -> None:
    """Signals before the system is ready are forgiven twice."""
    system = start("dying")
    assert system.wait() != 0
    assert system.stderr.count("starting it again") == 2
    assert "second ended (SIGKILL) before the system was ready" in system.stderr


def test_a_child_that_ignores_the_signal_is_killed(start: Start, tmp_path: Path) -> None:
    """After the stop time-out a child is killed, with a message; a second signal kills at once."""
    system = start("stubborn")
    system.shows("ready")
    pid = starts(tmp_path, "second")[0][0]
    system.signal(signal.SIGTERM)
    assert system.wait() == 0
    assert "second did not stop within 2 s" in system.stderr
    assert not alive(pid)
