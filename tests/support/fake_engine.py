"""An engine without a model: speaks the channel's protocol, answers by repeating the prompt.

Log-probabilities are `logprob` of the token; the likeliest tokens are always 0, 1, 2 and so on.

Run as a process in the engine's place. What it was told is appended, a line each, to --log.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
import time
from pathlib import Path

import msgspec

from worker.channel import EngineChannel
from worker.messages import (
    Abort,
    Finished,
    Logprobs,
    Progress,
    Ready,
    RowUsage,
    Shutdown,
    StartFailed,
    Status,
    StepOutput,
    Submit,
    ToEngine,
)

VOCAB_SIZE, MAX_MODEL_LEN = 320, 512


def main() -> int:
    """Run until told to stop; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--tick-ms", type=float, default=1)
    parser.add_argument("--num-tokens", type=int, default=1, help="tokens of a row's step")
    parser.add_argument("--context", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--hold", action="store_true", help="requests wait for ever")
    parser.add_argument("--prefill-s", type=float, default=0, help="time to the first token")
    parser.add_argument("--wedge-at", type=int, default=0, help="say nothing from this step on")
    parser.add_argument("--die-at", type=int, default=0, help="exit with 7 at this step")
    parser.add_argument("--refuse", default="", help="kind of StartFailed")
    parser.add_argument("--leave-s", type=float, default=0, help="how long it then takes to end")
    parser.add_argument("--start-s", type=float, default=0, help="how long the start takes")
    args = parser.parse_args()
    channel = EngineChannel(args.socket)
    channel.send(Progress(stage="pretending", detail="no model is loaded"))
    time.sleep(args.start_s)
    if args.refuse:
        channel.send(StartFailed(kind=args.refuse, message="no good"))
        time.sleep(args.leave_s)
        channel.close()
        return 1
    channel.send(msgspec.structs.replace(ready(), max_model_len=args.context))
    print("noise on stdout")
    FakeEngine(channel, args).run()
    channel.close()
    return 0


def ready() -> Ready:
    """Facts of an engine that has no model."""
    return Ready(
        engine_pid=os.getpid(),
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        dtype="float32",
        device="cpu",
        max_gamma=5,
        max_batch_size=4,
        proposer="none",
        target_identity="target",
        draft_identity="",
        arithmetic="exact",
        arithmetic_reason="",
        fingerprint="fake",
        build="eager",
        pool=None,
    )


class FakeEngine:
    """Rows repeat their prompt; a row with stop strings ends with "stop", others with "length"."""

    def __init__(self, channel: EngineChannel, args: argparse.Namespace) -> None:
        self.channel, self.args = channel, args
        self.rows: dict[int, Submit] = {}
        self.sent: dict[int, int] = {}
        self.busy_until = 0.0
        self.num_steps = 0

    def run(self) -> None:
        """Loop until told to stop."""
        while True:
            for message in self.channel.poll(self.args.tick_ms / 1000):
                self.note(message)
                if isinstance(message, Submit):
                    self.rows[message.request_id] = message
                    self.sent[message.request_id] = len(message.prior_token_ids)
                    self.busy_until = time.monotonic() + self.args.prefill_s
                elif isinstance(message, Abort):
                    self.rows.pop(message.request_id, None)
                elif isinstance(message, Shutdown):
                    ends = [finished(row, "abort", self.sent[row]) for row in self.rows]
                    self.channel.send(
                        StepOutput(request_ids=[], num_tokens=[], token_ids=b"", finished=ends)
                    )
                    return
            self.step()

    def note(self, message: ToEngine) -> None:
        """Append what arrived to the log."""
        request_id = getattr(message, "request_id", "")
        with Path(self.args.log).open("a") as file:
            print(type(message).__name__, request_id, message, file=file)

    def step(self) -> None:
        """One step of all rows, and a status."""
        if self.rows and not self.args.hold and time.monotonic() >= self.busy_until:
            self.num_steps += 1
            if self.num_steps == self.args.die_at:
                os._exit(7)
            if self.num_steps == self.args.wedge_at:
                time.sleep(1000)
            self.channel.send(self.output())
        self.channel.send(self.status())

    def output(self) -> StepOutput:
        """Next tokens of every row."""
        ids: list[int] = []
        counts: list[int] = []
        request_ids = list(self.rows)
        ended: list[Finished] = []
        scored: list[Logprobs] = []
        prompts: list[Logprobs] = []
        for request_id in request_ids:
            row, sent = self.rows[request_id], self.sent[request_id]
            count = min(self.args.num_tokens, row.sampling.max_tokens - sent)
            prompt = row.prompt_token_ids
            new = [prompt[(sent + i) % len(prompt)] for i in range(count)]
            ids += new
            counts.append(count)
            if row.sampling.num_logprobs >= 0:
                scored.append(logprobs(request_id, new, row.sampling.num_logprobs))
            if row.sampling.num_prompt_logprobs >= 0 and not sent:
                k, middle = row.sampling.num_prompt_logprobs, max(1, len(prompt) // 2)
                prompts += [logprobs(request_id, prompt[1:middle], k)]
                prompts += [logprobs(request_id, prompt[middle:], k)]
            self.sent[request_id] = sent + count
            if sent + count == row.sampling.max_tokens:
                reason = "stop" if row.sampling.stop else "length"
                ended.append(finished(request_id, reason, sent + count))
                del self.rows[request_id]
        return StepOutput(
            request_ids=request_ids,
            num_tokens=counts,
            token_ids=struct.pack(f"<{len(ids)}i", *ids),
            finished=ended,
            logprobs=scored,
            prompt_logprobs=prompts,
        )

    def status(self) -> Status:
        """As much as a status means here."""
        return Status(
            num_waiting=0,
            num_running=len(self.rows),
            num_free_blocks=100 - len(self.rows),
            num_total_blocks=100,
            gamma=0,
            policy_version="",
            num_steps=self.num_steps,
            num_generated_tokens=0,
            num_draft_tokens=4,
            num_accepted_tokens=3,
            num_preemptions=0,
            residency="none",
            draft_epoch=0,
            expanded=False,
            num_expansions=0,
            num_contractions=0,
            num_granted_blocks=0,
            rss_bytes=1,
        )


def logprob(token_id: int) -> float:
    """What every token has everywhere; exact in float32."""
    return -token_id / 64


def logprobs(request_id: int, token_ids: list[int], num_top: int) -> Logprobs:
    """The columns of some tokens of a row."""
    count = len(token_ids) * num_top
    top = list(range(num_top)) * len(token_ids)
    return Logprobs(
        request_id=request_id,
        num_top=num_top,
        chosen=struct.pack(f"<{len(token_ids)}f", *map(logprob, token_ids)),
        top_ids=struct.pack(f"<{count}i", *top),
        top=struct.pack(f"<{count}f", *map(logprob, top)),
    )


def finished(request_id: int, reason: str, num_tokens: int) -> Finished:
    """The end of a row."""
    return Finished(
        request_id=request_id,
        reason=reason,
        usage=RowUsage(
            num_prompt_tokens=1,
            num_completion_tokens=num_tokens,
            num_cached_tokens=0,
            num_draft_tokens=4,
            num_accepted_tokens=3,
            num_steps=num_tokens,
            gamma_histogram=(num_tokens, 2),
            policy_version="1-fixed",
            num_preemptions=0,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
