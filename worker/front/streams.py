"""Tokens of one request on their way from the engine to the client that reads them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from types import TracebackType

from nightjar.errors import NightjarError, Overloaded
from worker.messages import Finished

# Four bytes each: a client that stops reading costs at most 64 KB here.
MAX_UNREAD_TOKENS = 16_384


class TokenStream:
    """A bounded buffer with one writer, the engine client, and one reader, the call.

    A slow reader delays its own stream alone: the writer never waits, and a buffer that runs
    full ends the stream with an error.
    """

    def __init__(
        self,
        request_id: int,
        on_close: Callable[[TokenStream], None],
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
    ) -> None:
        self.request_id = request_id
        self._on_close = on_close
        self.started = False  # a token has arrived
        self._max_unread_tokens = max_unread_tokens
        self._unread = array("i")
        self._finished: Finished | None = None
        self._error: NightjarError | None = None
        self._wake = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether nothing more will be written."""
        return self._finished is not None or self._error is not None

    def push(self, token_ids: memoryview) -> bool:
        """Add tokens (int32, native order) without waking the reader; False if that ended it."""
        if self.ended:
            return False
        self.started = True
        self._unread.frombytes(token_ids)
        if len(self._unread) <= self._max_unread_tokens:
            return True
        self.fail(
            Overloaded(
                f"the answer was ended: {len(self._unread)} tokens were left unread; "
                f"at most {self._max_unread_tokens} are kept for a slow reader",
                retry_after_s=1.0,
            )
        )
        return False

    def wake(self) -> None:
        """Let the reader have what was pushed."""
        self._wake.set()

    def finish(self, finished: Finished) -> None:
        """End the stream; the reader still gets what is unread."""
        if not self.ended:
            self._finished = finished
        self._wake.set()

    def fail(self, error: NightjarError) -> None:
        """End the stream with an error; what is unread is dropped."""
        if not self.ended:
            self._error = error
            self._unread = array("i")
        self._wake.set()

    def close(self) -> None:
        """The reader leaves: a request that still runs is aborted. May be called again."""
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

    async def read(self) -> tuple[list[int], Finished | None]:
        """Wait for tokens or the end; returns the new token ids, and the end once it is reached.

        Raises:
            NightjarError: The stream failed.
        """
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        token_ids, self._unread = self._unread.tolist(), array("i")
        return token_ids, self._finished
