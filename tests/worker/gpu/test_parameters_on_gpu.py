"""What only hardware tells of parameters: bits in bfloat16 at every gamma, and what they cost."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterator

import pytest
import torch
from device_engine import DeviceEngine
from engine_rig import Answer
from sample_calls import inputs_of, params

from worker.config import WorkerConfig
from worker.kernels.logprobs import REPORT_WIDTH, ReportScratch, report_rows
from worker.kernels.processors import NUM_ASKED, Asked, Processing, marks_width
from worker.kernels.sampling import SampleScratch, sample_rows
from worker.messages import SamplingParams
from worker.model.build import Models, build_models
from worker.model.device import place
from worker.model.fetch import default_draft

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
VOCAB = 49152
LENGTH = 40
EOS = (2,)
CONFIG = WorkerConfig(
    device="cuda",
    arithmetic="exact",
    build="eager",
    num_blocks=400,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_catchup_tokens=64,
    max_model_len=512,
    max_gamma=5,
    gamma=0,
)
Requests = dict[int, tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def models(smollm2: object) -> Iterator[Models]:
    """SmolLM2 and its draft, in bfloat16."""
    draft = default_draft("smollm2-135m")
    made = build_models(CONFIG, smollm2, draft, lambda stage, detail: None, place("cuda"))  # type: ignore[arg-type]
    yield made
    made.close()


def asked(seed: int, count: int) -> Requests:
    """Requests that set all there is to set, one in four nothing; some prompts are long."""
    rng = random.Random(seed)
    requests: Requests = {}
    for number in range(count):
        asking = number % 4 != 3
        bias = {rng.randrange(VOCAB): rng.uniform(-8, 8) for _ in range(rng.choice([3, 300]))}
        requests[number] = (
            [rng.randrange(VOCAB) for _ in range(rng.choice([2, 9, 60, 300]))],
            SamplingParams(
                temperature=rng.choice([0.0, 0.8, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 40]),
                min_p=rng.choice([0.0, 0.02]),
                seed=rng.getrandbits(64),
                max_tokens=LENGTH,
                ignore_eos=not asking,
                min_tokens=rng.choice([0, 7, LENGTH]) if asking else 0,
                repetition_penalty=rng.choice([1.0, 1.05, 1.5, 0.8]) if asking else 1.0,
                presence_penalty=rng.choice([0.0, 0.9, -0.5]) if asking else 0.0,
                frequency_penalty=rng.choice([0.0, 0.6, -0.3]) if asking else 0.0,
                logit_bias=tuple(sorted(bias.items())) if asking else (),
                num_logprobs=rng.choice([-1, 0, 5, 20]),
                num_prompt_logprobs=rng.choice([-1, -1, 0, 3]),
            ),
        )
    return requests


def answers(config: WorkerConfig, models: Models, requests: Requests) -> dict[int, Answer]:
    """All requests together."""
    engine = DeviceEngine(config, models, vocab_size=VOCAB, eos=EOS)
    for number, (prompt, sampling) in requests.items():
        engine.submit(number, prompt, sampling)
    return engine.run(check=False, max_turns=6000)


@pytest.fixture(scope="module")
def alone(models: Models) -> dict[int, Answer]:
    """Each request by itself at gamma 0, without a prefix cache."""
    config = dataclasses.replace(CONFIG, prefix_cache=False)
    return {
        number: answers(config, models, {number: request})[number]
        for number, request in asked(1, 20).items()
    }


def check(found: dict[int, Answer], alone: dict[int, Answer]) -> None:
    """Tokens, ends and log-probabilities are equal to the bit."""
    for number, answer in alone.items():
        got = found[number]
        assert got.token_ids == answer.token_ids
        assert got.finished is not None
        assert answer.finished is not None
        assert got.finished.reason == answer.finished.reason
        assert got.logprobs == answer.logprobs
        assert got.prompt_logprobs == answer.prompt_logprobs


@pytest.mark.parametrize("gamma", range(6))
def test_every_gamma_gives_the_answers_of_requests_alone(
    models: Models, alone: dict[int, Answer], gamma: int
) -> None:
    """Twenty requests over sixteen slots, at gamma 0 to 5; log-probabilities to the bit too."""
    found = answers(dataclasses.replace(CONFIG, gamma=gamma), models, asked(1, 20))
    check(found, alone)
    for number, (prompt, sampling) in asked(1, 20).items():
        got = found[number]
        num_tokens = len(got.token_ids) if sampling.num_logprobs >= 0 else 0
        num_prompt = len(prompt) - 1 if sampling.num_prompt_logprobs >= 0 else 0
        assert len(got.logprobs.chosen) == num_tokens
        assert len(got.prompt_logprobs.chosen) == num_prompt


def test_drafts_above_gamma_and_preemption_change_nothing(
    models: Models, alone: dict[int, Answer]
) -> None:
    """The likeliest of more drafts are verified; rows without room are recomputed."""
    engine = DeviceEngine(CONFIG, models, vocab_size=VOCAB, eos=EOS)
    engine.set_gamma(2, num_extra_drafts=2)
    for number, (prompt, sampling) in asked(1, 20).items():
        engine.submit(number, prompt, sampling)
    engine.preempt(num_rows=4)
    check(engine.run(check=False, max_turns=6000), alone)


def microseconds(call: Callable[[], None], times: int = 20) -> float:
    """Median device time of a call in a graph of `times`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    seen = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seen.append(start.elapsed_time(end) * 1000 / times)
    return statistics.median(seen)


@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_what_parameters_cost(num_rows: int) -> None:
    """A step whose rows ask for nothing pays for one launch that ends at once, below 5 us.

    Rows that are processed, or reported with 5 or 20 alternatives, pay for themselves alone.
    """
    vocab_size = 152_064
    generator = torch.Generator(CUDA).manual_seed(3)
    logits = torch.randn(num_rows, vocab_size, generator=generator, device=CUDA) * 2
    logits = logits.to(torch.bfloat16)
    rows = [params(seed=i, temperature=0.8, top_p=0.95) for i in range(num_rows)]
    plain = inputs_of(rows, list(range(num_rows)), [9] * num_rows, CUDA)
    one = torch.zeros(num_rows, dtype=torch.int32, device=CUDA)
    state = torch.zeros(num_rows, marks_width(vocab_size), dtype=torch.int32, device=CUDA)
    state[:, :2000] = 1
    asked_of_all = torch.zeros(NUM_ASKED, num_rows, dtype=torch.int32, device=CUDA)
    asked_of_all.view(torch.float32)[Asked.INVERSE : Asked.FREQUENCY] = 1.0
    slots = torch.arange(num_rows, dtype=torch.int32, device=CUDA)
    processing = Processing(
        asked=asked_of_all,
        slots=slots,
        places=one + 3,
        positions=one + 9,
        marks=state,
        tokens=torch.zeros(num_rows, 64, dtype=torch.int32, device=CUDA),
    )
    inputs = dataclasses.replace(plain, processing=processing)
    scratch = SampleScratch.allocate(num_rows, vocab_size, CUDA)
    ids = torch.zeros(num_rows, dtype=torch.int32, device=CUDA)
    own = ReportScratch.allocate(num_rows, vocab_size, CUDA)
    reports = torch.zeros(num_rows, REPORT_WIDTH, dtype=torch.int32, device=CUDA)

    def draws() -> None:
        sample_rows(logits, inputs, scratch, ids, vocab_size=vocab_size)

    def reports_() -> None:
        report_rows(
            logits, slots, (slots, one), processing, own, ids, reports, vocab_size=vocab_size
        )

    asked_of_all[Asked.NUM_TOP], asked_of_all[Asked.REPORT] = -1, slots
    took = {"sampled": microseconds(draws), "not reported": microseconds(reports_)}
    asked_of_all[Asked.CHANGES] = 1
    took["processed"] = microseconds(draws)
    for top in (0, 5, 20):
        asked_of_all[Asked.NUM_TOP] = top
        took[f"{top} reported"] = microseconds(reports_)
    print(f"{num_rows} rows of {vocab_size}, us: { {k: round(v, 1) for k, v in took.items()} }")
    assert took["not reported"] < 5
    assert took["processed"] < took["sampled"] + 100 + 8 * num_rows
    assert took["20 reported"] < 80 + 3 * num_rows
