"""Promises of the project as a whole: stubs, imports, banned calls, compose, README."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("nightjar", "planner_service", "worker", "memory_agent", "gateway")


def sources() -> Iterator[Path]:
    """Every hand-written module that is shipped."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "nightjar/v1" not in path.as_posix():
                yield path


def test_stubs_are_current(tmp_path: Path) -> None:
    """Regenerating the stubs from proto/ changes nothing."""
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    kinds = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")
    outputs = [f"--{kind}={tmp_path}" for kind in kinds]
    argv = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *outputs]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([*argv, *map(str, protos)], check=True, env={**os.environ, "PATH": path})
    checked_in = ROOT / "nightjar" / "v1"
    made = {p.name: p.read_text() for p in (tmp_path / "nightjar" / "v1").iterdir()}
    kept = {p.name: p.read_text() for p in checked_in.glob("*_pb2*")}
    assert len(made) == 4 * len(protos)
    assert made == kept, "run `make proto`"


@pytest.mark.parametrize(
    "modules",
    [
        "nightjar.cli, nightjar.up, nightjar.chat, nightjar.healthcheck",
        "planner_service.main, planner_service.cli",
        "gateway.main",
    ],
)
def test_base_is_light(modules: str) -> None:
    """Command line, planner and gateway load no torch; only the planner loads numpy."""
    heavy = {"torch", "transformers", "matplotlib"}
    if "planner_service" not in modules:  # its policies solve small linear systems
        heavy.add("numpy")
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_nothing_runs_code_from_data() -> None:
    """No module unpickles, evaluates, loads with torch.load or trusts remote code."""
    modules = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}
    names = {"eval", "exec"}
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            bad = False
            if isinstance(node, ast.Import):
                bad = any(alias.name.split(".")[0] in modules for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                bad = (node.module or "").split(".")[0] in modules
            elif isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                remote = [k for k in node.keywords if k.arg == "trust_remote_code"]
                trusts = any(ast.unparse(keyword.value) != "False" for keyword in remote)
                bad = name in names or name == "torch.load" or trusts
            if bad:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not found


def test_compose_file_is_valid(tmp_path: Path) -> None:
    """Compose accepts the file; with a misspelt key it would not."""
    command = str(Path(sys.executable).parent / "docker-compose")
    good = ROOT / "docker-compose.yml"
    bad = tmp_path / "docker-compose.yml"
    bad.write_text(good.read_text().replace("depends_on:", "depend_on:", 1))
    for path, status in ((good, 0), (bad, 1)):
        argv = [command, "--project-directory", str(ROOT), "-f", str(path), "config", "-q"]
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
        assert bool(done.returncode) == bool(status), done.stderr


def test_compose_commands_are_understood() -> None:
    """Every service's flags in the compose file exist, and its command is one of ours."""
    command = str(Path(sys.executable).parent / "docker-compose")
    argv = [command, "-f", str(ROOT / "docker-compose.yml"), "config", "--format", "json"]
    services = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)["services"]
    ours = {name: service["command"] for name, service in services.items() if name != "redis"}
    assert sorted(ours) == ["gateway", "memory-agent", "planner", "worker"]
    from gateway.config import GatewayConfig
    from memory_agent.config import AgentConfig
    from nightjar.config import parse
    from planner_service.config import PlannerConfig
    from worker.config import WorkerConfig

    kinds: dict[str, type] = {
        "gateway": GatewayConfig,
        "memory-agent": AgentConfig,
        "planner": PlannerConfig,
        "worker": WorkerConfig,
    }
    for name, (verb, *flags) in ours.items():
        assert verb == name
        parse(kinds[name], flags, prog=name, description="", environ={})


def test_readme_names_what_exists() -> None:
    """Each make target, nightjar command and path that the README names is there."""
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z-]+)", text))
    assert {"run", "test", "serve"} <= named <= targets
    from nightjar.cli import COMMANDS

    commands = set(
        re.findall(r"\bnightjar ([a-z-]+)", "\n".join(re.findall(r"`[^`]*`|```.*?```", text, re.S)))
    )
    assert {"up", "chat", "policy"} <= commands <= set(COMMANDS)
    paths = re.findall(
        r"`((?:docs|examples|proto|worker|gateway|planner_service|memory_agent|nightjar|tests|benchmarks)/[\w./-]*)`",
        text,
    )
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_distribution_holds_the_draft_and_its_notices() -> None:
    """The patterns of package data cover the shipped draft; licence and notices are named."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["worker"]
    shipped = {path for pattern in patterns for path in (ROOT / "worker").glob(pattern)}
    drafts = {path for path in (ROOT / "worker" / "drafts").rglob("*") if path.is_file()}
    assert drafts
    assert drafts <= shipped
    assert all((ROOT / name).is_file() for name in project["project"]["license-files"])


@pytest.mark.parametrize("by_variable", [False, True], ids=["argument", "environment"])
def test_a_prompt_reaches_the_command_as_typed(tmp_path: Path, by_variable: bool) -> None:
    """`make run` hands PROMPT over unexpanded: dollars, quotes and backticks are text."""
    touched = tmp_path / "touched"
    prompt = f"""costs $5 or $HOME? $(shell touch {touched}) "q" `touch {touched}` it's"""
    command = tmp_path / "bin" / "nightjar"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\nprintf '%s' \"$2\"\n")
    command.chmod(0o755)
    (tmp_path / ".installed").touch()
    argv = ["make", "--silent", "run", f"VENV={tmp_path}"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    if by_variable:
        environ["PROMPT"] = prompt
    else:
        argv.append(f"PROMPT={prompt}")
    done = subprocess.run(argv, cwd=ROOT, env=environ, check=True, capture_output=True, text=True)
    assert done.stdout == f"--prompt={prompt}"
    assert not touched.exists()
