"""The model's own chat template, rendered in jinja's sandbox with what such templates rely on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nightjar.errors import ConfigError, InvalidRequest


class ChatTemplate:
    """A compiled template. It comes from the model's folder only, never from a request."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from error
        self._special_tokens = special_tokens

    @classmethod
    def load(
        cls, folder: Path, settings: dict[str, Any], special_tokens: dict[str, str]
    ) -> ChatTemplate | None:
        """The template of a folder: chat_template.jinja, else tokenizer_config.json's; or None.

        Raises:
            ConfigError: It is not a template.
        """
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), special_tokens)
        source = settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {one.get("name"): one.get("template") for one in source}.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ConfigError("tokenizer_config.json: chat_template must be text")
        return cls(source, special_tokens)

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt of a chat of (role, content), ready for the assistant's answer.

        Raises:
            InvalidRequest: The template refuses these messages.
        """
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                "chat.messages", f"refused by the chat template: {error}"
            ) from None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012, jinja declares it without ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)
