"""`make run`, as far as it goes after the installation: the default model answers one prompt."""

from __future__ import annotations

import re
from pathlib import Path

from whole_system import Start


def test_the_default_model_answers_a_prompt(start: Start, smollm2: Path) -> None:
    """Exit status 0, a right answer, one line of statistics, and nothing else on the output."""
    system = start("--prompt=What is the capital of France?", "--max-tokens=24")
    assert system.wait(280) == 0
    answer, statistics = system.stdout.strip().splitlines()
    assert "Paris" in answer
    pattern = (
        r"\[\d+ tokens, [\d.]+ tokens/s, acceptance (\d+%|none) \(\d+ of \d+\), "
        r"mean accepted length ([\d.]+|none), steps by gamma( \d+:\d+)+, policy 1-nightjar\]"
    )
    assert re.fullmatch(pattern, statistics)
    assert not list((system.folder / "shm").iterdir())


def test_a_prompt_without_a_model_fails_with_a_sentence(start: Start) -> None:
    """An unknown model: not status 0, and its name in what is said."""
    system = start("--prompt=hello", "--model=no-such-model")
    assert system.wait(120) != 0
    assert "no-such-model" in system.stderr
    assert system.stdout == ""
