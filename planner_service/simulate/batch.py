"""Many runs: policies by name, seeds, and processes to share them among."""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TypeVar

from nightjar.errors import ConfigError, InvalidRequest
from planner_service.policies import BUILT_IN
from planner_service.policies.policy import Policy
from planner_service.simulate.report import Summary, summarize
from planner_service.simulate.run import Scenario, simulate

CLAIRVOYANT = "clairvoyant"  # no policy: takes the optimum at each step
PROGRESS_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run; the policy by name, so that a process of its own can make it."""

    policy: str
    scenario: Scenario
    seed: int
    num_steps: int


def make(text: str) -> Policy | None:
    """Make a policy from NAME or NAME:KEY=VALUE,KEY=VALUE; None is the clairvoyant.

    A part without an equals sign goes on with the value before it.

    Raises:
        ConfigError: There is no such policy, or a parameter of it is wrong.
    """
    name, _, rest = text.partition(":")
    if name == CLAIRVOYANT and not rest:
        return None
    if name not in BUILT_IN:
        known = ", ".join([*BUILT_IN, CLAIRVOYANT])
        raise ConfigError(f"--policy {text[:64]!r}: unknown policy; known: {known}")
    given: dict[str, str] = {}
    for part in re.split(r",(?=[A-Za-z_]+=)", rest) if rest else []:
        key, equals, value = part.partition("=")
        if not equals or key in given:
            problem = "is given twice" if equals else "is not of the form KEY=VALUE"
            raise ConfigError(f"--policy {text[:64]!r}: {part[:64]!r} {problem}")
        given[key] = value
    try:
        return BUILT_IN[name].build(given)[0]
    except InvalidRequest as error:
        raise ConfigError(f"--policy {text[:64]!r}: {error}") from None


def run(task: Task) -> Summary:
    """Run a task."""
    result = simulate(make(task.policy), task.scenario, task.seed, task.num_steps)
    return summarize(task.policy, result)


def run_all(
    tasks: Sequence[Task], jobs: int, work: Callable[[Task], T], *, progress: bool = True
) -> list[T]:
    """Do some work for each task; answers in the tasks' order, progress on stderr if it is long.

    Args:
        tasks: What to run.
        jobs: Processes; 1 is this one.
        work: A function at the top level of a module.
        progress: Whether to tell.
    """
    answers: dict[int, T] = {}
    began = told = time.monotonic()
    for index, answer in _answers(tasks, jobs, work):
        answers[index] = answer
        now = time.monotonic()
        if progress and now - told >= PROGRESS_S:
            told = now
            left = (now - began) * (len(tasks) - len(answers)) / len(answers)
            words = f"{len(answers)} of {len(tasks)} runs, about {left:.0f} s left"
            print(words, file=sys.stderr, flush=True)
    return [answers[index] for index in range(len(tasks))]


def _answers(
    tasks: Sequence[Task], jobs: int, work: Callable[[Task], T]
) -> Iterator[tuple[int, T]]:
    if jobs == 1 or len(tasks) == 1:
        for index, task in enumerate(tasks):
            yield index, work(task)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=spawn) as pool:
        futures = {pool.submit(work, task): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
