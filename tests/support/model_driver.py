"""Drives a forward over sequences: blocks in no order, a pool of NaN, any chunks and batches."""

from __future__ import annotations

import random

import torch

from worker.model.batch import Batch
from worker.model.forward import ModelForward

Part = tuple[int, int, int]  # (sequence, first position, number of tokens)


class Driver:
    """Token sequences with block tables in a forward's pool."""

    def __init__(
        self, forward: ModelForward, sequences: list[list[int]], num_blocks: int, seed: int = 0
    ) -> None:
        """Take blocks of the first `num_blocks`: those past them may be the draft's."""
        cache = forward.runtime.cache
        assert cache is not None
        self.forward, self.sequences, self.cache = forward, sequences, cache
        self.block_size = cache.geometry.block_size
        ids = list(range(num_blocks))
        self.num_blocks = num_blocks
        random.Random(seed).shuffle(ids)
        self.tables = []
        for sequence in sequences:
            need = -(-len(sequence) // self.block_size)
            self.tables.append([ids.pop() for _ in range(need)])

    def fill_with_nan(self) -> None:
        """Every block's KV becomes NaN."""
        geometry = self.cache.geometry
        values = self.num_blocks * geometry.block_bytes // geometry.dtype.itemsize
        self.cache.rows[0].view(-1)[:values].fill_(float("nan"))

    def batch(self, parts: list[Part]) -> Batch:
        """One batch of the parts, every token's logits wanted."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for number, first, count in parts:
            table = self.tables[number]
            at = range(first, first + count)
            ids += self.sequences[number][first : first + count]
            positions += at
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size for p in at
            ]
            starts.append(len(ids))
        return Batch(
            input_ids=ids,
            positions=positions,
            slots=slots,
            query_starts=starts,
            block_tables=[self.tables[number] for number, _, _ in parts],
            logit_tokens=list(range(len(ids))),
        )

    def run(self, parts: list[Part]) -> list[torch.Tensor]:
        """Logits of each part, [count, vocab_size]."""
        logits = self.forward.run(self.batch(parts))
        return list(torch.split(logits, [count for _, _, count in parts]))

    def one_by_one(self, number: int, prefill: int) -> torch.Tensor:
        """The reference: a prefill alone, then every token alone; logits after the prefill."""
        self.fill_with_nan()
        self.run([(number, 0, prefill)])
        length = len(self.sequences[number])
        return torch.cat([self.run([(number, at, 1)])[0] for at in range(prefill, length)])

    def mixed(self, prefill: int, rng: random.Random) -> list[torch.Tensor]:
        """All sequences at once, in random chunks up to `prefill` and widths 1 to 9 after it."""
        self.fill_with_nan()
        done = [0] * len(self.sequences)
        seen: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        while True:
            parts = []
            for number, sequence in enumerate(self.sequences):
                left = len(sequence) - done[number]
                if left == 0 or rng.random() < 0.2:
                    continue
                if done[number] < prefill:
                    count = min(rng.choice((1, 7, 18, 64)), prefill - done[number])
                else:
                    count = min(rng.randint(1, 9), left)
                parts.append((number, done[number], count))
            for (number, first, count), logits in zip(
                parts, self.run(parts) if parts else (), strict=True
            ):
                done[number] += count
                if first >= prefill:
                    seen[number].append(logits)
            if all(d == len(s) for d, s in zip(done, self.sequences, strict=True)):
                return [torch.cat(logits) for logits in seen]


def count_differences(driver: Driver, prefill: int, trials: int, seed: int = 0) -> tuple[int, int]:
    """(positions whose logits differ by a bit from the reference, positions compared)."""
    rng = random.Random(seed)
    expected = [driver.one_by_one(n, prefill) for n in range(len(driver.sequences))]
    different = compared = 0
    for _ in range(trials):
        for own, mine in zip(expected, driver.mixed(prefill, rng), strict=True):
            assert not torch.isnan(mine).any()
            different += int((own != mine).any(1).sum())
            compared += len(own)
    return different, compared


def random_sequences(vocab_size: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
