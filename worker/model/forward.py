"""The forward of one model over its KV cache: pads, plans, runs, and returns wanted logits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nightjar.errors import EngineFailure
from worker.model.batch import Batch
from worker.model.linear import MAX_ROWS, drop_packed, pack
from worker.model.plan import make_plan
from worker.model.runtime import Runtime

MIN_ROWS = 2  # one row takes other kernels, and compiled graphs specialise on it
# Rows that products on a CPU are padded to. For every number of rows and shape of weight oneDNN
# makes code of its own, which takes time at first and keeps some .4 MB: so numbers are few.
PADDED = (
    *range(2, 16),
    *range(16, 32, 2),
    *range(32, 64, 4),
    *range(64, 128, 8),
    *range(128, MAX_ROWS + 1, 16),
)

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ModelForward:
    """Runs a prepared transformers model; satisfies `worker.model.batch.Forward`."""

    max_batch_tokens = MAX_ROWS  # of one forward; longer batches run as several
    # Tokens that forwards are padded to, of steps without and with prompts; none are on a CPU.
    decode_sizes: Sequence[int] = ()
    prompt_sizes: Sequence[int] = ()

    def __init__(
        self, model: nn.Module, runtime: Runtime, *, vocab_size: int, max_model_len: int
    ) -> None:
        self.model, self.runtime = model, runtime
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.step: Step = self.eager_step
        self.pad_always = False  # a compiled step never sees one row
        self.compiled = False
        self.last_layers: set[int] = set()  # that attended in the last planned forward

    @property
    def doubtful(self) -> set[str]:
        """Operators that eager steps have called whose bits might depend on the batch."""
        return set()

    def set_free(self) -> None:
        """Give up exact arithmetic: bits may depend on the batch from now on."""
        self.runtime.exact = False

    def eager_step(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        """[1, T] ids and positions, kept tokens [K] -> logits [K, vocab_size]."""
        model: Any = self.model
        output = model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=keep
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def run(self, batch: Batch) -> torch.Tensor:
        """Write the tokens' KV at their slots; logits float32 [len(logit_tokens), vocab_size].

        More than `max_batch_tokens` run as several forwards, in order, whose bits are the same.
        """
        return self.compute(batch)

    def compute(self, batch: Batch) -> torch.Tensor:
        """Like `run`, but the logits stay where they are, in the dtype that they have."""
        with torch.inference_mode():
            most = self.max_batch_tokens
            if len(batch.input_ids) <= most:
                return self._run(batch)
            return torch.cat([self._run(part) for part in split(batch, most)])

    def _run(self, batch: Batch) -> torch.Tensor:
        runtime, least = self.runtime, MIN_ROWS if self.runtime.exact or self.pad_always else 1
        assert runtime.cache is not None
        count = len(batch.input_ids)
        ids, positions, kept = batch.input_ids, batch.positions, batch.logit_tokens or [0]
        total, num_kept = (padded(number, least) for number in (count, len(kept)))
        ids = ids + ids[-1:] * (total - count)
        positions = positions + positions[-1:] * (total - count)
        kept = kept + kept[-1:] * (num_kept - len(kept))
        if runtime.native is not None:
            runtime.native.prepare(runtime.cache, batch, total)
        else:
            runtime.plan = make_plan(
                batch, runtime.cache.geometry, exact=runtime.exact, num_tokens=total
            )
        try:
            logits = self.step(torch.tensor([ids]), torch.tensor([positions]), torch.tensor(kept))
        finally:
            if runtime.plan is not None:
                self.last_layers = runtime.plan.layers
                runtime.plan = None
        return logits[: len(batch.logit_tokens)].float()


def padded(count: int, least: int) -> int:
    """Rows that a product of `count`, at least 1, runs as."""
    if count == least == 1:
        return 1
    index = bisect_left(PADDED, count)
    return PADDED[index] if index < len(PADDED) else count


class DraftForward(ModelForward):
    """A draft, whose weights are bytes of the arena's tail that may be given away."""

    resident = True

    def drop(self) -> None:
        """Forget what is derived from the tail; `run` fails until `restore`."""
        self.resident = False
        drop_packed(self.runtime)

    def restore(self) -> None:
        """Rebuild it from the tail's bytes, which hold the image again."""
        pack(self.runtime, self.model, keep_plain=True)
        self.resident = True

    def compute(self, batch: Batch) -> torch.Tensor:
        """Like `ModelForward.compute`.

        Raises:
            EngineFailure: The draft is dropped.
        """
        if not self.resident:
            raise EngineFailure("the draft ran while its memory was given away")
        return super().compute(batch)


def split(batch: Batch, limit: int) -> list[Batch]:
    """Cut a batch into batches of at most `limit` tokens, in order; rows may be cut too."""
    parts = []
    for start in range(0, len(batch.input_ids), limit):
        stop = min(start + limit, len(batch.input_ids))
        starts, tables = [0], []
        for row, table in enumerate(batch.block_tables):
            low = max(batch.query_starts[row], start)
            high = min(batch.query_starts[row + 1], stop)
            if low < high:
                starts.append(high - start)
                tables.append(table)
        parts.append(
            Batch(
                input_ids=batch.input_ids[start:stop],
                positions=batch.positions[start:stop],
                slots=batch.slots[start:stop],
                query_starts=starts,
                block_tables=tables,
                logit_tokens=[at - start for at in batch.logit_tokens if start <= at < stop],
            )
        )
    return parts
