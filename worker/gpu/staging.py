"""What the host tells the device about a step: one packed buffer, one copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels.draft_step import DraftRows
from worker.kernels.processors import NUM_ASKED, Processing
from worker.kernels.row_state import NUM_FIELDS, Choices, Field, RowState, StagedRows
from worker.kernels.sampling import SampleInputs

Int32s = npt.NDArray[np.int32]
HEADER = 8
# Of a row's request: inverse temperature, top_p and min_p as bits of a float32; seed in halves.
NUM_SAMPLING = 6
INVERSE_TEMPERATURE, TOP_P, MIN_P, TOP_K, SEED_LOW, SEED_HIGH = range(NUM_SAMPLING)


class _Layout:
    """Where each section begins, in int32s; the tables are last, so that few rows copy little."""

    def __init__(self, max_rows: int, table_width: int) -> None:
        self.max_rows, self.table_width = max_rows, table_width
        self.header = 0
        self.fields = HEADER
        self.sampling = self.fields + NUM_FIELDS * max_rows
        self.asked = self.sampling + NUM_SAMPLING * max_rows
        self.draft_rows = self.asked + NUM_ASKED * max_rows
        self.draft_gammas = self.draft_rows + max_rows
        self.catch_header = self.draft_gammas + max_rows
        self.catch_fields = self.catch_header + HEADER
        self.tables = self.catch_fields + NUM_FIELDS * max_rows
        self.size = self.tables + max_rows * table_width

    def span(self, start: int, *shape: int) -> tuple[slice, tuple[int, ...]]:
        """Section from `start`, and its shape."""
        return slice(start, start + int(np.prod(shape))), shape


class HostStage:
    """One step's numbers, in pinned memory: it may be rewritten once that step has retired."""

    def __init__(self, layout: _Layout, *, pinned: bool) -> None:
        self.tensor = torch.zeros(layout.size, dtype=torch.int32, pin_memory=pinned)
        flat = self.tensor.numpy()
        rows = layout.max_rows

        def view(start: int, *shape: int) -> Int32s:
            span, shape = layout.span(start, *shape)
            return flat[span].reshape(shape)

        self.header = view(layout.header, HEADER)
        self.fields = view(layout.fields, NUM_FIELDS, rows)
        self.sampling = view(layout.sampling, NUM_SAMPLING, rows)
        self.asked = view(layout.asked, NUM_ASKED, rows)
        self.draft_rows = view(layout.draft_rows, rows)
        self.draft_gammas = view(layout.draft_gammas, rows)
        self.catch_header = view(layout.catch_header, HEADER)
        self.catch_fields = view(layout.catch_fields, NUM_FIELDS, rows)
        self.tables = view(layout.tables, rows, layout.table_width)


class Stage:
    """The device's copy, which kernels read, and two host sides to be filled in turn."""

    def __init__(self, *, max_rows: int, table_width: int, device: torch.device) -> None:
        """Allocate for batches of up to `max_rows` rows of `table_width` blocks."""
        self._layout = layout = _Layout(max_rows, table_width)
        pinned = device.type == "cuda"
        self._hosts = [HostStage(layout, pinned=pinned) for _ in range(2)]
        self._turn = 0
        self.tensor = flat = torch.zeros(layout.size, dtype=torch.int32, device=device)

        def view(start: int, *shape: int) -> torch.Tensor:
            span, shape = layout.span(start, *shape)
            return flat[span].view(shape)

        def own() -> torch.Tensor:
            return torch.zeros(max_rows, dtype=torch.int32, device=device)

        self.tables = view(layout.tables, max_rows, table_width)
        asked = view(layout.asked, NUM_ASKED, max_rows)
        self.rows = StagedRows(
            header=view(layout.header, HEADER),
            fields=view(layout.fields, NUM_FIELDS, max_rows),
            asked=asked,
            bases=own(),
            failed=own(),
        )
        self.catch_up = StagedRows(
            header=view(layout.catch_header, HEADER),
            fields=view(layout.catch_fields, NUM_FIELDS, max_rows),
            asked=asked,
            bases=own(),
            failed=own(),
        )
        self.draft = DraftRows(
            rows=view(layout.draft_rows, max_rows),
            gammas=view(layout.draft_gammas, max_rows),
        )
        self._sampling = view(layout.sampling, NUM_SAMPLING, max_rows)

    def processing(self, choices: Choices, state: RowState) -> Processing:
        """How the staged rows' requests change the logits that `choices` are made of."""
        return Processing(
            asked=self.rows.asked,
            slots=self.rows.fields[Field.SLOT],
            places=choices.places,
            positions=choices.positions,
            marks=state.marks,
            tokens=state.tokens,
        )

    def sample_inputs(self, choices: Choices, state: RowState, num_kept: int) -> SampleInputs:
        """The staged rows' parameters, for `num_kept` choices."""
        ints, floats = self._sampling, self._sampling.view(torch.float32)
        return SampleInputs(
            row_of=choices.row_of[:num_kept],
            processing=self.processing(choices, state),
            inverse_temperature=floats[INVERSE_TEMPERATURE],
            top_k=ints[TOP_K],
            top_p=floats[TOP_P],
            min_p=floats[MIN_P],
            seed_low=ints[SEED_LOW],
            seed_high=ints[SEED_HIGH],
        )

    def next_host(self) -> HostStage:
        """The host side whose last step has retired, with depth one."""
        self._turn ^= 1
        return self._hosts[self._turn]

    def send(self, host: HostStage, num_rows: int) -> None:
        """Copy to the device, behind whatever runs there."""
        size = self._layout.tables + num_rows * self._layout.table_width
        self.tensor[:size].copy_(host.tensor[:size], non_blocking=True)

    def empty(self) -> None:
        """Let kernels see a step without rows."""
        self.rows.header.zero_()
        self.catch_up.header.zero_()
