"""What is captured at the start is all that steps ask for; no kernel runs here."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from worker.engine.plan import Plan
from worker.engine.sequence import PlannedRow, Sequence
from worker.gpu.buckets import Buckets
from worker.gpu.runner import DeviceRunner
from worker.kernels.inputs import InputBuffers
from worker.messages import SamplingParams

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0.0, seed=1, max_tokens=8)
WIDTH = 20  # blocks of a row


class Asked:
    """Stands in for `Graphs`: notes what is asked for, and runs none of it."""

    capture_s = 0.0

    def __init__(self) -> None:
        self.keys: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self.keys)

    def get(self, key: Hashable, make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Nothing to run."""
        self.keys.add(key)
        return lambda: None

    def trim(self) -> None:
        """Nothing was kept."""


def _plan(rng: random.Random, num_seqs: int, max_gamma: int, budget: int) -> Plan:
    """Decode rows with drafts, then prompts, within the limits."""
    rows: list[PlannedRow] = []
    num_decode = rng.randint(0, num_seqs)
    left = budget - num_decode
    most = rng.randint(0, max_gamma)
    for slot in range(num_seqs):
        is_decode = slot < num_decode
        num_tokens = 1 if is_decode else rng.randint(0, min(left, 16 * WIDTH))
        if not num_tokens:
            continue
        sequence = Sequence(slot, [3] * num_tokens, PARAMS, max_model_len=16 * WIDTH, max_gamma=8)
        row = PlannedRow(sequence, 0, num_tokens, is_decode or rng.random() < 0.5, is_decode)
        row.slot = slot
        if is_decode:
            row.gamma = rng.randint(0, min(most, left))
            left -= row.gamma
        else:
            left -= num_tokens
        rows.append(row)
    return Plan(1, rows, num_decode, num_verified=sum(row.gamma for row in rows))


@pytest.mark.parametrize("max_gamma", [0, 1, 2, 5, 8])
@pytest.mark.parametrize(("num_seqs", "budget"), [(1, 64), (4, 20), (24, 300)])
def test_no_step_asks_for_what_was_not_captured(max_gamma: int, num_seqs: int, budget: int) -> None:
    """Whatever gammas and prompts a step mixes, its graph is one of the start's."""
    rng = random.Random(max_gamma)
    buckets = Buckets.of(
        max_num_seqs=num_seqs,
        max_gamma=max_gamma,
        max_num_batched_tokens=budget,
        max_catchup_tokens=64,
    )
    buffers = InputBuffers(
        max_tokens=buckets.max_tokens,
        max_rows=num_seqs,
        table_width=WIDTH,
        num_partial_floats=1,
        device=CPU,
    )
    target = SimpleNamespace(
        buffers=buffers, block_size=16, max_model_len=16 * WIDTH, use_tables=lambda tables: None
    )
    runner = DeviceRunner(
        cast(Any, target), None, None, buckets, max_num_seqs=num_seqs, vocab_size=9, clock=float
    )
    asked = Asked()
    runner.graphs = cast(Any, asked)
    runner.warm(lambda stage, detail: None)
    captured = set(asked.keys)
    for _ in range(60):
        plan = _plan(rng, num_seqs, max_gamma, budget)
        if plan.rows:
            runner.launch(plan)
    assert asked.keys == captured
