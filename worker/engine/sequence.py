"""A live request: its tokens, blocks, cost and prefix hashes, and its part of a planned step."""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, Protocol

from worker.messages import Finished, RowUsage, SamplingParams
from worker.sampling.processors import Processors, is_asked

NO_SLOT = -1


class SequenceStatus(enum.Enum):
    """Where a sequence stands; only a running one owns blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class StopDetector(Protocol):
    """What finds stop strings: `worker.text.Detokenizer`."""

    stopped: bool

    def push(self, token_id: int) -> str:
        """Take the next token; afterwards `stopped` says whether it completed a stop string."""
        ...


class Sequence:
    """One request from submission to its end.

    Invariants: tokens [0, num_computed_tokens) have their KV in the block table. A running row
    in phase "decode" has num_computed_tokens == len(token_ids) - 1: its last token is the next
    input. In phase "prefill" it computes up to num_prefill_tokens, which after a preemption
    covers what it had already generated. All of this is as of the last step that has retired;
    what the one in flight will have changed is told by bounds.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "draft_broken",
        "draft_hint",
        "draft_hint_version",
        "epoch",
        "flight",
        "gamma_histogram",
        "last_step",
        "max_num_tokens",
        "min_num_tokens",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_preemptions",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_steps",
        "num_unscored",
        "params",
        "phase",
        "policy_version",
        "processors",
        "proposer_state",
        "request_id",
        "slot",
        "speculation_limits",
        "status",
        "stop_detector",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        max_gamma: int,
        eos_token_ids: Seq[int] = (),
        stop_detector: StopDetector | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.token_ids = list(prompt_token_ids)  # prompt, then output
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        self.stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_ids |= frozenset(eos_token_ids)
        self.stop_detector = stop_detector
        # Until it has more than these no stop id ends it; a detector knows by itself.
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.processors: Processors | None = None  # None: logits stay as they are
        if is_asked(params):
            self.processors = Processors(params, self.num_prompt_tokens, self.stop_ids)
        # Tokens of the prompt whose log-probabilities are not delivered yet; the first has none.
        self.num_unscored = self.num_prompt_tokens - 1 if params.num_prompt_logprobs >= 0 else 0

        self.status = SequenceStatus.WAITING
        self.phase: Literal["prefill", "decode"] = "prefill"
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []  # chain over full blocks, made as they are needed
        self.num_computed_tokens = 0
        self.num_prefill_tokens = self.num_prompt_tokens
        self.epoch = 0  # raised when results of launched steps must not be applied any more
        self.last_step = 0  # number of the last step launched with this row
        self.flight: PlannedRow | None = None  # what that step does, if its result is awaited
        self.slot = NO_SLOT  # of the device's rows; a running row has one of its own

        # Where the walk over the blocks' draft fill may start: blocks before it are full.
        self.draft_hint = 0
        self.draft_hint_version = -1
        self.draft_broken = False  # its draft gave logits that are no numbers
        self.proposer_state: object = None

        self.num_cached_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.gamma_histogram = [0] * (max_gamma + 1)
        self.policy_version = ""
        self.speculation_limits: list[str] = []  # why it was drafted for with less than it asked

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer, those that it was resumed with included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def first_unscored(self) -> int:
        """Position whose logits tell how likely the prompt's first token without them is."""
        return self.num_prompt_tokens - 1 - self.num_unscored

    # ---- when the step in flight, if any, has retired ----

    @property
    def will_decode(self) -> bool:
        """Whether its prompt is computed."""
        flight = self.flight
        return self.phase == "decode" or (flight is not None and flight.samples)

    @property
    def will_have_computed(self) -> int:
        """Tokens of its prompt whose KV is there; for a row that will not decode yet."""
        flight = self.flight
        return self.num_computed_tokens if flight is None else flight.first + flight.num_tokens

    @property
    def will_end(self) -> bool:
        """Whether it ends for sure: with but one token more it is as long as it may get."""
        flight = self.flight
        if flight is None or not flight.samples:
            return False
        return len(self.token_ids) + 1 >= self.max_num_tokens

    @property
    def bound(self) -> int:
        """Most tokens that it may have."""
        flight = self.flight
        if flight is None or not flight.samples:
            return len(self.token_ids)
        return len(self.token_ids) + flight.gamma + 1

    # ---- content ----

    def resume(self, token_ids: Seq[int]) -> tuple[int, str]:
        """Go on after an answer's first tokens, as if they had been generated here.

        Whoever has them has the prompt's log-probabilities too.

        Returns:
            As `advance`: an answer that has ended already is told with its reason.
        """
        if token_ids:
            self.num_unscored = 0
        return advance(self, token_ids)

    def limit_speculation(self, reason: str) -> None:
        """Note why it gets fewer drafts than it asked for."""
        if reason not in self.speculation_limits:
            self.speculation_limits.append(reason)

    def hashes(self, num_blocks: int, block_size: int, salt: bytes) -> list[bytes]:
        """Hash chain of the first `num_blocks` blocks, which must be full of known tokens."""
        chain = self.block_hashes
        while len(chain) < num_blocks:
            start = len(chain) * block_size
            parent = chain[-1] if chain else salt
            chain.append(chain_hash(parent, self.token_ids[start : start + block_size]))
        return chain[:num_blocks]

    def usage(self) -> RowUsage:
        """What the request has cost so far."""
        return RowUsage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_steps=self.num_steps,
            gamma_histogram=tuple(self.gamma_histogram),
            policy_version=self.policy_version,
            num_preemptions=self.num_preemptions,
            speculation_limit="; ".join(self.speculation_limits),
        )

    def ended(self, reason: str, error: str = "") -> Finished:
        """The message that ends the request."""
        return Finished(request_id=self.request_id, reason=reason, usage=self.usage(), error=error)


@dataclass(slots=True)
class PlannedRow:
    """One row of a step.

    A decode row's input is its last token and up to `gamma` drafts. A prefill row's is the next
    `num_tokens` of its tokens; with the last of them it samples. Planned while the row's step
    before is in flight, a decode row does not know where it begins: `bound` is the most.
    """

    sequence: Sequence
    epoch: int  # the row's, when the step was planned
    num_tokens: int  # input tokens, drafts aside
    samples: bool  # the logits of its last token are wanted
    is_decode: bool
    gamma: int = 0  # most drafts that it makes
    draft_start: int = 0  # tokens that the draft's cache holds
    num_catch_up: int = 0  # tokens that the draft computes before it drafts, if it drafts at all
    draft_version: int = -1  # of the blocks' fill, that `draft_start` relies on; -1: no cache
    first: int = 0  # position of its first input token; -1: the device knows, the host does not yet
    bound: int = 0  # tokens that it has, or may have, when the step begins
    slot: int = -1  # the sequence's, which may lose it before the step retires
    # Positions of input tokens whose logits tell how likely the prompt's next tokens are: the
    # runner reads them all, for `RowResult.prompt_logprobs`; a step has MAX_SCORED at most.
    scored: range = range(0)


def chain_hash(parent: bytes, token_ids: Seq[int]) -> bytes:
    """SHA-256 of a block's tokens after its parent's hash; the first parent is the salt."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


def advance(sequence: Sequence, token_ids: Seq[int]) -> tuple[int, str]:
    """Append tokens until a stop rule holds.

    While the answer has at most `min_tokens` tokens no stop id ends it: they are not sampled
    either. A stop string that is complete in fewer tokens is never honoured, unless it occurs
    again. A `min_tokens` that the context cannot hold ends with the context, by "length".

    Returns:
        How many were appended, the one that stopped it included, and the finish reason:
        "stop" (end of sequence, stop id, stop string), "length" (max_tokens, context), or "".
    """
    output, detector = sequence.token_ids, sequence.stop_detector
    for count, token_id in enumerate(token_ids, start=1):
        output.append(token_id)
        if detector is not None:
            detector.push(token_id)
            if detector.stopped:
                return count, "stop"
        if token_id in sequence.stop_ids and len(output) > sequence.min_num_tokens:
            return count, "stop"
        if len(output) >= sequence.max_num_tokens:
            return count, "length"
    return len(token_ids), ""
