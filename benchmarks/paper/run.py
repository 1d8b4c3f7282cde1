"""Measures sections with one loaded engine, and writes each slice as it comes."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu.arm_list import FOLDERS
from gpu.driver import JobFailed
from gpu.served import environment, service

from nightjar.config import parse
from paper.arms import is_gamma
from paper.asks import Prompt, amid, digest, endless, load_prompts, trace
from paper.design import BEST_FIXED, ELASTIC_TRACE, OFF, TRACES, Design, order
from paper.learned import KEY
from paper.memory import MemoryLink
from paper.rig import ArmFeed, Rig
from paper.stats import mean
from worker.config import WorkerConfig
from worker.engine.main import start
from worker.model.fetch import cache_folder, resolve_model
from worker.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
ATTACH_S = 30.0
RECORD_S = 60.0  # between two writes of the results: a large record takes time
Results = dict[str, Any]


class OutOfTime(Exception):
    """The next slice would not end before the run must; what there is counts."""


class Session:
    """One run: an engine, its prompts, and where results go."""

    def __init__(
        self,
        rig: Rig,
        prompts: list[Prompt],
        options: argparse.Namespace,
        results: Results,
        save: Callable[[], None],
    ) -> None:
        self._rig, self._prompts, self._options = rig, prompts, options
        self._results, self._save = results, save
        self._design: Design = options.design
        self._until = time.monotonic() + options.budget_s
        self._longest: dict[str, float] = {}  # seconds of a slice, by section
        self._recorded_at = time.monotonic()

    def record(self) -> None:
        """Write what there is, with the sums over steps."""
        self._results["record"] = self._rig.recorder.as_json()
        self._save()
        self._recorded_at = time.monotonic()

    def closed(self) -> None:
        """Every arm at every cell, in passes."""
        design, arms = self._design, self._options.closed_arms
        for cell in self._options.cells:
            with self._each(f"closed {cell}"):
                for number in self._numbers(self._options.closed_passes):
                    for arm in self._due(arms, number):
                        seed = f"{design.seed} closed {cell} {number}"
                        asks = amid(endless(self._prompts, seed), cell, seed)
                        self._slice(
                            "closed",
                            str(cell),
                            number,
                            functools.partial(self._rig.closed_slice, arm, cell, asks),
                        )

    def open(self) -> None:
        """Every arm under every trace, in passes."""
        best = self._best_fixed(self._options.open_arms)
        arms = tuple(best if arm == BEST_FIXED else arm for arm in self._options.open_arms)
        for name in self._options.traces:
            with self._each(f"open {name}"):
                self._traces("open", name, arms, self._options.open_passes)

    def elastic(self) -> None:
        """The same trace with the draft's memory elastic and not."""
        self._traces(
            "elastic", ELASTIC_TRACE, self._options.elastic_arms, self._options.open_passes
        )

    def _traces(self, section: str, name: str, arms: tuple[str, ...], passes: int) -> None:
        design = self._design
        capacity = self._capacity()
        for number in self._numbers(passes):
            asks = trace(
                self._prompts,
                name,
                peak=TRACES[name] * capacity,
                seconds=design.trace_s,
                seed=f"{design.seed} {name} {number}",
            )
            # What warms up is short: it is not counted.
            if number < design.warm_passes:
                asks = asks[: max(1, len(asks) // 3)]
            for arm in self._due(arms, number):
                found = self._slice(
                    section,
                    name,
                    number,
                    functools.partial(self._rig.trace_slice, arm, asks, f"{section} {name}"),
                )
                found |= {"asks": digest(asks), "num_asks": len(asks)}

    @contextlib.contextmanager
    def _each(self, what: str) -> Iterator[None]:
        """A cell or trace that fails leaves the others their time."""
        try:
            yield
        except JobFailed as error:
            self._results["left_out"].append(f"{what}: {error}")

    def _numbers(self, passes: int) -> list[int]:
        """Passes that warm up, and those that count: others than an earlier run's, if asked."""
        warm = self._design.warm_passes
        first = warm + self._options.skip_passes
        return [*range(warm), *range(first, first + passes)]

    def _due(self, arms: tuple[str, ...], number: int) -> tuple[str, ...]:
        """Arms of a pass in their order; those that learn nothing need no warm-up."""
        if number < self._design.warm_passes:
            return tuple(arm for arm in arms if not is_gamma(arm))
        return order(arms, number)

    def _slice(self, section: str, cell: str, number: int, run: Callable[[], Results]) -> Results:
        """One slice, with where it stands; a failed one is told and has no figures."""
        began = time.monotonic()
        if began + self._longest.get(section, 0.0) > self._until:
            raise OutOfTime
        where = {
            "section": section,
            "cell": cell,
            "pass": number,
            "counts": number >= self._design.warm_passes,
            "at_s": round(time.time(), 1),
        }
        found = {**where, **run()}
        self._longest[section] = max(self._longest.get(section, 0.0), time.monotonic() - began)
        self._results["slices"].append(found)
        if time.monotonic() - self._recorded_at > RECORD_S:
            self.record()
        self._options.say(
            f"{section} {cell} pass {number} {found['arm']}: {found['tok_s']:.1f} tok/s, "
            f"gammas {found['gammas']}, planner {found['planner_share']:.1%}"
        )
        return found

    def _counted(self, section: str) -> list[Results]:
        slices = [*self._options.earlier, *self._results["slices"]]
        return [s for s in slices if s["section"] == section and s["counts"]]

    def _capacity(self) -> float:
        """Requests per second that `off` answers in the closed loop with the most rows.

        Raises:
            JobFailed: That loop was not measured, here or in --after.
        """
        cell = str(max(self._design.cells))
        if self._options.capacity:
            self._results["capacity_requests_per_s"] = self._options.capacity
            return float(self._options.capacity)
        own = [s for s in self._counted("closed") if s["cell"] == cell and s["arm"] == OFF]
        rates = [s["num_answers"] / s["seconds"] for s in own]
        if not rates or not sum(rates):
            raise JobFailed(f"the capacity is not known: measure closed {cell} with {OFF} first")
        found = self._options.capacity = mean(rates)
        self._results["capacity_requests_per_s"] = found
        return float(found)

    def _best_fixed(self, arms: tuple[str, ...]) -> str:
        """The single gamma that was best on the mean of the closed cells, over `off` in each."""
        if BEST_FIXED not in arms:
            return OFF
        rates: dict[str, dict[str, list[float]]] = {}
        for found in self._counted("closed"):
            if is_gamma(found["arm"]):
                own = rates.setdefault(found["arm"], {}).setdefault(found["cell"], [])
                own.append(found["tok_s"])
        base = rates.get(OFF, {})
        drafting = {
            arm: mean([mean(own[cell]) / mean(base[cell]) for cell in base])
            for arm, own in rates.items()
            if arm != OFF and base and own.keys() >= base.keys()
        }
        if not drafting:
            raise JobFailed("the best gamma is not known: measure closed with `off` and fixed arms")
        best = max(drafting, key=drafting.__getitem__)
        self._results["best_fixed"] = best
        return best


@contextlib.contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[Rig, Results]]:
    """A loaded engine, and the facts about it."""
    design: Design = options.design
    with contextlib.ExitStack() as stack:
        flags = [f"--{flag}" for flag in (*design.flags, *options.flag)]
        is_elastic = "elastic" in options.sections
        num_seqs = design.capped_num_seqs if is_elastic else design.max_num_seqs
        flags += [f"--model={options.model}", f"--max-num-seqs={num_seqs}"]
        flags += [f"--draft={options.draft}"] if options.draft else []
        flags += [f"--max-model-len={design.max_model_len}", "--prefix-cache=false"]
        flags += [f"--block-size={BLOCK_SIZE}", "--planner=in this process"]
        agent = ""
        if is_elastic:
            flags.append(f"--num-blocks={design.capped_kv_tokens // BLOCK_SIZE}")
            agent = stack.enter_context(service("memory-agent", [], environment(*FOLDERS)))
            flags.append(f"--memory-agent={agent}")
        config = parse(WorkerConfig, flags, prog="paper", description="", environ={})
        feed = ArmFeed(options.say, None)
        models, engine, ready = start(config, feed)  # type: ignore[arg-type]
        stack.callback(models.close)
        gc.collect()
        gc.freeze()  # as a worker's engine does; a slice begins with a collection, which is short
        stack.callback(gc.unfreeze)
        rig = Rig(engine, ready, feed, design, options.known)
        if agent:
            assert ready.pool is not None
            feed.agent = MemoryLink(agent, ready.pool)
            stack.callback(feed.agent.close)
            _attach(rig, feed.agent)
        facts = {
            "arithmetic": ready.arithmetic,
            "arithmetic_reason": ready.arithmetic_reason,
            "build": ready.build,
            "dtype": ready.dtype,
            "device": ready.device_name,
            "num_blocks": models.layout.num_base_blocks,
            "num_extra_blocks": models.layout.num_extra_blocks,
            "flags": flags,
        }
        yield rig, facts


def _attach(rig: Rig, link: MemoryLink) -> None:
    until = time.monotonic() + ATTACH_S
    while not link.attached:
        rig.engine.turn()
        if time.monotonic() > until:
            raise JobFailed("the memory agent did not attach")


def measure(options: argparse.Namespace, results: Results, file: Path) -> None:
    """All sections that were asked for; ends early, with what there is, when time is up."""
    results[KEY] = f"learned-{file.stem.removeprefix('run-')}.json"

    with opened(options) as (rig, facts):

        def save() -> None:
            arms = {name: arm for name, arm in rig.arms.items() if not is_gamma(name)}
            results["num_known_steps"] = {name: arm.num_known_steps for name, arm in arms.items()}
            learned = {name: arm.learned().as_json() for name, arm in arms.items()}
            file.with_name(results[KEY]).write_text(json.dumps(learned) + "\n")
            file.write_text(json.dumps(results, indent=1) + "\n")

        results["engine"] = facts
        cache = cache_folder("")
        folder = resolve_model(options.model, cache, lambda *_: None, needs_weights=False)
        prompts = load_prompts(options.spec_bench, Tokenizer.load(folder), options.design)
        results["num_prompts"] = len(prompts)
        session = Session(rig, prompts, options, results, save)
        for section in options.sections:
            try:
                getattr(session, section)()
            except OutOfTime:
                results["left_out"].append(f"{section}: time was up; run it again with --after")
            except JobFailed as error:
                results["left_out"].append(f"{section}: {error}")
            finally:
                session.record()
