"""Kernels are launched early only where that is told apart, and generated ones wait first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import IndentedBuffer

from worker.kernels.launch import SWITCH, launch_options, launches_early
from worker.model.early_launch import early_launches

WAIT, LAUNCH = TritonKernel.GDC_WAIT, TritonKernel.GDC_LAUNCH
LOADS = "tmp0 = tl.load(in_ptr0 + (x0), None)"
STORES = "tl.store(out_ptr0 + (x0), tmp0, None)"


def filtered(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What becomes of a body's lines as inductor generates a kernel for a Hopper GPU."""
    monkeypatch.setattr(
        TritonKernel, "_enable_pdl_codegen", lambda _kernel: config.triton.enable_pdl
    )
    body = IndentedBuffer()
    body.writelines(lines)
    kernel = object.__new__(TritonKernel)
    kernel._filter_pdl(body)
    return list(body._lines)


@pytest.mark.parametrize(
    "lines",
    [
        [LOADS, WAIT, LAUNCH, STORES],
        [WAIT, LOADS, WAIT, LAUNCH, STORES],
        [f"    {WAIT}", LOADS, STORES, f"    {LAUNCH}"],
        [LOADS, STORES],
    ],
)
def test_a_generated_kernel_waits_before_all_else(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, wherever inductor had it wait, and where it had it wait nowhere."""
    with early_launches(True):
        assert config.triton.enable_pdl
        assert filtered(lines, monkeypatch) == [LAUNCH, WAIT, LOADS, STORES]


def test_what_was_patched_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where early launches were asked of inductor itself, which does not wait enough."""
    own = TritonKernel._filter_pdl
    with config.patch({"triton.enable_pdl": True}):
        with early_launches(False):
            assert not config.triton.enable_pdl
            assert filtered([LOADS, STORES], monkeypatch) == [LOADS, STORES]
        assert config.triton.enable_pdl
        with pytest.raises(KeyError), early_launches(True):
            raise KeyError
    assert TritonKernel._filter_pdl is own
    assert not config.triton.enable_pdl


@pytest.mark.parametrize(
    ("device", "capability", "switch", "early"),
    [
        ("cpu", (9, 0), "1", False),
        ("cuda", (8, 9), "1", False),
        ("cuda", (9, 0), "", False),
        ("cuda", (8, 0), "1", False),
        ("cuda", (9, 0), "1", True),
        ("cuda", (10, 0), "1", True),
    ],
)
def test_who_launches_early(
    device: str,
    capability: tuple[int, int],
    switch: str,
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU of compute capability 9.0 at least, where it is switched on."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(SWITCH, switch)
    launches_early.cache_clear()
    try:
        options = launch_options(torch.device(device, 0))
    finally:
        launches_early.cache_clear()
    assert options == ({"PDL": True, "launch_pdl": True} if early else {"PDL": False})
