"""The planner's own record: a line of JSON for every decision and every report.

A decision costs one append to a bounded queue; a thread writes. What the disk does not take is
counted and said, and decisions go on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nightjar import log
from nightjar.errors import ConfigError
from planner_service.context import Context, Outcome
from planner_service.planner import Decision, Report, Stream

MAX_QUEUED = 65_536  # lines that wait for the disk
NUM_KEPT = 4  # full files kept beside the one being written: PATH.1 (newest) to PATH.4
WRITE_INTERVAL_S = 0.1
LAST_WRITE_TIMEOUT_S = 2.0
_MAX_BATCH = 4096  # lines in one write
_YIELD_EVERY = 16  # lines, after which whoever decides may have the interpreter
_SUMS = tuple(name for name in Outcome._fields if name != "propensity")
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode

# What waits: of a decision only what is written, since its table would hold memory.
_Line = tuple[str, int, str, str, tuple[Any, ...]]


def decision_fields(decision: Decision) -> tuple[Any, ...]:
    """What a line says of a decision, in the order of `DECISION_NAMES`."""
    choice, asked = decision.choice, decision.context
    grid, bucket = choice.grid, asked.bucket
    if grid is not None:
        bucket = grid.bucket(asked.batch_size, asked.num_kv_tokens)
    return (
        decision.decision_id,
        decision.version,
        bucket,
        choice.gamma,
        choice.exploit_gamma,
        choice.num_extra_drafts,
        choice.explored,
        choice.propensity,
        choice.hold_steps,
        None if grid is None else [grid.batch_size_edges, grid.kv_token_edges],
        asked,
    )


DECISION_NAMES = (
    "decision_id",
    "version",
    "bucket",
    "gamma",
    "exploit_gamma",
    "num_extra_drafts",
    "explored",
    "propensity",
    "hold_steps",
    "grid",  # [batch size edges, KV token edges]; null: one bucket a batch size
    "context",  # at the decision
)


def report_fields(report: Report) -> tuple[Any, ...]:
    """What a line says of a report, in the order of `REPORT_NAMES`."""
    return (report.decision_id, report.gamma, report.context, report.outcome)


REPORT_NAMES = ("decision_id", "gamma", "context", *_SUMS)


def line_of(waiting: _Line) -> str:
    """The line of JSON, without its end."""
    kind, at_ms, profile_key, worker_id, values = waiting
    line: dict[str, Any] = {
        "kind": kind,
        "at_ms": at_ms,
        "profile": profile_key,
        "worker": worker_id,
    }
    if kind == "decision":
        line.update(zip(DECISION_NAMES, values, strict=True))
    else:
        *head, outcome = values
        line.update(zip(REPORT_NAMES, (*head, *outcome[: len(_SUMS)]), strict=True))
    line["context"] = dict(zip(Context._fields, line["context"], strict=True))
    return _encode(line)


class AuditLog:
    """Appends lines to a file from a thread of its own, and starts a new file when it is full."""

    def __init__(self, path: str, max_bytes: int) -> None:
        """Open the file and start writing.

        Raises:
            ConfigError: The file cannot be written, or another planner writes it.
        """
        self._path, self._max_bytes = Path(path), max_bytes
        self._queue: deque[_Line] = deque()
        self._stop = threading.Event()
        self._fd = -1
        self.num_dropped = 0  # lines that found no room in the queue
        self.num_lost = 0  # lines that the disk did not take
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"--audit-log={path!r}: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def decided(self, decision: Decision, stream: Stream, at_ms: int) -> None:
        """Record a decision; never waits."""
        self._put("decision", decision_fields(decision), stream, at_ms)

    def reported(self, report: Report, stream: Stream, at_ms: int) -> None:
        """Record a report; never waits."""
        self._put("report", report_fields(report), stream, at_ms)

    def close(self) -> None:
        """Write what waits, for a short while, and end."""
        self._stop.set()
        self._thread.join(LAST_WRITE_TIMEOUT_S)
        missed = self.num_dropped + self.num_lost + len(self._queue)
        if missed:
            log.get().warning("audit log ends incomplete", path=str(self._path), lines=missed)

    def _put(self, kind: str, fields: tuple[Any, ...], stream: Stream, at_ms: int) -> None:
        if len(self._queue) >= MAX_QUEUED:
            self.num_dropped += 1
            if self.num_dropped.bit_count() == 1:  # 1, 2, 4, ...: a log, not a flood
                log.get().warning(
                    "audit log is too slow: lines are dropped", so_far=self.num_dropped
                )
            return
        self._queue.append((kind, at_ms, stream.profile.key, stream.worker_id, fields))

    # ---- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(WRITE_INTERVAL_S):
            self._drain()
        self._drain()
        if self._fd >= 0:
            os.close(self._fd)

    def _drain(self) -> None:
        for _ in range(MAX_QUEUED // _MAX_BATCH + 1):  # bounded: the end is never put off
            count = min(len(self._queue), _MAX_BATCH)
            if not count:
                return
            data = b"".join(self._encoded(count))
            num_written = 0
            try:
                self._make_room(len(data))
                while num_written < len(data):
                    num_written += os.write(self._fd, data[num_written:])
            except OSError as error:
                self._failed(error, data[num_written:].count(b"\n"))

    def _encoded(self, count: int) -> Iterator[bytes]:
        for i in range(count):
            yield line_of(self._queue.popleft()).encode() + b"\n"
            if i % _YIELD_EVERY == 0:
                time.sleep(0)

    def _failed(self, error: OSError, num_lines: int) -> None:
        first = self.num_lost == 0
        before, self.num_lost = self.num_lost, self.num_lost + num_lines
        if first or before.bit_length() != self.num_lost.bit_length():
            log.get().error(
                "audit log cannot be written; decisions go on without it",
                path=str(self._path),
                reason=error.strerror or str(error),
                lines_lost=self.num_lost,
            )
        self._shut()  # opened anew for the next batch, on a line of its own

    def _make_room(self, size: int) -> None:
        """Have the right file open, with room for `size` bytes unless it is empty."""
        if self._fd >= 0 and not self._is_ours():
            self._shut()  # moved or deleted by somebody else
        if self._fd < 0:
            self._open()
        used = os.fstat(self._fd).st_size
        if used and used + size > self._max_bytes:
            self._shut()
            for number in range(NUM_KEPT - 1, -1, -1):
                newer = self._numbered(number)
                if newer.exists():
                    os.replace(newer, self._numbered(number + 1))
            self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path

    def _is_ours(self) -> bool:
        ours = os.fstat(self._fd)
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(ours, os.stat(self._path))
        return False

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(self._path, flags, 0o640)
        try:
            known = os.fstat(self._fd)
            if not stat.S_ISREG(known.st_mode):
                raise OSError("is no regular file")
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError("another planner writes it") from None
            if known.st_size and os.pread(self._fd, 1, known.st_size - 1) != b"\n":
                os.write(self._fd, b"\n")  # the line before was torn
        except OSError:
            self._shut()
            raise

    def _shut(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
