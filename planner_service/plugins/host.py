"""The process that plug-ins run in: it imports them, and answers one message at a time.

    python -m planner_service.plugins.host FD

FD is its end of a socket pair. It ends with the planner, whatever a plug-in is doing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from importlib.metadata import EntryPoint
from typing import Any

from planner_service.context import Context
from planner_service.plugins.wire import (
    Closed,
    Link,
    read_outcome,
    read_question,
    read_stats,
    sent_answer,
    sent_update,
)
from planner_service.policies.policy import Parameter, Policy, PolicySpec

PR_SET_PDEATHSIG = 1
MAX_PROBLEM_CHARACTERS = 300


def main(fd: int) -> None:
    """Serve until the planner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the planner's to act on
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    link = Link(socket.socket(fileno=fd))
    host = Host()
    while True:
        try:
            answer = host.answer(link.receive())
            try:
                link.send(answer)
            except (TypeError, ValueError, RecursionError) as error:  # numbers of other kinds
                link.send({"problem": f"answered what cannot be sent: {error}"})
        except Closed:
            return


class Host:
    """The policies that were made here, by number."""

    def __init__(self) -> None:
        self._specs: dict[str, PolicySpec] = {}
        self._policies: dict[int, tuple[str, Policy]] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked; what a plug-in raises is told in words."""
        try:
            return {"answer": getattr(self, "_" + message["verb"])(message)}
        except BaseException as error:  # also SystemExit: ending is not the plug-in's to decide
            text = f"raised {type(error).__name__}: {error}"
            return {"problem": text[:MAX_PROBLEM_CHARACTERS]}

    def _load(self, message: dict[str, Any]) -> dict[str, Any]:
        point = EntryPoint(message["name"], message["value"], message["group"])
        spec = point.load()
        if not isinstance(spec, PolicySpec):
            raise TypeError(f"{message['value']} is no PolicySpec but {type(spec).__name__}")
        self._specs[message["plugin"]] = spec
        return {
            "name": spec.name,
            "summary": spec.summary,
            "additive": spec.additive,
            "parameters": [_parameter_fields(parameter) for parameter in spec.parameters],
        }

    def _make(self, message: dict[str, Any]) -> dict[str, bool]:
        spec = self._specs[message["plugin"]]
        policy = spec.make(message["values"])
        self._policies[message["number"]] = (spec.name, policy)
        return {"learns": type(policy).update is not Policy.update}

    def _drop(self, message: dict[str, Any]) -> None:
        self._policies.pop(message["number"], None)

    def _select(self, message: dict[str, Any]) -> list[Any]:
        _, policy = self._policies[message["number"]]
        return sent_answer(*policy.select(*read_question(message)))

    def _update(self, message: dict[str, Any]) -> list[Any]:
        name, policy = self._policies[message["number"]]
        stats, context = read_stats(message["stats"]), Context(*message["context"])
        outcome = read_outcome(message["outcome"])
        return sent_update(policy.update(stats, context, message["gamma"], outcome), name)


def _parameter_fields(parameter: Parameter) -> dict[str, Any]:
    names = ("name", "kind", "default", "help", "minimum", "maximum", "choices", "form")
    return {name: getattr(parameter, name) for name in names}


if __name__ == "__main__":
    sys.stdout = sys.stderr  # standard output is the planner's
    main(int(sys.argv[1]))
    os._exit(0)  # whatever threads a plug-in left
