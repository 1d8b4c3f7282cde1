"""`nightjar chat`: talks to a running system over gRPC and shows what speculation did."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from nightjar import tls
from nightjar.config import at_least, option, parse
from nightjar.errors import NightjarError, Unavailable
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc as rpc

LENGTH_FIELDS = ("prompt", "sampling.max_tokens")


class ContextFull(NightjarError):
    """The conversation and the answer asked for do not fit the model's context."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Whom to ask, and how."""

    gateway: str = option("", "gRPC address; empty finds the `nightjar up` of this user")
    prompt: str = option("", "ask this and exit", check=bool, limit="some text")
    system: str = option("", "instructions placed before the conversation")
    max_tokens: int = at_least(1, 256, "most tokens of an answer")
    temperature: float = option(0.0, "0 is greedy; checked by the server")
    api_key: str = option(
        "",
        "key to send; better as NIGHTJAR_API_KEY, which others cannot see",
        check=lambda key: key.isascii() and key.isprintable(),
        limit="printable ASCII",
    )
    tls_ca: str = option("", "PEM file of who signed the gateway's certificate; empty: no TLS")
    tls_cert: str = option("", "PEM file of a certificate to show (mTLS)")
    tls_key: str = option("", "PEM file of its private key")
    run_dir: str = option("~/.cache/nightjar/run", "where `nightjar up` notes its addresses")


def find_gateway(run_dir: str) -> str:
    """The gateway's gRPC address that `nightjar up` noted.

    Raises:
        Unavailable: No system is noted there.
    """
    path = Path(run_dir).expanduser() / "addresses.json"
    try:
        return str(json.loads(path.read_text())["gateway_grpc"])
    except (OSError, ValueError, KeyError):
        raise Unavailable(
            f"no running system is noted in {path}: start one with `nightjar up`, or give --gateway"
        ) from None


def statistics(usage: pb.Usage, elapsed_s: float) -> str:
    """One line on what an answer cost: rate, acceptance, and the gammas its steps ran with."""
    accepted, drafted = usage.num_accepted_tokens, usage.num_draft_tokens
    drafts = sum(usage.gamma_histogram[1:])  # steps that verified a draft
    rate = f"{accepted / drafted:.0%}" if drafted else "none"
    length = f"{1 + accepted / drafts:.2f}" if drafts else "none"
    gammas = " ".join(f"{g}:{n}" for g, n in enumerate(usage.gamma_histogram) if n) or "none"
    return (
        f"[{usage.num_completion_tokens} tokens, {usage.num_completion_tokens / elapsed_s:.1f} "
        f"tokens/s, acceptance {rate} ({accepted} of {drafted}), mean accepted length {length}, "
        f"steps by gamma {gammas}, policy {usage.policy_version or 'none'}]"
    )


def ask(stub: rpc.GenerationServiceStub, messages: list[pb.ChatMessage], config: ChatConfig) -> str:
    """Stream one answer to standard output, then its statistics; returns the answer.

    Raises:
        NightjarError: The server refused, failed or is gone; says which in a sentence.
    """
    sampling = pb.SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens)
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages), sampling=sampling)
    began, text = time.monotonic(), ""
    metadata = (("authorization", f"Bearer {config.api_key}"),) if config.api_key else ()
    call = stub.Generate(request, metadata=metadata)
    try:
        for response in call:
            text += response.text
            print(response.text, end="", flush=True)
            if response.HasField("usage"):
                print(f"\n{statistics(response.usage, time.monotonic() - began)}", flush=True)
    except grpc.RpcError as error:
        text = f"{error.code().name}: {error.details()}"
        raise (ContextFull if _names_length(error) else NightjarError)(text) from None
    finally:
        call.cancel()
    return text


def _names_length(error: grpc.RpcError) -> bool:
    """Whether a request was refused because prompt and answer exceed the context."""
    status, refusal = rpc_status.from_call(error), error_details_pb2.BadRequest()
    details = status.details if status is not None else ()
    return any(
        detail.Unpack(refusal) and refusal.field_violations[0].field in LENGTH_FIELDS
        for detail in details
    )


def _ask_forgetting(
    stub: rpc.GenerationServiceStub, turn: list[pb.ChatMessage], config: ChatConfig
) -> str:
    """Ask; where the conversation fills the context, its oldest turns are taken out of `turn`."""
    first = 1 if config.system else 0
    while True:
        try:
            return ask(stub, turn, config)
        except ContextFull:
            if len(turn) < first + 3:
                raise
            del turn[first : first + 2]
            print("[the context is full: the oldest turn is forgotten]", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Ask once with --prompt; otherwise hold a conversation, kept until its end."""
    config = parse(ChatConfig, argv, prog="nightjar chat", description=str(__doc__))
    messages = [pb.ChatMessage(role="system", content=config.system)] if config.system else []
    credentials = tls.client("--tls", config.tls_ca, config.tls_cert, config.tls_key)
    with tls.open_channel(config.gateway or find_gateway(config.run_dir), credentials) as channel:
        stub = rpc.GenerationServiceStub(channel)
        if config.prompt:
            ask(stub, [*messages, _user(config.prompt)], config)
            return 0
        while (line := _read_line()) is not None:
            turn = [*messages, _user(line)]
            try:
                answer = _ask_forgetting(stub, turn, config)
            except NightjarError as error:
                print(f"\n{error}", file=sys.stderr)
            except KeyboardInterrupt:
                print("\n[stopped; this turn is forgotten]")
            else:
                messages = [*turn, pb.ChatMessage(role="assistant", content=answer)]
    return 0


def _user(text: str) -> pb.ChatMessage:
    """A user's message; bytes of the terminal that are no text become question marks."""
    return pb.ChatMessage(role="user", content=text.encode(errors="replace").decode())


def _read_line() -> str | None:
    """The next line that says something; None at the end of the input."""
    try:
        while not (line := input("> " if sys.stdin.isatty() else "").strip()):
            pass
    except (EOFError, KeyboardInterrupt):
        return None
    return line
