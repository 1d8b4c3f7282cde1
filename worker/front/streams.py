"""Tokens of one request on their way from the engine to the client that reads them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from nightjar.errors import NightjarError, Overloaded
from worker.front.admission import Place
from worker.messages import Finished, Logprobs

# What a client that stops reading may cost here: its own share always, and up to the most of a
# stream while all streams together stay below their bound.
UNREAD_SHARE_BYTES = 64 * 1024  # 16,384 tokens
MAX_UNREAD_BYTES = 1024 * 1024
MAX_ALL_UNREAD_BYTES = 256 * 1024 * 1024
# What is taken counts no longer, and takes many times the room: so much at once, about.
MAX_TAKEN_TOKENS = 1024


class Unread:
    """Bytes that wait for their readers, over all streams."""

    def __init__(self) -> None:
        self.num_bytes = 0


class Batch(NamedTuple):
    """What has come since the reader took the last one, or the oldest part of it."""

    token_ids: list[int]
    logprobs: list[Logprobs]  # of token_ids, in order, where the request asks
    prompt_logprobs: list[Logprobs]
    finished: Finished | None

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return not (self.token_ids or self.prompt_logprobs or self.finished)


class TokenStream:
    """A bounded buffer with one writer, the engine client, and one reader, the call.

    A slow reader delays its own stream alone: the writer never waits, and a buffer that runs
    full ends the stream with an error. Streams of one call may share `wake`.
    """

    def __init__(
        self,
        request_id: int,
        on_close: Callable[[TokenStream], None],
        *,
        place: Place | None = None,
        wake: asyncio.Event | None = None,
        unread: Unread | None = None,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self.request_id = request_id
        self._on_close = on_close
        self.started = False  # a token has arrived
        self._place = place
        self._all_unread = Unread() if unread is None else unread
        self._max_unread_bytes = max_unread_bytes
        self._num_bytes = 0
        self._token_ids = array("i")
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[Logprobs] = []
        self._finished: Finished | None = None
        self._error: NightjarError | None = None
        self._wake = asyncio.Event() if wake is None else wake

    @property
    def ended(self) -> bool:
        """Whether nothing more will be written."""
        return self._finished is not None or self._error is not None

    def push(self, token_ids: memoryview, logprobs: Logprobs | None = None) -> bool:
        """Add tokens (int32, native order) without waking the reader; False if that ended it."""
        if self.ended:
            return False
        if not self.started:
            self.started = True
            if self._place is not None:
                self._place.started()
        self._token_ids.frombytes(token_ids)
        num_bytes = token_ids.nbytes
        if logprobs is not None:
            self._logprobs.append(logprobs)
            num_bytes += _num_bytes(logprobs)
        return self._grown(num_bytes)

    def push_prompt(self, logprobs: Logprobs) -> bool:
        """Add a chunk's log-probabilities of the prompt; False if that ended the stream."""
        if self.ended:
            return False
        self._prompt_logprobs.append(logprobs)
        # Their number is bounded by the request's; they must not end it before its first token.
        self._max_unread_bytes += _num_bytes(logprobs)
        return self._grown(_num_bytes(logprobs))

    def wake(self) -> None:
        """Let the reader have what was pushed."""
        self._wake.set()

    def finish(self, finished: Finished) -> None:
        """End the stream; the reader still gets what is unread."""
        if not self.ended:
            self._finished = finished
            if self._place is not None:
                self._place.complete()
        self._wake.set()

    def fail(self, error: NightjarError) -> None:
        """End the stream with an error; what is unread is dropped."""
        if not self.ended:
            self._error = error
            self._clear()
        if self._place is not None:
            self._place.complete(given_up=True)
        self._wake.set()

    def close(self) -> None:
        """The reader leaves: a request that still runs is aborted. May be called again."""
        self._clear()
        self._on_close(self)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def read(self) -> Batch:
        """Wait for the writer's call of `wake`; returns what has come.

        Raises:
            NightjarError: The stream failed.
        """
        await self._wake.wait()
        self._wake.clear()
        return self.take()

    def take(self) -> Batch:
        """What has come, and the end once it is reached; of much, the oldest part.

        What is left wakes the reader again.

        Raises:
            NightjarError: The stream failed.
        """
        if self._error is not None:
            raise self._error
        if len(self._token_ids) > MAX_TAKEN_TOKENS:
            return self._take_part()
        batch = Batch(
            self._token_ids.tolist(), self._logprobs, self._prompt_logprobs, self._finished
        )
        self._clear()
        return batch

    def _take_part(self) -> Batch:
        num_tokens, num_chunks = MAX_TAKEN_TOKENS, 0
        if self._logprobs:  # chunks stay whole, and with their tokens
            num_tokens = 0
            while num_tokens < MAX_TAKEN_TOKENS:
                num_tokens += len(self._logprobs[num_chunks].chosen) // 4
                num_chunks += 1
        token_ids, rest = self._token_ids[:num_tokens], self._token_ids[num_tokens:]
        logprobs, prompt_logprobs = self._logprobs[:num_chunks], self._prompt_logprobs
        self._token_ids, self._logprobs = rest, self._logprobs[num_chunks:]
        self._prompt_logprobs = []
        num_bytes = 4 * num_tokens + sum(map(_num_bytes, (*logprobs, *prompt_logprobs)))
        self._num_bytes -= num_bytes
        self._all_unread.num_bytes -= num_bytes
        if rest:
            self._wake.set()
        return Batch(
            token_ids.tolist(), logprobs, prompt_logprobs, None if rest else self._finished
        )

    def _grown(self, num_bytes: int) -> bool:
        self._num_bytes += num_bytes
        self._all_unread.num_bytes += num_bytes
        all_full = self._all_unread.num_bytes > MAX_ALL_UNREAD_BYTES
        most = UNREAD_SHARE_BYTES if all_full else self._max_unread_bytes
        if self._num_bytes <= min(most, self._max_unread_bytes):
            return True
        self.fail(
            Overloaded(
                f"the answer was ended: {self._num_bytes} bytes of it were left unread; "
                f"at most {most} are kept for a slow reader",
                retry_after_s=1.0,
            )
        )
        return False

    def _clear(self) -> None:
        self._all_unread.num_bytes -= self._num_bytes
        self._num_bytes = 0
        self._token_ids = array("i")
        self._logprobs, self._prompt_logprobs = [], []


def _num_bytes(logprobs: Logprobs) -> int:
    return len(logprobs.chosen) + len(logprobs.top_ids) + len(logprobs.top)
