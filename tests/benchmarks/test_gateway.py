"""The gateway's benchmark: real processes, figures that add up, growth that is seen."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, under a name of its own: the gateway itself is `gateway`."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    spec = importlib.util.spec_from_file_location("gateway_benchmark", BENCHMARKS / "gateway.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_a_tiny_run_measures_everything() -> None:
    """Every way is timed and counted, what is added is the difference, and no reader is cut off."""
    argv = [sys.executable, str(BENCHMARKS / "gateway.py"), "--tiny"]
    run = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    latency = {name: one["median"] for name, one in found["latency"].items()}
    for figure in ("ttft", "message"):
        direct = latency[f"direct_{figure}_p50_us"]
        assert 0 < direct <= latency[f"direct_{figure}_p90_us"]
        for way in ("relay", "grpc", "http"):
            through = latency[f"{way}_{figure}_p50_us"]
            assert latency[f"{way}_added_{figure}_p50_us"] == through - direct
    # A stream's first message has one token, so joined ones hold a little less than their pace.
    throughput = found["throughput"]
    joined = throughput["http 125 tokens/s a stream"]["tokens_per_message"]["median"]
    more = throughput["http 250 tokens/s a stream"]["tokens_per_message"]["median"]
    assert 1.5 < joined < more
    read = throughput["http as fast as read, 8 tokens a message"]
    assert 7 < read["tokens_per_message"]["median"] <= 8
    assert all(one["tokens_per_core_s"]["median"] > 0 for one in throughput.values())
    assert found["memory"]["readers_cut_off"] == found["memory"]["readers_that_finished"] == 0
    assert found["memory"]["bytes_taken_per_reader"] > 0


def test_growth_of_memory_is_seen(benchmark: ModuleType) -> None:
    """A process that gains a MiB a second is told from one that wavers."""
    times = [float(second) for second in range(60)]
    leaks = benchmark._grown(50.0, times, [60 + second for second in times])
    flat = benchmark._grown(50.0, times, [60 + second % 2 for second in times])
    most = benchmark.FLOORS["memory_growth_beyond_token_ids_mib"]
    assert leaks["growth"] == 40
    assert leaks["growth"] > most
    assert leaks["slope_mib_per_min"] == pytest.approx(60)
    assert flat["growth"] <= 1 < most
    assert abs(flat["slope_mib_per_min"]) < 1


def test_a_benchmark_that_needs_the_gateway_finds_it() -> None:
    """The benchmark's file, of the same name, does not stand before the gateway's package."""
    argv = [sys.executable, str(BENCHMARKS / "simulated_routing.py"), "--help"]
    run = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
