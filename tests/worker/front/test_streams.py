"""Buffers between the engine and slow readers: each bounded, and all together."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import fake_engine
import pytest

from nightjar.errors import Overloaded
from worker.front import streams
from worker.front.admission import Admission
from worker.front.streams import TokenStream, Unread
from worker.messages import Logprobs

K = 20


def tokens(number: int) -> memoryview:
    """So many token ids."""
    return memoryview(struct.pack(f"<{number}i", *range(number)))


def scored(number: int) -> Logprobs:
    """Columns of so many tokens with 20 alternatives each."""
    few, many = bytes(4 * number), bytes(4 * K * number)
    return Logprobs(request_id=1, num_top=K, chosen=few, top_ids=many, top=many)


def stream(unread: Unread, **fields: object) -> TokenStream:
    """A stream that nobody reads."""
    return TokenStream(1, lambda _: None, unread=unread, **fields)  # type: ignore[arg-type]


def test_log_probabilities_count_by_their_bytes() -> None:
    """168 bytes a token beside its four: a stream ends when they exceed its bound, and is freed."""
    unread = Unread()
    slow = stream(unread, max_unread_bytes=10 * 168)
    assert slow.push(tokens(9), scored(9))
    assert unread.num_bytes == 9 * 168
    assert not slow.push(tokens(2), scored(2))
    assert unread.num_bytes == 0
    with pytest.raises(Overloaded, match="1848 bytes of it were left unread; at most 1680"):
        slow.take()


def test_a_read_frees_what_it_takes() -> None:
    """The buffer of a reader that keeps up is empty, and the sum knows."""
    unread = Unread()
    quick = stream(unread, max_unread_bytes=400)
    for _ in range(50):
        assert quick.push(tokens(60))
        assert quick.take().token_ids == list(range(60))
    assert unread.num_bytes == 0
    quick.push(tokens(60))
    quick.close()
    assert unread.num_bytes == 0


async def test_a_late_reader_takes_part_by_part() -> None:
    """Much unread is taken in bounded parts, in order, the end with the last; the rest counts."""
    unread = Unread()
    late = stream(unread)
    late.push(tokens(2 * streams.MAX_TAKEN_TOKENS + 10))
    late.finish(fake_engine.finished(1, "length", 1))
    read: list[int] = []
    for left in (streams.MAX_TAKEN_TOKENS + 10, 10, 0):
        batch = await late.read()
        read += batch.token_ids
        assert unread.num_bytes == 4 * left
        assert (batch.finished is None) == (left > 0)
    assert read == list(range(2 * streams.MAX_TAKEN_TOKENS + 10))


async def test_log_probabilities_go_with_their_tokens() -> None:
    """A part of an answer holds the log-probabilities of its tokens, and frees their room."""
    unread = Unread()
    late = stream(unread)
    late.push_prompt(scored(5))
    for _ in range(500):
        late.push(tokens(3), scored(3))
    late.wake()
    batch = await late.read()
    assert len(batch.token_ids) == 3 * len(batch.logprobs) >= streams.MAX_TAKEN_TOKENS
    assert len(batch.token_ids) < streams.MAX_TAKEN_TOKENS + 3
    assert len(batch.prompt_logprobs) == 1
    rest = await late.read()
    assert len(rest.token_ids) == 1500 - len(batch.token_ids) == 3 * len(rest.logprobs)
    assert rest.prompt_logprobs == []
    assert unread.num_bytes == 0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bounds that tests can reach."""
    monkeypatch.setattr(streams, "MAX_ALL_UNREAD_BYTES", 4000)
    monkeypatch.setattr(streams, "UNREAD_SHARE_BYTES", 400)
    return iter(())


@pytest.mark.usefixtures("small")
def test_when_all_is_full_only_those_beyond_their_share_end() -> None:
    """The largest hoarder is ended by its next token; a stream within its share goes on."""
    unread = Unread()
    hoarder, modest = stream(unread), stream(unread)
    assert hoarder.push(tokens(990))  # 3,960 bytes
    assert modest.push(tokens(50))  # beyond the sum's bound, within its own share
    assert not hoarder.push(tokens(1))
    assert modest.push(tokens(40))
    assert len(modest.take().token_ids) == 90


def test_a_prompt_is_no_slow_readers_fault() -> None:
    """Its entries may wait beside the bound for tokens: they were admitted with the request."""
    unread = Unread()
    asked = stream(unread, max_unread_bytes=168)
    assert asked.push_prompt(scored(100))
    assert asked.push(tokens(1), scored(1))
    batch = asked.take()
    assert [len(chunk.chosen) for chunk in batch.prompt_logprobs] == [400]
    assert len(batch.logprobs) == len(batch.token_ids) == 1


async def test_a_complete_answer_that_is_unread_takes_no_place() -> None:
    """Its place in the queue is free when the engine has ended it, whenever its client reads."""
    admission = Admission(1, 0, 10)
    ticket = admission.enter()
    ticket.wait(7)
    assert admission.num_waiting_tokens == 7
    unread = stream(Unread(), place=ticket.places[0])
    unread.push(tokens(1))
    assert (admission.num_waiting_tokens, admission.num_live) == (0, 1)
    unread.finish(fake_engine.finished(1, "length", 1))
    assert (admission.num_live, admission.num_open) == (0, 1)
    admission.enter().leave()
    ticket.leave()
    assert (admission.num_live, admission.num_open) == (0, 0)
