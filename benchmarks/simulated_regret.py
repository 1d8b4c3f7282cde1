"""Every policy on the simulated worker, with seeds that nothing was tuned on; prints a table.

    python benchmarks/simulated_regret.py --jobs 2
    python benchmarks/simulated_regret.py --slope

Requests come at a rate drawn for each seed, from a tenth of what plain decoding can serve with 256
rows to a tenth more than that. Drafts are accepted by a mixture of classes that stays, drifts, or
changes at once: down at step 5,000 and up at step 10,000. Two truths: the shipped cost table with
each cell times lognormal noise, and the same with what KV tokens cost halved, which runs ours, its
rivals and the optima alone. Tuning may use seeds 0 to 9; seeds 1000 to 1019 are for this report.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nightjar.errors import ConfigError
from planner_service.simulate import acceptance, batch
from planner_service.simulate.arrivals import ENDLESS, Arrivals, FixedLengths
from planner_service.simulate.regret import best_table, loglog_slope, own_loss_regret
from planner_service.simulate.report import summarize
from planner_service.simulate.run import Result, Scenario, simulate

STEPS, FIRST_SEED, NUM_SEEDS = 20_000, 1000, 20
DOWN, UP = 5_000, 10_000
WINDOW, WITHIN = 100, 300  # a window of so many steps ends so many steps after a change
SCENARIOS = {
    "stationary": acceptance.stationary(),  # with a chance of acceptance drawn for each seed
    "drifting": acceptance.drifting(),
    "abrupt": acceptance.abrupt(DOWN, UP),
    "classes": acceptance.by_class(),
}
DEFAULT_SCENARIOS = ("stationary", "drifting", "abrupt")
LOADS = (0.1, 1.1)  # of what plain decoding can serve
ALPHAS = (0.45, 0.9)  # chances of acceptance in the stationary scenario
KV_SLOPES = (1.0, 0.5)
OURS = "model_guided"
# What ours is measured against: the paper's bandit and its variants, and what engines ship.
RIVALS = (
    "nightjar:estimator=mean_of_ratios",
    "nightjar",
    "nightjar:discount=0.999",
    "nightjar:restart=test",
    "nightjar:discount=0.999,restart=test",
    "ema_tiers",
    "table:preset=vllm",
    "table:preset=sglang",
    "table:preset=tensorrt_llm",
    "table:preset=tensorrt_llm_ngram",
)
OTHERS = (
    "off",
    "fixed:gamma=1",
    "fixed:gamma=3",
    "dsd",
    "tetris",
    "epsilon_greedy",
    "ucbspec",
    "exp3spec",
    "linucb",
    "lin_thompson",
    "regression",
    "q_learning",
)
HINDSIGHT = "table_in_hindsight"  # for each seed the best one, by the optimum's contexts
EDGES = (1, 5, 17, 33, 49, 65, 97, 129, 161, 193, 225)  # first batch sizes of its ranges
SLOPE_STEPS, SLOPE_FIRST, SLOPE_ROWS, SLOPE_SEEDS = 100_000, 1_000, (1, 8, 64), 4


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policies", default="all", help="names with parameters, split by spaces, or: all")
    add("--seeds", type=int, help="how many of the seeds [default: all]")
    add("--tuning", action="store_true", help="seeds 0 to 9 instead of those of the report")
    add("--first-seed", type=int, default=FIRST_SEED, help="of the report [default: %(default)s]")
    add("--steps", type=int, default=STEPS)
    add("--scenarios", default=",".join(DEFAULT_SCENARIOS), help="of " + ", ".join(SCENARIOS))
    add("--jobs", type=int, default=2, help="processes")
    add("--json", action="store_true", help="print every run as JSON")
    add("--slope", action="store_true", help="growth of the published bandit's regret instead")
    options = parser.parse_args()
    most = 10 if options.tuning else NUM_SEEDS
    number = most if options.seeds is None else options.seeds
    if not 1 <= number <= most:
        parser.error(f"--seeds: 1 to {most}")
    if options.jobs < 1 or options.steps < 1:
        parser.error("--jobs and --steps: at least 1")
    first = 0 if options.tuning else options.first_seed
    seeds = range(first, first + number)
    if options.slope:
        slope(seeds[:SLOPE_SEEDS], options.jobs, options.json)
        return
    policies = [OURS, *RIVALS, HINDSIGHT, *OTHERS, batch.CLAIRVOYANT]
    if options.policies != "all":
        policies = options.policies.split()
    try:
        for policy in policies:
            if policy != HINDSIGHT:
                batch.make(policy)
    except ConfigError as error:
        parser.error(str(error))
    names = options.scenarios.split(",")
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"--scenarios: unknown {', '.join(unknown)}; known: {', '.join(SCENARIOS)}")
    scenarios = {name: SCENARIOS[name] for name in names}
    compare(policies, scenarios, seeds, options.steps, options.jobs, options.json)


def compare(
    policies: Sequence[str],
    scenarios: dict[str, acceptance.Acceptance],
    seeds: range,
    steps: int,
    jobs: int,
    as_json: bool,
) -> None:
    """Each policy in each scenario, against both truths."""
    began = time.monotonic()
    cells = [
        (name, factor, [p for p in policies if factor == 1 or p not in OTHERS])
        for name in scenarios
        for factor in KV_SLOPES
    ]
    tasks = [
        batch.Task(
            policy=policy,
            scenario=loaded(scenarios[name], factor, seed),
            seed=seed,
            num_steps=steps,
        )
        for name, factor, ran in cells
        for policy in ran
        for seed in seeds
    ]
    answers = batch.run_all(tasks, jobs, figures)
    if as_json:
        runs = [
            {"policy": t.policy, "seed": t.seed, "scenario": t.scenario.acceptance.name}
            | {"kv_slope_factor": t.scenario.kv_slope_factor, **answer}
            for t, answer in zip(tasks, answers, strict=True)
        ]
        print(json.dumps({"steps": steps, "runs": runs}, indent=1))
        return
    print(f"{steps:,} steps, seeds {seeds[0]} to {seeds[-1]}, {time.monotonic() - began:.0f} s")
    left = iter(answers)
    for name, factor, ran in cells:
        rows = {policy: [next(left) for _ in seeds] for policy in ran}
        if rows:
            print(f"\n{name}, KV slope x {factor:g}\n{table(rows)}\n{verdict(rows)}")


def loaded(process: acceptance.Acceptance, kv_slope_factor: float, seed: int) -> Scenario:
    """A scenario with the seed's own load."""
    rng = np.random.default_rng([seed, 0x10AD])
    share, alpha = float(rng.uniform(*LOADS)), float(rng.uniform(*ALPHAS))
    if process.name == "stationary":
        process = acceptance.stationary(alpha)
    scenario = Scenario(acceptance=process, kv_slope_factor=kv_slope_factor)
    rate = share * capacity(scenario, seed)
    return replace(scenario, arrivals=Arrivals(kind="poisson", rate=rate))


def capacity(scenario: Scenario, seed: int) -> float:
    """Requests per second that plain decoding serves with all rows taken, prefill included."""
    truth, lengths = scenario.true_cost(seed), scenario.arrivals.lengths
    rows = scenario.most_rows
    decode_us = lengths.mean_output * float(truth.by_batch_size[rows, 0]) / rows
    return 1e6 / (decode_us + lengths.mean_prompt * truth.prefill_us_per_token)


def figures(task: batch.Task) -> dict[str, float | None]:
    """What is kept of one run."""
    policy = task.policy
    if policy == HINDSIGHT:
        best = simulate(None, task.scenario, task.seed, task.num_steps)
        policy = hindsight(best)
    result = simulate(batch.make(policy), task.scenario, task.seed, task.num_steps)
    kept: dict[str, float | None] = dict(summarize(policy, result).figures)
    for change in task.scenario.acceptance.changes:
        end = change + WITHIN
        share = result.lost_share(end - WINDOW, end) if result.num_steps >= end else None
        kept[f"lost_after_{change}"] = share
    return kept


def hindsight(result: Result) -> str:
    """The best table for the contexts of a run, as a policy."""
    gammas = best_table([result], EDGES)
    ends = [edge - 1 for edge in EDGES[1:]] + [result.scenario.max_rows]
    pairs = zip(zip(EDGES, ends, strict=True), gammas, strict=True)
    return "table:preset=custom,ranges=" + ",".join(f"{a}-{b}:{g}" for (a, b), g in pairs)


HEADINGS = ("regret", "spread", "lost", "lost>2k", "p50 s", "p95 s", "switches", "caught up")
NAMES = (
    "regret_tokens",
    "",
    "lost_share",
    "lost_share_settled",
    "latency_p50_s",
    "latency_p95_s",
    "num_switches",
    "num_catch_up_tokens",
)
FORMS = (",.0f", ",.0f", ".2%", ".2%", ".2f", ".2f", ",.0f", ",.0f")


def table(rows: dict[str, list[dict[str, float | None]]]) -> str:
    """Means over the seeds, least regret first; windows: median and worst."""
    windows = [name for name in next(iter(rows.values()))[0] if name.startswith("lost_after")]
    heads = ["policy", *HEADINGS]
    for name in windows:
        heads += [f"{name.rpartition('_')[2]}: median", "worst"]
    lines = [heads]
    for policy in sorted(rows, key=lambda policy: mean(rows[policy], "regret_tokens")):
        runs = rows[policy]
        regrets = values(runs, "regret_tokens")
        cells = [policy]
        for name, form in zip(NAMES, FORMS, strict=True):
            value = mean(runs, name) if name else statistics.pstdev(regrets)
            cells.append("-" if math.isnan(value) else format(value, form))
        for name in windows:
            shares = values(runs, name)
            cells += (
                [f"{statistics.median(shares):.1%}", f"{max(shares):.1%}"] if shares else ["-", "-"]
            )
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def values(runs: Sequence[dict[str, float | None]], name: str) -> list[float]:
    """A figure of the runs that have it."""
    return [value for run in runs if (value := run.get(name)) is not None]


def mean(runs: Sequence[dict[str, float | None]], name: str) -> float:
    """Mean of a figure over the runs that have it; NaN if none has."""
    known = values(runs, name)
    return statistics.fmean(known) if known else math.nan


def verdict(rows: dict[str, list[dict[str, float | None]]]) -> str:
    """How ours stands to the best of its rivals."""
    rivals = {policy: mean(rows[policy], "regret_tokens") for policy in RIVALS if policy in rows}
    if OURS not in rows or not rivals:
        return ""
    best = min(rivals, key=lambda policy: rivals[policy])
    ratio = mean(rows[OURS], "regret_tokens") / rivals[best]
    return f"{OURS} has {ratio:.2f} of the regret of its best rival, {best}"


def slope(seeds: range, jobs: int, as_json: bool) -> None:
    """How the regret of the paper's bandit grows over stationary steps."""
    published = "nightjar:estimator=mean_of_ratios"
    policies = (published, f"{published},switching_cost=none", "nightjar")
    tasks = [
        batch.Task(policy=policy, scenario=still(rows), seed=seed, num_steps=SLOPE_STEPS)
        for policy in policies
        for rows in SLOPE_ROWS
        for seed in seeds
    ]
    answers = batch.run_all(tasks, jobs, slopes)
    if as_json:
        runs = [
            {"policy": t.policy, "rows": t.scenario.arrivals.rows, "seed": t.seed, **answer}
            for t, answer in zip(tasks, answers, strict=True)
        ]
        print(json.dumps(runs, indent=1))
        return
    print(
        f"log-log slopes of regret, steps {SLOPE_FIRST:,} to {SLOPE_STEPS:,}, 1 is linear: "
        f"mean (least to most) over seeds {seeds[0]} to {seeds[-1]}\n"
    )
    print(f"{'policy':<60}{'rows':>5}{'own loss':>22}{'lost throughput':>22}{'lost':>8}")
    left = iter(answers)
    for policy in policies:
        for rows in SLOPE_ROWS:
            runs = [next(left) for _ in seeds]
            own, lost = (spread(runs, name) for name in ("own_loss_slope", "throughput_slope"))
            print(f"{policy:<60}{rows:>5}{own:>22}{lost:>22}{mean(runs, 'lost_share'):>8.1%}")


def spread(runs: Sequence[dict[str, Any]], name: str) -> str:
    """Mean, least and most of a figure."""
    known = values(runs, name)
    return f"{statistics.fmean(known):.2f} ({min(known):.2f} to {max(known):.2f})"


def still(rows: int) -> Scenario:
    """A batch of rows that never end, whose steps cost the same for ever."""
    lengths = FixedLengths(512, ENDLESS)
    return Scenario(
        arrivals=Arrivals(rows=rows, lengths=lengths), kv_slope_factor=0, kv_pool_tokens=10**12
    )


def slopes(task: batch.Task) -> dict[str, Any]:
    """Slopes of one run."""
    result = simulate(batch.make(task.policy), task.scenario, task.seed, task.num_steps)
    estimator = "mean_of_ratios" if "mean_of_ratios" in task.policy else "ratio_of_sums"
    own = own_loss_regret(result, estimator)
    lost = np.cumsum(result.lost_tokens)
    return {
        "own_loss_slope": loglog_slope(own, SLOPE_FIRST),
        "throughput_slope": loglog_slope(lost, SLOPE_FIRST),
        "lost_share": result.lost_share(),
        "own_loss_regret_s": [float(own[n - 1]) for n in (1_000, 10_000, 100_000)],
        "lost_tokens": [float(lost[n - 1]) for n in (1_000, 10_000, 100_000)],
    }


if __name__ == "__main__":
    main()
