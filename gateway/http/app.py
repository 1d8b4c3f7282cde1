"""The routes: chat, completions, models, health and their own description."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.dispatch import Dispatcher
from gateway.http.body import Bodies
from gateway.http.endpoint import AnswerEndpoint
from gateway.http.errors import HttpError, render, unknown_model
from gateway.http.openapi import document
from gateway.http.shapes import Live, Model, ModelList, Ready
from gateway.registry import Registry
from nightjar.errors import Unavailable
from nightjar.v1 import worker_pb2

_NO_EMBEDDINGS = "embeddings are not served: the models here generate text"


def make_app(dispatcher: Dispatcher, registry: Registry, max_body_bytes: int) -> Starlette:
    """The ASGI application; it stands behind a `Gate`, which names requests.

    `GET /health/live` is 200 while the process runs; `/health/ready` and `/health` are 200
    while a worker is ready and the gateway is not draining, else 503.
    """
    published = document(max_body_bytes)

    async def live(_: Request) -> Response:
        body: Live = {"live": True}
        return JSONResponse(body)

    async def ready(_: Request) -> Response:
        reasons = [worker.not_ready for worker in registry.workers.values() if worker.not_ready]
        body: Ready = {
            "ready": registry.ready,
            "num_workers": len(registry.workers),
            "num_ready": len(registry.workers) - len(reasons),
            "reasons": reasons,
        }
        return JSONResponse(body, status_code=200 if registry.ready else 503)

    async def list_models(_: Request) -> Response:
        if not registry.models:
            raise Unavailable("no worker is ready; try again in a moment")
        models = [_model_json(model) for model in registry.models.values()]
        body: ModelList = {"object": "list", "data": models}
        return JSONResponse(body)

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in registry.models:
            raise unknown_model(name)
        return JSONResponse(_model_json(registry.models[name]))

    async def embeddings(_: Request) -> Response:
        raise HttpError(404, _NO_EMBEDDINGS, code="unsupported_operation")

    async def openapi(_: Request) -> Response:
        return JSONResponse(published)

    bodies = Bodies(max_body_bytes)
    chat = AnswerEndpoint("chat", dispatcher, bodies)
    completion = AnswerEndpoint("completion", dispatcher, bodies)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/health", ready),
            Route("/openapi.json", openapi),
        ],
        exception_handlers={
            HTTPException: _http_exception,
            HttpError: _error,
            Unavailable: _error,
            Exception: _error,
        },
    )


async def _error(_: Request, error: Exception) -> Response:
    status, body, headers = render(error)
    return JSONResponse(body, status_code=status, headers=headers)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "no such route", 405: f"{request.method} is not served here"}
    message = words.get(error.status_code, error.detail)
    status, body, _ = render(HttpError(error.status_code, message))
    return JSONResponse(body, status_code=status, headers=error.headers)


def _model_json(model: worker_pb2.ModelInfo) -> Model:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "nightjar",
        "max_model_len": model.max_model_len,
    }
