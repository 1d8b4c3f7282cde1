"""Clients of `GenerationService` in a process of their own: answers stream, tokens are counted.

They connect, say ready, and wait for a line; at the end they say how many tokens came and when.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from gpu.load import prompts
from nightjar.rpc import dial
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc


async def run(job: dict[str, Any]) -> dict[str, float]:
    """Each client asks its questions one after the other."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    asked = prompts(
        job["clients"] * job["rounds"], job["length"], vocab=job["vocab"], seed=job["seed"]
    )
    count = 0

    async def client(own: list[list[int]]) -> None:
        nonlocal count
        for ids in own:
            prompt = pb.TokenPrompt(token_ids=ids)
            request = pb.GenerateRequest(tokens=prompt, sampling=sampling)
            async for piece in stub.Generate(request):
                count += len(piece.token_ids)

    async with dial(job["address"]) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        begin = time.monotonic()
        await asyncio.gather(*(client(asked[i :: job["clients"]]) for i in range(job["clients"])))
        end = time.monotonic()
    assert count == len(asked) * job["max_tokens"], count
    return {"tokens": count, "begin": begin, "end": end}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.argv[1])))), flush=True)
