"""QuantizedTensor: bytes, moving, saving, loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lumen.core import QuantError
from lumen.quant import QuantizedTensor, quantize_tensor


@pytest.mark.parametrize("text", ["int8", "int8:block32", "int8:tensor", "int8+sr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saves_and_loads_to_the_same_values(text: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(10, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = quantize_tensor(x, text, name="w")
    q.save(tmp_path / "q.safetensors")
    back = QuantizedTensor.load(tmp_path / "q.safetensors")
    assert back.spec == q.spec and back.dtype == dtype and back.shape == x.shape
    assert torch.equal(back.codes, q.codes) and torch.equal(back.scale, q.scale)
    assert torch.equal(back.dequantize(), q.dequantize()) and q.dequantize().dtype == dtype
    assert back.nbytes == q.nbytes == q.codes.nbytes + q.scale.nbytes < x.nbytes


def test_another_file_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(QuantError, match="holds no quantised tensor"):
        QuantizedTensor.load(tmp_path / "x.safetensors")


def test_to_moves_and_never_touches_codes_or_scales() -> None:
    q = quantize_tensor(torch.randn(4, 8), "int8")
    half = q.to(torch.float16)
    assert half.scale.dtype == torch.float32 and half.dequantize().dtype == torch.float16
    assert q.to("meta").codes.device.type == "meta" and q.to("meta").scale.device.type == "meta"
    assert set(q.tensors("a.weight")) == {"a.weight", "a.weight_scale"}
