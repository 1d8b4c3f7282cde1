"""`nightjar bench serve`: what it sends, what it counts, and how it ends."""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from conditions import until
from fake_worker import FakeWorker

from gateway.config import GatewayConfig
from gateway.main import Gateway
from nightjar.errors import ConfigError
from planner_service.load import report
from planner_service.load.endpoint import Answer, Wish
from planner_service.load.grpc_client import GrpcEndpoint
from planner_service.load.http_client import HttpEndpoint
from planner_service.load.report import Slo, summarize
from planner_service.load.run import Limits, Load, Record, Run
from planner_service.load.workload import Ask, read_mooncake, workload

QUESTIONS = [{"category": c, "turns": [f"{c}?", "and?"]} for c in ("qa", "math", "rag")]


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    """A scripted worker: two tokens a step, one of two drafts accepted."""
    worker = await FakeWorker().start()
    yield worker
    await worker.kill()


@pytest_asyncio.fixture
async def gateway(worker: FakeWorker) -> AsyncIterator[Gateway]:
    """A gateway over it, with both of its protocols."""
    gateway = Gateway(
        GatewayConfig(
            grpc_listen="127.0.0.1:0", http_listen="127.0.0.1:0", workers=(worker.address,)
        )
    )
    await gateway.start()
    workers = gateway.registry.workers.values()
    await until(lambda: not any(w.not_ready for w in workers), "the worker is ready")
    yield gateway
    await gateway.stop()


def ask(index: int = 0, due_s: float = 0.0, max_tokens: int = 4) -> Ask:
    """A request."""
    return Ask(
        index=index,
        due_s=due_s,
        text="the",
        is_chat=False,
        max_tokens=max_tokens,
        category="c",
        seed=index,
    )


def record(sent_s: float, pieces: list[float], num_tokens: int, **answer: object) -> Record:
    """A finished request."""
    own = Answer(piece_times=pieces, num_tokens=num_tokens, **answer)  # type: ignore[arg-type]
    return Record(ask=ask(), answer=own, sent_s=sent_s, ended_s=pieces[-1])


async def bench(*flags: str) -> tuple[int, str, str]:
    """Run the command; its status, output and errors."""
    command = (sys.executable, "-m", "nightjar", "bench", "serve", *flags)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_both_protocols_count_the_same(gateway: Gateway, tmp_path: Path) -> None:
    """Over gRPC and HTTP: every token of the usage, drafts, gammas, by category, in files."""
    questions = tmp_path / "question.jsonl"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)))
    common = ["--arrivals=poisson", "--rate=200", "--requests=9", "--max-output=6", "--seed=5"]
    common += [f"--data=spec-bench:{questions}", "--slo-latency-ms=9000", f"--csv={tmp_path}/a.csv"]
    stored_at = (f"--json={tmp_path}/b.json", f"--png={tmp_path}/c.png")
    targets = (gateway.grpc_address, f"http://{gateway.http_address}/v1")
    answers = await asyncio.gather(
        bench(f"--target={targets[0]}", *common[:-1], "--json=-"),
        bench(f"--target={targets[1]}", *common, *stored_at),
    )
    assert [status for status, _, _ in answers] == [0, 0], answers
    shown = json.loads(answers[0][1])
    assert "requests finished" in answers[1][1]
    assert "acceptance        0.500" in answers[1][1]
    stored = json.loads((tmp_path / "b.json").read_text())
    for figures in (shown, stored):
        assert (figures["num_finished"], figures["num_failed"]) == (9, 0)
        assert figures["tokens_per_answer"] == 6
        assert figures["acceptance"] == 0.5
        assert figures["gamma_histogram"] == [0, 0, 27]
        assert figures["by_category"]["qa"]["num_requests"] == 3
        assert figures["goodput"]["share_of_requests"] == 1.0
        assert figures["tokens_per_s"] * figures["window_s"] == pytest.approx(54, rel=0.02)
        assert {g for g in figures["over_time"]["gamma"] if g is not None} == {2.0}
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [row["num_tokens"] for row in rows] == ["6"] * 9
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


async def test_ctrl_c_keeps_the_results_so_far(worker: FakeWorker, tmp_path: Path) -> None:
    """The run says what finished and what was cut, and leaves no request behind."""
    out = tmp_path / "out.json"
    flags = ["--data=fixed:4,8", "--clients=2", "--seconds=600", f"--json={out}"]
    command = (sys.executable, "-m", "nightjar", "bench", "serve", f"--target={worker.address}")
    process = await asyncio.create_subprocess_exec(
        *command, *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    await until(lambda: len(worker.requests) > 5, "requests came")
    worker.pause_after = 2
    await until(lambda: worker.num_active == 2, "both clients wait")
    seen = len(worker.requests)
    await until(lambda: len(worker.requests) == seen, "nothing more is sent")
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 130
    figures = json.loads(out.read_text())
    assert figures["interrupted"]
    assert figures["num_cut"] == 2
    assert figures["num_finished"] == figures["num_sent"] - 2 > 3
    await until(lambda: worker.num_active == 0, "the server has let go")


async def test_refusals_are_counted_and_named(worker: FakeWorker) -> None:
    """A failed request is no latency, and its reason is shown."""
    endpoint = GrpcEndpoint(worker.address, api_key="", credentials=None)
    limits = Limits(num_requests=3, seconds=0, num_clients=3, timeout_s=10)
    await endpoint.open()
    load = Load(endpoint, Wish(), limits, lambda _: None)
    run = await load.run(ask(i, max_tokens=300) for i in range(9))
    await endpoint.close()
    figures = summarize(run, Slo(), warm_up_s=0, bin_s=1)
    assert (figures["num_failed"], figures["num_finished"], figures["ttft_s"]) == (3, 0, None)
    assert "3 x INVALID_ARGUMENT: sampling.max_tokens" in report.table(figures)


async def test_nobody_there_is_said_at_once() -> None:
    """An address without a server is a wrong flag."""
    endpoint = HttpEndpoint("http://127.0.0.1:9/v1", model="", api_key="", ca="", timeout_s=5)
    with pytest.raises(ConfigError, match="--target: no model is listed"):
        await endpoint.open()


class Clockwork:
    """An endpoint whose answers take one turn of the event loop."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def open(self) -> str:
        """Nothing."""
        return ""

    async def ask(self, ask: Ask, wish: Wish, answer: Answer) -> None:
        """Answer at once."""
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        answer.num_tokens = ask.max_tokens

    async def close(self) -> None:
        """Nothing."""


async def test_a_closed_loop_keeps_its_clients_busy() -> None:
    """Never more requests than clients, as many as asked for, in order."""
    endpoint = Clockwork()
    limits = Limits(num_requests=50, seconds=0, num_clients=4, timeout_s=10)
    asks: Iterator[Ask] = (ask(i) for i in itertools.count())
    run = await Load(endpoint, Wish(), limits, lambda _: None).run(asks)
    assert endpoint.most == 4
    assert [r.ask.index for r in run.records] == list(range(50))
    assert run.num_cut == 0


def test_latencies_are_from_arrival_and_tokens_are_the_usage() -> None:
    """TTFT, TPOT, goodput and rates by hand; what comes before the warm-up counts nowhere."""
    run = Run(steady_end_s=10.0, total_s=12.0)
    run.records = [
        record(0.0, [1.0, 2.0], 10),  # in the warm-up
        record(3.0, [4.0, 5.0, 6.0, 8.0], 9, num_drafts=8, num_accepted=4, gamma_histogram=(1, 4)),
        record(6.0, [6.5, 11.5], 6, num_drafts=2, num_accepted=2, gamma_histogram=(0, 2)),
    ]
    figures = summarize(run, Slo(ttft_s=0.9, latency_s=9.0), warm_up_s=2.0, bin_s=1.0)
    assert figures["window_s"] == 8.0
    # Half of the first (its piece at 2.0), all of the second, half of the third.
    assert figures["tokens_per_s"] == pytest.approx((5 + 9 + 3) / 8)
    assert figures["ttft_s"]["mean"] == pytest.approx(0.75)
    assert figures["tpot_s"]["mean"] == pytest.approx((4 / 8 + 5 / 5) / 2)
    assert figures["latency_s"]["p50"] == pytest.approx((5 + 5.5) / 2)
    assert figures["requests_per_s"] == pytest.approx(2 / 8)  # one ends after the window
    assert figures["goodput"]["requests_per_s"] == 0.0 + 0 / 8  # 1.0 s to the first token
    assert figures["acceptance"] == pytest.approx(0.6)
    assert figures["mean_accepted_length"] == pytest.approx(2.0)
    assert figures["mean_gamma"] == pytest.approx(6 / 7)
    drawn = summarize(run, Slo(), warm_up_s=0.0, bin_s=3.0)["over_time"]
    assert drawn["at_s"] == [0.0, 3.0, 6.0]  # whole bins: the last second is left out
    assert drawn["tokens_per_s"] == pytest.approx([10 / 3, 4.5 / 3, 7.5 / 3], abs=0.01)
    late = Record(ask=ask(due_s=1.0), answer=Answer(piece_times=[4.0]), sent_s=3.0, ended_s=4.0)
    assert report.ttft_s(late) == 3.0


def test_workloads_depend_on_the_seed_alone(tmp_path: Path) -> None:
    """Equal seeds, equal requests; rates go through their phases; lengths have their means."""
    made = workload("alpaca-like", "rates:5x20,50x10", rate=1, max_prompt=4096, max_output=4096)
    first, again, other = (
        [(a.due_s, a.text, a.max_tokens) for a in itertools.islice(made.asks(seed), 3000)]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    times = np.array([at for at, _, _ in first])
    slow, fast = ((times % 30 < 20).sum() / 20, (times % 30 >= 20).sum() / 10)
    assert fast / slow == pytest.approx(10, rel=0.2)
    assert np.mean([n for _, _, n in first]) == pytest.approx(58.5, rel=0.05)
    assert np.mean([len(text.split()) for _, text, _ in first]) == pytest.approx(19.3, rel=0.05)
    trace = tmp_path / "mooncake.jsonl"
    rows = [(500, 9000, 30), (0, 20, 5), (2500, 7, 0)]
    keys = ("timestamp", "input_length", "output_length")
    trace.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
    made = workload(f"mooncake:{trace}", "trace", rate=2.0, max_prompt=100, max_output=20)
    asks = list(made.asks(0))
    assert [(a.due_s, len(a.text.split()), a.max_tokens) for a in asks] == [
        (0.0, 20, 5),
        (0.25, 100, 20),
        (1.25, 7, 1),
    ]
    assert read_mooncake(str(trace))[0].mean_output == pytest.approx(12)


@pytest.mark.parametrize(
    ("data", "arrivals", "words"),
    [
        ("sharegpt", "closed", "--data 'sharegpt'"),
        ("fixed:4", "closed", "--data"),
        ("fixed:4,4", "trace", "needs --data azure"),
        ("fixed:4,4", "rates:5", "RATExSECONDS"),
        ("fixed:4,4", "rates:0x5", "no phase has requests"),
        ("fixed:4,4", "sometimes", "must be one of closed"),
        ("spec-bench:/nowhere", "closed", "cannot be read"),
    ],
)
def test_a_wrong_workload_is_refused(data: str, arrivals: str, words: str) -> None:
    """The sentence names what is wrong."""
    with pytest.raises(ConfigError, match=words):
        workload(data, arrivals, rate=1, max_prompt=10, max_output=10)
