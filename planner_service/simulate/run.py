"""One run: a policy under a scenario with a seed, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightjar.errors import ConfigError
from planner_service.policies.policy import Policy
from planner_service.simulate.acceptance import Acceptance, stationary
from planner_service.simulate.arrivals import Arrivals
from planner_service.simulate.clairvoyant import Clairvoyant, best_gammas, prefill_us
from planner_service.simulate.cost import CostTable
from planner_service.simulate.intake import Intake
from planner_service.simulate.link import Chooser, Planned
from planner_service.simulate.noise import Noise
from planner_service.simulate.rows import Rows
from planner_service.simulate.worker import StepRecord, Worker

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All that a policy does not choose."""

    truth: CostTable = field(default_factory=lambda: CostTable.load("h200_7b"))
    noise: float = 0.25  # sigma of the lognormal noise on each cell of the truth
    kv_slope_factor: float = 1.0
    acceptance: Acceptance = field(default_factory=stationary)
    arrivals: Arrivals = field(default_factory=Arrivals)
    max_rows: int = 256
    kv_pool_tokens: int = 1_900_000
    max_gamma: int = 5
    max_catchup_tokens: int = 1024
    answer_delay_steps: int = 1
    jitter: float = 0.02  # sigma of the lognormal noise on each step's time

    @property
    def most_rows(self) -> int:
        """Rows that decode at once, and that the truth has costs for."""
        return min(self.max_rows, self.truth.max_batch_size)

    def true_cost(self, seed: int) -> CostTable:
        """The cost of steps in the run with this seed."""
        return self.truth.perturbed(seed, self.noise).with_kv_slope(self.kv_slope_factor)

    def check(self) -> None:
        """Refuse what would never take a decode step, or never end.

        Raises:
            ConfigError: There are too many rows, the pool is too small for one request, or no
                output has a second token.
        """
        lengths, rows = self.arrivals.lengths, self.most_rows
        if self.arrivals.kind == "closed" and not 1 <= self.arrivals.rows <= rows:
            raise ConfigError(f"a closed loop has 1 to {rows} rows here, not {self.arrivals.rows}")
        most = lengths.most + self.max_gamma + 1
        if self.arrivals.kind == "closed" and most > self.kv_pool_tokens:
            raise ConfigError(
                f"a closed loop needs a KV pool of at least {most} tokens, one request's, "
                f"not {self.kv_pool_tokens}"
            )
        if lengths.mean_output <= 1 and self.arrivals.kind != "azure":
            raise ConfigError("outputs of one token come from prefill: nothing would decode")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run did, step by step.

    Expected values are over the acceptance and the noise on time, given the rows that were there.
    Prefill by the target is in `seconds` alone: it is the same whatever the policy.
    """

    scenario: Scenario
    seed: int
    batch_size: Ints  # [steps], as all below
    num_kv_tokens: Ints
    gamma: Ints
    explored: NDArray[np.bool_]
    seconds: Floats  # simulated clock at the end of the step
    num_emitted: Ints  # tokens of decode rows
    expected_us: Floats  # of the step, catch-up and draft prefill included
    expected_tokens: Floats
    optimal_theta: Floats  # tokens per microsecond of the clairvoyant
    optimal_gamma: Ints
    catch_up_us: Floats  # of tokens emitted at gamma 0
    draft_prefill_us: Floats
    num_catch_up_tokens: Ints
    sum_stale_tokens: Ints  # before the step
    arm_us: Floats  # [steps, max_gamma + 1]: the decode step alone, at each gamma
    arm_prefill_us: Floats  # [steps, max_gamma + 1]: draft prefill in the long run
    arm_tokens: Floats  # [steps, max_gamma + 1]
    ttft_s: Floats  # [requests], first token after arrival
    latency_s: Floats  # [requests], last token after arrival
    num_finished: int
    num_refused: int
    num_preempted: int
    num_waiting: int  # at the end

    @cached_property
    def lost_tokens(self) -> Floats:
        """[steps]: tokens that the clairvoyant would have emitted in the same time, less ours."""
        return self.potential_tokens - self.expected_tokens

    @cached_property
    def potential_tokens(self) -> Floats:
        """[steps]: tokens of the clairvoyant in the time of each step."""
        return self.expected_us * self.optimal_theta

    def regret(self, first: int = 0, end: int | None = None) -> float:
        """Lost throughput over steps [first, end), in tokens."""
        return float(self.lost_tokens[first:end].sum())

    def lost_share(self, first: int = 0, end: int | None = None) -> float:
        """Lost throughput over steps [first, end), as a share of what was possible."""
        potential = float(self.potential_tokens[first:end].sum())
        return self.regret(first, end) / potential if potential > 0 else 0.0

    @property
    def num_steps(self) -> int:
        """Decode steps that ran."""
        return len(self.gamma)

    @property
    def tokens_per_second(self) -> float:
        """Throughput: tokens of decode rows over the whole run."""
        total = float(self.seconds[-1]) if self.num_steps else 0.0
        return float(self.num_emitted.sum()) / total if total > 0 else 0.0

    @property
    def num_switches(self) -> int:
        """Steps whose gamma differs from the one before."""
        return int(np.count_nonzero(np.diff(self.gamma)))

    @property
    def num_restarts(self) -> int:
        """Steps that speculate where the one before did not."""
        return int(np.count_nonzero((self.gamma[1:] > 0) & (self.gamma[:-1] == 0)))


def simulate(policy: Policy | None, scenario: Scenario, seed: int, num_steps: int) -> Result:
    """Run a policy; None is the clairvoyant, who knows the truth and takes the best each step.

    Equal arguments give equal results; the truth, the requests and their classes depend on the
    scenario and the seed alone.

    Raises:
        ConfigError: The scenario cannot run.
        EngineFailure: The policy raised, or answered out of range.
    """
    worker = start(policy, scenario, seed)
    worker.run(num_steps)
    return _result(scenario, seed, worker)


def start(policy: Policy | None, scenario: Scenario, seed: int) -> Worker:
    """The worker of a run, before its first step.

    Raises:
        ConfigError: The scenario cannot run.
    """
    scenario.check()
    truth = scenario.true_cost(seed)
    arrivals = scenario.arrivals
    noise = Noise(seed, jitter=scenario.jitter)
    max_gamma = min(scenario.max_gamma, truth.max_gamma)

    def clock() -> float:
        return worker.now

    chooser: Chooser
    if policy is None:
        chooser = Clairvoyant()
    else:
        chooser = Planned(
            policy, seed=seed, clock=clock, answer_delay_steps=scenario.answer_delay_steps
        )
    rows = Rows(scenario.most_rows)
    intake = Intake(
        requests=arrivals.requests(np.random.default_rng([seed, 0xA221])),
        acceptance=scenario.acceptance,
        noise=noise,
        rows=rows,
        closed_rows=arrivals.rows if arrivals.kind == "closed" else 0,
        max_rows=scenario.most_rows,
        kv_pool_tokens=scenario.kv_pool_tokens,
        max_row_tokens=max_gamma + 1,
    )
    worker = Worker(
        truth=truth,
        noise=noise,
        rows=rows,
        intake=intake,
        chooser=chooser,
        max_gamma=max_gamma,
        max_catchup_tokens=scenario.max_catchup_tokens,
    )
    if isinstance(chooser, Clairvoyant):
        chooser.look_at(rows, truth, arrivals.lengths, max_gamma)
    return worker


def _result(scenario: Scenario, seed: int, worker: Worker) -> Result:
    intake, truth, max_gamma = worker.intake, worker.truth, worker.max_gamma
    names = StepRecord._fields
    values = zip(*worker.steps, strict=True) if worker.steps else [()] * len(names)
    columns: dict[str, Sequence[Any]] = dict(zip(names, values, strict=True))
    batch_size = np.array(columns["batch_size"], np.int64)
    num_kv_tokens = np.array(columns["num_kv_tokens"], np.int64)
    gamma = np.array(columns["gamma"], np.int64)
    catch_up_us = np.array(columns["catch_up_us"], float)
    draft_prefill_us = np.array(columns["draft_prefill_us"], float)
    given = np.array(columns["expected_emitted"], float)
    steps = np.arange(len(gamma))
    arm_us = truth.steps_us(batch_size, num_kv_tokens)[:, : max_gamma + 1]
    sums = np.array(columns["sums"], float).reshape(len(gamma), max_gamma)
    accepted = np.concatenate([np.zeros((len(gamma), 1)), np.cumsum(sums, axis=1)], axis=1)
    arm_tokens = batch_size[:, None] + accepted
    arm_prefill_us = prefill_us(arm_tokens, truth, scenario.arrivals.lengths)
    best = best_gammas(arm_us, arm_tokens, arm_prefill_us)
    fresh_us = np.where(best > 0, np.array(columns["fresh_prefill_us"], float), 0.0)
    other_us = catch_up_us + draft_prefill_us + np.array(columns["extra_us"], float)
    return Result(
        scenario=scenario,
        seed=seed,
        batch_size=batch_size,
        num_kv_tokens=num_kv_tokens,
        gamma=gamma,
        explored=np.array(columns["explored"], bool),
        seconds=np.array(columns["seconds"], float),
        num_emitted=np.array(columns["num_emitted"], np.int64),
        expected_us=arm_us[steps, gamma] + other_us,
        expected_tokens=np.where(given < 0, arm_tokens[steps, gamma], given),
        optimal_theta=arm_tokens[steps, best] / (arm_us[steps, best] + fresh_us),
        optimal_gamma=best,
        catch_up_us=catch_up_us,
        draft_prefill_us=draft_prefill_us,
        num_catch_up_tokens=np.array(columns["num_catch_up_tokens"], np.int64),
        sum_stale_tokens=np.array(columns["sum_stale_tokens"], np.int64),
        arm_us=arm_us,
        arm_prefill_us=arm_prefill_us,
        arm_tokens=arm_tokens,
        ttft_s=np.array([r.first_token_at - r.arrived_at for r, _ in intake.finished]),
        latency_s=np.array([end - r.arrived_at for r, end in intake.finished]),
        num_finished=len(intake.finished),
        num_refused=intake.num_refused,
        num_preempted=intake.num_preempted,
        num_waiting=len(intake.waiting) + len(intake.prefilling),
    )
