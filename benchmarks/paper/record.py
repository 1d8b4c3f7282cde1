"""What steps took and which drafts were accepted, summed up so that a simulator can replay them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from worker.engine.plan import StepResult

KV_BIN = 4096  # tokens
MAX_LENGTHS = 4000  # requests whose lengths are kept
_NUMBERS = (
    "num_steps",
    "step_us",
    "kv_tokens",
    "prefill_tokens",
    "emitted",
    "catch_up_us",
    "catch_up_tokens",
    "catch_up_steps",
    "draft_prefill_us",
)


class Recorder:
    """Sums by (rows, gamma, KV tokens, prefill tokens), and acceptance by prompt class."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int, int, int], list[int]] = {}
        self.classes: dict[str, dict[str, list[int]]] = defaultdict(
            lambda: {"reached": [0] * 8, "accepted": [0] * 8}
        )
        self.lengths: list[tuple[str, int, int]] = []  # class, prompt and answer tokens

    def ended(self, category: str, num_prompt: int, num_answer: int) -> None:
        """Note the lengths of a request that ended."""
        if len(self.lengths) < MAX_LENGTHS:
            self.lengths.append((category, num_prompt, num_answer))

    def add(self, done: StepResult, category_of: Mapping[int, str]) -> None:
        """Add a step that has retired."""
        plan, context = done.plan, done.plan.context
        if context is None or not plan.num_decode_rows:
            return
        prefill = context.num_prefill_tokens
        key = (
            context.batch_size,
            plan.gamma,
            context.num_kv_tokens // KV_BIN,
            0 if not prefill else prefill.bit_length(),
        )
        sums = self.steps.setdefault(key, [0] * len(_NUMBERS))
        values = (
            1,
            done.step_us,
            context.num_kv_tokens,
            prefill,
            done.num_emitted,
            done.catch_up_us,
            done.num_catch_up_tokens,
            done.num_catch_up_tokens > 0,
            done.draft_prefill_us,
        )
        for index, value in enumerate(values):
            sums[index] += value
        for row, result in zip(plan.rows, done.rows, strict=True):
            if result.num_drafts:
                own = self.classes[category_of.get(row.sequence.request_id, "")]
                for position in range(result.num_drafts):
                    if position > result.num_accepted:
                        break
                    own["reached"][position] += 1
                    own["accepted"][position] += position < result.num_accepted

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            {"rows": rows, "gamma": gamma, "kv_bin": kv, "prefill_bin": prefill}
            | dict(zip(_NUMBERS, sums, strict=True))
            for (rows, gamma, kv, prefill), sums in sorted(self.steps.items())
        ]
        return {"steps": rows, "classes": dict(self.classes), "lengths": self.lengths}


def pooled(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of several runs' records."""
    steps: dict[tuple[int, ...], dict[str, int]] = {}
    classes: dict[str, dict[str, list[int]]] = {}
    lengths: list[tuple[str, int, int]] = []
    for record in records:
        for row in record["steps"]:
            key = (row["rows"], row["gamma"], row["kv_bin"], row["prefill_bin"])
            held = steps.setdefault(key, dict.fromkeys(_NUMBERS, 0))
            for name in _NUMBERS:
                held[name] += row[name]
        for category, counts in record["classes"].items():
            own = classes.setdefault(category, {"reached": [0] * 8, "accepted": [0] * 8})
            for name in own:
                own[name] = [a + b for a, b in zip(own[name], counts[name], strict=True)]
        lengths += [(name, prompt, answer) for name, prompt, answer in record["lengths"]]
    names = ("rows", "gamma", "kv_bin", "prefill_bin")
    rows = [dict(zip(names, key, strict=True)) | sums for key, sums in sorted(steps.items())]
    return {"steps": rows, "classes": classes, "lengths": lengths}
