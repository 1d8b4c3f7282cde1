"""`buf curl`, which knows no proto file: reflection, an answer, a refusal, at both doors."""

import json
import os
import subprocess
import sys
from pathlib import Path

BUF = str(Path(sys.executable).parent / "buf")
ANSWER = {"text": "Once upon a time", "sampling": {"temperature": 0, "maxTokens": 12}}


def curl(address: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """One call over HTTP/2 without TLS."""
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *argv]
    command[-1] = f"http://{address}{argv[-1]}"
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def messages(run: subprocess.CompletedProcess[str]) -> list[dict]:
    """Everything that a call answered."""
    assert run.returncode == 0, run.stderr
    decoder, text, found = json.JSONDecoder(), run.stdout.strip(), []
    while text:
        message, end = decoder.raw_decode(text)
        found.append(message)
        text = text[end:].lstrip()
    return found


gateway, worker = os.environ["NIGHTJAR_GRPC"], os.environ["NIGHTJAR_WORKER"]
texts = []
for door in (gateway, worker):
    listed = curl(door, "--list-methods", "").stdout.split()
    assert "nightjar.v1.GenerationService/Generate" in listed, listed
    method = "/nightjar.v1.GenerationService/Generate"
    pieces = messages(curl(door, "-d", json.dumps(ANSWER), method))
    assert pieces[-1]["usage"]["numCompletionTokens"] == 12, pieces[-1]
    texts.append("".join(piece.get("text", "") for piece in pieces))
    wrong = curl(door, "-d", '{"text": "a", "sampling": {"topP": 2}}', method)
    assert wrong.returncode != 0
    assert "sampling.top_p" in wrong.stderr, wrong.stderr
assert texts[0] == texts[1] != ""
assert "vllm.grpc.engine.VllmEngine/Generate" in curl(worker, "--list-methods", "").stdout.split()
request = {
    "text": ANSWER["text"],
    "samplingParams": {"temperature": 0, "maxTokens": 12},
    "stream": False,
}
engine = "/vllm.grpc.engine.VllmEngine/"
(complete,) = messages(curl(worker, "-d", json.dumps(request), engine + "Generate"))
assert len(complete["complete"]["outputIds"]) == 12, complete
(info,) = messages(curl(worker, "-d", "{}", engine + "GetModelInfo"))
assert info["servedModelName"] == os.environ["NIGHTJAR_MODEL"], info
print("reflection, answers and refusals at gateway and worker; VllmEngine at the worker")
