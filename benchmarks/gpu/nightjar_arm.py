"""Arm: Nightjar's engine, built as a worker builds it, for one JSON job a line."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpu import kernels
from gpu.driver import Driver, Feed, JobFailed
from gpu.load import prompts
from nightjar.config import parse
from worker.config import WorkerConfig
from worker.engine.main import start
from worker.model.fetch import cache_folder, resolve_model
from worker.text.chat_template import Chat, Message
from worker.text.tokenizer import Tokenizer


class NightjarArm:
    """An engine that waits for jobs; an operation's name is a method's."""

    def __init__(self, flags: Sequence[str], say: Callable[[str], None]) -> None:
        """Load.

        Args:
            flags: The worker's own.
            say: Takes progress.
        """
        self._config = parse(WorkerConfig, flags, prog="arm", description=__doc__ or "", environ={})
        feed = Feed(say)
        begin = time.perf_counter()
        self._models, engine, ready = start(self._config, feed)  # type: ignore[arg-type]
        self._device = ready.device
        self._driver = Driver(engine, feed)
        self.facts: dict[str, Any] = {
            "arithmetic": ready.arithmetic,
            "arithmetic_reason": ready.arithmetic_reason,
            "build": ready.build,
            "device": ready.device,
            "dtype": ready.dtype,
            "max_gamma": ready.max_gamma,
            "num_blocks": self._models.layout.num_base_blocks,
            "can_pretend": hasattr(engine.runner, "synthetic_acceptance"),
            "start_s": round(time.perf_counter() - begin, 1),
        }

    def run(self, **job: Any) -> dict[str, Any]:
        """Do one job."""
        operation = job.pop("op")
        with self._prefix_cache(job.pop("prefix_cache", False)):
            try:
                found: dict[str, Any] = getattr(self, f"do_{operation}")(**job)
            except JobFailed:
                self._driver.reset()
                raise
        return found

    def close(self) -> None:
        """Let go of the models."""
        self._models.close()

    def do_closed(self, **job: Any) -> dict[str, Any]:
        """Seconds to answer prompts, without the answers."""
        at_once, max_gamma = job.pop("at_once", 0), job.pop("max_gamma", 0)
        max_tokens = job.pop("max_tokens")
        found = self._driver.closed(
            prompts(**job), max_tokens, at_once=at_once, max_gamma=max_gamma
        )
        return {"seconds": found["seconds"]}

    def do_answers(self, **job: Any) -> dict[str, Any]:
        """Answers themselves, to be compared."""
        at_once, max_gamma = job.pop("at_once", 0), job.pop("max_gamma", 0)
        max_tokens = job.pop("max_tokens")
        return self._driver.closed(prompts(**job), max_tokens, at_once=at_once, max_gamma=max_gamma)

    def do_steady(self, **job: Any) -> dict[str, Any]:
        """Period of steps at one gamma."""
        own = {name: job.pop(name, None) for name in ("gamma", "num_steps", "acceptance")}
        return self._driver.steady(prompts(**job), **own)

    def do_profile(self, **job: Any) -> dict[str, Any]:
        """The same steps without the profiler and with it."""
        gamma, num_steps = job.pop("gamma"), job.pop("num_steps")
        asked = prompts(**job)
        plain = self._driver.steady(asked, gamma=gamma, num_steps=num_steps)
        recording = kernels.Recording(self._device)
        recorded = self._driver.steady(
            asked, gamma=gamma, num_steps=num_steps, on_start=recording.start, on_end=recording.stop
        )
        return {
            "plain": plain,
            "recorded": recorded,
            **kernels.summarise(recording.spans(), num_steps),
        }

    def do_copy_rate(self, num_bytes: int) -> dict[str, Any]:
        """Bytes a second of a copy on the device."""
        return {"bytes_s": kernels.copy_rate(self._device, num_bytes)}

    def do_open(self, arrivals: list[Any], vocab: int, limit_s: float) -> dict[str, Any]:
        """Latencies under arrivals in real time."""
        return dict(self._driver.open(arrivals, vocab=vocab, limit_s=limit_s))

    def do_acceptance(
        self, texts: list[str], max_tokens: int, gamma: int, temperature: float, at_once: int
    ) -> dict[str, Any]:
        """How far drafts got, by position: of a real pair on real prompts."""
        cache = cache_folder(self._config.cache_dir)
        tokenizer = Tokenizer.load(resolve_model(self._config.model, cache, lambda *_: None))
        asked = [tokenizer.encode_chat(Chat([Message("user", text)])) for text in texts]
        room = self._driver.engine.max_model_len - max_tokens
        self._driver.closed(
            [ids for ids in asked if len(ids) <= room],
            max_tokens,
            at_once=at_once,
            max_gamma=gamma,
            temperature=temperature,
        )
        reached: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        for step in self._driver.retired:
            reached.update(dict(enumerate(step.done.reached)))
            accepted.update(dict(enumerate(step.done.accepted)))
        return {
            "num_prompts": sum(len(ids) <= room for ids in asked),
            "reached": [reached[i] for i in range(gamma)],
            "accepted": [accepted[i] for i in range(gamma)],
        }

    @contextlib.contextmanager
    def _prefix_cache(self, wanted: bool) -> Iterator[None]:
        """Equal prompts of a sweep are prefilled once; timed prefills never find anything."""
        blocks = self._driver.engine.scheduler.blocks
        before, blocks.prefix_cache = blocks.prefix_cache, wanted
        try:
            yield
        finally:
            blocks.prefix_cache = before


def main() -> None:
    """Load, then serve jobs until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    arm = NightjarArm(sys.argv[1:], lambda text: print(text, file=sys.stderr, flush=True))
    gc.collect()
    gc.freeze()  # as a worker's engine does
    print(json.dumps({"ready": arm.facts}), file=out)
    for line in sys.stdin:
        try:
            answer = arm.run(**json.loads(line))
        except Exception as error:  # told; whether later jobs can run will show
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out)
    arm.close()
    gc.unfreeze()  # else the bindings of what stayed frozen report leaks


if __name__ == "__main__":
    main()
