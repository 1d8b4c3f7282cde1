"""`nightjar <command>`: a table from names to entry points, imported only when used.

The table holds strings so that the planner and the gateway never load torch; it is the one
deliberate exception to the import contracts.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from nightjar import __version__
from nightjar.errors import ConfigError, NightjarError

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("nightjar.up:main", "start the whole system here; Ctrl-C stops it"),
    "chat": ("nightjar.chat:main", "send prompts to a running system"),
    "policy": ("planner_service.cli:main", "list, activate, roll back and inspect policies"),
    "simulate": ("planner_service.simulate.cli:main", "compare policies on a simulated worker"),
    "bench": ("nightjar.bench:main", "load a server (`serve`), or teach its planner (`calibrate`)"),
    "keygen": ("gateway.keys:main", "make an API key, and its line for the gateway's file"),
    "healthcheck": ("nightjar.healthcheck:main", "exit 0 if a service is ready"),
    "compile": ("worker.compile_cli:main", "build and cache the compiled forward of a model"),
    "planner": ("planner_service.main:main", "run the planner service"),
    "worker": ("worker.main:main", "run a worker: front and engine"),
    "memory": ("memory_agent.cli:main", "show what a memory agent knows of its worker's pool"),
    "memory-agent": ("memory_agent.main:main", "run the memory agent of one GPU or CPU pool"),
    "gateway": ("gateway.main:main", "run the gateway: gRPC and OpenAI-compatible HTTP"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name == "--version":
        print(f"nightjar {__version__}")
        return 0
    try:
        status = dispatch("nightjar", "command", COMMANDS, arguments)
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


def dispatch(
    program: str, word: str, entries: Mapping[str, tuple[str, str]], arguments: Sequence[str]
) -> int:
    """Run the entry that the first argument names; returns its exit status.

    Args:
        program: What was typed up to here, for usage and errors.
        word: What an entry is called.
        entries: Entry point, as "module:function", and summary by name.
        arguments: The name, and what goes to the entry.
    """
    rows = "\n".join(f"  {name:<13} {text}" for name, (_, text) in entries.items())
    asks = f"{program} {word.upper()}"
    usage = f"usage: {asks} [flags]\n\n{rows}\n\n`{asks} --help` explains a {word}."
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in entries:
        print(f"{program}: unknown {word} {name!r}\n\n{usage}", file=sys.stderr)
        return 2
    module, _, function = entries[name][0].partition(":")
    run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    return run(rest)
