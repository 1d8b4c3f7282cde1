"""Proof at start that a row's logits do not depend on batch, chunking or verification width.

Token-by-token decoding is compared, bit for bit, with what the worker will run: chunks of 1
to 9 tokens, batches up to its limit, prefill chunks up to one forward's tokens, and every size
that forwards are padded to. Where it fails, the first operation whose rows differ for equal inputs
is named.
"""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from worker.model.forward import ModelForward
from worker.model.linear import MAX_ROWS
from worker.model.probe_rows import ProbeRows, Row

NUM_CHECKED = 10  # tokens decoded one by one, per row
MAX_WIDTH = 9  # gamma at most 8, and the bonus token
_WIDTHS = (1, 3, 5, MAX_WIDTH)  # of rows that decode: kernels cut them by the widest
_RANDOM_ROUNDS = 12
_STARTS = (3, 46, 131, 700)  # contexts before the checked tokens: one to many tiles
_PAGED_START = 1500  # where kernels split the keys, into parts longer than tiles
Part = tuple[Row, int, int]


def prove_exact(forward: ModelForward, *, max_num_seqs: int, budget_s: float) -> str | None:
    """Compare; None if every bit is equal, else a sentence naming what differs.

    Every kind of comparison runs once; then random ones, a dozen or until `budget_s` seconds
    are spent.
    """
    began = time.monotonic()
    limit = forward.max_model_len - NUM_CHECKED
    wanted = (*_STARTS, _PAGED_START) if forward.runtime.kernels else _STARTS
    starts = sorted({max(0, min(start, limit)) for start in wanted})
    checked = min(NUM_CHECKED, forward.max_model_len)
    rows = ProbeRows(forward, starts=starts, num_checked=checked)
    try:
        return _prove(forward, rows, checked, max_num_seqs, began + budget_s)
    finally:
        rows.close()


def _prove(
    forward: ModelForward, rows: ProbeRows, checked: int, max_num_seqs: int, deadline: float
) -> str | None:
    if forward.doubtful:  # compiled, or called for the prompt
        return _doubt(forward)
    rng = random.Random(1)
    alone: dict[int, torch.Tensor] = {}
    for number, row in enumerate(rows.rows):
        alone[number] = torch.cat([rows.run([(row, at, 1)]) for at in range(checked)])

    def differs(parts: list[tuple[int, int, int]]) -> str | None:
        """Run parts given by row number; a sentence if any row's bits differ."""
        batch = [(rows.rows[number], first, count) for number, first, count in parts]
        logits = rows.run(batch)
        at = 0
        for index, (number, first, count) in enumerate(parts):
            own, mine = alone[number][first : first + count], logits[at : at + count]
            if not torch.equal(own, mine):
                token = int((own != mine).any(1).nonzero()[0])
                place = _first_difference(forward, rows, batch, index, token)
                total = sum(count for _, _, count in parts)
                return f"{place} gives other bits in a batch of {len(parts)} rows, {total} tokens"
            at += count
        return None

    def parts_of(num_rows: int) -> list[tuple[int, int, int]]:
        parts = []
        room = forward.max_batch_tokens
        for index in range(num_rows):
            count = min(rng.randint(1, MAX_WIDTH), checked, room - (num_rows - index - 1))
            first = rng.randint(0, checked - count)
            parts.append((index % len(rows.rows), first, count))
            room -= count
        return parts

    def singles(num_rows: int) -> list[tuple[int, int, int]]:
        return [(index % len(rows.rows), rng.randrange(checked), 1) for index in range(num_rows)]

    most = min(max_num_seqs, forward.max_batch_tokens)
    few = sorted({min(2, most), min(4, most), most})
    comparisons = itertools.chain(
        (differs([(number, 0, min(MAX_WIDTH, checked))]) for number in range(len(rows.rows))),
        (differs(parts(size)) for size in few for parts in (singles, parts_of)),
        (_prefill_differs(forward, rows, rng) for _ in range(1)),
        (
            differs(_filling(size, most, checked, len(rows.rows), widest, rng))
            for size in forward.decode_sizes
            for widest in _WIDTHS
        ),
        (_mixed_differs(forward, rows, alone, size, most) for size in forward.prompt_sizes),
        (
            differs(parts_of(rng.randint(1, most)))
            for _ in range(_RANDOM_ROUNDS)
            if time.monotonic() <= deadline
        ),
    )
    problem = next(filter(None, comparisons), None)
    if problem is None and forward.doubtful:  # called at some sizes alone
        return _doubt(forward)
    return problem


def _doubt(forward: ModelForward) -> str:
    names = ", ".join(sorted(forward.doubtful))
    return f"it calls {names}, whose order of additions may depend on the batch"


def _filling(  # noqa: PLR0917 - of one caller
    size: int, most: int, checked: int, num_rows: int, widest: int, rng: random.Random
) -> list[tuple[int, int, int]]:
    """Parts of `size` tokens together, of at most `most` rows; fewer tokens if they hold fewer.

    They are at most `widest` wide where the rows suffice; the first is that wide.
    """
    parts: list[tuple[int, int, int]] = []
    for left in range(most, 0, -1):
        if size == 0:
            break
        least = -(-size // left)  # so that the rows left suffice
        width = rng.randint(1, widest) if parts else widest
        count = min(max(least, width), MAX_WIDTH, checked, size)
        parts.append((len(parts) % num_rows, rng.randint(0, checked - count), count))
        size -= count
    return parts


def _mixed_differs(
    forward: ModelForward, rows: ProbeRows, alone: dict[int, torch.Tensor], size: int, most: int
) -> str | None:
    """Compare ends of prompts, and a row that decodes, in a step of `size` tokens."""
    width = min(3, len(alone[0]), max(1, size // 8)) if most > 1 else 0
    batch: list[Part] = []
    left = size - width
    while left and len(batch) < max(1, most - 1):
        count = min(len(rows.prompt), left)
        batch.append((rows.prompt_row, 0, count))
        left -= count
    expected = [rows.run([(row, count - 1, 1)]) for row, _, count in batch]
    ends = list(itertools.accumulate(count for _, _, count in batch))
    keep = [end - 1 for end in ends] + [ends[-1] + index for index in range(width)]
    if width:
        batch.append((rows.rows[0], 0, width))
        expected.append(alone[0][:width])
    differing = (rows.run(batch, keep=keep) != torch.cat(expected)).any(1).nonzero()
    if not len(differing):
        return None
    first = int(differing[0])
    index = min(first, len(ends))
    token = first - len(ends) if index == len(ends) else batch[index][2] - 1
    place = _first_difference(forward, rows, batch, index, token)
    return f"{place} gives other bits in a step of {size} tokens with prompts"


def _prefill_differs(forward: ModelForward, rows: ProbeRows, rng: random.Random) -> str | None:
    """Compare one prefill chunk with smaller ones, and its end with decoding."""
    row, length = rows.prompt_row, len(rows.prompt)
    kept: Sequence[int] = range(length)
    if length > MAX_ROWS:  # logits of some tokens: all of them would fill gigabytes
        ends = {0, length - 2, length - 1}
        kept = sorted({*rng.sample(kept, MAX_ROWS - len(ends)), *ends})
    whole = rows.run([(row, 0, length)], keep=list(kept))
    cuts = sorted({0, length // 3, length // 2 + 1, max(0, length - 2), max(0, length - 1), length})
    cuts[1:1] = [rng.randint(1, max(1, cuts[1] - 1))] if len(cuts) > 2 else []
    cuts = sorted(set(cuts))
    for first, stop in itertools.pairwise(cuts):
        batch = [(row, first, stop - first)]
        low, high = bisect_left(kept, first), bisect_left(kept, stop)
        mine = rows.run(batch, keep=[token - first for token in kept[low:high]])
        if not torch.equal(mine, whole[low:high]):
            differing = int((mine != whole[low:high]).any(1).nonzero()[0])
            token = kept[low + differing] - first
            place = _first_difference(
                forward,
                rows,
                [(row, 0, length)],
                0,
                first + token,
                other=(row, first, stop - first),
            )
            return f"{place} gives other bits in a chunk of {length} tokens than of {stop - first}"
    return None


def _first_difference(
    forward: ModelForward,
    rows: ProbeRows,
    batch: list[Part],
    index: int,
    token: int,
    *,
    other: Part | None = None,
) -> str:
    """Name the first module whose row differs between `batch` and the row run alone."""
    if forward.compiled:
        return "the compiled forward"
    row, first, _ = batch[index]
    start, at_alone = ((row, first + token, 1), 0) if other is None else (other, token - other[1])
    at_batch = sum(count for _, _, count in batch[:index]) + token
    alone = _trace(forward, rows, [start], at_alone)
    together = _trace(forward, rows, batch, at_batch)
    for (name, kind, *one), (_, _, *two) in zip(alone, together, strict=False):
        for what, mine, theirs in zip(("input", "output"), one, two, strict=True):
            if mine is not None and theirs is not None and not torch.equal(mine, theirs):
                return f"what precedes {name}" if what == "input" else f"{kind} {name}"
    return "the forward"


Traced = tuple[str, str, torch.Tensor | None, torch.Tensor | None]


def _trace(forward: ModelForward, rows: ProbeRows, batch: list[Part], token: int) -> list[Traced]:
    """(name, class, input row, output row) of every leaf module called, in order.

    A forward may be padded beyond its tokens.
    """
    calls: list[Traced] = []
    total = max(2, sum(count for _, _, count in batch))

    def row_of(value: Any) -> torch.Tensor | None:
        if isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[1] >= total:
            return value[0, token].clone()
        return None

    hooks = []
    for name, module in forward.model.named_modules():
        if not any(True for _ in module.children()):

            def hook(module: torch.nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                given = row_of(inputs[0]) if inputs else None
                calls.append((name, type(module).__name__, given, row_of(output)))

            hooks.append(module.register_forward_hook(hook))
    try:
        rows.run(batch)
    finally:
        for handle in hooks:
            handle.remove()
    return calls
