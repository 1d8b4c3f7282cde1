"""The folders of target and draft that a configuration names; what is local is told at once."""

from __future__ import annotations

from pathlib import Path

from nightjar.errors import ConfigError
from worker.config import WorkerConfig
from worker.model.fetch import (
    Progress,
    cache_folder,
    check_local,
    default_draft,
    read_json,
    resolve_draft,
    resolve_model,
)


def check_folders(config: WorkerConfig) -> None:
    """Refuse what this machine's files alone show to be wrong, without network and torch.

    Raises:
        ConfigError: No such model, its folder lacks a file, it takes fewer tokens than
            --max-model-len, there is no draft, or --cache-dir is no place for files.
    """
    cache = cache_folder(config.cache_dir)
    if config.cache_dir:
        _make(cache, config.cache_dir)
    needs_weights = config.load_format != "dummy"
    target = check_local(config.model, cache, needs_tokenizer=True, needs_weights=needs_weights)
    if config.proposer == "draft_model":
        if config.draft:
            check_local(config.draft, cache, needs_tokenizer=False, needs_weights=needs_weights)
        else:
            _own_draft(config)
    limit = _positions(target) if target is not None else None
    if limit is not None:
        check_positions(config, limit)


def check_positions(config: WorkerConfig, limit: int) -> None:
    """Refuse a --max-model-len above `limit`, for which the model was made.

    Raises:
        ConfigError: With both numbers.
    """
    if config.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len={config.max_model_len}: the model was made for {limit} tokens"
        )


def folders_of(config: WorkerConfig, progress: Progress) -> tuple[Path, Path | None]:
    """Folders of target and draft, fetched where they are not here; None without a draft model.

    Raises:
        ConfigError: As `check_folders`, or a model cannot be had now.
    """
    cache, needs_weights = cache_folder(config.cache_dir), config.load_format != "dummy"
    target = resolve_model(config.model, cache, progress, needs_weights=needs_weights)
    if config.proposer != "draft_model":
        return target, None
    if config.draft:
        return target, resolve_draft(config.draft, cache, progress, needs_weights=needs_weights)
    return target, _own_draft(config)


def _own_draft(config: WorkerConfig) -> Path:
    draft = default_draft(config.model)
    if draft is None:
        raise ConfigError(
            f"--draft: {config.model!r} has no draft of its own; name one, or choose "
            "--proposer=ngram or --proposer=none"
        )
    return draft


def _make(folder: Path, given: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--cache-dir={given!r}: cannot be made: {error.strerror}") from None


def _positions(folder: Path) -> int | None:
    """What config.json says by the usual name; architectures with another are asked later."""
    content = read_json(folder / "config.json")
    text = content.get("text_config")
    for source in (text if isinstance(text, dict) else {}, content):
        limit = source.get("max_position_embeddings")
        if isinstance(limit, int) and limit > 0:
            return limit
    return None
