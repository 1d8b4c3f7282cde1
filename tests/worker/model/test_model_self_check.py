"""Which architectures are served, and how the others are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_families import family_folder
from torch import nn

from nightjar.errors import ModelRefused
from worker.model import attention, self_check
from worker.model.attention import Rule
from worker.model.linear import MergedPart
from worker.model.loading import read_config
from worker.model.self_check import check_architecture

RIGHT = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "phi3"]


def check(folder: Path) -> self_check.Finding:
    """What a worker does with a checkpoint before it loads it."""
    return check_architecture(folder, read_config(folder))


@pytest.mark.parametrize("family", RIGHT)
def test_right_families_pass(tmp_path: Path, family: str) -> None:
    """The paged forward agrees with the model's own for families that use plain attention."""
    finding = check(family_folder(tmp_path, family))
    heads = 4 if family in ("gpt2", "gpt_neox") else 2
    assert (finding.num_kv_heads, finding.merge) == (heads, True)
    assert finding.num_layers == (2 if family == "gpt2" else 3)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("bloom", "cannot be replaced"),
        ("stablelm", "cannot be replaced"),
        ("mamba", "cannot be replaced"),
        ("gpt_oss", "s_aux"),
        ("lfm2", "type conv"),
        ("deepseek_v3", "MLA"),
    ],
)
def test_wrong_families_are_refused(tmp_path: Path, family: str, why: str) -> None:
    """A family that would be answered wrongly is refused, by name and with the reason."""
    with pytest.raises(ModelRefused, match=f"{family}.*{why}"):
        check(family_folder(tmp_path, family))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_unsteady_rope_is_refused(tmp_path: Path, kind: str) -> None:
    """Rope types that depend on the longest row of a batch are refused."""
    folder = family_folder(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8,
        "original_max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match=f"llama.*{kind}"):
        check(folder)


@pytest.mark.parametrize("broken", ["window", "softcap", "scaling"])
def test_an_ignored_rule_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The check fails if attention ignores a layer's window, its cap or its scale."""
    own = attention.attend
    wrong = {"window": 0, "softcap": 0.0, "scaling": 0.5}[broken]

    def attend(cache, plan, rule: Rule, **kwargs):  # type: ignore[no-untyped-def]
        return own(cache, plan, rule._replace(**{broken: wrong}), **kwargs)

    monkeypatch.setattr(attention, "attend", attend)
    changes = {"attn_logit_softcapping": 0.05} if broken == "softcap" else {}
    with pytest.raises(ModelRefused, match=r"gemma2.*differs from its own"):
        check(family_folder(tmp_path, "gemma2", **changes))


def test_a_family_that_merging_breaks_is_served_unmerged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where merged linears give wrong answers, the model runs with its own."""

    def forward(self: MergedPart, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(self.whole.output(x), (1, 0))[..., self.start : self.stop]

    monkeypatch.setattr(MergedPart, "forward", forward)
    assert check(family_folder(tmp_path, "llama")).merge is False


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor is refused, never filled with random numbers."""
    from safetensors.torch import load_file, save_file

    folder = family_folder(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lacks weights, first model\.layers\.1\.mlp\.up_proj"):
        check(folder)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """A folder with only a pickle is refused: weights come from safetensors alone."""
    folder = family_folder(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="safetensors"):
        check(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": "no_such_model"}', "{}"])
def test_broken_configurations_are_refused(tmp_path: Path, content: str) -> None:
    """A configuration that cannot be read is a refusal with a sentence."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelRefused):
        read_config(tmp_path)


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    """A quantized checkpoint is refused by name."""
    folder = family_folder(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="quantized"):
        check(folder)


def test_every_kind_of_layer_is_checked(tmp_path: Path) -> None:
    """The check runs two layers, or as many as it takes to see every kind."""
    for family, count in (("llama", 2), ("gemma2", 2), ("qwen2", 4)):
        changes = {"max_window_layers": 3} if family == "qwen2" else {}
        folder = family_folder(tmp_path, family, num_hidden_layers=6, **changes)
        small = self_check._few_layers(read_config(folder))
        assert small.num_hidden_layers == count
