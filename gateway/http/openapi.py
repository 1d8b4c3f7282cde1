"""The OpenAPI 3.1 document of the HTTP routes, made from the types that parse and that answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from gateway.access import HTTP_RULES
from gateway.http import shapes
from gateway.http.nothing import NEUTRAL, NEUTRAL_OF_MESSAGE, Neutral
from gateway.http.schema import ChatBody, CompletionBody
from nightjar import __version__
from nightjar.validation import MAX_REQUEST_ID_CHARACTERS

Json = dict[str, Any]

MAX_TIMEOUT_S = 86_400  # of the header that sets a deadline
_REF = "#/components/schemas/"
_SHAPES: tuple[Any, ...] = (
    shapes.ChatCompletion,
    shapes.ChatCompletionChunk,
    shapes.Completion,
    shapes.Model,
    shapes.ModelList,
    shapes.Live,
    shapes.Ready,
    shapes.Error,
)
# In bodies, a null member is an absent one; and some members may only ask for nothing.
_NEUTRAL: Mapping[str, Neutral] = {
    "ChatBody": NEUTRAL["chat"],
    "CompletionBody": NEUTRAL["completion"],
    "Message": NEUTRAL_OF_MESSAGE,
    "StreamOptions": {},
    "NightjarOptions": {},
    "Function": {},
}
_ERRORS = {
    400: "A field can never be served so; `param` names it.",
    401: "There are API keys, and none of them was given.",
    404: "No ready worker has that model, or none can do that.",
    408: "The client's deadline passed before the answer was complete, or its body came too late.",
    413: "The body is too long.",
    415: "The body is not JSON, or encoded.",
    429: "Too much waits already.",
    500: "A fault of the server.",
    503: "No worker is ready, or one was lost and no other could go on.",
}
_RETRY_AFTER: Json = {"retry-after": {"description": "Seconds.", "schema": {"type": "integer"}}}
_ERROR_HEADERS: dict[int, Json] = {
    401: {"www-authenticate": {"schema": {"type": "string"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
_REQUEST_ID = {"x-request-id": {"schema": {"type": "string"}}}
_PARAMETERS: list[Json] = [
    {
        "name": "x-request-id",
        "in": "header",
        "description": "The client's name for its request, for logs; the answer bears it too.",
        "schema": {
            "type": "string",
            "pattern": f"^[!-~]{{1,{MAX_REQUEST_ID_CHARACTERS}}}$",
        },
    },
    {
        "name": "x-request-timeout",
        "in": "header",
        "description": "Seconds that the answer may take.",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
    },
]
_NAME: Json = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "Name of the model; it may hold slashes.",
    "schema": {"type": "string", "minLength": 1},
}


def document(max_body_bytes: int) -> Json:
    """The document of a gateway.

    Args:
        max_body_bytes: Most bytes of a body.
    """
    answers = [200, 400, 401, 404, 408, 413, 415, 429, 500, 503]
    operations: dict[tuple[str, str], Json] = {
        ("POST", "/v1/chat/completions"): _answering(
            "createChatCompletion", "Answer a chat.", "ChatBody", "ChatCompletion", answers
        ),
        ("POST", "/v1/completions"): _answering(
            "createCompletion", "Go on with prompts.", "CompletionBody", "Completion", answers
        ),
        ("POST", "/v1/embeddings"): _operation(
            "createEmbedding", "Refused: the models here generate text.", {}, [401, 404, 500]
        ),
        ("GET", "/v1/models"): _operation(
            "listModels", "The models served now.", {200: _json("ModelList")}, [401, 500, 503]
        ),
        ("GET", "/v1/models/{name:path}"): {
            **_operation("getModel", "One model.", {200: _json("Model")}, [401, 404, 500]),
            "parameters": [_NAME],
        },
        ("GET", "/health/live"): _operation(
            "live", "Whether the process runs.", {200: _json("Live")}, [500]
        ),
        ("GET", "/health/ready"): _ready("ready"),
        ("GET", "/health"): _ready("health"),
        ("GET", "/openapi.json"): _operation(
            "describe", "This document.", {200: {"application/json": {}}}, [401, 500]
        ),
    }
    paths: dict[str, Json] = {}
    for (method, path), operation in operations.items():
        security: list[Json] = [] if HTTP_RULES[method, path] == "public" else [{"bearer": []}, {}]
        item = paths.setdefault(path.replace(":path", ""), {})
        item[method.lower()] = {**operation, "security": security}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Nightjar",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "OpenAI-compatible routes. Unknown fields are refused. A body has at "
            f"most {max_body_bytes} bytes. API keys are needed where the server has some.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas() -> Json:
    adapters = [
        (shape.__name__, "validation", TypeAdapter(shape))
        for shape in (ChatBody, CompletionBody, *_SHAPES)
    ]
    _, definitions = TypeAdapter.json_schemas(
        adapters,  # type: ignore[arg-type]  # of different types
        ref_template=_REF + "{model}",
    )
    schemas: Json = definitions["$defs"]
    for name, neutral in _NEUTRAL.items():
        schema = schemas[name]
        members, required = schema["properties"], schema.get("required", ())
        for member in members:
            if member not in required:
                members[member] = _or_null(members[member])
        for member, values in neutral.items():
            members[member] = {"enum": [*values, None], "description": "Asks for nothing."}
    return schemas


def _or_null(schema: Json) -> Json:
    null = {"type": "null"}
    if null in schema.get("anyOf", ()):
        return schema
    return {"anyOf": [schema, null]}


def _operation(name: str, summary: str, answers: Mapping[int, Json], errors: list[int]) -> Json:
    responses: Json = {}
    for status, media in answers.items():
        description = summary if status == 200 else _ERRORS[status]
        responses[str(status)] = {
            "description": description,
            "headers": _REQUEST_ID,
            "content": media,
        }
    for status in errors:
        responses[str(status)] = {
            "description": _ERRORS[status],
            "headers": {**_REQUEST_ID, **_ERROR_HEADERS.get(status, {})},
            "content": _json("Error"),
        }
    return {"operationId": name, "summary": summary, "responses": responses}


def _answering(name: str, summary: str, body: str, answer: str, statuses: list[int]) -> Json:
    chunk = "ChatCompletionChunk" if answer == "ChatCompletion" else answer
    stream = {
        "description": f"With stream: true. Each event's data is a {chunk}; the last is [DONE], "
        "or an Error where the answer broke off.",
        "type": "string",
    }
    media = {**_json(answer), "text/event-stream": {"schema": stream}}
    return {
        **_operation(name, summary, {200: media}, [s for s in statuses if s != 200]),
        "parameters": _PARAMETERS,
        "requestBody": {"required": True, "content": _json(body)},
    }


def _ready(name: str) -> Json:
    answers = {200: _json("Ready"), 503: _json("Ready")}
    return _operation(name, "Whether requests are wanted.", answers, [500])


def _json(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": _REF + name}}}
