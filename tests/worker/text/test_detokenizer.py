"""Streamed text: whole characters, nothing of a stop string, and the same as decoding at once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import tokenizers_like
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer

from worker.text.detokenizer import Detokenizer
from worker.text.tokenizer import Tokenizer

TINY = Tokenizer(byte_tokenizer())
FALLBACK = Tokenizer(tokenizers_like.byte_fallback())
METASPACE = Tokenizer(tokenizers_like.metaspace())
WORD_PIECE = Tokenizer(tokenizers_like.word_piece())


def byte_ids(data: bytes) -> list[int]:
    """The tiny tokenizer's single-byte tokens for `data`."""
    ids = {TINY.token_bytes(i): i for i in range(4, 260)}
    return [ids[bytes([byte])] for byte in data]


def stream(tokenizer: Tokenizer, ids: Sequence[int], stop: tuple[str, ...] = ()) -> list[str]:
    """The pieces of an answer, as the engine and the front read them."""
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.flush()]


def cut(text: str, stop: tuple[str, ...]) -> str:
    """`text` up to the stop string that is complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        done = [one for one in stop if text[:end].endswith(one)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, TINY.vocab_size - 1), max_size=60))
def test_byte_level_stream_is_the_one_shot_decode(ids: list[int]) -> None:
    """Any token ids of a byte-level tokenizer, invalid bytes included."""
    want = byte_tokenizer().decode(ids, skip_special_tokens=True)
    assert "".join(stream(TINY, ids)) == TINY.decode(ids) == want


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_smollm2_stream_is_the_one_shot_decode(
    smollm2_text: Tokenizer, data: st.DataObject
) -> None:
    """Real text and random ids of the default model's tokenizer."""
    text = data.draw(st.text(max_size=60))
    ids = data.draw(st.lists(st.integers(0, smollm2_text.vocab_size - 1), max_size=40))
    both = smollm2_text.encode(text) + ids
    want = smollm2_text._backend.decode(both, skip_special_tokens=True)
    assert "".join(stream(smollm2_text, both)) == smollm2_text.decode(both) == want


@pytest.mark.parametrize(
    "tokenizer", [FALLBACK, METASPACE, WORD_PIECE], ids=["fallback", "metaspace", "word piece"]
)
def test_other_families_stream_is_the_one_shot_decode(tokenizer: Tokenizer) -> None:
    """Pieces with ▁, byte fallback of whole characters, and word pieces, first tokens included."""
    rng = random.Random(1)
    plain = [i for i, t in tokenizer.vocabulary().items() if not t.startswith("<0x")]
    bytes_of = {t: i for i, t in tokenizer.vocabulary().items()}
    for _ in range(500):
        ids: list[int] = []
        for _ in range(rng.randrange(8)):
            if tokenizer is FALLBACK and rng.random() < 0.4:
                ids += [bytes_of[f"<0x{b:02X}>"] for b in rng.choice(" a\né日😀").encode()]
            else:
                ids.append(rng.choice(plain))
        want = tokenizer._backend.decode(ids, skip_special_tokens=True)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == want, ids


def test_invalid_fallback_bytes_leave_their_neighbours_alone() -> None:
    """A stray byte beside a whole character becomes one U+FFFD; the character stays."""
    ids = {t: i for i, t in FALLBACK.vocabulary().items()}
    got = stream(FALLBACK, [*(ids[f"<0x{b:02X}>"] for b in "é".encode() + b"\xff"), ids["a"]])
    assert got == ["", "é", "\ufffd", "a", ""]


def test_characters_are_never_split() -> None:
    """Every piece of an emoji of four tokens is empty but the last."""
    assert stream(TINY, byte_ids("🎉é".encode())) == ["", "", "", "🎉", "", "é", ""]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xf0\x9f a", "\ufffd a"),  # half an emoji, then " a"
        (b"\xf0\x9f", "\ufffd"),  # the answer ends in mid-character
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\xe6\x97\xe6\x97\xa5", "\ufffd日"),
        (b"\xc0\xaf", "\ufffd\ufffd"),  # overlong
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # a surrogate is no character
        ("\ufffd!".encode(), "\ufffd!"),  # the model meant U+FFFD
    ],
)
def test_invalid_bytes_become_one_mark(data: bytes, text: str) -> None:
    """Only genuinely invalid bytes become U+FFFD, once, and no later text is held back by them."""
    assert "".join(stream(TINY, byte_ids(data))) == text
    assert byte_tokenizer().decode(byte_ids(data)) == text


def test_special_tokens_show_nothing() -> None:
    """Special tokens and ids beyond the vocabulary add no text and disturb no character."""
    first, second = byte_ids("é".encode())
    assert stream(TINY, [first, 2, 99_999, second]) == ["", "", "", "é", ""]


@settings(deadline=None, max_examples=500)
@given(
    text=st.text("abé🎉", max_size=40),
    stop=st.lists(st.text("abé🎉", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_stops_cut_at_the_earliest_completed(text: str, stop: list[str]) -> None:
    """Overlapping stops, byte by byte: the text ends before the one completed first.

    At each token all that is shown lies before the stop, and what is held back is no longer
    than a stop string and an unfinished character.
    """
    stops = tuple(stop)
    want = cut(text, stops)
    detokenizer, shown, read = Detokenizer(TINY, stops), "", b""
    for token_id in byte_ids(text.encode()):
        shown += detokenizer.push(token_id)
        read += TINY.token_bytes(token_id)
        assert want.startswith(shown)
        if detokenizer.stopped:
            break
        so_far = read.decode(errors="ignore")
        ends = (so_far[i:] for i in range(len(so_far) + 1))  # longest first
        longest = next(end for end in ends if any(one.startswith(end) for one in stops))
        assert so_far == shown + longest
    assert detokenizer.stopped == (want != text or any(text.endswith(s) for s in stops))
    assert shown + detokenizer.flush() == want


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_stops_across_real_tokens(smollm2_text: Tokenizer, data: st.DataObject) -> None:
    """A stop cut out of real text, wherever the token borders lie, is never shown in part."""
    text = data.draw(st.text("ab \n.Thequickbrown日🎉", min_size=1, max_size=60))
    start = data.draw(st.integers(0, len(text) - 1))
    stop = (text[start : start + data.draw(st.integers(1, 8))],)
    assert "".join(stream(smollm2_text, smollm2_text.encode(text), stop)) == cut(text, stop)


def test_stop_is_reported_with_the_token_that_completes_it() -> None:
    """`stopped` turns true with that token and not before; afterwards nothing is shown."""
    detokenizer = Detokenizer(TINY, ("END",))
    ids = TINY.encode("ok EN") + TINY.encode("D more")
    shown = ""
    for token_id in ids:
        before = detokenizer.stopped
        shown += detokenizer.push(token_id)
        if detokenizer.stopped and not before:
            assert TINY.token_bytes(token_id).startswith(b"D")
    assert shown == "ok "
    assert detokenizer.stopped
    assert detokenizer.push(ids[0]) == detokenizer.flush() == ""


def test_text_held_for_a_stop_comes_at_the_end() -> None:
    """An answer that ends with the beginning of a stop string keeps that beginning."""
    detokenizer = Detokenizer(TINY, ("\n\nUser:",))
    shown = "".join(detokenizer.push(i) for i in TINY.encode("fine\n\nUse"))
    assert shown == "fine"
    assert detokenizer.flush() == "\n\nUse"
    assert not detokenizer.stopped
    assert detokenizer.flush() == ""


def test_stop_completed_by_the_last_mark() -> None:
    """A cut character's U+FFFD, which only the end brings, can complete a stop too."""
    detokenizer = Detokenizer(TINY, ("x\ufffd",))
    assert [detokenizer.push(i) for i in byte_ids(b"ax\xf0\x9f")] == ["a", "", "", ""]
    assert detokenizer.flush() == ""
    assert detokenizer.stopped


def test_long_hostile_answers_stay_cheap() -> None:
    """50,000 invalid bytes, and a stop that almost matches at every place, cost linear time."""
    invalid = byte_ids(b"\x9f")[0]
    assert "".join(stream(TINY, [invalid] * 50_000)) == "\ufffd" * 50_000
    letter = byte_ids(b"a")[0]
    stops = tuple("a" * n + "b" for n in range(240, 256))
    assert "".join(stream(TINY, [letter] * 10_000, stops)) == "a" * 10_000


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("abé", max_size=30),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    least=st.integers(0, 30),
)
def test_stops_before_the_least_number_of_tokens_are_text(
    text: str, stop: list[str], least: int
) -> None:
    """A stop counts where the token that completes it is the least number's last or later.

    What is shown is then cut before it, although it began earlier; nothing of it was shown.
    """
    ids, stops = byte_ids(text.encode()), tuple(stop)
    want, num_read = text, 0
    for end in range(1, len(text) + 1):
        done = [one for one in stops if text[:end].endswith(one)]
        if done and len(text[:end].encode()) >= least:
            want, num_read = text[: end - max(map(len, done))], len(text[:end].encode())
            break
    detokenizer, shown = Detokenizer(TINY, stops, least), ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push(token_id)
        assert want.startswith(shown)
        if detokenizer.stopped:
            assert count == num_read
            assert detokenizer.stop_string in stops
            break
    assert shown + detokenizer.flush() == want
    assert detokenizer.stopped == (num_read > 0)


def test_a_token_without_text_counts_for_the_least_number() -> None:
    """Special tokens are tokens of the answer too."""
    detokenizer = Detokenizer(TINY, ("b",), min_tokens=3)
    assert detokenizer.push(byte_ids(b"a")[0]) == "a"
    assert detokenizer.push(2) == ""
    assert detokenizer.push(byte_ids(b"b")[0]) == ""
    assert detokenizer.stopped
