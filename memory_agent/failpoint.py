"""Named places at which a test may kill or stop a process; off unless NIGHTJAR_FAILPOINT is set.

`NIGHTJAR_FAILPOINT=agent.mid_copy` kills as by SIGKILL; with `:stop` behind a name the process
stops as by SIGSTOP, once. Several are separated by commas. Names that begin with `worker.` are
reached in the worker's engine process; a name that is none is refused by agent and worker alike.
"""

from __future__ import annotations

import os
import signal
import time

from nightjar.errors import ConfigError

_SIGNALS = {"": signal.SIGKILL, ":stop": signal.SIGSTOP}
_NAMES = [
    "agent.before_request", "agent.before_work", "agent.mid_copy", "agent.mid_load",
    "agent.before_verify", "agent.before_answer", "worker.mid_expand", "worker.before_copy",
    "worker.before_rename", "worker.after_rename", "worker.before_restore",
]  # fmt: skip
_PLACES = {name + action: (name, sent) for name in _NAMES for action, sent in _SIGNALS.items()}
_GIVEN = [place for place in os.environ.get("NIGHTJAR_FAILPOINT", "").split(",") if place]
_SET = dict(_PLACES[place] for place in _GIVEN if place in _PLACES)


def check_failpoints() -> None:
    """Refuse a place that is none.

    Raises:
        ConfigError: NIGHTJAR_FAILPOINT names one.
    """
    for place in _GIVEN:
        if place not in _PLACES:
            raise ConfigError(
                f"NIGHTJAR_FAILPOINT: no place is called {place!r}; it takes, each as it is or "
                f"with :stop behind it, {', '.join(_NAMES)}"
            )


def reached(name: str) -> None:
    """Say so on stderr, and die or stop here, if NIGHTJAR_FAILPOINT names this place."""
    assert name in _NAMES, name
    if name in _SET:
        os.write(2, f"failpoint {name}\n".encode())
        os.kill(os.getpid(), _SET.pop(name))
        time.sleep(0.1)  # a thread that did not take the signal itself may stop a little later
