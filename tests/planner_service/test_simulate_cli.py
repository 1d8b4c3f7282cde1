"""`nightjar simulate` as a user meets it."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from nightjar import cli
from nightjar.errors import ConfigError
from planner_service.simulate import acceptance, batch, plot
from planner_service.simulate.report import summarize, table
from planner_service.simulate.run import Scenario, simulate

SHORT = ["--steps", "120", "--rows", "6", "--jobs", "1"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--policy", "none"], "unknown policy"),
        (["--policy", "fixed:gamma=99"], "whole number in"),
        (["--policy", "fixed:gamma"], "KEY=VALUE"),
        (["--policy", "fixed:gamma=1,gamma=2"], "given twice"),
        (["--policy", "off", "--policy", "off"], "given twice"),
        (["--scenario", "sunny"], "must be one of stationary"),
        (["--scenario", "abrupt", "--alpha", "0.5"], "only --scenario stationary"),
        (["--alpha", "1.5"], "in [0, 1]"),
        (["--arrivals", "never"], "must be one of closed"),
        (["--arrivals", "poisson", "--rows", "3"], "only --arrivals closed"),
        (["--arrivals", "poisson", "--rate", "nan"], "must be a number"),
        (["--rate", "3"], "closed has none"),
        (["--arrivals", "azure"], "go together"),
        (["--trace", "x.csv"], "go together"),
        (["--arrivals", "azure", "--trace", "/nowhere.csv"], "cannot be read"),
        (["--lengths", "long"], "sharegpt or fixed"),
        (["--lengths", "fixed:9,1"], "nothing would decode"),
        (["--steps", "0"], "whole number in [1, 1000000]"),
        (["--steps", "1e3"], "whole number"),
        (["--seeds", "3-1"], "must ascend"),
        (["--seeds", "0-5000"], "at most 1000"),
        (["--rows", "257"], "in [1, 256]"),
        (["--truth", "h300"], "shipped tables: h200_7b"),
        (["--noise", "inf"], "must be a number"),
        (["--kv-slope-factor", "-1"], "must be a number"),
        (["--max-gamma", "9"], "in [0, 8]"),
        (["--kv-pool-tokens", "4000"], "closed loop needs a KV pool of at least"),
        (["--jobs", "none"], "whole number"),
        (["--png", "/nowhere/a.png"], "no such folder"),
    ],
)
def test_bad_values_are_refused_in_a_sentence(capsys, argv: list[str], words: str) -> None:
    """Exit status 2, one line that names what is wrong, nothing on stdout."""
    assert cli.main(["simulate", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nightjar simulate: ")
    assert err.count("\n") == 1
    assert words in err


def test_the_table_ranks_policies_by_regret(capsys) -> None:
    """A row for each policy, the clairvoyant first."""
    policies = ["--policy", "off", "--policy", "clairvoyant", "--policy", "fixed:gamma=5"]
    assert cli.main(["simulate", *policies, *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:4] == ["policy", "tok/s", "regret", "lost"]
    assert [line.split()[0] for line in lines[3:]] == ["clairvoyant", "fixed:gamma=5", "off"]


def test_json_holds_means_and_each_run(capsys) -> None:
    """The mean over the seeds is the mean of the runs."""
    argv = ["simulate", "--policy", "fixed:gamma=2", "--seeds", "3-5", "--json", *SHORT]
    assert cli.main(argv) == 0
    shown = json.loads(capsys.readouterr().out)
    (policy,) = shown["policies"]
    assert [run["seed"] for run in policy["runs"]] == [3, 4, 5]
    mean = sum(run["tokens_per_second"] for run in policy["runs"]) / 3
    assert policy["mean"]["tokens_per_second"] == pytest.approx(mean)
    assert policy["mean"]["lost_share_settled"] is None


def test_processes_change_nothing(capsys) -> None:
    """Runs shared among processes give what one process gives."""
    argv = ["simulate", "--policy", "nightjar", "--seeds", "0-1", "--json", *SHORT[:-2]]
    answers = []
    for jobs in ("1", "2"):
        assert cli.main([*argv, "--jobs", jobs]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_a_png_is_written(tmp_path, capsys) -> None:
    """Of two policies and two seeds."""
    path = tmp_path / "runs.png"
    argv = ["simulate", "--policy", "off", "--policy", "fixed", "--seeds", "0-1", *SHORT]
    assert cli.main([*argv, "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plots_without_matplotlib_name_the_extra(monkeypatch) -> None:
    """Before any run."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"nightjar\[plots\]"):
        plot.check("a.png")


def test_a_parameter_may_hold_commas() -> None:
    """A part without an equals sign goes on with the value before it."""
    batch.make("table:preset=custom,ranges=1-64:2,65-256:0")
    with pytest.raises(ConfigError, match="unknown policy"):
        batch.make("clairvoyant:gamma=1")


def test_a_run_without_steps_has_its_row() -> None:
    """A trace that ends before the first decode step leaves figures without a value."""
    summary = summarize("off", simulate(None, Scenario(), 0, 0))
    assert summary.figures["mean_gamma"] is None
    assert "-" in table([summary]).splitlines()[1]


def test_the_benchmark_compares_policies_on_their_own_seeds(capsys, monkeypatch) -> None:
    """Both truths, the share lost after each change, and how ours stands to its rivals."""
    path = Path(__file__).parents[2] / "benchmarks/simulated_regret.py"
    spec = importlib.util.spec_from_file_location("simulated_regret", path)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setitem(benchmark.SCENARIOS, "abrupt", acceptance.abrupt(100, 200))
    policies = "model_guided nightjar table_in_hindsight off"
    given = ["--tuning", "--seeds", "2", "--steps", "450", "--scenarios", "abrupt", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *given, "--policies", policies])
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum("its best rival, nightjar" in line for line in lines) == 2
    rows = [line for line in lines if line.startswith("nightjar ")]
    # Lost, and median and worst after the first change; steps end before the others.
    assert [line.count("%") for line in rows] == [3, 3]
    assert sum(line.startswith("off ") for line in lines) == 1  # against the first truth alone
    assert sum(line.startswith("table_in_hindsight ") for line in lines) == 2
