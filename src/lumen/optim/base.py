"""What every optimizer here shares: named state, and a master copy of parameters that are kept in 16 bits.

A bf16 weight has 8 bits of mantissa: at learning rate 1e-5 most updates are smaller than half a step of the grid and
round to nothing (a weight of 1 after 1000 updates of -1e-4 is still 1).  Two ways out:

* `master="fp32"`: the optimizer keeps the weight in fp32 and the model's 16-bit weight is its rounding.  4 more bytes
  per parameter, exact.
* `master="bf16"`: no copy; the update is computed in fp32 and rounded *stochastically*, up or down with probabilities
  that make the mean exact.  The random bits come from Philox, keyed by the parameter's name and the step, so a resumed
  run repeats bit for bit.

State is addressed by parameter name, not by position, so a checkpoint can be read without the optimizer that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from lumen.core.errors import CheckpointError
from lumen.core.random import random_bits
from lumen.kernels.reference.optimizer import stochastic_round_bf16

Master = Literal["fp32", "bf16"]
Tensors = list[torch.Tensor]


class NamedOptimizer(torch.optim.Optimizer):
    """Base of the optimizers.

    groups: dictionaries with `named_params` (list of (name, parameter)) and that group's options.
    master: see the module's text; concerns only parameters of 16 bits.
    seed:   of the stochastic rounding.
    """

    states: tuple[str, ...] = ()
    """Names of the fp32 states that a subclass keeps beside each parameter."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any], *, master: Master = "fp32", seed: int = 0
    ):
        self.names: dict[torch.Tensor, str] = {}
        plain_groups = []
        for group in groups:
            options = dict(group)
            named = options.pop("named_params")
            for name, parameter in named:
                self.names[parameter] = name
            if named:
                plain_groups.append({**options, "params": [parameter for _, parameter in named]})
        self.master = master
        self.seed = seed
        self.num_steps = 0
        super().__init__(plain_groups, defaults)

    # -- the step ---------------------------------------------------------------------------------------------------

    def update(self, work: Tensors, grads: Tensors, group: dict[str, Any], params: Tensors) -> None:
        """Change `work` (fp32) in place.  `self.state[p]` of `params` holds the fp32 states."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for parameter in params:
                self._init_state(parameter)
                self.state[parameter]["step"] += 1
            work = [self._work(p) for p in params]
            grads = [p.grad if p.grad.dtype == torch.float32 else p.grad.float() for p in params]
            self.update(work, grads, group, params)
            for parameter, value in zip(params, work, strict=True):
                if value is not parameter:
                    self._write_back(parameter, value)
        return loss

    def _keeps_master(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype != torch.float32 and (self.master == "fp32" or parameter.dtype != torch.bfloat16)

    def _init_state(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        state.setdefault("step", 0)
        if self._keeps_master(parameter) and "master" not in state:
            state["master"] = parameter.detach().float().clone()
        for key in self.states:
            if key not in state:
                state[key] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)

    def _work(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        if self._keeps_master(parameter):
            return self.state[parameter]["master"]
        return parameter.float()

    def _write_back(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        if self._keeps_master(parameter):
            parameter.copy_(value)
            return
        bits = random_bits(
            value.numel(),
            seed=self.seed,
            name=f"{self.names[parameter]}/weight",
            step=self.num_steps,
            device=value.device,
        )
        parameter.copy_(stochastic_round_bf16(value, bits))

    # -- the checkpoint ---------------------------------------------------------------------------------------------

    def named_state(self) -> dict[str, torch.Tensor]:
        """`state/parameter name` → tensor, for safetensors.  Parameters that never had a gradient have none."""
        return {
            f"{key}/{self.names[parameter]}": torch.as_tensor(value)
            for parameter, state in self.state.items()
            for key, value in state.items()
        }

    def load_named_state(self, tensors: dict[str, torch.Tensor], *, num_steps: int) -> None:
        """Restore what `named_state` returned.  The model's 16-bit weights become the rounding of their masters.

        Raises CheckpointError where a name or a shape does not belong to this model.
        """
        by_name = {name: parameter for parameter, name in self.names.items()}
        self.num_steps = num_steps
        for full_name, value in tensors.items():
            key, _, name = full_name.partition("/")
            parameter = by_name.get(name)
            if parameter is None:
                raise CheckpointError(
                    f"the checkpoint has optimizer state for {name!r}, which this run does not train",
                    fix="resume with the same model, adapter and frozen layers, or start anew with another output_dir",
                )
            if key == "step":
                self.state[parameter][key] = int(value)
                continue
            if value.shape != parameter.shape:
                raise CheckpointError(
                    f"optimizer state of {name!r} has shape {tuple(value.shape)}, here it is {tuple(parameter.shape)}",
                    fix="resume with the same model and adapter rank",
                )
            self.state[parameter][key] = value.to(device=parameter.device, dtype=torch.float32, copy=True)
            if key == "master":
                with torch.no_grad():
                    parameter.copy_(value)

    def state_bytes(self) -> int:
        """Bytes of optimizer state held now."""
        return sum(t.numel() * t.element_size() for t in self.named_state().values())
