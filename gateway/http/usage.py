"""What an answer cost, and how it was drafted, over all of its prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from gateway.attempts import Notes
from gateway.continuity import summed_histogram
from gateway.http.shapes import Speculation, Usage
from nightjar.v1 import generation_pb2 as pb


def total(usages: Sequence[pb.Usage]) -> pb.Usage:
    """What several prompts cost together."""
    return pb.Usage(
        num_prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
        num_completion_tokens=sum(usage.num_completion_tokens for usage in usages),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
        num_draft_tokens=sum(usage.num_draft_tokens for usage in usages),
        num_accepted_tokens=sum(usage.num_accepted_tokens for usage in usages),
        num_steps=sum(usage.num_steps for usage in usages),
        gamma_histogram=summed_histogram(usages),
        policy_version=_joined(usage.policy_version for usage in usages),
        num_preemptions=sum(usage.num_preemptions for usage in usages),
        speculation_limit=_joined(usage.speculation_limit for usage in usages),
    )


def usage_json(usage: pb.Usage, num_hidden: int = 0) -> Usage:
    """OpenAI's usage object; draft tokens are its predictions.

    Args:
        usage: The worker's.
        num_hidden: Tokens generated, but not asked for and not delivered.
    """
    counts = counts_json(usage.num_prompt_tokens, usage.num_completion_tokens - num_hidden)
    counts["prompt_tokens_details"] = {"cached_tokens": usage.num_cached_tokens}
    counts["completion_tokens_details"] = {
        "accepted_prediction_tokens": usage.num_accepted_tokens,
        "rejected_prediction_tokens": usage.num_draft_tokens - usage.num_accepted_tokens,
    }
    return counts


def speculation_json(usage: pb.Usage, notes: Iterable[Notes]) -> Speculation:
    """How the answer was drafted, and whether it was begun elsewhere than it ended.

    `mean_accepted_length` is tokens per step with a draft, the target's own token included:
    1 + accepted / steps with gamma > 0; null without such steps.
    """
    num_drafts = sum(usage.gamma_histogram[1:])
    length = 1 + usage.num_accepted_tokens / num_drafts if num_drafts else None
    return {
        "gamma_histogram": list(usage.gamma_histogram),
        "mean_accepted_length": length,
        "num_steps": usage.num_steps,
        "num_preemptions": usage.num_preemptions,
        "policy_version": usage.policy_version,
        "speculation_limit": usage.speculation_limit,
        "resumed": _resumed(notes),
    }


def _resumed(notes: Iterable[Notes]) -> Literal["exact", "best-effort"] | None:
    resumptions = [note for note in notes if note.num_resumptions]
    if not resumptions:
        return None
    return "best-effort" if any(note.best_effort for note in resumptions) else "exact"


def counts_json(prompt: int, completion: int) -> Usage:
    """Token counts alone."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _joined(words: Iterable[str]) -> str:
    """The different ones, in order of appearance."""
    return "; ".join(dict.fromkeys(word for word in words if word))
