"""Tries a policy on a grid of contexts before anything is decided by it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from planner_service.context import MAX_GAMMA, Context, Outcome
from planner_service.policies.policy import Policy, check_choice, check_table
from planner_service.session import Session, pack, unpack
from planner_service.sums import NOTHING, Stats

BATCH_SIZES = (0, 1, 2, 3, 4, 7, 8, 16, 32, 64, 128, 256)
SEEDS = (0, 1)


class PolicyFailed(Exception):
    """A policy that runs elsewhere failed; the text says how, in words."""


def words_of(error: Exception) -> str:
    """What a policy did instead of answering."""
    is_told = isinstance(error, PolicyFailed)
    words = str(error) if is_told else f"raised {type(error).__name__}: {error}"
    # They go to logs and terminals, and may hold anything.
    return "".join(c if c.isprintable() else " " for c in words)


def try_out(policy: Policy, known: Iterable[Stats]) -> str:
    """What is wrong with a policy, in words; empty if every answer on the grid is in range.

    The grid spans batch size, feasible gamma and staleness, over what is known now and over
    nothing, with fresh sessions and with the policy's own.
    """
    for stats in (NOTHING, *known):
        for context in _contexts():
            for seed in SEEDS:
                problem = _try_one(policy, context, stats, random.Random(seed))
                if problem:
                    feasible = context.feasible_max_gamma
                    return (
                        f"at batch size {context.batch_size}, feasible gamma {feasible}: {problem}"
                    )
    return ""


def _contexts() -> Iterator[Context]:
    for batch_size in BATCH_SIZES:
        for feasible in range(MAX_GAMMA + 1):
            yield Context(
                batch_size=batch_size,
                num_kv_tokens=batch_size * 500,
                num_free_blocks=1000,
                sum_stale_tokens=batch_size * (feasible % 2) * 100,
                max_stale_tokens=(feasible % 2) * 100,
                draft_resident=feasible > 0,
                feasible_max_gamma=feasible,
                max_gamma=MAX_GAMMA if batch_size % 2 == 0 else 3,
            )


def _try_one(policy: Policy, context: Context, stats: Stats, rng: random.Random) -> str:
    session = Session()
    try:
        for _ in range(3):
            choice, session = policy.select(context, stats, session, rng)
            problem = check_choice(choice, context) or check_table(choice.table, context.max_gamma)
            if problem:
                return problem
            packed = pack(session, "trial", context.bucket, choice.hold_steps)
            session = unpack(packed, "trial").after_steps(context.bucket, 1)
        steps, rows = 10, 10 * context.batch_size
        outcome = Outcome(steps, steps if rows else 0, 100_000, rows, rows, rows)
        policy.update(stats, context, choice.gamma, outcome)
    except Exception as error:  # whatever a policy raises is its answer to the trial
        return words_of(error)
    return ""
