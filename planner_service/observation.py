"""What every policy learns from steps: the sums that all of them share."""

from __future__ import annotations

from planner_service.context import Context, Outcome
from planner_service.sums import NOTHING, ArmSums, Bucket, Stats, Totals
from planner_service.switching import learned


def observe(context: Context, gamma: int, outcome: Outcome) -> Stats:
    """The sums of some steps.

    Steps that could not have speculated teach no more than what catching up cost: a draft that
    is catching up is why they could not.
    """
    if context.feasible_max_gamma == 0:
        totals = Totals(
            catch_up_us=outcome.catch_up_us,
            catch_up_tokens=outcome.num_catch_up_tokens,
            draft_prefill_us=outcome.draft_prefill_us,
        )
        return Stats(totals=totals, own=learned(context, outcome)) if any(totals) else NOTHING
    buckets: dict[int, Bucket] = {}
    steps, rows, emitted = (
        outcome.num_timed_steps,
        outcome.num_timed_rows,
        outcome.num_timed_emitted,
    )
    if steps:
        ratio_us = outcome.step_us * rows / emitted if emitted else 0.0
        ratio_steps = steps if emitted else 0
        arm = ArmSums(steps, outcome.step_us, emitted, rows, ratio_us, ratio_steps)
        buckets[context.bucket] = {gamma: arm}
    totals = Totals(
        outcome.num_steps,
        steps,
        outcome.num_emitted,
        outcome.catch_up_us,
        outcome.num_catch_up_tokens,
        outcome.draft_prefill_us,
    )
    own = learned(context, outcome)
    return Stats(buckets, totals, outcome.reached, outcome.accepted, own)
