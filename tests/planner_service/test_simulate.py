"""The simulator against figures, closed forms and its own books."""

import random

import numpy as np
import pytest

from nightjar.errors import ConfigError, EngineFailure
from planner_service.context import Context, Outcome
from planner_service.observation import observe
from planner_service.policies import BUILT_IN
from planner_service.policies.policy import Choice, Policy
from planner_service.session import Session
from planner_service.simulate import acceptance
from planner_service.simulate.arrivals import (
    ENDLESS,
    SHARE_GPT_LIKE,
    Arrivals,
    FixedLengths,
    read_trace,
)
from planner_service.simulate.cost import CostTable
from planner_service.simulate.noise import Noise
from planner_service.simulate.regret import (
    best_table,
    loglog_slope,
    mean_inverse,
    own_loss_regret,
)
from planner_service.simulate.rows import Rows
from planner_service.simulate.run import Scenario, simulate, start
from planner_service.simulate.verify import verify, verify_likeliest
from planner_service.sums import Stats

TRUTH = CostTable.load("h200_7b")
ENDLESS_ROWS = FixedLengths(512, ENDLESS)
# Measured forwards, ms: tokens -> target, draft.
FORWARDS = {
    1: (4.51, 0.93),
    4: (4.56, 0.94),
    32: (4.76, 0.96),
    128: (5.04, 1.10),
    256: (7.15, 1.33),
    512: (12.5, 1.77),
}


def fixed(gamma: int) -> Policy:
    """Policy `fixed`."""
    return BUILT_IN["fixed"].build({"gamma": str(gamma)})[0]


def still(rows: int, **changes: object) -> Scenario:
    """Rows that never end, without noise; KV tokens cost nothing."""
    arrivals = Arrivals(rows=rows, lengths=ENDLESS_ROWS)
    given = {"noise": 0.0, "jitter": 0.0, "kv_slope_factor": 0.0, "kv_pool_tokens": 10**12}
    return Scenario(arrivals=arrivals, **{**given, **changes})  # type: ignore[arg-type]


class Scripted(Policy):
    """Takes its gammas from a list, one a question; remembers all that it is told."""

    def __init__(self, gammas: list[int], hold_steps: int = 1) -> None:
        self.gammas, self.hold_steps = gammas, hold_steps
        self.asked: list[Context] = []
        self.told: list[tuple[Context, int, Outcome]] = []

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """The next gamma; it stays with the last."""
        gamma = self.gammas[min(len(self.asked), len(self.gammas) - 1)]
        self.asked.append(context)
        run = min(gamma, context.largest_gamma)
        table = dict.fromkeys(range(257), (gamma, gamma))
        return Choice(run, gamma, self.hold_steps, False, 1.0, table), session

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """Remember."""
        outcome.check("outcome", gamma)
        context.check("context")
        self.told.append((context, gamma, outcome))
        return observe(context, gamma, outcome)


# ---- what steps cost -------------------------------------------------------------------


def forward_us(num_tokens: int, model: int) -> float:
    """A forward, between the measured ones and beyond the last in straight lines."""
    tokens = list(FORWARDS)
    times = [pair[model] * 1000 for pair in FORWARDS.values()]
    if num_tokens <= tokens[-1]:
        return float(np.interp(num_tokens, tokens, times))
    return times[-1] + (times[-1] - times[-2]) / 256 * (num_tokens - tokens[-1])


def test_the_shipped_table_follows_from_the_measured_forwards() -> None:
    """Each cell is verification, drafts of which the first takes two tokens, acceptance and KV."""
    for size, row in zip(TRUTH.batch_sizes, TRUTH.step_us, strict=True):
        kv_us = size * 512 * 57_344 / 4.22e6
        draft_kv_us = size * 512 * 12_288 / 4.22e6
        for gamma, us in enumerate(row):
            expected = forward_us(size * (gamma + 1), 0) + kv_us
            if gamma:
                drafts = forward_us(2 * size, 1) + (gamma - 1) * forward_us(size, 1)
                expected += drafts + gamma * draft_kv_us + 150
            assert us == pytest.approx(expected, abs=0.2)


@pytest.mark.parametrize(
    ("size", "ar_ms", "best", "speedups", "fixed_3"),
    [
        (1, 4.52, (2, 3, 4), (1.35, 1.52, 1.80), (1.31, 1.52, 1.77)),
        (8, 4.64, (2, 3, 4), (1.33, 1.50, 1.77), (1.29, 1.50, 1.75)),
        (32, 4.98, (2, 3, 3), (1.32, 1.49, 1.73), (1.28, 1.49, 1.73)),
        (64, 5.30, (1, 1, 2), (1.24, 1.32, 1.44), (1.03, 1.20, 1.40)),
        (96, 5.61, (1, 1, 2), (1.09, 1.15, 1.22), (0.85, 0.99, 1.15)),
        (128, 5.93, (0, 1, 1), (1.0, 1.04, 1.10), (0.73, 0.85, 0.99)),
        (192, 7.43, (0, 0, 1), (1.0, 1.0, 1.02), (0.67, 0.78, 0.91)),
        (256, 8.93, (0, 0, 0), (1.0, 1.0, 1.0), (0.63, 0.74, 0.86)),
    ],
)
def test_the_shipped_table_gives_the_reference_speedups(
    size: int,
    ar_ms: float,
    best: tuple[int, ...],
    speedups: tuple[float, ...],
    fixed_3: tuple[float, ...],
) -> None:
    """Plain decoding, the best gamma and its speed-up at three acceptances, and gamma 3's."""
    us = TRUTH.steps_us(np.array([size]), np.array([size * 512]))[0]
    assert us[0] / 1000 == pytest.approx(ar_ms, rel=0.01)
    for alpha, gamma, speedup, third in zip((0.6, 0.7, 0.8), best, speedups, fixed_3, strict=True):
        tokens = np.cumsum(alpha ** np.arange(len(us)))
        gains = tokens / us * us[0]
        assert int(np.argmax(gains)) == gamma
        assert gains.max() == pytest.approx(speedup, abs=0.02)
        assert gains[3] == pytest.approx(third, abs=0.02)


def test_kv_tokens_cost_by_a_slope_that_can_be_halved() -> None:
    """At the table's context nothing changes; beyond it the slope's share does."""
    size, here, there = np.array([256]), np.array([256 * 512]), np.array([256 * 2048])
    half = TRUTH.with_kv_slope(0.5)
    assert (half.steps_us(size, here) == TRUTH.steps_us(size, here)).all()
    more = TRUTH.steps_us(size, there) - TRUTH.steps_us(size, here)
    halved = half.steps_us(size, there) - half.steps_us(size, here)
    assert halved == pytest.approx(more / 2)
    assert more[0, 0] == pytest.approx(256 * 1536 * 57_344 / 4.22e6, rel=1e-3)


def test_noise_on_the_truth_is_the_seeds_alone() -> None:
    """The same seed gives the same truth; cells move apart by about sigma."""
    one, again, other = (TRUTH.perturbed(seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    ratios = np.log(np.array(one.step_us) / np.array(TRUTH.step_us))
    assert 0.18 < ratios.std() < 0.32
    assert TRUTH.perturbed(1, 0.0) == TRUTH


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"name": 1}', "null"],
)
def test_a_broken_table_is_refused(tmp_path, text: str) -> None:
    """In a sentence that names the file."""
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"table\.json"):
        CostTable.load(str(path))


# ---- acceptance and arrivals -----------------------------------------------------------


def test_mixtures_move_as_they_say() -> None:
    """Stationary shares stay, drifting ones go in a line and return, abrupt ones jump."""
    drift, jump = acceptance.drifting(100), acceptance.abrupt(50, 80)
    assert drift.shares(0) == pytest.approx((0.9, 0.1))
    assert drift.shares(50) == pytest.approx((0.5, 0.5))
    assert drift.shares(100) == pytest.approx((0.1, 0.9))
    assert drift.shares(450) == pytest.approx(drift.shares(50))
    assert [jump.shares(step)[0] for step in (0, 49, 50, 79, 80)] == [0.9, 0.9, 0.1, 0.1, 0.9]
    assert jump.changes == (50, 80)
    assert drift.changes == ()


def test_running_requests_change_with_an_abrupt_mixture() -> None:
    """From the step of the change on, the mean chance of the rows is the new mixture's."""
    scenario = still(128, acceptance=acceptance.abrupt(10, 20))
    result = simulate(fixed(1), scenario, 3, 30)
    first = (result.arm_tokens[:, 1] - result.arm_tokens[:, 0]) / 128
    assert first[:10] == pytest.approx(0.805, abs=0.06)
    assert first[10:20] == pytest.approx(0.445, abs=0.06)
    assert first[20:] == pytest.approx(0.805, abs=0.06)


def test_rates_and_lengths_are_those_asked_for() -> None:
    """Poisson gaps have the rate's mean, bursts their average; lengths have ShareGPT's means."""
    for kind, rate, expected in (("poisson", 20.0, 20.0), ("burst", 2.0, 2 * 310 / 35.0)):
        requests = Arrivals(kind=kind, rate=rate).requests(np.random.default_rng(5))  # type: ignore[arg-type]
        times = [next(requests).arrived_at for _ in range(8_000)]
        assert times == sorted(times)
        assert len(times) / times[-1] == pytest.approx(expected, rel=0.05)
    prompts, outputs = SHARE_GPT_LIKE.draw(np.random.default_rng(1), 0, 40_000)
    assert np.mean(prompts) == pytest.approx(161.3, rel=0.03)
    assert np.mean(outputs) == pytest.approx(338, rel=0.03)
    assert min(prompts) >= 1


def test_a_trace_keeps_times_and_lengths(tmp_path) -> None:
    """Times count from its first request; what is no trace is refused with its line."""
    path = tmp_path / "trace.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = "2023-11-16 18:15:48.6805900,374,44\n2023-11-16 18:15:46.6805900,396,0\n"
    path.write_text(head + rows)
    lengths, times = read_trace(str(path))
    assert times == pytest.approx((0, 2))
    assert lengths.draw(np.random.default_rng(0), 1, 2) == ([374, 396], [44, 1])
    result = simulate(
        fixed(2),
        Scenario(arrivals=Arrivals(kind="azure", rate=1, lengths=lengths, trace=times)),
        0,
        99,
    )
    assert result.num_finished == 2
    for wrong in ("", "a,b\n", head, head + "x,1,1\n", head + "2023-11-16 18:15:46,1\n"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"trace\.csv"):
            read_trace(str(path))


def test_accepted_drafts_have_their_chances() -> None:
    """By position, with one uniform number a row; extra drafts verify no more, and gain."""
    rows, noise = Rows(128), Noise(3, jitter=0)
    chances = acceptance.RequestClass(name="", alpha=0.7, falloff=0.9).prefixes
    requests = Arrivals(lengths=ENDLESS_ROWS).requests(np.random.default_rng(0))
    for _ in range(128):
        request = next(requests)
        request.num_emitted = 1
        rows.admit(request, np.array(chances), caught_up=True)
    rows.settle()
    plain = [verify(rows, noise, 3, None) for _ in range(400)]
    mean = np.mean([done.accepted for done in plain], axis=0) / 128
    assert mean == pytest.approx(chances[:3], abs=0.01)
    assert all(done.reached == [128, *done.accepted[:-1]] for done in plain)
    chosen = [verify_likeliest(rows, noise, 3, 2, None) for _ in range(400)]
    got = np.mean([sum(done.accepted) for done in chosen])
    said = np.mean([done.expected for done in chosen]) - 128
    assert got == pytest.approx(said, rel=0.02)
    assert got > 1.05 * np.mean([sum(done.accepted) for done in plain])
    for done in chosen:
        assert list(done.reached) == sorted(done.reached, reverse=True)
        assert sum(done.accepted) == done.by_row.sum()


# ---- the worker ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_or_made(seed: int) -> None:
    """Requests, tokens and KV add up in any load, with preemption and with every kind of policy."""
    rng = random.Random(seed)
    names = ("nightjar", "tetris", "table", "fixed", "ema_tiers", "off")
    scenario = Scenario(
        acceptance=rng.choice([acceptance.by_class(), acceptance.abrupt(100, 200)]),
        arrivals=Arrivals(
            kind=rng.choice(["closed", "poisson", "burst"]), rows=rng.randint(1, 200), rate=9.0
        ),
        kv_pool_tokens=rng.choice([6_000, 20_000, 10**6]),
        max_gamma=rng.randint(0, 8),
        answer_delay_steps=rng.randint(0, 3),
    )
    worker = start(BUILT_IN[names[seed]].build({})[0], scenario, seed)
    for num_steps in range(50, 800, 50):
        worker.run(num_steps)
        rows, intake = worker.rows, worker.intake
        held = [*rows.requests, *intake.waiting, *(request for request, _ in intake.prefilling)]
        assert len({id(request) for request in held}) == len(held)
        emitted = rows.total - [request.num_prompt_tokens for request in rows.requests] - rows.left
        done = sum(request.num_output_tokens for request, _ in intake.finished)
        waiting = sum(request.num_emitted for request in held[len(rows) :])
        decoded = sum(step.num_emitted for step in worker.steps)
        counted = int(emitted.sum()) + done + waiting
        begun = counted - decoded - intake.num_first_tokens
        assert begun == (0 if scenario.arrivals.kind != "closed" else worker_begun(scenario, seed))
        assert rows.num_kv_tokens == int((rows.total - rows.left).sum())
        assert (rows.left > 0).all()
        stale = rows.stale_prompt + rows.stale_emitted
        assert (rows.sum_stale, rows.max_stale) == (stale.sum(), max([0, *stale]))
        assert (stale >= 0).all()
        if len(rows) + len(intake.prefilling) > 1:
            assert intake.num_kv_used <= scenario.kv_pool_tokens + len(rows) * 9
    assert {step.gamma for step in worker.steps} <= set(range(scenario.max_gamma + 1))


def worker_begun(scenario: Scenario, seed: int) -> int:
    """Tokens that the rows of a closed loop have emitted when it begins."""
    return sum(request.num_emitted for request in start(None, scenario, seed).rows.requests)


@pytest.mark.parametrize(("rows", "gamma"), [(1, 4), (32, 3), (100, 1), (256, 0)])
def test_a_fixed_gamma_has_the_throughput_of_the_closed_form(rows: int, gamma: int) -> None:
    """Rows times mean tokens over the cost of a step."""
    result = simulate(fixed(gamma), still(rows), 1, 3_000)
    tokens = rows * sum(0.7**i for i in range(gamma + 1))
    expected = tokens / TRUTH.by_batch_size[rows, gamma] * 1e6
    settled = slice(10, None)  # the first answer is on its way
    us = result.expected_us[settled].sum()
    assert result.expected_tokens[settled].sum() / us * 1e6 == pytest.approx(expected, rel=1e-9)
    seconds = result.seconds[-1] - result.seconds[9]
    assert result.num_emitted[settled].sum() / seconds == pytest.approx(expected, rel=0.02)


def test_the_clairvoyant_has_no_regret() -> None:
    """None where rows stay; where they come and go, none but what catching up costs."""
    for rows in (1, 64, 200):
        lost = simulate(None, still(rows, noise=0.25), 2, 300).lost_tokens
        assert lost == pytest.approx(np.zeros(300), abs=1e-9)
    busy = Scenario(arrivals=Arrivals(kind="poisson", rate=30), acceptance=acceptance.by_class())
    result = simulate(None, busy, 2, 6_000)
    caught_up = float((result.catch_up_us * result.optimal_theta).sum())
    potential = float(result.potential_tokens.sum())
    assert abs(result.regret() - caught_up) < 0.0015 * potential
    assert (result.gamma == result.optimal_gamma).mean() > 0.98


def test_no_policy_beats_the_clairvoyant() -> None:
    """A step's expected tokens never exceed the optimum in the same time, endless rows."""
    for name in ("nightjar", "off", "table", "model_guided"):
        result = simulate(BUILT_IN[name].build({})[0], still(48, noise=0.25), 4, 800)
        assert (result.lost_tokens > -1e-9).all()
        assert result.regret() > 0


def test_equal_arguments_give_equal_runs() -> None:
    """Every column, for a policy that draws; another seed gives another run."""
    scenario = Scenario(arrivals=Arrivals(kind="poisson", rate=20))
    one, again, other = (
        simulate(BUILT_IN["nightjar"].build({})[0], scenario, seed, 400) for seed in (7, 7, 8)
    )
    assert (one.seconds == again.seconds).all()
    assert (one.gamma == again.gamma).all()
    assert (one.latency_s == again.latency_s).all()
    assert one.seconds[-1] != other.seconds[-1]


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_an_answer_takes_its_steps(delay: int) -> None:
    """The table of the newest decision serves meanwhile; each hold is one step long."""
    policy = Scripted([1, 2, 3, 4])
    gammas = simulate(policy, still(4, answer_delay_steps=delay), 0, 30).gamma.tolist()
    # The first step asks; its answer rules one step after the delay.
    changes = [gammas.index(gamma) for gamma in (1, 2, 3, 4)]
    assert gammas[: changes[0]] == [0] * (1 + delay)
    assert np.diff(changes).tolist() == [1 + delay] * 3


def test_the_draft_catches_up_what_gamma_0_left() -> None:
    """All stale tokens, oldest rows first, at most the budget in a step; others run plainly."""
    policy = Scripted([0, 2], hold_steps=40)
    result = simulate(policy, still(50), 0, 60)
    again = int(np.argmax(result.num_catch_up_tokens > 0))
    stale = result.sum_stale_tokens[again]
    assert stale == 50 * again
    assert result.num_catch_up_tokens.max() <= 1024
    assert 2 * stale > result.num_catch_up_tokens.sum() >= stale
    assert result.expected_tokens[again] < result.arm_tokens[again, 2]
    assert result.catch_up_us[again] == pytest.approx(
        TRUTH.catching_up_us(1024, np.ceil(1024 / again)), rel=1e-6
    )
    assert result.sum_stale_tokens[again + 6] == 0


def test_reports_say_what_ran() -> None:
    """Sums over all reports are those of the steps; steps with prompt tokens teach no time."""
    policy = Scripted([3], hold_steps=7)
    scenario = Scenario(arrivals=Arrivals(rows=40), acceptance=acceptance.by_class(), jitter=0)
    result = simulate(policy, scenario, 0, 500)
    steps = sum(outcome.num_steps for _, _, outcome in policy.told)
    assert 490 < steps <= 500
    assert sum(o.num_emitted for _, _, o in policy.told) == result.num_emitted[:steps].sum()
    assert 0 < sum(o.num_timed_steps for _, _, o in policy.told) < steps
    assert all(o.num_timed_steps == 0 for _, _, o in policy.told if o.num_prefill_tokens)
    prefill_us = sum(o.draft_prefill_us for _, _, o in policy.told)
    assert prefill_us == pytest.approx(result.draft_prefill_us[:steps].sum(), rel=1e-3)
    reached = sum(o.reached[0] for _, _, o in policy.told if o.reached)
    accepted = sum(o.accepted[0] for _, _, o in policy.told if o.accepted)
    prefixes = acceptance.by_class().prefixes[:, 0]
    assert prefixes.min() < accepted / reached < prefixes.max()


def test_extra_drafts_cost_their_draft_steps() -> None:
    """A TETRIS step costs its gamma's step and the extra draft; it emits more than gamma alone."""
    tetris = BUILT_IN["tetris"].build({"gamma": "2", "extra": "2"})[0]
    scenario = still(64)
    result = simulate(tetris, scenario, 0, 400)
    extra_us = result.expected_us - result.arm_us[np.arange(400), result.gamma]
    assert extra_us[10:] == pytest.approx(2 * TRUTH.draft_by_batch_size[64])
    assert result.num_emitted[10:].mean() > 1.03 * result.arm_tokens[10:, 2].mean()
    assert result.expected_tokens[10:].mean() == pytest.approx(
        result.num_emitted[10:].mean(), rel=0.02
    )


def test_a_policy_that_fails_ends_the_run() -> None:
    """It would be withdrawn, and the run would be that of plain decoding."""

    class Broken(Scripted):
        def select(self, *_: object) -> tuple[Choice, Session]:  # type: ignore[override]
            raise ZeroDivisionError

    with pytest.raises(EngineFailure):
        simulate(Broken([1]), still(2), 0, 10)


# ---- regret in other terms -------------------------------------------------------------


@pytest.mark.parametrize(
    ("gamma", "rows", "bias"),
    [(3, 1, 1.37), (3, 2, 1.17), (3, 4, 1.07), (3, 8, 1.03), (5, 1, 1.54), (5, 8, 1.05)],
)
def test_the_mean_of_ratios_has_its_known_bias(gamma: int, rows: int, bias: float) -> None:
    """E[T/N] times E[N]/T, at an acceptance of 0.7."""
    process = acceptance.stationary(0.7)
    mean_tokens = 1 + process.prefixes[0, :gamma].sum()
    assert mean_inverse(process, rows, gamma) * mean_tokens == pytest.approx(bias, abs=0.006)


def test_own_loss_regret_is_none_for_the_best_arm_and_linear_for_another() -> None:
    """With hindsight, without switches."""
    best, other = (simulate(fixed(gamma), still(64), 0, 500) for gamma in (1, 0))
    regret = own_loss_regret(best, "ratio_of_sums")
    assert regret[20:] == pytest.approx(regret[20])
    growing = own_loss_regret(other, "ratio_of_sums")
    per_token_s = 64 * other.arm_us[0] / other.arm_tokens[0] / 1e6
    assert growing[-1] == pytest.approx(500 * (per_token_s[0] - per_token_s[1]), rel=1e-6)
    assert loglog_slope(growing, 50) == pytest.approx(1.0, abs=1e-6)
    assert loglog_slope(np.sqrt(np.arange(1, 2_000)), 10) == pytest.approx(0.5, abs=0.02)


def test_the_best_table_takes_the_best_gamma_of_each_range() -> None:
    """Ranges that no run visited are plain."""
    runs = [simulate(None, still(rows), 0, 50) for rows in (8, 128)]
    assert best_table(runs, (1, 33, 100)) == [3, 0, 1]


def test_more_rows_than_the_truth_knows_are_refused() -> None:
    """In a sentence, not by an index out of range."""
    with pytest.raises(ConfigError, match="1 to 256 rows"):
        simulate(None, still(300), 0, 1)
