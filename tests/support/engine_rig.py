"""Scheduler, runner and proposer over any two forwards, stepped by hand, every step checked."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from fake_device import FakeDeviceRunner
from fake_forward import FakeForward, Kind
from plain_processors import plain_logits

from worker.engine.block_manager import BlockManager
from worker.engine.decisions import Choice
from worker.engine.drafting import Drafting
from worker.engine.plan import Plan, StepResult
from worker.engine.runner import Launched, Runner, StepRunner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence, StopDetector
from worker.messages import Finished, Logprobs, SamplingParams, StepOutput
from worker.model.batch import Forward
from worker.sampling import sample
from worker.speculative.draft_model import DraftModelProposer
from worker.speculative.ngram import NgramProposer
from worker.speculative.proposer import Proposer

BLOCK_SIZE = 16


def params(**fields: object) -> SamplingParams:
    """Greedy by default."""
    defaults: dict[str, object] = {"temperature": 0.0, "seed": 1, "max_tokens": 32}
    return SamplingParams(**{**defaults, **fields})  # type: ignore[arg-type]


@dataclass
class Columns:
    """Log-probabilities of successive tokens."""

    chosen: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top: list[list[float]] = field(default_factory=list)

    def take(self, message: Logprobs) -> None:
        """Append a message's."""
        chosen = np.frombuffer(message.chosen, "<f4").tolist()
        shape = (len(chosen), message.num_top)
        self.chosen += chosen
        self.top_ids += np.frombuffer(message.top_ids, "<i4").reshape(shape).tolist()
        self.top += np.frombuffer(message.top, "<f4").reshape(shape).tolist()


@dataclass
class Answer:
    """What came out for one request."""

    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    logprobs: Columns = field(default_factory=Columns)
    prompt_logprobs: Columns = field(default_factory=Columns)


class Rig:
    """An engine without messages. `gamma` and `extra` are numbers, or draw one for each step.

    At depth one a step is planned while the one before is in flight on a device; n-grams need
    the host.
    """

    def __init__(
        self,
        target: Forward,
        draft: Forward | None,
        *,
        gamma: int | Callable[[], int] = 0,
        extra: int | Callable[[], int] = 0,
        max_gamma: int = 8,
        num_base_blocks: int = 64,
        num_extra_blocks: int = 0,
        block_size: int = BLOCK_SIZE,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_catchup_tokens: int = 32,
        max_model_len: int = 256,
        prefix_cache: bool = True,
        ngram: bool = False,
        vocab_size: int | None = None,
        eos_token_ids: Seq[int] = (),
        depth: int = 0,
        eager: bool = True,
    ) -> None:
        vocab_size = vocab_size or target.vocab_size
        ticks = iter(range(10**9))

        def clock() -> float:
            return next(ticks) * 1e-3

        self.target, self.draft = target, draft
        self.gamma, self.extra = gamma, extra
        self.max_model_len, self.max_gamma, self.depth = max_model_len, max_gamma, depth
        self.eos_token_ids = tuple(eos_token_ids)
        proposer: Proposer | None = NgramProposer() if ngram else None
        if draft is not None:
            proposer = DraftModelProposer(
                draft,
                sample,
                vocab_size=min(vocab_size, draft.vocab_size),
                block_size=block_size,
                clock=clock,
            )
        self.blocks = BlockManager(
            num_base_blocks, num_extra_blocks, block_size, prefix_cache, b"salt"
        )
        self.scheduler = Scheduler(
            self.blocks,
            Drafting(
                self.blocks,
                proposer,
                max_gamma=max_gamma,
                max_catchup_tokens=max_catchup_tokens,
            ),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        runner = Runner(
            target, proposer, sample, vocab_size=vocab_size, block_size=block_size, clock=clock
        )
        assert not (ngram and depth)
        self.runner: StepRunner = FakeDeviceRunner(runner, eager=eager) if depth else runner
        self.answers: dict[int, Answer] = {}
        self.flights: deque[tuple[Plan, Launched]] = deque()
        self.done: list[StepResult] = []

    def submit(
        self,
        request_id: int,
        prompt: list[int],
        sampling: SamplingParams,
        stop_detector: StopDetector | None = None,
        prior: Seq[int] = (),
    ) -> None:
        """Queue a request, or one whose answer has begun elsewhere with `prior`."""
        self.answers[request_id] = Answer()
        sequence = Sequence(
            request_id,
            prompt,
            sampling,
            max_model_len=self.max_model_len,
            max_gamma=self.max_gamma,
            eos_token_ids=self.eos_token_ids,
            stop_detector=stop_detector,
        )
        self._end(self.scheduler.submit(sequence, prior))

    def abort(self, request_id: int) -> None:
        """End a request, wherever it stands."""
        self._end(self.scheduler.abort(request_id))

    def choose(self, batch_size: int, num_kv_tokens: int) -> Choice:
        """A decision out of nowhere."""
        gamma = self.gamma if isinstance(self.gamma, int) else self.gamma()
        extra = self.extra if isinstance(self.extra, int) else self.extra()
        return Choice(gamma, gamma, 0, "d", "v", num_extra_drafts=extra)

    def launch(self) -> bool:
        """Schedule and launch; False if there was nothing to."""
        plan = self.scheduler.schedule(self.choose)
        if plan.rows:
            self.flights.append((plan, self.runner.launch(plan)))
        return bool(plan.rows)

    def retire(self) -> None:
        """Retire and commit the oldest flight."""
        _, flight = self.flights.popleft()
        done = flight.retire()
        self.take(self.scheduler.commit(done))
        self.done.append(done)

    def step(self) -> bool:
        """One turn of the loop at the rig's depth, with all invariants checked after it."""
        launched = self.launch()
        if len(self.flights) > (self.depth if launched else 0):
            self.retire()
        self.scheduler.check_integrity()
        return launched

    def drain(self) -> None:
        """Retire everything in flight."""
        while self.flights:
            self.retire()
        self.scheduler.check_integrity()

    def run(self, max_steps: int = 5000) -> None:
        """Step until no request is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return self.drain()
            self.step()
        raise AssertionError(f"requests are left after {max_steps} steps")

    def take(self, output: StepOutput) -> None:
        """File a step's tokens under their requests."""
        for message in output.prompt_logprobs:
            answer = self.answers[message.request_id]
            assert not answer.token_ids, "a prompt's log-probabilities after a token"
            answer.prompt_logprobs.take(message)
        token_ids, start = array("i", output.token_ids), 0
        for request_id, count in zip(output.request_ids, output.num_tokens, strict=True):
            answer = self.answers[request_id]
            assert answer.finished is None, "tokens after the end"
            answer.token_ids += token_ids[start : start + count]
            start += count
        assert start == len(token_ids)
        for message in output.logprobs:
            answer = self.answers[message.request_id]
            answer.logprobs.take(message)
            assert len(answer.logprobs.chosen) == len(answer.token_ids)
        for finished in output.finished:
            self._end(finished)

    def _end(self, finished: Finished | None) -> None:
        if finished is not None:
            assert self.answers[finished.request_id].finished is None, "finished twice"
            self.answers[finished.request_id].finished = finished

    def tokens(self, request_id: int) -> list[int]:
        """The answer's token ids."""
        return self.answers[request_id].token_ids

    def end(self, request_id: int) -> Finished:
        """How the request ended."""
        finished = self.answers[request_id].finished
        assert finished is not None
        return finished


def fakes(
    draft: Kind | None,
    *,
    num_base_blocks: int = 64,
    num_extra_blocks: int = 0,
    block_size: int = BLOCK_SIZE,
    draft_model_len: int = 512,
    window: int = 0,
) -> tuple[FakeForward, FakeForward | None]:
    """A fake target, and a fake draft whose cache covers the base blocks alone."""
    slots = num_base_blocks * block_size
    target = FakeForward("target", slots + num_extra_blocks * block_size, block_size, window=window)
    if draft is None:
        return target, None
    return target, FakeForward(
        draft, slots, block_size, max_model_len=draft_model_len, window=window
    )


def oracle(
    model: FakeForward,
    prompt: list[int],
    sampling: SamplingParams,
    *,
    max_model_len: int = 256,
    eos_token_ids: Seq[int] = (),
) -> tuple[list[int], str]:
    """Tokens and finish reason of plain decoding, without any engine."""
    import torch

    tokens = list(prompt)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    while True:
        raw = model.logits(tokens)[: model.real_vocab_size]
        logits = plain_logits(raw, sampling, prompt, tokens[len(prompt) :], stops)
        (token,) = sample(torch.from_numpy(logits)[None], [sampling], [len(tokens)])
        tokens.append(token)
        if token in stops:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= min(max_model_len, len(prompt) + sampling.max_tokens):
            return tokens[len(prompt) :], "length"


def prompt(rng: random.Random, length: int, vocab_size: int = 40) -> list[int]:
    """Random token ids."""
    return [rng.randrange(vocab_size) for _ in range(length)]
