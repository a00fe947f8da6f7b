"""Read adapters: PEFT's folders, ours or anyone's, onto a loaded base.

What PEFT answers with a warning or a traceback is an error here: no adapter in the folder, pickled weights, tensors
that have no place in the model or places without a tensor, another base.  A vocabulary that the adapter's run had
grown is grown again first, and the adapter's tokenizer replaces the base's.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from safetensors import safe_open

from lumen.adapters.guard import without_bitsandbytes
from lumen.adapters.inject import ADAPTER, tie_saved
from lumen.adapters.save import CONFIG, WEIGHTS
from lumen.core import ModelError, note
from lumen.models.config import ModelConfig
from lumen.models.layers import embedding_name
from lumen.models.load import LoadedModel
from lumen.models.tokenizer import ensure_pad, resize, vocabulary_rows

_KEY = "adapter_name_or_path"


def find_adapter(name: str, config: ModelConfig | None = None) -> Path:
    """The local folder of an adapter: a path, or a hub id, which is downloaded.  Raises ModelError."""
    path = Path(name).expanduser()
    if not path.exists() and name.count("/") == 1 and not name.startswith((".", "/", "~")) and not path.parent.exists():
        path = _download(name, config or ModelConfig())
    if not path.is_dir():
        raise ModelError(f"there is no adapter at {name}", where=_KEY, fix="give the folder with adapter_config.json")
    if not (path / CONFIG).is_file():
        raise ModelError(
            f"{name} is not an adapter: it has no {CONFIG}", where=_KEY, fix="give the folder that training wrote"
        )
    if not (path / WEIGHTS).is_file():
        pickled = (path / "adapter_model.bin").is_file()
        raise ModelError(
            f"{name} has pickled weights, which are not read" if pickled else f"{name} has no {WEIGHTS}",
            where=_KEY,
            fix="convert it to safetensors with PEFT's save_pretrained" if pickled else "its save was not finished",
        )
    return path


def _download(name: str, config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                cache_dir=config.cache_dir,
                token=config.hf_hub_token.get_secret_value() if config.hf_hub_token else None,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
            )
        )
    except Exception as error:
        raise ModelError(
            f"{name} is neither a folder here nor reachable on the hub ({type(error).__name__})",
            where=_KEY,
            fix="check the name and the network, or give the path of a downloaded adapter",
        ) from error


def adapter_base(path: Path) -> str | None:
    """The base model that an adapter's folder names."""
    try:
        return json.loads((path / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / CONFIG} is damaged: {error}", where=_KEY, fix="copy the adapter again") from error


def has_tokenizer(path: Path) -> bool:
    return (path / "tokenizer_config.json").is_file()


def adopt_vocabulary(loaded: LoadedModel, names: list[str] | None, config: ModelConfig | None = None) -> None:
    """Take over the last adapter's tokenizer and vocabulary before rows are tokenised; without adapters, nothing."""
    if names:
        path = find_adapter(names[-1], config)
        _adopt_tokenizer(loaded, path, _shapes(path))


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise ModelError(f"{path / WEIGHTS} is damaged: {error}", where=_KEY, fix="copy the adapter again") from error


def load_adapter(loaded: LoadedModel, name: str, *, trainable: bool = False, config: ModelConfig | None = None) -> Any:
    """Put the adapter in `name` onto `loaded.model`; `loaded.model` becomes the PeftModel, which is returned.

    trainable: its parameters require gradients (to continue its training).
    The adapter's tokenizer, if it has one, becomes `loaded.tokenizer`.
    """
    from peft import PeftModel

    path = find_adapter(name, config)
    adapter_base(path)
    shapes = _shapes(path)
    _adopt_tokenizer(loaded, path, shapes)
    model = loaded.model
    try:
        with warnings.catch_warnings(), without_bitsandbytes(model):
            warnings.simplefilter("ignore")
            adapted = PeftModel.from_pretrained(model, str(path), adapter_name=ADAPTER, is_trainable=trainable)
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"the adapter {name} does not fit {loaded.source}: {first}",
            where=_KEY,
            fix=f"it was trained on {adapter_base(path)}",
        ) from error
    _check_keys(adapted, set(shapes), name, path)
    tie_saved(adapted)
    adapted.eval()
    loaded.model = adapted
    return adapted


def _adopt_tokenizer(loaded: LoadedModel, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    model = loaded.model
    if has_tokenizer(path):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:
            raise ModelError(
                f"the adapter's tokenizer cannot be read ({type(error).__name__})",
                where=str(path),
                fix="remove its tokenizer files to use the base's",
            ) from error
        tokenizer.padding_side = "right"
        if tokenizer.chat_template is None:
            tokenizer.chat_template = loaded.tokenizer.chat_template
        loaded.tokenizer = tokenizer
    rows = vocabulary_rows(model)
    leaf = embedding_name(model).rpartition(".")[2]
    saved = [shape[0] for key, shape in shapes.items() if key.endswith(f".{leaf}.weight")]
    needed = max([len(loaded.tokenizer), *saved])
    if needed > rows:
        if len(loaded.tokenizer) >= needed:
            resize(model, loaded.tokenizer)
        else:
            model.resize_token_embeddings(needed, mean_resizing=False)
        note(f"the vocabulary grows from {rows} to {vocabulary_rows(model)} rows, as in the adapter's training")
    ensure_pad(model, loaded.tokenizer)


def _check_keys(model: Any, saved: set[str], name: str, path: Path) -> None:
    """Every tensor of the file has a place and every place a tensor; PEFT only warns."""
    from peft import get_peft_model_state_dict

    expected = set(get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False))
    missing, extra = sorted(expected - saved), sorted(saved - expected)
    # A head tied to a saved embedding may be stored once.
    if getattr(model.config, "tie_word_embeddings", False):
        missing = [key for key in missing if "lora_" in key]
    if missing or extra:
        examples = ", ".join((missing + extra)[:3])
        raise ModelError(
            f"the adapter {name} does not fit the model: {len(missing)} tensors are missing and {len(extra)} have "
            f"no place, such as {examples}",
            where=_KEY,
            fix=f"it was trained on {adapter_base(path)}; give that as model_name_or_path",
        )
