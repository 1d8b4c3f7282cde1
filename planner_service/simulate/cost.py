"""What a simulated step truly costs: a table over batch size and gamma, and slopes beside it.

A policy never sees it. A run perturbs each cell, so that no prior taken from the table is true.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightjar.errors import ConfigError
from planner_service.context import MAX_BATCH_SIZE, MAX_GAMMA

Floats = NDArray[np.float64]

TABLES = Path(__file__).parent / "tables"
MIN_STEP_US = 1.0


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Microseconds of a decode step at a context length, and how they change with the rest.

    Between the batch sizes of the table costs are linear; beyond the last there is no batch.
    """

    name: str
    source: str
    context: int  # tokens per row that `step_us` holds at
    batch_sizes: tuple[int, ...]  # ascending, from 1
    step_us: tuple[tuple[float, ...], ...]  # [batch size][gamma], catch-up and prefill left out
    draft_step_us: tuple[float, ...]  # [batch size]: one more draft of each row, not verified
    kv_us_per_1000_tokens: float  # that the target reads beyond `context` a row
    draft_kv_us_per_1000_tokens: float  # the same for each draft step
    catch_up_us: float  # of a step that catches up at all
    catch_up_us_per_token: float
    catch_up_us_per_row: float
    prefill_us_per_token: float  # of a prompt, in the target

    @classmethod
    def load(cls, name: str) -> CostTable:
        """Read a shipped table by name, or any by path.

        Raises:
            ConfigError: There is no such file, or a value in it is impossible.
        """
        path = TABLES / f"{name}.json"
        if "/" in name or not path.is_file():
            path = Path(name)
        try:
            read = json.loads(path.read_text())
        except FileNotFoundError:
            shipped = ", ".join(sorted(table.stem for table in TABLES.glob("*.json")))
            raise ConfigError(f"truth {name!r}: no such file; shipped tables: {shipped}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"truth {name}: cannot be read as JSON ({error})") from None
        try:
            return _checked(cls, read)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"truth {name}: {error}") from None

    @property
    def max_batch_size(self) -> int:
        """Largest batch that the table has a cost for."""
        return self.batch_sizes[-1]

    @property
    def max_gamma(self) -> int:
        """Largest gamma that the table has a cost for."""
        return len(self.step_us[0]) - 1

    @cached_property
    def by_batch_size(self) -> Floats:
        """[max_batch_size + 1, max_gamma + 1]: microseconds at `context`; row 0 as row 1."""
        sizes = np.arange(self.max_batch_size + 1)
        columns = np.array(self.step_us).T
        return np.stack([np.interp(sizes, self.batch_sizes, column) for column in columns], axis=1)

    @cached_property
    def draft_by_batch_size(self) -> Floats:
        """[max_batch_size + 1]: microseconds of one more draft step at `context`."""
        sizes = np.arange(self.max_batch_size + 1)
        return np.interp(sizes, self.batch_sizes, self.draft_step_us)

    @cached_property
    def kv_slopes(self) -> Floats:
        """[max_gamma + 1]: microseconds per KV token beyond `context` a row."""
        drafts = np.arange(self.max_gamma + 1) * self.draft_kv_us_per_1000_tokens
        return (self.kv_us_per_1000_tokens + drafts) / 1000

    def steps_us(self, batch_size: NDArray[np.int64], num_kv_tokens: NDArray[np.int64]) -> Floats:
        """[steps, max_gamma + 1]: expected microseconds of steps, at every gamma."""
        beyond = (num_kv_tokens - self.context * batch_size)[:, None]
        cost = self.by_batch_size[batch_size] + beyond * self.kv_slopes
        return np.maximum(cost, MIN_STEP_US)

    def catching_up_us(self, num_tokens: float, num_rows: float) -> float:
        """Microseconds that the draft takes to compute tokens that it lacks."""
        if num_tokens <= 0:
            return 0.0
        tokens_us = self.catch_up_us_per_token * num_tokens
        return self.catch_up_us + tokens_us + self.catch_up_us_per_row * num_rows

    def perturbed(self, seed: int, sigma: float = 0.25) -> CostTable:
        """Each cell, and the cost of catching up, times its own lognormal noise of median 1."""
        if sigma == 0:
            return self
        rng = np.random.default_rng([seed, 0xC057])
        noise = np.exp(sigma * rng.standard_normal((len(self.batch_sizes), MAX_GAMMA + 1)))
        catch_up = math.exp(sigma * rng.standard_normal())
        cells = zip(self.step_us, noise, strict=True)
        return replace(
            self,
            step_us=tuple(
                tuple(us * float(n) for us, n in zip(row, by, strict=False)) for row, by in cells
            ),
            catch_up_us=self.catch_up_us * catch_up,
            catch_up_us_per_token=self.catch_up_us_per_token * catch_up,
            catch_up_us_per_row=self.catch_up_us_per_row * catch_up,
        )

    def with_kv_slope(self, factor: float) -> CostTable:
        """The same at `context`, with KV tokens beyond it `factor` times as dear."""
        return replace(
            self,
            kv_us_per_1000_tokens=self.kv_us_per_1000_tokens * factor,
            draft_kv_us_per_1000_tokens=self.draft_kv_us_per_1000_tokens * factor,
        )


def _checked(cls: type[CostTable], read: Any) -> CostTable:
    if not isinstance(read, Mapping):
        raise ValueError("must be an object")
    names = {field.name for field in fields(cls)}
    if read.keys() != names:
        raise ValueError(f"fields missing or unknown: {', '.join(sorted(names ^ read.keys()))}")
    sizes = tuple(int(size) for size in read["batch_sizes"])
    if not sizes or sizes[0] != 1 or sorted(set(sizes)) != list(sizes):
        raise ValueError("batch_sizes must ascend from 1")
    if sizes[-1] > MAX_BATCH_SIZE:
        raise ValueError(f"batch_sizes must be at most {MAX_BATCH_SIZE}")
    rows = tuple(tuple(float(us) for us in row) for row in read["step_us"])
    drafts = tuple(float(us) for us in read["draft_step_us"])
    lengths = {len(row) for row in rows}
    if len(rows) != len(sizes) or len(drafts) != len(sizes) or len(lengths) != 1:
        raise ValueError("step_us and draft_step_us need one row for each of batch_sizes")
    if not 1 <= min(lengths) <= MAX_GAMMA + 1:
        raise ValueError(f"step_us needs costs of gamma 0 to at most {MAX_GAMMA}")
    slopes = {name: float(read[name]) for name in names if name.endswith(("_tokens", "_token"))}
    slopes |= {name: float(read[name]) for name in ("catch_up_us", "catch_up_us_per_row")}
    for name, values in (
        ("step_us", [us for row in rows for us in row]),
        ("draft_step_us", drafts),
        *((name, [value]) for name, value in slopes.items()),
    ):
        least = MIN_STEP_US if name == "step_us" else 0.0
        if not all(math.isfinite(us) and us >= least for us in values):
            raise ValueError(f"{name} must be finite and at least {least:g}")
    context = int(read["context"])
    if context < 0:
        raise ValueError("context must be at least 0")
    return cls(
        name=str(read["name"]),
        source=str(read["source"]),
        context=context,
        batch_sizes=sizes,
        step_us=rows,
        draft_step_us=drafts,
        **slopes,
    )
