"""What steps took and which drafts were accepted, summed up so that a simulator can replay them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from worker.engine.plan import StepResult, caught_up

KV_BIN = 4096  # tokens
MAX_LENGTHS = 2000  # requests of a cell whose lengths are kept
_NAMES = ("rows", "gamma", "kv_bin", "prefill_bin")
_NUMBERS = (
    "num_steps",
    "step_us",
    "kv_tokens",
    "prefill_tokens",
    "emitted",
    "catch_up_us",
    "catch_up_tokens",
    "draft_prefill_us",
    "draft_prefill_tokens",
    "catch_up_steps",  # that caught up with anything
    "gap_us",  # between steps, of a closed loop alone
    "gap_steps",
)
Place = dict[str, Any]


class Recorder:
    """Sums by (rows, gamma, KV tokens, prefill tokens); acceptance and lengths by cell and class.

    A step without decode rows has 0 rows.
    """

    def __init__(self) -> None:
        self.steps: dict[tuple[int, ...], list[int]] = {}
        self.places: dict[str, Place] = {}

    def asked(
        self, place: str, category: str, num_prompt: int, num_answer: int, *, ended: bool
    ) -> None:
        """Note the lengths of a request; of one that was cut they are the least."""
        lengths = _place(self.places, place)["lengths"]
        if len(lengths) < MAX_LENGTHS:
            lengths.append((category, num_prompt, num_answer, ended))

    def add(
        self, place: str, done: StepResult, category_of: Mapping[int, str], gap_us: float | None
    ) -> None:
        """Add a step that has retired, and the time that passed before it without a step."""
        plan, context = done.plan, done.plan.context
        rows = plan.rows[: plan.num_decode_rows]
        prefill = sum(row.num_tokens for row in plan.rows[plan.num_decode_rows :])
        kv_tokens = context.num_kv_tokens if context is not None else 0
        num_prompt, num_emitted = caught_up(rows)
        values = (
            1,
            done.step_us,
            kv_tokens,
            prefill,
            done.num_emitted,
            done.catch_up_us,
            done.num_catch_up_tokens,
            done.draft_prefill_us,
            num_prompt,
            num_prompt + num_emitted > 0,
            0 if gap_us is None else round(gap_us),
            gap_us is not None,
        )
        key = (len(rows), plan.gamma, kv_tokens // KV_BIN, prefill.bit_length())
        sums = self.steps.setdefault(key, [0] * len(_NUMBERS))
        for index, value in enumerate(values):
            sums[index] += value
        classes = _place(self.places, place)["classes"]
        for row, result in zip(plan.rows, done.rows, strict=True):
            if result.num_drafts:
                own = _counts(classes, category_of.get(row.sequence.request_id, ""))
                for position in range(min(result.num_drafts, result.num_accepted + 1)):
                    own["reached"][position] += 1
                    own["accepted"][position] += position < result.num_accepted

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            dict(zip(_NAMES, key, strict=True)) | dict(zip(_NUMBERS, sums, strict=True))
            for key, sums in sorted(self.steps.items())
        ]
        return {"steps": rows, "places": self.places}


def _place(places: dict[str, Place], name: str) -> Place:
    return places.setdefault(name, {"classes": {}, "lengths": []})


def _counts(classes: dict[str, dict[str, list[int]]], category: str) -> dict[str, list[int]]:
    return classes.setdefault(category, {"reached": [0] * 8, "accepted": [0] * 8})


def pooled(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of several runs' records."""
    steps: dict[tuple[int, ...], dict[str, int]] = {}
    places: dict[str, Place] = {}
    for record in records:
        for row in record["steps"]:
            held = steps.setdefault(tuple(row[name] for name in _NAMES), dict.fromkeys(_NUMBERS, 0))
            for name in _NUMBERS:
                held[name] += row[name]
        for name, place in record["places"].items():
            _add(_place(places, name), place)
    rows = [dict(zip(_NAMES, key, strict=True)) | sums for key, sums in sorted(steps.items())]
    return {"steps": rows, "places": places}


def together(places: Iterable[Place]) -> Place:
    """Several cells as one."""
    whole: Place = {"classes": {}, "lengths": []}
    for place in places:
        _add(whole, place)
    return whole


def _add(own: Place, other: Mapping[str, Any]) -> None:
    for category, counts in other["classes"].items():
        held = _counts(own["classes"], category)
        for name in held:
            held[name] = [a + b for a, b in zip(held[name], counts[name], strict=True)]
    own["lengths"] += other["lengths"]
