"""What `nightjar memory` and the flags of agent and worker say to a mistake: a sentence each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from processes import Command

from memory_agent.cli import shown
from memory_agent.config import AgentConfig
from nightjar.cli import main
from nightjar.config import parse
from nightjar.errors import ConfigError
from nightjar.v1 import memory_pb2, worker_pb2

BLOCKS = r"must be a share from 0 to 0.999 or a whole number of blocks from 1 to 1000000$"

THRESHOLDS = ("inf", "1e400", "1e30", "nan", "1.5", "0.9999", "-0.1", "-1", "1000001")


def agent_config(flag: str) -> AgentConfig:
    """What an agent makes of one flag."""
    return parse(AgentConfig, [flag], prog="agent", description="", environ={})


@pytest.mark.parametrize(
    ("flag", "values", "limit"),
    [
        ("--tau-low", THRESHOLDS, BLOCKS),
        ("--tau-high", THRESHOLDS, BLOCKS),
        ("--t-persist", ("0", "1001"), "must be 1 to 1000$"),
        ("--hold-s", ("inf", "nan", "-1", "3601"), "must be 0 to 3600$"),
        ("--backoff-s", ("inf", "nan", "0", "61"), "must be 0.01 to 60$"),
        ("--reload-share", ("inf", "nan", "0", "1e-9", "1.1"), "must be 0.01 to 1$"),
    ],
)
def test_values_that_make_no_sense_are_refused(
    flag: str, values: tuple[str, ...], limit: str
) -> None:
    """Each sentence names flag, value and bounds."""
    for value in values:
        with pytest.raises(ConfigError, match=f"^{flag}='{value}': {limit}"):
            agent_config(f"{flag}={value}")


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--tau-low", ("0", "0.999", "1", "1000000")),
        ("--tau-high", ("0", "0.999", "1", "1000000")),
        ("--t-persist", ("1", "1000")),
        ("--hold-s", ("0", "3600")),
        ("--backoff-s", ("0.01", "60")),
        ("--reload-share", ("0.01", "1")),
    ],
)
def test_bounds_themselves_are_allowed(flag: str, values: tuple[str, ...]) -> None:
    """The least and the greatest value of each range are taken as they are."""
    for value in values:
        config = agent_config(f"{flag}={value}")
        assert getattr(config, flag[2:].replace("-", "_")) == float(value)


def test_a_wrong_threshold_ends_the_command_before_it_listens(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Infinity is status 2 and one line."""
    assert main(["memory-agent", "--tau-low=inf"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("nightjar memory-agent: --tau-low='inf': must be ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["memory", "healthcheck"])
@pytest.mark.parametrize("address", ["", "nonsense", "http://127.0.0.1:1"])
def test_what_is_no_address_is_refused(
    address: str, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line of ours, status 2, and not a word of gRPC's own."""
    assert main([command, address]) == 2
    out, err = capfd.readouterr()
    assert (out, err) == (
        "",
        f"nightjar {command}: address {address!r}: must be HOST:PORT or unix:PATH\n",
    )


def test_a_map_that_is_missing_is_told() -> None:
    """Where a worker is attached but did not say who owns what, the lines say so."""
    words = "map      unknown: the worker did not say within 1 s"
    silent = memory_pb2.GetMemoryStatusResponse(agent_id="a", worker_id="w")
    assert words in shown(silent)
    silent.pool_map.ranges.add(num_blocks=3, owner=memory_pb2.BLOCK_OWNER_FREE)
    assert "unknown" not in shown(silent)
    assert "unknown" not in shown(memory_pb2.GetMemoryStatusResponse(agent_id="a"))


@pytest.mark.parametrize("command", ["memory-agent", "worker"])
@pytest.mark.parametrize("place", ["agent.mid_copy:boom", "agent.nowhere"])
def test_a_failpoint_that_is_none_is_refused(command: str, place: str) -> None:
    """Agent and worker end with status 2 and one line that names it, before they listen."""
    environ = {"NIGHTJAR_FAILPOINT": f"agent.mid_load:stop,{place}"}
    with Command("-m", "nightjar", command, environ=environ) as process:
        assert process.wait() == 2
        assert process.stdout == ""
        begin = f"nightjar {command}: NIGHTJAR_FAILPOINT: no place is called '{place}'; "
        assert process.stderr.startswith(begin)
        assert process.stderr.count("\n") == 1


@pytest.mark.parametrize("address", ["127.0.0.1:1", "unix:/nowhere/agent.sock"])
def test_silence_is_a_sentence(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Where nothing listens `nightjar memory` says so in one line, with status 1."""
    assert main(["memory", address]) == 1
    _, err = capfd.readouterr()
    assert err.startswith(f"nightjar memory: no memory agent answers at {address}; ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "what answers at ADDRESS is no memory agent (Method not found!)"),
        (grpc.StatusCode.UNAUTHENTICATED, "what answers at ADDRESS is no memory agent (why)"),
        (grpc.StatusCode.INTERNAL, "INTERNAL: why"),
    ],
)
def test_another_service_is_a_sentence(
    code: grpc.StatusCode | None, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is no memory agent, or fails, is told in one line, with status 1."""

    def refuse(request: bytes, context: grpc.ServicerContext) -> NoReturn:
        assert code is not None
        context.abort(code, "why")

    methods: dict[str, Any] = {"GetMemoryStatus": grpc.unary_unary_rpc_method_handler(refuse)}
    handlers = methods if code is not None else {}
    server = grpc.server(ThreadPoolExecutor(1))
    name = "nightjar.v1.MemoryService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert main(["memory", address]) == 1
        _, err = capfd.readouterr()  # before the server's end, of which gRPC logs
    finally:
        server.stop(0).wait()
    assert err == f"nightjar memory: {words.replace('ADDRESS', address)}\n"


def test_a_transition_that_is_done_says_where_the_draft_is() -> None:
    """The line of the event names the residency that was reached."""
    event = memory_pb2.MemoryEvent(
        kind=memory_pb2.MEMORY_EVENT_KIND_DONE,
        worker_id="w",
        state=worker_pb2.DRAFT_RESIDENCY_OFFLOADED,
    )
    status = memory_pb2.GetMemoryStatusResponse(agent_id="a", events=[event])
    assert shown(status).endswith(" w done: the draft is offloaded")


def test_a_worker_refuses_a_folder_that_is_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker without a folder for its pool ends with status 2 before it listens or loads."""
    file = tmp_path / "file"
    file.touch()
    for folder in (tmp_path / "missing", file):
        assert main(["worker", f"--shm-dir={folder}"]) == 2
        out, err = capfd.readouterr()
        assert (out, err) == ("", f"nightjar worker: --shm-dir='{folder}': is not a folder\n")
