"""What arms learned in a run, in a file beside its figures: sums as text by name, as in a store.

Each file holds what its run added, so those of several runs add up in any order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nightjar.errors import ConfigError
from paper.design import ELASTIC
from planner_service.ledger import Ledger
from planner_service.sums import NOTHING, Stats, from_fields

KEY = "learned"  # of a run's results: the file's name


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Sums by group of the store, and the last session of the arm's stream."""

    groups: Mapping[str, Stats] = field(default_factory=dict)
    session: bytes = b""

    def plus(self, later: Learned) -> Learned:
        """Both; the session is the later one's."""
        groups = dict(self.groups)
        for key, sums in later.groups.items():
            groups[key] = groups.get(key, NOTHING).plus(sums)
        return Learned(groups=groups, session=later.session or self.session)

    def as_json(self) -> dict[str, Any]:
        """For `read`."""
        groups = {key: sums.fields() for key, sums in self.groups.items()}
        return {"groups": groups, "session": self.session.decode()}


class Keeper:
    """Takes what a ledger sends to its store."""

    def __init__(self, ledger: Ledger, known: Learned) -> None:
        """Give the ledger what is known, as a store does when it is first read."""
        self._ledger = ledger
        self._groups: dict[str, Stats] = {}
        for key, sums in known.groups.items():
            ledger.track((key,))
            ledger.adopt(key, sums, 1)

    def flush(self, now: float) -> dict[str, Stats]:
        """Sums since the beginning, by group, without those that were known before."""
        for key in self._ledger.groups():
            departing = self._ledger.depart(key)
            while departing is not None:
                flight, _ = departing
                self._groups[key] = self._groups.get(key, NOTHING).plus(flight.sums)
                self._ledger.settle(key, flight.number, now)
                departing = self._ledger.depart(key, waiting=True)
        return dict(self._groups)


def of_arm(every: Iterable[Mapping[str, Learned]], name: str) -> Learned:
    """What runs taught an arm; lending its draft's memory, what they taught it without, too."""
    found = Learned()
    for run in every:
        found = found.plus(run.get(name) or run.get(name.removesuffix(ELASTIC)) or Learned())
    return found


def read(run_file: Path, run: Mapping[str, Any]) -> dict[str, Learned]:
    """What a run's arms learned; nothing of a run that kept nothing.

    Raises:
        ConfigError: The file that it names is not beside it, or is none of ours.
    """
    if KEY not in run:
        return {}
    path = run_file.with_name(str(run[KEY]))
    try:
        found = {}
        for name, arm in json.loads(path.read_text()).items():
            groups = {}
            for key, fields in arm["groups"].items():
                groups[key], num_unknown = from_fields(fields.items())
                if num_unknown:
                    raise ValueError(f"{num_unknown} sums of {name} are not ours")
            found[name] = Learned(groups=groups, session=arm["session"].encode())
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: what the arms of {run_file.name} learned cannot be read ({error}); --cold "
            "goes on without"
        ) from None
