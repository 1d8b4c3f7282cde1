"""The model's own chat template, rendered in jinja's sandbox with what such templates rely on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nightjar.errors import ConfigError, InvalidRequest


class ToolCall(NamedTuple):
    """A call that an assistant's message made; the arguments are JSON text of an object."""

    call_id: str
    name: str
    arguments_json: str


class Message(NamedTuple):
    """One message; a role is "system", "user", "assistant" or "tool"."""

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""


class Tool(NamedTuple):
    """A function that the model may call; the parameters are a JSON Schema's text, or empty."""

    name: str
    description: str
    parameters_json: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, oldest first, and the tools that the model is told of."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()

    @property
    def num_characters(self) -> int:
        """Characters of its texts, which its prompt has if its template leaves nothing out."""
        contents = sum(len(message.content) for message in self.messages)
        return contents + sum(len(tool.description) for tool in self.tools)

    @property
    def num_json_characters(self) -> int:
        """Characters of its JSON, which templates write in their own way."""
        arguments = (c.arguments_json for message in self.messages for c in message.tool_calls)
        return sum(map(len, arguments)) + sum(len(tool.parameters_json) for tool in self.tools)


class ChatTemplate:
    """A compiled template. It comes from the model's folder only, never from a request."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], tool_source: str | None = None
    ) -> None:
        """Compile a template, and the one for chats with tools if there is one apart."""
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
            self._tool_template = (
                self._template if tool_source is None else environment.from_string(tool_source)
            )
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
            more = folder / "additional_chat_templates" / "tool_use.jinja"
            for_tools = more.read_text(encoding="utf-8") if more.is_file() else None
            return cls(path.read_text(encoding="utf-8"), special_tokens, for_tools)
        source, for_tools = settings.get("chat_template"), None
        if isinstance(source, list):  # several, by name
            named = {one.get("name"): one.get("template") for one in source}
            source, for_tools = named.get("default"), named.get("tool_use")
        if source is None:
            return None
        if not isinstance(source, str) or not isinstance(for_tools, str | None):
            raise ConfigError("tokenizer_config.json: chat_template must be text")
        return cls(source, special_tokens, for_tools)

    def render(self, chat: Chat) -> str:
        """The prompt of a chat, ready for the assistant's answer.

        Raises:
            InvalidRequest: The template refuses the chat, or has no place for a part of it.
        """
        tools = [_tool(tool) for tool in chat.tools]
        messages = _messages(chat.messages)
        text = self._render(messages, tools)
        # What a template leaves out, the model would never see: such a prompt would be answered
        # as if it had not been sent. The text without it tells.
        if tools and self._renders_as(text, messages, []):
            raise InvalidRequest("chat.tools", "this model's chat template has no place for tools")
        for i, message in enumerate(messages):
            if "tool_calls" in message:
                bare = {key: value for key, value in message.items() if key != "tool_calls"}
                if self._renders_as(text, [*messages[:i], bare, *messages[i + 1 :]], tools):
                    raise InvalidRequest(
                        f"chat.messages[{i}].tool_calls",
                        "this model's chat template has no place for calls of tools",
                    )
                break
        for i, message in enumerate(messages):
            if message["role"] == "tool":
                if self._renders_as(text, [*messages[:i], *messages[i + 1 :]], tools):
                    raise InvalidRequest(
                        f"chat.messages[{i}].role",
                        "this model's chat template has no place for answers of tools",
                    )
                break
        return text

    def _renders_as(
        self, text: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> bool:
        try:
            return self._render(messages, tools) == text
        except InvalidRequest:
            return False  # what is left is no chat: the template takes notice

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        template = self._tool_template if tools else self._template
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=tools or None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # templates are programs: they fail in any way
            raise InvalidRequest(
                "chat.messages", f"refused by the chat template: {error}"
            ) from None


def _tool(tool: Tool) -> dict[str, Any]:
    """A tool in the form that templates are written for, OpenAI's."""
    empty: dict[str, Any] = {"type": "object", "properties": {}}
    parameters = json.loads(tool.parameters_json) if tool.parameters_json else empty
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form that templates are written for; arguments of calls as objects."""
    names: dict[str, str] = {}  # of the functions, by their calls
    rendered = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            one["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments_json)},
                }
                for call in message.tool_calls
            ]
            names.update((call.call_id, call.name) for call in message.tool_calls)
        if message.tool_call_id:
            one["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in names:
                one["name"] = names[message.tool_call_id]
        rendered.append(one)
    return rendered


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
