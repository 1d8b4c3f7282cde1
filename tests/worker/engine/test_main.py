"""The engine as a process: start, refusal, service, and every way to end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from engine_rig import params

from worker.channel import Framer, frame
from worker.messages import (
    Progress,
    Ready,
    Shutdown,
    StartFailed,
    Status,
    StepOutput,
    Submit,
    ToEngine,
    ToFront,
)

DEADLINE_S = 120


class Front:
    """The other end of one engine's socket, and the engine's process."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "s")
        self.shm = folder / "shm"
        self.shm.mkdir()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen(1)
        self.listener.settimeout(DEADLINE_S)
        self.framer: Framer[ToFront] = Framer(ToFront)
        self.encoder = msgspec.msgpack.Encoder()
        self.got: list[ToFront] = []
        self.socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *flags: str) -> list[str]:
        """The engine's command line."""
        defaults = [f"--shm-dir={self.shm}", "--num-threads=1", "--dtype=float32"]
        own = ["--build=eager", "--num-blocks=24", "--max-num-seqs=4"]
        module = [sys.executable, "-m", "worker.engine.main", "--socket", self.path]
        return [*module, *defaults, *own, *flags]

    def start(self, *flags: str) -> None:
        """Spawn an engine and wait for it to connect."""
        self.process = subprocess.Popen(self.command(*flags), start_new_session=True)
        self.accept()

    def accept(self) -> None:
        """Wait for the engine to connect."""
        self.socket, _ = self.listener.accept()
        self.socket.settimeout(DEADLINE_S)

    def send(self, message: ToEngine) -> None:
        """Tell the engine."""
        assert self.socket is not None
        self.socket.sendall(frame(self.encoder, message))

    def until(self, holds: Callable[[ToFront], bool]) -> ToFront:
        """Read until a message for which something holds."""
        assert self.socket is not None
        while True:
            data = self.socket.recv(1 << 16)
            assert data, f"the engine hung up after {self.got[-3:]}"
            messages = self.framer.feed(data)
            self.got += messages
            for message in messages:
                if holds(message):
                    return message

    def ready(self) -> Ready:
        """Wait until the engine serves."""
        message = self.until(lambda m: isinstance(m, Ready | StartFailed))
        assert isinstance(message, Ready), message
        return message

    def ask(self, request_id: int, **fields: object) -> list[int]:
        """Submit a request and wait for all of its tokens."""
        text = [10, 20, 30, 40, 50]
        self.send(Submit(request_id=request_id, prompt_token_ids=text, sampling=params(**fields)))
        self.until(
            lambda m: (
                isinstance(m, StepOutput) and any(f.request_id == request_id for f in m.finished)
            )
        )
        found: list[int] = []
        for message in self.got:
            if isinstance(message, StepOutput):
                ids, start = array("i", message.token_ids), 0
                for other, count in zip(message.request_ids, message.num_tokens, strict=True):
                    found += ids[start : start + count] if other == request_id else []
                    start += count
        return found

    def wait(self) -> int:
        """The process's exit status."""
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        """Leave nothing behind."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
        if self.socket is not None:
            self.socket.close()
        self.listener.close()


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    """A front that listens."""
    made = Front(tmp_path)
    yield made
    made.close()


def test_serves_and_leaves_nothing(
    front: Front, tiny: object, capfd: pytest.CaptureFixture[str]
) -> None:
    """Progress, readiness, answers, status; after Shutdown exit 0, no shared memory, no noise."""
    front.start(f"--model={tiny.target}", f"--draft={tiny.noisy}", "--gamma=3")  # type: ignore[attr-defined]
    ready = front.ready()
    assert front.process is not None
    assert any(isinstance(message, Progress) for message in front.got)
    assert ready.engine_pid == front.process.pid
    assert (ready.vocab_size, ready.max_model_len, ready.max_gamma) == (320, 384, 5)
    assert (ready.arithmetic, ready.build, ready.max_batch_size) == ("exact", "eager", 4)
    assert ready.pool is not None
    assert Path(ready.pool.arena_path).exists()
    answers = {front.ask(n, max_tokens=24, max_gamma=n)[0:24].__repr__() for n in range(4)}
    assert len(answers) == 1
    status = front.until(lambda m: isinstance(m, Status) and m.num_running == 0)
    assert isinstance(status, Status)
    assert status.num_generated_tokens == 96
    assert status.num_draft_tokens > 0
    front.send(Submit(request_id=9, prompt_token_ids=[1, 2], sampling=params(max_tokens=300)))
    front.send(Shutdown())
    output = front.until(lambda m: isinstance(m, StepOutput) and bool(m.finished))
    assert isinstance(output, StepOutput)
    assert output.finished[0].reason == "abort"
    assert front.wait() == 0
    assert list(front.shm.iterdir()) == []
    assert "leaked" not in capfd.readouterr().err


@pytest.mark.parametrize("how", ["socket", "parent"])
def test_ends_with_the_front(front: Front, tiny: object, how: str) -> None:
    """Its socket closed, or the front killed: the engine goes, and its files with it."""
    flags = (f"--model={tiny.target}", f"--draft={tiny.random}", "--arithmetic=free")  # type: ignore[attr-defined]
    if how != "parent":
        front.start(*flags)
        front.ready()
        assert front.socket is not None
        front.socket.close()
        assert front.wait() == 0
    else:
        code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(999)"
        front.process = subprocess.Popen([sys.executable, "-c", code, *front.command(*flags)])
        front.accept()
        engine_pid = front.ready().engine_pid
        front.process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while _alive(engine_pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _alive(engine_pid)
    assert list(front.shm.iterdir()) == []


def _alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stops_while_it_loads(front: Front, tiny: object) -> None:
    """Told to stop before it is ready, the engine leaves at its next word of progress."""
    front.start(f"--model={tiny.target}", "--proposer=none")  # type: ignore[attr-defined]
    front.send(Shutdown())
    assert front.wait() == 0
    assert list(front.shm.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model=/nowhere"], "/nowhere"),
        (["--model={target}"], "has no draft of its own"),
    ],
)
def test_refuses_to_start_with_a_sentence(
    front: Front, tiny: object, flags: list[str], sentence: str
) -> None:
    """What cannot be served ends the start with the error's class and a sentence; exit 1."""
    front.start(*(flag.format(target=tiny.target) for flag in flags))  # type: ignore[attr-defined]
    failed = front.until(lambda m: isinstance(m, Ready | StartFailed))
    assert isinstance(failed, StartFailed)
    assert failed.kind == "ConfigError"
    assert sentence in failed.message
    assert front.wait() == 1


def test_bad_flags_exit_with_2(front: Front) -> None:
    """A value out of range and an unknown flag: status 2 and a line that names them."""
    for flag in ("--max-gamma=9", "--no-such-flag=1"):
        done = subprocess.run(
            front.command(flag), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 2
        assert flag.partition("=")[0] in done.stderr


def test_a_front_that_is_not_there(tmp_path: Path) -> None:
    """Without a socket to connect to the engine exits with 1 and says so in a line."""
    command = [sys.executable, "-m", "worker.engine.main", "--socket", str(tmp_path / "none")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=os.environ
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
