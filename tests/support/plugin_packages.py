"""Packages with plug-ins for tests: the example, installed as users do, and bad ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "plugin_example"

BAD = """
import os, random, time
from planner_service.policies.fixed import constant
from planner_service.policies.policy import Parameter, Policy, PolicySpec
from planner_service.own_sums import OwnSums
from planner_service.session import Session
from planner_service.observation import observe

TURNS_BAD_AT = 13  # a batch size that no trial asks about


class Bad(Policy):
    def __init__(self, fault, when):
        self.fault, self.when = fault, when
        if when == "made":
            self.misbehave(None, None)

    def select(self, context, stats, session, rng):
        choice, after = constant(1, context)
        choice = choice._replace(table={}, hold_steps=16)
        if self.when == "always" or context.batch_size == TURNS_BAD_AT:
            return self.misbehave(choice, after)
        return choice, after

    def misbehave(self, choice, after):
        match self.fault:
            case "raises":
                raise ArithmeticError("it was asked to")
            case "nan":
                return choice._replace(gamma=float("nan")), after
            case "negative":
                return choice._replace(gamma=-1), after
            case "far":
                return choice._replace(gamma=10**6), after
            case "hangs":
                while True:
                    pass
            case "slow":
                time.sleep(0.1)
                return choice, after
            case "exits":
                os._exit(3)
            case "leaves":
                raise SystemExit(0)
            case "object":
                return choice._replace(gamma=object()), after
            case "nothing":
                return None
            case "table":
                return choice._replace(table={-5: (1, 1)}), after
            case "session":
                return choice, Session(1, {1: (float("inf"),)})
            case "huge":
                return choice, Session(1, {1: ("x" * 2_000_000,)})

    def update(self, stats, context, gamma, outcome):
        if context.batch_size != TURNS_BAD_AT or not self.fault.startswith("update"):
            return observe(context, gamma, outcome)
        names = {"update_nan": "bad/x", "update_steals": "off/x", "update_many": "bad/x"}
        value = float("nan") if self.fault == "update_nan" else 1.0
        own = {names[self.fault]: OwnSums((value,))}
        if self.fault == "update_many":
            own = {f"bad/{i}": OwnSums((1.0,)) for i in range(65)}
        return observe(context, gamma, outcome)._replace(own=own)


FAULTS = (
    "raises", "nan", "negative", "far", "hangs", "slow", "exits", "leaves", "object", "nothing",
    "table", "session", "huge", "update_nan", "update_steals", "update_many",
)


def spec(name="bad"):
    return PolicySpec(
        name=name,
        summary="Does what it should not.",
        parameters=(
            Parameter(name="fault", kind="choice", default="raises", choices=FAULTS, help="what"),
            Parameter(
                name="when", kind="choice", default="later", choices=("later", "always", "made"),
                help="from when on",
            ),
        ),
        make=lambda values: Bad(values["fault"], values["when"]),
    )


SPEC = spec()
NOT_A_SPEC = 7
TAKEN = spec("off")
TWICE = spec()
BAD_NAME = spec("Bad Name")
"""

BROKEN = {
    "bad_import": "raise ImportError('a library is missing')",
    "bad_syntax": "def",
    "bad_exit": "import os; os._exit(1)",
    "bad_leave": "raise SystemExit(0)",
}


def install_example(target: Path) -> None:
    """Install the example as a user would, without a network, into a folder."""
    source = target.parent / "source"
    shutil.copytree(EXAMPLE, source)  # building leaves files beside the sources
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)


def install_by_hand(target: Path, package: str, entries: dict[str, str]) -> None:
    """Write what an installer would write of a package with these entry points."""
    info = target / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[nightjar.policies]", *lines, ""]))


def install_bad(target: Path) -> None:
    """One policy that turns bad as told."""
    (target / "bad.py").write_text(BAD)
    install_by_hand(target, "bad_policies", {"bad": "bad:SPEC"})


def install_broken(target: Path) -> list[str]:
    """Entry points that cannot be policies; returns their names."""
    (target / "bad_twice.py").write_text(BAD)
    for module, text in BROKEN.items():
        (target / f"{module}.py").write_text(text + "\n")
    entries = {module: f"{module}:SPEC" for module in BROKEN}
    entries |= {"missing": "no_such_module:SPEC", "attribute": "bad_twice:NOTHING"}
    entries |= {name.lower(): f"bad_twice:{name}" for name in ("NOT_A_SPEC", "TAKEN", "BAD_NAME")}
    install_by_hand(target, "broken_policies", entries)
    install_by_hand(target, "twice_policies", {"zzz": "bad_twice:TWICE"})
    install_by_hand(target, "unreadable", {})
    (target / "unreadable-1.0.dist-info/entry_points.txt").write_text("[nightjar.policies]\nx\n")
    return [*entries, "zzz"]
