"""Load a model and its tokenizer: one function for a Hugging Face directory, a hub id and a GGUF file.

The weights are read once, memory-mapped from safetensors and placed on their device in their dtype; a GGUF's blocks
are dequantised to plain weights of that dtype, so everything downstream sees an ordinary model.  With a `quant.Stream`
each linear weight becomes codes while it is read, before a whole copy exists; a checkpoint of codes keeps them.

The parts that go wrong quietly elsewhere are set right here, once: a padding token that is not eos, embeddings that
stay tied, new tokens with sensible rows, the attention implementation, no remote code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lumen.core import LumenError, ModelError, note
from lumen.models.config import ModelConfig
from lumen.models.device import attention_implementation, choose_device
from lumen.models.gguf import quick_gguf
from lumen.models.source import Source, hub_arguments, raw_config, resolve_source
from lumen.models.tokenizer import add_tokens, end_token_ids, ensure_pad, load_tokenizer, vocabulary_modules
from lumen.quant.api import quantize
from lumen.quant.report import Report
from lumen.quant.stream import Stream


@dataclass
class LoadedModel:
    """A model ready for the next step of build.

    new_tokens:         tokens that this run added to the vocabulary.
    vocabulary_modules: leaf names of the modules that LoRA must train and save whole because of them.
    quant:              what was quantised while loading; None for an ordinary model.
    """

    model: Any
    tokenizer: Any
    source: Source
    device: torch.device
    dtype: torch.dtype
    new_tokens: list[str] = field(default_factory=list)
    vocabulary_modules: list[str] = field(default_factory=list)
    quant: Report | None = None

    @property
    def end_token_ids(self) -> set[int]:
        """Ids at which generation stops."""
        return end_token_ids(self.model, self.tokenizer)


_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def inference_dtype(config: ModelConfig) -> torch.dtype | None:
    """`infer_dtype` as a torch dtype; None for auto, the checkpoint's own."""
    return _DTYPES.get(config.infer_dtype)


def load_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "auto",
    stream: Stream | None = None,
) -> LoadedModel:
    """Load what `config.model_name_or_path` names, in `dtype` (None: the checkpoint's own) on `device`.

    The model is in evaluation mode, its parameters require gradients as transformers leaves them; `models.freeze` and
    `adapters.inject` decide what trains.  Random weights (`train_from_scratch`) come from torch's global generator.

    stream: quantises weights while they are read; a checkpoint of codes is loaded as codes with or without one.

    Raises ModelError with place and remedy for anything that cannot be loaded, QuantError for what cannot be quantised.
    """
    source = resolve_source(config)
    target = choose_device(device) if isinstance(device, str) else device
    _check_code(source, config)
    with quick_gguf() if source.gguf_file else nullcontext():
        tokenizer = load_tokenizer(source, config)
        loaded = _load_in_codes(source, config, dtype, target, stream)
        model, quant = loaded if loaded is not None else (_load_weights(source, config, dtype, target), None)
    if quant is None and stream is not None:
        quant = quantize(model, stream.policy, frozen=stream.frozen, target=stream.target)
    _forget_quantization(model)
    model.name_or_path = model.config.name_or_path = source.reference
    new_tokens = add_tokens(model, tokenizer, config)
    ensure_pad(model, tokenizer)
    if config.upcast_layernorm:
        upcast_norms(model)
    model.eval()
    return LoadedModel(
        model,
        tokenizer,
        source,
        target,
        model.dtype,
        new_tokens,
        vocabulary_modules(model) if new_tokens else [],
        quant,
    )


def _check_code(source: Source, config: ModelConfig) -> None:
    """Refuse models that ship their own code, unless the command line allowed it."""
    try:
        raw = raw_config(source, config)
    except Exception as error:
        raise _load_error(source, error) from error
    if source.gguf_file:
        if config.trust_remote_code:
            note("trust_remote_code: true changes nothing: a .gguf file ships no code")
        return
    from transformers import CONFIG_MAPPING

    built_in = raw.get("model_type") in CONFIG_MAPPING
    if not built_in and raw.get("auto_map") and not config.allow_remote_code:
        raise ModelError(
            f"{source} needs code that it ships itself (model_type {raw.get('model_type')!r})",
            where="trust_remote_code" if config.trust_remote_code else "model_name_or_path",
            fix="read that code, then pass --allow-remote-code on the command line; a file cannot allow it",
        )
    if not built_in and not raw.get("auto_map"):
        raise ModelError(
            f"transformers does not know the architecture of {source} (model_type {raw.get('model_type')!r})",
            where=f"{source}/config.json",
            fix="update transformers, or check that config.json is a language model's",
        )
    if built_in and config.trust_remote_code:
        note("trust_remote_code: true changes nothing: transformers has this architecture built in")


def _load_weights(source: Source, config: ModelConfig, dtype: torch.dtype | None, device: torch.device) -> Any:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    arguments = hub_arguments(source, config)
    attention = attention_implementation(config, device)
    if attention is not None:
        arguments["attn_implementation"] = attention
    if source.gguf_file:
        arguments["gguf_file"] = source.gguf_file
    verbosity = transformers.logging.get_verbosity()
    bar = quiet_progress() if _is_small(source) else nullcontext()
    try:
        if config.train_from_scratch:
            arguments.pop("attn_implementation", None)
            shape = AutoConfig.from_pretrained(source.path, **arguments)
            with device:
                return AutoModelForCausalLM.from_config(
                    shape,
                    dtype=dtype or torch.float32,
                    attn_implementation=attention,
                    trust_remote_code=config.allow_remote_code,
                )
        if source.gguf_file:
            arguments["quantization_config"] = GgufConfig(dequantize=True)
        else:
            arguments["use_safetensors"] = True  # a pickle runs code when it is read
        if device.type != "cpu":
            arguments["device_map"] = {"": device}
        transformers.logging.set_verbosity_error()
        with bar:
            return AutoModelForCausalLM.from_pretrained(
                source.path, dtype=dtype or (torch.bfloat16 if source.gguf_file else "auto"), **arguments
            )
    except ModelError:
        raise
    except Exception as error:
        raise _load_error(source, error) from error
    finally:
        transformers.logging.set_verbosity(verbosity)


def _load_in_codes(
    source: Source, config: ModelConfig, dtype: torch.dtype | None, device: torch.device, stream: Stream | None
) -> tuple[Any, Report] | None:
    """Load with weights as codes: those the checkpoint stores, and those `stream` makes.

    None where neither is the case, or the weights do not come one by one (random ones, some GGUF architectures).
    """
    settings = {} if source.gguf_file else raw_config(source, config).get("quantization_config") or {}
    is_stored = settings.get("quant_method") in ("bitsandbytes", "compressed-tensors", "lumen")
    if config.train_from_scratch or not (is_stored or stream is not None):
        return None
    import transformers

    from lumen.models import quantised, streaming

    arguments = hub_arguments(source, config)
    verbosity = transformers.logging.get_verbosity()
    bar = quiet_progress() if _is_small(source) else nullcontext()
    try:
        gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
        shape = transformers.AutoConfig.from_pretrained(source.path, **arguments, **gguf)
        shape.__dict__.pop("quantization_config", None)
        state: dict[str, Any] | None
        if source.gguf_file:
            state = streaming.read_gguf(streaming.local_file(source.path, source.gguf_file, **arguments), shape)
            if state is None:
                note(f"{source} is unpacked whole before it is quantised: its tensors do not map one to one")
                return None
        else:
            state = streaming.read_safetensors(streaming.safetensors_files(source.path, **arguments))
        if is_stored:
            specs = quantised.stored_specs(settings, state)
            state = quantised.group_codes(state, specs, settings)
            policy = stream.policy if stream is not None else quantised.stored_policy(settings, specs)
            chip = None if stream is None else stream.target
            stream = Stream(policy, frozen=True if stream is None else stream.frozen, specs=specs, target=chip)
        assert stream is not None
        stream.device = device
        attention = attention_implementation(config, device)
        if attention is not None:
            arguments["attn_implementation"] = attention
        dtype = dtype or (torch.bfloat16 if source.gguf_file else None) or getattr(shape, "dtype", None)
        transformers.logging.set_verbosity_error()
        with bar:
            model = streaming.load_streaming(stream, shape, state, dtype or torch.float32, device, **arguments)
        found = None if source.gguf_file else streaming.generation_config(source.path, **hub_arguments(source, config))
        if found is not None:
            model.generation_config = found
        return model, stream.finish(model)
    except LumenError:
        raise
    except Exception as error:
        raise _load_error(source, error) from error
    finally:
        transformers.logging.set_verbosity(verbosity)


_SMALL_BYTES = 2_000_000_000


def _is_small(source: Source) -> bool:
    """A local model that loads in seconds needs no progress bars."""
    root = Path(source.path)
    if not root.is_dir():
        return False
    pattern = source.gguf_file or "*.safetensors"
    return sum(path.stat().st_size for path in root.glob(pattern)) < _SMALL_BYTES


@contextmanager
def quiet_progress() -> Iterator[None]:
    """No progress bars of other libraries inside the block."""
    from tqdm.std import tqdm  # the class under all of tqdm's variants

    shown = tqdm.__init__

    def hidden(self: Any, *arguments: Any, **keywords: Any) -> None:
        shown(self, *arguments, **{**keywords, "disable": True})

    tqdm.__init__ = hidden
    try:
        yield
    finally:
        tqdm.__init__ = shown


def _load_error(source: Source, error: Exception) -> ModelError:
    """Say what a failed load means: not found, gated, offline, out of memory, damaged."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    names = " ".join(type(e).__name__ for e in _chain(error))
    reason = f"{type(error).__name__}: {text}"
    if source.kind == "hub" or (source.gguf_file and source.revision):
        if "GatedRepo" in names:
            what, fix = "is gated", "accept its licence on the hub and give hf_hub_token, or log in to the hub"
        elif "RevisionNotFound" in names:
            what, fix = f"has no revision {source.revision}", "check model_revision"
        elif "RepositoryNotFound" in names:
            what, fix = "is not on the hub", "check the name; a private model needs hf_hub_token"
        else:
            what = "is neither a folder here nor reachable on the hub"
            fix = "check the name and the network, or give the path of a downloaded model"
        return ModelError(f"{source} {what} ({reason})", where="model_name_or_path", fix=fix)
    if list(Path(source.path).glob("*.bin")) and not list(Path(source.path).glob("*.safetensors")):
        return ModelError(
            f"{source} has pickled weights only, which are not read (a pickle can run code)",
            where="model_name_or_path",
            fix="convert it once with transformers: load it there and save_pretrained, which writes safetensors",
        )
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower():
        return ModelError(f"{source} does not fit into memory ({reason})", where="device", fix="use a smaller model")
    return ModelError(
        f"{source} cannot be loaded ({reason})",
        where="model_name_or_path",
        fix="check that the weights are complete (safetensors; an index names every shard) and fit config.json",
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _forget_quantization(model: Any) -> None:
    """The weights are plain now; a config that still says gguf would make every later load unpack them again."""
    if getattr(getattr(model.config, "quantization_config", None), "quant_method", None) == "gguf":
        del model.config.quantization_config
        for name in ("hf_quantizer", "is_quantized", "quantization_method"):
            if name in vars(model):
                delattr(model, name)


def upcast_norms(model: torch.nn.Module) -> int:
    """Keep normalisation weights in fp32; their outputs return to the input's dtype.  Returns how many."""
    count = 0
    for module in model.modules():
        if type(module).__name__.endswith("Norm") and any(True for _ in module.parameters(recurse=False)):
            module.float()
            module.register_forward_hook(lambda _module, inputs, output: output.to(inputs[0].dtype))
            count += 1
    return count
