"""QuantLinear: an nn.Linear whose three GEMMs run as a plan says.

It is a subclass of nn.Linear, so whatever looks for linear layers (PEFT, freezing, counting) finds it.  The weight has
one of two forms, chosen when the layer is made and never guessed at run time:

**Frozen codes.**  `_parameters["weight"]` holds the integer codes (a parameter without gradient) and buffers hold the
scales; the state dict has `weight` and `weight_scale`.  The attribute `weight` is a property that dequantises, so DoRA,
merging and other readers see the weight that the layer computes with.  It is read-only: what is added into a
dequantised copy would be lost, so assigning to its `.data` raises.

**Master.**  `weight` is the ordinary parameter.  It is quantised once per optimizer step: the codes are kept until the
parameter changes, which is seen by its identity, its version counter and the count of optimizer steps in this process
(`.data` writes of an optimizer leave the version alone).  Never by address: addresses are reused.  Under FSDP2 they are
not kept: gathering leaves the version alone too, and whole codes on every rank are what sharding is to avoid.

The three products and what autograd keeps for them are in quant.products.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lumen.core import QuantError
from lumen.formats import QuantSpec
from lumen.quant import gemm, scaling, stored
from lumen.quant.gemm import Codes
from lumen.quant.live import Clock, Live, noise_keys
from lumen.quant.plan import LayerPlan
from lumen.quant.products import multiply
from lumen.quant.smooth import Observer

_optimizer_steps = 0


def _count_optimizer_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)


def optimizer_steps() -> int:
    """Steps that optimizers of this process have made; a master may have changed whenever this has."""
    return _optimizer_steps


class FrozenWeight(torch.Tensor):
    """A dequantised copy of frozen codes.  Reading is free; writing into it would be lost, so `.data = …` raises."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise QuantError(
            "this weight is frozen codes: what is written into its dequantised copy would be lost",
            fix="to merge an adapter use `lumen merge`, or call lumen.dequantize(model) first",
        )


class QuantLinear(nn.Linear):
    """y = x·Wᵀ + b with x [..., K], W [N, K].  Make one with `QuantLinear.from_linear`.

    plan:          the specs of every GEMM (quant.plan).
    compute_dtype: what the weight dequantises to; follows `.to(dtype)`.
    """

    plan: LayerPlan
    smooth: torch.Tensor
    smooth_group: torch.Tensor

    def __init__(self, in_features: int, out_features: int, plan: LayerPlan, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's would register a weight over the property
        self.in_features, self.out_features = in_features, out_features
        self.plan, self.compute_dtype = plan, dtype
        self.clock: Clock | None = None
        self._name = ""
        self.calibrating = False
        self.pending: LayerPlan | None = None
        self.observer: Observer | None = None
        self._cache: tuple[Any, tuple[Codes, Codes]] | None = None
        self._is_sharded = False  # seen as FSDP2's DTensor
        self._was_trainable = False

    @classmethod
    def from_linear(cls, linear: nn.Linear, plan: LayerPlan, weight: torch.Tensor | Codes | None = None) -> QuantLinear:
        """A quantised twin that shares the bias, the master (if it keeps one) and the hooks of `linear`.

        weight: what to store instead of `linear`'s own, dense [N, K] or already in codes: a model that is loaded in
        codes never had one.
        """
        layer = cls(linear.in_features, linear.out_features, plan, linear.weight.dtype)
        if plan.waits:  # in high precision until its inputs are known
            if isinstance(weight, tuple):
                raise QuantError(f"codes cannot become {plan.forward.right}", fix="load the original weights")
            layer.pending, layer.plan = plan, plan.high_precision()
            own = linear._parameters["weight"]
            layer._parameters["weight"] = own if weight is None else nn.Parameter(weight, requires_grad=False)
        elif not plan.stores_codes:
            layer._parameters["weight"] = linear._parameters["weight"]
        elif isinstance(weight, tuple):
            assert layer.spec is not None
            stored.put(layer, "weight", weight, layer.spec)
        else:
            layer._store(cls._turn(linear.weight.detach() if weight is None else weight))
        layer._was_trainable = linear.weight.requires_grad
        if plan.frozen:  # what never gets a gradient must not say that it wants one: DDP would wait for it
            layer._master().requires_grad_(False)
        layer._parameters["bias"] = linear.bias
        share_hooks(linear, layer)
        return layer.train(linear.training)

    def start(self, name: str, clock: Clock) -> None:
        """Give the layer what its operands' codes depend on besides the operands (quant.live).

        name: of the layer in the bare model.  clock: the model's.
        """
        device, plan = self._master().device, self.pending or self.plan
        if plan.stochastic:
            self.clock, self._name = clock, name
            self.register_buffer("noise_keys", noise_keys(name).to(device), persistent=False)
        if plan.tracked:
            roles, length = len(scaling.HISTORY_ROLES), plan.delayed.history
            self.register_buffer("amax_history", torch.zeros(roles, length, device=device))
            self.register_buffer("amax_now", torch.zeros(roles, device=device))
            scaling.track(self)

    @torch.no_grad()
    def settle(self, smooth: torch.Tensor, group: int) -> None:
        """Take the smoothing factors [K] and the size of groups along K (0: none), and quantise with them."""
        assert self.pending is not None
        dense = self._master()
        self.plan, self.pending = self.pending.settled(group), None
        self.register_buffer("smooth", smooth.to(dense.device, torch.float32, copy=True))
        self.register_buffer("smooth_group", torch.tensor(group, dtype=torch.int64, device=dense.device))
        if self.plan.stores_codes:
            self._store(self._turn(dense.detach()))
        self._cache = None

    def _calibrate(self, x: torch.Tensor) -> None:
        """Before the first pass: look on, or measure on this very input where nobody calibrates."""
        if self.observer is not None:
            self.observer.see(x)
            return
        if torch.compiler.is_compiling():
            raise QuantError(
                "smoothing is not calibrated, and a compiled layer cannot calibrate itself",
                fix="quantize(model, recipe, calibration=batches), or run one batch before compiling",
            )
        if x.shape[0]:
            first = Observer()
            first.see(x)
            assert self.pending is not None
            self.settle(*first.measure(self._turn(self._master()), self.pending))

    def share_codes(self, other: QuantLinear) -> None:
        """Two layers that shared one weight store one set of codes."""
        self._was_trainable = other._was_trainable
        if self.plan.stores_codes and other is not self:
            self._parameters["weight"] = other._parameters["weight"]
            self._buffers |= {k: v for k, v in other._buffers.items() if k.startswith("weight_")}

    def to_linear(self, *, adapted: bool = False) -> nn.Linear:
        """The nn.Linear again: the same master, or the dequantised codes, requiring a gradient as before quantising.

        adapted: an adapter wraps the layer by now, whose base stays frozen.
        """
        with torch.device("meta"):
            linear = nn.Linear(
                self.in_features, self.out_features, bias=self.bias is not None, dtype=self.compute_dtype
            )
        if self.plan.stores_codes:
            linear.weight = nn.Parameter(self._dequantize(), requires_grad=False)
        else:
            linear.weight = self._master()
        if self.plan.frozen:
            linear.weight.requires_grad_(self._was_trainable and not adapted)
        linear._parameters["bias"] = self.bias
        share_hooks(self, linear)
        return linear.train(self.training)

    @property
    def spec(self) -> QuantSpec | None:
        """The spec in which the weight is stored; None where a master is."""
        return self.plan.forward.right if self.plan.stores_codes else None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """[N, K]: the master, or the dequantised codes in `compute_dtype` (a new read-only copy at each access)."""
        if self._is_dtensor() or not self.plan.stores_codes:
            return self._turn(self._master())  # FSDP2 looks for the parameter that it has sharded under this name
        dense = self._dequantize()
        return dense if torch.compiler.is_compiling() else dense.as_subclass(FrozenWeight)

    @staticmethod
    def _turn(dense: torch.Tensor) -> torch.Tensor:
        """Between the parameter as the model has it and W [N, K]; its own inverse."""
        return dense

    def original_weight(self) -> torch.Tensor:
        """The master or the dequantised codes, in the shape in which an ordinary model has them."""
        return self._turn(self._dequantize()) if self.plan.stores_codes else self._master().detach()

    def _master(self) -> nn.Parameter:
        parameter = self._parameters["weight"]
        assert parameter is not None
        return parameter

    def _is_dtensor(self) -> bool:
        """Whether FSDP2 holds the weight sharded now, outside forward and backward."""
        sharded = hasattr(self._master(), "placements")
        self._is_sharded |= sharded
        return sharded

    def _store(self, weight: torch.Tensor) -> None:
        """Take over a dense weight [N, K] as codes."""
        assert self.spec is not None
        stored.put(self, "weight", self._encode(weight, self.spec), self.spec)

    def _encode(self, weight: torch.Tensor, spec: QuantSpec) -> Codes:
        """A dense weight [N, K] in the codes that are stored: those of W·s where the layer is smoothed."""
        return gemm.encode_operand(weight.float() * self.smooth if self.plan.smoothed else weight, spec, 1)

    def _decode(self, parts: Codes, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
        """The inverse."""
        shape = (self.out_features, self.in_features)
        if not self.plan.smoothed:
            return gemm.decode_operand(parts, spec, shape, 1, dtype)
        return (gemm.decode_operand(parts, spec, shape, 1, torch.float32) / self.smooth).to(dtype)

    def _stored(self) -> Codes:
        assert self.spec is not None
        return stored.parts_of(self, "weight", self.spec)

    def _dequantize(self) -> torch.Tensor:
        assert self.spec is not None
        return self._decode(self._stored(), self.spec, self.compute_dtype)

    def _live(self) -> tuple[torch.Tensor, ...]:
        """What the operands' codes depend on in this forward pass, in the order of `Live`; plan.num_live tensors."""
        live: tuple[torch.Tensor, ...] = ()
        if self.clock is not None:
            # evaluation takes no number from torch's generator: a resumed run may not repeat it
            live = (self.clock.now() if self.training else self.clock.counter, self.get_buffer("noise_keys"))
        if self.plan.smoothed:
            live = (*live, self.get_buffer("smooth"))
        if self.plan.tracked:
            live = (*live, self.get_buffer("amax_history"), self.get_buffer("amax_now"))
        return live

    def _codes(self, live: Live) -> tuple[Codes, Codes]:
        """The codes of forward and dgrad: stored, or of the master as it is now."""
        if self.plan.stores_codes:
            return self._stored(), ()
        master = self._master()
        if torch.compiler.is_compiling():  # in the graph, fused with the read of the weight
            return gemm.weight_codes(self._turn(master.detach()), self.plan, live)
        state = (master._version, _optimizer_steps, self.clock.step if self.clock else 0, live.now is not None)
        if self._cache is not None:
            (owner, seen), codes = self._cache
            if owner() is master and seen == state:
                return codes
        with torch.no_grad():
            codes = gemm.weight_codes(self._turn(master.detach()), self.plan, live)
        if not (self._is_sharded or self._is_dtensor()):
            self._cache = ((weakref.ref(master), state), codes)
        return codes

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., K] → [..., N] in the input's dtype (autocast's, inside autocast)."""
        x = input
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.pending is not None:
            self._calibrate(x.reshape(-1, self.in_features))
        master = None if self.plan.stores_codes else self._master()
        wgrad = master is not None and master.requires_grad and not self.plan.frozen
        live = self._live()
        collect = self.training or self.calibrating
        first, second = self._codes(Live.of(self.plan, live, collect))
        flat = x.reshape(-1, self.in_features)
        tensors = (*first, *second, *live) if master is None else (self._turn(master), *first, *second, *live)
        y = multiply(flat, self.plan, wgrad, self.out_features, collect, tensors)
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantLinear:
        """Devices move everything; a dtype changes what is computed in, never codes or scales."""
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        codes = self._master().data if self.plan.stores_codes else None
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        super()._apply(fn, recurse)
        for name, before in exact.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        if codes is not None and self._master().dtype != codes.dtype:  # FP8 codes count as floating-point to torch
            self._parameters["weight"] = nn.Parameter(codes.to(self._master().device), requires_grad=False)
        keys = self._buffers.get("noise_keys")
        if keys is not None and not keys.is_meta:  # in no file: after `to_empty` they are made anew
            self._buffers["noise_keys"] = noise_keys(self._name).to(keys.device)
        self._cache = None
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Codes under the names that their format has on the disk (quant.layouts)."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.spec is not None:
            shape = (self.out_features, self.in_features)
            stored.rename_saved(destination, prefix, "weight", self.spec, shape, self.compute_dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Codes load into codes and a master into a master; across the two the weight is quantised or dequantised.

        Without this a dense weight would be copied into integer codes, truncated.
        """
        self._cache = None
        state_dict = dict(state_dict)
        if prefix + "smooth" in state_dict:
            if self.pending is not None:  # the file's factors, instead of calibrating
                self.settle(state_dict[prefix + "smooth"], int(state_dict[prefix + "smooth_group"]))
            elif self.plan.smoothed:
                self._same_groups(state_dict, prefix)
        elif self.plan.smoothed:
            state_dict |= {f"{prefix}{name}": self.get_buffer(name) for name in ("smooth", "smooth_group")}
        spec, shape = self.plan.forward.right, (self.out_features, self.in_features)
        stored.load_keys(
            state_dict,
            prefix,
            "weight",
            spec,
            codes=self.plan.stores_codes,
            shape=shape,
            encode=lambda dense: self._encode(self._turn(dense).to(self._master().device), spec) if spec else (),
            decode=lambda s: self._turn(self._decode(s.parts, s.spec, torch.float32)),
        )
        for name in scaling.BUFFERS if self.plan.tracked else ():  # a dense state dict has none: keep ours
            own = self.get_buffer(name)
            state_dict[prefix + name] = scaling.fitted(state_dict.get(prefix + name, own), own)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _same_groups(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Raise QuantError where the file was calibrated to other groups; take over its factors otherwise."""
        if int(state_dict[prefix + "smooth_group"]) != int(self.smooth_group):
            raise QuantError(
                f"the file's weight is in groups of {int(state_dict[prefix + 'smooth_group'])} along K, "
                f"this layer's in groups of {int(self.smooth_group)} (0: none)",
                where=prefix + "weight",
                fix="load into a model that has not been calibrated yet",
            )
        self.smooth.copy_(state_dict[prefix + "smooth"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's histories end their steps with an optimizer's too."""
        super().__setstate__(state)
        if self.plan.tracked:
            scaling.track(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None}

    def extra_repr(self) -> str:
        specs = ", ".join(
            f"{name}: {g.left or 'none'} × {g.right or 'none'}"
            for name, g in (("forward", self.plan.forward), ("dgrad", self.plan.dgrad), ("wgrad", self.plan.wgrad))
            if not (name == "wgrad" and self.plan.frozen)
        )
        form = "codes" if self.plan.stores_codes else "master"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {form}; {specs}"


def share_hooks(source: nn.Module, target: nn.Module) -> None:
    """Hooks that others registered stay registered, and their handles keep working."""
    for name, value in source.__dict__.items():
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) or name == "_is_full_backward_hook":
            target.__dict__[name] = value
