"""Where the random numbers of stochastic rounding come from.

Rounding x to a grid point up with probability (x - lo)/(hi - lo) makes the error zero on average: a gradient that is
always a third of a step is not lost but arrives every third time.  The price is twice the mean squared error of
rounding to nearest.  The numbers are a pure function of (seed, tensor name and role, step, micro-step, rank, element),
so a resumed run repeats bit for bit and every backend rounds alike (core.random).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lumen.core.random import Word, uniform24


@dataclass(frozen=True)
class Noise:
    """Names one draw.  `name` is the tensor's dotted name with its role: `model.layers.0.mlp.up_proj/grad_output`.

    Elements are counted in row-major order of what is encoded, the contracted dimension last (after the padding of a
    Hadamard transform).  Every part may be a tensor, `name` then its `hash_name`: a compiled graph keeps the values
    out of itself and serves every layer and step.
    """

    name: str | Word = ""
    seed: Word = 0
    step: Word = 0
    micro_step: Word = 0
    rank: Word = 0

    def uniform(self, shape: torch.Size | tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
        """fp32 [shape], uniform in [0, 1) with 24 bits, element by element in row-major order."""
        numel = 1
        for extent in shape:
            numel *= extent
        flat = uniform24(
            numel,
            seed=self.seed,
            name=self.name,
            step=self.step,
            micro_step=self.micro_step,
            rank=self.rank,
            device=device,
        )
        return flat.reshape(shape)
