"""What clients see of the running system: OpenAI, gRPC by reflection, our own example."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from processes import Command
from whole_system import System

ROOT = Path(__file__).parents[2]


@pytest.fixture
def client(system: System) -> openai.OpenAI:
    """The official client against this system."""
    return openai.OpenAI(base_url=f"http://{system.addresses['gateway_http']}/v1", api_key="any")


def test_openai_client_gets_the_same_answer_streamed_and_not(client: openai.OpenAI) -> None:
    """A chat's pieces join to the whole answer, and usage counts every token."""
    messages = [{"role": "user", "content": "hello"}]
    common = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**common)  # type: ignore[call-overload]
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(**common, stream=True, stream_options=options)  # type: ignore[call-overload]
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert [model.id for model in client.models.list().data] == ["tiny"]


def test_gateway_and_worker_answer_bad_input_alike(client: openai.OpenAI) -> None:
    """A temperature out of range is refused with a sentence that names the field."""
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=1e9)


def test_reflection_is_enough_to_generate(system: System) -> None:
    """A gRPC tool that knows no proto file calls Generate, and speculation never shows."""
    buf = str(Path(sys.executable).parent / "buf")
    url = f"http://{system.addresses['gateway_grpc']}/nightjar.v1.GenerationService/Generate"
    body = {"text": "abc", "sampling": {"maxTokens": 12, "temperature": 0, "ignoreEos": True}}
    texts = []
    for speculation in ({}, {"maxGamma": 0}):
        data = json.dumps({**body, "speculation": speculation})
        argv = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", data, url]
        out = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
        parts = json.loads("[" + out.replace("}\n{", "},{") + "]")
        assert parts[-1]["usage"]["numCompletionTokens"] == 12
        assert ("numDraftTokens" in parts[-1]["usage"]) <= (speculation == {})
        texts.append("".join(part.get("text", "") for part in parts))
    assert texts[0] == texts[1]


def test_the_example_client_runs(system: System) -> None:
    """examples/client.py needs the stubs alone, stays short, and shows an answer."""
    example = ROOT / "examples" / "client.py"
    assert len(example.read_text().splitlines()) <= 20
    with Command(str(example), system.addresses["gateway_grpc"], "hello") as command:
        assert command.wait() == 0, command.stderr
    assert "drafts accepted" in command.stdout


def test_chat_finds_the_system_and_shows_statistics(system: System) -> None:
    """One question on the command line: the answer, then one line on what speculation did."""
    answer = system.nightjar("chat", "--prompt", "hello", "--max-tokens", "8")
    assert "acceptance" in answer.splitlines()[-1]
    assert "policy" in answer.splitlines()[-1]
    assert system.nightjar("healthcheck", system.addresses["gateway_grpc"]) == ""
