"""Worker and agent, real processes, killed or stopped at every boundary between two phases.

The worker checks every byte of its rows itself (`elastic_process.py`), and ends with an error if
one is not what it was: that it goes on is what these tests look for.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import Command, eventually

SCRIPT = Path(__file__).parents[1] / "support" / "elastic_process.py"
AGENT_PLACES = (
    "agent.before_request",
    "agent.before_work",
    "agent.mid_copy",
    "agent.before_answer",
    "agent.mid_load",
    "agent.before_verify",
)
WORKER_PLACES = (
    "worker.mid_expand",
    "worker.before_copy",
    "worker.before_rename",
    "worker.after_rename",
    "worker.before_restore",
)


def start_worker(folder: Path, failpoint: str = "") -> Command:
    """A worker that looks for its agent in the folder."""
    return Command(
        str(SCRIPT), str(folder), f"unix:{folder}/agent.sock",
        environ={"NIGHTJAR_FAILPOINT": failpoint, "PYTHONPATH": str(SCRIPT.parents[2])},
    )  # fmt: skip


def start_agent(folder: Path, failpoint: str = "") -> Command:
    """An agent there, which lets the draft go round as fast as it can."""
    return Command(
        "-m", "nightjar", "memory-agent", f"--listen=unix:{folder}/agent.sock",
        f"--shm-dir={folder}", "--hold-s=0", "--tau-high=0", "--t-persist=1", "--backoff-s=0.05",
        environ={"NIGHTJAR_FAILPOINT": failpoint},
    )  # fmt: skip


def last(worker: Command, what: str) -> int:
    """The newest number that it said of cycles or turns."""
    found = re.findall(rf"^{what} (\d+)$", worker.stdout, re.MULTILINE)
    return int(found[-1]) if found else 0


def goes_round(worker: Command, times: int = 2) -> None:
    """Wait until the draft has left and returned so many times more."""
    before = last(worker, "cycle")

    def done() -> bool:
        assert worker.process.poll() is None, "the worker ended"
        return last(worker, "cycle") >= before + times

    eventually(done, f"{times} more cycles after {before}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pools and the agent's socket lie."""
    return tmp_path_factory.mktemp("deaths")


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Command]:
    """One worker that outlives agents."""
    with start_worker(folder) as command:
        command.shows("ready")
        yield command
        assert command.process.poll() is None, command.stderr


@pytest.mark.parametrize("place", AGENT_PLACES)
def test_the_agent_killed_anywhere(worker: Command, folder: Path, place: str) -> None:
    """Its death there costs the worker nothing but time: it goes on, and so does the next agent."""
    with start_agent(folder, place) as agent:
        assert agent.wait(30) == -signal.SIGKILL
    before = last(worker, "turn")
    eventually(lambda: last(worker, "turn") > before, "the worker takes turns")


def test_after_all_deaths_another_agent_does_the_rest(worker: Command, folder: Path) -> None:
    """What dead agents left half done is finished or given up, and rounds follow each other."""
    with start_agent(folder):
        goes_round(worker)


def test_the_agent_stopped_anywhere(worker: Command, folder: Path) -> None:
    """While it is stopped the worker takes turns; when it goes on, so do the transitions."""
    places = ",".join(f"{place}:stop" for place in AGENT_PLACES)
    with start_agent(folder, places) as agent:
        process = psutil.Process(agent.process.pid)
        for number in range(len(AGENT_PLACES)):
            agent.shows("failpoint ", times=number + 1)
            eventually(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")
            before = last(worker, "turn")
            eventually(lambda before=before: last(worker, "turn") > before, "the worker goes on")  # type: ignore[misc]
            agent.signal(signal.SIGCONT)
        goes_round(worker)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, Path]]:
    """One agent that outlives workers, and its folder."""
    folder = tmp_path_factory.mktemp("survivor")
    with start_agent(folder) as command:
        command.shows("listening on ")
        yield command, folder
        assert command.process.poll() is None, command.stderr


@pytest.mark.parametrize("place", WORKER_PLACES)
def test_the_worker_killed_anywhere(agent: tuple[Command, Path], place: str) -> None:
    """The agent lets go of a dead worker's pool, and the next worker's goes round."""
    command, folder = agent
    before = command.stderr.count("detached")
    with start_worker(folder, place) as worker:
        assert worker.wait(30) == -signal.SIGKILL, worker.stderr
    eventually(lambda: command.stderr.count("detached") == before + 1, "it let go")


def test_after_all_deaths_another_worker_goes_round(agent: tuple[Command, Path]) -> None:
    """The agent that saw five workers die serves the sixth."""
    with start_worker(agent[1]) as worker:
        goes_round(worker)


@pytest.mark.parametrize("first", ["agent", "worker"])
def test_both_die_in_a_reload_and_start_again(tmp_path: Path, first: str) -> None:
    """Whichever comes back first waits for the other, and the draft goes round again."""
    with start_agent(tmp_path, "agent.mid_load") as agent, start_worker(tmp_path) as worker:
        assert agent.wait(30) == -signal.SIGKILL
        worker.signal(signal.SIGKILL)
        worker.wait()
    starts = [start_agent, start_worker] if first == "agent" else [start_worker, start_agent]
    with starts[0](tmp_path) as one:
        one.shows("listening on " if first == "agent" else "trying on")
        with starts[1](tmp_path) as other:
            goes_round(other if first == "agent" else one)
