"""Runs the real supervisor over a table of small commands, for tests of the supervisor alone.

Usage: fake_children.py FOLDER [failing | stubborn | dying]. Each child writes its pid and its
arguments to FOLDER, and on SIGTERM adds its name to FOLDER/order.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from nightjar.supervisor import Child, Supervisor

BODY = """
import os, pathlib, signal, subprocess, sys, time
folder, name, kind = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def stop(*_):
    with (folder / "order").open("a") as order:
        order.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if kind == "stubborn" else stop)
if kind == "failing":
    sys.exit("no model here")
if kind == "dying":
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "parent":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
listen = [flag.split("=")[1] for flag in sys.argv[4:] if flag.startswith("--listen=")]
port = listen[0].rpartition(":")[2] if listen else "0"
address = "127.0.0.1:" + (port if port != "0" else str(os.getpid()))
starts = folder / f"{name}.starts"
with starts.open("a") as log:
    log.write(f"{os.getpid()} {' '.join(sys.argv[4:])}\\n")
print("a line of another kind")
print(f"listening on {address}")
while True:
    time.sleep(600)
"""


def child(folder: str, name: str, kind: str = "plain", **more: object) -> Child:
    """A child that listens under its own name."""
    argv = (sys.executable, "-c", BODY, folder, name, kind)
    return Child(name=name, argv=argv, listens={"": ("--listen", name)}, **more)  # type: ignore[arg-type]


def main() -> int:
    """Supervise until a signal."""
    folder, kind = sys.argv[1], (sys.argv[2:] or ["plain"])[0]
    children = [
        child(folder, "first", "parent"),
        child(
            folder, "second", kind, peers={"--first": ("first",)}, scratch=Path(folder, "scratch")
        ),
        child(folder, "third", peers={"--both": ("first", "second")}),
    ]
    supervisor = Supervisor(children, {"third": "127.0.0.1:7"}, stop_timeout_s=2)

    async def use() -> int:
        for address in supervisor.addresses.values():
            await address
        supervisor.ready = True
        print("ready", flush=True)
        await asyncio.Event().wait()
        return 0

    return asyncio.run(supervisor.run(use))


if __name__ == "__main__":
    sys.exit(main())
