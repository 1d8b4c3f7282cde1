"""Processors and log-probabilities on the device against worker.sampling's and plain torch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from sample_calls import DEVICE, POISON, inputs_of, params, random_logits

from worker.engine.plan import RowResult
from worker.engine.runner import NOT_NUMBERS
from worker.engine.sequence import Sequence
from worker.gpu.device_rows import asked_of
from worker.gpu.reports import Reports
from worker.kernels.draft_scores import DraftScores, reference_scores
from worker.kernels.logprobs import (
    REPORT_WIDTH,
    ReportScratch,
    read_reports,
    reference_report,
    report_rows,
)
from worker.kernels.processors import (
    IN_PROMPT,
    MAX_COUNT,
    TILE,
    Asked,
    Processing,
    logits_of,
    marks_width,
    reading,
    write_marks,
)
from worker.kernels.row_state import RowState
from worker.kernels.sampling import SampleInputs, SampleScratch, sample_rows
from worker.messages import SamplingParams
from worker.sampling import sample
from worker.sampling.processors import Processors, Span, process

EOS = 3
ASKING = (
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"logit_bias": ((0, 5.0), (7, -100.0), (90, 3.25), (319, 1e-3))},
    {"min_tokens": 30},
    {"min_tokens": 4, "stop_token_ids": (5, 90, 200)},
    {
        "repetition_penalty": 0.8,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.3,
        "logit_bias": tuple((token, token / 64 - 2) for token in range(0, 300)),
        "min_tokens": 40,
    },
    {},
)


@dataclass
class Case:
    """Rows of a batch with a few positions each, behind drafts, on the device and for the CPU."""

    rows: list[Sequence]
    drafts: list[list[int]]  # of each row: one position comes after each number of them
    inputs: SampleInputs
    state: RowState
    row_of: list[int]


def case(
    vocab_size: int, asking: tuple[dict, ...], *, seed: int, most: int = 4, **common: object
) -> Case:
    """Rows that ask so, with prompts and outputs that repeat, and up to `most` drafts.

    Slots are in another order than rows.
    """
    rng = random.Random(seed)
    rows, drafts, width = [], [], 64
    num_slots = len(asking) + 2
    state = RowState.allocate(num_slots, width, vocab_size, DEVICE)
    state.tokens.fill_(POISON)
    state.marks.fill_(2**30 + 77)
    slots = rng.sample(range(num_slots), len(asking))
    row_of, positions, places = [], [], []
    for number, fields_ in enumerate(asking):
        sampling = params(seed=number, **fields_, **common)
        row = Sequence(
            number,
            [rng.randrange(min(vocab_size, 40)) for _ in range(rng.randint(1, 9))],
            sampling,
            max_model_len=1000,
            max_gamma=8,
            eos_token_ids=[EOS],
        )
        row.token_ids += [rng.randrange(min(vocab_size, 20)) for _ in range(rng.randint(0, 12))]
        rows.append(row)
        drafts.append([rng.randrange(min(vocab_size, 12)) for _ in range(rng.randint(0, most))])
        tokens = row.token_ids + drafts[-1]
        state.tokens[slots[number], : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        marks = np.zeros(marks_width(vocab_size), np.int32)
        prompt = row.num_prompt_tokens
        known = np.array(row.token_ids)
        ending = np.array(sorted(row.stop_ids), np.int64)
        write_marks(marks, vocab_size, known[:prompt], known[prompt:], sampling.logit_bias, ending)
        if asked_of(row)[Asked.CHANGES]:
            state.marks[slots[number]] = torch.from_numpy(marks)
        for place in range(len(drafts[-1]) + 1):
            row_of.append(number)
            positions.append(len(row.token_ids) + place)
            places.append(place)
    plain = inputs_of([row.params for row in rows], row_of, positions, DEVICE)
    asked = np.stack([asked_of(row) for row in rows], 1)

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    processing = Processing(
        asked=ints(asked),
        slots=ints(slots),
        places=ints(places),
        positions=ints(positions),
        marks=state.marks,
        tokens=state.tokens,
    )
    return Case(rows, drafts, replace(plain, processing=processing), state, row_of)


def processed(of: Case, logits: torch.Tensor) -> torch.Tensor:
    """What worker.sampling's processors make of a case's logits."""
    values = logits.float().cpu().clone()
    spans, line = [], 0
    for row, drafts in zip(of.rows, of.drafts, strict=True):
        processors = Processors(row.params, row.num_prompt_tokens, row.stop_ids)
        spans.append(Span.of(processors, row.token_ids, drafts, line, len(drafts) + 1))
        line += len(drafts) + 1
    process(values, spans)
    return values


def naive(of: Case, logits: torch.Tensor) -> torch.Tensor:
    """The definition, token by token, in float64."""
    values = logits.double().cpu().clone()
    line = 0
    for row, drafts in zip(of.rows, of.drafts, strict=True):
        p, prompt = row.params, row.token_ids[: row.num_prompt_tokens]
        for place in range(len(drafts) + 1):
            output = row.token_ids[row.num_prompt_tokens :] + drafts[:place]
            for token, bias in p.logit_bias:
                if token < values.shape[1]:
                    values[line, token] += bias
            for token in {*prompt, *output}:
                above = values[line, token] > 0
                values[line, token] *= 1 / p.repetition_penalty if above else p.repetition_penalty
            for token in set(output):
                values[line, token] -= p.frequency_penalty * output.count(token)
                values[line, token] -= p.presence_penalty
            if len(output) < p.min_tokens:
                for token in row.stop_ids:
                    values[line, token] = -math.inf
            line += 1
    return values


@triton.jit
def _read(
    logits, stride, row_of, asked, asked_stride, slots, places, positions, marks, width,
    history, history_width, stage, out, vocab_size, TILE: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0)
    row = tl.load(row_of + k)
    how = reading(
        k, row, asked, asked_stride, slots, places, positions, marks, width, history, history_width,
        stage,
    )  # fmt: skip
    at = tl.arange(0, TILE)
    x = logits_of(logits + k * stride, at, at, how, vocab_size)
    tl.store(out + k * vocab_size + at, x, mask=at < vocab_size)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(320, torch.float32), (501, torch.bfloat16)])
def test_logits_are_read_as_the_processors_leave_them(vocab_size: int, dtype: torch.dtype) -> None:
    """To the bit as on the CPU, and as the definition says; rows that ask for nothing unchanged."""
    of = case(vocab_size, ASKING, seed=vocab_size)
    # Padding of the model lies behind the vocabulary.
    logits = random_logits(len(of.row_of), vocab_size + 11, seed=1, scale=4.0).to(dtype)
    out = torch.full((len(logits), vocab_size), math.nan, device=DEVICE)
    stage = torch.full((len(logits), TILE), POISON, dtype=torch.int32, device=DEVICE)
    _read[(len(logits),)](
        logits, logits.stride(0), of.inputs.row_of, *of.inputs.processing.arguments, stage, out,
        vocab_size, TILE=TILE, enable_fp_fusion=False,
    )  # fmt: skip
    got, plain = out.cpu(), logits[:, :vocab_size]
    assert torch.equal(got, processed(of, plain))
    torch.testing.assert_close(got.double(), naive(of, plain), rtol=1e-5, atol=1e-5)
    asked = torch.tensor([bool(asked_of(of.rows[row])[Asked.CHANGES]) for row in of.row_of])
    assert torch.equal(got[~asked], plain.float().cpu()[~asked])
    changed = (got != plain.float().cpu()).any(1)
    assert {of.row_of[k] for k in changed.nonzero()[:, 0].tolist()} >= {0, 1, 2, 3, 5}


COMMON = ({"temperature": 0.0}, {}, {"top_k": 7}, {"top_p": 0.9, "temperature": 0.7})


@pytest.mark.parametrize("common", COMMON)
def test_choices_are_those_of_processed_logits(common: dict) -> None:
    """Greedy, sampled, listed and cut rows choose as worker.sampling does after its processors."""
    of = case(501, ASKING, seed=9, most=1, **common)
    logits = random_logits(len(of.row_of), 512, seed=2, scale=3.0)
    logits[:, :40] += 8.0  # what prompts, outputs and drafts are made of
    scratch = SampleScratch.allocate(len(logits), 501, DEVICE)
    for field in fields(scratch):
        tensor = getattr(scratch, field.name)
        tensor.fill_(math.nan if tensor.is_floating_point() else 2**30 + 5)
    out = torch.full((len(logits),), POISON, dtype=torch.int32, device=DEVICE)
    sample_rows(logits, of.inputs, scratch, out, vocab_size=501)
    want = processed(of, logits[:, :501])
    rows = [of.rows[row].params for row in of.row_of]
    positions = of.inputs.processing.positions.tolist()
    assert out.tolist() == sample(want, rows, positions)
    assert out.tolist() != sample(logits[:, :501].float().cpu(), rows, positions)


def test_a_cut_through_more_tokens_than_are_listed_is_of_processed_logits() -> None:
    """Where a whole row is searched again, what its request changes is seen there too."""
    vocab_size = 5003
    asking = ({"logit_bias": ((2, 90.0), (9, 90.0)), "presence_penalty": 2.0}, {"min_tokens": 90})
    of = case(vocab_size, asking, seed=4, most=0, top_p=0.999)
    logits = torch.zeros(len(of.row_of), vocab_size, device=DEVICE).bfloat16()
    logits[:, EOS] = 60.0
    scratch = SampleScratch.allocate(len(logits), vocab_size, DEVICE)
    out = torch.full((len(logits),), POISON, dtype=torch.int32, device=DEVICE)
    sample_rows(logits, of.inputs, scratch, out, vocab_size=vocab_size)
    rows = [of.rows[row].params for row in of.row_of]
    positions = of.inputs.processing.positions.tolist()
    assert out.tolist() == sample(processed(of, logits), rows, positions)
    assert (scratch.found > 4096).any()


def test_drafts_are_scored_by_processed_logits() -> None:
    """A draft's log-probability is of the distribution that it was drawn from."""
    vocab_size = 501
    of = case(vocab_size, ASKING, seed=3, most=1, temperature=0.8)
    # One position of each row, as in the draft's loop.
    last = [max(k for k, row in enumerate(of.row_of) if row == r) for r in range(len(of.rows))]
    first = of.inputs.processing
    places, positions = first.places[last], first.positions[last]
    processing = replace(first, places=places, positions=positions)
    inputs = replace(of.inputs, row_of=of.inputs.row_of[last], processing=processing)
    every = random_logits(len(of.row_of), vocab_size, seed=5, scale=3.0)
    logits = every[last].contiguous()
    of.state.num_tokens[first.slots.long()] = positions  # so that each is its row's first draft
    scratch = SampleScratch.allocate(len(logits), vocab_size, DEVICE)
    ids = torch.full((len(logits),), POISON, dtype=torch.int32, device=DEVICE)
    sample_rows(logits, inputs, scratch, ids, vocab_size=vocab_size)
    scores = DraftScores(len(logits), vocab_size, DEVICE)
    scores.scores.fill_(math.nan)
    scores.add(logits, inputs, scratch, ids, of.state)
    changed = processed(of, every)[last]
    want = reference_scores(changed, inputs, ids, vocab_size=vocab_size)
    assert scores.scores[:, 0].tolist() == pytest.approx(want, abs=2e-5)


def test_marks_hold_what_a_row_knows_of_each_token() -> None:
    """Counts of the output, the prompt's bit, ends, biases; ids beyond the vocabulary nowhere."""
    marks = np.zeros(marks_width(130), np.int32)
    bias = ((4, 1.5), (129, -2.0), (400, 9.0))
    write_marks(
        marks, 130, np.array([4, 4, 5, 200]), np.array([5, 5, 6]), bias, np.array([6, 129, 500])
    )
    assert [marks[token] & MAX_COUNT for token in (4, 5, 6, 129)] == [0, 2, 1, 0]
    assert [bool(marks[token] & IN_PROMPT) for token in (4, 5, 6)] == [True, True, False]
    assert [bool(marks[token] < 0) for token in (4, 5, 6, 129)] == [False, False, True, True]
    values = marks[-512:].view(np.float32)
    assert [values[marks[token] >> 22 & 511] for token in (4, 5, 129)] == [1.5, 0.0, -2.0]
    assert not marks[130:-512].any()
    assert np.count_nonzero(marks) == 4 + 2


# ---- log-probabilities ----


class Reporter:
    """Rows of a batch whose kept logits are reported where they ask; (prompt tokens, kept)."""

    def __init__(
        self, asking: list[SamplingParams], shape: list[tuple[int, int]], vocab_size: int
    ) -> None:
        self.vocab_size, self.shape = vocab_size, shape
        kept = [count for _, count in shape]
        self.num_kept = sum(kept)

        def ints(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        self.firsts = np.cumsum([0, *kept])[:-1].tolist()
        rows = [Sequence(i, [1], p, max_model_len=99, max_gamma=0) for i, p in enumerate(asking)]
        asked = np.stack([asked_of(row) for row in rows], 1)
        asked[Asked.REPORT] = self.firsts
        owners = [row for row, count in enumerate(kept) for _ in range(count)] + [-1]
        generator = torch.Generator().manual_seed(vocab_size)
        shape_of_tokens = (len(rows), 64)
        self.tokens = torch.randint(vocab_size, shape_of_tokens, generator=generator).int()
        self.positions = [place + 1 for count in kept for place in range(count)] + [0]
        self.owners, self.ids = ints(owners), torch.arange(len(owners), dtype=torch.int32)
        self.ids = (self.ids * 7 % vocab_size).to(DEVICE)
        self.fields = (ints(self.firsts), ints([prompts for prompts, _ in shape]))
        slots = list(range(len(rows)))[::-1]
        self.processing = Processing(
            asked=ints(asked),
            slots=ints(slots),
            places=ints([POISON]),
            positions=ints(self.positions),
            marks=ints([[POISON]]),
            tokens=self.tokens.flip(0).contiguous().to(DEVICE),
        )
        self.scratch = ReportScratch.allocate(self.num_kept + 1, vocab_size, DEVICE)
        for name in ("tops", "sums", "keys"):
            tensor = getattr(self.scratch, name)
            tensor.fill_(math.nan if tensor.is_floating_point() else 2**62)

    def run(self, logits: torch.Tensor) -> np.ndarray:
        """Reports of every kept row, poisoned where none was written."""
        reports = torch.full((self.num_kept + 1, REPORT_WIDTH), POISON, dtype=torch.int32)
        reports = reports.to(DEVICE)
        report_rows(
            logits, self.owners, self.fields, self.processing, self.scratch, self.ids, reports,
            vocab_size=self.vocab_size,
        )  # fmt: skip
        assert not self.scratch.arrivals.any()
        return reports.cpu().numpy()

    def token(self, row: int, place: int) -> int:
        """The token that is reported on at a row's kept logits."""
        k = self.firsts[row] + place
        if place < self.shape[row][0]:
            return int(self.tokens[row, self.positions[k]])
        return int(self.ids[k])


@pytest.mark.parametrize(
    ("vocab_size", "scale", "dtype"),
    [(320, 0.02, torch.bfloat16), (5003, 3.0, torch.float32)],
)
def test_reports_are_the_likeliest_tokens_and_the_tokens_own(
    vocab_size: int, scale: float, dtype: torch.dtype
) -> None:
    """Generated and prompt tokens, 0 to 20 alternatives, equals by id, others left alone."""
    tops, prompt_tops = [-1, 0, 20, 5, 1], [-1, -1, -1, 2, -1]
    asking = [
        params(num_logprobs=top, num_prompt_logprobs=prompt)
        for top, prompt in zip(tops, prompt_tops, strict=True)
    ]
    rig = Reporter(asking, [(0, 2), (0, 1), (0, 3), (3, 4), (1, 2)], vocab_size)
    logits = random_logits(rig.num_kept + 1, vocab_size + 5, seed=8, scale=scale).to(dtype)
    logits[:, vocab_size:] = 90.0
    logits[3, ::2] = -math.inf
    logits[4, :9] = torch.tensor([0.0, -0.0] * 4 + [0.0])
    found = rig.run(logits)
    for row, (num_prompt, count) in enumerate(rig.shape):
        for place in range(count):
            k = rig.firsts[row] + place
            num_top = prompt_tops[row] if place < num_prompt else tops[row]
            if num_top < 0:
                assert (found[k] == POISON).all()
                continue
            want = reference_report(logits[k, :vocab_size].cpu(), rig.token(row, place), num_top)
            chosen, ids, values = read_reports(found[k : k + 1], num_top)
            assert chosen[0] == pytest.approx(want[0], abs=3e-6, rel=1e-6)
            assert ids[0].tolist() == want[1]
            assert values[0].tolist() == pytest.approx(want[2], abs=3e-6, rel=1e-6)
            assert (values <= 0).all()
            assert (found[k, 1 + num_top : 21] == POISON).all()
    assert (found[-1] == POISON).all()


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_rows_that_hold_no_numbers_end_in_an_error() -> None:
    """NaN beside numbers, +inf, or nothing but -inf: for prompts' tokens, as for new ones."""
    vocab_size = 5003
    asking = [params(num_logprobs=0, num_prompt_logprobs=2)] * 2 + [params(num_logprobs=1)] * 3
    rig = Reporter(asking, [(2, 2), (1, 2), (0, 1), (0, 1), (0, 1)], vocab_size)
    logits = random_logits(rig.num_kept + 1, vocab_size, seed=5, scale=2.0)
    logits[1, 4000] = math.nan
    logits[4, 7] = math.inf
    logits[5] = -math.inf
    logits[6, 1:] = -math.inf
    reports = Reports(
        values=torch.from_numpy(rig.run(logits)),
        firsts=rig.firsts,
        num_prompts=[prompts for prompts, _ in rig.shape],
        num_tops=[0, 0, 1, 1, 1],
        num_prompt_tops=[2, 2, -1, -1, -1],
    )
    results = [RowResult([]), RowResult([1]), RowResult([1]), RowResult([1]), RowResult([1])]
    reports.add_to(results)
    assert [result.error for result in results] == [NOT_NUMBERS, "", NOT_NUMBERS, NOT_NUMBERS, ""]
    assert results[4].logprobs is not None
    assert results[4].logprobs.top_ids.tolist() == [[0]]
    assert results[4].logprobs.top.tolist() == [[0.0]]


def test_reports_do_not_depend_on_the_other_rows() -> None:
    """Bit for bit the same for a row alone, by many programs, and among others, by few."""
    vocab_size = 9001
    logits = random_logits(6, vocab_size, seed=3, scale=2.0)
    together = Reporter([params(num_logprobs=4)] * 6, [(0, 1)] * 6, vocab_size)
    ids = together.ids.clone()
    all_of_them = together.run(logits)
    for k in (0, 3, 5):
        alone = Reporter([params(num_logprobs=4)], [(0, 1)], vocab_size)
        alone.ids[0] = ids[k]
        np.testing.assert_array_equal(alone.run(logits[k : k + 1])[0], all_of_them[k])
