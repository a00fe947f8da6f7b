"""Ranges of activations for static scales: the largest magnitude that each linear layer's input takes on real rows.

A static scale is decided once, before serving, so a token whose activation is larger than any seen in calibration is
clipped.  That is what `fp8-static` trades for not measuring at run time; prefer `fp8` where the engine allows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lumen.export.rows import Rows
from lumen.formats.floats import GRIDS
from lumen.quant.modules import linear_layers


@torch.no_grad()
def input_scales(model: Any, rows: Rows) -> dict[str, float]:
    """Module name → amax / 448 of its input over all rows; linear layers that a policy may quantise."""
    largest: dict[str, float] = {}
    handles = []
    for layer in linear_layers(model):
        if layer.protected:
            continue

        def see(module: nn.Module, inputs: tuple[Any, ...], name: str = layer.name) -> None:
            largest[name] = max(largest.get(name, 0.0), float(inputs[0].abs().amax()))

        handles.append(layer.module.register_forward_pre_hook(see))
    try:
        device = model.get_input_embeddings().weight.device
        for ids in rows.ids:
            model(input_ids=ids[None].to(device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    top = GRIDS["e4m3", "ocp"].max
    return {name: value / top if value else 1.0 for name, value in largest.items()}
