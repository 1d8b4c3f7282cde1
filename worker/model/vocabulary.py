"""Whether the token ids of target and draft mean the same."""

from __future__ import annotations

from pathlib import Path

from nightjar.errors import ConfigError, ModelRefused
from worker.model.fetch import read_json
from worker.text.tokenizer import Tokenizer


def check_vocabularies(target: Path, draft: Path | None) -> None:
    """Refuse a draft whose token ids mean other tokens than the target's.

    A model may have more ids than its tokenizer knows; those are padding, and whoever uses
    the logits leaves them out. A draft without tokenizer.json has the target's vocabulary by
    definition, so only the sizes are compared.

    Raises:
        ModelRefused: Names the first difference.
    """
    own, size = _vocabulary(target), _config_size(target)
    _check_covered("target", own, size)
    if draft is None:
        return
    draft_size = _config_size(draft)
    if not (draft / "tokenizer.json").exists():
        if draft_size != size:
            raise ModelRefused(
                f"the draft has no tokenizer.json and {draft_size} token ids where the target has "
                f"{size}: id {min(size, draft_size)} is the first that only one of them knows"
            )
        return
    other = _vocabulary(draft)
    _check_covered("draft", other, draft_size)
    for token_id in sorted(own.keys() | other.keys()):
        if own.get(token_id) != other.get(token_id):
            raise ModelRefused(
                f"draft and target have different vocabularies: token id {token_id} is "
                f"{_quoted(own.get(token_id))} in the target and "
                f"{_quoted(other.get(token_id))} in the draft"
            )


def _vocabulary(folder: Path) -> dict[int, str]:
    return Tokenizer.load(folder).vocabulary()


def _check_covered(role: str, vocabulary: dict[int, str], size: int) -> None:
    last = max(vocabulary)
    if last >= size:
        raise ModelRefused(
            f"the {role}'s tokenizer knows token id {last} ({_quoted(vocabulary[last])}), "
            f"but its model has ids [0, {size})"
        )


def _config_size(folder: Path) -> int:
    config = read_json(folder / "config.json")
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ConfigError(f"{folder / 'config.json'}: vocab_size must be a whole number")
    return size


def _quoted(token: str | None) -> str:
    return "absent" if token is None else repr(token)
