"""Short tables of what was measured; every figure also stands in the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Results = dict[str, Any]


def table(title: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([f"\n## {title}", *(line.rstrip() for line in lines)])


def best(figures: Sequence[float]) -> float:
    """The better of several rates."""
    return max(figures)


def bar(plain: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, str]]:
    """The peer's better rate at each batch size as users run it, and which arm gave it."""
    found: dict[str, tuple[float, str]] = {}
    for arm in ("vllm", "vllm-own"):
        for batch, cell in plain.get(arm, {}).items():
            found[batch] = max(found.get(batch, (0.0, "")), (best(cell["tok_s"]), arm))
    return found


def plain(results: Results) -> str:
    """Decode rates by arm and batch size, and their ratios."""
    by_arm: Mapping[str, Any] = results["plain"]
    batches = sorted({batch for cells in by_arm.values() for batch in cells}, key=int)
    rows = [[arm, *(_rate(cells.get(batch)) for batch in batches)] for arm, cells in by_arm.items()]
    text = table("plain decode, tok/s (spread of runs in %)", ["arm", *batches], rows)
    ratios = []
    own = {a: c for a, c in by_arm.items() if not a.startswith("vllm")}
    peer = bar(by_arm)
    for arm, cells in own.items():
        if peer:
            row = [_ratio(cells.get(b), peer[b][0] if b in peer else None) for b in batches]
            ratios.append([f"{arm} / vLLM's better", *row])
        slow = by_arm.get("vllm-invariant", {})
        if slow:
            row = [_ratio(cells.get(b), _best(slow.get(b))) for b in batches]
            ratios.append([f"{arm} / vLLM batch-invariant", *row])
        bare = own.get(arm.removesuffix("+draft"), {})
        if arm.endswith("+draft") and bare:
            row = [_ratio(cells.get(b), _best(bare.get(b))) for b in batches]
            ratios.append([f"{arm} / without a draft", *row])
    if not ratios:
        return text
    return text + table("plain decode, ratios", ["", *batches], ratios)


def tokens_per_step(alpha: float, gamma: int) -> float:
    """Expected tokens of a row in a step: 1 + alpha + … + alpha^gamma (arXiv 2211.17192)."""
    return sum(alpha**power for power in range(gamma + 1))


def computed(cells: Mapping[str, Any], batch: str, alpha: float) -> dict[int, float]:
    """Tokens a second by gamma: step times measured, acceptance assumed."""
    return {
        int(gamma): int(batch) * tokens_per_step(alpha, int(gamma)) / cell["step_ms"] * 1e3
        for gamma, cell in cells[batch].items()
    }


def spec(results: Results, alphas: Sequence[float]) -> str:
    """Step times by gamma, and the best gamma at each acceptance."""
    text = ""
    for arm, cells in results["spec"].items():
        gammas = sorted({gamma for cell in cells.values() for gamma in cell}, key=int)
        rows = [
            [b, *(f"{cell[g]['step_ms']:.3f}" if g in cell else "-" for g in gammas)]
            for b, cell in cells.items()
        ]
        text += table(f"{arm}: ms of a step by gamma", ["batch", *gammas], rows)
        peer = bar(results.get("plain", {}))
        rows = []
        for batch in cells:
            row: list[object] = [batch]
            for alpha in alphas:
                rates = computed(cells, batch, alpha)
                gamma = max(rates, key=rates.__getitem__)
                base = peer[batch][0] if batch in peer else None if peer else rates.get(0)
                over = f", {rates[gamma] / base:.2f} x" if base else ""
                row.append(f"gamma {gamma}: {rates[gamma]:.0f} tok/s{over}")
            rows.append(row)
        base_name = "vLLM's plain" if peer else "its own gamma 0"
        heads = ["batch", *(f"acceptance {alpha:g}" for alpha in alphas)]
        text += table(f"{arm}: best gamma, and over {base_name}", heads, rows)
    rows = [
        [c["arm"], c["batch"], c["gamma"], c["acceptance"], c["computed"], c["tok_s"], c["ratio"]]
        for c in results.get("synthetic", {}).values()
    ]
    heads = ["arm", "batch", "gamma", "acceptance", "computed tok/s", "run tok/s", "run / computed"]
    return text + (table("synthetic acceptance, run for real", heads, rows) if rows else "")


def idle(results: Results) -> str:
    """Shares of a step, and its kernels."""
    text = ""
    rows = [
        [
            f"{arm} batch {batch}",
            cell["plain"]["step_ms"],
            f"{cell['covered_us'] / 1e3:.3f}",
            f"{cell['idle_share']:.2%}",
            f"{cell['waits_us']:.0f} / {cell['short_gaps_us']:.0f}",
            f"{cell['roofline']:.1%}" if "roofline" in cell else "-",
        ]
        for arm, cells in results["idle"].items()
        for batch, cell in cells.items()
    ]
    heads = ["", "step ms", "covered ms", "idle", "waits / gaps us (recorded)", "of the roofline"]
    text += table("where a step's time goes", heads, rows)
    for arm, cells in results["idle"].items():
        for batch, cell in cells.items():
            rows = [
                [k["us_per_step"], k["calls_per_step"], k["name"][:90]] for k in cell["kernels"]
            ]
            text += table(f"{arm} batch {batch}: kernels", ["us/step", "calls", "kernel"], rows)
    return text


def openloop(results: Results) -> str:
    """Highest rates, and latencies at seven tenths of the first arm's."""
    rows = []
    for arm, found in results["openloop"].items():
        at = found.get("at_shared_rate") or {}
        rows.append(
            [
                arm,
                f"{found['highest_rate']:.2f}",
                f"{found.get('shared_rate', 0):.2f}",
                *(at.get(name, "-") for name in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s")),
            ]
        )
    heads = ["arm", "highest requests/s", "at requests/s", "TTFT p50", "TTFT p99", "TPOT p50"]
    return table("open loop: highest rate with TTFT p99 within the limit", heads, rows)


def serve(results: Results) -> str:
    """Rates of streaming clients, over the same load in process."""
    found: Mapping[str, Sequence[float]] = results["serve"]
    base = best(found["in process"]) if "in process" in found else None
    served = found.get("served")
    rows = []
    for name, rates in found.items():
        over = f"{best(rates) / base:.3f}" if base else "-"
        planned = name.endswith("open") and served is not None
        rows.append([name, f"{best(rates):.0f}", over, _over(rates, served) if planned else "-"])
    heads = ["", "tok/s", "over in process", "over no planner"]
    return table("streaming clients, prefill included", heads, rows)


def _over(rates: Sequence[float], base: Sequence[float] | None) -> str:
    return "-" if base is None else f"{best(rates) / best(base):.3f}"


def _best(cell: Mapping[str, Any] | None) -> float | None:
    return None if cell is None else best(cell["tok_s"])


def _rate(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    low, high = min(cell["tok_s"]), max(cell["tok_s"])
    return f"{high:.0f} ({(high - low) / high * 100:.1f})"


def _ratio(cell: Mapping[str, Any] | None, base: float | None) -> str:
    return "-" if cell is None or not base else f"{best(cell['tok_s']) / base:.3f}"
