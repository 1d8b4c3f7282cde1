"""Arm: vLLM, run with its own packages on the path; the same jobs as Nightjar's arm."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import transformers

from gpu.load import Arrival, Latencies, prompts

# vLLM asks for it at import, and where mistral_common is not usable it is not there.
transformers.MistralCommonBackend = type("MistralCommonBackend", (), {})

import vllm  # noqa: E402
from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402


class VllmArm:
    """An engine that waits for jobs."""

    def __init__(self, settings: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self._llm = LLM(
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_prefix_caching=False,
            disable_log_stats=True,
            **settings,
        )
        self._ids = itertools.count()
        self.facts = {
            "version": vllm.__version__,
            "own_process": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0",
            "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
            "start_s": round(time.perf_counter() - begin, 1),
        }

    def run(self, **job: Any) -> dict[str, Any]:
        """Do one job."""
        operation = job.pop("op")
        found: dict[str, Any] = getattr(self, f"do_{operation}")(**job)
        return found

    def do_closed(self, **job: Any) -> dict[str, Any]:
        """Seconds to answer prompts, all at once."""
        max_tokens = job.pop("max_tokens")
        asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts(**job)]
        params = _params(max_tokens, RequestOutputKind.FINAL_ONLY)
        begin = time.perf_counter()
        answers = self._llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(answer.outputs[0].token_ids) == max_tokens for answer in answers)
        return {"seconds": seconds}

    def do_open(self, arrivals: Sequence[Arrival], vocab: int, limit_s: float) -> dict[str, Any]:
        """Latencies under arrivals in real time; ends with the last first token or a failure."""
        engine = self._llm.llm_engine
        requests = [
            TokensPrompt(prompt_token_ids=prompts(1, prompt, vocab=vocab, seed=index)[0])
            for index, (_, prompt, _) in enumerate(arrivals)
        ]
        begin = time.perf_counter() + 0.5
        times = Latencies([begin + due for due, _, _ in arrivals], limit_s)
        index_of: dict[str, int] = {}
        submitted = 0
        while True:
            now = time.perf_counter()
            while submitted < len(requests) and times.due[submitted] <= now:
                name = f"open-{next(self._ids)}"
                index_of[name] = submitted
                params = _params(arrivals[submitted][2], RequestOutputKind.DELTA)
                engine.add_request(name, requests[submitted], params)
                submitted += 1
            if not engine.has_unfinished_requests():
                if submitted < len(requests):
                    time.sleep(max(0.0, times.due[submitted] - time.perf_counter()))
                    continue
                break
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                times.add(index_of[output.request_id], len(output.outputs[0].token_ids), now)
            if times.complete or times.failed(now):
                break
        summary = times.summary(time.perf_counter())
        engine.abort_request(list(index_of))
        while engine.has_unfinished_requests():
            engine.step()
        return dict(summary)


def _params(max_tokens: int, kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=kind
    )


def main() -> None:
    """Load, then serve jobs until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    arm = VllmArm(json.loads(sys.argv[1]))
    print(json.dumps({"ready": arm.facts}), file=out)
    for line in sys.stdin:
        try:
            answer = arm.run(**json.loads(line))
        except Exception as error:  # told; whether later jobs can run will show
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out)


if __name__ == "__main__":
    main()
