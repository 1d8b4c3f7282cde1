"""Asks a running Nightjar one question, on the generated stubs alone: client.py ADDRESS TEXT."""

import sys

import grpc

from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc as rpc

address, text = sys.argv[1:]
chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=text)])
sampling = pb.SamplingParams(temperature=0, max_tokens=64)
request = pb.GenerateRequest(chat=chat, sampling=sampling)
with grpc.insecure_channel(address) as channel:
    for response in rpc.GenerationServiceStub(channel).Generate(request):
        print(response.text, end="", flush=True)
usage = response.usage
print(f"\n{usage.num_accepted_tokens} of {usage.num_draft_tokens} drafts accepted")
