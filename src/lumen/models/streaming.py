"""Load a model whose linear weights become codes as they are read.

transformers builds the skeleton on the meta device, names and merges the tensors of the file (`WeightConverter`) and
calls a quantiser for each; ours hands the value to `quant.Stream` and forgets it.  Three things keep the peak at the
codes and one tensor:

* tensors are read when they are used, one at a time, not by threads that run ahead;
* files are read with `pread` instead of being mapped: mapped pages count as the process's memory until the file is
  closed, which for a model read from front to back is the whole file;
* a GGUF file, which transformers unpacks whole for most architectures, is unpacked tensor by tensor with the same
  functions in the same order, and its mapped pages are given back.

This module imports transformers when it is imported; load.py imports it when it is needed.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from lumen.core import LumenError, ModelError
from lumen.quant.stream import Stream

_METHOD = "lumen-stream"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class _StreamConfig(QuantizationConfigMixin):
    """Carries the Stream through `from_pretrained`; never saved."""

    def __init__(self, stream: Stream | None = None, **_: Any) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]
        self.stream = stream

    def __deepcopy__(self, memo: Any) -> _StreamConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": _METHOD}


class _Take(ConversionOps):
    """The last operation on a weight: it goes into the Stream, nothing comes out."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, model: Any = None, missing_keys: Any = None, **_: Any
    ) -> dict[str, Any]:
        kept = {}
        for name, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            if not self.stream.takes(name):  # a converter may make several parameters
                kept[name] = value
                continue
            try:
                self.stream.take(model, name, value.found if isinstance(value, CodesInFile) else value)
            except LumenError as error:  # transformers turns what is raised here into a table of text
                self.stream.failure = self.stream.failure or error
                raise
            model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
            if missing_keys is not None:
                missing_keys.discard(name)
        return kept

    def reverse_op(self) -> ConversionOps:  # type: ignore[override]
        raise NotImplementedError("codes are saved as codes")


class _StreamQuantizer(HfQuantizer):
    requires_calibration = False

    def __init__(self, quantization_config: _StreamConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **{**kwargs, "pre_quantized": False})
        assert quantization_config.stream is not None
        self.stream = quantization_config.stream

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        self.stream.prepare(model)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        return self.stream.takes(param_name)

    def get_quantize_ops(self) -> ConversionOps:
        return _Take(self.stream)

    def is_serializable(self, *_: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


register_quantization_config(_METHOD)(_StreamConfig)
register_quantizer(_METHOD)(_StreamQuantizer)


def load_streaming(
    stream: Stream, config: Any, state: Mapping[str, Any], dtype: torch.dtype, device: torch.device, **arguments: Any
) -> Any:
    """Build the model of `config` and fill it from `state`, whose values are read with `[...]` when they are due."""
    remote = arguments.pop("trust_remote_code", False)
    kind = _model_class(config, remote)
    if device.type != "cpu":
        arguments["device_map"] = {"": device}
    try:
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=dtype,
            quantization_config=_StreamConfig(stream),
            output_loading_info=True,
            **arguments,
        )
    except Exception:
        if stream.failure is not None:
            raise stream.failure from None
        raise
    if info.get("mismatched_keys"):
        name, found, wanted = next(iter(info["mismatched_keys"]))
        raise ModelError(
            f"{name} is {list(found)} in the file, the model wants {list(wanted)}",
            where="model_name_or_path",
            fix="check that config.json belongs to these weights",
        )
    model.hf_quantizer.remove_quantization_config(model)
    for part in model.modules():
        if hasattr(part, "config") and hasattr(part.config, "_is_quantized"):
            del part.config._is_quantized
    return model


def _model_class(config: Any, remote: bool) -> Any:
    with torch.device("meta"):
        return type(AutoModelForCausalLM.from_config(config, trust_remote_code=remote))


def generation_config(path: str, **arguments: Any) -> Any | None:
    """The checkpoint's generation_config.json, None where it has none."""
    try:
        return GenerationConfig.from_pretrained(path, **arguments)
    except OSError:
        return None


# -- safetensors ------------------------------------------------------------------------------------------------------


def safetensors_files(path: str, **arguments: Any) -> list[Path]:
    """The weight files of a directory or hub id, fetched where they are not here yet."""
    keep = {k: v for k, v in arguments.items() if k in ("cache_dir", "revision", "token", "local_files_only")}
    index = cached_file(path, _INDEX, _raise_exceptions_for_missing_entries=False, **keep)
    if index is None:
        return [local_file(path, _SINGLE, **keep)]
    names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    return [local_file(path, name, **keep) for name in names]


def local_file(path: str, name: str, **arguments: Any) -> Path:
    """One file of a directory or hub id, fetched where it is not here yet."""
    keep = {k: v for k, v in arguments.items() if k in ("cache_dir", "revision", "token", "local_files_only")}
    return Path(str(cached_file(path, name, **keep)))


def read_safetensors(files: list[Path]) -> dict[str, Any]:
    """Name → slice of every tensor; nothing is read yet."""
    state = {}
    for file in files:
        try:
            opened = safe_open(file, framework="pt", backend="pread")
        except TypeError:  # safetensors before 0.8 maps
            opened = safe_open(file, framework="pt")
        state.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118
    return state


class CodesInFile:
    """A weight that the file stores as codes: read as one when it is due; moves like a tensor."""

    def __init__(self, slices: Mapping[str, Any]) -> None:
        self.slices = dict(slices)
        self.found: dict[str, torch.Tensor] = {}

    def __getitem__(self, _: Any) -> CodesInFile:
        read = CodesInFile(self.slices)
        read.found = {suffix: part[...] for suffix, part in self.slices.items()}
        return read

    def to(self, device: Any = None, dtype: Any = None) -> CodesInFile:
        """A device moves the codes; a dtype is that of the values, which codes do not have."""
        self.found = {suffix: part.to(device) for suffix, part in self.found.items()} if device else self.found
        return self


# -- GGUF -------------------------------------------------------------------------------------------------------------

_PER_TENSOR = ("TensorProcessor", "LlamaTensorProcessor", "Gemma2TensorProcessor", "NemotronTensorProcessor")
"""transformers' processors that turn one tensor of the file into one of the model."""


def read_gguf(file: Path, config: Any) -> dict[str, Any] | None:
    """Name → lazy tensor of a GGUF file, or None where its architecture is not one tensor to one tensor."""
    from gguf import GGUFReader
    from transformers import modeling_gguf_pytorch_utils as theirs
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    reader = GGUFReader(file)
    architecture = theirs.read_field(reader, "general.architecture")[0]
    processor_class = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)
    if is_gguf_arch_supported(architecture) or processor_class.__name__ not in _PER_TENSOR:
        return None
    parsed = theirs.load_gguf_checkpoint(str(file))
    processor = processor_class(config=parsed.get("config", {}))
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    names = theirs.get_gguf_hf_weights_map(skeleton, processor)
    return {names[t.name]: _GgufTensor(t, processor, names, parsed) for t in reader.tensors if t.name in names}


class _GgufTensor:
    def __init__(self, tensor: Any, processor: Any, names: Any, parsed: Any) -> None:
        self.tensor, self.processor, self.names, self.parsed = tensor, processor, names, parsed

    def __getitem__(self, _: Any) -> torch.Tensor:
        from gguf import dequantize

        result = self.processor.process(
            weights=dequantize(self.tensor.data, self.tensor.tensor_type),
            name=self.tensor.name,
            tensor_key_mapping=self.names,
            parsed_parameters=self.parsed,
        )
        values = torch.from_numpy(np.array(result.weights, order="C"))
        for mapped in _bases(self.tensor.data):
            with suppress(ValueError, OSError):
                mapped.madvise(mmap.MADV_DONTNEED)
        return values


def _bases(array: Any) -> Iterator[mmap.mmap]:
    while array is not None:
        if isinstance(array, mmap.mmap):
            yield array
            return
        array = getattr(array, "base", None)
