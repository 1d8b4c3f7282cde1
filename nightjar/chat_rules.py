"""What `validation` asks of chats: roles, tools and their calls, JSON that every parser reads."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NoReturn

from nightjar.errors import InvalidRequest
from nightjar.v1 import generation_pb2 as pb

MAX_MESSAGES, MAX_TOOLS, MAX_TOOL_CALLS = 1024, 128, 128  # calls are counted by message
MAX_DESCRIPTION_CHARACTERS, MAX_CALL_ID_CHARACTERS = 16_384, 128
MAX_JSON_CHARACTERS, MAX_JSON_BRACKETS, MAX_JSON_DEPTH = 65_536, 4096, 64
MAX_ALL_JSON_CHARACTERS = 524_288  # of a request: it is parsed where streams are served
ROLES = ("system", "user", "assistant", "tool")
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def check_counts(chat: pb.ChatPrompt) -> None:
    """Bound what `check` reads element by element.

    Raises:
        InvalidRequest: There is too much of something, or no message.
    """
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise InvalidRequest("chat.messages", f"must hold 1 to {MAX_MESSAGES} messages")
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidRequest("chat.tools", f"at most {MAX_TOOLS} tools")
    size = sum(len(tool.parameters_json) for tool in chat.tools)
    for i, message in enumerate(chat.messages):
        if len(message.tool_calls) > MAX_TOOL_CALLS:
            raise InvalidRequest(f"chat.messages[{i}].tool_calls", f"at most {MAX_TOOL_CALLS}")
        size += sum(len(call.arguments_json) for call in message.tool_calls)
    if size > MAX_ALL_JSON_CHARACTERS:
        raise InvalidRequest(
            "chat",
            f"tools and calls have {size} characters of JSON; at most {MAX_ALL_JSON_CHARACTERS}",
        )


def check(chat: pb.ChatPrompt) -> None:
    """Check every message and every tool; `check_counts` comes first.

    Raises:
        InvalidRequest: A value can never work; names the field and the limit.
    """
    for i, message in enumerate(chat.messages):
        _check_message(f"chat.messages[{i}]", message)
    _check_tools(chat.tools)


def _check_message(path: str, message: pb.ChatMessage) -> None:
    if message.role not in ROLES:
        raise InvalidRequest(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{path}.tool_calls", "only an assistant's message has them")
    if message.tool_call_id and message.role != "tool":
        raise InvalidRequest(f"{path}.tool_call_id", "only a tool's message has one")
    _check_size(f"{path}.tool_call_id", message.tool_call_id, MAX_CALL_ID_CHARACTERS)
    for i, call in enumerate(message.tool_calls):
        _check_size(f"{path}.tool_calls[{i}].id", call.id, MAX_CALL_ID_CHARACTERS)
        _check_name(f"{path}.tool_calls[{i}].name", call.name)
        _check_object(f"{path}.tool_calls[{i}].arguments_json", call.arguments_json)


def _check_tools(tools: Collection[pb.Tool]) -> None:
    names: set[str] = set()
    for i, tool in enumerate(tools):
        path = f"chat.tools[{i}]"
        _check_name(f"{path}.name", tool.name)
        if tool.name in names:
            raise InvalidRequest(f"{path}.name", f"{tool.name!r} is there twice")
        names.add(tool.name)
        _check_size(f"{path}.description", tool.description, MAX_DESCRIPTION_CHARACTERS)
        if tool.parameters_json:
            _check_object(f"{path}.parameters_json", tool.parameters_json)


def _check_name(field: str, name: str) -> None:
    if not _FUNCTION_NAME.fullmatch(name):
        raise InvalidRequest(field, 'must have 1 to 64 letters, digits, "_" or "-"')


def _check_size(field: str, text: str, most: int) -> None:
    if len(text) > most:
        raise InvalidRequest(field, f"at most {most} characters, got {len(text)}")


def _check_object(field: str, text: str) -> None:
    """JSON text of an object that any parser reads alike, and none too deeply."""
    _check_size(field, text, MAX_JSON_CHARACTERS)
    if text.count("{") + text.count("[") > MAX_JSON_BRACKETS:
        raise InvalidRequest(field, f"at most {MAX_JSON_BRACKETS} opening brackets")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise InvalidRequest(field, "is not valid JSON") from None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be a JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            part
            for parent in level
            for part in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(part, dict | list)
        ]
    if level:
        raise InvalidRequest(field, f"is nested more than {MAX_JSON_DEPTH} levels deep")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
