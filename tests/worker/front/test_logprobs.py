"""Log-probabilities on their way out: one entry per token, with the token's own bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calls import answer, asked
from fake_engine import logprob
from tiny import SPECIAL_TOKENS, byte_tokenizer

from nightjar.v1 import generation_pb2 as pb
from worker.text.tokenizer import Tokenizer

FrontMaker = Callable[..., Any]
TINY = Tokenizer(byte_tokenizer())


def entries(pieces: list[pb.GenerateResponse]) -> list[pb.TokenLogprobs]:
    """Those of the answer's tokens."""
    return [entry for piece in pieces for entry in piece.logprobs]


async def test_one_entry_per_token_with_its_raw_bytes(front: FrontMaker) -> None:
    """Parts of a character are its bytes, and all together they are the text."""
    async with front("--num-tokens=3") as worker:
        text = "a🦉日é "
        num_tokens = 2 * len(TINY.encode(text))
        pieces = await answer(worker, asked(text, max_tokens=num_tokens, logprobs=2))
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        assert [len(piece.logprobs) for piece in pieces] == [len(p.token_ids) for p in pieces]
        got = entries(pieces)
        assert [entry.chosen.token_id for entry in got] == token_ids
        assert [entry.chosen.logprob for entry in got] == [logprob(i) for i in token_ids]
        assert b"\x9f" in [entry.chosen.token_bytes for entry in got]
        whole = b"".join(entry.chosen.token_bytes for entry in got)
        assert whole.decode() == "".join(piece.text for piece in pieces) == text * 2
        for entry in got:
            assert [(top.token_id, top.logprob) for top in entry.top] == [(0, 0.0), (1, -1 / 64)]
            # A special token is as it is written, though text would leave it out.
            assert [top.token_bytes.decode() for top in entry.top] == list(SPECIAL_TOKENS[:2])


async def test_withheld_text_withholds_no_entry(front: FrontMaker) -> None:
    """Tokens of a stop string and of a text that only looked like one have theirs, once."""
    async with front() as worker:
        for stop, shown in (("XYZ", "abc"), ("XYZ!", "abcXYZ")):
            request = asked("abcXYZ", max_tokens=6, stop=[stop], logprobs=0)
            pieces = await answer(worker, request)
            assert "".join(piece.text for piece in pieces) == shown
            assert b"".join(e.chosen.token_bytes for e in entries(pieces)) == b"abcXYZ"
            assert [len(piece.logprobs) for piece in pieces] == [len(p.token_ids) for p in pieces]
            assert not any(entry.top for entry in entries(pieces))


async def test_the_prompts_come_first_and_once(front: FrontMaker) -> None:
    """One for each token of the prompt from its second on, before any token, of choice 0 alone."""
    async with front("--tick-ms=5") as worker:
        text = "prompts are long, and this one has many tokens; " * 5
        request = asked(text, max_tokens=3, prompt_logprobs=1, n=2)
        pieces = await answer(worker, request)
        prompt = TINY.encode(text)
        assert len(prompt) > 130
        got = [entry for piece in pieces for entry in piece.prompt_logprobs]
        assert [entry.chosen.token_id for entry in got] == prompt[1:]
        assert b"".join(entry.chosen.token_bytes for entry in got) == text[1:].encode()
        assert [entry.chosen.logprob for entry in got] == [logprob(i) for i in prompt[1:]]
        assert pieces[0].HasField("start")
        first = next(i for i, piece in enumerate(pieces) if piece.token_ids)
        assert not any(piece.prompt_logprobs for piece in pieces[first:])
        assert all(len(piece.prompt_logprobs) <= 64 for piece in pieces)
        assert not any(piece.logprobs for piece in pieces)
        assert {piece.index for piece in pieces if piece.prompt_logprobs} == {0}


async def test_choices_have_entries_of_their_own(front: FrontMaker) -> None:
    """With n every choice's entries stand beside its own tokens."""
    async with front("--num-tokens=2") as worker:
        pieces = await answer(worker, asked("abc", max_tokens=5, logprobs=3, n=3))
        for index in range(3):
            own = [piece for piece in pieces if piece.index == index]
            assert b"".join(e.chosen.token_bytes for e in entries(own)) == b"abcab"
            assert all(len(entry.top) == 3 for entry in entries(own))
