"""Requests to a worker, and what comes back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from nightjar.v1 import generation_pb2 as pb


def asked(text: str = "abc", **sampling: object) -> pb.GenerateRequest:
    """A text request with sampling fields."""
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))  # type: ignore[arg-type]


def chat(content: str) -> pb.GenerateRequest:
    """A chat of one message."""
    messages = [pb.ChatMessage(role="user", content=content)]
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages))


async def answer(front: Any, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Every message of an answer."""
    return [piece async for piece in front.generation.Generate(request)]


async def refusal(front: Any, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """The error that a request ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(front, request)
    return caught.value


async def health(front: Any) -> int:
    """Health of the generation service."""
    stub = health_pb2_grpc.HealthStub(front.channel)
    request = health_pb2.HealthCheckRequest(service="nightjar.v1.GenerationService")
    return (await stub.Check(request)).status


def detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    """The rich detail of an error."""
    status = rpc_status.from_call(error)
    assert status is not None
    unpacked = kind()
    assert status.details[0].Unpack(unpacked)
    return unpacked
