"""Random requests whose answers are known, and every invariant of the engine checked in between."""

from __future__ import annotations

import argparse
import random

from gpu import memory_checks
from gpu.memory_link import Bench
from worker.messages import SamplingParams, Submit

Asked = tuple[list[int], int, float]  # prompt, tokens of the answer, temperature


class Load:
    """Requests at random, each of a fixed set whose answers are known."""

    def __init__(self, bench: Bench, options: argparse.Namespace) -> None:
        self._bench, self._rng = bench, random.Random(11)
        self.asked = [self._draw(options) for _ in range(options.distinct)]
        self.expected: list[list[int]] = []
        self.num_answered = self.num_wrong = 0
        self._open: dict[int, tuple[int, list[int]]] = {}
        self.most = options.cycle_rows  # requests at once

    def _draw(self, options: argparse.Namespace) -> Asked:
        rng, vocab = self._rng, self._bench.engine.vocab_size
        length = rng.choice([1, 5, 33, 150, 260][: options.lengths])
        prompt = [rng.randrange(vocab) for _ in range(length)]
        return prompt, rng.randint(8, options.longest), rng.choice([0.0, 0.7, 1.0])

    def answer_alone(self) -> None:
        """Learn what each answer is, at gamma 0 and with the draft in its place."""
        self._bench.set_gamma(0)
        for index in range(len(self.asked)):
            self._submit(index)
            while self._open:
                self.turn(submit=False)

    def _submit(self, index: int) -> None:
        prompt, count, temperature = self.asked[index]
        driver = self._bench.driver
        params = SamplingParams(
            temperature=temperature, seed=index, max_tokens=count, ignore_eos=True
        )
        request = Submit(request_id=next(driver._ids), prompt_token_ids=prompt, sampling=params)
        driver._submit(request)
        self._open[request.request_id] = index, []

    def turn(self, *, submit: bool = True) -> None:
        """One turn of the engine, every invariant checked after it."""
        bench = self._bench
        if submit and len(self._open) < self.most and self._rng.random() < 0.6:
            self._submit(self._rng.randrange(len(self.asked)))
        for request_id, ids in bench.driver._turn():
            index, tokens = self._open[request_id]
            tokens += ids
            if len(tokens) == self.asked[index][1]:
                del self._open[request_id]
                self._compare(index, tokens)
        bench.driver.retired.clear()  # else they would look like a leak
        bench.scheduler.check_integrity()
        memory_checks.whole(bench)

    def _compare(self, index: int, tokens: list[int]) -> None:
        if len(self.expected) < len(self.asked):
            assert index == len(self.expected)
            self.expected.append(tokens)
            return
        self.num_answered += 1
        self.num_wrong += tokens != self.expected[index]

    def drain(self) -> None:
        """Answer what is open."""
        while self._open:
            self.turn(submit=False)
