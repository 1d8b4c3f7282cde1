"""TLS of a worker, by the same three flags as the gateway's."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import fake_engine
import grpc
import pytest
from certificates import Authority
from conditions import until

from nightjar import rpc, tls
from nightjar.errors import ConfigError
from nightjar.v1 import worker_pb2, worker_pb2_grpc
from worker import main
from worker.config import WorkerConfig


async def status_code(address: str, ca: Path | None, cert: Any = "", key: Any = "") -> Any:
    """The code with which a worker answers who asks for its status."""
    credentials = tls.client("--tls", str(ca), str(cert), str(key)) if ca else None
    async with rpc.dial(address, credentials) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            await stub.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest())
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_worker_lets_in_its_authoritys_clients_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind mTLS nobody drains a worker, or asks it anything, without a certificate."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    cert, key = map(str, ours.sign("worker"))
    config = WorkerConfig(tls_cert=cert, tls_key=key, tls_client_ca=str(ours.ca))
    engine = [sys.executable, fake_engine.__file__, f"--log={tmp_path}/log", "--start-s=60"]
    task = asyncio.create_task(main.serve(config, engine))
    said: list[str] = []

    def listens() -> bool:
        said.extend(capsys.readouterr().out.split())
        return "listening" in said

    try:
        await until(listens, "the worker serves", task)
        address = said[said.index("listening") + 2]
        known, stranger = ours.sign("gateway"), theirs.sign("gateway")
        assert await status_code(address, ours.ca, *known) is grpc.StatusCode.OK
        for refused in ((ours.ca,), (ours.ca, *stranger), (theirs.ca, *known), (None,)):
            assert await status_code(address, *refused) is grpc.StatusCode.UNAVAILABLE
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_wrong_file_stops_a_worker_before_its_engine_starts() -> None:
    """The sentence names the flag; the command of the engine, which is none, is never run."""
    config = WorkerConfig(tls_cert="/nowhere.pem", tls_key="/nowhere.key")
    with pytest.raises(ConfigError, match=r"--tls-cert='/nowhere.pem': No such file"):
        await main.serve(config, ["/no/such/engine"])
