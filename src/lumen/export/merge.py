"""Write a model that needs no adapter: load the base, merge, save, load again, compare.

A merge is only worth something if the directory on the disk answers like the model that was trained.  So the adapted
model's logits on random tokens are kept, the merged directory is loaded afresh, and the two are compared:

- in fp32 the largest difference of a logit must stay within 1e-4 of the largest logit (sums in another order);
- in 16 bits the merged weights are rounded once, which no tolerance on single logits describes; the mean KL divergence
  of the next-token distributions must stay below 0.02, and it is reported beside the KL between base and adapted model,
  which says how much the adapter does.

The directory appears under its name only after this comparison.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lumen.adapters.config import AdapterConfig
from lumen.adapters.load import adapter_base, find_adapter, load_adapter
from lumen.adapters.merge import MergeReport, merge_in_place
from lumen.core import ConfigError, ModelError, note, say
from lumen.core.files import atomic_directory
from lumen.data.config import DataConfig
from lumen.data.templates import apply_template
from lumen.export.card import licence_of, write_card
from lumen.export.config import ExportConfig
from lumen.models.config import ModelConfig
from lumen.models.load import LoadedModel, inference_dtype, load_model, quiet_progress
from lumen.quant.api import dequantize
from lumen.quant.config import QuantConfig

FP32_TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit."""

KL_TOLERANCE = 0.02
"""Mean KL divergence (nats) in 16 bits.  For scale: GGUF's Q8_0 is at .0035 and Q4_K_M at .106 (INTERFACES)."""


class MergeConfig(ExportConfig, DataConfig, AdapterConfig, QuantConfig, ModelConfig):
    """What a merge reads; a whole configuration file's object is one in all but name."""


@dataclass
class MergeResult:
    """What was written and how it compares.

    max_difference: largest difference of a logit between the adapted model and the directory; None if not verified.
    kl:             mean KL(adapted ‖ directory), nats per token.
    kl_base:        mean KL(adapted ‖ base): the size of what the adapter does; None without an adapter.
    """

    directory: Path
    dtype: str
    parameters: int
    bytes: int
    seconds: float
    report: MergeReport = field(default_factory=MergeReport)
    max_difference: float | None = None
    kl: float | None = None
    kl_base: float | None = None

    def lines(self) -> list[str]:
        """A summary for the terminal."""
        changes = self.report.changes.values()
        lines = [f"{self.directory}: {self.parameters:,} parameters, {self.dtype}, {self.bytes / 1e9:.2f} GB"]
        if changes:
            lines.append(
                f"merged {len(changes)} targets; ‖ΔW‖/‖W‖ from {min(changes):.2e} to {max(changes):.2e}, none zero"
                if not self.report.unchanged
                else f"merged {len(changes)} targets, {len(self.report.unchanged)} of them with ΔW = 0"
            )
        if self.report.whole:
            lines.append(f"replaced whole: {', '.join(self.report.whole)}")
        if self.max_difference is not None:
            scale = "" if self.kl_base is None else f"; KL to the base {self.kl_base:.2e}"
            lines.append(
                f"verified: the directory, loaded again, differs by at most {self.max_difference:.2e} in a logit, "
                f"mean KL {self.kl:.2e}{scale}"
            )
        return lines


def merge(
    config: MergeConfig | Any,
    *,
    allow_unchanged: bool = False,
    verify: bool = True,
    observe: Callable[[LoadedModel], None] | None = None,
    finish: Callable[[Path, MergeResult], None] | None = None,
) -> MergeResult:
    """Merge `adapter_name_or_path` (all, in order) into `model_name_or_path` and write `export_dir`.

    Without a base the adapter's own is taken; without an adapter the model (a full or freeze checkpoint) is written
    out as it is.  Raises ConfigError and ModelError; on an error nothing is written.

    observe: sees the adapted model before the last merge.
    finish:  sees the written folder before it appears under its name; an error in it leaves nothing behind.
    """
    begin = time.monotonic()
    config = complete(config)
    directory = Path(config.export_dir).expanduser()
    names = list(config.adapter_name_or_path or [])
    check_directory(config, directory)
    loaded = load_model(config, dtype=inference_dtype(config), device=config.export_device)
    adapted, base_logits = None, None
    tokens = _random_tokens(loaded) if verify else None

    def look(stage: str, now: LoadedModel) -> None:
        nonlocal adapted, base_logits
        if stage == "base" and tokens is not None:
            base_logits = _logits(now.model, tokens)
        if stage == "adapted":
            adapted = None if tokens is None else _logits(now.model, tokens)
            if observe is not None:
                observe(now)

    report = merge_adapters(loaded, config, allow_unchanged=allow_unchanged, look=look)
    parameters = sum(p.numel() for p in loaded.model.parameters())
    with atomic_directory(directory) as folder:
        write_directory(loaded, folder, config, names, report)
        result = MergeResult(
            directory,
            str(loaded.dtype).removeprefix("torch."),
            parameters,
            sum(p.stat().st_size for p in folder.glob("*.safetensors")),
            0.0,
            report,
        )
        if adapted is not None and tokens is not None:
            dtype, device = loaded.dtype, loaded.device
            loaded.model = None
            _verify(folder, tokens, adapted, base_logits, dtype, device, result)
        if finish is not None:
            loaded.model = None
            finish(folder, result)
    result.seconds = time.monotonic() - begin
    return result


def merge_adapters(
    loaded: LoadedModel,
    config: Any,
    *,
    allow_unchanged: bool = False,
    look: Callable[[str, LoadedModel], None] = lambda stage, now: None,
) -> MergeReport:
    """Put every adapter of the configuration onto `loaded.model` and merge it; the chat template is set.

    look: is called with `base` (before the last adapter) and `adapted` (before the last merge, or at once without one).
    """
    names = list(config.adapter_name_or_path or [])
    report = MergeReport()
    if not names:
        apply_template(loaded.tokenizer, config.template)
        look("adapted", loaded)
    for number, name in enumerate(names):
        last = number == len(names) - 1
        if last:
            look("base", loaded)
        load_adapter(loaded, name, config=config)
        apply_template(loaded.tokenizer, config.template)
        if last:
            look("adapted", loaded)
        loaded.model, part = merge_in_place(loaded.model)
        part.check(allow_unchanged=allow_unchanged)
        if part.rounded:
            note(
                f"{len(part.rounded)} of {len(part.changes)} ΔW are lost in {loaded.dtype}; infer_dtype: float32 keeps"
            )
        report.changes |= {name if name not in report.changes else f"{name} ({number + 1})": v
                           for name, v in part.changes.items()}  # fmt: skip
        report.unchanged += part.unchanged
        report.rounded += part.rounded
        report.whole += part.whole
    dequantize(loaded.model)  # a base that was stored as codes: what no adapter touched is written as weights too
    return report


def complete(config: Any) -> Any:
    """Fill in the base from the adapter, and refuse what a merge does not do."""
    if not config.export_dir:
        raise ConfigError("no directory to write to", where="export_dir", fix="--out DIR, or export_dir: DIR")
    if config.quant.recipe != "bf16":
        raise ConfigError(
            f"merging into a base quantised by `quant.recipe: {config.quant.recipe}` is not built yet",
            where="quant",
            fix="remove quant (and quantization_bit) to merge into the base in full precision",
        )
    names = list(config.adapter_name_or_path or [])
    if config.model_name_or_path or not names:
        return config
    base = adapter_base(find_adapter(names[0], config))
    if not base:
        raise ConfigError("the adapter names no base model", where="model_name_or_path", fix="--model BASE")
    say(f"base model: {base} (named by the adapter)")
    return config.model_copy(update={"model_name_or_path": base})


def check_directory(config: Any, directory: Path, *, holds: str = "config.json") -> None:
    """Raise ConfigError where writing `directory` would destroy something that is no earlier export of its kind.

    holds: a file that marks a directory as such an export.
    """
    if directory.is_file():
        raise ConfigError(f"{directory} is a file", where="export_dir", fix="give a directory")
    inputs = [str(config.model_name_or_path or ""), *(config.adapter_name_or_path or [])]
    if any(Path(name).expanduser().resolve() == directory.resolve() for name in inputs if name):
        raise ConfigError("export_dir is also an input and would be replaced", where="export_dir", fix="another folder")
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    if (directory / "metrics.jsonl").is_file():
        raise ConfigError(f"{directory} is a run and would be replaced", where="export_dir", fix="give a new directory")
    if not list(directory.glob(holds)):
        what = "model" if holds == "config.json" else "export of this format"
        raise ConfigError(
            f"{directory} is not empty and holds no {what}", where="export_dir", fix="give a new or an empty directory"
        )


def _random_tokens(loaded: LoadedModel) -> torch.Tensor:
    """[4, 32] token ids from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    rows = loaded.model.get_input_embeddings().weight.shape[0]
    return torch.randint(0, min(rows, len(loaded.tokenizer)), (4, 32), generator=generator)


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """fp32 logits [4, 32, V] on the CPU."""
    device = model.get_input_embeddings().weight.device
    return model.eval()(input_ids=tokens.to(device)).logits.float().cpu()


def mean_kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(reference ‖ other) over positions, nats; vocabularies of different sizes are compared on the smaller."""
    size = min(reference.shape[-1], other.shape[-1])
    p, q = reference[..., :size].log_softmax(-1), other[..., :size].log_softmax(-1)
    return max(0.0, (p.exp() * (p - q)).sum(-1).mean().item())


def _verify(
    folder: Path,
    tokens: torch.Tensor,
    adapted: torch.Tensor,
    base: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    result: MergeResult,
) -> None:
    again = load_model(ModelConfig(model_name_or_path=str(folder)), dtype=dtype, device=device)
    merged = _logits(again.model, tokens)
    if merged.shape != adapted.shape:
        raise ModelError(f"the merged model has {merged.shape[-1]} words, the adapted one {adapted.shape[-1]}")
    result.max_difference = (merged - adapted).abs().max().item()
    result.kl = mean_kl(adapted, merged)
    result.kl_base = None if base is None else mean_kl(adapted, base)
    if dtype == torch.float32:
        bound = FP32_TOLERANCE * max(1.0, adapted.abs().max().item())
        good = result.max_difference <= bound
        what = f"logits differ by {result.max_difference:.2e}, more than {bound:.2e}"
    else:
        good = math.isfinite(result.kl) and result.kl <= KL_TOLERANCE
        what = f"mean KL {result.kl:.2e} is more than {KL_TOLERANCE}"
    if not good:
        raise ModelError(
            f"the merged model does not answer like the adapted one: {what}",
            where=str(folder),
            fix="nothing was written; merge with infer_dtype: float32, and report it if that fails too",
        )


def write_directory(loaded: LoadedModel, folder: Path, config: Any, names: list[str], report: MergeReport) -> None:
    """Weights, tokenizer, licence and card of a merged model into an existing folder."""
    model = loaded.model
    model.config.use_cache = True
    model.config.name_or_path = ""
    _safe_generation(model)
    with quiet_progress():
        model.save_pretrained(folder, max_shard_size=f"{max(1, round(config.export_size * 1000))}MB")
    loaded.tokenizer.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert (file.metadata() or {}).get("format") == "pt", "transformers needs the format in the metadata"
    license_name, files = licence_of(config)
    changes = report.changes.values()
    facts = {"base model": config.model_name_or_path, "dtype": str(loaded.dtype).removeprefix("torch.")}
    if names:
        facts |= {"adapters": ", ".join(names), "targets merged": str(len(changes))}
    base = str(config.model_name_or_path)
    merged = f"{Path(base).name} with {', '.join(Path(n).name for n in names)} merged"
    write_card(
        folder,
        title=merged if names else f"{Path(base).name}, exported",
        base=base,
        license_name=license_name,
        licence_files=files,
        tables={"model": facts},
    )


def _safe_generation(model: Any) -> None:
    """transformers refuses to save sampling settings beside do_sample: false; published models have such files."""
    generation = getattr(model, "generation_config", None)
    names = ("temperature", "top_p", "top_k", "min_p", "typical_p")
    set_ = any(getattr(generation, name, None) not in (None, 1.0, 50) for name in names)
    if generation is not None and not generation.do_sample and set_:
        generation.do_sample = True
