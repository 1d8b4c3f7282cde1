"""A `nightjar worker` under streaming clients, and what an open planner stream costs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

START_S = 600


@contextmanager
def service(
    name: str, flags: Sequence[str], environ: Mapping[str, str], module: str = "nightjar"
) -> Iterator[str]:
    """Run `nightjar NAME` until the end of the block; gives its address once it is healthy."""
    command = [sys.executable, "-m", module, name, "--listen=127.0.0.1:0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(environ))
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise SystemExit(f"nightjar {name} ended with status {process.wait()}")
        address = line.removeprefix("listening on ").strip()
        check = [sys.executable, "-m", "nightjar", "healthcheck", f"--wait={START_S}", address]
        if subprocess.run(check, env=dict(environ), check=False).returncode:
            raise SystemExit(f"nightjar {name} was not healthy within {START_S} s")
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def rate(
    address: str,
    environ: Mapping[str, str],
    *,
    num_clients: int,
    num_processes: int,
    seed: int,
    **job: Any,
) -> dict[str, float]:
    """Tokens a second that all clients together get, from the first request to the last token.

    Runs of other seeds share no prompt, so that none finds its own in the prefix cache.
    """
    sizes = [num_clients // num_processes] * num_processes
    for index in range(num_clients % num_processes):
        sizes[index] += 1
    children: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        for index, size in enumerate(size for size in sizes if size):
            own = {**job, "address": address, "clients": size, "seed": 1000 * seed + index}
            child = subprocess.Popen(
                [sys.executable, "-m", "gpu.clients", json.dumps(own)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(environ),
            )
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline().strip() != "ready":
                raise SystemExit("a client could not connect")
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = []
        for child in children:
            assert child.stdout is not None
            line = child.stdout.readline()
            if not line:
                raise SystemExit("a client ended before its answers did")
            answers.append(json.loads(line))
    seconds = max(a["end"] for a in answers) - min(a["begin"] for a in answers)
    tokens = sum(a["tokens"] for a in answers)
    return {"tokens": tokens, "seconds": seconds, "tok_s": round(tokens / seconds, 1)}


def measure(
    flags: Sequence[str], environ: Mapping[str, str], *, repeats: int, planner: bool, **load: Any
) -> dict[str, Any]:
    """Rates without a planner and, if asked for, with one whose stream is open.

    Args:
        flags: Of the worker.
        environ: Of every process; must let Python find Nightjar and this benchmark.
        repeats: Runs of each; the better one counts.
        planner: Whether to run the second worker.
        load: What `rate` takes.
    """
    found: dict[str, Any] = {}
    with service("worker", flags, environ) as address:
        found["served"] = _repeat(address, environ, repeats, load)
    if planner:
        with (
            service("planner", ["--policy=off"], environ) as policy,
            service("worker", [*flags, f"--planner={policy}"], environ) as address,
        ):
            found["served, planner's stream open"] = _repeat(address, environ, repeats, load)
    return found


def _repeat(
    address: str, environ: Mapping[str, str], repeats: int, load: Mapping[str, Any]
) -> list[float]:
    rate(address, environ, seed=0, **{**load, "rounds": 1})  # warm up
    return [rate(address, environ, seed=1 + run, **load)["tok_s"] for run in range(repeats)]


def environment(*folders: str) -> dict[str, str]:
    """This process's environment with `folders` first on Python's path."""
    path = [*folders, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
