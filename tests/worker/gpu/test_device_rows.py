"""What a slot is told of its row, and when: marks and what a request asks. No kernel runs here."""

from __future__ import annotations

import pytest
import torch

from worker.engine.sequence import PlannedRow, Sequence
from worker.gpu.device_rows import DeviceRows
from worker.gpu.staging import Stage
from worker.kernels.processors import IN_PROMPT, Asked
from worker.kernels.row_state import RowState
from worker.messages import SamplingParams

VOCAB, WIDTH = 40, 4
CPU = torch.device("cpu")


class Slots:
    """Two slots, and steps of one row in one of them."""

    def __init__(self) -> None:
        self.state = RowState.allocate(2, 64, VOCAB, CPU)
        self.rows = DeviceRows(self.state, table_width=WIDTH, vocab_size=VOCAB)
        self.stage = Stage(max_rows=2, table_width=WIDTH, device=CPU)

    def changes(self, sequence: Sequence, slot: int = 1) -> bool:
        """Whether a step is told to process the row's logits."""
        row = PlannedRow(sequence, sequence.epoch, 1, True, True)
        row.slot = slot
        self.rows.load(row)
        host = self.stage.next_host()
        self.rows.write(host, [slot])
        return bool(host.asked[Asked.CHANGES, 0])


def sequence_of(prompt: list[int], output: list[int], **fields: object) -> Sequence:
    """A row that has said `output`."""
    given = {"seed": 1, "max_tokens": 20, **fields}
    params = SamplingParams(**given)  # type: ignore[arg-type]
    sequence = Sequence(0, prompt, params, max_model_len=64, max_gamma=0, eos_token_ids=(2,))
    sequence.token_ids += output
    return sequence


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [False, False, False]),
        ({"min_tokens": 4}, [True, True, False]),
        ({"min_tokens": 4, "logit_bias": ((3, 1.0),)}, [True, True, True]),
        ({"min_tokens": 4, "presence_penalty": 0.5}, [True, True, True]),
    ],
    ids=str,
)
def test_logits_are_processed_while_that_changes_them(
    fields: dict[str, object], expected: list[bool]
) -> None:
    """Once min_tokens are there, a row that asks for nothing else is read as one that asks none."""
    slots, sequence = Slots(), sequence_of([5, 6], [], **fields)
    found = []
    for length in (0, 3, 4):
        sequence.token_ids[2:] = [7] * length
        found.append(slots.changes(sequence))
    assert found == expected


def test_a_slot_keeps_nothing_of_the_row_before() -> None:
    """Marks are those of the row that came last, what it had said when it was preempted too."""
    slots = Slots()
    first = sequence_of([5, 6], [6, 8, 8], frequency_penalty=1.0, logit_bias=((9, 2.0),))
    assert slots.changes(first)
    marks = slots.state.marks[1, :VOCAB].tolist()
    assert (marks[5], marks[6], marks[8]) == (IN_PROMPT, IN_PROMPT + 1, 2)
    assert marks[9] != 0
    assert marks[2] < 0

    second = sequence_of([7], [], repetition_penalty=1.5, ignore_eos=True)
    assert slots.changes(second)
    marks = slots.state.marks[1, :VOCAB].tolist()
    assert {token: mark for token, mark in enumerate(marks) if mark} == {7: IN_PROMPT}

    second.token_ids += [3, 3]  # said since, and counted on the device alone
    second.epoch += 1
    assert slots.changes(second)
    marks = slots.state.marks[1, :VOCAB].tolist()
    assert {token: mark for token, mark in enumerate(marks) if mark} == {7: IN_PROMPT, 3: 2}
    assert not slots.state.marks[0].any()
