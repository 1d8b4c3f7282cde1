"""The paper's comparison: same requests for every arm, honest intervals, tables from runs."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from fake_engine import ready

from nightjar.errors import ConfigError
from planner_service.context import Context, Outcome
from planner_service.planner import Report

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark's modules be found, as its own folder does when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run_of(
    rates: dict[str, dict[str, float]],
    *,
    run: str = "one",
    section: str = "closed",
    figure: str = "tok_s",
    noise: float = 0.002,
    drift: float = 0.0,
) -> dict[str, Any]:
    """A run whose slices have these figures by cell and arm, with noise, and a drift by pass."""
    rng = random.Random(run)
    slices = [
        {
            "section": section,
            "cell": cell,
            "arm": arm,
            "pass": number,
            "counts": number > 0,
            figure: rate * (1 + drift * number) * (1 + rng.gauss(0, noise)) if number else 1e9,
        }
        for cell, arms in rates.items()
        for number in range(5)
        for arm, rate in arms.items()
    ]
    return {"run": run, "slices": slices}


def test_a_tiny_run_ends_in_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arms are swapped in one engine, traces follow the capacity, a replay says its error."""
    from paper import cli, replay, report

    monkeypatch.setattr(replay, "SEEDS", (0,))
    monkeypatch.setattr(replay, "SOME_STEPS", 20)
    monkeypatch.setattr(report, "REPLAYED", ("linucb",))
    flags = ["run", "--tiny", f"--out={tmp_path}", "--closed-passes=1", "--open-passes=1"]
    flags += ["--closed-arms", "off", "g1", "g2", "g3", "g4", "g5", "model_guided"]
    flags += ["--open-arms", "off", "best-fixed", "model_guided", "--traces", "burst"]
    assert cli.main(flags) == 0
    found = json.loads((tmp_path / "run-001.json").read_text())
    closed = [s for s in found["slices"] if s["section"] == "closed"]
    assert len(closed) == 2 * (1 + 7)  # who learns warms up; then the pass, backward
    assert [s["arm"] for s in closed[:3]] == ["model_guided", "model_guided", "fixed:gamma=5"]
    assert [s["counts"] for s in closed[:3]] == [False, True, True]
    fixed = [s for s in closed if s["arm"] == "fixed:gamma=1"]
    assert all(set(s["gammas"]) <= {"0", "1"} and s["acceptance"] == 1.0 for s in fixed)
    assert all(set(s["gammas"]) == {"0"} for s in closed if s["arm"] == "off")
    traces = [s for s in found["slices"] if s["section"] == "open" and s["counts"]]
    assert len({s["asks"] for s in traces}) == 1  # the same requests for every arm
    assert all(s["num_answers"] == s["num_asks"] for s in traces)
    assert found["capacity_requests_per_s"] > 0
    assert found["num_known_steps"] == {"model_guided": 0}
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "run-001.json")]) == 0
    shown = capsys.readouterr().out
    assert "| linucb |" in shown
    assert "off, so replayed figures" in shown
    assert "burst" in shown


def test_an_arm_goes_on_from_what_all_earlier_runs_taught_it(tmp_path: Path) -> None:
    """Sums of runs add up, of a draft that lends its memory too; a file that is gone is told."""
    from paper.arms import Arm
    from paper.learned import Learned, of_arm, read

    facts = ready()
    runs: list[dict[str, Learned]] = []
    for number, steps in ((1, 300), (2, 500)):
        arm = Arm("model_guided", facts, 0, of_arm(runs, "model_guided"))
        word = arm.begin(2)
        outcome = Outcome(steps, steps, 9000 * steps, 2 * steps, 2 * steps, 2 * steps)
        report = Report(Context(2, feasible_max_gamma=5), 0, word.decision_id, outcome)
        arm._planner.learn(arm._stream, report)
        told = {"model_guided": arm.learned().as_json()}
        (tmp_path / f"learned-{number}.json").write_text(json.dumps(told))
        run = {"learned": f"learned-{number}.json"}
        runs.append(read(tmp_path / f"run-{number}.json", run))
    for name, steps in (("model_guided", 800), ("model_guided+elastic", 800), ("nightjar", 0)):
        arm = Arm(name, facts, 0, of_arm(runs, name))
        assert arm.num_known_steps == steps
        assert not arm.learned().groups
    assert read(tmp_path / "run-9.json", {}) == {}
    with pytest.raises(ConfigError, match="what the arms of run-9"):
        read(tmp_path / "run-9.json", {"learned": "learned-9.json"})


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No model, an unknown cell, no common arm, runs that differ: a sentence each."""
    from paper import cli

    cases = (
        ([], "--model, --draft and --spec-bench are needed"),
        (["--tiny", "--cells", "3"], "none of the design's"),
        (["--tiny", "--rehearse"], "takes a real pair"),
        (["--flag", "device=cpu"], "the design fixes it"),
        (["--tiny", "--closed-arms", "g1"], "needs `off`"),
        (["--tiny", "--sections", "elastic", "open"], "run it by itself"),
    )
    for flags, words in cases:
        with pytest.raises(SystemExit):
            cli.main(["run", f"--out={tmp_path}", *flags])
        assert words in capsys.readouterr().err
    files = []
    for name, seed in (("a", 1), ("b", 2)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"begun": "now", "design": {"seed": seed}, "slices": []}))
    assert cli.main(["report", *map(str, files)]) == 2
    assert "its design differs" in capsys.readouterr().err
    files[0].write_text(json.dumps({"slices": [], "learned": "gone.json"}))
    assert cli.main(["run", "--tiny", f"--out={tmp_path}", "--after", str(files[0])]) == 2
    assert "--cold goes on without" in capsys.readouterr().err


def test_requests_depend_on_seed_and_pass_alone() -> None:
    """A trace reaches its peak, keeps its pattern, and is the same whenever it is drawn."""
    from paper.asks import Prompt, digest, endless, trace

    prompts = [Prompt(category="c", token_ids=(i,)) for i in range(30)]
    first = list(itertools.islice(endless(prompts, "1"), 60))
    assert first == list(itertools.islice(endless(prompts, "1"), 60))
    assert {ask.prompt.token_ids for ask in first[:30]} == {(i,) for i in range(30)}
    kinds = {"poisson 0.8": 20.0, "burst": 310 / 33.0, "oscillation": 174 / 25.7}
    for name, per_second in kinds.items():
        asks = trace(prompts, name, peak=100.0, seconds=60.0, seed="7")
        highest = {"poisson 0.8": 20.0, "burst": 40.0, "oscillation": 28.0}[name]
        assert len(asks) == pytest.approx(60 * 100 * per_second / highest, rel=0.12)
        assert max(ask.due_s for ask in asks) < 60
        again, other = (trace(prompts, name, peak=100.0, seconds=60.0, seed=s) for s in "78")
        assert digest(asks) == digest(again) != digest(other)


def test_intervals_cover_and_unpaired_ones_are_wider() -> None:
    """Student's quantiles are right; a drift that all arms share cancels in pairs, not without."""
    from paper.pairs import Slices
    from paper.stats import of, quantile

    for df, known in ((1, 12.706), (3, 3.182), (20, 2.086)):
        assert quantile(0.975, df) == pytest.approx(known, abs=2e-3)
    rng = random.Random(5)
    draws = [of([rng.gauss(1, 2) for _ in range(4)]) for _ in range(2000)]
    assert sum(e.low <= 1 <= e.high for e in draws) / 2000 == pytest.approx(0.95, abs=0.015)
    one = run_of({"8": {"off": 100, "a": 130}}, run="one", drift=0.2)
    two = run_of({"8": {"off": 90, "b": 99}}, run="two", drift=-0.1)
    slices = Slices([one, two], "closed", "tok_s")
    paired, pooled = slices.ratio("8", "a"), slices.ratio("8", "a", "b")
    assert paired is not None
    assert pooled is not None
    assert paired.paired
    assert not pooled.paired
    assert paired.mean == pytest.approx(1.3, rel=0.01)
    assert pooled.mean == pytest.approx(1.3 / 1.1, rel=0.01)
    assert paired.high - paired.low < 0.03
    assert slices.ratio("8", "a", "nobody") is None


def test_claims_are_met_missed_or_not_separated() -> None:
    """By the lower end of the interval; what was not measured is called that."""
    from paper.claims import claims
    from paper.design import PUBLISHED
    from paper.pairs import Slices

    cells = {
        "1": {"off": 100, "fixed:gamma=3": 150, "fixed:gamma=5": 160, "model_guided": 159},
        "128": {"off": 100, "fixed:gamma=3": 70, "fixed:gamma=5": 50, "model_guided": 101},
    }
    late = {"burst": {"off": 2.0, "fixed:gamma=3": 1.5, PUBLISHED: 1.0, "model_guided": 1.0}}
    runs = [run_of(cells), run_of(late, run="two", section="open", figure="latency_s")]
    found = claims(
        Slices(runs, "closed", "tok_s"),
        Slices(runs, "open", "latency_s", inverse=True),
        Slices(runs, "elastic", "tok_s"),
    )
    verdicts = [claim.verdict for claim in found]
    assert verdicts == ["met", "met", "met", "met", "met", "not separated", "not measured"]
    cells["1"]["model_guided"] = 140
    few = claims(*(Slices(runs, "closed", "tok_s") for _ in range(3)), cells=(1, 8, 128))
    assert [claim.verdict for claim in few[:3]] == ["2 of 3 cells", "2 of 3 cells", "met"]
    slow = claims(
        *(Slices([run_of(cells)], name, "tok_s") for name in ("closed", "open", "elastic"))
    )
    assert [claim.verdict for claim in slow] == ["missed", "met", "met", "met", "not measured"]


def steps_of(rows: int, gamma: int, kv: int, prefill: int) -> dict[str, int]:
    """Fifty steps whose costs are known."""
    us = 1000 + 10 * rows + 300 * gamma + (0.01 + 0.002 * gamma) * kv + 20 * prefill
    return {
        "rows": rows,
        "gamma": gamma,
        "kv_bin": kv // 4096,
        "prefill_bin": prefill.bit_length(),
        "num_steps": 50,
        "step_us": round(50 * us),
        "kv_tokens": 50 * kv,
        "prefill_tokens": 50 * prefill,
        "emitted": 0,
        "catch_up_us": 7 * (40 + 3 * rows),
        "catch_up_tokens": 7 * rows,
        "draft_prefill_us": 3 * (40 + 3 * rows),
        "draft_prefill_tokens": 3 * rows,
        "catch_up_steps": 10,
        "gap_us": 25 * 6,
        "gap_steps": 25,
    }


def test_the_simulator_meets_a_record_of_itself() -> None:
    """Costs, slopes, catch-up and acceptance that made a record are found in it again."""
    from paper.costs import NotEnough, cost_table
    from paper.replay import acceptance, whole_lengths

    # With many rows, one of them is most often amid its prompt: 64 are hardly ever there.
    grid = itertools.product((1, 8, 61, 63), range(4), (5_000, 20_000, 90_000), (0, 256))
    place = {
        "classes": {
            "easy": {"reached": [1000, 800, 576, 0], "accepted": [800, 576, 373, 0]},
            "hard": {"reached": [500, 200, 0, 0], "accepted": [200, 80, 0, 0]},
        },
        "lengths": [("easy", 50, 90, True)] * 3 + [("hard", 20, 90, True)],
    }
    record = {"steps": [steps_of(*cell) for cell in grid], "places": {"closed 8": place}}
    table = cost_table(record, (1, 8, 64), 3)
    assert table.kv_us_per_1000_tokens == pytest.approx(10, rel=0.01)
    assert table.draft_kv_us_per_1000_tokens == pytest.approx(2, rel=0.02)
    assert table.prefill_us_per_token == pytest.approx(20, rel=0.01)
    assert (table.catch_up_us, table.catch_up_us_per_token) == pytest.approx((40, 3), rel=0.01)
    for at, rows in enumerate((1, 8, 64)):
        expected = 1006 + 10 * rows + 600 + 0.014 * rows * table.context
        assert table.step_us[at][2] == pytest.approx(expected, rel=0.01)
    found = acceptance(place, whole_lengths(place))
    assert [c.alpha for c in found.classes] == [0.8, 0.4]
    assert found.classes[0].falloff == pytest.approx(0.9, abs=0.01)
    assert found.phases[0][1] == (0.75, 0.25)
    with pytest.raises(NotEnough, match="128 rows at gamma 0"):
        cost_table(record, (1, 8, 64, 128), 3)


def test_answers_that_were_cut_count_as_longer_ones() -> None:
    """Of answers that a slice cuts, the lengths are found again; shares follow their tokens."""
    from paper.replay import acceptance, whole_lengths

    rng = random.Random(3)
    lengths = []
    for _ in range(6000):
        name, answer = rng.choice((("short", 50), ("long", 250)))
        seen = min(answer, rng.randint(1, 300))
        lengths.append((name, 30, seen, seen == answer))
    counts = {"reached": [10, 5, 0], "accepted": [5, 2, 0]}
    place = {"lengths": lengths, "classes": {"short": counts, "long": counts}}
    whole = whole_lengths(place)
    assert {(name, answer) for name, _, answer in whole} == {("short", 50), ("long", 250)}
    assert sum(answer for _, _, answer in whole) / len(whole) == pytest.approx(150, rel=0.02)
    shares = dict(zip(("long", "short"), acceptance(place, whole).phases[0][1], strict=True))
    assert shares["long"] == pytest.approx(250 / 300, rel=0.02)


def test_a_trace_is_replayed_at_the_rate_it_had() -> None:
    """Requests far apart do not queue: each takes its prompt's and its steps' time."""
    from paper.replay import Replay

    grid = itertools.product((1,), range(2), (100,), (0, 64))
    counts = {"reached": [1000] + 7 * [0], "accepted": [500] + 7 * [0]}
    place = {"classes": {"c": counts}, "lengths": [("c", 30, 21, True)]}
    record = {"steps": [steps_of(*cell) for cell in grid], "places": {"open p": place}}
    replay = Replay(record, (1,), 1, 10_000, slice_s=1.0, warm_passes=1, passes=1)
    step_s = replay.table.step_us[0][0] / 1e6
    waited = replay.trace("off", "p", [[0.3 * i for i in range(30)]] * 2)
    assert waited == pytest.approx(20 * step_s + step_s + 30 * 20e-6, rel=0.05)
