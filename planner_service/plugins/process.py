"""Keeps the process that plug-ins run in: starts it, asks it with a limit, ends and renews it.

Whoever decides never waits longer than the limit of one call. A thread does what takes longer: it
starts the process, loads the plug-ins and makes the policies. While it does, or while an answer
is late, a call is `Away`, and the policy helps itself.

A late answer may be the machine's fault. A policy is at fault when it is late too often, gives no
answer within `hang_s`, raises, or ends the process during its call. Then the
process is killed, and the other policies are made in a new one. A process that somebody killed is
renewed likewise, and only whoever was being asked three times that it happened is at fault.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from nightjar import log
from planner_service.plugins.child import Child, Made
from planner_service.plugins.wire import Closed
from planner_service.policies.policy import ParameterValue
from planner_service.trial import PolicyFailed

LOAD_TIMEOUT_S = 10.0  # for one plug-in to be imported
MAKE_TIMEOUT_S = 2.0  # for one policy to be made
MAX_LATE, FORGIVEN = 3, 0.1  # late answers, of which each answer in time takes back a tenth
MAX_KILLED = 3
MAX_BACKOFF_S = 10.0
STEADY_S = 60.0  # a process that lasted this long did not fail by starting
ENDED = "ended the process of the plug-ins"


class Away(Exception):
    """No answer now, and nobody is to blame."""


class PluginProcess:
    """The process, whichever it is at the moment."""

    def __init__(
        self, points: Mapping[str, EntryPoint], limit_s: float, *, patient: bool = False
    ) -> None:
        """Know what to load; `load` starts the process.

        Args:
            points: Entry points by the name of the plug-in.
            limit_s: Seconds that a call may take.
            patient: Wait for late answers; for trials, which hold up nobody.
        """
        self.limit_s, self.hang_s = limit_s, max(0.25, 20 * limit_s)
        self._points, self._patient = dict(points), patient
        self._numbers = itertools.count(1)
        self._policies: dict[int, Made] = {}
        self._lock = threading.Lock()  # of the child, and of who owes an answer since when
        self._child: Child | None = None
        self._late: tuple[Made, float] | None = None
        self._num_lost = 0  # processes in a row that ended soon, by no policy's fault
        self._closing = threading.Event()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # A thread of its own: the process ends with the thread that started it.
        self._thread = threading.Thread(target=self._work, name="plug-ins", daemon=True)
        self._thread.start()

    # ---- for whoever decides -----------------------------------------------------------

    def make(self, plugin: str, values: Mapping[str, ParameterValue]) -> Made:
        """A policy; the process has it soon."""
        made = Made(next(self._numbers), plugin, dict(values))
        self._policies[made.number] = made
        self._jobs.put(lambda: self._make(made))
        return made

    def drop(self, made: Made, *, failed: bool) -> None:
        """Forget a policy; if it failed, also the process that it may have spoiled."""
        if self._policies.pop(made.number, None) is not None:
            made.failure = made.failure or "its version has ended"
            self._jobs.put(lambda: self._drop(made, failed))

    def ask(self, made: Made, question: Mapping[str, Any]) -> Any:
        """A policy's answer, within the limit.

        Raises:
            PolicyFailed: The policy is at fault, now or before.
            Away: There is no answer now.
        """
        if self._patient:
            made.settled.wait(2 * LOAD_TIMEOUT_S)
            try:
                return self._ask(made, question)
            except Away:  # whoever waited this long and got nothing tried nothing out
                raise PolicyFailed("could not be asked: its process does not stay") from None
        return self._ask(made, question)

    def _ask(self, made: Made, question: Mapping[str, Any]) -> Any:
        if not self._lock.acquire(blocking=self._patient):
            raise Away
        try:
            if made.failure:
                raise PolicyFailed(made.failure)
            child = self._child
            if child is None or child.ended() or made.child is not child:
                raise Away
            self._settle(child)
            return self._exchange(child, made, {"number": made.number, **question})
        finally:
            self._lock.release()

    def _settle(self, child: Child) -> None:
        """Take the answer that came late, so that the next one is not taken for it."""
        if self._late is None:
            return
        made, since = self._late
        try:
            child.link.receive(0)
            self._late = None
            return
        except TimeoutError:
            if time.monotonic() - since > self.hang_s:
                self._fail(made, f"gave no answer within {self.hang_s:g} s")
        except Closed:
            self._ended(child, made)
        raise Away

    def _exchange(self, child: Child, made: Made, message: Mapping[str, Any]) -> Any:
        started = time.monotonic()
        try:
            child.link.send(message, self.limit_s)
        except Closed:  # it ended between two calls: nobody knows by whom
            self._lost(child)
            raise Away from None
        try:
            answer = child.link.receive(self.hang_s if self._patient else self.limit_s)
        except TimeoutError:
            if self._patient:
                raise self._fail(made, f"gave no answer within {self.hang_s:g} s") from None
            self._late = (made, started)
            self._count_late(made)
            raise Away from None
        except Closed:
            raise self._ended(child, made) from None
        if "problem" in answer:
            raise self._fail(made, str(answer["problem"]))
        if time.monotonic() - started > self.limit_s:
            self._count_late(made)
        else:
            made.lateness = max(0.0, made.lateness - FORGIVEN)
        return answer["answer"]

    def _count_late(self, made: Made) -> None:
        made.lateness += 1
        if made.lateness > MAX_LATE - 1:
            raise self._fail(made, f"took longer than {self.limit_s * 1000:g} ms too often")

    def _fail(self, made: Made, failure: str) -> PolicyFailed:
        """The policy is at fault: it goes, and with it the process."""
        made.failure = failure
        self._policies.pop(made.number, None)
        self._renew()
        return PolicyFailed(failure)

    def _ended(self, child: Child, made: Made) -> PolicyFailed | Away:
        """The process ended while a policy was asked: by itself, unless somebody killed it."""
        if child.was_killed(self.limit_s):
            made.num_killed += 1
            if made.num_killed < MAX_KILLED:
                self._lost(child)
                return Away()
        return self._fail(made, ENDED)

    def _lost(self, child: Child) -> None:
        log.get().error("the process of the plug-ins ended; it is started again", pid=child.pid)
        self._num_lost += 1
        self._renew()

    def _renew(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._late = None
        self._jobs.put(self._start)

    # ---- the thread --------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing.is_set():
            job = self._jobs.get()
            try:
                job()
            except Exception as error:  # the planner goes on without plug-ins
                log.get().error("plug-ins: a fault of ours", reason=repr(error))

    def load(self) -> dict[str, dict[str, Any]]:
        """Start the process; returns what each plug-in that could be loaded says it is.

        One that cannot be imported is left out, said, and not tried again.
        """
        found: dict[str, dict[str, Any]] = {}
        finished = threading.Event()
        self._jobs.put(lambda: self._start(found))
        self._jobs.put(finished.set)
        finished.wait()
        return found

    def leave_out(self, plugin: str, problem: str) -> None:
        """Never load a plug-in again."""
        log.get().error("plug-in left out", plugin=plugin, problem=problem)
        self._points = {name: point for name, point in self._points.items() if name != plugin}

    def _start(self, found: dict[str, dict[str, Any]] | None = None) -> None:
        """Have a process, load the plug-ins into it, and make every policy in it."""
        while not self._closing.is_set() and (self._child is None or self._child.ended()):
            self._reap()
            with self._lock:
                self._child, self._late = Child(), None
                for name in list(self._points):
                    self._load(self._child, name, found)
        for made in list(self._policies.values()):
            self._make(made)

    def _reap(self) -> None:
        if self._child is None:
            return
        if self._child.reap() > STEADY_S:
            self._num_lost = 0
        if self._num_lost > 1:
            self._closing.wait(min(MAX_BACKOFF_S, 0.25 * 2**self._num_lost))

    def _load(self, child: Child, name: str, found: dict[str, dict[str, Any]] | None) -> None:
        if child.ended():
            return
        point = self._points[name]
        entry = {"plugin": name, "name": point.name, "value": point.value, "group": point.group}
        answer = child.told({"verb": "load", **entry}, LOAD_TIMEOUT_S)
        if "problem" in answer:
            self.leave_out(name, answer["problem"])
        elif found is not None:
            found[name] = answer["answer"]

    def _make(self, made: Made) -> None:
        with self._lock:
            child = self._child
            if child is None or child.ended() or made.failure or made.child is child:
                return
            if self._late is not None and not self._await_late(child):
                return
            what = {"number": made.number, "plugin": made.plugin, "values": made.values}
            answer = child.told({"verb": "make", **what}, MAKE_TIMEOUT_S)
            if "problem" in answer:
                made.failure = answer["problem"]
                self._policies.pop(made.number, None)
            else:
                made.learns, made.child = answer["answer"]["learns"], child
            made.settled.set()
            if child.ended():
                self._renew()

    def _await_late(self, child: Child) -> bool:
        """Let the answer that is late come; False if it does not."""
        assert self._late is not None
        made, since = self._late
        try:
            child.link.receive(max(0.0, since + self.hang_s - time.monotonic()))
        except (TimeoutError, Closed):
            self._fail(made, f"gave no answer within {self.hang_s:g} s")
            return False
        self._late = None
        return True

    def _drop(self, made: Made, failed: bool) -> None:
        with self._lock:
            child = self._child
            if child is None or child.ended() or made.child is not child:
                return
            if failed or self._late is not None:
                self._renew()
            else:
                child.told({"verb": "drop", "number": made.number}, MAKE_TIMEOUT_S)
        if child.ended():
            self._start()

    def close(self) -> None:
        """End the process and the thread."""
        self._closing.set()
        self._jobs.put(lambda: None)
        self._thread.join(LOAD_TIMEOUT_S)
        with self._lock:
            if self._child is not None:
                self._child.kill()
                self._child.reap()
