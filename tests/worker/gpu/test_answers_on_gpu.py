"""Whole answers on a GPU, in bfloat16: nothing but the request decides them, to the last bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from device_engine import DeviceEngine, InProcessAgent

from worker.config import WorkerConfig
from worker.messages import SamplingParams
from worker.model.build import Models, build_models
from worker.model.device import place
from worker.model.fetch import default_draft

pytestmark = pytest.mark.gpu
VOCAB = 49152
LENGTH = 48
CONFIG = WorkerConfig(
    device="cuda",
    arithmetic="exact",
    build="eager",
    num_blocks=400,
    max_num_seqs=16,
    max_num_batched_tokens=192,
    max_catchup_tokens=64,
    max_model_len=512,
    max_gamma=8,
    gamma=0,
)
Asked = dict[int, tuple[list[int], SamplingParams]]


def silent(stage: str, detail: str) -> None:
    """Progress that nobody reads."""


def small_folder() -> Path:
    """The default draft: a small model with real weights, here a target too."""
    folder = default_draft("smollm2-135m")
    assert folder is not None
    return folder


@pytest.fixture(scope="module", params=["small eager", "smollm2 eager", "smollm2 compiled"])
def models(request: pytest.FixtureRequest) -> Iterator[Models]:
    """The default draft as its own target, and SmolLM2 drafted for by it."""
    folder = small_folder()
    name, build = request.param.split()
    target = folder if name == "small" else request.getfixturevalue("smollm2")
    config = dataclasses.replace(CONFIG, build="eager" if build == "eager" else "auto")
    made = build_models(config, target, folder, silent, place("cuda"))
    assert made.build == build
    yield made
    made.close()
    torch.cuda.empty_cache()


def asked(seed: int, count: int) -> Asked:
    """Random prompts, some with a common beginning; greedy and sampled."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(70)]
    requests: Asked = {}
    for number in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 33, 150, 260]))]
        temperature = rng.choice([0.0, 0.7, 1.0])
        sampling = SamplingParams(
            temperature=temperature,
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 40]),
            seed=rng.getrandbits(64),
            max_tokens=LENGTH,
            ignore_eos=True,
        )
        requests[number] = (stem + own if number % 2 else own, sampling)
    return requests


def answers(config: WorkerConfig, models: Models, requests: Asked) -> dict[int, list[int]]:
    """All requests together."""
    engine = DeviceEngine(config, models, vocab_size=VOCAB)
    for number, (prompt, sampling) in requests.items():
        engine.submit(number, prompt, sampling)
    found = engine.run(check=False)
    assert all(len(answer.token_ids) == LENGTH for answer in found.values())
    return {number: answer.token_ids for number, answer in found.items()}


@pytest.fixture(scope="module")
def alone(models: Models) -> dict[int, list[int]]:
    """Each request by itself at gamma 0, without a prefix cache."""
    config = dataclasses.replace(CONFIG, prefix_cache=False)
    return {
        number: answers(config, models, {number: request})[number]
        for number, request in asked(1, 12).items()
    }


@pytest.mark.parametrize("gamma", range(9))
def test_every_gamma_gives_the_answers_of_requests_alone(
    models: Models, alone: dict[int, list[int]], gamma: int
) -> None:
    """Twelve requests in one batch, with prefix hits, at gamma 0 to 8."""
    config = dataclasses.replace(CONFIG, gamma=gamma)
    assert answers(config, models, asked(1, 12)) == alone


def test_a_target_that_drafts_for_itself_accepts_all(models: Models) -> None:
    """Draft and target are one function of the same tokens, to the bit."""
    if models.draft_identity != models.target_identity:
        pytest.skip("the draft is another model")
    engine = DeviceEngine(dataclasses.replace(CONFIG, gamma=4), models, vocab_size=VOCAB)
    for number, (prompt, sampling) in asked(2, 8).items():
        engine.submit(number, prompt, sampling)
    for answer in engine.run(check=False).values():
        assert answer.finished is not None
        usage = answer.finished.usage
        assert usage.num_accepted_tokens == usage.num_draft_tokens > 0


def test_offload_and_reload_while_gamma_wanders_change_no_answer(
    models: Models, alone: dict[int, list[int]]
) -> None:
    """The draft leaves and returns again and again, blocks move, gamma changes at every step."""
    engine = DeviceEngine(dataclasses.replace(CONFIG, gamma=0), models, vocab_size=VOCAB)
    agent = InProcessAgent(engine, models)
    blocks = engine.engine.scheduler.blocks
    assert blocks.reserve(blocks.num_free - 150) is not None  # so that rows reach into the tail
    rng = random.Random(3)
    requests = asked(1, 12)
    waiting = list(requests)
    turns = 0
    while waiting or engine.engine.scheduler.has_work or engine.channel.inbox:
        turns += 1
        assert turns < 5000
        if waiting and rng.random() < 0.2:
            number = waiting.pop(0)
            engine.submit(number, *requests[number])
        engine.set_gamma(rng.choice([0, 0, 2, 5, 8]))
        if turns % 12 == 0:
            engine_is = engine.engine.memory.elastic.residency
            agent.ask("expand" if engine_is == "resident" else "contract")
        engine.engine.turn()
        engine.engine.scheduler.check_integrity()
        agent.work()
    elastic = engine.engine.memory.elastic
    while elastic.residency != "resident":  # the models are others' too
        turns += 1
        assert turns < 6000
        if elastic.residency == "offloaded":
            agent.ask("contract")
        engine.engine.turn()
        agent.work()
    counters = elastic.counters
    assert counters.num_expansions > 0
    assert counters.num_contractions > 0
    assert {n: answer.token_ids for n, answer in engine.answers().items()} == alone


def test_preemption_changes_no_answer(models: Models, alone: dict[int, list[int]]) -> None:
    """Rows that the pool had no room for are recomputed to the same tokens."""
    config = dataclasses.replace(CONFIG, gamma=3)
    engine = DeviceEngine(config, models, vocab_size=VOCAB)
    for number, (prompt, sampling) in asked(1, 12).items():
        engine.submit(number, prompt, sampling)
    engine.preempt(num_rows=4)
    found = engine.run(check=False, max_turns=5000)
    assert {n: answer.token_ids for n, answer in found.items()} == alone


def test_an_exact_worker_runs_compiled_too() -> None:
    """The compiled forward keeps the same promise."""
    folder = small_folder()
    config = dataclasses.replace(CONFIG, build="auto")
    models = build_models(config, folder, folder, silent, place("cuda"))
    try:
        assert models.build == "compiled"
        requests = asked(4, 6)
        one = {n: answers(config, models, {n: request})[n] for n, request in requests.items()}
        for gamma in (1, 4, 8):
            together = answers(dataclasses.replace(config, gamma=gamma), models, requests)
            assert together == one
    finally:
        models.close()
        torch.cuda.empty_cache()
