"""The servicer of `vllm.grpc.engine.VllmEngine`: translates, and calls what the worker serves by.

It is served where the package `smg-grpc-proto` is installed, beside `GenerationService`, by the
same validator, queue and engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from nightjar import __version__, validation
from nightjar.errors import Unavailable
from worker.config import WorkerConfig
from worker.front.answers import answer
from worker.front.state import WorkerState
from worker.model.fetch import cache_folder, resolve_model
from worker.server import request_of
from worker.vllm.request import translated
from worker.vllm.response import Messages
from worker.vllm.tokenizer_archive import TokenizerArchive

SERVICE = "vllm.grpc.engine.VllmEngine"
CHUNK_BYTES = 256 * 1024


def _not_served(sentence: str) -> Any:
    async def refuse(self: Any, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, sentence)

    return refuse


class VllmEngineServicer:
    """The calls of a public gateway; ids go in and out, text is the gateway's own matter."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._calls: dict[str, set[_Call]] = {}
        self._since = time.monotonic()
        self._last_request_at = 0.0  # seconds since the epoch

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Answer one request, streamed or not; `Messages` says what goes out."""
        self._last_request_at = time.time()
        state = self._state
        limits, tokenizer = state.limits()
        ours = translated(request)
        validation.validate(ours, limits)
        asked = request_of(ours)
        stops = frozenset(asked.sampling.stop_token_ids)
        ends = () if asked.sampling.ignore_eos else tokenizer.eos_token_ids
        messages = Messages(stream=request.stream, num_choices=asked.n, ends=stops.difference(ends))
        if asked.sampling.num_prompt_logprobs >= 0:
            prompt = asked.prompt
            token_ids = prompt if isinstance(prompt, list) else await state.encode(prompt, limits)
            asked = dataclasses.replace(asked, prompt=token_ids)
            messages.first_token_id = token_ids[0] if token_ids else None
        call = _Call()
        context.add_done_callback(lambda _: call.end())
        with self._named(request.request_id, call):
            try:
                async for piece in answer(state, asked, call.on_end):
                    for message in messages.take(piece):
                        yield message
            except Unavailable:
                if not call.aborted:
                    raise
                for message in messages.aborted():
                    yield message

    async def Abort(self, request: Any, context: Any) -> Any:
        """End the answers of these requests with the reason "abort"; unknown names are no error."""
        for name in request.request_ids:
            for call in list(self._calls.get(name, ())):
                call.abort()
        return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Whether a request that came now would be answered.

        Raises:
            Unavailable: The worker is starting: a gateway that were answered would go on and ask
                for facts that are not known yet.
        """
        self._state.limits()
        healthy = self._state.serving
        return pb.HealthCheckResponse(healthy=healthy, message="" if healthy else "not serving")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """The model's facts, once it is loaded."""
        limits, tokenizer = self._state.limits()
        folder, config = await asyncio.to_thread(_facts, self._state.config)
        return pb.GetModelInfoResponse(
            model_path=str(folder),
            tokenizer_path=str(folder),
            served_model_name=limits.model,
            is_generation=True,
            max_context_length=limits.max_model_len,
            max_req_input_len=limits.max_model_len - 1,
            vocab_size=limits.vocab_size,
            model_type=config.get("model_type") or "",
            architectures=config.get("architectures") or [],
            eos_token_ids=tokenizer.eos_token_ids,
            bos_token_id=_one_id(config.get("bos_token_id")),
            pad_token_id=_one_id(config.get("pad_token_id")),
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """The worker's facts, ready or not."""
        state, ready = self._state, self._state.engine.ready
        return pb.GetServerInfoResponse(
            server_type="nightjar",
            active_requests=state.admission.num_live,
            is_paused=state.admission.draining,
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=time.monotonic() - self._since,
            data_parallel_size=1,
            block_size=state.config.block_size,
            model_dtype="" if ready is None else ready.dtype,
            max_num_seqs=0 if ready is None else ready.max_batch_size,
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:
        """How full the worker is, as of the engine's last word."""
        state, status = self._state, self._state.engine.status
        answered = pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=1
        )
        load = answered.loads.add(num_total_reqs=state.engine.num_requests)
        if status is not None:
            used = status.num_total_blocks - status.num_free_blocks
            load.num_running_reqs = min(status.num_running, state.engine.num_requests)
            load.num_waiting_reqs = state.engine.num_requests - load.num_running_reqs
            load.num_used_tokens = used * state.config.block_size
            load.max_total_num_tokens = status.num_total_blocks * state.config.block_size
            load.token_usage = used / max(1, status.num_total_blocks)
        if state.engine.ready is not None:
            load.max_running_requests = state.engine.ready.max_batch_size
        return answered

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The tokenizer's files as the bytes of a zip archive, their digest with the last."""
        self._state.limits()  # before the model is there, so are its files not
        archive = await asyncio.to_thread(lambda: TokenizerArchive.of(_folder(self._state.config)))
        for start in range(0, len(archive.data), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            last = end >= len(archive.data)
            yield common_pb2.GetTokenizerChunk(
                data=archive.data[start:end], sha256=archive.sha256 if last else ""
            )

    Embed = _not_served("embeddings are not served: the model generates text")
    FlushCache = _not_served("the prefix cache is not flushed: a hit never changes an answer")
    StartProfile = _not_served("there is no profiler to start")
    StopProfile = _not_served("there is no profiler to stop")
    SubscribeKvEvents = _not_served("KV events are not published; GetLoads tells the load")

    @contextlib.contextmanager
    def _named(self, name: str, call: _Call) -> Iterator[None]:
        """Let `Abort` find a call while it runs; requests may share a name, or have none."""
        if not name:
            yield
            return
        calls = self._calls.setdefault(name, set())
        calls.add(call)
        try:
            yield
        finally:
            calls.discard(call)
            if not calls and self._calls.get(name) is calls:
                del self._calls[name]


class _Call:
    """A running call: what frees its place and its blocks, once it has ended or is aborted."""

    def __init__(self) -> None:
        self.aborted = False
        self._ended = False
        self._callbacks: list[Callable[[], None]] = []

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back at the end, at once if it has come."""
        if self._ended:
            callback()
        else:
            self._callbacks.append(callback)

    def end(self) -> None:
        """Whoever asked for the answer is gone, or has had it."""
        self._ended = True
        for callback in self._callbacks:
            callback()

    def abort(self) -> None:
        """Give the answer up; its reader is told."""
        self.aborted = True
        self.end()


def _folder(config: WorkerConfig) -> Path:
    """The model's folder, which is there once the engine is ready."""
    cache = cache_folder(config.cache_dir)
    return resolve_model(config.model, cache, lambda *_: None, needs_weights=False)


def _facts(config: WorkerConfig) -> tuple[Path, dict[str, Any]]:
    """The model's folder, and what its config.json says."""
    folder = _folder(config)
    return folder, json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _one_id(value: object) -> int:
    """A token id of a model's configuration, 0 where there is none: the protocol has no other."""
    return value if isinstance(value, int) and value >= 0 else 0


def add_to(server: grpc.aio.Server, state: WorkerState) -> None:
    """Serve it there."""
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(state), server)
