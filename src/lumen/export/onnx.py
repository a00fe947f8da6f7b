"""`export_format: onnx`: the forward pass as an ONNX graph (extra `onnx`), checked by onnxruntime.

The graph takes `input_ids` [batch, sequence] and gives `logits` [batch, sequence, V], both dimensions free, and keeps
no KV cache: it is meant for scoring and for small models.  It is traced by torch's exporter in fp32
(`torch.onnx.export(dynamo=True)`) with eager attention, whose operations every runtime has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lumen.core import ConfigError, ModelError
from lumen.core.files import atomic_directory
from lumen.export.merge import check_directory
from lumen.export.report import ExportResult, empty
from lumen.export.stage import stage
from lumen.export.targets import Target
from lumen.export.watch import Watch, finish
from lumen.models.load import quiet_progress

TOLERANCE = 1e-4
"""Largest difference of a logit between torch and onnxruntime, relative to the largest logit (at least 1)."""


class Forward(nn.Module):
    """input_ids [B, T] → logits [B, T, V] with a plain causal mask and no cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def export_onnx(config: Any, target: Target, directory: Path, scratch: Path, allow_unchanged: bool) -> ExportResult:
    """Write `model.onnx` and the tokenizer into `directory`; logits are compared at untraced shapes."""
    if importlib.util.find_spec("onnxscript") is None:
        raise ConfigError(
            "ONNX export needs the packages onnx and onnxscript",
            where="export_format",
            fix="pip install 'lumen-train[onnx]' (with onnxruntime, which checks the result)",
        )
    check_directory(config, directory, holds="*.onnx")
    from transformers import AutoModelForCausalLM

    source = scratch / "source"
    source.mkdir()
    staged = stage(config, source, allow_unchanged=allow_unchanged)
    with quiet_progress():
        model = AutoModelForCausalLM.from_pretrained(
            staged.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    watch = Watch(config, target, scratch)
    runtime = importlib.util.find_spec("onnxruntime") is not None
    if config.export_verify and not runtime:
        raise ConfigError(
            "checking an ONNX export needs onnxruntime",
            where="export_format",
            fix="pip install 'lumen-train[onnx]', or export_verify: false",
        )
    if watch.needed:
        watch(_Loaded(model, staged.tokenizer))
    with atomic_directory(directory) as folder:
        _trace(model, folder / "model.onnx")
        result = empty(target, directory, staged.source, "float32", sum(p.numel() for p in model.parameters()))
        result.adapters = staged.adapters
        result.weights = sum(path.stat().st_size for path in folder.iterdir())
        if config.export_verify:
            result.details["largest difference of a logit"] = f"{_check(model, folder / 'model.onnx'):.2e}"
            assert watch.reference is not None
            result.verification = watch.reference.compare(Session(folder / "model.onnx", model), watch.limit)
            result.verification.check()
        staged.tokenizer.save_pretrained(folder)
        result.handover = [f"onnxruntime.InferenceSession('{directory / 'model.onnx'}')"]
        finish(folder, result, staged)
    return result


class _Loaded:
    """What `Watch` looks at."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer


def _trace(model: Any, path: Path) -> None:
    ids = torch.arange(14).reshape(2, 7) % model.config.get_text_config().vocab_size
    shapes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}}
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                Forward(model), (ids,), str(path), dynamo=True, dynamic_shapes=shapes, input_names=["input_ids"],
                output_names=["logits"], verbose=False,
            )  # fmt: skip
    except Exception as error:
        line = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
        raise ModelError(
            f"torch cannot export {type(model).__name__} to ONNX: {line}",
            where="export_format",
            fix="another format; ONNX is for small dense models",
        ) from error
    finally:
        logging.disable(level)


class Session:
    """The graph in onnxruntime, in the form of a model: what `verify` compares."""

    def __init__(self, path: Path, model: Any) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._embeddings = model.get_input_embeddings()
        self.dtype = torch.float32

    def eval(self) -> Session:
        return self

    def get_input_embeddings(self) -> Any:
        return self._embeddings

    def __call__(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        (logits,) = self._session.run(["logits"], {"input_ids": input_ids.cpu().numpy().astype(np.int64)})
        return type("Output", (), {"logits": torch.from_numpy(logits)})()


@torch.no_grad()
def _check(model: Any, path: Path) -> float:
    """Largest difference of a logit at two shapes that were not traced.  Raises ModelError above TOLERANCE."""
    session = Session(path, model)
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for shape in ((1, 5), (3, 33)):
        ids = torch.randint(0, model.config.get_text_config().vocab_size, shape, generator=generator)
        want = model(input_ids=ids, use_cache=False).logits
        difference = (session(ids).logits - want).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, want.abs().max().item()):
            raise ModelError(
                f"onnxruntime's logits differ by {difference:.2e} at shape {list(shape)}",
                where=str(path.name),
                fix="nothing was written; report the architecture",
            )
        largest = max(largest, difference)
    return largest
