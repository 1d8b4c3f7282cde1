"""What is compared and how: cells, arms, temperature and seeds, fixed before any run."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_GAMMA = 5
OFF = "off"
FIXED = tuple(f"fixed:gamma={gamma}" for gamma in range(1, MAX_GAMMA + 1))
PUBLISHED = "nightjar:estimator=mean_of_ratios,switching_cost=table"  # arXiv 2512.22420
OURS = "model_guided"
LEARNING = (PUBLISHED, OURS)
CLOSED_ARMS = (OFF, *FIXED, *LEARNING)
BEST_FIXED = "best-fixed"  # stands for the gamma that was best on the mean of the closed cells
OPEN_ARMS = (OFF, BEST_FIXED, *LEARNING)
ELASTIC = "+elastic"  # after an arm's name: the draft's memory may serve as cache
ELASTIC_ARMS = (OURS, f"{OURS}{ELASTIC}")
ALIASES = {f"g{gamma}": name for gamma, name in enumerate(FIXED, 1)} | {"published": PUBLISHED}
# Of a published policy that is not measured, with defaults: replayed in the simulator.
REPLAYED = (
    "table:preset=vllm",
    "ema_tiers",
    "dsd",
    "tetris",
    "epsilon_greedy",
    "ucbspec",
    "exp3spec",
    "linucb",
    "lin_thompson",
    "regression",
    "q_learning",
    "nightjar",
    "nightjar:restart=test",
)
# Offered load of each trace, as a share of what `off` reaches in the closed loop with the most
# rows: its mean for a Poisson trace, its highest phase for a stress pattern.
TRACES = {"poisson 0.8": 0.8, "poisson 1.2": 1.2, "burst": 2.0, "oscillation": 2.0}
ELASTIC_TRACE = "poisson 1.2"


@dataclass(frozen=True, kw_only=True)
class Design:
    """Sizes and seeds of all sections."""

    rehearsal: bool = False  # it proves the program with a real pair, and measures nothing
    seed: int = 20_261_130
    temperature: float = 0.8
    cells: tuple[int, ...] = (1, 8, 32, 64, 128)  # rows of the closed loops
    max_tokens: int = 256  # of an answer, which may end before
    max_prompt: int = 1024  # tokens; longer questions are left out
    max_model_len: int = 2048
    slice_s: float = 5.0  # measured part of a closed loop's slice
    settle_s: float = 30.0  # at most, until all rows decode
    trace_s: float = 12.0  # arrivals of an open loop's slice
    drain_s: float = 60.0  # at most, until its last answer
    closed_passes: int = 4  # in ABBA order; each gives a pair of every two arms
    open_passes: int = 4
    # Before them, not counted: policies and caches begin cold, as a planner with a store does not.
    warm_passes: int = 2
    # Of the elastic section: a pool for some 150 of these requests, and more rows than that.
    capped_kv_tokens: int = 49_152
    capped_num_seqs: int = 256
    flags: tuple[str, ...] = field(
        default=("device=cuda", "dtype=bfloat16", "arithmetic=exact", "max-num-batched-tokens=2048")
    )

    @property
    def max_num_seqs(self) -> int:
        """Most rows of the engine: those of the largest cell."""
        return max(self.cells)


DESIGN = Design()
# The same sections in seconds on a CPU, of random weights.
TINY = Design(
    rehearsal=True,
    cells=(1, 2),
    max_tokens=12,
    max_prompt=48,
    max_model_len=96,
    slice_s=0.12,
    trace_s=0.3,
    warm_passes=1,
    closed_passes=2,
    open_passes=2,
    capped_kv_tokens=256,
    capped_num_seqs=4,
    flags=(
        "device=cpu",
        "dtype=float32",
        "num-threads=1",
        "build=eager",
        "arithmetic=free",
        "kv-mb=64",
    ),
)
# The same in minutes on a CPU, of a real pair: small enough that text and acceptance are real.
REHEARSAL = Design(
    rehearsal=True,
    cells=(1, 4, 12),
    max_tokens=48,
    max_prompt=128,
    max_model_len=192,
    slice_s=3.0,
    trace_s=5.0,
    warm_passes=1,
    closed_passes=2,
    open_passes=2,
    capped_kv_tokens=1024,
    capped_num_seqs=24,
    flags=(
        "device=cpu",
        "dtype=float32",
        "num-threads=2",
        "build=eager",
        "kv-mb=256",
        "max-num-batched-tokens=256",
    ),
)


def order(arms: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Arms of a pass: forward, then backward, so that a drift falls on all alike (ABBA)."""
    return arms if number % 2 == 0 else arms[::-1]
