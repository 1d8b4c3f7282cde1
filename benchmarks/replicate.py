"""A real model at the cost of a large one: a small Llama replicated, its function kept exactly.

    python benchmarks/replicate.py --source smollm2-135m --shape 7b --out /tmp/target --check
    python benchmarks/replicate.py --source default-draft --shape draft --out /tmp/draft --check

The folders are plain LlamaForCausalLM, and any engine serves them:

    nightjar up --model /tmp/target -- --draft /tmp/draft

Shapes (parameters without the embedding, which no step reads):

    7b             7.12B, 30 layers, 3456 wide, 48/8 heads of 64, FFN 19968
    13b            13.4B, 48 layers of which 18 add nothing, 5184 wide, 72/18 heads, FFN 13824
    30b            31.6B, 64 layers of which 34 add nothing, 5184 wide, 72/18 heads, FFN 27648
    draft          0.5B, 24 layers of which 20 add nothing, 1024 wide, 16/2 heads, FFN 4608
    draft-shallow  0.1B, the draft's 4 layers alone

Weights are the source's times powers of two, so none is rounded. With sums in float64 the logits
differ by float64's own error, and not at all where each result is rounded to bfloat16: --check
computes both. Real kernels add in another order for another width, so a replica's tokens are now
and then not the source's. Prints JSON; exit status 1 where the check fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from replicate_check import Weights, compare, config_of
from replicate_weights import SHAPES, CannotReplicate, Replica, Shape
from safetensors.torch import save_file
from torch import Tensor

from nightjar.errors import ConfigError
from worker.model.fetch import cache_folder, default_draft, resolve_draft

SHARD_BYTES = 2 << 30
NUM_WRITERS = 3  # files written at once; so many shards are in memory, and one that fills
DEFAULT_DRAFT = "default-draft"
TEXT = (
    "When it rains, water falls from the clouds to the ground. Some of it runs into rivers, and "
    "the rivers carry it to the sea; some of it the sun takes up again. So nothing is lost."
)


def replicate(source: Path, out: Path, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Write the replica's folder, shard by shard; gives its sizes.

    Raises:
        CannotReplicate: There is no exact replica.
    """
    replica = Replica(config_of(source), shape)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.safetensors*"):
        old.unlink()
    name = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps({**replica.config, "dtype": name}, indent=2))
    for path in source.iterdir():
        own = path.name.startswith(("config.", "model.", "nightjar."))
        if path.suffix in (".json", ".jinja", ".txt") and not own:
            shutil.copy(path, out / path.name)
    sizes = _write(out, replica.layers(Weights(source, dtype)))
    embedding = sizes.pop("model.embed_tokens.weight")
    config = replica.config
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return {
        "num_parameters": sum(sizes.values()) + embedding,
        "num_parameters_of_a_step": sum(sizes.values()),
        "num_kv_bytes_per_token": kv * dtype.itemsize,
        "num_layers_that_add": replica.num_layers,
        "hidden_size": config["hidden_size"],
    }


def _write(out: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Write shards and their index while the next ones are made; parameters by name."""
    sizes: dict[str, int] = {}
    shards: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    num_bytes = total = 0
    pending: list[Future[None]] = []
    with ThreadPoolExecutor(NUM_WRITERS) as pool:

        def end_shard() -> None:
            path = out / f"part-{len(shards):05}.safetensors"
            shards.append((path, list(shard)))
            while len(pending) >= NUM_WRITERS:
                pending.pop(0).result()
            pending.append(pool.submit(save_file, dict(shard), path, {"format": "pt"}))
            shard.clear()

        for name, tensor in tensors:
            shard[name], sizes[name] = tensor.contiguous(), tensor.numel()
            num_bytes += tensor.nbytes
            if num_bytes >= SHARD_BYTES:
                total, num_bytes = total + num_bytes, 0
                end_shard()
        total += num_bytes
        if shard:
            end_shard()
        for future in pending:
            future.result()
    places: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, 1):
        final = path.with_name(f"model-{number:05}-of-{len(shards):05}.safetensors")
        path.rename(final)
        places.update(dict.fromkeys(names, final.name))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return sizes


def check(source: Path, out: Path, *, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Compare logits on a short text, on any tokens where the source has no tokenizer."""
    tokenizer = source / "tokenizer.json"
    if tokenizer.exists():
        from tokenizers import Tokenizer

        ids = torch.tensor(Tokenizer.from_file(str(tokenizer)).encode(TEXT).ids)
    else:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config_of(source)["vocab_size"], (40,), generator=generator)
    return dict(compare(source, out, ids, dtype=dtype, device=device))


def main(argv: list[str] | None = None) -> int:
    """Write and, if asked, check."""
    options = _parsed(argv)
    dtype = getattr(torch, options.dtype)
    try:
        source = _source(options)
        begin = time.perf_counter()
        found = replicate(source, Path(options.out), options.shape, dtype)
        found["seconds"] = round(time.perf_counter() - begin, 1)
        if options.check:
            begin = time.perf_counter()
            found["check"] = check(source, Path(options.out), dtype=dtype, device=options.device)
            found["check"]["seconds"] = round(time.perf_counter() - begin, 1)
    except (CannotReplicate, ConfigError, OSError) as error:
        print(f"replicate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1))
    return 1 if options.check and not found["check"]["exact"] else 0


def _source(options: argparse.Namespace) -> Path:
    if options.source == DEFAULT_DRAFT:
        folder = default_draft("smollm2-135m")
        assert folder is not None
        return folder

    def say(stage: str, detail: str) -> None:
        print(stage, detail, file=sys.stderr)

    return resolve_draft(options.source, cache_folder(options.cache_dir), say)


def _parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--source", default="smollm2-135m", help=f"as `nightjar up --model`, or {DEFAULT_DRAFT}")
    add("--shape", required=True, type=_shape, help=f"{', '.join(SHAPES)}, or W,L,H,KV,F: copies "
        "of the width, layers, heads, KV heads, copies of the FFN")  # fmt: skip
    add("--out", required=True, help="folder to write; its old weights are removed")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the weights")
    add("--check", action="store_true", help="compare logits with the source's")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the check")
    add("--cache-dir", default="", help="where models are kept, as the worker's")
    return parser.parse_args(argv)


def _shape(text: str) -> Shape:
    if text in SHAPES:
        return SHAPES[text]
    try:
        width, layers, heads, kv_heads, ffn = (int(part) for part in text.split(","))
    except ValueError:
        known = ", ".join(SHAPES)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known}, nor W,L,H,KV,F") from None
    if min(width, layers, heads, kv_heads, ffn) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return Shape(
        width_copies=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_copies=ffn,
    )


if __name__ == "__main__":
    sys.exit(main())
