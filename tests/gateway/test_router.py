"""The choice of a worker, as a function of what is known."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.router import WorkerLoad, choose

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
)
WORKERS = st.lists(LOADS, max_size=6, unique_by=lambda load: load.address)


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
    )
    return replace(idle, **changes)  # type: ignore[arg-type]


@given(WORKERS, st.sampled_from(["", "m"]), st.sets(st.sampled_from("abcdefgh")))
def test_choice_is_a_least_loaded_fitting_worker(
    workers: list[WorkerLoad], model: str, excluded: set[str]
) -> None:
    """The choice is ready, fits, is not excluded, and no such worker has less load."""
    fitting = [
        w for w in workers if w.ready and w.address not in excluded and model in ("", w.model)
    ]
    chosen = choose(workers, model=model, excluded=excluded)
    if chosen is None:
        assert fitting == []
        return
    assert chosen in fitting
    assert all(chosen.load <= other.load for other in fitting)
    ties = [other for other in fitting if other.load == chosen.load]
    assert chosen.num_free_blocks == max(other.num_free_blocks for other in ties)


@given(WORKERS, st.randoms(use_true_random=False))
def test_choice_does_not_depend_on_order(workers: list[WorkerLoad], random: object) -> None:
    """The order in which workers are listed never matters."""
    shuffled = list(workers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(workers, model="", excluded=()) == choose(shuffled, model="", excluded=())


def test_requests_in_flight_count_before_a_status_shows_them() -> None:
    """A burst between two probes is spread, because what was sent counts at once."""
    workers = {"a": worker("a"), "b": worker("b"), "c": worker("c")}
    for _ in range(9):
        chosen = choose(list(workers.values()), model="m", excluded=())
        assert chosen is not None
        workers[chosen.address] = replace(chosen, num_dispatched=chosen.num_dispatched + 1)
    assert [w.num_dispatched for w in workers.values()] == [3, 3, 3]


def test_a_larger_pool_takes_more_requests() -> None:
    """Load is counted per block: twice the pool may hold twice the requests."""
    large = worker("large", num_running=3, num_total_blocks=128)
    small = worker("small", num_running=2)
    assert choose([small, large], model="m", excluded=()) == large
