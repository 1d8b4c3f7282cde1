"""Policy `table`: a fixed gamma per range of batch sizes, as serving engines ship them.

Presets, with their sources:

- `vllm`: the example of vLLM's documentation of dynamic speculative decoding
  (`num_speculative_tokens_per_batch_size`): 3 up to 64 rows, 1 up to 128, 0 up to 512.
- `sglang`: SGLang adapts within candidates per batch size (policy `ema_tiers`). Read as a table
  each tier holds the candidate that it starts from where the configured length is none of them,
  the middle one: 5 of {1, 3, 5, 7} from 1 row, 1 of {0, 1, 3} from 8, 1 of {0, 1} from 32,
  0 from 64.
- `tensorrt_llm`: the example of TensorRT-LLM's `draft_len_schedule`, {4: 4, 8: 2, 32: 1}, each
  up to that many rows; above 32 rows it does not speculate.
- `tensorrt_llm_ngram`: what TensorRT-LLM's automatic n-gram mode takes (pull request 6232): 5 up
  to 4 rows, 3 up to 32, then none.

A batch beyond the last range decodes plainly.
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from nightjar.errors import InvalidRequest
from planner_service.context import MAX_BATCH_SIZE, MAX_GAMMA, Context
from planner_service.policies.fixed import HOLD_STEPS
from planner_service.policies.policy import Choice, Parameter, ParameterValue, Policy, PolicySpec
from planner_service.session import Session
from planner_service.sums import Stats

PRESETS = {
    "vllm": "1-64:3,65-128:1,129-512:0",
    "sglang": "1-7:5,8-63:1,64-512:0",
    "tensorrt_llm": "1-4:4,5-8:2,9-32:1,33-512:0",
    "tensorrt_llm_ngram": "1-4:5,5-32:3,33-512:0",
}
CUSTOM = "custom"
MAX_TABLES = 64  # remembered, one for each pair of limits that workers have


class Range(NamedTuple):
    """Batch sizes [first, last] and their gamma."""

    first: int
    last: int
    gamma: int


def parse(text: str) -> tuple[Range, ...]:
    """Read ranges such as "1-64:3,65-128:1".

    Raises:
        ValueError: Says in words what is wrong: form, limits, order, a gap or an overlap.
    """
    ranges = []
    expected = 1
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6}):([0-9]{1,3})", part)
        if match is None:
            raise ValueError(f"{part[:40]!r} is not of the form first-last:gamma")
        found = Range(*map(int, match.groups()))
        if found.first != expected:
            problem = "overlaps the one before" if found.first < expected else "leaves a gap"
            if expected == 1:
                problem = "does not start at batch size 1"
            raise ValueError(f"range {part} {problem}")
        if not found.first <= found.last <= MAX_BATCH_SIZE:
            raise ValueError(f"range {part} does not end in [{found.first}, {MAX_BATCH_SIZE}]")
        if found.gamma > MAX_GAMMA:
            raise ValueError(f"gamma of range {part} exceeds {MAX_GAMMA}")
        ranges.append(found)
        expected = found.last + 1
    return tuple(ranges)


class Table(Policy):
    """One gamma for each range of batch sizes."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        self._ranges = ranges
        # Memo of a pure function: worker's largest gamma and batch -> gammas by batch size.
        self._tables: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Look the batch size up, and cut its gamma to what is feasible."""
        table = self._table(context.max_gamma, context.max_batch_size)
        wanted = table.get(context.bucket, (0, 0))[0]  # of a batch without rows: nothing
        gamma = min(wanted, context.feasible_max_gamma)
        return Choice(gamma, wanted, HOLD_STEPS, False, 1.0, table), Session(gamma)

    def _table(self, max_gamma: int, max_batch_size: int) -> dict[int, tuple[int, int]]:
        table = self._tables.get((max_gamma, max_batch_size))
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = dict.fromkeys(range(1, max_batch_size + 1), (0, 0))
            for first, last, gamma in self._ranges:
                row = (min(gamma, max_gamma),) * 2
                table.update(dict.fromkeys(range(first, min(last, max_batch_size) + 1), row))
            self._tables[max_gamma, max_batch_size] = table
        return table


def _problem(text: str) -> str:
    try:
        return "" if text == "" or parse(text) else "empty"
    except ValueError as error:
        return str(error)


def _make(values: dict[str, ParameterValue]) -> Table:
    preset, ranges = str(values["preset"]), str(values["ranges"])
    if preset == CUSTOM and not ranges:
        raise InvalidRequest("parameters.ranges", "must be given where preset is custom")
    if preset != CUSTOM and ranges:
        raise InvalidRequest(
            "parameters.ranges", f"may be given only where preset is custom, not {preset}"
        )
    return Table(parse(ranges or PRESETS[preset]))


SPEC = PolicySpec(
    name="table",
    summary="Looks gamma up by batch size in a static table, such as serving engines ship.",
    parameters=(
        Parameter(
            name="preset",
            kind="choice",
            default="vllm",
            choices=(*PRESETS, CUSTOM),
            help="whose table; custom: the one in ranges",
        ),
        Parameter(
            name="ranges",
            kind="text",
            default="",
            problem=_problem,
            form="ranges first-last:gamma of batch sizes from 1 on, without gaps, commas between",
            help="the custom table, such as 1-64:3,65-128:1",
        ),
    ),
    make=lambda values: _make(dict(values)),
)
