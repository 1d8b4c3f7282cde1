"""The choice of a worker, as a function of what is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import GatewayConfig
from gateway.prompt_beginning import request_facts
from gateway.registry import Status, smoothed_gamma
from gateway.router import choose, make_policy
from gateway.routing.facts import Policy, RequestFacts, WorkerLoad, within_bound
from gateway.routing.least_loaded import LeastLoaded
from gateway.routing.prefix_affinity import KEY_BYTES, PrefixAffinity
from gateway.routing.speculation_aware import SpeculationAware, runs_at_zero
from nightjar.v1 import generation_pb2 as pb

COUNTS = st.integers(0, 50)
LOADS = st.builds(
    WorkerLoad,
    address=st.text("abcdefgh", min_size=1, max_size=4),
    model=st.sampled_from(["m", "other"]),
    ready=st.booleans(),
    num_waiting=COUNTS,
    num_running=COUNTS,
    num_dispatched=st.integers(-50, 50),
    num_free_blocks=COUNTS,
    num_total_blocks=COUNTS,
    max_gamma=st.integers(0, 5),
    gamma=st.none() | st.floats(0, 5),
    acceptance_rate=st.floats(0, 1),
    planner_connected=st.booleans(),
    fingerprint=st.sampled_from(["", "f", "g"]),
)
WORKERS = st.lists(LOADS, max_size=6, unique_by=lambda load: load.address)
FACTORS = st.floats(1, 4)
BEGINNINGS = st.binary(max_size=3).map(lambda start: start * 500)  # none, or one to three keys
POLICIES = st.one_of(
    st.just(LeastLoaded()), FACTORS.map(PrefixAffinity), FACTORS.map(SpeculationAware)
)


def worker(address: str = "a", **changes: object) -> WorkerLoad:
    """An idle worker."""
    idle = WorkerLoad(
        address=address,
        model="m",
        ready=True,
        num_waiting=0,
        num_running=0,
        num_dispatched=0,
        num_free_blocks=64,
        num_total_blocks=64,
        max_gamma=5,
        planner_connected=True,
    )
    return replace(idle, **changes)  # type: ignore[arg-type]


def prompt(text: str) -> RequestFacts:
    """Facts of a text request."""
    return request_facts(pb.GenerateRequest(text=text))


def fill(policy: Policy, workers: list[WorkerLoad], requests: list[RequestFacts]) -> list[str]:
    """Send requests that never end; returns where each went."""
    known = {w.address: w for w in workers}
    went = []
    for request in requests:
        chosen = policy.choose(request, list(known.values()))
        known[chosen.address] = replace(chosen, num_dispatched=chosen.num_dispatched + 1)
        went.append(chosen.address)
    return went


# ---- all policies ----------------------------------------------------------------------


@given(
    POLICIES,
    WORKERS,
    st.sampled_from(["", "m"]),
    st.sampled_from(["", "f"]),
    st.sets(st.sampled_from("abcdefgh")),
)
def test_choice_fits(
    policy: Policy, workers: list[WorkerLoad], model: str, fingerprint: str, excluded: set[str]
) -> None:
    """A choice is ready, has model and arithmetic, is not excluded; there is one if any fits."""
    fitting = [
        worker
        for worker in workers
        if worker.ready
        and worker.address not in excluded
        and model in ("", worker.model)
        and fingerprint in ("", worker.fingerprint)
    ]
    facts = prompt("x" * 300)
    chosen = choose(policy, facts, workers, model=model, fingerprint=fingerprint, excluded=excluded)
    assert (chosen in fitting) if fitting else chosen is None


@given(POLICIES, BEGINNINGS, WORKERS, st.randoms(use_true_random=False))
def test_choice_does_not_depend_on_order(
    policy: Policy, beginning: bytes, workers: list[WorkerLoad], random: object
) -> None:
    """The order in which workers are listed never matters."""
    shuffled = list(workers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    facts = RequestFacts(beginning=beginning)
    assert choose(policy, facts, workers, model="", excluded=()) == choose(
        policy, facts, shuffled, model="", excluded=()
    )


@given(FACTORS, WORKERS.filter(bool))
def test_the_least_loaded_worker_is_within_the_bound(
    factor: float, workers: list[WorkerLoad]
) -> None:
    """However the loads lie, one more request fits somewhere: where load is least."""
    assert LeastLoaded().choose(RequestFacts(), workers) in within_bound(workers, factor)


@given(
    st.sampled_from([1.0, 1.25, 2.0]),
    st.lists(st.sampled_from("ab").map(lambda letter: prompt(letter * 2000)), max_size=60),
    st.lists(st.integers(1, 90), min_size=1, max_size=5),
)
def test_load_bound_holds(factor: float, requests: list[RequestFacts], sizes: list[int]) -> None:
    """Of requests that all begin alike no worker gets more than its share times the factor."""
    workers = [worker(f"w{i}", num_total_blocks=size) for i, size in enumerate(sizes)]
    went = fill(PrefixAffinity(factor), workers, requests)
    for i, size in enumerate(sizes):
        # Below the real bound plus one is at most the bound rounded up, as in the paper.
        assert went.count(f"w{i}") < factor * len(went) * size / sum(sizes) + 1


@pytest.mark.parametrize("policy", [LeastLoaded(), SpeculationAware(1.25)])
def test_requests_in_flight_count_before_a_status_shows_them(policy: Policy) -> None:
    """A burst between two probes is spread, because what was sent counts at once."""
    workers = [worker("a"), worker("b"), worker("c")]
    went = fill(policy, workers, [RequestFacts()] * 9)
    assert sorted(went) == list("aaabbbccc")


def test_policies_by_name() -> None:
    """Each name of the configuration makes its policy, and affinity is the default."""
    config = GatewayConfig()
    assert isinstance(make_policy(config.routing, config.routing_load_factor), PrefixAffinity)
    assert isinstance(make_policy("least_loaded", 1.25), LeastLoaded)
    assert isinstance(make_policy("speculation_aware", 1.25), SpeculationAware)


# ---- least loaded ----------------------------------------------------------------------


@given(WORKERS.filter(bool))
def test_least_loaded(workers: list[WorkerLoad]) -> None:
    """No worker has less load than the choice, and of equal ones none more free blocks."""
    chosen = LeastLoaded().choose(RequestFacts(), workers)
    assert all(chosen.load <= other.load for other in workers)
    ties = [other for other in workers if other.load == chosen.load]
    assert chosen.num_free_blocks == max(other.num_free_blocks for other in ties)


def test_a_larger_pool_takes_more_requests() -> None:
    """Load is counted per block: twice the pool may hold twice the requests."""
    large = worker("large", num_running=3, num_total_blocks=128)
    small = worker("small", num_running=2)
    assert LeastLoaded().choose(RequestFacts(), [small, large]) == large


# ---- prefix affinity -------------------------------------------------------------------


@given(st.binary(min_size=256, max_size=300), st.integers(2, 8), st.data())
def test_a_removed_worker_moves_only_its_own_prompts(
    beginning: bytes, num_workers: int, data: st.DataObject
) -> None:
    """Without load a prompt changes its worker only if that one went, or a new one came."""
    workers = [worker(f"10.0.0.{i}:50051") for i in range(num_workers)]
    gone = data.draw(st.sampled_from(workers))
    policy, facts = PrefixAffinity(1.25), RequestFacts(beginning=beginning)
    before = policy.choose(facts, workers)
    after = policy.choose(facts, [w for w in workers if w != gone])
    assert after != gone
    assert before in (after, gone)


def test_prompts_are_spread_evenly() -> None:
    """Unlike prompts find unlike workers: of 3000 each of three gets a third, within 10 %."""
    workers = [worker(f"10.0.0.{i}:50051") for i in range(3)]
    policy = PrefixAffinity(1.25)
    chosen = [policy.choose(prompt(f"{i} ".ljust(256)), workers).address for i in range(3000)]
    counts = [chosen.count(w.address) for w in workers]
    assert all(900 < count < 1100 for count in counts)


def test_turns_of_a_conversation_stay_together() -> None:
    """A prompt that grows, or that shares its first 256 bytes alone, keeps its worker."""
    workers = [worker(address) for address in "abcde"]
    policy, system = PrefixAffinity(1.25), "You are a helpful bird. " * 11
    texts = [system + more for more in ("", "hello", "hello. " * 200, "bye. " * 2000)]
    assert len({policy.choose(prompt(text), workers).address for text in texts}) == 1


@pytest.mark.parametrize("repeats", [1, 500])
def test_what_spills_over_stays_together(repeats: int) -> None:
    """While the home of a beginning is full, prompts alike for longer share a worker too."""
    system, policy = "s" * 256, PrefixAffinity(1.0)
    workers = [worker(address) for address in "abcdef"]
    home = policy.choose(prompt(system), workers).address
    full = [replace(w, num_running=9 if w.address == home else 0) for w in workers]
    seen = {}
    for topic in range(24):
        shared = system + f"topic {topic} ".ljust(768)
        same = [prompt(shared + f"question {i} " * repeats) for i in range(4)]
        went = {policy.choose(facts, full).address for facts in same}
        assert len(went) == 1
        seen[topic] = went.pop()
    assert home not in seen.values()
    assert len(set(seen.values())) == 5


def test_short_prompts_go_to_the_least_loaded() -> None:
    """A prompt without 256 bytes has no beginning worth keeping."""
    workers = [worker("a", num_running=1), worker("b")]
    chosen = {PrefixAffinity(4.0).choose(prompt(f"{i}"), workers).address for i in range(50)}
    assert chosen == {"b"}


@pytest.mark.parametrize("length", [0, 1, 63, 64, 2000])
def test_beginning_of_token_ids(length: int) -> None:
    """64 token ids are a key of 256 bytes; beyond 1024 ids nothing more is looked at."""
    tokens = pb.TokenPrompt(token_ids=range(length))
    found = request_facts(pb.GenerateRequest(tokens=tokens)).beginning
    assert len(found) == min(4 * length, max(KEY_BYTES))
    assert found[4:8] in (b"", b"\x01\0\0\0")


def test_beginning_of_chats_and_texts() -> None:
    """A chat begins with its first messages; bytes count, not characters; none is fine."""

    def chat(*pairs: tuple[str, str]) -> bytes:
        messages = [pb.ChatMessage(role=role, content=content) for role, content in pairs]
        return request_facts(pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages))).beginning

    first = ("system", "be brief " * 40)
    assert chat(first) == chat(first, ("user", "hi"))[: len(chat(first))]
    assert chat(("system", "ab")) != chat(("system", "a"), ("user", "b"))
    assert len(chat(*[("user", "")] * 5000)) == max(KEY_BYTES)
    assert len(prompt("é" * 5000).beginning) == max(KEY_BYTES)
    assert request_facts(pb.GenerateRequest()).beginning == b""


# ---- speculation aware -----------------------------------------------------------------


def chosen_of(*workers: WorkerLoad) -> str:
    """Address that speculation-aware placement chooses."""
    return SpeculationAware(1.25).choose(RequestFacts(), workers).address


def test_batches_at_gamma_0_are_filled() -> None:
    """A larger batch that drafts nothing is preferred to a smaller one that barely drafts."""
    plain, drafting = worker("p", num_running=10, gamma=0.0), worker("d", num_running=9, gamma=1.0)
    assert chosen_of(plain, drafting) == "p"
    assert chosen_of(plain, replace(drafting, gamma=0.2)) == "d"  # both at 0: the smaller
    assert chosen_of(plain, replace(drafting, gamma=3.0)) == "d"  # far from 0: has room


def test_workers_of_unknown_gamma_are_neither_filled_nor_spared() -> None:
    """Beside a batch at 0 one that cannot draft, or has not told, is chosen by its load."""
    plain, drafting = worker("p", num_running=10, gamma=0.0), worker("d", num_running=8, gamma=1.0)
    unable = worker("u", num_running=9, gamma=0.0, max_gamma=0)
    assert chosen_of(plain, drafting, unable) == "u"
    assert chosen_of(plain, drafting, replace(unable, gamma=None, max_gamma=5)) == "u"
    assert chosen_of(plain, drafting, replace(unable, num_running=11)) == "p"


def test_filling_is_bounded() -> None:
    """At 1.25 times its share a batch at gamma 0 is full, and the one that drafts gets more."""
    workers = [worker("p", num_running=8, gamma=0.0), worker("d", num_running=8, gamma=1.0)]
    went = fill(SpeculationAware(1.25), workers, [RequestFacts()] * 64)
    assert went[0] == "p"
    assert (8 + went.count("p")) / 80 == pytest.approx(0.625, abs=0.02)


def test_an_idle_worker_comes_first() -> None:
    """The gamma of an idle worker's last step tells nothing; its emptiness does."""
    plain = worker("p", num_running=1, gamma=0.0)
    assert chosen_of(plain, worker("i", num_dispatched=1, gamma=3.0), worker("j")) == "j"


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({"gamma": 0.0}, True),
        ({"gamma": 1.0}, False),
        ({"gamma": None}, False),
        ({"gamma": 0.0, "planner_connected": False}, False),
        ({"gamma": 0.0, "max_gamma": 0}, False),
    ],
)
def test_what_counts_as_gamma_0(changes: dict[str, object], plain: bool) -> None:
    """Gamma 0 counts where a planner chose it and could have drafted, and nowhere else."""
    assert runs_at_zero(worker("p", **changes)) is plain
    # By load alone the other one would be chosen.
    other = worker("o", num_running=9, gamma=1.0)
    assert chosen_of(worker("p", num_running=10, **changes), other) == ("p" if plain else "o")


def test_of_equal_batches_the_one_that_loses_least_grows() -> None:
    """Where equal batches draft, the request goes where fewer drafts are accepted."""
    well = worker("a", num_running=4, gamma=3.0, acceptance_rate=0.8)
    badly = worker("b", num_running=4, gamma=3.0, acceptance_rate=0.3)
    assert chosen_of(well, badly) == "b"
    assert chosen_of(well, replace(badly, num_dispatched=1)) == "a"


def test_gamma_is_smoothed() -> None:
    """One step that explores flips nothing, a change that stays does, idleness forgets."""
    gamma = smoothed_gamma(None, Status(num_running=4, gamma=0))
    assert gamma == 0.0
    gamma = smoothed_gamma(gamma, Status(num_running=4, gamma=1))
    assert runs_at_zero(worker(gamma=gamma))
    for _ in range(3):
        gamma = smoothed_gamma(gamma, Status(num_running=4, gamma=1))
    assert not runs_at_zero(worker(gamma=gamma))
    assert smoothed_gamma(gamma, Status(num_running=0, gamma=1)) is None
