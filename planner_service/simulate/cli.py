"""`nightjar simulate`: compare policies on a simulated worker whose true costs are known."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace

from nightjar.errors import ConfigError
from planner_service.context import MAX_GAMMA
from planner_service.simulate import acceptance, batch, plot, report
from planner_service.simulate.arrivals import (
    ENDLESS,
    SHARE_GPT_LIKE,
    Arrivals,
    FixedLengths,
    Lengths,
    read_trace,
)
from planner_service.simulate.cost import CostTable
from planner_service.simulate.run import Scenario

SCENARIOS = {
    "stationary": "drafts are accepted with chance --alpha, for ever",
    "classes": "three classes of requests, of which drafts fit some far better than others",
    "drifting": "the mixture of two classes moves back and forth every 12,000 steps",
    "abrupt": "the mixture falls at step 5,000 and rises at step 10,000, for running requests too",
}
ARRIVALS = {
    "closed": "--rows requests at any time; each that ends makes room for the next",
    "poisson": "--rate requests per second",
    "burst": "a spike of 40 requests per second, times --rate, over and over",
    "oscillation": "4 and 28 requests per second in turns, times --rate",
    "azure": "the times and lengths of the file --trace, --rate times as fast",
}
DEFAULT_POLICIES = ("off", "fixed:gamma=3", "nightjar", "model_guided")
MAX_ROWS = Scenario.max_rows
MAX_SEEDS, MAX_STEPS, MAX_JOBS = 1_000, 1_000_000, 256


def _listed(words: dict[str, str]) -> str:
    return "\n".join(f"  {name:<12} {text}" for name, text in words.items())


EPILOG = f"""scenarios, how drafts are accepted:
{_listed(SCENARIOS)}

arrivals, when requests come:
{_listed(ARRIVALS)}

columns of the answer, means over the seeds:
  tok/s        tokens that the target emitted per simulated second, prefill's first tokens aside
  regret       tokens that the clairvoyant would have emitted in the same time, beyond the policy's;
               it knows the true cost of every gamma and every row's chance of acceptance
  lost         regret as a share of what the clairvoyant would have emitted
  lost>2k      the same after the first 2,000 steps
  TTFT95       time to the first token, 95th percentile
  expl         share of steps that ran an arm to explore it
  caught up    tokens emitted at gamma 0 that the draft had to compute later

examples:
  nightjar simulate
  nightjar simulate --policy nightjar --policy table:preset=vllm --rows 128 --seeds 0-4
  nightjar simulate --scenario abrupt --arrivals poisson --rate 20 --png abrupt.png
  nightjar simulate --policy table:preset=custom,ranges=1-64:2,65-256:0 --json
  nightjar simulate --arrivals azure --trace AzureLLMInferenceTrace_conv.csv --rate 2

Each run changes every cell of the true cost by its own noise (--noise), so no table is right
beforehand. The same seed gives every policy the same costs and the same requests. Lengths are
ShareGPT-like: lognormal with ShareGPT's means; the texts, hence acceptance, are not ShareGPT's."""


def main(argv: Sequence[str]) -> int:
    """Run what the flags say; returns the exit status."""
    options = _parser().parse_args(argv)
    policies = options.policy or [name for name in DEFAULT_POLICIES if _is_known(name)]
    for index, text in enumerate(policies):
        batch.make(text)
        if text in policies[:index]:
            raise ConfigError(f"--policy {text!r} is given twice")
    scenario = _scenario(options)
    scenario.check()
    steps = int(_number("--steps", options.steps, 1, MAX_STEPS, whole=True))
    jobs = int(_number("--jobs", options.jobs, 1, MAX_JOBS, whole=True))
    if options.png:
        plot.check(options.png)
    tasks = [
        batch.Task(policy=policy, scenario=scenario, seed=seed, num_steps=steps)
        for policy in policies
        for seed in _seeds(options.seeds)
    ]
    summaries = batch.run_all(tasks, jobs, batch.run)
    words = _words(options, scenario, steps)
    if options.png:
        plot.write(options.png, summaries, words)
    if options.json:
        shown = {"scenario": words, "steps": steps, "policies": report.as_json(summaries)}
        print(json.dumps(shown, indent=2))
    else:
        print(f"{words}\n\n{report.table(summaries)}")
    return 0


def _is_known(text: str) -> bool:
    try:
        batch.make(text)
    except ConfigError:
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nightjar simulate",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--policy",
        action="append",
        metavar="NAME[:K=V,K=V]",
        help="a policy and its parameters; repeat it to compare several "
        f"[default: {', '.join(DEFAULT_POLICIES)}]",
    )
    add("--scenario", default="stationary", metavar="NAME", help="see below [default: stationary]")
    add("--alpha", metavar="P", help="stationary: chance of acceptance [default: 0.7]")
    add("--arrivals", default="closed", metavar="NAME", help="see below [default: closed]")
    add("--rows", metavar="N", help="closed: requests at any time, 1 to 256 [default: 64]")
    add(
        "--rate",
        metavar="X",
        help="poisson: requests per second [default: 10]; others: factor on speed [default: 1]",
    )
    add("--trace", default="", metavar="FILE", help="azure: TIMESTAMP,ContextTokens,... as CSV")
    add(
        "--lengths",
        default="",
        metavar="KIND",
        help="sharegpt, or fixed:PROMPT,OUTPUT in tokens (an output of 1000000 or more never "
        "ends) [default: sharegpt; of azure the file's]",
    )
    add("--steps", default="20000", metavar="N", help="decode steps of a run [default: 20000]")
    add("--seeds", default="0", metavar="A-B", help="one run for each seed [default: 0]")
    add(
        "--truth",
        default="h200_7b",
        metavar="NAME|FILE",
        help="shipped cost table, or one as JSON [default: h200_7b]",
    )
    add("--noise", default="0.25", metavar="X", help="sigma of the truth's noise [default: 0.25]")
    add(
        "--kv-slope-factor",
        default="1",
        metavar="X",
        help="factor on what KV tokens beyond the table's context cost [default: 1]",
    )
    add("--max-gamma", default="5", metavar="N", help="largest gamma of the worker [default: 5]")
    add(
        "--kv-pool-tokens",
        default="1900000",
        metavar="N",
        help="tokens that have room at once [default: 1900000]",
    )
    add(
        "--answer-delay",
        default="1",
        metavar="N",
        help="steps that run between a question to the planner and its answer [default: 1]",
    )
    cores = str(os.cpu_count() or 1)
    add("--jobs", default=cores, metavar="N", help=f"processes [default: the cores, {cores}]")
    add("--json", action="store_true", help="print means, spreads and each run as JSON")
    add("--png", default="", metavar="FILE", help="write plots over the steps")
    return parser


def _scenario(options: argparse.Namespace) -> Scenario:
    truth = CostTable.load(options.truth)
    if options.alpha is not None and options.scenario != "stationary":
        raise ConfigError("--alpha: only --scenario stationary has one")
    alpha = _number("--alpha", options.alpha or "0.7", 0, 1)
    match options.scenario:
        case "stationary":
            process = acceptance.stationary(alpha)
        case "classes":
            process = acceptance.by_class()
        case "drifting":
            process = acceptance.drifting()
        case "abrupt":
            process = acceptance.abrupt()
        case other:
            raise ConfigError(f"--scenario {other!r}: must be one of {', '.join(SCENARIOS)}")
    return Scenario(
        truth=truth,
        noise=_number("--noise", options.noise, 0, 3),
        kv_slope_factor=_number("--kv-slope-factor", options.kv_slope_factor, 0, 100),
        acceptance=process,
        arrivals=_arrivals(options, min(MAX_ROWS, truth.max_batch_size)),
        max_gamma=int(
            _number(
                "--max-gamma", options.max_gamma, 0, min(MAX_GAMMA, truth.max_gamma), whole=True
            )
        ),
        kv_pool_tokens=int(
            _number("--kv-pool-tokens", options.kv_pool_tokens, 1, 10**12, whole=True)
        ),
        answer_delay_steps=int(
            _number("--answer-delay", options.answer_delay, 0, 1000, whole=True)
        ),
    )


def _arrivals(options: argparse.Namespace, max_rows: int) -> Arrivals:
    kind = options.arrivals
    if kind not in ARRIVALS:
        raise ConfigError(f"--arrivals {kind!r}: must be one of {', '.join(ARRIVALS)}")
    if options.rows is not None and kind != "closed":
        raise ConfigError(f"--rows: only --arrivals closed has rows, not {kind}")
    if options.rate is not None and kind == "closed":
        raise ConfigError("--rate: --arrivals closed has none; its speed is the worker's")
    if bool(options.trace) != (kind == "azure"):
        raise ConfigError("--trace FILE and --arrivals azure go together")
    arrivals = Arrivals(
        kind=kind,
        rows=int(_number("--rows", options.rows or "64", 1, max_rows, whole=True)),
        rate=_number("--rate", options.rate or ("10" if kind == "poisson" else "1"), 1e-3, 1e5),
    )
    if kind == "azure":
        lengths, times = read_trace(options.trace)
        arrivals = replace(arrivals, lengths=lengths, trace=times)
    if options.lengths:
        arrivals = replace(arrivals, lengths=_lengths(options.lengths))
    return arrivals


def _lengths(text: str) -> Lengths:
    if text == "sharegpt":
        return SHARE_GPT_LIKE
    match = re.fullmatch(r"fixed:([0-9]{1,9}),([0-9]{1,9})", text)
    if match is None:
        raise ConfigError(f"--lengths {text[:64]!r}: must be sharegpt or fixed:PROMPT,OUTPUT")
    prompt, output = int(match[1]), int(match[2])
    if not 1 <= prompt <= ENDLESS or output < 1:
        raise ConfigError(f"--lengths {text!r}: a prompt has 1 to {ENDLESS} tokens, an output 1")
    return FixedLengths(prompt, output)


def _number(flag: str, text: str, low: float, high: float, *, whole: bool = False) -> float:
    try:
        value: float = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        form = f"a whole number in [{low}, {high}]" if whole else f"a number in [{low:g}, {high:g}]"
        raise ConfigError(f"{flag} {text[:64]!r}: must be {form}")
    return value


def _seeds(text: str) -> range:
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    if match is None:
        raise ConfigError(f"--seeds {text[:64]!r}: must be a whole number, or two as in 0-9")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if not first <= last < first + MAX_SEEDS:
        raise ConfigError(f"--seeds {text}: must ascend, and be at most {MAX_SEEDS}")
    return range(first, last + 1)


def _words(options: argparse.Namespace, scenario: Scenario, steps: int) -> str:
    arrivals = scenario.arrivals
    load = f"{arrivals.rows} rows" if arrivals.kind == "closed" else f"rate {arrivals.rate:g}"
    return (
        f"{scenario.acceptance.name}, {arrivals.kind} arrivals ({load}, {arrivals.lengths.name}), "
        f"{steps:,} steps, seeds {options.seeds}; truth {scenario.truth.name}, "
        f"noise {scenario.noise:g}, KV slope x {scenario.kv_slope_factor:g}"
    )
