"""One request's way through the front: let in, tokenized, handed to the engine, read as pieces.

The service that serves it speaks some protocol; nothing of it is known here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

import msgspec

from nightjar.errors import EngineFailure, InvalidRequest, OtherArithmetic, Unavailable
from nightjar.seeds import choice_seed
from nightjar.validation import Limits, check_length
from worker.front.admission import Ticket
from worker.front.logprobs import entry, scores
from worker.front.pieces import Piece, Request, Resumed, Start
from worker.front.state import WorkerState
from worker.front.streams import Batch, TokenStream
from worker.messages import Finished, Logprobs, RowUsage, SamplingParams
from worker.text.detokenizer import Detokenizer
from worker.text.tokenizer import Tokenizer

# Of a piece: 64 tokens with 20 alternatives each make a message of some ten kilobytes.
MAX_LOGPROBS = 64

OnEnd = Callable[[Callable[[], None]], None]


async def answer(state: WorkerState, request: Request, on_end: OnEnd) -> AsyncGenerator[Piece]:
    """The answer to a validated request, as the engine makes it.

    `on_end(callback)` has the callback called when the call has ended, however it ended: the
    call may die while this generator is suspended between two pieces, and its place and its
    blocks are then free at once.

    Raises:
        InvalidRequest: The prompt is too long for the parameters, or cannot be read.
        OtherArithmetic: The answer was begun by other arithmetic.
        Overloaded: The queue is full, or the pieces were left unread for too long.
        Unavailable: The worker is starting or draining, or ended the answer.
        EngineFailure: The engine failed.
    """
    limits, tokenizer = state.limits()
    fingerprint = "" if state.engine.ready is None else state.engine.ready.fingerprint
    if request.resumed is not None and request.resumed.fingerprint != fingerprint:
        raise OtherArithmetic(
            "continuation.arithmetic_fingerprint",
            f"the answer was begun by arithmetic {request.resumed.fingerprint[:64]!r}; this "
            f"worker's is {fingerprint!r}, which may continue it differently",
        )
    ticket = state.admission.enter(request.n)
    on_end(ticket.leave)
    choices: _Choices | None = None
    try:
        prompt = request.prompt
        if not isinstance(prompt, list):
            prompt = await state.encode(prompt, limits)
        sampling = _fitted(request, len(prompt), limits)
        choices = _Choices(state, ticket, prompt, sampling)
        on_end(choices.close)
        ticket.wait(len(prompt))
        choices.begin(tokenizer, request.resumed)
        scored = sampling.num_prompt_logprobs >= 0
        start: Start | None = Start(
            seed=sampling.seed,
            fingerprint=fingerprint,
            num_prompt_tokens=len(prompt),
            first_prompt_token=tokenizer.own_bytes(prompt[0], first=True) if scored else b"",
        )
        async with aclosing(choices.pieces(tokenizer)) as pieces:
            async for piece in pieces:
                piece.start, start = start, None
                yield piece
    finally:
        if choices is not None:
            choices.close()
        ticket.leave()


def _fitted(request: Request, num_prompt_tokens: int, limits: Limits) -> SamplingParams:
    """The parameters, with as many tokens as the context holds where no number was given."""
    sampling, resumed = request.sampling, request.resumed
    max_tokens = check_length(
        num_prompt_tokens,
        limits,
        max_tokens=sampling.max_tokens or None,
        min_tokens=sampling.min_tokens,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        num_prior_tokens=0 if resumed is None else len(resumed.token_ids),
    )
    if resumed is not None and resumed.token_ids:
        # With its first token a client has had all of these.
        sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=-1)
    return msgspec.structs.replace(sampling, max_tokens=max_tokens)


class _Choices:
    """The choices of one answer: requests of their own to the engine, read as they come.

    The first runs alone until it has a token: the others then find the prompt's blocks cached.
    """

    def __init__(
        self, state: WorkerState, ticket: Ticket, prompt: list[int], sampling: SamplingParams
    ) -> None:
        self._engine = state.engine
        self._places = ticket.places
        self._prompt, self._sampling = prompt, sampling
        self._wake = asyncio.Event()
        self._live: list[_Choice] = []
        self._streams: list[TokenStream] = []
        self._usages: dict[int, RowUsage] = {}  # of choices that have ended
        self._closed = False

    def begin(self, tokenizer: Tokenizer, resumed: Resumed | None) -> None:
        """Hand the first choice to the engine, or what is left of it to generate."""
        sampling = self._sampling
        text = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
        prior = [] if resumed is None else resumed.token_ids
        unsent = "" if resumed is None else _replay(text, tokenizer, sampling, resumed)
        stream = self._submit(0, sampling, prior)
        self._live.append(_Choice(0, stream, text, tokenizer, self._prompt, unsent=unsent))

    async def pieces(self, tokenizer: Tokenizer) -> AsyncGenerator[Piece]:
        """What comes of all of them, until the last has ended."""
        while self._live:
            await self._wake.wait()
            self._wake.clear()
            for choice in list(self._live):
                batch = choice.stream.take()
                if batch.empty:
                    continue
                if len(self._streams) == 1 and (batch.token_ids or batch.finished):
                    self._begin_others(tokenizer)
                if batch.finished is not None:
                    self._live.remove(choice)
                    self._usages[choice.index] = batch.finished.usage
                for piece in choice.pieces(batch):
                    if piece.finish_reason and not self._live:
                        piece.usage = total(self._usages)
                    yield piece

    def close(self) -> None:
        """End what still runs, and begin nothing more."""
        self._closed = True
        for stream in self._streams:
            stream.close()

    def _begin_others(self, tokenizer: Tokenizer) -> None:
        for index in range(1, len(self._places)):
            sampling = msgspec.structs.replace(
                self._sampling,
                seed=choice_seed(self._sampling.seed, index),
                num_prompt_logprobs=-1,
            )
            text = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
            stream = self._submit(index, sampling, [])
            self._live.append(_Choice(index, stream, text, tokenizer, self._prompt))

    def _submit(self, index: int, sampling: SamplingParams, prior: list[int]) -> TokenStream:
        if self._closed:
            raise Unavailable("the call has ended")
        stream = self._engine.submit(
            self._prompt, sampling, prior, place=self._places[index], wake=self._wake
        )
        self._streams.append(stream)
        return stream


class _Choice:
    """One choice: its tokens become text and entries."""

    def __init__(
        self,
        index: int,
        stream: TokenStream,
        text: Detokenizer,
        tokenizer: Tokenizer,
        prompt: list[int],
        *,
        unsent: str = "",
    ) -> None:
        self.index, self.stream = index, stream
        self._text, self._tokenizer = text, tokenizer
        self._unscored = iter(prompt[1:])  # tokens whose log-probabilities have not come
        self._unsent = unsent  # text of prior tokens that the client does not have

    def pieces(self, batch: Batch) -> Iterator[Piece]:
        """What the batch holds, in pieces of bounded size."""
        for chunk in batch.prompt_logprobs:
            yield from self._prompt_pieces(chunk)
        token_ids, finished = batch.token_ids, batch.finished
        if not token_ids and finished is None:
            return
        scored = itertools.chain.from_iterable(map(scores, batch.logprobs))
        size = MAX_LOGPROBS if batch.logprobs else len(token_ids) or 1
        last = max(0, len(token_ids) - 1) // size * size
        for begin in range(0, last + 1, size):
            piece = Piece(index=self.index, token_ids=token_ids[begin : begin + size])
            piece.text, self._unsent = self._unsent, ""
            for token_id in piece.token_ids:
                first = self._text.first
                piece.text += self._text.push(token_id)
                if batch.logprobs:
                    own = entry(token_id, next(scored), self._tokenizer, first=first)
                    piece.logprobs.append(own)
            if finished is not None and begin == last:
                self._end(piece, finished)
            yield piece

    def _prompt_pieces(self, chunk: Logprobs) -> Iterator[Piece]:
        scored = scores(chunk)
        while part := list(itertools.islice(scored, MAX_LOGPROBS)):
            piece = Piece(index=self.index)
            for one, token_id in zip(part, self._unscored, strict=False):
                piece.prompt_logprobs.append(entry(token_id, one, self._tokenizer, first=False))
            yield piece

    def _end(self, piece: Piece, finished: Finished) -> None:
        match finished.reason:
            case "stop" | "length" as reason:
                piece.text += self._text.flush()
                piece.finish_reason = reason
                piece.stop_string = self._text.stop_string if reason == "stop" else ""
            case "abort":
                raise Unavailable("the worker ended the answer before it was complete")
            case _:
                raise EngineFailure(finished.error or "the engine ended the answer")


def _replay(
    text: Detokenizer, tokenizer: Tokenizer, sampling: SamplingParams, resumed: Resumed
) -> str:
    """Bring `text` to where the prior tokens end; what they show that the client lacks.

    An answer that ends with the last of them is for the engine to end.
    """
    ends = set(sampling.stop_token_ids)
    ends |= set() if sampling.ignore_eos else set(tokenizer.eos_token_ids)
    texts: list[str] = []
    ended = 0
    for count, token_id in enumerate(resumed.token_ids, start=1):
        if ended:
            raise InvalidRequest(
                "continuation.token_ids", f"go on after token {ended}, which ended the answer"
            )
        texts.append(text.push(token_id))
        if text.stopped or (token_id in ends and count > sampling.min_tokens):
            ended = count
    shown, delivered = "".join(texts).encode(), resumed.num_text_bytes_delivered
    if delivered > len(shown):
        raise InvalidRequest(
            "continuation.num_text_bytes_delivered",
            f"{delivered}; the tokens so far show {len(shown)} bytes",
        )
    try:
        return shown[delivered:].decode()
    except UnicodeDecodeError:
        raise InvalidRequest(
            "continuation.num_text_bytes_delivered", f"{delivered} lies within a character"
        ) from None


def total(usages: dict[int, RowUsage]) -> RowUsage:
    """What all choices cost, by their index; their prompt is one, and choice 0 met it first."""
    rows = [usages[index] for index in sorted(usages)]
    histograms = itertools.zip_longest(*(row.gamma_histogram for row in rows), fillvalue=0)
    return RowUsage(
        num_prompt_tokens=rows[0].num_prompt_tokens,
        num_completion_tokens=sum(row.num_completion_tokens for row in rows),
        num_cached_tokens=rows[0].num_cached_tokens,
        num_draft_tokens=sum(row.num_draft_tokens for row in rows),
        num_accepted_tokens=sum(row.num_accepted_tokens for row in rows),
        num_steps=sum(row.num_steps for row in rows),
        gamma_histogram=tuple(map(sum, histograms)),
        policy_version=rows[-1].policy_version,
        num_preemptions=sum(row.num_preemptions for row in rows),
        speculation_limit=next((r.speculation_limit for r in rows if r.speculation_limit), ""),
    )
