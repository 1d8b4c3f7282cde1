"""A better draft for a target: trained on text that the target itself writes, with its logits.

    python benchmarks/distill_draft.py write --out DIR --seconds 300
    python benchmarks/distill_draft.py train --out DIR --seconds 400      # goes on from --init
    python benchmarks/distill_draft.py train --out DIR --seconds 400 --shape 384,4,1152
    python benchmarks/distill_draft.py evaluate --out DIR --spec-bench question.jsonl

`write` lets Nightjar's engine write chats and prose from random first words; `train` lowers the
divergence of the draft's distribution from the target's there; `evaluate` runs both drafts in the
engine on Spec-Bench, of which training sees nothing, and prints the mean accepted length by
category, before and after. Its exit status is 0 only if the new draft is better: on the mean over
categories, greedy and sampled, and worse by more than 2 % in none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from distill_training import Training
from gpu.driver import Driver, Feed
from safetensors.torch import load_file, save_file

from nightjar.config import parse
from planner_service.load.workload import read_questions
from worker.config import WorkerConfig
from worker.engine.main import start
from worker.messages import SamplingParams, Submit
from worker.model.fetch import cache_folder, default_draft, resolve_draft, resolve_model
from worker.text.chat_template import Chat, Message
from worker.text.tokenizer import Tokenizer

SEED = 20_261_130
BLOCK_SIZE = 16
TEMPERATURES = (0.3, 0.7, 0.7, 1.0)  # of what is written
CHAT_SHARE = 0.85
ROWS = "rows.safetensors"
SAMPLED = 0.8  # temperature of the sampled evaluation
WORST = 0.98  # of its acceptance that a category may keep at least
Row = tuple[list[int], int]  # tokens, and how many of them are the prompt


def main(argv: list[str] | None = None) -> int:
    """One stage; returns its exit status."""
    options = _parsed(argv)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    status: int = options.stage(options)
    return status


def write(options: argparse.Namespace) -> int:
    """Rows of self-written text, until the time is up."""
    rng, rows = random.Random(options.seed), []
    with opened(options, []) as (driver, tokenizer):
        prompts, until = _beginnings(tokenizer, rng), time.monotonic() + options.seconds
        while time.monotonic() < until:
            rows += written(driver, prompts, options.rows, options.length, rng)
            _say(f"{len(rows)} rows, {len(rows) * options.length / 1e6:.2f} M tokens")
    tokens = torch.tensor([tokens for tokens, _ in rows], dtype=torch.int32)
    first = torch.tensor([first for _, first in rows], dtype=torch.int32)
    save_file({"tokens": tokens, "first": first}, Path(options.out) / ROWS)
    return 0


def written(
    driver: Driver, prompts: Iterator[list[int]], num_rows: int, length: int, rng: random.Random
) -> list[Row]:
    """Let the engine go on from prompts, each at a temperature of its own."""
    asked: dict[int, list[int]] = {}
    first: dict[int, int] = {}
    for number, prompt in zip(range(num_rows), prompts, strict=False):
        params = SamplingParams(
            temperature=rng.choice(TEMPERATURES),
            seed=rng.getrandbits(48),
            max_tokens=length - len(prompt),
            ignore_eos=True,  # a chat's first turn ends where its second begins
        )
        request = Submit(request_id=number, prompt_token_ids=prompt, sampling=params)
        asked[number], first[number] = list(prompt), len(prompt)
        driver.feed.inbox.append(request)
    while any(len(tokens) < length for tokens in asked.values()):
        driver.engine.turn()
        for output in driver.feed.outputs:
            ids, at = memoryview(output.token_ids).cast("i"), 0
            for request_id, count in zip(output.request_ids, output.num_tokens, strict=True):
                asked[request_id] += ids[at : at + count].tolist()
                at += count
            assert all(ended.reason != "error" for ended in output.finished), output.finished
        driver.feed.outputs.clear()
        driver.retired.clear()
    # The first word is drawn, not the model's: what is learned begins after it.
    return [(tokens, first[number]) for number, tokens in asked.items()]


def _beginnings(tokenizer: Tokenizer, rng: random.Random) -> Iterator[list[int]]:
    """Prompts that end in the first word of a user's turn, or of prose."""
    words = [
        i for i, text in tokenizer.vocabulary().items() if text.isalpha() and text[0].isupper()
    ]
    turn: list[int] = []
    if tokenizer.has_chat_template:
        one, two = (tokenizer.encode_chat(Chat([Message("user", word)])) for word in ("A", "1"))
        same = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
        turn = one[:same]
    while True:
        chats = bool(turn) and rng.random() < CHAT_SHARE
        yield [*(turn if chats else []), rng.choice(words)]


def train(options: argparse.Namespace) -> int:
    """Train on the rows, and write DIR/draft."""
    rows = load_file(Path(options.out) / ROWS)
    init = None if options.shape else _draft(options)
    training = Training(
        target=_target(options),
        init=init,
        shape=options.shape,
        device=options.device,
        batch=options.batch,
        seed=options.seed,
    )
    training.run(rows["tokens"].long(), rows["first"].long(), options.seconds, options.lr, _say)
    training.save(Path(options.out) / "draft")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Both drafts on Spec-Bench, by category; 0 only if the new one is better."""
    questions = _questions(options)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, folder in (("before", _draft(options)), ("after", Path(options.out) / "draft")):
        with opened(options, [f"--draft={folder}", f"--gamma={options.gamma}"]) as (driver, texts):
            asked = [(c, texts.encode_chat(Chat([Message("user", t)]))) for c, t in questions]
            found[name] = {
                f"{temperature:g}": lengths(driver, asked, options, temperature)
                for temperature in (0.0, SAMPLED)
            }
    print(_table(found))
    (Path(options.out) / "acceptance.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if is_better(found) else 1


def lengths(
    driver: Driver, asked: list[tuple[str, list[int]]], options: argparse.Namespace, at: float
) -> dict[str, float]:
    """Mean accepted length by category: tokens of a step that drafts, its own included."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    room = driver.engine.max_model_len - options.length
    for category in dict.fromkeys(name for name, _ in asked):
        own = [ids for name, ids in asked if name == category and len(ids) <= room]
        driver.closed(own, options.length, at_once=32, max_gamma=options.gamma, temperature=at)
        for step in driver.retired:
            for row in step.done.rows:
                if row.num_drafts:
                    sums[category][0] += 1
                    sums[category][1] += row.num_accepted
    return {name: 1 + accepted / steps for name, (steps, accepted) in sums.items() if steps}


def is_better(found: dict[str, dict[str, dict[str, float]]]) -> bool:
    """On the mean over categories at each temperature, and nowhere worse by more than a little."""
    for temperature, before in found["before"].items():
        after = found["after"][temperature]
        if sum(after.values()) <= sum(before.values()):
            return False
        if any(after[name] < WORST * value for name, value in before.items()):
            return False
    return True


def _table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        "| category | greedy, before | after | sampled, before | after |",
        "|---|---|---|---|---|",
    ]
    columns = [found[when][at] for at in found["before"] for when in ("before", "after")]
    names = list(columns[0])
    rows = [(name, [column[name] for column in columns]) for name in names]
    rows.append(("mean", [sum(column.values()) / len(column) for column in columns]))
    lines += [f"| {name} | " + " | ".join(f"{v:.3f}" for v in own) + " |" for name, own in rows]
    return "\n".join(lines)


@contextlib.contextmanager
def opened(options: argparse.Namespace, extra: list[str]) -> Iterator[tuple[Driver, Tokenizer]]:
    """An engine of the target, alone or with a draft."""
    flags = [f"--model={_target(options)}", f"--device={options.device}", *extra]
    flags += [f"--{flag}" for flag in options.flag]
    flags += [] if extra else ["--proposer=none"]
    flags += [f"--max-num-seqs={options.rows}", "--prefix-cache=false"]
    flags += [f"--block-size={BLOCK_SIZE}", f"--num-blocks={options.rows * 2048 // BLOCK_SIZE}"]
    config = parse(WorkerConfig, flags, prog="distill", description="", environ={})
    feed = Feed(_say)
    models, engine, _ = start(config, feed)  # type: ignore[arg-type]
    try:
        yield Driver(engine, feed), Tokenizer.load(_target(options))
    finally:
        models.close()


def _questions(options: argparse.Namespace) -> list[tuple[str, str]]:
    taken: dict[str, list[str]] = defaultdict(list)
    for category, text in read_questions(options.spec_bench):
        if len(taken[category]) < options.per_category:
            taken[category].append(text)
    return [(category, text) for category, texts in taken.items() for text in texts]


def _target(options: argparse.Namespace) -> Path:
    return resolve_model(options.model, cache_folder(""), _say)


def _draft(options: argparse.Namespace) -> Path:
    shipped = default_draft(options.model)
    if not options.init and shipped is not None:
        return shipped
    return resolve_draft(options.init, cache_folder(""), _say)


def _say(*words: str) -> None:
    print(*words, file=sys.stderr, flush=True)


def _parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(required=True)
    for stage in (write, train, evaluate):
        own = verbs.add_parser(stage.__name__, allow_abbrev=False, help=stage.__doc__)
        own.set_defaults(stage=stage)
        add = own.add_argument
        add("--out", required=True, help="folder of rows.safetensors, draft/ and acceptance.json")
        add("--model", default="smollm2-135m", help="target, as of `nightjar worker`")
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        add("--seed", type=int, default=SEED)
        add("--flag", action="append", default=[], metavar="NAME=VALUE", help="a worker's, more")
        add("--rows", type=int, default=256, help="requests that the engine runs at once")
        if stage is not train:
            add("--length", type=int, default=384 if stage is write else 128, help="tokens of a "
                "row, or of an answer")  # fmt: skip
        if stage is not evaluate:
            add("--seconds", type=float, required=True, help="time of the stage, start aside")
        if stage is not write:
            add("--init", default="", help="draft to go on from, or to compare with; the default's")
        if stage is train:
            add("--shape", type=_shape, default=(), help="WIDTH,LAYERS,FFN of a new draft instead")
            add("--batch", type=int, default=96, help="rows of a step")
            add("--lr", type=float, default=1e-3, help="largest learning rate")
        if stage is evaluate:
            add("--spec-bench", required=True, help="Spec-Bench's question.jsonl")
            add("--per-category", type=int, default=10, help="questions of each category")
            add("--gamma", type=int, default=4)
    return parser.parse_args(argv)


def _shape(text: str) -> tuple[int, int, int]:
    try:
        width, layers, ffn = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTH,LAYERS,FFN") from None
    if width % 128 or min(width, layers, ffn) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: the width must be a multiple of 128")
    return width, layers, ffn


if __name__ == "__main__":
    sys.exit(main())
