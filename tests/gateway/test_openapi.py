"""The published OpenAPI document: of these routes, with the validator's limits, kept by answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_worker import FakeWorker
from pydantic import TypeAdapter

from gateway.access import HTTP_RULES
from gateway.http import shapes
from gateway.http.nothing import NEUTRAL
from gateway.http.openapi import document
from gateway.http.translate import parse
from nightjar.errors import InvalidRequest
from nightjar.v1 import generation_pb2 as pb
from nightjar.validation import validate

DOCUMENT = document(1024)
SCHEMAS = DOCUMENT["components"]["schemas"]
PROMPTS: dict[Any, dict[str, Any]] = {
    "ChatBody": {"messages": [{"role": "user", "content": "hello"}]},
    "CompletionBody": {"prompt": "hello"},
}
ROUTES: dict[str, Any] = {"ChatBody": "chat", "CompletionBody": "completion"}


def operations() -> dict[tuple[str, str], Any]:
    """All operations by method and path."""
    return {
        (method.upper(), path): operation
        for path, item in DOCUMENT["paths"].items()
        for method, operation in item.items()
    }


def references(value: Any) -> set[str]:
    """Names of all schemas that something refers to."""
    if isinstance(value, dict):
        own = {value["$ref"].rpartition("/")[2]} if "$ref" in value else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_it_describes_the_routes_that_there_are() -> None:
    """Every route of the table is described, no other, and says whether it asks for a key."""
    described = {
        (method, path.replace("{name}", "{name:path}")): operation
        for (method, path), operation in operations().items()
    }
    assert set(described) == set(HTTP_RULES)
    for route, operation in described.items():
        assert (operation["security"] == []) == (HTTP_RULES[route] == "public")
    names = [operation["operationId"] for operation in described.values()]
    assert len(set(names)) == len(names)


def test_nothing_is_missing_or_left_over() -> None:
    """Every schema that is referred to is there."""
    assert references(DOCUMENT) <= set(SCHEMAS)
    assert set(SCHEMAS) - references(DOCUMENT) == {"ChatCompletionChunk"}  # named in words


def test_a_seed_is_an_unsigned_number_of_64_bits() -> None:
    """Its range is that of the protocol, in words of JSON Schema."""
    number = SCHEMAS["CompletionBody"]["properties"]["seed"]["anyOf"][0]
    assert number == {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**64}


def accepted(name: str, **fields: Any) -> bool:
    """Whether the validator lets a body with these fields pass."""
    requests = parse(ROUTES[name], {**PROMPTS[name], **fields}, "").requests
    try:
        for request in requests:
            validate(request)
    except InvalidRequest:
        return False
    return True


NUMBERS = [
    (name, field)
    for name in PROMPTS
    for field, schema in SCHEMAS[name]["properties"].items()
    if {"minimum", "exclusiveMinimum"} & set(schema)
]


@pytest.mark.parametrize(("name", "field"), NUMBERS)
def test_limits_are_the_validators(name: str, field: str) -> None:
    """A number at a published limit is accepted, the next one beyond it is not."""
    schema = SCHEMAS[name]["properties"][field]
    whole = {"type": "integer"}.items() <= schema["anyOf"][0].items()
    more: dict[str, Any] = {"logprobs": True} if field == "top_logprobs" else {}
    if field == "max_tokens" and name == "CompletionBody":
        more = {"echo": True}  # without which 0 is too few
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    below = least - 1 if whole else math.nextafter(least, -math.inf)
    assert accepted(name, **{field: least}, **more) == ("minimum" in schema)
    assert not accepted(name, **{field: below}, **more)
    if "maximum" in schema:
        most = schema["maximum"]
        above = most + 1 if whole else math.nextafter(most, math.inf)
        assert accepted(name, **{field: most}, **more)
        assert not accepted(name, **{field: above}, **more)


def test_all_sampling_parameters_are_reachable() -> None:
    """Every field of SamplingParams has a name on the completions route."""
    fields = set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - {"prompt_logprobs"}  # by echo
    assert fields <= set(SCHEMAS["CompletionBody"]["properties"])


@pytest.mark.parametrize("name", PROMPTS)
def test_what_asks_for_nothing_is_accepted(name: str) -> None:
    """Fields that load generators and libraries send are fine at every published value."""
    plain = parse(ROUTES[name], PROMPTS[name], "").requests
    for field in NEUTRAL[ROUTES[name]]:
        published = SCHEMAS[name]["properties"][field]["enum"]
        assert None in published
        for value in published:
            body = {**PROMPTS[name], field: value}
            assert parse(ROUTES[name], body, "").requests == plain


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/tiny", None),
        ("GET", "/v1/models/other", None),
        ("GET", "/v1/models/", None),
        ("GET", "/health", None),
        ("GET", "/health/ready", None),
        ("GET", "/health/live", None),
        ("POST", "/v1/embeddings", {"model": "tiny", "input": "hello"}),
        ("POST", "/v1/completions", {"prompt": "hello", "logprobs": None}),
        ("POST", "/v1/completions", {"prompt": ""}),
        ("POST", "/v1/completions", {"prompt": "hello", "model": "other"}),
        ("POST", "/v1/chat/completions", PROMPTS["ChatBody"]),
        ("POST", "/v1/chat/completions", {}),
    ],
)
async def test_answers_are_as_published(served: Any, method: str, path: str, body: Any) -> None:
    """Statuses, headers and bodies are those of the document, errors too."""
    response = await served.http.request(method, path, json=body)
    known = {"/v1/models/" + name: "/v1/models/{name}" for name in ("tiny", "other", "")}
    answer = operations()[method, known.get(path, path)]["responses"][str(response.status_code)]
    assert response.headers["content-type"] == "application/json"
    (reference,) = references(answer["content"]["application/json"])
    TypeAdapter(getattr(shapes, reference)).validate_json(response.content, strict=True)
    assert response.headers["x-request-id"].startswith("req_")


async def test_it_is_served(served: Any, worker: FakeWorker) -> None:
    """The document is at /openapi.json, with this gateway's limit of a body."""
    response = await served.http.get("/openapi.json")
    assert response.json() == document(served.gateway._config.max_body_bytes)
    assert "4194304 bytes" in response.json()["info"]["description"]


async def test_every_error_is_json(served: Any) -> None:
    """Whatever is asked for, no page of the server's framework is ever the answer."""
    for method, path, status in [
        ("GET", "/", 404),
        ("GET", "/nowhere", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("GET", "/docs", 404),
        ("POST", "/v1/completions", 415),
    ]:
        response = await served.http.request(method, path)
        assert response.status_code == status
        TypeAdapter(shapes.Error).validate_json(response.content, strict=True)
        assert response.headers["x-request-id"]
