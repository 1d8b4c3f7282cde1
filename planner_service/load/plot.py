"""A PNG of a run: rates, gamma and acceptance over time, and latencies by their share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nightjar.errors import ConfigError
from planner_service.load.report import Figures, finished, latency_s, tpot_s, ttft_s
from planner_service.load.run import Run


def write(path: str, figures: Figures, run: Run, title: str) -> None:
    """Write the PNG; `planner_service.simulate.plot.check` says before the run whether it can be.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    rates, gammas, acceptance, latencies = figure.subplots(2, 2).flat
    columns = figures["over_time"]
    at = columns["at_s"]
    rates.step(at, columns["tokens_per_s"], where="post")
    rates.set_ylabel("tokens per second")
    arrivals = rates.twinx()
    arrivals.step(at, columns["arrivals_per_s"], where="post", color="C1", linewidth=0.8)
    arrivals.set_ylabel("arrivals per second", color="C1")
    for axis, name in ((gammas, "gamma"), (acceptance, "acceptance")):
        values = [np.nan if value is None else value for value in columns[name]]
        axis.step(at, values, where="post")
        axis.set_ylabel(name if any(v is not None for v in columns[name]) else f"{name}: not told")
    for axis in (rates, gammas, acceptance):
        axis.set_xlabel("seconds")
    done = finished(run)
    for name, measure in (("TTFT", ttft_s), ("TPOT", tpot_s), ("latency", latency_s)):
        own = np.sort([measure(record) for record in done])
        own = own[np.isfinite(own) & (own > 0)]
        if own.size:
            latencies.step(own, np.arange(1, own.size + 1) / own.size, where="post", label=name)
            latencies.set_xscale("log")
    if done:
        latencies.legend(fontsize="small")
    latencies.set_xlabel("seconds")
    latencies.set_ylabel("share of requests")
    for axis in (rates, gammas, acceptance, latencies):
        axis.grid(visible=True, alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    try:
        figure.savefig(Path(path), format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"--png {path}: cannot be written ({error.strerror})") from None
