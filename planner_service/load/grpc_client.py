"""Load over `nightjar.v1.GenerationService`."""

from __future__ import annotations

import asyncio
import time

import grpc

from nightjar.errors import ConfigError
from nightjar.rpc import dial
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc
from planner_service.load.endpoint import Answer, RequestFailed, Wish
from planner_service.load.workload import Ask

CONNECT_S = 10.0


class GrpcEndpoint:
    """A gateway or a worker."""

    def __init__(
        self, address: str, *, api_key: str, credentials: grpc.ChannelCredentials | None
    ) -> None:
        self._address, self._credentials = address, credentials
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    async def open(self) -> str:
        """Connect; the server knows its model.

        Raises:
            ConfigError: Nobody answers there.
        """
        self._channel = dial(self._address, self._credentials)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        try:
            await asyncio.wait_for(self._channel.channel_ready(), CONNECT_S)
        except TimeoutError:
            await self._channel.close()
            raise ConfigError(f"--target: nobody answers gRPC at {self._address}") from None
        return ""

    async def ask(self, ask: Ask, wish: Wish, answer: Answer) -> None:
        """One Generate call."""
        call = self._stub.Generate(_request(ask, wish), metadata=self._metadata)
        usage: pb.Usage | None = None
        try:
            async for piece in call:
                if piece.token_ids:
                    answer.piece_times.append(time.perf_counter())
                if piece.HasField("usage"):
                    usage = piece.usage
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(f"{error.code().name}: {error.details()}") from None
        finally:
            call.cancel()
        if usage is None:
            raise RequestFailed("the stream ended without a usage")
        answer.num_tokens = usage.num_completion_tokens
        answer.num_prompt_tokens = usage.num_prompt_tokens
        answer.num_cached_tokens = usage.num_cached_tokens
        answer.num_drafts = usage.num_draft_tokens
        answer.num_accepted = usage.num_accepted_tokens
        answer.gamma_histogram = tuple(usage.gamma_histogram)
        answer.policy_version = usage.policy_version

    async def close(self) -> None:
        """Disconnect."""
        await self._channel.close()


def _request(ask: Ask, wish: Wish) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(
            temperature=wish.temperature,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            ignore_eos=wish.ignore_eos,
        )
    )
    if ask.is_chat:
        request.chat.messages.add(role="user", content=ask.text)
    else:
        request.text = ask.text
    if wish.max_gamma is not None:
        request.speculation.max_gamma = wish.max_gamma
    return request
