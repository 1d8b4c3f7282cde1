"""What the front knows and asks of the engine: its start, its requests' streams, its progress."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from nightjar import errors, log
from nightjar.errors import EngineFailure, NightjarError, Overloaded, Unavailable
from worker.channel import MAX_UNSENT_BYTES
from worker.front.admission import Place
from worker.front.engine_process import EngineProcess
from worker.front.streams import MAX_UNREAD_BYTES, TokenStream, Unread
from worker.messages import (
    Abort,
    Progress,
    Ready,
    SamplingParams,
    Shutdown,
    StartFailed,
    Status,
    StepOutput,
    Submit,
    ToEngine,
    ToFront,
)

# With up to this many streams every step's tokens are sent at once: at 50 steps a second
# that is 400 messages, a few per cent of a core. Above it, messages are joined.
FEW_STREAMS = 8


class EngineClient:
    """The only owner of the channel to the engine. All of it runs on the event loop."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stream_interval_ms: int,
        progress_timeout_s: float,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._process = EngineProcess(command, self._received)
        self._progress_timeout_s = progress_timeout_s
        self._interval_s = stream_interval_ms / 1000
        self._max_unread_bytes = max_unread_bytes
        self._unread = Unread()
        self._ids = itertools.count(1)
        self._streams: dict[int, TokenStream] = {}
        self._unwoken: list[TokenStream] = []
        self._timer: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._started: asyncio.Future[Ready] = loop.create_future()
        self._heard_at = time.monotonic()
        self._stopping = False
        self._refused = False  # it said that it cannot serve, and ends by itself
        self.ready: Ready | None = None
        self.status: Status | None = None

    # ---- life ----

    async def start(self) -> Ready:
        """Spawn the engine and wait until it serves.

        Raises:
            NightjarError: It cannot serve; the class that the engine named, with its sentence.
        """
        await self._process.spawn()
        self._process.gone.add_done_callback(lambda gone: self._lost(gone.result()))
        self.ready = await self._started
        return self.ready

    async def wait_gone(self) -> str:
        """Return a sentence once the engine's process has ended or hung up."""
        return await asyncio.shield(self._process.gone)

    async def stop(self, timeout_s: float) -> None:
        """Shut the engine down.

        It gets `timeout_s` to leave, also after it said that it cannot serve; one that does not
        listen, since it still loads or hangs, gets a signal instead.
        """
        leaves = self.responsive or self._refused
        self._stopping = True
        self.send(Shutdown())
        await self._process.end(timeout_s if leaves else 0.2)

    # ---- state ----

    @property
    def pid(self) -> int:
        """Process id of the engine, 0 before it is spawned."""
        return self._process.pid

    @property
    def progress_age_s(self) -> float:
        """Seconds since the engine last said anything; it speaks after steps and when idle."""
        return time.monotonic() - self._heard_at

    @property
    def serving(self) -> bool:
        """Whether the engine is ready and there."""
        hears = not self.gone and not self._process.hung_up
        return self.ready is not None and hears and not self._stopping

    @property
    def gone(self) -> bool:
        """Whether the engine's process has ended or hung up."""
        return self._process.gone.done()

    @property
    def responsive(self) -> bool:
        """Whether it serves and has spoken lately.

        While a step runs the engine cannot speak, so silence is judged by the longest step that
        is still healthy, `progress_timeout_s`, not by its idle heartbeat of 200 ms.
        """
        heard = self.status is not None and self.progress_age_s < self._progress_timeout_s
        return self.serving and heard

    @property
    def num_requests(self) -> int:
        """Requests handed to the engine whose end has not come back."""
        return len(self._streams)

    # ---- messages ----

    def on(self, kind: type, handler: Callable[[Any], None]) -> None:
        """Pass messages of that kind, otherwise dropped, to a handler that must not wait."""
        self._handlers[kind] = handler

    def send(self, message: ToEngine) -> None:
        """Hand a message to the engine; dropped if it is gone."""
        if self._process.channel is not None:
            self._process.channel.send(message)

    def submit(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        prior_token_ids: Sequence[int] = (),
        *,
        place: Place | None = None,
        wake: asyncio.Event | None = None,
    ) -> TokenStream:
        """Hand a request to the engine; the reader closes the stream.

        Args:
            prompt_token_ids: The prompt.
            sampling: How to go on.
            prior_token_ids: Tokens that the answer has already.
            place: Is told of the first token and of the end.
            wake: Is set when there is something to read; one of its own by default.

        Raises:
            Unavailable: The engine is not there.
            Overloaded: The engine has not taken what was sent before.
        """
        channel = self._process.channel
        if not self.serving or channel is None:
            raise Unavailable("the engine is not running")
        if channel.unsent_bytes > MAX_UNSENT_BYTES:
            raise Overloaded("the engine takes no requests at present", retry_after_s=1.0)
        stream = TokenStream(
            next(self._ids),
            self._close,
            place=place,
            wake=wake,
            unread=self._unread,
            max_unread_bytes=self._max_unread_bytes,
        )
        self._streams[stream.request_id] = stream
        channel.send(
            Submit(
                request_id=stream.request_id,
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
                prior_token_ids=list(prior_token_ids),
            )
        )
        return stream

    def _close(self, stream: TokenStream) -> None:
        if self._streams.pop(stream.request_id, None) is not None:
            self.send(Abort(request_id=stream.request_id))
            stream.fail(Unavailable("the request was cancelled"))

    def _received(self, message: ToFront) -> None:
        self._heard_at = time.monotonic()
        match message:
            case StepOutput():
                self._deliver(message)
            case Status():
                self.status = message
            case Progress():
                log.get().info(message.stage, detail=message.detail)
            case Ready() if not self._started.done():
                self._started.set_result(message)
            case StartFailed() if not self._started.done():
                self._refused = True
                self._started.set_exception(_error_named(message.kind, message.message))
            case _:
                handler = self._handlers.get(type(message))
                if handler is not None:
                    handler(message)

    def _deliver(self, output: StepOutput) -> None:
        token_ids, start = memoryview(output.token_ids), 0
        joined = len(self._streams) > FEW_STREAMS and self._interval_s > 0
        for chunk in output.prompt_logprobs:
            asked = self._streams.get(chunk.request_id)
            if asked is not None:
                if not asked.push_prompt(chunk):
                    asked.close()
                asked.wake()
        logprobs = {one.request_id: one for one in output.logprobs}
        for request_id, num_tokens in zip(output.request_ids, output.num_tokens, strict=True):
            end = start + 4 * num_tokens
            stream = self._streams.get(request_id)
            if stream is not None:
                wait = joined and stream.started
                if not stream.push(token_ids[start:end], logprobs.get(request_id)):
                    stream.close()
                elif wait:
                    self._unwoken.append(stream)
                else:
                    stream.wake()
            start = end
        for finished in output.finished:
            ended = self._streams.pop(finished.request_id, None)
            if ended is not None:
                ended.finish(finished)
        if self._unwoken and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_s, self._wake_all)

    def _wake_all(self) -> None:
        self._timer = None
        streams, self._unwoken = self._unwoken, []
        for stream in streams:
            stream.wake()

    def _lost(self, sentence: str) -> None:
        if not self._stopping and not self._refused:
            log.get().error("lost the engine", reason=sentence)
        if not self._started.done():
            self._started.set_exception(EngineFailure(f"{sentence} before it was ready"))
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineFailure(f"{sentence}; the answer is incomplete"))


def _error_named(kind: str, message: str) -> NightjarError:
    """The error class that the engine named; one it could not have meant is our fault."""
    cls = getattr(errors, kind, None)
    simple = (errors.ConfigError, errors.ModelRefused, errors.NotPossibleNow, errors.Unavailable)
    return cls(message) if cls in simple else EngineFailure(message)
