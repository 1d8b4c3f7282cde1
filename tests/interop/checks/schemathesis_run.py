"""schemathesis: requests made from the published document, and answers as it describes them."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_EXAMPLES, MAX_TIME_S = 25, 90
HOLDS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
command = [
    str(Path(sys.executable).parent / "schemathesis"),
    "run",
    os.environ["NIGHTJAR_HTTP"] + "/openapi.json",
    f"--checks={','.join(HOLDS)}",
    f"--max-examples={MAX_EXAMPLES}",
    f"--max-time={MAX_TIME_S}",
    "--phases=examples,coverage,fuzzing",
    "--workers=4",
    "--seed=1",
    "--request-timeout=120",
    "--generation-database=none",
    "--no-color",
]
with tempfile.TemporaryDirectory() as folder:
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
cases = re.search(r"(\d+) generated", run.stdout)
operations = re.search(r"Selected:\s*(\d+)/(\d+)\s+Tested:\s*(\d+)", run.stdout)
assert cases, run.stdout[-3000:]
assert operations, run.stdout[-3000:]
assert operations[1] == operations[2] == operations[3], operations[0]
print(
    f"{cases[1]} requests to {operations[1]} operations of /openapi.json: no server error, "
    "every status, type and body as described"
)
