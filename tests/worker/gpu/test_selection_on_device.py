"""Drafts above gamma: their scores and their selection against the CPU's."""

from __future__ import annotations

import dataclasses
import random
from itertools import accumulate

import pytest
import torch
from sample_calls import DEVICE, inputs_of, params

from worker.gpu.device_rows import Shape
from worker.gpu.staging import Stage
from worker.kernels.draft_scores import MAX_DRAFTS, DraftScores, reference_scores
from worker.kernels.row_state import NUM_VERIFIED, Choices, RowState, StagedRows
from worker.kernels.sampling import SampleInputs, SampleScratch, sample_rows
from worker.kernels.selection import reference_select, select
from worker.messages import SamplingParams

# ---- scores ----


class Scorer:
    """Rows of a batch that draft, whose logits a test gives, draft by draft."""

    def __init__(self, rows: list[SamplingParams], row_of: list[int], vocab_size: int) -> None:
        num_rows, num_slots = len(row_of), len(rows)
        self.vocab_size = vocab_size
        self.num_tokens = 7
        self.inputs = inputs_of(rows, row_of, [0] * num_rows, DEVICE)
        self.choices = Choices.allocate(num_rows, DEVICE)
        self.choices.row_of.copy_(torch.tensor(row_of))
        self.inputs = dataclasses.replace(
            self.inputs,
            row_of=self.choices.row_of,
            processing=dataclasses.replace(
                self.inputs.processing,
                positions=self.choices.positions,
                slots=torch.arange(num_slots, dtype=torch.int32, device=DEVICE).flip(0),
            ),
        )
        self.scratch = SampleScratch.allocate(num_rows, vocab_size, DEVICE)
        self.scores = DraftScores(num_slots, vocab_size, DEVICE)
        self.scores.scores.fill_(float("nan"))
        self.scores._sums.fill_(float("nan"))
        state = RowState.allocate(num_slots, 64, vocab_size, DEVICE)
        state.num_tokens.fill_(self.num_tokens)
        self.state = state

    def add(self, logits: torch.Tensor, at: int) -> SampleInputs:
        """Sample and score every row's draft number `at`; what it was sampled by."""
        self.choices.positions.fill_(self.num_tokens + at)
        sample_rows(logits, self.inputs, self.scratch, self.choices.ids, vocab_size=self.vocab_size)
        self.scores.add(logits, self.inputs, self.scratch, self.choices.ids, self.state)
        return self.inputs


GRID = (
    params(),
    params(temperature=0.0),
    params(temperature=0.3, top_p=0.8),
    params(temperature=1.7, top_k=9),
    params(temperature=0.9, top_k=1),
    params(temperature=0.7, min_p=0.1),
)


def test_scores_are_running_sums_of_the_cpus_log_probabilities() -> None:
    """Greedy, sampled and cut rows, drafts one after another, padding of the logits left out."""
    vocab_size, row_of = 5003, [4, 0, -1, 5, 2, 1]
    rig = Scorer(list(GRID), row_of, vocab_size)
    want = [0.0] * len(row_of)
    for at in range(3):
        generator = torch.Generator().manual_seed(at)
        logits = torch.randn(len(row_of), 5056, generator=generator) * 3
        logits[:, vocab_size:] = 90.0
        logits = logits.bfloat16().to(DEVICE)
        inputs = rig.add(logits, at)
        single = reference_scores(logits, inputs, rig.choices.ids, vocab_size=vocab_size)
        want = [before + one for before, one in zip(want, single, strict=True)]
        for k, row in enumerate(row_of):
            if row >= 0:
                assert rig.scores.scores[row, at].item() == pytest.approx(want[k], abs=2e-5)
    assert all(value < -0.01 for k, value in enumerate(want) if row_of[k] >= 0)
    assert rig.scores.scores[3].isnan().all()  # a row that does not draft
    assert rig.scores.scores[:, 3:].isnan().all()


def test_scores_do_not_depend_on_the_other_rows() -> None:
    """Bit for bit the same for a row alone and among others."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(3, 4500, generator=generator) * 2).bfloat16().to(DEVICE)
    rows = [GRID[1], GRID[0], GRID[2]]
    together = Scorer(rows, [0, 1, 2], 4500)
    together.add(logits, 0)
    for k in range(3):
        alone = Scorer(rows[k : k + 1], [0], 4500)
        alone.add(logits[k : k + 1], 0)
        assert torch.equal(alone.scores.scores[0, 0], together.scores.scores[k, 0])


def test_a_choice_that_is_none_is_impossible_and_a_sure_one_costs_nothing() -> None:
    """NaN scores -inf, as every draft behind it does; a certain draft scores 0, not above."""
    rig = Scorer([params(), params(temperature=0.0)], [0, 1], 300)
    logits = torch.full((2, 300), float("-inf"), device=DEVICE)
    logits[:, 5] = 1.0
    bad = logits.clone()
    bad[0, 7] = float("nan")
    for at, values in enumerate((logits, bad, logits)):
        rig.add(values, at)
    never = float("-inf")
    assert rig.scores.scores[:, :3].tolist() == [[0.0, never, never], [0.0, 0.0, 0.0]]


# ---- selection ----


def staged(
    counts: list[int], prompts: list[tuple[int, int]], num_verified: int, max_rows: int
) -> tuple[Shape, Stage]:
    """Decode rows of so many drafts, then (tokens, kept) of prompt rows, on the device."""
    shape = Shape()
    for index, count in enumerate(counts):
        shape.add(index, index, 1 + count, -1, num_kept=1 + count, is_short=True)
    for at, (count, kept) in enumerate(prompts, start=len(counts)):
        shape.add(at, at, count, 3, num_kept=kept, is_short=False)
    stage = Stage(max_rows=max_rows, table_width=1, device=DEVICE)
    host = stage.next_host()
    host.fields.fill(-77)
    shape.write(host.header, host.fields, num_drafting=3)
    host.header[NUM_VERIFIED] = num_verified
    stage.send(host, 0)
    return shape, stage


@pytest.mark.parametrize("max_rows", [7, 16])
def test_selection_keeps_what_the_definition_keeps_and_lays_rows_out_anew(max_rows: int) -> None:
    """Fields and header are as if the host had known; scores tie, rows fail, and none may stay."""
    rng = random.Random(max_rows)
    for _ in range(20):
        num_decode = rng.randint(1, max_rows)
        counts = [rng.choice([0, 1, 3, MAX_DRAFTS]) for _ in range(num_decode)]
        prompts = [
            (rng.choice([1, 16, 40]), rng.randint(0, 1))
            for _ in range(rng.randint(0, max_rows - num_decode))
        ]
        failed = [rng.random() < 0.15 for _ in counts]
        steps = rng.choice([(0.0, 0.25, 0.5), (0.0, 0.1, 2.0, float("inf")), None])
        rows = [
            [-(rng.choice(steps) if steps else rng.expovariate(1)) for _ in range(count)]
            for count in counts
        ]
        num_verified = rng.randint(0, sum(counts))
        shape, stage = staged(counts, prompts, num_verified, max_rows)
        scores = torch.full((max_rows, MAX_DRAFTS), float("nan"), dtype=torch.float64)
        for index, row in enumerate(rows):
            scores[index, : len(row)] = torch.tensor(list(accumulate(row)), dtype=torch.float64)
        stage.rows.failed[:num_decode] = torch.tensor(failed, dtype=torch.int32)
        before = stage.rows.header.clone()
        select(stage.rows, scores.to(DEVICE))
        taken = reference_select(rows, failed, num_verified)
        wanted, other = staged(taken, prompts, num_verified, max_rows)
        wanted_rows: StagedRows = other.rows
        assert torch.equal(stage.rows.fields, wanted_rows.fields)
        assert torch.equal(stage.rows.header, wanted_rows.header)
        assert before[1] - wanted.num_tokens == sum(counts) - sum(taken)
        assert shape.num_short == wanted.num_short
        assert sum(taken) <= num_verified
