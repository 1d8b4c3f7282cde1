"""Contradicting flags, and how long a sequence may be."""

from __future__ import annotations

from typing import Any

import pytest

from nightjar.errors import ConfigError
from worker.config import WorkerConfig
from worker.engine.limits import check_config, max_model_len, shortened


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"proposer": "ngram", "draft": "x"}, "--draft='x': --proposer=ngram uses no draft"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, "at least --max-num-seqs=4"),
        ({"num_blocks": 1}, "--num-blocks=1: holds 16 tokens.* 256 are the least"),
        ({"num_blocks": 8, "max_model_len": 256}, "--num-blocks=8: holds 128 tokens, less than"),
        ({"gamma": 6}, "--gamma=6: must be 0 to 5"),
        ({"gamma": -1}, "--gamma=-1: must be 0 to 5"),
        ({"gamma": 1, "proposer": "none"}, "--gamma=1: must be 0 to 0"),
        ({"gamma": 1, "planner": "127.0.0.1:1"}, "--gamma=1: the planner of --planner decides"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], sentence: str) -> None:
    """No option is ignored: those that another one makes void are errors that name both."""
    with pytest.raises(ConfigError, match=sentence):
        check_config(WorkerConfig(**fields))


def test_what_fits_passes() -> None:
    """The defaults, and a fixed gamma up to max_gamma without a planner."""
    check_config(WorkerConfig())
    check_config(WorkerConfig(gamma=5))
    check_config(WorkerConfig(gamma=0, proposer="none"))
    check_config(WorkerConfig(num_blocks=1, max_model_len=16))
    check_config(WorkerConfig(num_blocks=16))


def test_the_default_length_is_the_least_of_three() -> None:
    """The model's context, 2048, and what one row may hold of the pool."""
    config = WorkerConfig(block_size=16)
    assert max_model_len(config, 8192, 1000) == 2048
    assert max_model_len(config, 512, 1000) == 512
    assert max_model_len(config, 8192, 20) == 320
    assert max_model_len(config, 100, 7) == 100


def test_a_pool_below_one_request_is_told() -> None:
    """Of a pool that shortens requests the numbers are told; one for no request is refused."""
    config = WorkerConfig(kv_mb=3)
    with pytest.raises(ConfigError, match=r"--kv-mb=3: holds 128 tokens.* 256 are the least"):
        max_model_len(config, 8192, 8)
    assert "--kv-mb=3: holds 320 tokens" in shortened(config, 8192, 320)
    assert "at most, not 512" in shortened(config, 512, 320)
    assert shortened(config, 320, 320) == ""
    assert shortened(config, 8192, 2048) == ""
    assert shortened(WorkerConfig(max_model_len=320), 8192, 320) == ""


def test_a_given_length_must_fit_model_and_pool() -> None:
    """Beyond either it is refused, naming the flag that limits it."""
    config = WorkerConfig(max_model_len=600)
    assert max_model_len(config, 600, 38) == 600
    with pytest.raises(ConfigError, match="--max-model-len=600: the model's context is 512"):
        max_model_len(config, 512, 1000)
    with pytest.raises(ConfigError, match="--kv-mb=256: holds 320 tokens"):
        max_model_len(config, 1024, 20)
    with pytest.raises(ConfigError, match="--num-blocks=20: holds 320 tokens"):
        max_model_len(WorkerConfig(max_model_len=600, num_blocks=20), 1024, 20)
