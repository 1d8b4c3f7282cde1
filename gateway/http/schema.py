"""The bodies of the OpenAI routes: names, types and defaults of their fields.

Only shapes and types are checked here; every value is `nightjar.validation`'s, so that HTTP and
gRPC clients get the same sentence. Unknown fields are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.http.fields import (
    MAX_CHOICES,
    Bias,
    Content,
    DropNulls,
    Int32,
    Prompts,
    Strings,
    TokenIds,
    ToolChoice,
    Whole,
    one_too_many,
    within,
)
from nightjar.chat_rules import MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS
from nightjar.validation import MAX_GAMMA

_SEED_END = 2**64


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, value: object) -> object:
        """Of unknown fields the first is refused; the others need not be read."""
        known = cls.model_fields
        if not isinstance(value, dict) or len(value) <= len(known):
            return value
        unknown = next(name for name in value if name not in known)
        return {name: value[name] for name in (*known, unknown) if name in value}


class NightjarOptions(_Strict):
    """Nightjar's own parameters."""

    max_gamma: Annotated[
        Int32 | None,
        within(0, MAX_GAMMA),
        Field(description="Most draft tokens a step; 0 switches speculation off."),
    ] = None


class StreamOptions(_Strict):
    """What a stream carries beside the text."""

    include_usage: Annotated[
        bool, Field(description="One last chunk without choices, with the usage.")
    ] = False
    continuous_usage_stats: Annotated[
        bool, Field(description="The counts so far in every chunk.")
    ] = False


class FunctionCall(_Strict):
    """Name and arguments of a call."""

    name: str
    arguments: Annotated[str, Field(description="JSON text of an object.")]


class ToolCall(_Strict):
    """A call that an assistant's message made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(_Strict):
    """One chat message; `developer` is `system` under OpenAI's newer name."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
                {"required": ["tool_calls"], "properties": {"tool_calls": {"minItems": 1}}},
            ]
        }
    )

    role: Annotated[
        str,
        Field(json_schema_extra={"enum": ["system", "developer", "user", "assistant", "tool"]}),
    ]
    content: Annotated[
        Content | None, Field(description="Needed unless the message makes calls.")
    ] = None
    tool_calls: Annotated[
        list[ToolCall],
        one_too_many(MAX_TOOL_CALLS),
        Field(description="Of an assistant's message: the calls it made."),
    ] = []
    tool_call_id: Annotated[
        str, Field(description="Of a tool's message: the call that it answers.")
    ] = ""


class Function(_Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(json_schema_extra={"pattern": "^[A-Za-z0-9_-]{1,64}$"})]
    description: str = ""
    parameters: Annotated[
        dict[str, Any] | None, Field(description="JSON Schema of its arguments.")
    ] = None
    strict: Annotated[
        Literal[False] | None, Field(description="Arguments cannot be held to their schema.")
    ] = None


class Tool(_Strict):
    """A tool; there are only functions."""

    type: Literal["function"]
    function: Annotated[Function, DropNulls]


class Body(_Strict):
    """What both routes have."""

    model: Annotated[
        str, Field(description="Empty means the model of a server that has only one.")
    ] = ""
    stream: bool = False
    stream_options: Annotated[
        Annotated[StreamOptions, DropNulls] | None, Field(description="Only with stream: true.")
    ] = None
    user: Annotated[str, Field(description="For logs only, cut there.")] = ""
    nightjar: Annotated[NightjarOptions, DropNulls] | None = None
    temperature: Annotated[float | None, within(0, 100)] = None
    top_p: Annotated[float | None, within(0, 1, above=True)] = None
    top_k: Annotated[Int32 | None, within(-1), Field(description="0 and -1: off.")] = None
    min_p: Annotated[float | None, within(0, 1)] = None
    seed: Annotated[int, Field(ge=0, lt=_SEED_END), Whole] | None = None
    max_tokens: Annotated[
        Int32 | None, within(1), Field(description="With the prompt, at most the context.")
    ] = None
    min_tokens: Annotated[Int32 | None, within(0), Field(description="At most max_tokens.")] = None
    stop: Strings = []
    stop_token_ids: TokenIds = []
    repetition_penalty: Annotated[float | None, within(0, 2, above=True)] = None
    presence_penalty: Annotated[float | None, within(-2, 2)] = None
    frequency_penalty: Annotated[float | None, within(-2, 2)] = None
    logit_bias: Bias = {}
    n: Annotated[
        Int32 | None, within(1, MAX_CHOICES), Field(description="Answers to each prompt.")
    ] = None
    ignore_eos: bool = False


class ChatBody(Body):
    """Body of POST /v1/chat/completions; without a limit the context is the limit."""

    messages: Annotated[
        list[Annotated[Message, DropNulls]],
        one_too_many(MAX_MESSAGES),
        Field(json_schema_extra={"minItems": 1, "maxItems": MAX_MESSAGES}),
    ]
    max_completion_tokens: Annotated[
        Int32 | None, within(1), Field(description="The newer name of max_tokens.")
    ] = None
    logprobs: bool = False
    top_logprobs: Annotated[
        Int32 | None, within(0, 20), Field(description="Only with logprobs: true.")
    ] = None
    tools: Annotated[
        list[Tool],
        one_too_many(MAX_TOOLS),
        Field(
            json_schema_extra={"maxItems": MAX_TOOLS},
            description="Put before the model by its chat template; calls come back as text.",
        ),
    ] = []
    tool_choice: Annotated[
        ToolChoice, Field(description="With none, the tools are not put before the model.")
    ] = "auto"
    safety_identifier: Annotated[str, Field(description="The newer name of user.")] = ""


class CompletionBody(Body):
    """Body of POST /v1/completions; `max_tokens` is 16 by default, as OpenAI's is."""

    prompt: Prompts
    max_tokens: Annotated[
        Int32 | None, within(0), Field(description="16 by default; 0 only with echo.")
    ] = None
    logprobs: Annotated[Int32 | None, within(0, 20)] = None
    echo: Annotated[
        bool, Field(description="The answer begins with its prompt; only without stream.")
    ] = False
