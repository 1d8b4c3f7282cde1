"""Load over the OpenAI-compatible HTTP API: of Nightjar, or of any other server of it."""

from __future__ import annotations

import json
import ssl
import time
from typing import Any

import httpx

from nightjar.errors import ConfigError
from planner_service.load.endpoint import Answer, RequestFailed, Wish
from planner_service.load.workload import Ask

_LONGEST_ERROR = 500


class HttpEndpoint:
    """A server under a base URL such as http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, *, model: str, api_key: str, ca: str, timeout_s: float) -> None:
        self._url, self._model = url.rstrip("/"), model
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            verify = ssl.create_default_context(cafile=ca) if ca else True
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-ca={ca!r}: {error}") from None
        self._client = httpx.AsyncClient(
            headers=headers,
            verify=verify,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def open(self) -> str:
        """Find the model's name, unless it was given.

        Raises:
            ConfigError: Nobody answers there, or not with a list of models.
        """
        if self._model:
            return self._model
        try:
            found = await self._client.get(f"{self._url}/models")
            found.raise_for_status()
            self._model = str(found.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            await self._client.aclose()
            reason = str(error) or type(error).__name__
            raise ConfigError(f"--target: no model is listed at {self._url}: {reason}") from None
        return self._model

    async def ask(self, ask: Ask, wish: Wish, answer: Answer) -> None:
        """One streamed completion; what carries text is a piece, what carries usage counts."""
        route = "chat/completions" if ask.is_chat else "completions"
        body, usage = self._body(ask, wish), None
        try:
            async with self._client.stream("POST", f"{self._url}/{route}", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise RequestFailed(f"HTTP {response.status_code}: {_sentence(text)}")
                async for line in response.aiter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        raise RequestFailed(_sentence(line[5:]))
                    if _carries(chunk):
                        answer.piece_times.append(time.perf_counter())
                    usage = chunk.get("usage") or usage
                    _note_speculation(chunk.get("nightjar"), answer)
        except (httpx.HTTPError, ValueError) as error:
            raise RequestFailed(str(error) or type(error).__name__) from None
        if usage is None:
            raise RequestFailed("the stream ended without a usage")
        _note_usage(usage, answer)

    async def close(self) -> None:
        """Disconnect."""
        await self._client.aclose()

    def _body(self, ask: Ask, wish: Wish) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.max_tokens,
            "temperature": wish.temperature,
            "seed": ask.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.is_chat:
            body["messages"] = [{"role": "user", "content": ask.text}]
        else:
            body["prompt"] = ask.text
        if wish.ignore_eos:
            body["ignore_eos"] = True
        if wish.max_gamma is not None:
            body["nightjar"] = {"max_gamma": wish.max_gamma}
        return body


def _carries(chunk: dict[str, Any]) -> bool:
    """Whether a chunk brings text, or a reasoning model's thoughts."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


def _note_usage(usage: dict[str, Any], answer: Answer) -> None:
    answer.num_tokens = int(usage.get("completion_tokens") or 0)
    answer.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    answer.num_cached_tokens = int(details.get("cached_tokens") or 0)
    drafted = usage.get("completion_tokens_details") or {}
    accepted = drafted.get("accepted_prediction_tokens")
    rejected = drafted.get("rejected_prediction_tokens")
    if accepted is not None and rejected is not None:
        answer.num_accepted = int(accepted)
        answer.num_drafts = int(accepted) + int(rejected)


def _note_speculation(found: dict[str, Any] | None, answer: Answer) -> None:
    if found:
        answer.gamma_histogram = tuple(int(n) for n in found.get("gamma_histogram") or ())
        answer.policy_version = str(found.get("policy_version") or "")


def _sentence(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:_LONGEST_ERROR]
    except (ValueError, LookupError, TypeError):
        return text[:_LONGEST_ERROR]
