"""The Rust gateway smg in front of a worker: its chats are what Nightjar's own gateway answers.

smg tokenizes, renders the chat and makes text; it gets the tokenizer from the worker.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

MODEL = os.environ["NIGHTJAR_MODEL"]
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name three birds."}],
    "max_completion_tokens": 24,
    "temperature": 0,
}
# Numbers that are the same in 32 bits, which that protocol has, and in 64.
SAMPLED = {
    "temperature": 0.5,
    "top_p": 0.75,
    "seed": 5,
    "n": 2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.25,
    "logprobs": True,
    "top_logprobs": 3,
}
START_TIMEOUT_S = 60


def post(base: str, route: str, body: dict) -> tuple[int, str]:
    """Status and body of an answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(base + route, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(body: str) -> list[dict]:
    """The events of a stream, without its last line."""
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for_answer(base: str, process: subprocess.Popen) -> dict:
    """The first whole answer, once smg knows the worker and its tokenizer."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, f"smg ended with {process.returncode}"
        try:
            status, body = post(base, "/v1/chat/completions", CHAT)
        except OSError as error:
            status, body = 0, str(error)
        if status == 200:
            return json.loads(body)
        assert time.monotonic() < deadline, f"no answer in time; the last one: {status} {body}"
        time.sleep(0.3)


def check(base: str, whole: dict) -> str:
    """Compare with Nightjar's gateway; returns what was seen."""
    text = whole["choices"][0]["message"]["content"]
    status, body = post(os.environ["NIGHTJAR_HTTP"], "/v1/chat/completions", CHAT)
    ours = json.loads(body)
    assert status == 200, body
    assert text == ours["choices"][0]["message"]["content"] != ""
    assert whole["usage"]["prompt_tokens"] == ours["usage"]["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == ours["usage"]["completion_tokens"] == 24
    assert whole["choices"][0]["finish_reason"] == "length"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(post(base, "/v1/chat/completions", {**CHAT, **options})[1])
    deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(deltas) == text
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 24, usage
    theirs, mine = (
        json.loads(post(at, "/v1/chat/completions", {**CHAT, **SAMPLED})[1])
        for at in (base, os.environ["NIGHTJAR_HTTP"])
    )
    assert len(theirs["choices"]) == 2
    for one, other in zip(theirs["choices"], mine["choices"], strict=True):
        assert one["message"]["content"] == other["message"]["content"]
        entries = zip(one["logprobs"]["content"], other["logprobs"]["content"], strict=True)
        for entry, same in entries:
            assert entry["bytes"] == same["bytes"]
            assert len(entry["top_logprobs"]) == len(same["top_logprobs"]) == 3
            assert abs(entry["logprob"] - same["logprob"]) < 1e-4
    plain = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    theirs, mine = (
        json.loads(post(at, "/v1/completions", plain)[1])["choices"][0]["text"]
        for at in (base, os.environ["NIGHTJAR_HTTP"])
    )
    assert theirs == mine
    stop = text[8:11]
    cut = json.loads(post(base, "/v1/chat/completions", {**CHAT, "stop": [stop]})[1])["choices"][0]
    assert cut["message"]["content"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"
    status, body = post(base, "/v1/chat/completions", {**CHAT, "max_completion_tokens": 10**6})
    assert 400 <= status < 500, (status, body)
    details = whole["usage"]["completion_tokens_details"]
    accepted, rejected = (
        details["accepted_prediction_tokens"],
        details["rejected_prediction_tokens"],
    )
    assert accepted + rejected > 0, details
    return (
        "chat whole, streamed, stopped, sampled with n, penalties and log-probabilities; "
        "completions; a refusal; answers and usage as "
        f"Nightjar's own gateway; {accepted} drafts accepted, {rejected} rejected"
    )


port, metrics = free_ports(2)
with tempfile.TemporaryDirectory() as folder:
    log = Path(folder) / "smg.log"
    command = [
        str(Path(sys.executable).parent / "smg"),
        "launch",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--prometheus-port={metrics}",
        "--worker-urls",
        f"grpc://{os.environ['NIGHTJAR_WORKER']}",
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder)
        try:
            at = f"http://127.0.0.1:{port}"
            seen = check(at, wait_for_answer(at, process))
        except BaseException:
            print(log.read_text()[-6000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
print(seen)
