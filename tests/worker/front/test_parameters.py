"""Every parameter through a real worker, with drafts: right values, at any cut, for each choice."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from processes import eventually
from tiny import byte_tokenizer
from worker_process import PROMPT, Worker, ids, text_of

from nightjar.seeds import choice_seed
from nightjar.v1 import generation_pb2 as pb
from worker.text.tokenizer import Tokenizer

TINY = Tokenizer(byte_tokenizer())
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 20}


def entries(pieces: list[pb.GenerateResponse]) -> list[pb.TokenLogprobs]:
    """Log-probabilities of an answer's tokens."""
    return [entry for piece in pieces for entry in piece.logprobs]


def test_exactly_as_many_tokens_as_asked_for(worker: Worker) -> None:
    """Wherever max_tokens cuts a block of accepted drafts: tokens, entries and usage agree."""
    whole = ids(list(worker.generate(max_tokens=9)))
    for number in range(1, 9):
        pieces = list(worker.generate(max_tokens=number, logprobs=0))
        assert ids(pieces) == whole[:number]
        assert len(entries(pieces)) == pieces[-1].usage.num_completion_tokens == number
        assert pieces[-1].finish_reason == pb.FINISH_REASON_LENGTH


def test_top_k_off_and_one(worker: Worker) -> None:
    """0 and -1 both switch it off; 1 is greedy at any temperature."""
    plain = ids(list(worker.generate(**SAMPLED)))
    assert ids(list(worker.generate(top_k=0, **SAMPLED))) == plain
    assert ids(list(worker.generate(top_k=-1, **SAMPLED))) == plain
    greedy = ids(list(worker.generate(max_tokens=20)))
    assert ids(list(worker.generate(top_k=1, **SAMPLED))) == greedy != plain


def test_the_smallest_temperatures_are_greedy(worker: Worker) -> None:
    """Down to the smallest double they equal temperature 0, and every log-probability is finite."""
    greedy = ids(list(worker.generate(max_tokens=12)))
    for temperature in (1e-4, 1e-5, 1e-6, 1e-8, 5e-324):
        asked = {"temperature": temperature, "seed": 5, "max_tokens": 12, "logprobs": 2}
        pieces = list(worker.generate(**asked))
        assert ids(pieces) == greedy
        assert all(math.isfinite(top.logprob) for entry in entries(pieces) for top in entry.top)


def test_each_choice_is_the_answer_to_its_own_seed(worker: Worker) -> None:
    """Ids, text and entries of choice i are those of n = 1 with its seed; usage is the sum."""
    pieces = list(worker.generate(n=3, logprobs=1, **SAMPLED))
    alone = [
        list(worker.generate(logprobs=1, **{**SAMPLED, "seed": choice_seed(11, i)}))
        for i in range(3)
    ]
    assert len({tuple(ids(one)) for one in alone}) == 3
    for index, expected in enumerate(alone):
        own = [piece for piece in pieces if piece.index == index]
        assert ids(own) == ids(expected)
        assert text_of(own) == text_of(expected)
        assert entries(own) == entries(expected)
    usage = pieces[-1].usage
    assert usage.num_prompt_tokens == alone[0][-1].usage.num_prompt_tokens
    assert usage.num_completion_tokens == 60
    assert usage.num_steps == sum(usage.gamma_histogram)


def test_each_choice_ends_for_its_own_reason(worker: Worker) -> None:
    """A stop string that one choice writes cuts that one; the others reach their length."""
    pieces = list(worker.generate(n=3, **SAMPLED))
    texts = [text_of([p for p in pieces if p.index == i]) for i in range(3)]
    stop = next(
        texts[1][i : i + 4]
        for i in range(4, len(texts[1]) - 4)
        if not any(texts[1][i : i + 4] in other for other in (texts[0], texts[2]))
    )
    pieces = list(worker.generate(n=3, stop=[stop], **SAMPLED))
    cut = [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
    assert [text_of([p for p in pieces if p.index == i]) for i in range(3)] == cut
    reasons = {piece.index: piece.finish_reason for piece in pieces if piece.finish_reason}
    length, stopped = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP
    assert reasons == {0: length, 1: stopped, 2: length}


def test_a_stop_string_counts_from_min_tokens_on(worker: Worker) -> None:
    """Up to the token that completes it the stop is honoured, beyond it the text goes on."""
    whole = list(worker.generate(max_tokens=24))
    token_ids, text = ids(whole), text_of(whole)
    stop = text[10:13]
    assert text.index(stop) == 10
    completes = next(k for k in range(25) if stop in TINY.decode(token_ids[:k]))
    for least in (0, completes - 1, completes):
        pieces = list(worker.generate(max_tokens=24, stop=[stop], min_tokens=least))
        assert (ids(pieces), text_of(pieces)) == (token_ids[:completes], text[:10])
    pieces = list(worker.generate(max_tokens=24, stop=[stop], min_tokens=completes + 1))
    rest = text.find(stop, 10 + 1)
    assert text_of(pieces) == (text if rest < 0 else text[:rest])
    assert len(ids(pieces)) > completes


@pytest.mark.parametrize("bytes_of", ["🦉", "日é"])
def test_parts_of_characters_are_bytes(worker: Worker, bytes_of: str) -> None:
    """Whatever order bytes come in: the text is the one-shot decode, entries have the raw bytes."""
    bias = dict.fromkeys(TINY.encode(bytes_of), 100.0)
    pieces = list(worker.generate(logit_bias=bias, logprobs=2, **{**SAMPLED, "max_tokens": 40}))
    assert set(ids(pieces)) <= set(bias)
    assert text_of(pieces) == TINY.decode(ids(pieces))
    raw = b"".join(entry.chosen.token_bytes for entry in entries(pieces))
    assert raw.decode(errors="replace") == text_of(pieces)
    assert {entry.chosen.token_bytes for entry in entries(pieces)} <= {
        bytes([byte]) for byte in bytes_of.encode()
    }


def test_the_prompts_entries_are_there_whatever_is_cached(worker: Worker) -> None:
    """One for each token but the first, the same when the prompt was computed before."""
    prompt = TINY.encode(PROMPT * 3)
    asked = {"text": PROMPT * 3, "max_tokens": 2, "prompt_logprobs": 2}
    answers = [list(worker.generate(**asked)) for _ in range(2)]
    found = [[entry for piece in one for entry in piece.prompt_logprobs] for one in answers]
    assert [entry.chosen.token_id for entry in found[0]] == prompt[1:]
    assert all(entry.chosen.logprob <= entry.top[0].logprob for entry in found[0])
    assert found[0] == found[1]


RESUMED: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 20},
    "all": {
        **SAMPLED,
        "min_tokens": 12,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {70: 1.5, 90: -2.0},
        "logprobs": 1,
    },
}


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_at_every_token(worker: Worker, name: str) -> None:
    """Ids, text, entries and reason follow as if nothing had happened, with drafts and a stop."""
    sampling = {"temperature": 0.0, **RESUMED[name]}
    plain = list(worker.generate(ignore_eos=False, **sampling))
    stop = text_of(plain)[-6:-3]
    asked = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(stop=[stop], **sampling))
    whole = list(worker.generation.Generate(asked, timeout=60))
    token_ids, text = ids(whole), text_of(whole)
    start = whole[0].start
    assert len(token_ids) > 12
    shown, num_sent = "", 0
    for piece in whole[:-1]:
        shown += piece.text
        num_sent += len(piece.token_ids)
        continuation = pb.Continuation(
            token_ids=token_ids[:num_sent],
            seed=start.seed,
            num_text_bytes_delivered=len(shown.encode()),
            attempt=1,
            arithmetic_fingerprint=start.arithmetic_fingerprint,
        )
        request = pb.GenerateRequest(
            text=PROMPT, sampling=asked.sampling, continuation=continuation
        )
        rest = list(worker.generation.Generate(request, timeout=60))
        assert ids(rest) == token_ids[num_sent:]
        assert shown + text_of(rest) == text
        assert entries(rest) == entries(whole)[num_sent:]
        assert rest[-1].finish_reason == whole[-1].finish_reason
        assert rest[-1].usage.num_completion_tokens == len(token_ids)
        assert rest[-1].usage.num_prompt_tokens == whole[-1].usage.num_prompt_tokens


def test_an_answer_that_had_ended_is_ended(worker: Worker) -> None:
    """Its last token was there but not its reason: nothing is generated, the reason comes."""
    whole = list(worker.generate(max_tokens=20))
    stop = ids(whole)[6]
    first = ids(whole).index(stop)
    asked = {"stop_token_ids": [stop], "max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(**asked))
    request.continuation.token_ids.extend(ids(whole)[: first + 1])
    request.continuation.attempt = 1
    request.continuation.arithmetic_fingerprint = whole[0].start.arithmetic_fingerprint
    (piece,) = worker.generation.Generate(request, timeout=60)
    assert not piece.token_ids
    assert piece.text == TINY.decode(ids(whole)[: first + 1])
    assert piece.finish_reason == pb.FINISH_REASON_STOP
    assert piece.usage.num_completion_tokens == first + 1
    assert piece.HasField("start")


def test_cancelled_after_every_message_beside_a_canary(worker: Worker) -> None:
    """Others' cancellations, with choices and all parameters, change no token of a neighbour."""
    alone = ids(list(worker.generate(max_tokens=120)))
    total = worker.status().num_total_blocks
    canary = worker.generate(max_tokens=120)
    got = list(next(iter(canary)).token_ids)
    for k in range(8):
        call = worker.generate("cancelled", n=1 + k % 3, **{**RESUMED["all"], "max_tokens": 200})
        for _ in range(k):
            next(call)
        call.cancel()
        with pytest.raises(grpc.RpcError):
            worker.generate(stop_token_ids=[325], min_tokens=1).next()
    got += ids(list(canary))
    assert got == alone
    eventually(lambda: worker.status().num_free_blocks == total, "every block is free", 10)
