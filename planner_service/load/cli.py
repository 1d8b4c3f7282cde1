"""`nightjar bench serve`: loads a running server and says how fast, how late and how drafted.

Any server of `nightjar.v1` (--target HOST:PORT) or of the OpenAI-compatible API
(--target http://HOST:PORT/v1) can be loaded; answers stream, and tokens are those of the server's
usage, not chunks. Ctrl-C ends a run with the results so far.

--data:      spec-bench:FILE            questions of Spec-Bench's question.jsonl, as chats
             azure:FILE, mooncake:FILE  lengths of a trace, and its arrivals
             sharegpt-like, alpaca-like lognormal lengths with those data sets' means, no more
             fixed:PROMPT,OUTPUT        tokens of every request
--arrivals:  closed                     --clients requests at any time
             poisson                    --rate requests per second
             burst, oscillation         Nightjar's stress patterns, --rate times as fast
             trace                      the trace's own, --rate times as fast
             rates:5x20,30x10           5 requests/s for 20 s, 30 for 10 s, and again
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from nightjar import tls
from nightjar.chat import find_gateway
from nightjar.config import at_least, option, parse
from nightjar.errors import ConfigError
from planner_service.load import plot, report
from planner_service.load.endpoint import Endpoint, Wish
from planner_service.load.run import Limits, Load, Run
from planner_service.load.workload import ARRIVALS, DATA, Workload, workload
from planner_service.simulate.plot import check as check_png

INTERRUPTED = 130  # exit status


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What to send, to whom, and where the figures go."""

    target: str = option("", "HOST:PORT or unix:PATH (gRPC), or a URL ending in /v1; empty finds "
        "the `nightjar up` of this user")  # fmt: skip
    model: str = option("", "name to send over HTTP; empty takes the first one listed")
    api_key: str = option("", "key to send; better as NIGHTJAR_API_KEY, which others cannot see")
    tls_ca: str = option("", "PEM file of who signed the server's certificate; gRPC: empty: no TLS")
    data: str = option("sharegpt-like", DATA)
    arrivals: str = option("closed", ARRIVALS)
    clients: int = at_least(1, 8, "closed: requests at any time")
    rate: float = option(1.0, "see --arrivals", check=lambda rate: rate > 0, limit="above 0")
    requests: int = at_least(0, 0, "most requests; 0: no limit")
    seconds: float = at_least(0, 0.0, "send for so long, then wait for what runs; 0: no limit")
    warm_up_s: float = at_least(0, 0.0, "seconds at the start that do not count")
    max_prompt: int = at_least(1, 1024, "tokens at which prompts of --data's lengths are cut")
    max_output: int = at_least(1, 256, "tokens at which answers are cut; spec-bench: their length")
    temperature: float = at_least(0, 0.0, "0 is greedy")
    ignore_eos: bool = option(True, "answers have their full length; false for servers that "
        "refuse it")  # fmt: skip
    max_gamma: int | None = option(None, "most drafts of a step, 0 for none; Nightjar alone",
        check=lambda gamma: 0 <= gamma <= 8, limit="0 to 8")  # fmt: skip
    seed: int = at_least(0, 0, "of lengths, texts, arrivals and sampling")
    slo_ttft_ms: float = at_least(0, 0.0, "goodput: longest time to the first token; 0: any")
    slo_tpot_ms: float = at_least(0, 0.0, "goodput: longest time per further token; 0: any")
    slo_latency_ms: float = at_least(0, 0.0, "goodput: longest time to the last token; 0: any")
    timeout_s: float = at_least(0.1, 600.0, "seconds after which a request has failed")
    bin_s: float = at_least(0.05, 1.0, "seconds of a point over time")
    json: str = option("", "file for all figures; - prints them instead of the table")
    csv: str = option("", "file for a row a request")
    png: str = option("", "file for plots (needs matplotlib: the extra `plots`)")
    run_dir: str = option("~/.cache/nightjar/run", "where `nightjar up` notes its addresses")


def main(argv: Sequence[str]) -> int:
    """Load and report; returns 1 if a request failed, 130 after Ctrl-C."""
    config = parse(LoadConfig, argv, prog="nightjar bench serve", description=str(__doc__))
    asked = workload(
        config.data,
        config.arrivals,
        rate=config.rate,
        max_prompt=config.max_prompt,
        max_output=config.max_output,
    )
    if not config.requests and not config.seconds and config.arrivals != "trace":
        raise ConfigError(f"--arrivals {config.arrivals} has no end: give --requests or --seconds")
    for path in filter(None, (config.json.removeprefix("-"), config.csv)):
        if not Path(path).parent.is_dir():
            raise ConfigError(f"{path}: there is no such folder")
    if config.png:
        check_png(config.png)
    endpoint = _endpoint(config)
    run = asyncio.run(_load(config, asked, endpoint))
    slo = report.Slo(
        ttft_s=config.slo_ttft_ms / 1000,
        tpot_s=config.slo_tpot_ms / 1000,
        latency_s=config.slo_latency_ms / 1000,
    )
    figures = report.summarize(run, slo, warm_up_s=config.warm_up_s, bin_s=config.bin_s)
    _write(config, asked, run, slo, figures)
    if run.interrupted:
        return INTERRUPTED
    return 1 if figures["num_failed"] else 0


def _endpoint(config: LoadConfig) -> Endpoint:
    target = config.target or find_gateway(config.run_dir)
    if target.startswith(("http://", "https://")):
        from planner_service.load.http_client import HttpEndpoint

        return HttpEndpoint(
            target,
            model=config.model,
            api_key=config.api_key,
            ca=config.tls_ca,
            timeout_s=config.timeout_s,
        )
    from planner_service.load.grpc_client import GrpcEndpoint

    credentials = tls.client("--tls", config.tls_ca, "", "")
    return GrpcEndpoint(target, api_key=config.api_key, credentials=credentials)


async def _load(config: LoadConfig, asked: Workload, endpoint: Endpoint) -> Run:
    wish = Wish(
        temperature=config.temperature, ignore_eos=config.ignore_eos, max_gamma=config.max_gamma
    )
    limits = Limits(
        num_requests=config.requests,
        seconds=config.seconds,
        num_clients=config.clients if asked.is_closed else 0,
        timeout_s=config.timeout_s,
    )
    model = await endpoint.open()
    _say(f"{asked.name}{f'; model {model}' if model else ''}")
    load = Load(endpoint, wish, limits, _say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, load.stop)
    try:
        return await load.run(asked.asks(config.seed))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.remove_signal_handler(number)
        await endpoint.close()


def _write(
    config: LoadConfig, asked: Workload, run: Run, slo: report.Slo, figures: report.Figures
) -> None:
    own = {k: v for k, v in dataclasses.asdict(config).items() if k != "api_key"}
    whole = json.dumps({"workload": asked.name, "config": own, **figures}, indent=1)
    print(whole if config.json == "-" else report.table(figures))
    try:
        if config.json and config.json != "-":
            Path(config.json).write_text(whole + "\n")
        if config.csv:
            with Path(config.csv).open("w", newline="") as file:
                report.write_csv(file, run, slo)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written ({error.strerror})") from None
    if config.png:
        plot.write(config.png, figures, run, asked.name)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
