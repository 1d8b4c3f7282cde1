"""Finds plug-ins among the installed packages.

A plug-in is an entry point of group `nightjar.policies` that loads a `PolicySpec`. Nothing of it
is ever imported here: what it is, its process says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any

from nightjar import log
from planner_service.plugins.policy import PluginPolicy, PluginSpec
from planner_service.plugins.process import PluginProcess
from planner_service.policies.policy import Parameter, PolicySpec, Registry

GROUP = "nightjar.policies"
KINDS = ("int", "float", "choice", "text")
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


def installed() -> dict[str, EntryPoint]:
    """Entry points of installed packages, by "package version: name"."""
    try:
        points = list(entry_points(group=GROUP))
    except Exception:  # one package's unreadable list would hide all the others
        points = [point for package in distributions() for point in _points_of(package)]
    found: dict[str, EntryPoint] = {}
    for point in sorted(points, key=lambda point: point.name):
        name = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
        found.setdefault(f"{name}: {point.name}", point)
    return found


def _points_of(package: Distribution) -> list[EntryPoint]:
    try:
        return list(package.entry_points.select(group=GROUP))
    except Exception as error:  # whatever its list may hold
        log.get().error(
            "plug-ins of a package left out", package=package.metadata["Name"], problem=repr(error)
        )
        return []


def load_plugins(taken: Registry, limit_s: float) -> tuple[Registry, PluginProcess | None]:
    """Policies of installed packages, and the process they run in; None where there are none.

    What is broken, or has a name that is taken, is said and left out.
    """
    points = installed()
    if not points:
        return {}, None
    process = PluginProcess(points, limit_s)
    specs: dict[str, PolicySpec] = {}
    for plugin, told in process.load().items():
        try:
            spec = _spec(process, plugin, points[plugin], told)
        except (ValueError, TypeError, KeyError) as error:
            process.leave_out(plugin, str(error))
            continue
        if spec.name in taken or spec.name in specs:
            process.leave_out(plugin, f"there is another policy {spec.name!r}")
            continue
        specs[spec.name] = spec
        log.get().info("plug-in loaded", plugin=plugin, policy=spec.name)
    return specs, process


def _spec(
    process: PluginProcess, plugin: str, point: EntryPoint, told: Mapping[str, Any]
) -> PluginSpec:
    name = told["name"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"a policy cannot be named {name!r:.40}: small letters, digits and _")
    return PluginSpec(
        name=name,
        summary=f"{told['summary']:.300} (plug-in of {plugin.partition(':')[0]})",
        parameters=tuple(_parameter(fields) for fields in told["parameters"]),
        additive=bool(told["additive"]),
        make=lambda values: PluginPolicy(process, plugin, name, process.make(plugin, values)),
        plugin=plugin,
        point=point,
        limit_s=process.limit_s,
    )


def _parameter(fields: dict[str, Any]) -> Parameter:
    texts = [fields[name] for name in ("name", "help", "kind", "form")]
    texts += fields["choices"]
    numbers = [fields["minimum"], fields["maximum"]]
    if not all(isinstance(text, str) for text in texts) or fields["kind"] not in KINDS:
        raise ValueError(f"a parameter says {texts!r:.120} of itself")
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError(f"parameter {fields['name']!r:.40} lies in {numbers!r:.80}")
    if type(fields["default"]) not in (int, float, str):
        raise ValueError(f"parameter {fields['name']!r:.40} has no default")
    return Parameter(**{**fields, "choices": tuple(fields["choices"])})
