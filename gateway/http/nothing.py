"""Fields that clients send and no part of Nightjar serves: the values that ask for nothing.

They are accepted at these values and refused at any other, so that no wish is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from gateway.http.errors import HttpError

Route = Literal["chat", "completion"]
Neutral = Mapping[str, tuple[Any, ...]]

_BOTH: Neutral = {
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "detokenize": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "metadata": ({},),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
NEUTRAL: Mapping[Route, Neutral] = {
    "chat": {
        **_BOTH,
        "add_generation_prompt": (True,),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("auto", "none"),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "reasoning_effort": ("none",),
        "store": (False,),
        "verbosity": ("medium",),
        # Nothing but null:
        "audio": (),
        "prediction": (),
        "web_search_options": (),
    },
    "completion": {**_BOTH, "best_of": (1,), "suffix": ("",)},
}
# The same, of a chat message.
NEUTRAL_OF_MESSAGE: Neutral = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "type": ("text", "message"),
}
_WHY = {
    "parallel_tool_calls": "the number of calls cannot be limited",
    "response_format": "the form of an answer cannot be forced",
    "metadata": "answers are not stored, nor is anything with them",
}


def drop_neutral(fields: Mapping[str, Any], neutral: Neutral, path: str = "") -> dict[str, Any]:
    """`fields` without those that ask for nothing.

    Raises:
        HttpError: 400, one of them asks for something.
    """
    kept: dict[str, Any] = {}
    for name, given in fields.items():
        if name not in neutral:
            kept[name] = given
        # 0 is not false and true is not 1, whatever Python says.
        elif given is not None and json.dumps(given) not in map(json.dumps, neutral[name]):
            accepted = " or ".join(json.dumps(value) for value in neutral[name]) or "null"
            why = _WHY.get(name, "not supported")
            message = f"{path}{name}: {why}; only {accepted} is accepted"
            raise HttpError(400, message, f"{path}{name}", "unsupported_value")
    return kept
