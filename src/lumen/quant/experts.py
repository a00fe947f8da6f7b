"""Mixture-of-experts layers whose experts lie in one tensor: `experts.gate_up_proj` [E, N, K], `experts.down_proj`.

Each token goes through a few of E experts, each an MLP of two products.  transformers keeps the weights of all experts
in one 3-D parameter (Mixtral, Qwen3-MoE, gpt-oss, …), so no nn.Linear is there to exchange.  Here the parameter becomes
a small module, `QuantStack`, in the same place and under the same name, that holds what a QuantLinear holds once per
expert: codes and scales stacked along a first dimension, or the master.  Every expert is quantised by itself, so one
expert's outliers do not coarsen another's scales, and its product runs through the same three GEMMs as any layer.

The experts' forward is transformers' grouped one with our products: tokens are sorted by expert, each expert that has
tokens multiplies its own, the gate of the model's class (`_apply_gate`) is applied, and the results are weighted and
summed per token.  Activations, gates, biases and the router stay as they are.

A stack that is stored [E, K, N] (`is_transposed`, gpt-oss) is quantised as its transpose and given back as it was.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from lumen.formats import QuantSpec
from lumen.quant import gemm, linear, stored
from lumen.quant.gemm import Codes
from lumen.quant.live import Clock, Live, noise_keys
from lumen.quant.modules import EXPERTS_DOWN, EXPERTS_UP
from lumen.quant.plan import LayerPlan
from lumen.quant.products import multiply


class QuantStack(nn.Module):
    """Weights [E, N, K] of E experts under one plan; `stack(e, x)` is x [M, K] → [M, N] of expert e."""

    def __init__(self, weight: torch.Tensor, plan: LayerPlan, transposed: bool, *, empty: bool = False) -> None:
        super().__init__()
        self.plan, self.transposed, self.compute_dtype = plan, transposed, weight.dtype
        e, n, k = (weight.shape[0], weight.shape[2], weight.shape[1]) if transposed else weight.shape
        self.num_experts, self.out_features, self.in_features = int(e), int(n), int(k)
        self._cache: tuple[Any, dict[int, tuple[Codes, Codes]]] | None = None
        self.clock: Clock | None = None
        self._was_trainable = weight.requires_grad
        if empty:
            return
        if plan.stores_codes:
            self._store(weight.detach())
        else:
            if plan.frozen:  # see QuantLinear.from_linear
                weight.requires_grad_(False)
            self._parameters["weight"] = weight  # type: ignore[assignment]

    @property
    def spec(self) -> QuantSpec | None:
        """The spec in which the weights are stored; None where a master is."""
        return self.plan.forward.right if self.plan.stores_codes else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        return self.num_experts, self.out_features, self.in_features

    def _store(self, weight: torch.Tensor) -> None:
        assert self.spec is not None
        matrices = weight.transpose(1, 2) if self.transposed else weight
        each = [gemm.encode_operand(matrix, self.spec, 1) for matrix in matrices]
        stored.put(self, "weight", tuple(torch.stack(parts) for parts in zip(*each, strict=True)), self.spec)

    def dense(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """All experts' weights as the model had them, [E, N, K] or transposed, from the codes."""
        assert self.spec is not None
        parts, size = stored.parts_of(self, "weight", self.spec), (self.out_features, self.in_features)
        kept = dtype or self.compute_dtype
        each = [
            gemm.decode_operand(tuple(part[e] for part in parts), self.spec, size, 1, kept)
            for e in range(self.num_experts)
        ]
        whole = torch.stack(each)
        return whole.transpose(1, 2).contiguous() if self.transposed else whole

    def original(self, *, adapted: bool = False) -> nn.Parameter:
        """The parameter again: the same master, or the dequantised codes.

        adapted: whether an adapter has frozen the base since; a frozen stack then stays without gradient.
        """
        wants = self._was_trainable and not adapted
        if self.spec is not None:
            return nn.Parameter(self.dense(), requires_grad=wants)
        master = self._parameters["weight"]
        assert master is not None
        if self.plan.frozen:
            master.requires_grad_(wants)
        return master

    def start(self, name: str, clock: Clock) -> None:
        """Give each expert the keys of its own random numbers (see QuantLinear.start)."""
        if self.plan.stochastic:
            self.clock = clock
            keys = torch.stack([noise_keys(f"{name}.{e}") for e in range(self.num_experts)])
            weight = self._parameters["weight"]
            assert weight is not None
            self.register_buffer("noise_keys", keys.to(weight.device), persistent=False)

    def _live(self, expert: int) -> tuple[torch.Tensor, ...]:
        if self.clock is None:
            return ()
        return (self.clock.now() if self.training else self.clock.counter, self.get_buffer("noise_keys")[expert])

    def forward(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] → x·Wᵀ [M, N] of one expert."""
        live = self._live(expert)
        if self.spec is not None:
            codes = tuple(part[expert] for part in stored.parts_of(self, "weight", self.spec))
            return multiply(x, self.plan, False, self.out_features, False, (*codes, *live))
        whole = self._parameters["weight"]
        assert whole is not None
        master = whole[expert].t() if self.transposed else whole[expert]
        first, second = self._codes(expert, whole, master, Live.of(self.plan, live, False))
        wgrad = whole.requires_grad and not self.plan.frozen
        return multiply(x, self.plan, wgrad, self.out_features, False, (master, *first, *second, *live))

    def _codes(self, expert: int, whole: nn.Parameter, master: torch.Tensor, live: Live) -> tuple[Codes, Codes]:
        """Codes of one expert's master, made once per optimizer step (see quant.linear)."""
        state = (whole._version, linear.optimizer_steps(), self.clock.step if self.clock else 0)
        if self._cache is None or self._cache[0][0]() is not whole or self._cache[0][1] != state:
            self._cache = ((weakref.ref(whole), state), {})
        made = self._cache[1]
        if expert not in made:
            with torch.no_grad():
                made[expert] = gemm.weight_codes(master.detach(), self.plan, live)
        return made[expert]

    def _apply(self, fn: Any, recurse: bool = True) -> QuantStack:
        """Devices move everything; a dtype changes what is computed in, never codes or scales."""
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        if self.spec is None:
            super()._apply(fn, recurse)
        else:
            before = stored.parts_of(self, "weight", self.spec)
            super()._apply(fn, recurse)
            after = stored.parts_of(self, "weight", self.spec)
            exact = tuple(
                b.detach().to(a.device) if a.dtype != b.dtype else a.detach()
                for a, b in zip(after, before, strict=True)
            )
            stored.put(self, "weight", exact, self.spec)
        self._cache = None
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Codes or a dense stack load into either form; the dense one is called by the stack's own name."""
        state_dict = dict(state_dict)
        wanted = self.plan.forward.right
        stored.load_keys(
            state_dict,
            prefix,
            "weight",
            wanted,
            codes=self.plan.stores_codes,
            shape=self.shape,
            encode=self._encode_all,
            decode=lambda s: self._decode_all(s.parts, s.spec),
        )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _encode_all(self, dense: torch.Tensor) -> Codes:
        twin = QuantStack(dense, self.plan, self.transposed)
        return stored.parts_of(twin, "weight", self.plan.forward.right or _never())

    def _decode_all(self, parts: Codes, spec: QuantSpec) -> torch.Tensor:
        size = (self.out_features, self.in_features)
        each = [
            gemm.decode_operand(tuple(p[e] for p in parts), spec, size, 1, torch.float32) for e in range(len(parts[0]))
        ]
        return torch.stack(each).transpose(1, 2) if self.transposed else torch.stack(each)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None}

    def extra_repr(self) -> str:
        form = "codes" if self.plan.stores_codes else "master"
        spec = self.plan.forward.right or "none"
        return f"{self.num_experts} × [{self.out_features}, {self.in_features}], {form}; {spec}"


def _never() -> QuantSpec:
    raise AssertionError("a stack of codes has a spec")


class QuantExperts:
    """Mixed into an experts module's class: its forward with quantised products."""

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, H], top_k_index and top_k_weights [T, k] → [T, H] in hidden_states' dtype."""
        per_token = top_k_index.shape[-1]
        order = torch.argsort(top_k_index.reshape(-1), stable=True)
        x = hidden_states[order // per_token]
        counts = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts).tolist()
        up = next(name for name in EXPERTS_UP if hasattr(self, name))
        outputs, start = [], 0
        for expert, count in enumerate(counts[: self.num_experts]):
            if count:
                outputs.append(self._one_expert(expert, x[start : start + count], up))
                start += count
        if not outputs:
            return torch.zeros_like(hidden_states)
        y = torch.cat(outputs)
        if start < x.shape[0]:  # ids beyond the last expert mean no expert
            y = torch.cat([y, y.new_zeros(x.shape[0] - start, y.shape[1])])
        weighted = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        summed = weighted[back].view(-1, per_token, weighted.shape[-1]).sum(dim=1)
        return summed.to(hidden_states.dtype)

    def _one_expert(self: Any, expert: int, x: torch.Tensor, up: str) -> torch.Tensor:
        y = self._product(up, expert, x)
        y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
        y = self._product(EXPERTS_DOWN, expert, y)
        return self.post_expert_norm(y) if getattr(self, "has_post_expert_norm", False) else y

    def _product(self: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        stack = getattr(self, name)
        if isinstance(stack, QuantStack):
            y = stack(expert, x)
        else:
            y = x @ (stack[expert] if self.is_transposed else stack[expert].t())
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y


@functools.cache
def _class_with(base: type) -> type:
    return type(f"Quant{base.__name__}", (QuantExperts, base), {"__module__": base.__module__})


def wrap(module: nn.Module, name: str, plan: LayerPlan, weight: torch.Tensor | Codes | None = None) -> None:
    """Quantise the stack `name` of an experts module in place.

    weight: what to store instead of the module's own (dense, or codes), where it is still on the meta device.
    """
    own = module._parameters[name]
    assert own is not None
    if QuantExperts not in type(module).__mro__:
        module.__dict__["_lumen_order"] = list(module._parameters)
        module.__class__ = _class_with(type(module))  # type: ignore[arg-type]
    transposed = bool(module.is_transposed)
    stack = QuantStack(own, plan, transposed, empty=weight is not None)
    if isinstance(weight, tuple):
        assert stack.spec is not None
        stored.put(stack, "weight", weight, stack.spec)
    elif weight is not None:
        stack._store(weight)
    del module._parameters[name]
    module._modules[name] = stack.train(module.training)


def unwrap(module: nn.Module, *, adapted: bool = False) -> None:
    """Undo `wrap` for every stack of a module: its class, its parameters and their order as they were."""
    if QuantExperts not in type(module).__mro__:
        return
    for name, child in list(module._modules.items()):
        if isinstance(child, QuantStack):
            del module._modules[name]
            module._parameters[name] = child.original(adapted=adapted)
    order = module.__dict__.pop("_lumen_order")
    module._parameters = {name: module._parameters[name] for name in order}
    module.__class__ = type(module).__mro__[2]
