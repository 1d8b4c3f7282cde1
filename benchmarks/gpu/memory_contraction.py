"""One contraction under rows that decode and live in the tail, and all that was seen of it."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu import memory_marks
from gpu.driver import JobFailed, Retired, _is_steady
from gpu.load import prompts
from gpu.memory_link import Bench
from worker.messages import Grant, RequestRefused

# One report decides, in both directions: rows must not outgrow their tail blocks meanwhile.
AGENT = ("--hold-s=0", "--t-persist=1", "--tau-low=0.1", "--tau-high=0.1", "--backoff-s=0.1")
AFTER_S = 0.05  # that a transition is watched for once the draft is where it belongs
MAX_STEADY_TURNS = 5_000
Span = tuple[float, float]


@dataclass(kw_only=True)
class Contraction:
    """What was seen; times are of `time.perf_counter`."""

    before: list[Retired]  # the last steps before the pressure ended
    steps: list[Retired]  # those after, until the end
    tokens: list[tuple[float, int]]  # when which request got some, from the first step before on
    released: float  # when the pressure ended
    decided: float  # when the agent's request reached the worker's side
    granted: float  # the first copy
    loading: float  # the grant of the tail, right after the rename
    resident: float  # when the engine had the draft back
    copying: Span  # of the image to the device, in the agent's process
    end: float  # until when gaps count
    num_in_tail: int  # blocks of rows when the pressure ended
    moved: list[int]  # blocks of each copy that was granted
    num_in_rest: int  # that the engine copied itself while steps paused
    num_moved: int  # that took the place of their sources
    tokens_between: int  # that rows got between the first copy's grant and the last copy
    num_refused: int  # of the agent's requests
    catch_up: list[Retired]  # steps from the draft's return until all rows drafted
    steady: list[Retired]  # steps after, in which all rows drafted
    preempted: set[int]  # requests that were

    def spans(self) -> list[Span]:
        """Begin and end of every step from the pressure's end on, and of those just before."""
        return [(a.at, b.at) for a, b in itertools.pairwise([self.before[-1], *self.steps])]

    def usual(self) -> list[float]:
        """Seconds of the steps before."""
        return [b.at - a.at for a, b in itertools.pairwise(self.before)]

    def gaps(self, begin: float, end: float) -> dict[int, list[float]]:
        """Seconds between a request's consecutive tokens, of all that overlap an interval."""
        last: dict[int, float] = {}
        found: dict[int, list[float]] = {}
        for at, request_id in self.tokens:
            since = last.get(request_id)
            last[request_id] = at
            if since is not None and at > begin and since < end:
                found.setdefault(request_id, []).append(at - since)
        return found


def overlapping(spans: list[Span], part: Span) -> list[float]:
    """Seconds of the spans that share time with a part, whole ones and those across its ends."""
    return [end - begin for begin, end in spans if end > part[0] and begin < part[1]]


def within(spans: list[Span], part: Span) -> list[float]:
    """Seconds of the spans that lie in a part."""
    return [end - begin for begin, end in spans if begin >= part[0] and end <= part[1]]


def contract(
    bench: Bench,
    options: argparse.Namespace,
    seed: int,
    marks: Path,
    *,
    gamma: int = 0,
    full: bool = False,
) -> Contraction:
    """Let rows grow into the tail, end the pressure, and watch until the draft is back.

    Args:
        bench: With an agent of `AGENT` attached, and the draft in its place.
        options: Of the run.
        seed: Of the prompts.
        marks: File of the agent's marks.
        gamma: Drafts of each row once the draft is back; it is then watched until all rows draft.
        full: Whether the head gets full as soon as the contraction has begun, until the draft is
            back. Rows need more blocks then than there are; those preempted come back after it.
    """
    driver, blocks, feed = bench.driver, bench.blocks, bench.feed
    driver._pretend(options.synthetic if gamma and bench.ready.device == "cuda" else None)
    num_rows = options.rows + 1
    _fill(bench, options, seed, gamma)
    feed.tokens = []
    driver.retired.clear()
    bench.until(lambda: len(driver.retired) > options.steps, "steps before")
    before, num_in_tail = list(driver.retired), len(blocks.live_tail_blocks())
    bench.forget()
    driver.retired.clear()
    num_moved = bench.num_moved
    preemptions = {s.request_id: s.num_preemptions for s in bench.scheduler.running}
    bench.set_gamma(gamma or int(full))  # a draft that is wanted stays; rows' own limits hold
    released = time.perf_counter()
    bench.ease()
    if full:
        bench.until(lambda: bench.elastic.residency == "reloading", "a contraction began")
        bench.press(0)
    bench.until(lambda: bench.elastic.residency == "resident", "the draft came back")
    back = time.perf_counter()
    steady: list[Retired] = []
    bench.until(lambda: time.perf_counter() > back + AFTER_S, "the time after")
    end = back + AFTER_S
    if full:
        bench.ease()
        bench.until(lambda: _all_decode(bench, num_rows), "preempted rows came back")
        end = time.perf_counter()
    elif gamma:
        steady = _until_all_draft(bench, num_rows, gamma, options.steps)
        end = steady[0].at
    else:
        bench.until(lambda: driver.retired[-1].at > end, "steps after")
    _check_running(bench, num_rows)
    grants = [(at, m) for at, m in feed.sent if isinstance(m, Grant)]
    copies = [(at, len(m.source_ids)) for at, m in grants if m.kind == "copy"]
    loading = _first(at for at, m in grants if m.kind == "load")
    resident = _first(at for at, phase in bench.phases if phase == "IDLE" and at > loading)
    rest_at, num_in_rest = bench.rests[-1] if bench.rests else (loading, 0)
    steps, tokens, feed.tokens = list(driver.retired), feed.tokens, None
    seen = Contraction(
        before=before,
        steps=steps,
        tokens=tokens,
        released=released,
        decided=_first(at for at, m in feed.asked if m.kind == "contract"),
        granted=copies[0][0] if copies else loading,
        loading=loading,
        resident=resident,
        copying=memory_marks.copying(memory_marks.read(marks)),
        end=end,
        num_in_tail=num_in_tail,
        moved=[count for _, count in copies],
        num_in_rest=num_in_rest,
        num_moved=bench.num_moved - num_moved,
        tokens_between=sum(copies[0][0] < at < rest_at for at, _ in tokens) if copies else 0,
        num_refused=sum(isinstance(m, RequestRefused) for _, m in feed.sent),
        catch_up=[s for s in steps if steady and resident < s.at < steady[0].at],
        steady=steady,
        preempted={
            s.request_id
            for s in bench.scheduler.running
            if s.num_preemptions > preemptions[s.request_id]
        },
    )
    bench.set_gamma(0)
    return seen


def _first(times: Iterator[float]) -> float:
    """The first of them; JobFailed if there is none."""
    for at in times:
        return at
    raise JobFailed("a grant, a phase or a request of the contraction was not seen")


def _fill(bench: Bench, options: argparse.Namespace, seed: int, gamma: int) -> None:
    """Send the draft away and let rows of different lengths decode in its place."""
    blocks, size = bench.blocks, bench.blocks.block_size
    _submit(bench, prompts(1, options.context, vocab=options.vocab, seed=7_000 + seed), gamma)
    bench.until(lambda: bench.scheduler.num_running == 1, "a row runs")
    bench.press(num_left(bench))
    bench.until(lambda: bench.elastic.residency == "offloaded", "the pool grew")
    needed = options.rows * -(-options.context // size) + 2 * options.rows
    if needed > blocks.num_free:
        raise SystemExit(f"{options.rows} rows need {needed} blocks; {blocks.num_free} are free")
    asked = prompts(options.rows, options.context, vocab=options.vocab, seed=seed)
    # Out of step by 5 tokens each: at any time some rows have just begun a block.
    asked = [ids[: options.context - 5 * row % (2 * size)] for row, ids in enumerate(asked)]
    _submit(bench, asked, gamma)
    bench.until(lambda: _all_decode(bench, options.rows + 1), "every row decodes")


def num_left(bench: Bench) -> int:
    """Free head blocks that are left under pressure."""
    return max(2, int(0.05 * bench.blocks.num_base_blocks))


def expand(bench: Bench, options: argparse.Namespace) -> float:
    """Press until the draft has left; longest seconds between two steps, from the squeeze on."""
    driver = bench.driver
    last = driver.retired[-1]
    driver.retired.clear()
    bench.press(num_left(bench))
    bench.until(lambda: bench.elastic.residency == "offloaded", "the pool grew")
    reached = time.perf_counter()
    bench.until(
        lambda: bool(driver.retired) and driver.retired[-1].at > reached + AFTER_S, "steps after"
    )
    _check_running(bench, options.rows + 1)
    return max(b.at - a.at for a, b in itertools.pairwise([last, *driver.retired]))


def clear(bench: Bench) -> None:
    """End every row and wait for the draft's return, so that the next one begins as the last."""
    bench.feed.tokens = None
    bench.driver.reset()
    bench.ease()
    bench.until(lambda: bench.elastic.residency == "resident", "the draft came back")


def _until_all_draft(bench: Bench, num_rows: int, gamma: int, num_steps: int) -> list[Retired]:
    """So many steps in a row in which all rows draft and none catches up."""
    retired = bench.driver.retired
    run: list[Retired] = []
    num_seen = 0
    for _ in range(MAX_STEADY_TURNS):
        for step in retired[num_seen:]:
            run = [*run, step] if _is_steady(step.done, num_rows, gamma) else []
        num_seen = len(retired)
        if len(run) > num_steps:
            return run
        bench.driver._turn()
        _check_running(bench, num_rows)
    raise JobFailed("not every row drafts again")


def _check_running(bench: Bench, num_rows: int) -> None:
    """Raise JobFailed unless all rows are left."""
    if bench.scheduler.num_running != num_rows:
        raise JobFailed(f"{bench.scheduler.num_running} of {num_rows} rows are left")


def _submit(bench: Bench, asked: list[list[int]], gamma: int) -> None:
    driver = bench.driver
    for seed, ids in enumerate(asked):
        room = bench.engine.max_model_len - len(ids)
        driver._submit(driver._request(ids, room, max_gamma=gamma, temperature=0.0, seed=seed))


def _all_decode(bench: Bench, num_rows: int) -> bool:
    running = bench.scheduler.running
    return len(running) == num_rows and all(row.phase == "decode" for row in running)
