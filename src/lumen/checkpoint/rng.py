"""The state of every random generator that training may draw from, as plain tensors.

torch's generators give their state as bytes; Python's and numpy's as 32-bit words (Mersenne Twister).  All go into one
safetensors file.  Random state is restored *last*, just before the first batch is fetched: anything that runs in
between (building, compiling, an evaluation) may draw numbers.
"""

from __future__ import annotations

import random

import numpy
import torch


def rng_state() -> dict[str, torch.Tensor]:
    """State of torch (CPU and each GPU), Python and numpy."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    assert version == 3 and kind == "MT19937"
    state = {
        "torch_cpu": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([0.0 if gauss is None else 1.0, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*numpy.asarray(keys).tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            state[f"torch_cuda_{index}"] = torch.cuda.get_rng_state(index)
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Restore what `rng_state` returned.  State of a GPU that is not here is left out."""
    torch.set_rng_state(state["torch_cpu"].to(torch.uint8))
    has_gauss, gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss if has_gauss else None))
    *keys, position, numpy_has_gauss = state["numpy"].tolist()
    numpy.random.set_state(
        ("MT19937", numpy.array(keys, dtype=numpy.uint32), position, numpy_has_gauss, state["numpy_gauss"].item())
    )
    for name, value in state.items():
        if name.startswith("torch_cuda_"):
            index = int(name.rpartition("_")[2])
            if torch.cuda.is_available() and index < torch.cuda.device_count():
                torch.cuda.set_rng_state(value.to(torch.uint8), index)


def seed_everything(seed: int) -> None:
    """Seed torch, Python and numpy."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
