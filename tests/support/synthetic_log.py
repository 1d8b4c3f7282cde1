"""Audit logs from a process whose truth is known: what each arm gives in each context."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from planner_service.bins import Arm, Drawn, Heard
from planner_service.context import Context, Outcome
from planner_service.policies.policy import Choice, Policy
from planner_service.session import Session
from planner_service.sums import Stats

BATCH_SIZES = (1, 2, 3, 4, 6, 8)  # each as often as the other
GAMMAS = (0, 1, 2, 3)
Law = Callable[[int], Sequence[float]]  # batch size -> probability of each gamma


def skewed(batch_size: int) -> Sequence[float]:
    """A logging policy that seldom drafts 2 tokens, and more seldom for small batches."""
    return (0.15, 0.15, 0.1, 0.6) if batch_size <= 3 else (0.4, 0.2, 0.3, 0.1)


def always(gamma: int) -> Law:
    """The law of policy `fixed`."""
    return lambda batch_size: [float(g == gamma) for g in GAMMAS]


def mixed(batch_size: int) -> Sequence[float]:
    """A stochastic law, another one for small batches than for large."""
    return (0.1, 0.2, 0.3, 0.4) if batch_size <= 2 else (0.4, 0.3, 0.2, 0.1)


class Drawing(Policy):
    """A policy that draws by a law, anew at each question."""

    def __init__(self, law: Law) -> None:
        self._law = law

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Draw."""
        law, left = self._law(context.batch_size), rng.random()
        for gamma in GAMMAS:
            left -= law[gamma]
            if left < 0:
                break
        return Choice(gamma, gamma, 4, False, law[gamma], {}), Session(gamma)


def tokens_per_step(batch_size: int, gamma: int) -> float:
    """Expected tokens of a step."""
    return batch_size * sum(0.7**i for i in range(gamma + 1))


def seconds_per_step(batch_size: int, gamma: int, num_kv_tokens: float) -> float:
    """Expected duration of a step."""
    return 0.01 + 0.0012 * batch_size * (gamma + 1) + 1e-6 * num_kv_tokens


def logged(law: Law, num_bins: int, seed: int) -> list[Drawn | Heard]:
    """Lines of a log: each bin a decision and one report."""
    rng, lines = random.Random(seed), list[Drawn | Heard]()
    for number in range(num_bins):
        size, steps = rng.choice(BATCH_SIZES), rng.randint(1, 8)
        context = Context(size, size * rng.randint(100, 900), max_gamma=3, feasible_max_gamma=3)
        probabilities = law(size)
        (gamma,) = rng.choices(GAMMAS, probabilities)
        head = (number, "p", "worker-1", f"d-{number}")
        lines.append(
            Drawn(
                *head,
                version="1-log",
                bucket=size,
                arm=Arm(gamma),
                explored=False,
                propensity=probabilities[gamma],
                hold_steps=steps,
                grid=None,
                context=context,
            )
        )
        us = steps * seconds_per_step(size, gamma, context.num_kv_tokens) * 1e6
        emitted = sum(rng.choices(range(1, gamma + 2), _EMITTED[gamma], k=steps * size))
        outcome = Outcome(
            steps, steps, round(us * rng.uniform(0.8, 1.2)), emitted, steps * size, emitted
        )
        lines.append(Heard(*head, gamma=gamma, context=context, outcome=outcome))
    return lines


# By gamma: how often a row emits 1, 2, ... tokens, where each draft is accepted with 0.7.
_EMITTED = [[*(0.3 * 0.7**i for i in range(gamma)), 0.7**gamma] for gamma in GAMMAS]


def truth(law: Law, num_steps: Mapping[tuple[int, ...], float]) -> float:
    """Tokens per second under a law; `num_steps` by the batch sizes of a bucket."""
    tokens = seconds = 0.0
    for sizes, steps in num_steps.items():
        for size in sizes:
            for gamma, share in zip(GAMMAS, law(size), strict=True):
                weight = steps / len(sizes) * share
                tokens += weight * tokens_per_step(size, gamma)
                seconds += weight * seconds_per_step(size, gamma, size * 500)
    return tokens / seconds


def as_lines(lines: Iterable[Drawn | Heard], **changed: object) -> list[str]:
    """Text of lines as a planner writes them, with some fields set to something else."""
    texts = list[str]()
    for line in lines:
        head = {
            "at_ms": line.at_ms,
            "profile": line.profile_key,
            "worker": line.worker_id,
            "decision_id": line.decision_id,
            "context": line.context._asdict(),
        }
        if isinstance(line, Drawn):
            fields = {
                "kind": "decision",
                "version": line.version,
                "bucket": line.bucket,
                **line.arm._asdict(),
                "explored": line.explored,
                "propensity": line.propensity,
                "hold_steps": line.hold_steps,
                "grid": None,
            }
        else:
            fields = {"kind": "report", "gamma": line.gamma, **line.outcome._asdict()}
        texts.append(json.dumps({**head, **fields, **changed}))
    return texts
