"""A replicated model computes its source's function: on tiny Llamas, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_folder
from transformers import LlamaForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
IDS = torch.tensor([5, 77, 130, 9, 261, 44, 300, 12, 91, 7])


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark's modules be found, as its own folder does when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_replica_is_exact_and_transformers_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven copies, idle layers, several files: the same logits, by the check and by hand."""
    import replicate

    monkeypatch.setattr(replicate, "SHARD_BYTES", 1 << 18)
    source, out = tiny_folder(tmp_path, "target", initializer_range=0.08), tmp_path / "out"
    flags = [f"--source={source}", f"--out={out}", "--check", "--device=cpu"]
    assert replicate.main([*flags, "--shape=3,5,12,3,5", "--dtype=bfloat16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["check"]["exact"]
    assert found["check"]["num_differing_rounded_logits"] == 0
    assert found["check"]["float64_relative_error"] < 1e-13
    assert len(list(out.glob("*.safetensors"))) > 2
    assert (out / "tokenizer.json").exists()
    replica = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert replica.num_parameters() == found["num_parameters"]
    assert replica.config.num_hidden_layers == 5
    assert replica.config.hidden_size == 3 * 64
    own = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16).float()
    with torch.inference_mode():
        wanted, got = own(IDS[None]).logits, replica(IDS[None]).logits
    assert torch.allclose(got, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))


def test_the_checking_forward_is_transformers_own(tmp_path: Path) -> None:
    """Tied or not, its logits are those of transformers' classes, to float32's error."""
    from replicate_check import logits

    for tied in (False, True):
        folder = tiny_folder(tmp_path, "target", 3, tie_word_embeddings=tied)
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            wanted = model(IDS[None]).logits[0].double()
        got = logits(folder, IDS, dtype=torch.float32, rounding=None, device="cpu")
        assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_the_check_finds_one_weight_that_is_off(tmp_path: Path) -> None:
    """A replica with one changed weight is not called exact."""
    import replicate
    from replicate_check import compare
    from replicate_weights import Shape
    from safetensors.torch import load_file, save_file

    source, out = tiny_folder(tmp_path, "target"), tmp_path / "out"
    shape = Shape(width_copies=3, num_layers=2, num_heads=6, num_kv_heads=2, ffn_copies=1)
    replicate.replicate(source, out, shape, torch.bfloat16)
    assert compare(source, out, IDS, dtype=torch.bfloat16, device="cpu")["exact"]
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] *= 2
    save_file(tensors, file)
    assert not compare(source, out, IDS, dtype=torch.bfloat16, device="cpu")["exact"]


def test_the_shapes_are_those_of_the_models_they_stand_for() -> None:
    """Splits add up to one; heads of a group share its KV head; sizes are the named ones."""
    from replicate_weights import SHAPES, CannotReplicate, Replica, Shape, split

    for count in range(1, 20):
        assert len(split(count)) == count
        assert sum(split(count)) == 1.0
    source = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "head_dim": 64}
    source |= {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    for name, width, ffn in (("7b", 3456, 19968), ("13b", 5184, 13824), ("30b", 5184, 27648)):
        replica = Replica(source, SHAPES[name])
        assert (replica.config["hidden_size"], replica.config["intermediate_size"]) == (width, ffn)
        places = replica.shape.num_heads // replica.shape.num_kv_heads
        of_kv = [replica.kv_sources[i // places] for i in range(replica.shape.num_heads)]
        assert [head // 3 for head in replica.q_heads] == of_kv
        for head in range(9):
            shares = zip(replica.q_heads, replica.q_scales, strict=True)
            assert sum(scale for own, scale in shares if own == head) == 1.0
        assert sum(counts for _, counts in replica.layer_sources) == 30
    few = Shape(width_copies=1, num_layers=30, num_heads=6, num_kv_heads=3, ffn_copies=1)
    with pytest.raises(CannotReplicate, match="do not hold"):
        Replica(source, few)
    odd = Shape(width_copies=6, num_layers=30, num_heads=56, num_kv_heads=8, ffn_copies=13)
    with pytest.raises(CannotReplicate, match="no multiple of 56"):
        Replica(source, odd)
    with pytest.raises(CannotReplicate, match="qwen2"):
        Replica({**source, "model_type": "qwen2"}, SHAPES["7b"])
