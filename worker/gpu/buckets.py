"""Sizes that graphs are captured for: a step is padded to the least that holds it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nightjar.errors import EngineFailure
from worker.engine.plan import MAX_SCORED
from worker.kernels.attention_inputs import SHORT_HEIGHTS
from worker.kernels.row_state import MAX_CHOICES

_DECODE = (2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_LARGE_STEP = 128  # between sizes above the fine ones
# A prompt's tokens are bound by arithmetic, so that padding costs what tokens do.
_MIXED = (
    *(16, 32, 64, 128, 192),
    *range(256, 2048, 128),
    *range(2048, 4096, 256),
    *range(4096, 8192, 512),
)
_CATCH_UP = (64, 256, 1024)
_KEPT = (64, 256)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """All sizes of one worker, ascending."""

    decode: tuple[int, ...]  # tokens of a step without prompt tokens; all logits are kept
    mixed: tuple[int, ...]  # tokens of a step with prompt tokens
    kept: tuple[int, ...]  # logits of such a step; the last is the most that any step keeps
    rows: tuple[int, ...]  # rows that draft
    catch_up: tuple[int, ...]  # tokens that the draft catches up
    heights: tuple[int, ...]  # queries of a decode row's tile, up to what gamma asks for

    @classmethod
    def of(
        cls,
        *,
        max_num_seqs: int,
        max_gamma: int,
        max_num_batched_tokens: int,
        max_catchup_tokens: int,
    ) -> Buckets:
        """Sizes for a worker's limits."""
        most = min(max_num_seqs * (max_gamma + 1), max_num_batched_tokens)
        most_kept = min(most + MAX_SCORED, max_num_batched_tokens)
        return cls(
            decode=_up_to(most, _DECODE),
            mixed=_up_to(max_num_batched_tokens, _MIXED),
            kept=(*(size for size in _KEPT if size < most_kept), max(2, most_kept)),
            rows=_up_to(max_num_seqs, _DECODE),
            catch_up=_up_to(max_catchup_tokens, _CATCH_UP),
            heights=tuple(height for height in SHORT_HEIGHTS if height < 2 * max(2, max_gamma + 1)),
        )

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest forward."""
        return max(self.decode[-1], self.mixed[-1], self.catch_up[-1], 2 * self.rows[-1])

    @property
    def max_kept(self) -> int:
        """Logits of the largest step."""
        return self.kept[-1]

    @property
    def max_reports(self) -> int:
        """Log-probabilities that a step may be staged for: also of drafts that are not selected.

        Where rows draft more than is verified, the host knows the most of each row alone.
        """
        return self.rows[-1] * MAX_CHOICES + MAX_SCORED

    @property
    def products(self) -> tuple[int, ...]:
        """Numbers of rows that a layer's matrix product may be asked for."""
        firsts = [2 * rows for rows in self.rows]
        sizes = {*self.decode, *self.mixed, *self.kept, *self.rows, *firsts, *self.catch_up, 2}
        return tuple(sorted(sizes))

    @property
    def logits(self) -> tuple[int, ...]:
        """Numbers of rows that the head may be asked for: of a long prompt few logits are kept."""
        mixed = {size for size in self.mixed if size <= self.max_kept}
        return tuple(sorted({*self.decode, *mixed, *self.kept, *self.rows, 2}))

    def token_bucket(self, num_tokens: int, *, has_prompt: bool) -> int:
        """Tokens of the forward that a step of `num_tokens` runs as."""
        return _least(self.mixed if has_prompt else self.decode, num_tokens)

    def kept_bucket(self, num_kept: int, num_tokens: int) -> int:
        """Logits that a forward of `num_tokens` with prompt tokens keeps."""
        return next((k for k in self.kept if num_kept <= k < num_tokens), num_tokens)

    def kept_buckets(self, num_tokens: int) -> tuple[int, ...]:
        """All that `kept_bucket` gives steps of `num_tokens`, ascending."""
        sizes = {k for k in self.kept if k < num_tokens}
        return tuple(sorted(sizes | {min(num_tokens, self.max_kept)}))

    def height_bucket(self, height: int, *, has_prompt: bool) -> int:
        """Queries of a decode row's tile; with prompts the least or the most, to capture few."""
        return height if not has_prompt or height <= self.heights[0] else self.heights[-1]

    def height_buckets(self, num_tokens: int, *, has_prompt: bool) -> tuple[int, ...]:
        """All that `height_bucket` gives forwards of `num_tokens`, ascending."""
        heights = {self.height_bucket(h, has_prompt=has_prompt) for h in self.heights}
        # A taller tile is for a row of more tokens than half of it.
        fit = {h for h in heights if has_prompt or num_tokens > h // 2}
        return tuple(sorted(fit | {self.heights[0]}))

    def row_bucket(self, num_rows: int) -> int:
        """Rows of the draft's forwards."""
        return _least(self.rows, num_rows)

    def catch_up_bucket(self, num_tokens: int) -> int:
        """Tokens of the draft's forward that catches up."""
        return _least(self.catch_up, num_tokens)


def _up_to(most: int, fine: Iterable[int]) -> tuple[int, ...]:
    """Sizes that hold up to `most`, at least 2."""
    most = max(2, most)
    sizes = [size for size in fine if size < most]
    while sizes and sizes[-1] >= 256 and sizes[-1] + _LARGE_STEP < most:
        wide = max(_LARGE_STEP, sizes[-1] // 3 // _LARGE_STEP * _LARGE_STEP)
        if sizes[-1] + wide >= most:
            break
        sizes.append(sizes[-1] + wide)
    return (*sizes, most)


def _least(sizes: Sequence[int], number: int) -> int:
    index = bisect_left(sizes, number)
    if index == len(sizes):
        raise EngineFailure(f"a step of {number} exceeds the largest captured size {sizes[-1]}")
    return sizes[index]
