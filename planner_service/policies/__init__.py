"""The policies that can be activated: one file each, and one line here."""

from __future__ import annotations

from planner_service.policies import fixed, nightjar, off
from planner_service.policies.policy import Registry

BUILT_IN: Registry = {spec.name: spec for spec in (off.SPEC, fixed.SPEC, nightjar.SPEC)}
