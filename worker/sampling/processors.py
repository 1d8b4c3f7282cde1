"""What a request changes of the target's and the draft's logits before a token is chosen of them.

In this order, in float32: logit_bias is added. Tokens of prompt and output are divided by the
repetition penalty r where their logit is above 0 (times float32(1 / r)), else multiplied by r.
Of tokens of the output alone, frequency_penalty times their count, then presence_penalty, are
subtracted. While fewer than min_tokens tokens precede a position, all that would end the
answer there is -inf. At a draft position the counts include the step's tokens before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.messages import SamplingParams

Float32s = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

MAX_INVERSE = 1e30  # of a repetition penalty: no finite logit of a model overflows by it
_NO_IDS: Ids = np.empty(0, np.intp)
_FIRST_ROOM = 64


def is_asked(params: SamplingParams) -> bool:
    """Whether a request changes logits at all."""
    return bool(params.logit_bias) or params.min_tokens > 0 or is_penalized(params)


def is_penalized(params: SamplingParams) -> bool:
    """Whether what was said already changes a request's logits."""
    penalties = (params.presence_penalty, params.frequency_penalty)
    return params.repetition_penalty != 1 or penalties != (0, 0)


def inverse(repetition_penalty: float) -> np.float32:
    """What a positive logit is multiplied by."""
    return np.float32(min(1 / repetition_penalty, MAX_INVERSE))


class Processors:
    """One request's: its constants, and how often it has had each token.

    Counts are of the accepted tokens that `count` was given, and of nothing else: drafts come
    with each call, so that what is rejected was never counted. A sequence's tokens are only
    ever appended to, preempted or not, so counting goes on where it ended.
    """

    __slots__ = (
        "_counts",
        "_first",
        "_ids",
        "_num_counted",
        "_places",
        "bias",
        "bias_ids",
        "ending_ids",
        "frequency",
        "inverse",
        "is_penalized",
        "min_num_tokens",
        "num_prompt_tokens",
        "presence",
        "repetition",
    )

    def __init__(
        self, params: SamplingParams, num_prompt_tokens: int, ending_ids: Iterable[int]
    ) -> None:
        """Take a request.

        Args:
            params: Of the request.
            num_prompt_tokens: Tokens before its output.
            ending_ids: Ids that end its answer: its stop ids and, unless ignored, the model's.
        """
        self.num_prompt_tokens = num_prompt_tokens
        self.min_num_tokens = num_prompt_tokens + params.min_tokens
        self.ending_ids: Ids = _NO_IDS  # ascending
        if params.min_tokens:
            self.ending_ids = np.array(sorted(ending_ids), np.intp)
        self.bias_ids: Ids = np.array([token for token, _ in params.logit_bias], np.intp)
        self.bias: Float32s = np.array([value for _, value in params.logit_bias], np.float32)
        self.repetition = np.float32(params.repetition_penalty)
        self.inverse = inverse(params.repetition_penalty)
        self.frequency = np.float32(params.frequency_penalty)
        self.presence = np.float32(params.presence_penalty)
        self.is_penalized = is_penalized(params)
        # Tokens of the prompt matter to the repetition penalty alone.
        self._first = 0 if params.repetition_penalty != 1 else num_prompt_tokens
        self._num_counted = self._first
        self._places: dict[int, int] = {}  # by token id: where it stands in the arrays
        self._ids: Ids = np.empty(_FIRST_ROOM, np.intp)
        self._counts: Float32s = np.zeros(_FIRST_ROOM, np.float32)  # in the output; exact to 2**24

    @property
    def ids(self) -> Ids:
        """Tokens that the penalties concern, in the order of their first occurrence."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Float32s:
        """How often each of `ids` is in the output."""
        return self._counts[: len(self._places)]

    def place(self, token_id: int) -> int:
        """Index of a token in `ids`; -1 if it is not there."""
        return self._places.get(token_id, -1)

    def count(self, token_ids: Sequence[int]) -> None:
        """Take in what was appended to prompt and accepted output since the last call."""
        if not self.is_penalized:
            return
        places = self._places
        for position in range(self._num_counted, len(token_ids)):
            token_id = token_ids[position]
            place = places.setdefault(token_id, len(places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            if position >= self.num_prompt_tokens:
                self._counts[place] += 1
        self._num_counted = max(self._num_counted, len(token_ids))


@dataclass(slots=True)
class Span:
    """Logits of successive positions of one row; its processors have counted up to the drafts."""

    processors: Processors
    line: int  # of the logits, the first position's
    num_lines: int
    num_tokens: int  # accepted ones before the drafts, prompt included
    drafts: Sequence[int]  # the last position comes after all, the one before it after one less

    @classmethod
    def of(
        cls,
        processors: Processors,
        token_ids: Sequence[int],
        drafts: Sequence[int],
        line: int,
        num_lines: int,
    ) -> Span:
        """Positions of a row with accepted `token_ids`, after those of `drafts`."""
        processors.count(token_ids)
        return cls(processors, line, num_lines, len(token_ids), drafts)

    def before(self, index: int) -> Sequence[int]:
        """Drafts before the position `index` of [0, num_lines)."""
        return self.drafts[: len(self.drafts) - self.num_lines + 1 + index]


def process(logits: torch.Tensor, spans: Sequence[Span]) -> None:
    """Change logits as the spans' requests ask; what no span names stays as it is, bit for bit.

    Element by element, so that no value depends on which rows share a call. Ids beyond the
    vocabulary are left out: a draft's may be smaller.

    Args:
        logits: [n, vocab] float32 on the CPU; written in place.
        spans: No line twice.
    """
    values: Float32s = logits.detach().numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # NaN stays what it is
        _add_bias(values, [span for span in spans if span.processors.bias.size])
        _penalize(values, [span for span in spans if span.processors.is_penalized])
        _keep_going(values, [span for span in spans if span.processors.ending_ids.size])


def _add_bias(logits: Float32s, spans: list[Span]) -> None:
    parts = [(line, span.processors) for span in spans for line in _lines(span)]
    if parts:
        lines = np.repeat([line for line, _ in parts], [p.bias.size for _, p in parts])
        ids = np.concatenate([p.bias_ids for _, p in parts])
        bias = np.concatenate([p.bias for _, p in parts])
        known = ids < logits.shape[1]
        logits[lines[known], ids[known]] += bias[known]


def _penalize(logits: Float32s, spans: list[Span]) -> None:
    entries = _Entries()
    for span in spans:
        for index, line in enumerate(_lines(span)):
            entries.add(line, span.processors, span.before(index))
    if not entries.owners:
        return
    ids, counts = entries.columns()
    owner = np.repeat(np.arange(len(entries.owners)), entries.sizes)  # of each entry
    known = ids < logits.shape[1]
    if not known.all():
        ids, counts, owner = ids[known], counts[known], owner[known]

    def constant(name: str) -> Float32s:
        of_owners = np.array([getattr(one, name) for one in entries.owners], np.float32)
        return of_owners[owner]

    lines = np.array(entries.lines)[owner]
    z = logits[lines, ids]
    z *= np.where(z > 0, constant("inverse"), constant("repetition"))
    z -= constant("frequency") * counts
    z -= constant("presence") * (counts > 0)
    logits[lines, ids] = z


def _keep_going(logits: Float32s, spans: list[Span]) -> None:
    for span in spans:
        for index, line in enumerate(_lines(span)):
            if span.num_tokens + len(span.before(index)) < span.processors.min_num_tokens:
                ids = span.processors.ending_ids
                logits[line, ids[ids < logits.shape[1]]] = -np.inf


def _lines(span: Span) -> range:
    return range(span.line, span.line + span.num_lines)


class _Entries:
    """(line, token) pairs whose logits are penalized, with counts, in columns."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.owners: list[Processors] = []
        self.sizes: list[int] = []
        self._ids: list[Ids] = []
        self._counts: list[Float32s] = []
        self._bumped: list[int] = []  # places in all entries of drafts that were there already
        self._num_entries = 0

    def add(self, line: int, processors: Processors, drafts: Sequence[int]) -> None:
        """A line's tokens: those counted, and drafts before it."""
        ids, counts = processors.ids, processors.counts
        self._ids.append(ids)
        self._counts.append(counts)
        size = len(ids)
        new: Counter[int] = Counter()
        for token_id in drafts:
            place = processors.place(token_id)
            if place >= 0:
                self._bumped.append(self._num_entries + place)
            else:
                new[token_id] += 1
        if new:
            self._ids.append(np.fromiter(new.keys(), np.intp, len(new)))
            self._counts.append(np.fromiter(new.values(), np.float32, len(new)))
            size += len(new)
        self.lines.append(line)
        self.owners.append(processors)
        self.sizes.append(size)
        self._num_entries += size

    def columns(self) -> tuple[Ids, Float32s]:
        """Ids and counts of all entries, line by line."""
        counts = np.concatenate(self._counts)
        np.add.at(counts, np.array(self._bumped, np.intp), np.float32(1))
        return np.concatenate(self._ids), counts
