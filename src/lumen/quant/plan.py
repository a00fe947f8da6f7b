"""LayerPlan: what the policy comes to for one linear layer, checked once, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lumen.core import QuantError
from lumen.formats import Granularity, QuantSpec
from lumen.quant.policy import GEMMS, OF_GEMM, SMOOTHING, Policy, Smoothing, require_operand
from lumen.quant.scaling import DEFAULT, HISTORY_ROLES, Delayed

_NATIVE_INT8 = ("row", "tensor")


@dataclass(frozen=True)
class GemmPlan:
    """The specs of one product's operands; `how` is `int8` (integer product), `emulated` (both operands low, multiplied
    in the compute dtype), `dequantised` (one operand low) or `none`."""

    left: QuantSpec | None
    right: QuantSpec | None

    @property
    def how(self) -> str:
        specs = [s for s in (self.left, self.right) if s is not None]
        if not specs:
            return "none"
        if len(specs) == 1:
            return "dequantised"
        return "int8" if all(is_int8(s) for s in specs) else "emulated"


def is_int8(spec: QuantSpec | None) -> bool:
    """Whether an operand can enter the integer product: its scale is constant along the contraction."""
    return spec is not None and spec.element == "int8" and spec.granularity.kind in _NATIVE_INT8


def is_grouped_int8(spec: QuantSpec | None) -> bool:
    """int8 with a scale per row and group of neighbours: a sum of integer products."""
    return spec is not None and spec.element == "int8" and spec.granularity.kind in ("group", "block")


@dataclass(frozen=True)
class LayerPlan:
    """forward is (input, weight), dgrad (grad_output, weight), wgrad (grad_output, input).

    frozen:  the weight never gets a gradient.  Where forward quantises it, only its codes are stored.
    """

    forward: GemmPlan
    dgrad: GemmPlan
    wgrad: GemmPlan
    saved_input: QuantSpec | None
    frozen: bool
    delayed: Delayed = DEFAULT
    smoothing: Smoothing = SMOOTHING
    smoothed: bool = False
    """Whether the layer has its smoothing factors; its specs then say no more `+smooth`."""

    @property
    def waits(self) -> bool:
        """Whether smoothing factors must be measured before this plan can run."""
        specs = (self.forward.left, self.forward.right)
        return any(spec is not None and spec.transform == "smooth" for spec in specs)

    def high_precision(self) -> LayerPlan:
        """What runs while the factors are measured."""
        none = GemmPlan(None, None)
        return replace(self, forward=none, dgrad=none, wgrad=none, saved_input=None)

    def settled(self, group: int) -> LayerPlan:
        """The plan with factors: `+smooth` taken out of the specs, and forward in groups along K where that is asked.

        A frozen weight keeps one code set, so dgrad takes the same.
        """

        def plain(spec: QuantSpec | None) -> QuantSpec | None:
            return spec.with_(transform="none") if spec is not None and spec.transform == "smooth" else spec

        def grouped(spec: QuantSpec | None) -> QuantSpec | None:
            spec = plain(spec)
            return spec.with_(granularity=Granularity("group", 1, group)) if spec is not None and group else spec

        forward = GemmPlan(grouped(self.forward.left), grouped(self.forward.right))
        same = self.frozen and self.dgrad.right == self.forward.right
        dgrad = GemmPlan(plain(self.dgrad.left), forward.right if same else plain(self.dgrad.right))
        wgrad = GemmPlan(plain(self.wgrad.left), plain(self.wgrad.right))
        return replace(
            self, forward=forward, dgrad=dgrad, wgrad=wgrad, saved_input=plain(self.saved_input), smoothed=True
        )

    def groups(self, gemm: str) -> int:
        """Size of the groups along K of a product that is a sum of integer products; 0 where it is none.

        forward: both operands in equal groups.  dgrad: a frozen weight's grouped codes times an int8 row operand.
        """
        product = self.gemm(gemm)
        right = product.right
        if right is None or not is_grouped_int8(right):
            return 0
        ok = product.left is not None and (
            (gemm == "forward" and is_grouped_int8(product.left) and product.left.granularity == right.granularity)
            or (gemm == "dgrad" and self.stores_codes and right == self.forward.right and is_int8(product.left))
        )
        return right.granularity.cols if ok else 0

    @property
    def stores_codes(self) -> bool:
        return self.frozen and self.forward.right is not None

    @property
    def active(self) -> bool:
        """Whether anything is quantised; otherwise the layer is left alone."""
        gemms = (self.forward, self.dgrad) if self.frozen else (self.forward, self.dgrad, self.wgrad)
        return any(g.how != "none" for g in gemms) or (self.saved_input is not None and not self.frozen)

    @property
    def fresh(self) -> bool:
        """Whether dgrad's weight operand is quantised anew in every backward pass (see quant.gemm)."""
        right = self.dgrad.right
        if right is None:
            return False
        return right.rounding == "stochastic" or (self.stores_codes and right != self.forward.right)

    def used(self) -> list[QuantSpec]:
        """Every spec that some product, or what is kept for one, really takes."""
        gemms = (self.forward, self.dgrad) if self.frozen else (self.forward, self.dgrad, self.wgrad)
        specs = [spec for g in gemms for spec in (g.left, g.right)]
        if not self.frozen:
            specs.append(self.saved_input)
        return [spec for spec in specs if spec is not None]

    @property
    def stochastic(self) -> bool:
        """Whether some operand is rounded stochastically, so that the layer needs random numbers."""
        return any(spec.rounding == "stochastic" for spec in self.used())

    @property
    def num_live(self) -> int:
        """Tensors of `quant.live.Live` that the layer needs."""
        return 2 * self.stochastic + self.smoothed + 2 * self.tracked

    @property
    def tracked(self) -> bool:
        """Whether some operand's scale comes from a history, so that the layer needs one."""
        return any(spec.scaling != "dynamic" for spec in self.used())

    @property
    def static_roles(self) -> tuple[bool, ...]:
        """For each of HISTORY_ROLES whether its scale is static."""
        return tuple("static" in self._scalings(role) for role in HISTORY_ROLES)

    def _scalings(self, role: str) -> set[str]:
        """How an operand's scales are found in the products that take it, dynamic ones left out."""
        specs = [
            spec
            for gemm, operands in OF_GEMM.items()
            for name, spec in zip(operands, (self.gemm(gemm).left, self.gemm(gemm).right), strict=True)
            if name == role
        ]
        specs += [self.saved_input] if role == "input" else []
        return {spec.scaling for spec in specs if spec is not None} - {"dynamic"}

    def gemm(self, name: str) -> GemmPlan:
        plan: GemmPlan = getattr(self, name)
        return plan


def plan_layer(policy: Policy, name: str, *, frozen: bool, protected: bool) -> LayerPlan:
    """Ask the policy for every operand of every GEMM of one layer.  Raises QuantError for what cannot run."""
    gemms = {}
    for gemm in GEMMS:
        left, right = (policy.spec(name, role, gemm, protected=protected) for role in OF_GEMM[gemm])
        gemms[gemm] = GemmPlan(left, right)
    saved = policy.spec(name, "saved_input", protected=protected)
    plan = LayerPlan(gemms["forward"], gemms["dgrad"], gemms["wgrad"], saved, frozen, policy.delayed, policy.smoothing)
    _check(plan, name)
    return plan


def _check(plan: LayerPlan, name: str) -> None:
    for spec in plan.used():
        require_operand(spec, name)
    for other in (*_specs(plan.dgrad), *_specs(plan.wgrad), plan.saved_input):
        if other is not None and other.transform == "smooth" and not plan.waits:
            raise QuantError(f"{other} smooths nothing: only forward's operands are smoothed", where=name)
    for role in HISTORY_ROLES:
        if len(plan._scalings(role)) > 1:
            raise QuantError(
                f"{role} is delayed in one product and static in another", where=name, fix="give the role one scaling"
            )


def _specs(gemm: GemmPlan) -> tuple[QuantSpec | None, QuantSpec | None]:
    return gemm.left, gemm.right
