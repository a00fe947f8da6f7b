"""Keys of other tools that mean one of ours under another shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lumen.config.schema import FileConfig, choices
from lumen.config.source import Source
from lumen.core import ConfigError


@dataclass
class Draft:
    """Values on their way to a configuration."""

    values: dict[str, Any]
    source: Source
    commanded: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """`file:line` of a key, or the command line."""
        top, dot, rest = key.partition(".")
        if top in self.commanded:
            return f"command line: {key}"
        return self.source.where(self.moved.get(top, top) + dot + rest)

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def conflict(self, first: str, second: str, what: str, fix: str) -> ConfigError:
        return ConfigError(what, where=f"{self.where(first)}, {self.where(second)}", fix=fix)


NOT_BUILT = {
    "stage": {
        name: f"stage: {name} (preference and reward training) is not built yet; sft and pt are"
        for name in ("dpo", "kto", "rm", "ppo", "orpo", "simpo")
    },
    "finetuning_type": {"oft": "finetuning_type: oft is not built; use lora"},
}


def translate(draft: Draft) -> None:
    """Rewrite `draft.values` in place so that only fields of the configuration remain."""
    _not_built(draft)
    _switches(draft)
    _quantization(draft)
    _devices(draft)
    _reports(draft)
    if _truthy(draft, "do_eval") and not (draft.values.get("val_size") or draft.values.get("eval_dataset")):
        raise ConfigError(
            "`do_eval` needs held-out rows, but neither `val_size` nor `eval_dataset` is given",
            where=draft.where("do_eval"),
            fix="add val_size: 0.1, or eval_dataset: NAME",
        )


def _not_built(draft: Draft) -> None:
    for name, reasons in NOT_BUILT.items():
        value = draft.values.get(name)
        if isinstance(value, str) and value in reasons and value not in choices(FileConfig, name):
            raise ConfigError(reasons[value], where=draft.where(name))


def _switches(draft: Draft) -> None:
    """YAML reads a bare `no`, `on` and `off` as booleans; where words are due they are words again."""
    for name, words in {
        "eval_strategy": {False: "no"},
        "save_strategy": {False: "no"},
        "logging_strategy": {False: "no"},
        "compile": {False: "off", True: "on"},
        "native_kernels": {False: "off", True: "auto"},
    }.items():
        value = draft.values.get(name)
        if isinstance(value, bool) and value in words:
            draft.values[name] = words[value]


def _take(draft: Draft, name: str) -> Any:
    return draft.values.pop(name, None)


def _truthy(draft: Draft, name: str) -> bool:
    value = _take(draft, name)
    if value is None or isinstance(value, bool):
        return bool(value)
    text = str(value).strip().lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off"):
        return False
    raise ConfigError(f"`{name}` must be true or false, got {str(value)[:60]!r}", where=draft.where(name))


def _quantization(draft: Draft) -> None:
    """quantization_bit/method/type, double_quantization and qlora become `quant.recipe` (and `quant.weight`)."""
    values = draft.values
    if isinstance(values.get("quant"), str):
        values["quant"] = {"recipe": values["quant"]}
    elif "quant" in values and values["quant"] is None:
        del values["quant"]
    section = values.get("quant")
    qlora = values.get("finetuning_type") == "qlora"
    if qlora:
        values["finetuning_type"] = "lora"
    bit, method = _take(draft, "quantization_bit"), _take(draft, "quantization_method")
    kind = _take(draft, "quantization_type")
    double = "double_quantization" not in values or values["double_quantization"] is None
    double = _truthy(draft, "double_quantization") or double
    if bit is None and not qlora:
        return
    if method is not None and str(method).lower() not in ("bnb", "bitsandbytes"):
        raise ConfigError(
            f"`quantization_method: {str(method)[:40]}` is not supported",
            where=draft.where("quantization_method"),
            fix="remove it, or choose a recipe in `quant:`",
        )
    if kind is not None and kind != "nf4":
        raise ConfigError(
            f"`quantization_type: {str(kind)[:40]}` is not supported",
            where=draft.where("quantization_type"),
            fix="nf4 is the 4-bit type; remove the key",
        )
    recipes = {"4": "nf4", "8": "int8-weight-only", "None": "nf4"}
    if str(bit) not in recipes:
        raise ConfigError(
            f"`quantization_bit: {str(bit)[:40]}` is not supported",
            where=draft.where("quantization_bit"),
            fix="4 (nf4) and 8 (int8-weight-only) are, or choose a recipe in `quant:`",
        )
    recipe, key = recipes[str(bit)], "quantization_bit" if bit is not None else "finetuning_type"
    said = f"quantization_bit: {bit}" if bit is not None else "finetuning_type: qlora"
    if isinstance(section, dict) and section:
        frozen = ("nf4", "int4", "int8-weight-only")
        own = section.get("recipe")
        if (bit is not None and own != recipe) or (bit is None and "recipe" in section and own not in frozen):
            raise draft.conflict(
                key, "quant", f"`{said}` means `quant.recipe: {recipe}`, but `quant:` says {_brief(section)}",
                f"remove `{key}` to keep `quant:`, or remove `quant:`" if bit is not None else
                f"use finetuning_type: lora with `quant:` as it is, or quant.recipe: {recipe}",
            )  # fmt: skip
        section = {"recipe": recipe, **section}
    elif section is None or section == {}:
        section = {"recipe": recipe}
    else:
        return  # not a section: the types' check names it
    if recipe == "nf4" and not double:
        section.setdefault("weight", "nf4:block64")
    values["quant"] = section
    draft.note(f"`{said}` is read as `quant.recipe: {section['recipe']}`")


def _brief(section: dict[str, Any]) -> str:
    return f"recipe {section['recipe']!r}" if "recipe" in section else ", ".join(map(str, section))


def _devices(draft: Draft) -> None:
    values = draft.values
    for name in ("use_cpu", "no_cuda"):
        if _truthy(draft, name):
            if values.get("device") not in (None, "auto", "cpu"):
                raise draft.conflict(
                    name, "device", f"`{name}: true` means device: cpu, but `device: {values['device']}` is given",
                    "keep one of them",
                )  # fmt: skip
            values["device"] = "cpu"
    place = _take(draft, "device_map")
    if isinstance(place, str) and place != "auto":
        if values.get("device") not in (None, "auto", place):
            raise draft.conflict("device_map", "device", "`device_map` and `device` differ", "keep `device`")
        values["device"] = place
    elif place == "auto":
        draft.note("`device_map: auto` changes nothing: the model goes to `device`")
    elif place is not None:
        raise ConfigError(
            "`device_map` must be auto or one device", where=draft.where("device_map"), fix="use `device: cuda:0`"
        )
    if _truthy(draft, "torch_compile"):
        if values.get("compile") == "off":
            raise draft.conflict("torch_compile", "compile", "`torch_compile` and `compile: off` differ", "keep one")
        values["compile"] = "on"
    if _truthy(draft, "disable_flash_attn"):
        if values.get("flash_attn") not in (None, "auto", "disabled"):
            raise draft.conflict(
                "disable_flash_attn", "flash_attn", "`disable_flash_attn` and `flash_attn` differ", "keep `flash_attn`"
            )
        values["flash_attn"] = "disabled"
    kind = _take(draft, "attn_implementation")
    if kind is not None:
        names = {"eager": "disabled", "sdpa": "sdpa", "flash_attention_2": "fa2", "flash_attention_3": "fa3"}
        if not isinstance(kind, str) or kind not in names:
            raise ConfigError(
                f"`attn_implementation` must be one of {', '.join(names)}", where=draft.where("attn_implementation")
            )
        if values.get("flash_attn") not in (None, "auto", names[kind]):
            raise draft.conflict(
                "attn_implementation", "flash_attn", "`attn_implementation` and `flash_attn` differ", "keep one"
            )
        values["flash_attn"] = names[kind]
        draft.note(f"`attn_implementation: {kind}` is read as `flash_attn: {names[kind]}`")


def _reports(draft: Draft) -> None:
    values = draft.values
    if "report_to" in values and values["report_to"] in (None, [], ""):
        values["report_to"] = ["none"]
    strategy = _take(draft, "logging_strategy")
    if strategy == "no":
        values["logging_steps"] = 2**31
        draft.note("`logging_strategy: no`: training records are not written; evaluations are")
    elif strategy not in (None, "steps"):
        raise ConfigError(
            f"`logging_strategy: {str(strategy)[:40]}` is not supported",
            where=draft.where("logging_strategy"),
            fix="use logging_steps",
        )
