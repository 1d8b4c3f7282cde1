"""Policy `epsilon_greedy` and the hold that several policies share, against figures by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from planner_service.context import Context, Outcome
from planner_service.policies import BUILT_IN
from planner_service.policies.held import Held, draw_from
from planner_service.policies.policy import Choice, Policy
from planner_service.session import Session, pack, unpack
from planner_service.sums import NOTHING, ArmSums, Stats, Totals


class Scripted(random.Random):
    """Draws what the test says, and fails on a draw too many."""

    def __init__(self, chances: Sequence[float] = (), arms: Sequence[int] = ()) -> None:
        super().__init__(0)
        self.chances, self.arms = list(chances), list(arms)

    def random(self) -> float:
        """The next chance."""
        return self.chances.pop(0)

    def randrange(self, *limits: int) -> int:  # type: ignore[override]
        """The next arm."""
        arm = self.arms.pop(0)
        assert arm < limits[0]
        return arm


def made(**parameters: Any) -> Policy:
    """The policy with some parameters."""
    return BUILT_IN["epsilon_greedy"].build({k: str(v) for k, v in parameters.items()})[0]


def arm(seconds_per_token: float, steps: int = 10) -> ArmSums:
    """An arm of one row a step and one token a step."""
    us = seconds_per_token * 1e6 * steps
    return ArmSums(steps, us, steps, steps, us, steps)


def one_step(gamma: int, us: int, emitted: int) -> Outcome:
    """The outcome of one step of one row."""
    return Outcome(1, 1, us, emitted, 1, emitted, reached=(1,) * gamma, accepted=(0,) * gamma)


def test_a_stream_follows_the_trace_computed_by_hand() -> None:
    """Unseen arms first, the largest of them; then the least loss, but for epsilon of the draws."""
    policy = made(gamma_max=2, hold_steps=2, epsilon=0.3)
    at = Context(1, max_gamma=2)
    rng = Scripted(chances=[0.3, 0.99, 0.5, 0.7, 0.1, 0.29], arms=[2, 0])
    stats, session = NOTHING, Session()

    def decide(ran: int = 0) -> tuple[int, int, int, bool, float]:
        nonlocal session
        choice, session = policy.select(at, stats, session.after_steps(1, ran), rng)
        propensity = pytest.approx(choice.propensity)
        return choice.gamma, choice.exploit_gamma, choice.hold_steps, choice.explored, propensity

    greedy, other = 0.7 + 0.3 / 3, 0.3 / 3  # .8 and .1
    assert decide() == (2, 2, 2, False, greedy)  # .3 is not below epsilon
    stats = stats.plus(policy.update(stats, at, 2, one_step(2, 12_000, 2)))  # 6 ms a token
    assert decide(1) == (2, 2, 1, False, greedy)  # held: nothing is drawn
    assert decide(1) == (1, 1, 2, False, greedy)  # 1 was never run
    stats = stats.plus(policy.update(stats, at, 1, one_step(1, 10_000, 2)))  # 5 ms
    assert decide(2) == (0, 0, 2, False, greedy)  # 0 was never run
    stats = stats.plus(policy.update(stats, at, 0, one_step(0, 5_500, 1)))  # 5.5 ms
    assert decide(5) == (1, 1, 2, False, greedy)  # 5 ms is the least; steps too many do not count
    assert decide(2) == (2, 1, 2, True, other)  # .1 explores
    stats = stats.plus(policy.update(stats, at, 2, one_step(2, 6_000, 3)))  # 18 ms / 5: 3.6 ms
    assert decide(2) == (0, 2, 2, True, other)
    assert (rng.chances, rng.arms) == ([], [])


def greedy(policy: Policy, stats: Stats, session: Session, **fields: Any) -> Choice:
    """The choice of a draw that does not explore."""
    return policy.select(Context(1, **fields), stats, session, Scripted([0.99]))[0]


def test_costs_are_charged_as_nightjar_does() -> None:
    """100 stale tokens at 50 us are 5 ms over gamma, once; 2 ms of prefill go to gamma > 0."""
    arms = {1: {0: arm(0.010), 1: arm(0.009), 2: arm(0.0085)}}
    stats = Stats(arms, Totals(catch_up_us=5_000, catch_up_tokens=100))
    fields: dict[str, Any] = {"max_gamma": 2, "sum_stale_tokens": 100}
    policy = made(gamma_max=2)
    assert greedy(policy, stats, Session(0), **fields).gamma == 0  # 10, 14 and 11 ms
    assert greedy(policy, stats, Session(1), **fields).gamma == 2
    free = made(gamma_max=2, switching_cost="none")
    assert greedy(free, stats, Session(0), **fields).gamma == 2
    prefill = Stats(arms, Totals(emitted=1000, draft_prefill_us=2_000_000))
    assert greedy(policy, prefill, Session(1), **fields).gamma == 0  # 10, 11 and 10.5 ms


def test_epsilon_decays_with_the_steps_of_its_batch_size() -> None:
    """With c = 30 steps, 30 steps leave half of it: .1; steps at other batch sizes none."""
    arms = {1: {0: arm(0.01), 1: arm(0.02), 2: arm(0.02)}, 2: {0: arm(0.01, 10**6)}}
    policy, at = made(gamma_max=2, epsilon=0.2, decay_steps=30), Context(1, max_gamma=2)
    explored = policy.select(at, Stats(arms), Session(), Scripted([0.09], [2]))[0]
    assert (explored.gamma, explored.explored) == (2, True)
    assert explored.propensity == pytest.approx(0.1 / 3)
    kept = policy.select(at, Stats(arms), Session(), Scripted([0.11]))[0]
    assert kept.propensity == pytest.approx(0.9 + 0.1 / 3)


def test_an_arm_that_cannot_run_any_more_is_drawn_anew() -> None:
    """At most 1 is feasible while 2 is held: the best of 0 and 1, with the chance of that draw."""
    policy, stats = made(gamma_max=2, epsilon=0.2), Stats({1: {g: arm(0.01 - g) for g in range(3)}})
    session = Session(2, {1: Held(2, 2, 5, 0, 0.9)})
    at = Context(1, max_gamma=2, feasible_max_gamma=1)
    choice, after = policy.select(at, stats, session, Scripted([0.5]))
    assert (choice.gamma, choice.exploit_gamma, choice.hold_steps) == (1, 2, 8)
    assert choice.propensity == pytest.approx(0.8 + 0.2 / 2)
    assert after.numbers[1] == Held(1, 2, 8, 0, choice.propensity)


def test_steps_that_cannot_speculate_end_no_hold() -> None:
    """With feasible gamma 0 the answer is 0, nothing is drawn, and what is held stays."""
    policy, off = made(), Context(1, feasible_max_gamma=0)
    session = Session(3, {1: Held(3, 2, 5, 0, 0.9), 2: Held(1, 4, 0, 0, 0.9)})
    choice, after = policy.select(off, NOTHING, session, Scripted())
    assert (choice.gamma, choice.exploit_gamma, choice.propensity) == (0, 5, 1.0)
    assert (after.previous_gamma, after.numbers) == (0, session.numbers)
    assert choice.table == {1: (3, 2), 2: (4, 4)}  # held; and over, so the best


def test_a_batch_size_that_is_never_timed_goes_by_the_nearest() -> None:
    """95 rows run with prompt tokens alone: what is known of 96 decides, not 5, never tried."""
    policy, known = made(), {gamma: arm(0.01 + abs(gamma - 2)) for gamma in range(6)}
    stats = Stats({40: {0: arm(0.01)}, 96: known})
    at = Context(95, max_gamma=5, feasible_max_gamma=5)
    assert policy.select(at, stats, Session(1), Scripted([0.99]))[0].gamma == 2
    closer = at._replace(batch_size=60)
    assert policy.select(closer, stats, Session(1), Scripted([0.99]))[0].gamma == 5  # never tried


def test_a_hold_goes_on_at_another_replica() -> None:
    """The worker asks since its hold is over: the steps of the decision count as run."""
    policy, stats = made(gamma_max=1, hold_steps=4), Stats({1: {0: arm(0.02), 1: arm(0.01)}})
    at = Context(1, max_gamma=1)
    choice, session = policy.select(at, stats, Session(), Scripted([0.99]))
    back = unpack(pack(session, "v", 1, 4), "v")
    assert policy.select(at, stats, back, Scripted([0.99]))[0].hold_steps == 4  # drawn anew
    early = unpack(pack(session, "v", 1, 3), "v")
    held = policy.select(at, stats, early, Scripted())[0]
    assert (held.gamma, held.hold_steps, held.propensity) == (1, 1, choice.propensity)


def test_an_arm_is_drawn_in_proportion_to_its_weight() -> None:
    """Of weights 1, 0, 3 the first quarter goes to arm 0, the rest to arm 2; rounding to none."""
    weights = [1.0, 0.0, 3.0]
    assert draw_from(weights, Scripted([0.24])) == (0, 0.25)
    assert draw_from(weights, Scripted([0.25])) == (2, 0.75)
    assert draw_from([1.0, 0.0], Scripted([1.0])) == (0, 1.0)
