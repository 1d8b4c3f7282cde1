"""The agent's state machine, against traces written by hand and random events."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_agent.agent import Agent, Pressure, Request, Residency, Thresholds
from memory_agent.config import AgentConfig

THRESHOLDS = Thresholds(tau_low=0.10, tau_high=0.15, t_persist=3, hold_s=0.0, backoff_s=1.0)
NUM_BASE, NUM_EXTRA = 100, 30


def new_agent(residency: Residency = Residency.RESIDENT) -> Agent:
    """An agent for a pool of 100 + 30 blocks; resident its tau_low is 10, its tau_high 15."""
    return Agent(
        THRESHOLDS, num_base_blocks=NUM_BASE, num_extra_blocks=NUM_EXTRA, residency=residency
    )


def report(
    free: int, *, gamma: int = 0, waiting: int = 0, residency: Residency = Residency.RESIDENT
) -> Pressure:
    """A pressure report with a total that fits the residency."""
    expanded = residency is Residency.OFFLOADED
    return Pressure(
        num_free_blocks=free,
        num_total_blocks=NUM_BASE + (NUM_EXTRA if expanded else 0),
        num_waiting=waiting,
        exploit_gamma=gamma,
        residency=residency,
    )


def offloaded(free: int, *, waiting: int = 0) -> Pressure:
    """A report of an expanded pool."""
    return report(free, waiting=waiting, residency=Residency.OFFLOADED)


def test_a_whole_cycle() -> None:
    """Pressure takes the draft out, calm brings it back, each after three reports."""
    agent = new_agent()
    assert [agent.on_pressure(report(9), t) for t in (0, 1)] == [None, None]
    assert agent.on_pressure(report(9), 2) == Request(request_id=1, kind="expand")
    assert agent.state is Residency.OFFLOADING
    agent.on_done(1, Residency.OFFLOADED, 2)
    assert (agent.state, agent.num_expansions) == (Residency.OFFLOADED, 1)
    assert [agent.on_pressure(offloaded(46), t) for t in (3, 4)] == [None, None]
    assert agent.on_pressure(offloaded(46), 5) == Request(request_id=2, kind="contract")
    assert agent.state is Residency.RELOADING
    agent.on_load_granted()
    agent.on_load_answered(ok=True)
    assert (agent.state, agent.num_contractions) == (Residency.RELOADING, 0)
    agent.on_done(2, Residency.RESIDENT, 5)
    assert (agent.state, agent.num_contractions) == (Residency.RESIDENT, 1)


@pytest.mark.parametrize(
    "reports",
    [
        [report(9), report(9), report(10), report(9), report(9)],
        [report(9), report(9), report(9, gamma=1), report(9), report(9)],
        [report(10)] * 9,
        [report(0, gamma=3)] * 9,
    ],
    ids=["free blocks recover", "gamma pays off", "at the threshold", "speculation pays off"],
)
def test_no_expansion_without_lasting_pressure(reports: list[Pressure]) -> None:
    """An expansion needs t_persist reports in a row, gamma 0 and free blocks below tau_low."""
    agent = new_agent()
    assert [agent.on_pressure(r, 0.0) for r in reports] == [None] * len(reports)


@pytest.mark.parametrize(
    "reports",
    [
        [offloaded(46), offloaded(46), offloaded(45), offloaded(46), offloaded(46)],
        [offloaded(46), offloaded(46), offloaded(46, waiting=1), offloaded(46), offloaded(46)],
        [offloaded(45)] * 9,
    ],
    ids=["free blocks drop", "a request waits", "at the threshold"],
)
def test_no_contraction_without_lasting_calm(reports: list[Pressure]) -> None:
    """A contraction needs t_persist reports in a row, none waiting, and room to spare."""
    agent = new_agent(Residency.OFFLOADED)
    assert [agent.on_pressure(r, 0.0) for r in reports] == [None] * len(reports)


def test_reports_for_one_transition_do_not_count_for_the_other() -> None:
    """Two reports that call for an expansion and one for a contraction are not three of a kind."""
    agent = new_agent()
    reports = [report(9), report(9), offloaded(46), offloaded(46)]
    assert [agent.on_pressure(r, 0.0) for r in reports] == [None] * 4
    assert agent.on_pressure(offloaded(46), 0.0) == Request(request_id=1, kind="contract")


def test_refusals_back_off() -> None:
    """A refusal leads back, and the wait before the next request doubles until one goes through."""
    agent = new_agent()
    now, asked_at = 0.0, []
    while len(asked_at) < 8:
        request = agent.on_pressure(report(0), now)
        if request is not None:
            asked_at.append(now)
            agent.on_refused(request.request_id, now)
            assert agent.state is Residency.RESIDENT
        now += 0.25
    waits = [after - before for before, after in itertools.pairwise(asked_at)]
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    request = agent.on_pressure(report(0), now + 30)
    assert request is not None
    agent.on_done(request.request_id, Residency.OFFLOADED, now)
    requests = [agent.on_pressure(offloaded(60), now + 30) for _ in range(3)]
    assert requests[2] is not None


def test_a_refused_contraction_leaves_the_pool_expanded() -> None:
    """After an aborted contraction the draft is offloaded, as before it."""
    agent = new_agent(Residency.OFFLOADED)
    request = [agent.on_pressure(offloaded(60), 0.0) for _ in range(3)][2]
    assert request is not None
    agent.on_refused(request.request_id, 0.0)
    assert (agent.state, agent.open_request) == (Residency.OFFLOADED, None)


def test_tau_low_in_blocks() -> None:
    """From 1 on, tau_low is a number of blocks whatever the total."""
    thresholds = Thresholds(tau_low=7, tau_high=3, t_persist=1, hold_s=0.0, backoff_s=1.0)
    assert (thresholds.low(1000), thresholds.high(1000)) == (7, 7)
    assert (THRESHOLDS.low(101), THRESHOLDS.high(101)) == (11, 16)
    agent = Agent(
        thresholds,
        num_base_blocks=NUM_BASE,
        num_extra_blocks=NUM_EXTRA,
        residency=Residency.RESIDENT,
    )
    assert agent.on_pressure(report(7), 0.0) is None
    assert agent.on_pressure(report(6), 0.0) is not None


def test_the_bounds_shown_are_those_that_decide() -> None:
    """Shares are of the head, wherever the draft is: one bound for the status and the decision."""
    thresholds = Thresholds(tau_low=0.10, tau_high=0.45, t_persist=1, hold_s=0.0, backoff_s=1.0)
    for start in (Residency.RESIDENT, Residency.OFFLOADED):
        agents = [
            Agent(thresholds, num_base_blocks=NUM_BASE, num_extra_blocks=NUM_EXTRA, residency=start)
            for _ in range(NUM_BASE + NUM_EXTRA + 1)
        ]
        if start is Residency.RESIDENT:
            asked = [a.on_pressure(report(n), 0.0) is not None for n, a in enumerate(agents[:101])]
            assert asked == [free < agents[0].leaves_below for free in range(101)]
        else:
            asked = [a.on_pressure(offloaded(n), 0.0) is not None for n, a in enumerate(agents)]
            first = agents[0].returns_above + NUM_EXTRA + 1
            assert asked == [free >= first for free in range(len(agents))]
        assert (agents[0].leaves_below, agents[0].returns_above) == (10, 45)


@pytest.mark.parametrize(
    ("low", "high", "sentence"),
    [
        (0.1, 0.99, ""),
        (99, 99, ""),
        (0, 100, "--tau-high=100: more than 100 blocks .* has 100: a draft .* could never return$"),
        (0.1, 0.999, "--tau-high=0.999: more than 100 blocks .* could never return$"),
        (100, 0.3, "--tau-low=100: more than 100 blocks .* could never return$"),
        (
            1e6,
            1e6,
            "--tau-low=1000000: .* never return, and it would leave at once, since .* 1000000",
        ),
    ],
)
def test_thresholds_that_a_pool_cannot_meet(low: float, high: float, sentence: str) -> None:
    """An objection stands exactly where an idle pool would not bring the draft back."""
    thresholds = Thresholds(tau_low=low, tau_high=high, t_persist=1, hold_s=0.0, backoff_s=1.0)
    objection = thresholds.objection(NUM_BASE)
    assert re.match(sentence, objection) if sentence else objection == ""
    agent = Agent(
        thresholds,
        num_base_blocks=NUM_BASE,
        num_extra_blocks=NUM_EXTRA,
        residency=Residency.OFFLOADED,
    )
    returns = agent.on_pressure(offloaded(NUM_BASE + NUM_EXTRA), 0.0) is not None
    assert returns == (objection == "")


class Pool:
    """A pool whose demand for blocks wanders, and a worker that does at once what it is asked.

    Reports come every 20 ms, and say gamma 0 throughout: only blocks decide.
    """

    def __init__(self, thresholds: Thresholds, num_base: int = 4000, num_extra: int = 2000) -> None:
        self.agent = Agent(
            thresholds,
            num_base_blocks=num_base,
            num_extra_blocks=num_extra,
            residency=Residency.RESIDENT,
        )
        self.num_base, self.num_extra = num_base, num_extra
        self.residency, self.now = Residency.RESIDENT, 0.0
        self.transitions: list[float] = []

    def report(self, demand: int) -> None:
        """So many blocks are wanted now."""
        expanded = self.residency is Residency.OFFLOADED
        total = self.num_base + (self.num_extra if expanded else 0)
        pressure = Pressure(
            num_free_blocks=max(0, total - demand),
            num_total_blocks=total,
            num_waiting=int(demand > total),
            exploit_gamma=0,
            residency=self.residency,
        )
        request = self.agent.on_pressure(pressure, self.now)
        if request is not None:
            goes = request.kind == "expand"
            self.residency = Residency.OFFLOADED if goes else Residency.RESIDENT
            self.agent.on_done(request.request_id, self.residency, self.now)
            self.transitions.append(self.now)
        self.now += 0.02


DEFAULTS = AgentConfig()
SHIPPED = Thresholds(
    tau_low=DEFAULTS.tau_low,
    tau_high=DEFAULTS.tau_high,
    t_persist=DEFAULTS.t_persist,
    hold_s=DEFAULTS.hold_s,
    backoff_s=DEFAULTS.backoff_s,
)


@pytest.mark.parametrize("around", ["leaving", "returning"])
def test_a_load_that_hovers_at_a_threshold_does_not_oscillate(around: str) -> None:
    """Ten minutes at either threshold, to and fro within the gap: two transitions at most."""
    pool, rng = Pool(SHIPPED), random.Random(5)
    low, high = SHIPPED.low(pool.num_base), SHIPPED.high(pool.num_base)
    gap = high - low
    assert gap > 0.05 * pool.num_base
    middle = pool.num_base - (low if around == "leaving" else high)
    for _ in range(30_000):
        pool.report(middle + rng.randint(-gap // 2, gap // 2))
    assert len(pool.transitions) <= 2


def test_a_load_that_swings_past_both_thresholds_is_followed_at_the_hold() -> None:
    """However fast it swings, the draft goes round once in hold_s, and not more often."""
    pool = Pool(SHIPPED)
    for number in range(30_000):
        pool.report(pool.num_base if number // 10 % 2 else 0)
    leaves = pool.transitions[::2]
    assert min(b - a for a, b in itertools.pairwise(leaves)) >= SHIPPED.hold_s
    assert 2 <= len(pool.transitions) <= 2 * (pool.now / SHIPPED.hold_s + 1)


def test_the_hold_delays_no_expansion() -> None:
    """A draft that came back a moment ago may leave again at once when blocks run short."""
    pool = Pool(SHIPPED)
    for _ in range(5):
        pool.report(pool.num_base)
    pool.now += SHIPPED.hold_s
    for _ in range(5):
        pool.report(0)
    before = pool.now
    for _ in range(5):
        pool.report(pool.num_base)
    assert len(pool.transitions) == 3
    assert pool.transitions[2] <= before + SHIPPED.t_persist * 0.02


def test_a_new_agent_takes_over_in_the_middle() -> None:
    """An agent that attaches during a reload becomes RESIDENT by the answer to the old request."""
    agent = new_agent(Residency.RELOADING)
    agent.on_load_granted()
    agent.on_load_answered(ok=True)
    agent.on_done(17, Residency.RESIDENT, 0.0)
    assert agent.state is Residency.RESIDENT


def test_a_report_corrects_an_outdated_handshake() -> None:
    """With no request open the worker's report wins over what the agent believed."""
    agent = new_agent()
    assert agent.on_pressure(offloaded(5), 0.0) is None
    assert agent.state is Residency.OFFLOADED


def test_never_resident_after_a_failed_load() -> None:
    """A failed checksum keeps RESIDENT out until a load succeeds, whatever the worker says."""
    agent = new_agent(Residency.RELOADING)
    agent.on_load_granted()
    agent.on_load_answered(ok=False)
    agent.on_pressure(report(50), 0.0)
    agent.on_done(1, Residency.RESIDENT, 0.0)
    assert agent.state is Residency.RELOADING
    agent.on_load_granted()
    agent.on_load_answered(ok=True)
    agent.on_done(1, Residency.RESIDENT, 0.0)
    assert agent.state is Residency.RESIDENT


def test_answers_to_other_requests_are_ignored_while_one_is_open() -> None:
    """Only the open request's own id moves the state."""
    agent = new_agent()
    request = [agent.on_pressure(report(0), 0.0) for _ in range(3)][2]
    assert request is not None
    agent.on_refused(request.request_id + 1, 0.0)
    agent.on_done(request.request_id + 1, Residency.RESIDENT, 0.0)
    assert (agent.state, agent.open_request) == (Residency.OFFLOADING, request)


STATES = {
    "expand": (Residency.RESIDENT, Residency.OFFLOADING),
    "contract": (Residency.OFFLOADED, Residency.RELOADING),
}
EVENTS = st.one_of(
    st.tuples(
        st.just("pressure"),
        st.builds(
            report,
            st.integers(0, 100),
            gamma=st.integers(0, 2),
            waiting=st.integers(0, 1),
            residency=st.sampled_from(Residency),
        ),
    ),
    st.tuples(st.just("refused"), st.integers(0, 4)),
    st.tuples(st.just("done"), st.tuples(st.integers(0, 4), st.sampled_from(Residency))),
    st.tuples(st.just("granted"), st.none()),
    st.tuples(st.just("answered"), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.sampled_from(Residency), st.integers(1, 3))
def test_random_events(events: list[tuple[str, object]], start: Residency, persist: int) -> None:
    """Whatever happens: one open request at most, legal transitions, no unverified RESIDENT."""
    thresholds = Thresholds(tau_low=0.3, tau_high=0.3, t_persist=persist, hold_s=0.0, backoff_s=1.0)
    agent = Agent(thresholds, num_base_blocks=NUM_BASE, num_extra_blocks=NUM_EXTRA, residency=start)
    load_failed = False
    for now, (kind, value) in enumerate(events):
        before, open_before = agent.state, agent.open_request
        told: Residency | None = None
        if kind == "pressure":
            assert isinstance(value, Pressure)
            request = agent.on_pressure(value, float(now))
            assert request is None or open_before is None, "two requests are open"
            told = value.residency if open_before is None else None
            if request is not None:
                start_state, next_state = STATES[request.kind]
                assert start_state in (before, value.residency)
                assert agent.state is next_state
                continue
        elif kind == "refused":
            assert isinstance(value, int)
            agent.on_refused(value, float(now))
        elif kind == "done":
            assert isinstance(value, tuple)
            agent.on_done(*value, float(now))
            told = value[1]
        elif kind == "granted":
            agent.on_load_granted()
            told = Residency.RELOADING
        else:
            assert isinstance(value, bool)
            agent.on_load_answered(value)
            load_failed = not value
        if agent.state is not before:
            refused = kind == "refused" and (before, agent.state) in (
                (Residency.OFFLOADING, Residency.RESIDENT),
                (Residency.RELOADING, Residency.OFFLOADED),
            )
            assert refused or agent.state is told
        if agent.state is Residency.RESIDENT and before is Residency.RELOADING:
            assert not load_failed
