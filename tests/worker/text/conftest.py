"""The default model's tokenizer, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_text(smollm2: Path) -> Tokenizer:
    """The tokenizer of SmolLM2-135M-Instruct."""
    return Tokenizer.load(smollm2)
