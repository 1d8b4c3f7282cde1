"""aiperf: its own traffic against the chat route, streamed, and every request of it answered."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_REQUESTS, NUM_TOKENS = 12, 16
command = [
    str(Path(sys.executable).parent / "aiperf"),
    "profile",
    f"--model={os.environ['NIGHTJAR_MODEL']}",
    f"--url={os.environ['NIGHTJAR_HTTP']}",
    "--endpoint-type=chat",
    "--streaming",
    f"--tokenizer={os.environ['NIGHTJAR_MODEL_FOLDER']}",
    f"--request-count={NUM_REQUESTS}",
    "--concurrency=3",
    "--synthetic-input-tokens-mean=24",
    f"--output-tokens-mean={NUM_TOKENS}",
    "--extra-inputs=ignore_eos:true",
    "--random-seed=1",
    "--ui=none",
]
with tempfile.TemporaryDirectory() as folder:
    argv = [*command, f"--artifact-dir={folder}"]
    run = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=folder)
    found = list(Path(folder).rglob("profile_export_aiperf.json"))
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert found, run.stdout[-3000:] + run.stderr[-3000:]
    report = json.loads(found[0].read_text())
assert report["request_count"]["avg"] == NUM_REQUESTS, report["request_count"]
assert not report.get("error_summary"), report["error_summary"]
length = report["output_sequence_length"]["avg"]
assert abs(length - NUM_TOKENS) <= 1, length
print(
    f"{NUM_REQUESTS} streamed chats at 3 at once, "
    f"{report['output_token_throughput']['avg']:.0f} tokens/s, "
    f"first token after {report['time_to_first_token']['avg']:.0f} ms"
)
