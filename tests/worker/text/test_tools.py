"""Tools and their calls, rendered by the model's own template, or refused where it has no place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers_like
from tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from nightjar.errors import InvalidRequest
from worker.text.chat_template import Chat, ChatTemplate, Message, Tool, ToolCall
from worker.text.tokenizer import Tokenizer

# As the field's templates have it: tools in the system's message, calls and answers in turns.
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'tool' %}{{ message.name }}={% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function.name }}({{ call.function.arguments | tojson }})</call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string", "enum": ["Zürich"]}}}'
WEATHER = Tool("weather", "How it is outside.", SCHEMA)
ASKED = Message("user", "Is it raining?")
CALL = Message("assistant", "", [ToolCall("call-1", "weather", '{"city": "Zürich"}')])
ANSWER = Message("tool", "yes", tool_call_id="call-1")
CONVERSATION = Chat([ASKED, CALL, ANSWER], [WEATHER, Tool("now", "", "")])


def test_tools_calls_and_answers_as_transformers_renders_them() -> None:
    """The text is that of transformers with OpenAI's form of tools, arguments as objects."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "How it is outside.",
                "parameters": json.loads(SCHEMA),
            },
        },
        {
            "type": "function",
            "function": {
                "name": "now",
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        },
    ]
    function = {"name": "weather", "arguments": {"city": "Zürich"}}
    messages = [
        {"role": "user", "content": "Is it raining?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "yes", "tool_call_id": "call-1", "name": "weather"},
    ]
    want, _ = render_jinja_template(
        [messages], tools=tools, chat_template=TOOL_TEMPLATE, add_generation_prompt=True
    )
    got = ChatTemplate(TOOL_TEMPLATE, {}).render(CONVERSATION)
    assert got == want[0]
    assert '<call>weather({"city": "Zürich"})</call><|tool|>weather=yes<|assistant|>' in got


def test_a_template_without_a_place_refuses_each_part() -> None:
    """Tools, calls or answers that would be left out are refused, and named; the rest is served."""
    plain = ChatTemplate(CHAT_TEMPLATE, {})
    only_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{{ tools }}"
    for template, chat, field, word in (
        (plain, Chat([ASKED], [WEATHER]), "chat.tools", "tools"),
        (plain, Chat([ASKED, CALL]), "chat.messages[1].tool_calls", "calls"),
        (ChatTemplate(only_users, {}), Chat([ASKED, ANSWER]), "chat.messages[1].role", "answers"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            template.render(chat)
        assert caught.value.field == field
        assert f"chat template has no place for {word}" in caught.value.message
    assert "<|im_start|>tool\nyes<|im_end|>" in plain.render(Chat([ASKED, ANSWER]))


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    """A folder's tool template renders chats with tools, its other one those without."""
    one = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    (tmp_path / "additional_chat_templates").mkdir()
    from_settings = ChatTemplate.load(tmp_path, {"chat_template": one}, {})
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
        "{{ tools | length }} tools"
    )
    for template in (from_settings, ChatTemplate.load(tmp_path, {}, {})):
        assert template is not None
        assert template.render(Chat([ASKED])) == "plain"
        assert template.render(Chat([ASKED], [WEATHER])) == "1 tools"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('no tools here') if tools }}", "no tools here"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange"),
    ],
)
def test_what_fails_in_a_template_is_the_requests_refusal(source: str, said: str) -> None:
    """An error while rendering is INVALID_ARGUMENT with its sentence, never an error of ours."""
    with pytest.raises(InvalidRequest, match=said):
        ChatTemplate(source, {}).render(Chat([ASKED], [WEATHER]))


def test_a_rendered_chat_is_bounded_before_it_is_tokenized() -> None:
    """What the template makes of a chat counts, not what the client sent."""
    tokenizer = Tokenizer(byte_tokenizer(), template=ChatTemplate("{{ 'long' * 1000 }}", {}))
    assert len(tokenizer.encode_chat(Chat([ASKED]), 4000)) > 0
    with pytest.raises(InvalidRequest, match="4000 characters can never fit"):
        tokenizer.encode_chat(Chat([ASKED]), 3999)


def test_surrogates_spelled_in_json_are_refused() -> None:
    """JSON text can hold what no text prompt can; it is refused by name, before tokenizing."""
    tokenizer = Tokenizer(byte_tokenizer(), template=ChatTemplate(TOOL_TEMPLATE, {}))
    bad = Tool("f", "", '{"description": "\\ud83d"}')
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.encode_chat(Chat([ASKED], [bad]))


def test_own_bytes_of_byte_fallback_and_special_tokens() -> None:
    """Byte tokens are their byte, pieces their text, and special tokens as they are written."""
    tokenizer = Tokenizer(tokenizers_like.byte_fallback())
    ids = {token: i for i, token in tokenizer.vocabulary().items()}
    assert tokenizer.own_bytes(ids["<0xF0>"]) == b"\xf0"
    assert tokenizer.own_bytes(ids["▁the"]) == b" the"
    assert tokenizer.own_bytes(ids["▁the"], first=True) == b"the"
    assert tokenizer.own_bytes(ids["日本"]) == "日本".encode()
    assert tokenizer.own_bytes(ids["</s>"]) == b"</s>"
    assert tokenizer.own_bytes(99_999) == b""
    tiny = Tokenizer(byte_tokenizer())
    assert [tiny.own_bytes(i).decode() for i in range(4)] == list(SPECIAL_TOKENS)
