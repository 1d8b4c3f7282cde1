"""`make interop`: public clients, unmodified, against a real `nightjar up`.

Each tool has a virtual environment of its own, made once from its file under requirements/.
After that nothing is fetched: while the checks run, every address but this machine's own lies
behind a proxy that does not exist. Each tool prints one line; one failure fails all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from worker.model.fetch import cache_folder, resolve_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOOLS = ("openai", "litellm", "aiperf", "buf", "smg", "schemathesis")
CHECKS = {
    "openai": "openai_client.py",
    "litellm": "litellm_client.py",
    "aiperf": "load_generator.py",
    "buf": "buf_curl.py",
    "smg": "smg_gateway.py",
    "schemathesis": "schemathesis_run.py",
}
MODEL = "smollm2-135m"
MAX_MODEL_LEN = 256  # an answer without a limit ends in seconds
INSTALL_TIMEOUT_S, START_TIMEOUT_S, CHECK_TIMEOUT_S = 1200, 900, 600
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing answers


class Failed(Exception):
    """A tool cannot be installed, or its check does not hold; a sentence for a person."""


def environment(tool: str, root: Path) -> Path:
    """The python of a tool's own virtual environment; made anew when its requirements change.

    Raises:
        Failed: It cannot be installed.
    """
    requirements = HERE / "requirements" / f"{tool}.txt"
    folder, python = root / tool, root / tool / "bin" / "python"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    stamp = folder / "installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing {tool} into {folder}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    for argv in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)],
    ):
        try:
            run = subprocess.run(
                argv, check=False, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"could not be installed in {INSTALL_TIMEOUT_S} s") from None
        if run.returncode != 0:
            lines = (run.stderr or run.stdout).strip().splitlines() or ["no reason given"]
            raise Failed(f"could not be installed: {lines[-1]}")
    stamp.write_text(wanted)
    return python


def version(tool: str) -> str:
    """The version that a tool's requirements pin."""
    package = {"buf": "buf-bin"}.get(tool, tool)
    for line in (HERE / "requirements" / f"{tool}.txt").read_text().splitlines():
        name, _, number = line.partition("==")
        if name.strip() == package:
            return number.strip()
    raise Failed(f"requirements/{tool}.txt does not pin {package}")


class System:
    """A `nightjar up` of our own, with its folders and free ports."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "nightjar.log"
        http, grpc = free_ports(2)
        argv = [sys.executable, "-m", "nightjar", "up", f"--model={MODEL}"]
        argv += [f"--http-listen=127.0.0.1:{http}", f"--grpc-listen=127.0.0.1:{grpc}"]
        argv += [f"--run-dir={folder / 'run'}"]
        argv += ["--", f"--served-model-name={MODEL}", f"--max-model-len={MAX_MODEL_LEN}"]
        # Variables are settings of whoever calls; only where models lie is theirs to say.
        self._environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("NIGHTJAR_") or name == "NIGHTJAR_CACHE_DIR"
        }
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                argv, stdout=out, stderr=out, cwd=ROOT, env=self._environ
            )

    def ready(self) -> dict[str, str]:
        """Wait until it serves; returns the variables that the checks read.

        Raises:
            Failed: It ended, or did not get ready in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while "ready: http" not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"`nightjar up` did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)
        self._draft_always()
        at = json.loads((self.folder / "run" / "addresses.json").read_text())
        model = resolve_model(
            MODEL,
            cache_folder(self._environ.get("NIGHTJAR_CACHE_DIR", "")),
            lambda *_: None,
            needs_weights=False,
        )
        return {
            "NIGHTJAR_HTTP": f"http://{at['gateway_http']}",
            "NIGHTJAR_GRPC": at["gateway_grpc"],
            "NIGHTJAR_WORKER": at["workers"][0],
            "NIGHTJAR_MODEL": MODEL,
            "NIGHTJAR_MODEL_FOLDER": str(model),
        }

    def _draft_always(self) -> None:
        """Fix gamma, so that every answer has drafts to count."""
        argv = [sys.executable, "-m", "nightjar", "policy", "activate", "fixed", "--param=gamma=3"]
        environ = {**self._environ, "NIGHTJAR_RUN_DIR": str(self.folder / "run")}
        run = subprocess.run(argv, check=False, capture_output=True, text=True, env=environ)
        if run.returncode != 0:
            raise Failed(f"`nightjar policy activate` failed: {run.stderr[-2000:]}")

    def faults(self) -> list[str]:
        """Lines of its log that no request may cause."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if "Traceback" in line or "[error" in line]

    def stop(self) -> None:
        """End it in order."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def check(tool: str, python: Path, variables: dict[str, str]) -> str:
    """Run a tool's check; returns its line.

    Raises:
        Failed: It does not hold.
    """
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    offline |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
    plain = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    try:
        run = subprocess.run(
            [str(python), str(HERE / "checks" / CHECKS[tool])],
            check=False,
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            env={**plain, **offline, **variables},
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"was not done in {CHECK_TIMEOUT_S} s") from None
    if run.returncode != 0:
        raise Failed(f"exit status {run.returncode}\n{(run.stdout + run.stderr)[-6000:]}")
    return run.stdout.strip().splitlines()[-1]


def guarded(tool: str, step: Callable[[], str], failures: list[str]) -> None:
    """Print the one line of a tool."""
    since = time.monotonic()
    try:
        line = f"ok      {tool} {version(tool)}: {step()} [{time.monotonic() - since:.0f} s]"
    except Failed as failure:
        failures.append(tool)
        line = f"FAILED  {tool}: {failure}"
    print(line, flush=True)


def main() -> int:
    """Check every tool, or those named; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--environments", type=Path, default=ROOT / ".interop")
    options = parser.parse_args()
    unknown = set(options.tools) - set(TOOLS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    failures: list[str] = []
    pythons: dict[str, Path] = {}
    for tool in options.tools or TOOLS:
        try:
            pythons[tool] = environment(tool, options.environments)
        except Failed as failure:
            failures.append(tool)
            print(f"FAILED  {tool}: {failure}", flush=True)
    with tempfile.TemporaryDirectory(prefix="nightjar-") as folder:
        system = System(Path(folder))
        try:
            variables = system.ready()
            for tool, python in pythons.items():
                guarded(tool, lambda t=tool, p=python: check(t, p, variables), failures)
            faults = system.faults()
        except Failed as failure:
            print(f"FAILED  {failure}", flush=True)
            return 1
        finally:
            system.stop()
    if faults:
        failures.append("log")
        print("FAILED  Nightjar's own log:\n" + "\n".join(faults[:20]), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
