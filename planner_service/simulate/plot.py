"""A PNG of runs: regret, share lost, gammas and batch size over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nightjar.errors import ConfigError
from planner_service.simulate.report import Summary, by_policy

PANELS = (
    ("regret_tokens", "lost throughput so far, tokens"),
    ("lost_share", "share of throughput lost"),
    ("gamma", "gamma (dotted: the best)"),
    ("batch_size", "batch size"),
)


def check(path: str) -> None:
    """Refuse before the runs, not after them.

    Raises:
        ConfigError: matplotlib is not installed, or there is no such folder.
    """
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--png {path}: there is no such folder")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "--png: needs matplotlib, the extra `plots`: pip install 'nightjar[plots]'"
        ) from None


def write(path: str, summaries: Sequence[Summary], title: str) -> None:
    """Write the PNG: a line for each policy, its mean over the seeds, with their spread behind.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True).flat
    for (name, label), axis in zip(PANELS, axes, strict=True):
        for number, (policy, runs) in enumerate(by_policy(summaries).items()):
            _line(axis, policy, runs, name, f"C{number % 10}")
        axis.set_ylabel(label)
        axis.set_xlabel("decode steps")
        axis.grid(visible=True, alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.suptitle(title)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"--png {path}: cannot be written ({error.strerror})") from None


def _line(axis: Any, policy: str, runs: Sequence[Summary], name: str, color: str) -> None:
    # A run may end early, with its trace: the mean is over the steps that all of them have.
    steps = min((run.curves.step for run in runs), key=lambda step: step[-1] if step else 0)
    if not steps:
        return
    values = np.array(
        [np.interp(steps, run.curves.step, getattr(run.curves, name)) for run in runs]
    )
    axis.plot(steps, values.mean(axis=0), color=color, label=policy, linewidth=1.2)
    if len(runs) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    if name == "gamma":
        bests = [np.interp(steps, run.curves.step, run.curves.optimal_gamma) for run in runs]
        axis.plot(steps, np.mean(bests, axis=0), color=color, linestyle=":", linewidth=0.8)
