"""The forward of one model on a device: static inputs, kernels, and nothing that waits for it.

`logits` is what graphs capture. `run` lays a batch out from the host, for proofs, checks and
tests: steps lay theirs out on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from nightjar.errors import EngineFailure
from worker.gpu.buckets import Buckets
from worker.gpu.gemm_table import free_table
from worker.gpu.paged import PagedAttention
from worker.gpu.row_wise import RowWise, left_to_libraries
from worker.kernels.attention_inputs import LONG_HEIGHT, SHORT_HEIGHTS
from worker.kernels.inputs import ForwardInputs, InputBuffers
from worker.model.batch import Batch
from worker.model.device import Placement
from worker.model.forward import DraftForward, ModelForward
from worker.model.runtime import Runtime

MAX_SHORT = 9  # queries of a decode or verify row: gamma at most 8, and the token before


class DeviceForward(ModelForward):
    """A `ModelForward` whose operators are kernels that read `buffers`."""

    buffers: InputBuffers

    def __init__(
        self, model: nn.Module, runtime: Runtime, *, vocab_size: int, max_model_len: int
    ) -> None:
        super().__init__(model, runtime, vocab_size=vocab_size, max_model_len=max_model_len)
        assert runtime.kernels
        self._row_wise = RowWise()

    @property
    def doubtful(self) -> set[str]:
        """Like `ModelForward.doubtful`: torch's kernels cut their work by the batch too."""
        names = self._row_wise.doubtful
        return left_to_libraries(names) if self.compiled else names

    def eager_step(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        """Like `ModelForward.eager_step`; under exact arithmetic, row by row between operators."""
        if torch.compiler.is_compiling() or not self.runtime.exact:
            return super().eager_step(input_ids, position_ids, keep)
        with self._row_wise:
            return super().eager_step(input_ids, position_ids, keep)

    def allocate(
        self, placement: Placement, buckets: Buckets, *, max_rows: int, table_width: int
    ) -> None:
        """Make the inputs, once the model has its cache.

        Args:
            placement: Where they lie.
            buckets: Sizes that forwards are padded to.
            max_rows: Rows of a batch.
            table_width: Blocks of the longest row.
        """
        runtime = self.runtime
        assert runtime.cache is not None
        geometry = runtime.cache.geometry
        self._buckets = buckets
        self.max_batch_tokens = buckets.mixed[-1]
        self.decode_sizes, self.prompt_sizes = buckets.decode, buckets.mixed
        self.block_size = geometry.block_size
        runtime.paged = PagedAttention(geometry, num_sms=placement.num_processors)
        self.buffers = InputBuffers(
            max_tokens=buckets.max_tokens,
            max_rows=max_rows,
            table_width=table_width,
            num_partial_floats=runtime.paged.partial_floats(
                buckets, max_rows=max_rows, table_width=table_width
            ),
            device=placement.device,
        )

    def use_tables(self, tables: torch.Tensor) -> None:
        """Read block tables, int32 [max_rows, table_width], from where a step writes them."""
        assert tables.shape == self.buffers.tables.shape
        self.buffers.tables = tables

    def set_free(self) -> None:
        """Like `ModelForward.set_free`; products become torch's own."""
        super().set_free()
        self.runtime.gemms = free_table()

    def bind(self, inputs: ForwardInputs) -> None:
        """Let attention read `inputs` from now on."""
        assert self.runtime.paged is not None
        self.runtime.paged.inputs = inputs.attention

    def logits(self, inputs: ForwardInputs) -> torch.Tensor:
        """Run over static inputs; [inputs.num_kept, vocab_size] in the model's dtype.

        Launches only, so that a graph can capture it.
        """
        with torch.inference_mode():
            self.bind(inputs)
            return self.step(inputs.input_ids[None], inputs.positions[None], inputs.keep)

    def run_padding(self, num_tokens: int, num_kept: int) -> None:
        """Run over tokens that are nobody's: nothing is written, and no logits are of use."""
        device = self.buffers.device
        inputs = InputBuffers(
            max_tokens=num_tokens, max_rows=1, table_width=1, num_partial_floats=1, device=device
        )
        self.logits(inputs.view(num_tokens, num_kept, short_height=2, has_long=True))

    def run(self, batch: Batch) -> torch.Tensor:
        """Like `ModelForward.run`: float32, on the CPU."""
        return self.compute(batch).float().cpu()

    def _run(self, batch: Batch) -> torch.Tensor:
        paged = self.runtime.paged
        assert paged is not None
        inputs = lay_out(batch, self.buffers, self._buckets, self.block_size)
        paged.reached = self.last_layers = set()
        return self.logits(inputs)[: len(batch.logit_tokens)]


class DeviceDraftForward(DraftForward, DeviceForward):
    """A draft on a device: its weights are used where they lie, so restoring packs nothing."""


def lay_out(
    batch: Batch, buffers: InputBuffers, buckets: Buckets, block_size: int
) -> ForwardInputs:
    """Copy a batch into the buffers, padded to a bucket; its inputs.

    Raises:
        EngineFailure: It has more rows than the buffers.
    """
    count, num_kept = len(batch.input_ids), len(batch.logit_tokens)
    starts = np.asarray(batch.query_starts)
    counts, firsts = np.diff(starts), np.asarray(batch.positions)[starts[:-1]]
    if len(counts) > buffers.max_rows:
        raise EngineFailure(f"{len(counts)} rows; the buffers hold {buffers.max_rows}")
    is_short = counts <= MAX_SHORT
    has_long = not is_short.all() or count > buckets.decode[-1]
    num_tokens = buckets.token_bucket(count, has_prompt=has_long)
    kept = buckets.kept_bucket(num_kept, num_tokens) if has_long else num_tokens
    longest = int(counts[is_short].max(initial=1))
    height = next(height for height in SHORT_HEIGHTS if height >= longest)
    if height <= buckets.heights[-1]:
        height = buckets.height_bucket(height, has_prompt=has_long)  # as steps have it
    inputs = buffers.view(num_tokens, kept, short_height=height, has_long=has_long)

    _copy(inputs.input_ids, batch.input_ids, padding=0)
    _copy(inputs.positions, batch.positions, padding=0)
    _copy(inputs.keep, batch.logit_tokens, padding=0)
    _copy(inputs.attention.slots, batch.slots, padding=-1)
    tables = np.zeros((len(counts), buffers.tables.shape[1]), dtype=np.int32)
    for row, (table, length) in enumerate(
        zip(batch.block_tables, (firsts + counts).tolist(), strict=True)
    ):
        used = -(-length // block_size)
        tables[row, :used] = table[:used]
    buffers.tables[: len(counts)].copy_(torch.from_numpy(tables))

    _copy_tiles(buffers.short_tiles, height, is_short, starts, firsts)
    _copy_tiles(buffers.long_tiles, LONG_HEIGHT, ~is_short, starts, firsts)
    return inputs


def _copy(target: torch.Tensor, values: list[int], *, padding: int) -> None:
    padded = torch.full(target.shape, padding, dtype=target.dtype)
    padded[: len(values)] = torch.tensor(values, dtype=target.dtype)
    target.copy_(padded)


def _copy_tiles(
    buffer: torch.Tensor, height: int, chosen: np.ndarray, starts: np.ndarray, firsts: np.ndarray
) -> None:
    """Cut the chosen rows into tiles; entries behind them are none."""
    tiles = [
        (row, starts[row] + at, min(height, starts[row + 1] - starts[row] - at), firsts[row] + at)
        for row in np.flatnonzero(chosen)
        for at in range(0, starts[row + 1] - starts[row], height)
    ]
    padded = np.zeros(tuple(buffer.shape), dtype=np.int32)
    if tiles:
        padded[:, : len(tiles)] = np.array(tiles, dtype=np.int32).T
    buffer.copy_(torch.from_numpy(padded))
