"""`python -m worker.engine.main`: the engine's process, started by the front and dying with it."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from nightjar import log
from nightjar.config import parse
from nightjar.errors import ConfigError, EngineFailure, NightjarError
from worker.channel import ChannelError, EngineChannel
from worker.config import WorkerConfig, resolved
from worker.engine.limits import check_config
from worker.messages import Progress, Ready, Shutdown, StartFailed

if TYPE_CHECKING:
    from worker.engine.engine import Engine
    from worker.model.build import Models

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine; returns the exit status: 0 after `Shutdown`, 1 if it failed.

    Raises:
        ConfigError: A flag or a variable is wrong.
    """
    parser = argparse.ArgumentParser(prog="worker.engine.main", add_help=False, allow_abbrev=False)
    parser.add_argument("--socket", required=True)
    own, flags = parser.parse_known_args(argv)
    config = parse(
        WorkerConfig,
        flags,
        prog="worker.engine.main",
        description="The engine process of `nightjar worker`, which starts it.",
    )
    log.configure("engine")
    return run_engine(config, own.socket)


def run_engine(config: WorkerConfig, socket_path: str) -> int:
    """Connect to the front, load, serve; returns the exit status."""
    _die_with_parent()
    signal.signal(signal.SIGTERM, _leave)
    try:
        channel = EngineChannel(socket_path)
    except OSError as error:
        log.get().error("the front is not there", socket=socket_path, reason=str(error))
        return 1
    models: Models | None = None
    try:
        try:
            models, engine, ready = start(config, channel)
        except Exception as error:
            known = isinstance(error, NightjarError)
            if not known:
                log.get().error("the engine could not start", exc_info=error)
            kind = type(error).__name__ if known else EngineFailure.__name__
            message = str(error) if known else f"{type(error).__name__}: {error}"
            channel.send(StartFailed(kind=kind, message=message))
            return 1
        channel.send(ready)
        # What is alive now stays alive: collections need not visit it in mid-step.
        gc.collect()
        gc.freeze()
        engine.run()
    except (ChannelError, EngineFailure) as error:
        log.get().error("the engine stops", reason=str(error))
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # leaving already, handlers of exit included
        if models is not None:
            models.close()
        channel.close()
        gc.unfreeze()  # what stayed frozen would be reported as leaked, by the bindings it is of
    return 0


def start(config: WorkerConfig, channel: EngineChannel) -> tuple[Models, Engine, Ready]:
    """Resolve folders, build models and engine, telling the front what takes long.

    Raises:
        NightjarError: This configuration or this model cannot be served.
    """
    check_config(config)
    config = resolved(config)
    progress = _progress(channel)
    from worker.model.folders import folders_of
    from worker.model.vocabulary import check_vocabularies

    target, draft = folders_of(config, progress)
    check_vocabularies(target, draft)

    # Only now: what is refused above is refused at once, before torch has been imported.
    import torch

    from worker.engine.assembly import assemble
    from worker.model.build import build_models
    from worker.text.detokenizer import Detokenizer
    from worker.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(target)
    models = build_models(config, target, draft, progress)
    try:
        engine = assemble(
            config,
            models,
            channel,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            stop_detector=lambda stop, least: Detokenizer(tokenizer, stop, least),
            num_threads=torch.get_num_threads(),
        )
        engine.runner.warm(progress)
    except BaseException:
        models.close()
        raise
    ready = Ready(
        engine_pid=os.getpid(),
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        dtype=models.dtype,
        device=config.device,
        max_gamma=engine.scheduler.drafting.max_gamma,
        max_batch_size=config.max_num_seqs,
        proposer=config.proposer,
        target_identity=models.target_identity,
        draft_identity=models.draft_identity,
        arithmetic=models.arithmetic,
        arithmetic_reason=models.arithmetic_reason,
        fingerprint=models.fingerprint,
        build=models.build,
        pool=models.pool,
        products=models.products,
        device_name=models.placement.name,
    )
    return models, engine, ready


def _progress(channel: EngineChannel) -> Callable[[str, str], None]:
    def progress(stage: str, detail: str = "") -> None:
        channel.send(Progress(stage=stage, detail=detail))
        if any(isinstance(message, Shutdown) for message in channel.poll(0)):
            sys.exit(0)  # asked to stop, or left alone, before it was ready

    return progress


def _die_with_parent() -> None:
    """Get SIGTERM when the front is gone, however it went; a closed socket says so too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _leave(_number: int, _frame: object) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as config_error:
        sys.stderr.write(f"error: {config_error}\n")
        sys.exit(2)
