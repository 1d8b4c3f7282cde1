"""`nightjar <command>`: a table from names to entry points, imported only when used.

The table holds strings so that the planner and the gateway never load torch; it is the one
deliberate exception to the import contracts.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from nightjar import __version__
from nightjar.errors import ConfigError, NightjarError

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("nightjar.up:main", "start the whole system here; Ctrl-C stops it"),
    "chat": ("nightjar.chat:main", "send prompts to a running system"),
    "policy": ("planner_service.cli:main", "list, activate, roll back and inspect policies"),
    "simulate": ("planner_service.simulate.cli:main", "compare policies on a simulated worker"),
    "bench": ("nightjar.bench:main", "measure this machine; `calibrate` teaches its planner"),
    "healthcheck": ("nightjar.healthcheck:main", "exit 0 if a service is ready"),
    "compile": ("worker.compile_cli:main", "build and cache the compiled forward of a model"),
    "planner": ("planner_service.main:main", "run the planner service"),
    "worker": ("worker.main:main", "run a worker: front and engine"),
    "memory-agent": ("memory_agent.main:main", "run the memory agent of one GPU or CPU pool"),
    "gateway": ("gateway.main:main", "run the gateway: gRPC and OpenAI-compatible HTTP"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"nightjar {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"nightjar: unknown command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
        status = run(rest)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        print(f"nightjar {name}: {error}", file=sys.stderr)
        return 2
    except NightjarError as error:
        print(f"nightjar {name}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"nightjar {name}: needs {error.name}; pip install 'nightjar[all]' has every part",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _usage() -> str:
    rows = "\n".join(f"  {name:<13} {text}" for name, (_, text) in COMMANDS.items())
    end = "`nightjar COMMAND --help` explains a command."
    return f"usage: nightjar COMMAND [flags]\n\n{rows}\n\n{end}"
