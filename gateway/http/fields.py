"""Types of the fields of a body: what JSON becomes, and its JSON Schema.

Ranges stand in the schemas for readers alone: the one that refuses a value is
`nightjar.validation`, whose limits they repeat.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from nightjar import validation

MAX_PROMPTS = 64
MAX_CHOICES = 128  # over all prompts
INT32_END = 2**31
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_END - 1}}
_STOP = {"type": "string", "minLength": 1, "maxLength": validation.MAX_STOP_CHARACTERS}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}


def prompts(value: object) -> list[str] | list[list[int]]:
    """One prompt or several, each a string or token ids; always as a list of prompts."""
    if isinstance(value, list) and (not value or isinstance(value[0], int | float)):
        return [token_ids(value)]
    given: list[Any] = value if isinstance(value, list) else [value]
    kinds = set(map(type, given))
    if kinds not in ({str}, {list}):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if len(given) > MAX_PROMPTS:
        raise ValueError(f"holds {len(given)} prompts; at most {MAX_PROMPTS} a request are served")
    return given if kinds == {str} else [token_ids(ids) for ids in given]


def token_ids(value: object) -> list[int]:
    """Token ids that fit the protocol; whether the model has them is the validator's to say."""
    if isinstance(value, list) and float in set(map(type, value)):
        value = [whole(item) for item in value]
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("must be a list of token ids")
    if value and not -INT32_END <= min(value) <= max(value) < INT32_END:
        outside = next(i for i, item in enumerate(value) if not -INT32_END <= item < INT32_END)
        raise ValueError(f"entry {outside} lies outside the vocabulary")
    return value


def whole(value: object) -> object:
    """A whole number, however it is written: to JSON, 2.0 is one."""
    return int(value) if type(value) is float and value.is_integer() else value


def strings(value: object) -> list[str]:
    """A string, or a list of them."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not set(map(type, found)) <= {str}:
        raise ValueError("must be a string or a list of strings")
    return found


def content(value: object) -> str:
    """A string, or text parts, which are joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str) or len(part) != 2:
            raise ValueError('must hold parts {"type": "text", "text": "…"} only')
        texts.append(text)
    return "\n".join(texts)


def bias(value: object) -> dict[int, float]:
    """Token ids, which JSON can only write as strings, and what is added to their logits."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    found: dict[int, float] = {}
    # One too many is enough for the validator to refuse them.
    for name, number in itertools.islice(value.items(), validation.MAX_LOGIT_BIAS + 1):
        if not (name.isdecimal() and name.isascii() and len(name) < 10):
            raise ValueError("its names must be token ids")
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise ValueError("its values must be numbers")
        if int(name) in found:
            raise ValueError(f"names token {int(name)} twice")
        try:
            found[int(name)] = float(number)
        except OverflowError:
            raise ValueError("its values must lie in [-100, 100]") from None
    return found


def tool_choice(value: object) -> str:
    """Whether the model may call; it cannot be made to."""
    if value not in ("auto", "none"):
        raise ValueError('a call cannot be forced; only "auto" or "none" is accepted')
    return str(value)


def without_nulls(value: object) -> object:
    """An object as if its null members were absent."""
    if isinstance(value, dict):
        return {name: member for name, member in value.items() if member is not None}
    return value


def one_too_many(most: int) -> Any:
    """A list cut to one element more than there may be: enough for the validator to refuse it."""
    return BeforeValidator(lambda value: value[: most + 1] if isinstance(value, list) else value)


def within(low: float, high: float | None = None, *, above: bool = False) -> Any:
    """The range of a number, for the schema alone.

    Args:
        low: Least value; with `above`, the greatest that is too small.
        high: Greatest value, if there is one.
        above: Whether `low` itself is left out.
    """
    limits = {"exclusiveMinimum" if above else "minimum": low}
    if high is not None:
        limits["maximum"] = high
    return Field(json_schema_extra=dict(limits))


Whole = BeforeValidator(whole)
Int32 = Annotated[int, Field(ge=-INT32_END, lt=INT32_END), Whole]
TokenIds = Annotated[
    list[int],
    PlainValidator(token_ids),
    WithJsonSchema({**_TOKEN_IDS, "maxItems": validation.MAX_STOP_TOKEN_IDS}),
]
Strings = Annotated[
    list[str],
    PlainValidator(strings),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP,
                {"type": "array", "items": _STOP, "maxItems": validation.MAX_STOP_STRINGS},
            ]
        }
    ),
]
_TOKENS = {**_TOKEN_IDS, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(prompts),
    WithJsonSchema(
        {
            "description": "One prompt or several, each as text or as token ids. Choices are "
            "numbered prompt by prompt.",
            "anyOf": [
                _TEXT,
                _TOKENS,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ],
        }
    ),
]
Content = Annotated[
    str,
    PlainValidator(content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}),
]
Bias = Annotated[
    dict[int, float],
    PlainValidator(bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": validation.MAX_LOGIT_BIAS,
        }
    ),
]
ToolChoice = Annotated[str, PlainValidator(tool_choice), WithJsonSchema({"enum": ["auto", "none"]})]
DropNulls = BeforeValidator(without_nulls)
