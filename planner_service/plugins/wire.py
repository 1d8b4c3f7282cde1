"""What crosses between the planner and the process that plug-ins run in: JSON, length first.

A plug-in sees the context, the totals, the acceptance, the sums of the batch sizes next to the
context's, the switching cost and its own sums; never those of other policies.
"""

from __future__ import annotations

import json
import math
import random
import socket
import struct
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from nightjar.buckets import BucketGrid
from planner_service.context import MAX_BATCH_SIZE, MAX_GAMMA, Context, Outcome
from planner_service.own_sums import MAX_NAME_CHARACTERS, MAX_VALUES, OwnSums
from planner_service.policies.policy import Choice
from planner_service.session import MAX_BUCKETS, MAX_NUMBERS, Session
from planner_service.sums import ArmSums, Stats, Totals
from planner_service.switching import COST

MAX_MESSAGE_BYTES = 1 << 20
NUM_NEIGHBOURS = 4  # measured batch sizes on either side that a plug-in sees
MAX_OWN_NAMES = 64  # that one policy may keep sums under
MAX_TABLE = 2 * MAX_BATCH_SIZE
MAX_EDGE = 2**31 - 1
MAX_NUMBER = 1e300
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_HEAD = struct.Struct("!I")


class Closed(Exception):
    """The other side is gone."""


class Nonsense(ValueError):
    """An answer has no form that a policy's answer can have; the text says where."""


class Link:
    """One side of the connection; every wait has a deadline."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.closed = False
        self._received = bytearray()

    def send(self, message: object, timeout_s: float | None = None) -> None:
        """Send one message.

        Raises:
            Closed: The other side is gone, or takes nothing.
        """
        body = _encode(message).encode()
        if len(body) > MAX_MESSAGE_BYTES:
            raise Nonsense(f"a message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES}")
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_HEAD.pack(len(body)) + body)
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message.

        Raises:
            TimeoutError: It is not there yet; what came of it is kept.
            Closed: The other side is gone, or sent what is no message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        body_at = _HEAD.size
        while True:
            if len(self._received) >= body_at:
                (length,) = _HEAD.unpack_from(self._received)
                if length > MAX_MESSAGE_BYTES:
                    raise Closed(f"a message of {length} bytes")
                if len(self._received) >= body_at + length:
                    body = bytes(self._received[body_at : body_at + length])
                    del self._received[: body_at + length]
                    try:
                        return json.loads(body)
                    except (ValueError, RecursionError):
                        raise Closed("what is no message") from None
            self._fill(deadline)

    def _fill(self, deadline: float | None) -> None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        self._socket.settimeout(left)
        try:
            data = self._socket.recv(65_536)
        except (TimeoutError, BlockingIOError):
            raise TimeoutError from None
        except OSError as error:
            raise Closed(str(error)) from None
        if not data:
            raise Closed("the connection ended")
        self._received += data

    def close(self) -> None:
        """Close this side."""
        self.closed = True
        self._socket.close()


# ---- to the plug-in ----------------------------------------------------------------------


def sent_stats(stats: Stats, batch_size: int, policy: str) -> list[Any]:
    """The part of what is known that a plug-in sees."""
    sizes = sorted(stats.buckets)
    at = bisect_left(sizes, batch_size)
    near = sizes[max(0, at - NUM_NEIGHBOURS) : at + NUM_NEIGHBOURS + 1]
    prefix = f"{policy}/"
    return [
        [[size, [[g, *arm] for g, arm in stats.buckets[size].items()]] for size in near],
        stats.totals,
        stats.reached,
        stats.accepted,
        [[n, *o] for n, o in stats.own.items() if n.startswith(prefix) or n == COST],
        [[n, v] for n, v in stats.latest.items() if n.startswith(prefix)],
        stats.prior_reached,
        stats.prior_accepted,
        stats.num_prior_steps,
    ]


def read_stats(sent: list[Any]) -> Stats:
    """The inverse of `sent_stats`, as far as it was sent."""
    buckets, totals, reached, accepted, own, latest, prior_reached, prior_accepted, prior = sent
    return Stats(
        {size: {arm[0]: ArmSums(*arm[1:]) for arm in arms} for size, arms in buckets},
        Totals(*totals),
        tuple(reached),
        tuple(accepted),
        {name: OwnSums(tuple(values), half_life, at) for name, values, half_life, at in own},
        {name: tuple(values) for name, values in latest},
        tuple(prior_reached),
        tuple(prior_accepted),
        prior,
    )


def sent_session(session: Session) -> list[Any]:
    """A session as it is sent, either way."""
    numbers, ran = session.numbers, session.ran
    return [session.previous_gamma, list(numbers.items()), list(ran.items()), session.foreign]


def read_question(message: Mapping[str, Any]) -> tuple[Context, Stats, Session, random.Random]:
    """What `select` is called with."""
    previous, numbers, ran, foreign = message["session"]
    session = Session(previous, {k: tuple(v) for k, v in numbers}, dict(ran), foreign)
    stats = read_stats(message["stats"])
    return Context(*message["context"]), stats, session, random.Random(message["seed"])


def read_outcome(sent: list[Any]) -> Outcome:
    """An outcome."""
    outcome = Outcome(*sent)
    return outcome._replace(reached=tuple(outcome.reached), accepted=tuple(outcome.accepted))


# ---- from the plug-in: whatever it says is checked ----------------------------------------


def sent_answer(choice: Choice, session: Session) -> list[Any]:
    """A policy's answer as it is sent."""
    grid = choice.grid
    edges = None if grid is None else [grid.batch_size_edges, grid.kv_token_edges]
    rows = [[bucket, *pair] for bucket, pair in choice.table.items()]
    head = [*choice[:5], rows, edges, choice.num_extra_drafts]
    return [head, sent_session(session)]


def read_answer(sent: object) -> tuple[Choice, Session]:
    """A policy's answer; its gammas are checked by whoever decides.

    Raises:
        Nonsense: It has not the form of one.
    """
    head, session = _listed(sent, 2, "answer")
    gamma, exploit, hold, explored, propensity, rows, edges, extra = _listed(head, 8, "choice")
    if type(explored) is not bool:
        raise Nonsense(f"explored {explored!r:.40} is neither true nor false")
    table: dict[int, tuple[int, int]] = {}
    for row in _listed(rows, MAX_TABLE, "table", at_most=True):
        bucket, one, two = _listed(row, 3, "a row of the table")
        table[_whole(bucket, MAX_EDGE, "a bucket")] = (one, two)
    grid = None
    if edges is not None:
        pair = [_edges(part) for part in _listed(edges, 2, "grid")]
        grid = BucketGrid(*pair)
    propensity = _number(propensity, "propensity")
    choice = Choice(gamma, exploit, hold, explored, propensity, table, grid, extra)
    return choice, _read_session(session)


def _read_session(sent: object) -> Session:
    previous, rows, _, _ = _listed(sent, 4, "session")
    numbers: dict[int, tuple[float, ...]] = {}
    for row in _listed(rows, MAX_BUCKETS, "session", at_most=True):
        key, values = _listed(row, 2, "a row of the session")
        kept = _listed(values, MAX_NUMBERS, "numbers of the session", at_most=True)
        for value in kept:
            if abs(_number(value, "a number of the session")) > 1e15:
                raise Nonsense("a number of the session lies beyond 1e15")
        numbers[_whole(key, MAX_BATCH_SIZE, "a key of the session")] = tuple(kept)
    return Session(_whole(previous, MAX_GAMMA, "the session's previous gamma"), numbers)


def sent_update(added: Stats, policy: str) -> list[Any]:
    """What a policy adds to its own sums, as it is sent."""
    prefix = f"{policy}/"
    own = [[name, *sums] for name, sums in added.own.items() if name.startswith(prefix)]
    return [own, [[n, v] for n, v in added.latest.items() if n.startswith(prefix)]]


def read_update(
    sent: object, policy: str
) -> tuple[dict[str, OwnSums], dict[str, tuple[float, ...]]]:
    """What a policy adds to its own sums.

    Raises:
        Nonsense: It is no sums of this policy.
    """
    own_rows, latest_rows = _listed(sent, 2, "update")
    own: dict[str, OwnSums] = {}
    for row in _listed(own_rows, MAX_OWN_NAMES, "own sums", at_most=True):
        name, values, half_life, at = _listed(row, 4, "own sums")
        half_life = math.inf if half_life == math.inf else _number(half_life, "half-life")
        at = _number(at, "the clock of own sums")
        if half_life <= 0 or at < 0:
            raise Nonsense("own sums need a half-life above 0 and a clock of 0 or more")
        own[_name(name, policy)] = OwnSums(_values(values), half_life, at)
    latest: dict[str, tuple[float, ...]] = {}
    for row in _listed(latest_rows, MAX_OWN_NAMES, "latest", at_most=True):
        name, values = _listed(row, 2, "latest")
        latest[_name(name, policy)] = _values(values)
    return own, latest


def names_of(policy: str, names: Iterable[str]) -> set[str]:
    """Names under which a policy keeps something of its own."""
    return {name for name in names if name.startswith(f"{policy}/")}


def _name(name: object, policy: str) -> str:
    fits = isinstance(name, str) and name.startswith(f"{policy}/") and name.isprintable()
    if not fits or len(str(name)) > MAX_NAME_CHARACTERS or " " in str(name):
        raise Nonsense(f"own sums cannot be named {name!r:.120}")
    return str(name)


def _values(sent: object) -> tuple[float, ...]:
    values = _listed(sent, MAX_VALUES, "own sums", at_most=True)
    if not values:
        raise Nonsense("own sums without a value")
    return tuple(_number(value, "a value of own sums") for value in values)


def _listed(sent: object, length: int, what: str, *, at_most: bool = False) -> list[Any]:
    if not isinstance(sent, list) or len(sent) > length or (len(sent) < length and not at_most):
        raise Nonsense(f"{what}: not a list of {'at most ' * at_most}{length}")
    return sent


def _edges(sent: object) -> tuple[int, ...]:
    edges = _listed(sent, MAX_BATCH_SIZE, "edges of the grid", at_most=True)
    whole = [_whole(edge, MAX_EDGE, "an edge of the grid") for edge in edges]
    if whole != sorted(set(whole)):
        raise Nonsense("the grid's edges do not ascend")
    return tuple(whole)


def _whole(value: object, most: int, what: str) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise Nonsense(f"{what}, {value!r:.40}, is not a whole number in [0, {most}]")
    return value


def _number(value: object, what: str) -> float:
    if type(value) not in (int, float) or not abs(value) < MAX_NUMBER:  # type: ignore[arg-type]
        raise Nonsense(f"{what}, {value!r:.40}, is no number")
    return value  # type: ignore[return-value]
