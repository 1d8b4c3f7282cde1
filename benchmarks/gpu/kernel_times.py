"""Times of paged attention on a device, over decode, verify and prefill, for several settings.

One line for each setting and case: `python -m benchmarks.gpu.kernel_times [SETTING ...]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from worker.kernels import attention, attention_filling, attention_inputs
from worker.kernels.attention import LayerRule
from worker.kernels.attention_filling import Filling
from worker.kernels.attention_inputs import LONG_HEIGHT
from worker.kernels.inputs import InputBuffers
from worker.model.pool import KVCache, KVGeometry

LAYERS = 8  # of one graph, so that no layer finds its keys in a cache
BLOCK = 16
WIDTH = 160  # blocks of a row's table
RULE = LayerRule(scaling=128**-0.5)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is tried; parts and tiles belong to the arithmetic version, the filling does not."""

    filling: Filling = field(default_factory=Filling)
    part: int = attention_inputs.PART
    tile: int = attention_inputs.TILE

    def use(self) -> None:
        """Let kernels that are launched from now on be of this setting."""
        attention_filling.FILLING = self.filling
        for module in (attention_inputs, attention_filling, attention):
            vars(module).update(PART=self.part, TILE=self.tile)


SETTINGS = {
    "default": Setting(),
    "resident-2": Setting(filling=Filling(resident=((16, 2), (32, 2)))),
    "never-full": Setting(filling=Filling(full=(3, 3))),
    "eight-warps": Setting(filling=Filling(resident=((16, 2), (32, 2)), few_warps=0)),
    "few-32": Setting(filling=Filling(few_warps=32)),
    "few-64": Setting(filling=Filling(resident=((16, 3), (32, 2), (64, 2)), few_warps=64)),
    "rows-64": Setting(
        filling=Filling(resident=((16, 3), (32, 2), (64, 2)), most_rows=64, few_warps=64)
    ),
    "rows-64-wide": Setting(filling=Filling(most_rows=64)),
    "never-sparse": Setting(filling=Filling(sparse=0.0)),
    "sparse-1": Setting(filling=Filling(sparse=1.0)),
    "stages-2": Setting(filling=Filling(most_stages=2)),
    "stages-3": Setting(filling=Filling(most_stages=3)),
    "aim-half": Setting(filling=Filling(aim=0.5)),
    "aim-double": Setting(filling=Filling(aim=2.0)),
    "aim-4": Setting(filling=Filling(aim=4.0)),
    "part-256": Setting(part=256),
    "part-64": Setting(part=64),
    "tile-128": Setting(tile=128, filling=Filling(few_warps=0)),
    "part-256-tile-128": Setting(part=256, tile=128, filling=Filling(few_warps=0)),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of one length with the same number of new tokens each."""

    rows: int
    count: int = 1
    context: int = 640  # new tokens included
    height: int = 2  # of its tiles
    capacity: int = 0  # of tiles; 0 takes one for each token, as a step's bucket does

    @property
    def num_tokens(self) -> int:
        """Of the forward; padding makes up for a lone one."""
        return max(2, self.rows * self.count)

    @property
    def num_bytes(self) -> float:
        """KV that one layer reads at least."""
        return self.rows * self.context * 2 * 2.0 * 4 * 128

    @property
    def flops(self) -> float:
        """Of one layer's products of 28 heads, by what its queries see."""
        return 4.0 * 28 * 128 * self.rows * self.count * (self.context - self.count / 2)

    def __str__(self) -> str:
        """Name its sizes."""
        return f"rows={self.rows} new={self.count} context={self.context} height={self.height}"


CASES = {
    "decode": [Case(rows=rows) for rows in (1, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256)]
    + [Case(rows=1, context=2500), Case(rows=8, context=2500), Case(rows=64, count=2)],
    "verify": [Case(rows=rows, count=4, height=4) for rows in (1, 8, 32, 64)]
    + [Case(rows=rows, count=6, height=8) for rows in (1, 8, 32)]
    + [Case(rows=32, count=count, height=h, capacity=32) for count, h in ((4, 4), (6, 8))],
    "prefill": [
        Case(rows=1, count=count, context=context, height=LONG_HEIGHT)
        for count, context in ((512, 512), (2048, 2048), (512, 2048))
    ],
}


class Bench:
    """One pool and its inputs, reused by every case."""

    def __init__(self, device: torch.device) -> None:
        """Fill the pool with normal values."""
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.device = device
        self.geometry = KVGeometry(
            num_layers=LAYERS,
            num_heads=28,
            num_kv_heads=4,
            head_dim=128,
            block_size=BLOCK,
            dtype=torch.bfloat16,
        )
        num_blocks = 256 * 50
        memory = torch.empty(
            num_blocks * self.geometry.block_bytes, dtype=torch.uint8, device=device
        )
        memory.view(torch.bfloat16).normal_()
        self.cache = KVCache(memory, self.geometry, num_blocks)
        self.order = torch.randperm(num_blocks, device=device).int()

    def layers(self, case: Case) -> Callable[[], list[torch.Tensor]]:
        """What one graph launches: every layer's writing and attending."""
        parts = attention_inputs.num_parts(WIDTH, BLOCK)
        tokens, long = case.num_tokens, case.height == LONG_HEIGHT
        buffers = InputBuffers(
            max_tokens=tokens,
            max_rows=256,
            table_width=WIDTH,
            num_partial_floats=attention.partial_floats(
                max_tokens=min(256, tokens), num_heads=28, head_dim=128, num_parts=parts
            ),
            device=self.device,
        )
        blocks = -(-case.context // BLOCK)
        owned = self.order[: case.rows * blocks]
        buffers.tables[: case.rows, :blocks] = owned.view(case.rows, blocks)
        # Rows, first tokens, numbers of queries, first positions.
        tiles = [
            (row, row * case.count + at, min(case.height, case.count - at), at)
            for row in range(case.rows)
            for at in range(0, case.count, case.height)
        ]
        columns = torch.tensor(tiles, dtype=torch.int32, device=self.device).T
        columns[3] += case.context - case.count
        target = buffers.long_tiles if long else buffers.short_tiles
        target[:, : len(tiles)] = columns
        inputs = buffers.view(
            tokens,
            tokens,
            short_height=2 if long else case.height,
            has_long=long,
            num_short=case.capacity or None,
        ).attention
        generator = torch.Generator(self.device).manual_seed(case.num_tokens)

        def normal(heads: int) -> torch.Tensor:
            return torch.randn(
                (1, heads, tokens, 128),
                generator=generator,
                device=self.device,
                dtype=torch.bfloat16,
            )

        query, key = normal(28), normal(4)

        def run() -> list[torch.Tensor]:
            return [
                attention.paged_attention(
                    query,
                    key,
                    key,
                    strips,
                    inputs,
                    RULE,
                    geometry=self.geometry,
                    num_sms=self.num_sms,
                )
                for strips in self.cache.strips
            ]

        return run

    def time(self, case: Case) -> tuple[float, torch.Tensor]:
        """Microseconds of a layer in a replayed graph, median of 20, and the first's output."""
        run = self.layers(case)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
        times = []
        for _ in range(20):
            start, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / LAYERS)
        return sorted(times)[10], outputs[0][0, : case.rows * case.count].clone()


def lines(names: list[str], kinds: list[str], device: torch.device) -> Iterator[str]:
    """One line for each case and setting; bits are compared with the first of its arithmetic."""
    bench = Bench(device)
    for kind in kinds:
        for case in CASES[kind]:
            seen: dict[tuple[int, int], torch.Tensor] = {}
            for name in names:
                setting = SETTINGS[name]
                setting.use()
                try:
                    micros, out = bench.time(case)
                except Exception as error:  # a setting that does not fit is told
                    yield f"{case} {name}: {type(error).__name__}: {error}"
                    continue
                first = seen.setdefault((setting.part, setting.tile), out)
                rate = f"{case.num_bytes / micros / 1e3:.0f} GB/s"
                if kind == "prefill":
                    rate = f"{case.flops / micros / 1e6:.0f} TFLOP/s"
                bits = "" if torch.equal(first, out) else ", BITS DIFFER"
                yield f"{case} {name}: {micros:.1f} us, {rate}{bits}"


def main() -> None:
    """Time what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", help=f"of {', '.join(SETTINGS)}; none takes all")
    parser.add_argument("--kinds", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    unknown = set(options.settings) - set(SETTINGS)
    if unknown:
        parser.error(f"no setting {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("it needs an NVIDIA GPU, and a torch that was built for it; here is none")
    for line in lines(options.settings or list(SETTINGS), options.kinds, torch.device("cuda")):
        print(line, flush=True)


if __name__ == "__main__":
    main()
