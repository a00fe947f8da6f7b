"""One of two ranks on the CPU (gloo): every case trains here in parallel and alone, and writes both down as JSON.

Started by test_ranks.py; imports torch and lumen.quant only, since each rank pays for its imports.  The reference is a
single process that runs both halves of each batch one after the other: the same operands, so the same quantisation.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lumen.core import QuantError
from lumen.optim import AdamW, parameter_groups
from lumen.quant import QuantLinear, dequantize, quantize, recipes

STEPS, WORLD = 3, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def steady_recipes() -> list[str]:
    """Recipes whose result depends on nothing but the operands: no random rounding, no history, no calibration."""
    ready = [name for name, why in recipes.available().items() if not why and name != "bf16"]
    specs = {name: recipes.recipe(name).specs() for name in ready}
    return [
        name
        for name in ready
        if all((s.rounding, s.scaling) == ("nearest", "dynamic") and s.transform != "smooth" for s in specs[name])
    ]


def model_of(recipe: str, frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(64), nn.Linear(64, 16))
    if recipe != "bf16":
        quantize(model, {"recipe": recipe, "rules": [HEAD]}, frozen=frozen)
    return model


HEAD = {"match": "3", "weight": "none", "input": "none", "grad_output": "none"}


def halves(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 64, generator=generator), torch.randint(16, (16,), generator=generator)
    return list(zip(x.chunk(WORLD), y.chunk(WORLD), strict=True))


def optimizer_of(model: nn.Module, ours: bool) -> torch.optim.Optimizer:
    if ours:
        return AdamW(parameter_groups(model, lr=0.02, weight_decay=0.01), lr=0.02, weight_decay=0.01)
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def train_alone(model: nn.Module, ours: bool = False) -> list[list[float]]:
    """Losses of each half of each step; gradients are the mean over the halves."""
    optimizer, losses = optimizer_of(model, ours), []
    for step in range(STEPS):
        found = []
        for x, y in halves(step):
            loss = nn.functional.cross_entropy(model(x).float(), y)
            (loss / WORLD).backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found)
    return losses


def train_ranked(model: nn.Module, rank: int, ours: bool = False) -> list[list[float]]:
    """The same with one half on each rank; the losses of both are gathered."""
    optimizer, losses = optimizer_of(model, ours), []
    for step in range(STEPS):
        x, y = halves(step)[rank]
        loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        both = [torch.zeros(1) for _ in range(WORLD)]
        dist.all_gather(both, loss.detach().reshape(1))
        losses.append([value.item() for value in both])
    return losses


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(one: nn.Module, other: nn.Module) -> float:
    """Largest difference of parameters and buffers; infinite where codes differ by a bit or dtypes do."""
    worst = 0.0
    for (name, a), (_, b) in zip(_tensors(one), _tensors(other), strict=True):
        a, b = whole(a), whole(b)
        if a.dtype != b.dtype or a.shape != b.shape:
            return float("inf")
        if a.dtype == torch.float32 and not name.endswith("weight_scale"):
            worst = max(worst, (a - b).abs().max().item())
        elif not torch.equal(bytes_of(a), bytes_of(b)):
            return float("inf")
    return worst


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    found = [*model.named_parameters(), *model.named_buffers()]
    return sorted((name.removeprefix("module."), tensor.detach()) for name, tensor in found)


def ddp(recipe: str, frozen: bool, rank: int) -> dict[str, Any]:
    alone = model_of(recipe, frozen)
    ranked = DistributedDataParallel(copy.deepcopy(alone))
    result = {"reference": train_alone(alone), "losses": train_ranked(ranked, rank)}
    return result | {"apart": same(alone, ranked.module)}


def shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for block in model[:2]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp(recipe: str, frozen: bool, rank: int, mesh: Any, ours: bool = False) -> dict[str, Any]:
    alone = model_of(recipe, frozen)
    ranked = shard(copy.deepcopy(alone), mesh)
    layers = [m for m in ranked.modules() if isinstance(m, QuantLinear)]
    weights = [m._parameters["weight"] for m in layers]
    result: dict[str, Any] = {
        "sharded": all(isinstance(w, DTensor) and w.to_local().numel() * WORLD == w.numel() for w in weights),
        "dtypes": sorted({str(w.dtype) for w in weights}),
        "layers": len(layers),
    }
    result |= {"reference": train_alone(alone, ours), "losses": train_ranked(ranked, rank, ours)}
    result["apart"] = same(alone, ranked)
    x = halves(9)[0][0]
    with torch.no_grad():
        want = alone(x)
        result["output"] = (ranked(x) - want).abs().max().item()
        # what is gathered for a checkpoint is what one process would write, and loads into it
        state = get_model_state_dict(ranked, options=StateDictOptions(full_state_dict=True))
        other = model_of(recipe, frozen)
        other.load_state_dict(state)
        result["loaded"] = (other(x) - want).abs().max().item()
        # new weights come into a sharded model without an optimizer step: no code may be left of the old ones
        changed = {k: v * 2 if v.dtype == torch.float32 and v.ndim == 2 else v for k, v in state.items()}
        alone.load_state_dict(changed)
        set_model_state_dict(ranked, changed, options=StateDictOptions(full_state_dict=True))
        result["reloaded"] = (ranked(x) - alone(x)).abs().max().item()
    return result


def fsdp_bf16(recipe: str, rank: int, mesh: Any) -> dict[str, Any]:
    """Mixed precision casts parameters for computing; codes must not be touched."""
    alone = model_of(recipe, True)
    ranked = shard(copy.deepcopy(alone), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = halves(0)[rank][0]
    with torch.no_grad():
        got, want = ranked(x), alone.to(torch.bfloat16)(x.bfloat16())
    return {"output": (got.float() - want.float()).abs().max().item(), "size": want.float().abs().max().item()}


def refusals(rank: int, mesh: Any) -> list[str]:
    """What quantize and dequantize say of models that are sharded or wrapped already."""
    said = []
    sharded = shard(model_of("int8", False), mesh)
    for late in (
        lambda: dequantize(sharded),
        lambda: quantize(shard(model_of("bf16", False), mesh), "int8"),
        lambda: quantize(DistributedDataParallel(model_of("bf16", False)), "int8"),
    ):
        try:
            late()
        except QuantError as error:
            said.append(str(error))
    return said


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    cases: dict[str, Any] = {}
    for recipe in steady_recipes():
        for frozen in (True, False):
            key = f"{recipe} {'frozen' if frozen else 'trained'}"
            cases[f"ddp {key}"] = lambda r=recipe, f=frozen: ddp(r, f, rank)
            cases[f"fsdp {key}"] = lambda r=recipe, f=frozen: fsdp(r, f, rank, mesh)
        cases[f"bf16 {recipe}"] = lambda r=recipe: fsdp_bf16(r, rank, mesh)
    for recipe in ("int8", "fp8"):
        cases[f"ours {recipe}"] = lambda r=recipe: fsdp(r, False, rank, mesh, ours=True)
    cases["refusals"] = lambda: {"said": refusals(rank, mesh)}
    wanted = sys.argv[3:] or list(cases)
    results = {}
    for name in wanted:
        try:
            results[name] = cases[name]()
        except Exception:  # both ranks fail alike; the next case goes on
            results[name] = {"error": traceback.format_exc()}
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
