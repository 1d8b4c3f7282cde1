"""Arm: Nightjar's engine in this process, without services; as vLLM's arm, tokens in, tokens out.

Reads one JSON job a line, answers one JSON line. Flags are the worker's.
"""

from __future__ import annotations

import json
import os
import sys
import time

from nightjar.config import parse
from worker.config import WorkerConfig
from worker.engine.main import start
from worker.messages import Progress, SamplingParams, StepOutput, Submit, ToEngine, ToFront


class Direct:
    """The channel's place: jobs go straight to the engine."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.outputs: list[StepOutput] = []

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """All messages at once."""
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: ToFront) -> None:
        """Keep outputs, show progress."""
        if isinstance(message, StepOutput):
            self.outputs.append(message)
        elif isinstance(message, Progress):
            print(f"{message.stage} {message.detail}", file=sys.stderr)


def main() -> None:
    """Load, then serve jobs."""
    config = parse(WorkerConfig, sys.argv[1:], prog="engine arm", description=__doc__ or "")
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    channel = Direct()
    models, engine, ready = start(config, channel)  # type: ignore[arg-type]
    facts = {
        "arithmetic": ready.arithmetic,
        "reason": ready.arithmetic_reason,
        "build": ready.build,
        "dtype": ready.dtype,
    }
    print(json.dumps({"ready": facts}), file=out)
    next_id = 0
    for line in sys.stdin:
        job = json.loads(line)
        channel.outputs.clear()
        begin = time.perf_counter()
        num_finished, histogram, drafted, accepted = 0, [0] * 9, 0, 0
        tokens: dict[int, list[int]] = {}
        pending = []
        for prompt in job["prompts"]:
            params = SamplingParams(
                temperature=job.get("temperature", 0.0),
                seed=next_id,
                max_tokens=job["max_tokens"],
                ignore_eos=job.get("ignore_eos", True),
                max_gamma=job.get("max_gamma"),
            )
            pending.append(Submit(request_id=next_id, prompt_token_ids=prompt, sampling=params))
            tokens[next_id] = []
            next_id += 1
        # At most so many at once; the next one enters as one leaves.
        at_once = job.get("at_once", len(pending))
        channel.inbox, pending = [*pending[:at_once]], pending[at_once:]
        while num_finished < len(tokens):
            engine.turn()
            for output in channel.outputs:
                ids, at = memoryview(output.token_ids).cast("i"), 0
                for request_id, count in zip(output.request_ids, output.num_tokens, strict=True):
                    tokens[request_id] += ids[at : at + count].tolist()
                    at += count
                for finished in output.finished:
                    assert finished.reason in ("stop", "length"), finished
                    num_finished += 1
                    channel.inbox += [pending.pop(0)] if pending else []
                    usage = finished.usage
                    drafted += usage.num_draft_tokens
                    accepted += usage.num_accepted_tokens
                    for gamma, count in enumerate(usage.gamma_histogram):
                        histogram[gamma] += count
            channel.outputs.clear()
        seconds = time.perf_counter() - begin
        answer = {
            "seconds": seconds,
            "tokens": list(tokens.values()),
            "drafted": drafted,
            "accepted": accepted,
            "gamma_histogram": histogram,
        }
        print(json.dumps(answer), file=out)
    models.close()


if __name__ == "__main__":
    main()
