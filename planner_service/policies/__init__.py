"""The policies that can be activated: one file each, and one line here."""

from __future__ import annotations

from planner_service.policies import (
    dsd,
    ema_tiers,
    epsilon_greedy,
    exp3spec,
    fixed,
    lin_thompson,
    linucb,
    model_guided,
    nightjar,
    off,
    q_learning,
    regression,
    table,
    tetris,
    ucbspec,
)
from planner_service.policies.policy import Registry

BUILT_IN: Registry = {
    spec.name: spec
    for spec in (
        off.SPEC,
        fixed.SPEC,
        table.SPEC,
        ema_tiers.SPEC,
        dsd.SPEC,
        tetris.SPEC,
        epsilon_greedy.SPEC,
        ucbspec.SPEC,
        exp3spec.SPEC,
        linucb.SPEC,
        lin_thompson.SPEC,
        regression.SPEC,
        q_learning.SPEC,
        nightjar.SPEC,
        model_guided.SPEC,
    )
}
