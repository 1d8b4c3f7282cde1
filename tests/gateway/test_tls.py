"""TLS and mTLS at every door, with certificates made here and real sockets."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from certificates import Authority, openssl
from conditions import until
from fake_worker import FakeWorker, words
from processes import Command

from gateway.config import GatewayConfig
from gateway.main import Gateway
from nightjar import cli, healthcheck, rpc, tls, up
from nightjar.errors import ConfigError
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc

Make = Callable[..., Awaitable[Any]]
Files = dict[str, str]
REQUEST = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(max_tokens=4))
BODY = {"prompt": "hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Paths: an authority with a server and a client, a stranger's, and what is no use."""
    folder = tmp_path_factory.mktemp("tls")
    ours, theirs = Authority(folder / "ours"), Authority(folder / "theirs")
    paths = {"ca": ours.ca, "other_ca": theirs.ca}
    signed = (("server", ours), ("client", ours), ("stranger", theirs))
    for name, authority in signed:
        paths[f"{name}_cert"], paths[f"{name}_key"] = authority.sign(name)
    paths["broken"], paths["missing"] = folder / "broken.pem", folder / "none"
    paths["broken"].write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    paths["locked_key"] = folder / "locked.key"
    secret = ("-passout", "pass:secret", "-out", paths["locked_key"])
    openssl("pkcs8", "-topk8", "-in", paths["server_key"], *secret)
    return {name: str(path) for name, path in paths.items()}


def identity(files: Files) -> Files:
    """Flags of a server."""
    return {"tls_cert": files["server_cert"], "tls_key": files["server_key"]}


async def over_http(served: Any, files: Files, who: str = "", ca: str = "ca") -> str:
    """An answer over HTTPS, as whoever has a certificate of that name."""
    context = ssl.create_default_context(cafile=files[ca])
    if who:
        context.load_cert_chain(files[f"{who}_cert"], files[f"{who}_key"])
    url = f"https://{served.gateway.http_address}/v1/completions"
    async with httpx.AsyncClient(verify=context, timeout=20) as client:
        answer = await client.post(url, json=BODY)
        return str(answer.raise_for_status().json()["choices"][0]["text"])


async def over_grpc(address: str, files: Files, who: str = "", ca: str = "ca") -> str:
    """An answer over gRPC, as whoever has a certificate of that name; "" as `ca` is plain."""
    pair = (files[f"{who}_cert"], files[f"{who}_key"]) if who else ("", "")
    credentials = tls.client("--tls", files[ca], *pair) if ca else None
    async with rpc.dial(address, credentials) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(REQUEST)
        return "".join([response.text async for response in call])


async def refused(call: Awaitable[str]) -> None:
    """Assert that the handshake, not an answer, ends a call."""
    with pytest.raises((httpx.TransportError, grpc.aio.AioRpcError)) as error:
        await call
    if isinstance(error.value, grpc.aio.AioRpcError):
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_both_doors_speak_tls(worker: FakeWorker, make_gateway: Make, files: Files) -> None:
    """Who trusts the authority is answered; who trusts another, or speaks plainly, is not."""
    served = await make_gateway(worker, **identity(files))
    address = served.gateway.grpc_address
    assert await over_http(served, files) == await over_grpc(address, files) == words(4)
    await refused(over_http(served, files, ca="other_ca"))
    await refused(over_grpc(address, files, ca="other_ca"))
    await refused(over_grpc(address, files, ca=""))
    with pytest.raises(httpx.TransportError):
        await served.http.get("/health/live")


async def test_mtls_asks_for_a_certificate(
    worker: FakeWorker, make_gateway: Make, files: Files
) -> None:
    """With --tls-client-ca both doors let in certificates of that authority, and nobody else."""
    served = await make_gateway(worker, **identity(files), tls_client_ca=files["ca"])
    address = served.gateway.grpc_address
    assert await over_http(served, files, "client") == words(4)
    assert await over_grpc(address, files, "client") == words(4)
    for who in ("", "stranger"):
        await refused(over_http(served, files, who))
        await refused(over_grpc(address, files, who))


@pytest.mark.parametrize("asks", [False, True])
async def test_gateway_dials_workers_by_tls(
    make_worker: Make, make_gateway: Make, files: Files, asks: bool
) -> None:
    """It reaches workers that serve TLS, by mTLS with its own certificate, and trusts no other."""
    made = tls.server(files["server_cert"], files["server_key"], files["ca"] if asks else "")
    assert made is not None
    behind = await make_worker(credentials=made.grpc)
    shown = {"worker_tls_cert": files["client_cert"], "worker_tls_key": files["client_key"]}
    right = {"worker_tls_ca": files["ca"], **(shown if asks else {})}
    served = await make_gateway(behind, **right)
    answer = await served.http.post("/v1/completions", json=BODY)
    assert answer.json()["choices"][0]["text"] == words(4)
    wrong: list[Files] = [{}, {**right, "worker_tls_ca": files["other_ca"]}]
    wrong += [{"worker_tls_ca": files["ca"]}] if asks else []
    for flags in wrong:
        blind = await make_gateway(behind, ready=False, **flags)
        (found,) = blind.gateway.registry.workers.values()
        await until(lambda found=found: found.num_failures > 1, "probes have failed")
        assert found.not_ready == "does not answer"


async def test_gateway_process_and_its_commands(
    worker: FakeWorker, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags of `nightjar gateway` reach its sockets; healthcheck and chat come in by theirs."""
    assert cli.main(["keygen", "alice"]) == 0
    line, said = capsys.readouterr()
    key, keys = said.split()[-1], tmp_path / "api-keys"
    await asyncio.to_thread(keys.write_text, line)
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in identity(files).items()]
    flags += [f"--tls-client-ca={files['ca']}", f"--api-keys={keys}"]
    flags += ["--grpc-listen=127.0.0.1:0", "--http-listen=0.0.0.0:0", f"--workers={worker.address}"]
    with Command("-m", "nightjar", "gateway", *flags) as gateway:
        await asyncio.to_thread(gateway.shows, "worker ready")
        address = gateway.stdout.split()[3]
        shows = [f"--tls-cert={files['client_cert']}", f"--tls-key={files['client_key']}"]
        trusts = f"--tls-ca={files['ca']}"
        check = ["--wait=5", address, trusts, *shows]
        assert await asyncio.to_thread(healthcheck.main, check) == 0
        assert await asyncio.to_thread(healthcheck.main, [address, trusts]) == 1
        ask = ["-m", "nightjar", "chat", f"--gateway={address}", "--prompt=hello", "--max-tokens=4"]
        for given, status, says in ((key, 0, words(4)), ("wrong", 1, "UNAUTHENTICATED")):
            with Command(*ask, trusts, *shows, environ={"NIGHTJAR_API_KEY": given}) as chat:
                assert await asyncio.to_thread(chat.wait) == status
                assert says in chat.stdout + chat.stderr
        gateway.signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.wait) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"tls_cert": "server_cert"}, "--tls-cert={}: needs --tls-key as well"),
        ({"tls_key": "server_key"}, "--tls-key={}: needs --tls-cert as well"),
        ({"tls_client_ca": "ca"}, "--tls-client-ca={}: needs --tls-cert and --tls-key as well"),
        (
            {"tls_cert": "server_cert", "tls_key": "client_key"},
            "--tls-cert={}, --tls-key={}: key values mismatch",
        ),
        (
            {"tls_cert": "server_cert", "tls_key": "locked_key"},
            "--tls-cert={}, --tls-key={}: ",
        ),
        (
            {"tls_cert": "server_key", "tls_key": "server_key"},
            "--tls-cert={}: holds no certificate in PEM form",
        ),
        (
            {"tls_cert": "server_cert", "tls_key": "server_cert"},
            "--tls-key={}: holds no private key in PEM form",
        ),
        (
            {"tls_cert": "server_cert", "tls_key": "server_key", "tls_client_ca": "broken"},
            "--tls-client-ca={}: ",
        ),
        ({"worker_tls_ca": "missing"}, "--worker-tls-ca={}: No such file or directory"),
        (
            {"worker_tls_cert": "client_cert", "worker_tls_key": "client_key"},
            "--worker-tls-cert={}: needs --worker-tls-ca as well",
        ),
        (
            {"worker_tls_ca": "ca", "worker_tls_key": "client_key"},
            "--worker-tls-key={}: needs --worker-tls-cert as well",
        ),
    ],
)
async def test_wrong_files_are_refused(files: Files, flags: Files, says: str) -> None:
    """The sentence names flag, path and reason; nothing is bound."""
    paths = {flag: files[name] for flag, name in flags.items()}
    values: dict[str, Any] = {"workers": ("127.0.0.1:1",), **paths}
    with pytest.raises(ConfigError) as refusal:
        Gateway(GatewayConfig(http_listen="127.0.0.1:0", **values))
    named = [repr(path) for flag, path in paths.items() if f"--{flag.replace('_', '-')}=" in says]
    assert str(refusal.value).startswith(says.format(*named))


@pytest.mark.parametrize(
    ("flags", "environ"),
    [(["--", "--tls-cert=x"], {}), ([], {"NIGHTJAR_TLS_CERT": "x"})],
)
def test_up_refuses_tls(flags: list[str], environ: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nightjar up` says at once that it knows no TLS, where it would wait for ever."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="knows no TLS"):
        up.main(flags)
