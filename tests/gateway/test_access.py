"""Who gets in at which door: keys, the table of rules, and where a gateway may listen."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from api_keys import KEY, OTHER, bearer, line, write_keys
from conditions import until
from fake_worker import FakeWorker, words
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from gateway import main as gateway_main
from gateway.access import GRPC_RULES, HTTP_RULES, NO_KEY, WRONG_KEY, Access, Rule
from gateway.config import GatewayConfig
from gateway.grpc_gate import GrpcGate
from gateway.http.gate import Gate
from gateway.main import Gateway
from nightjar import rpc
from nightjar.config import parse
from nightjar.errors import ConfigError
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import worker_pb2, worker_pb2_grpc

REQUEST = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(max_tokens=4))
Make = Callable[..., Awaitable[Any]]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with two keys."""
    return write_keys(tmp_path)


@pytest.fixture
async def locked(worker: FakeWorker, make_gateway: Make, keys: Path) -> Any:
    """A gateway that asks for keys."""
    return await make_gateway(worker, api_keys=str(keys))


async def grpc_code(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and sentence with which a call ends."""
    try:
        if hasattr(call, "read"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def test_openai_client_needs_a_right_key(locked: Any) -> None:
    """A right key is served; a wrong one is AuthenticationError in OpenAI's form, and no worker."""
    ask = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    for key in (KEY, OTHER):
        client = locked.openai.with_options(api_key=key)
        assert (await client.completions.create(**ask)).choices[0].text == words(4)
    assert [model.id async for model in client.models.list()] == ["tiny"]
    client = locked.openai.with_options(api_key="wrong")
    for call in (client.completions.create(**ask), client.models.retrieve("tiny")):
        with pytest.raises(openai.AuthenticationError) as refused:
            await call
        error: Any = refused.value
        assert (error.status_code, error.type) == (401, "invalid_request_error")
        assert (error.code, error.param) == ("invalid_api_key", None)
        assert error.body["message"] == WRONG_KEY
        challenge = error.response.headers["www-authenticate"]
        assert challenge == 'Bearer realm="nightjar", error="invalid_token"'


async def test_http_without_one_bearer_key_is_401(locked: Any) -> None:
    """No key, another scheme, a bare key, two keys: 401 for each route that is not health."""
    basic, bare = (("authorization", f"Basic {KEY}"),), (("authorization", KEY),)
    calls = [*HTTP_RULES, ("DELETE", "/v1/models"), ("GET", "/nowhere")]
    for headers in ((), basic, bare, bearer(KEY, KEY)):
        for method, path in calls:
            concrete = path.replace("{name:path}", "x")
            answer = await locked.http.request(method, concrete, headers=headers)
            if HTTP_RULES.get((method, path)) == "public":
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == 'Bearer realm="nightjar"'
            assert answer.json()["error"]["message"] == NO_KEY


async def test_grpc_needs_a_right_key(locked: Any) -> None:
    """The key is metadata of the call; without a right one it is UNAUTHENTICATED."""
    generate = locked.grpc.Generate
    assert await grpc_code(generate(REQUEST, metadata=bearer(KEY))) == (grpc.StatusCode.OK, "")
    missing = (grpc.StatusCode.UNAUTHENTICATED, NO_KEY)
    wrong = (grpc.StatusCode.UNAUTHENTICATED, WRONG_KEY)
    assert await grpc_code(generate(REQUEST)) == missing
    assert await grpc_code(generate(REQUEST, metadata=bearer("wrong"))) == wrong
    assert await grpc_code(generate(REQUEST, metadata=bearer(KEY, KEY))) == missing


async def test_health_needs_no_key_and_reflection_does(locked: Any) -> None:
    """Probes get in; who may not call may not learn what could be called either."""
    health = health_pb2_grpc.HealthStub(locked.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflect = reflection_pb2_grpc.ServerReflectionStub(locked.channel).ServerReflectionInfo
    asks = [reflection_pb2.ServerReflectionRequest(list_services="")]
    refused = await grpc_code(reflect(iter(asks)))
    assert refused == (grpc.StatusCode.UNAUTHENTICATED, NO_KEY)
    assert (await grpc_code(reflect(iter(asks), metadata=bearer(KEY))))[0] is grpc.StatusCode.OK


async def test_admin_calls_are_not_at_the_public_door(
    locked: Any, worker: FakeWorker, make_gateway: Make
) -> None:
    """Whatever the key, and with none to ask for, a drain, a policy or channelz is not served."""
    admin = [method for method, rule in GRPC_RULES.items() if rule == "admin"]
    assert "/nightjar.v1.WorkerService/Drain" in admin
    for served, metadata in ((locked, bearer(KEY)), (await make_gateway(worker), ())):
        for method in [*admin, "/nightjar.v1.Made/Up"]:
            call = served.channel.unary_unary(method)(b"", metadata=metadata)
            assert (await grpc_code(call))[0] is grpc.StatusCode.UNIMPLEMENTED, method
        drain = worker_pb2_grpc.WorkerServiceStub(served.channel).Drain
        code, _ = await grpc_code(drain(worker_pb2.DrainRequest(), metadata=metadata))
        assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_every_route_and_method_has_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table names what the doors serve, no less and no more: add a route, add its rule."""
    apps: list[Any] = []
    methods: set[str] = set()

    def add(self: Any, handlers: Iterable[Any]) -> None:
        for handler in handlers:
            methods.update(handler._method_handlers)
        original(self, handlers)

    def make(*arguments: Any) -> Starlette:
        apps.append(make_app(*arguments))
        return apps[-1]

    server = type(grpc.aio.server())
    make_app, original = gateway_main.make_app, server.add_generic_rpc_handlers
    monkeypatch.setattr(gateway_main, "make_app", make)
    monkeypatch.setattr(server, "add_generic_rpc_handlers", add)
    free = "127.0.0.1:0"
    gateway = Gateway(GatewayConfig(grpc_listen=free, http_listen=free, workers=("127.0.0.1:1",)))
    await gateway.stop()
    served = {
        (method, route.path) for route in apps[0].routes for method in route.methods - {"HEAD"}
    }
    assert served == set(HTTP_RULES)
    assert methods == {method for method, rule in GRPC_RULES.items() if rule != "admin"}


async def test_a_route_without_a_rule_is_never_reached() -> None:
    """Even where the router knows a route, what the table leaves out answers 404 or 405."""

    async def reached(_: Any) -> JSONResponse:
        return JSONResponse({})

    routes = [Route(path, reached, methods=["GET", "DELETE"]) for path in ("/listed", "/forgotten")]
    gate = Gate(Starlette(routes=routes), Access(None), {("GET", "/listed"): "key"})
    transport = httpx.ASGITransport(gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        found = [await client.get("/listed"), await client.delete("/listed")]
        found += [await client.get("/forgotten"), await client.head("/listed")]
    assert [answer.status_code for answer in found] == [200, 405, 404, 200]
    assert found[1].headers["allow"] == "GET, HEAD"


async def test_a_method_without_a_rule_is_never_reached() -> None:
    """Even where the server has a handler, what the table leaves out is UNIMPLEMENTED."""
    check = "/grpc.health.v1.Health/Check"
    left_out: dict[str, Rule] = {"/grpc.health.v1.Health/Watch": "public"}
    codes = []
    for rules in (GRPC_RULES, left_out):
        server = rpc.Server("127.0.0.1:0", [], gates=[GrpcGate(Access(None), rules)])
        await server.start()
        async with rpc.dial(server.address) as channel:
            codes.append((await grpc_code(channel.unary_unary(check)(b"")))[0])
        await server.stop(0)
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED]


async def test_running_gateway_reads_the_file_again(locked: Any, keys: Path) -> None:
    """A new key counts and a removed one no more, without a restart."""

    async def status(key: str) -> int:
        return int((await locked.http.get("/v1/models", headers=bearer(key))).status_code)

    assert (await status(KEY), await status("new")) == (200, 401)
    await asyncio.to_thread(keys.write_text, line("carol", "new"))

    async def taken_over() -> bool:
        return await status("new") == 200

    await until(taken_over, "the running gateway has seen the change")
    assert await status(KEY) == 401


@pytest.mark.parametrize("flag", ["grpc_listen", "http_listen"])
@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0", "some.host:0"])
def test_open_address_needs_keys(flag: str, address: str) -> None:
    """Without keys, an address that others may reach is refused before anything is bound."""
    free = {"grpc_listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0"}
    config = GatewayConfig(workers=("127.0.0.1:1",), **{**free, flag: address})
    with pytest.raises(ConfigError) as refused:
        Gateway(config)
    text = str(refused.value)
    assert text.startswith(f"--{flag.replace('_', '-')}={address!r}: other machines may reach")
    assert "--api-keys" in text
    assert "--allow-anonymous" in text


async def test_open_address_with_keys_or_consent(keys: Path) -> None:
    """Keys, --allow-anonymous, loopback names and unix sockets are all let through."""
    public = {"grpc_listen": "0.0.0.0:0", "http_listen": "0.0.0.0:0"}
    local = {"grpc_listen": "unix:/tmp/never-bound.sock", "http_listen": "localhost:0"}
    for flags in ({**public, "api_keys": str(keys)}, {**public, "allow_anonymous": True}, local):
        await Gateway(GatewayConfig(workers=("127.0.0.1:1",), **flags)).stop()


@pytest.mark.parametrize(
    ("environ", "keys_from", "starts"),
    [
        ({}, "", True),
        ({"NIGHTJAR_ALLOW_ANONYMOUS": "false"}, "", False),
        ({"NIGHTJAR_API_KEYS_DIR": "/some/folder"}, "/keys/api-keys", True),
    ],
)
def test_compose_comes_up_open_or_with_keys(
    environ: dict[str, str], keys_from: str, starts: bool
) -> None:
    """Its gateway listens openly by the consent in the file, or by a mounted folder of keys."""
    compose = Path(sys.executable).parent / "docker-compose"
    root = Path(__file__).resolve().parents[2]
    argv = [str(compose), "-f", str(root / "docker-compose.yml"), "config", "--format", "json"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NIGHTJAR_")}
    shown = subprocess.run(argv, check=True, capture_output=True, env={**clean, **environ}).stdout
    service = json.loads(shown)["services"]["gateway"]
    config = parse(GatewayConfig, service["command"][1:], prog="", description="", environ={})
    assert config.api_keys == keys_from
    (volume,) = service["volumes"]
    assert (volume["source"], volume["target"], volume["read_only"]) == (
        environ.get("NIGHTJAR_API_KEYS_DIR", "no-keys"),
        "/keys",
        True,
    )
    assert bool(config.api_keys or config.allow_anonymous) == starts
