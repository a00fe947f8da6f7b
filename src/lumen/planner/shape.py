"""A model in numbers: how many parameters, in which roles, in which shapes.

The numbers come from the model's own code.  Built on torch's `meta` device a model has every module and every shape
but no storage, so a 70-billion-parameter model is counted in seconds on a laptop, for any architecture that
transformers knows, tied embeddings and biases included.  No weights are read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lumen.core.errors import ModelError
from lumen.models.layers import decoder_layers, is_tied, linear_names


@dataclass(frozen=True)
class LinearShape:
    """All linear layers of one name, but for heads and routers: `q_proj`, in and out features, how many of them."""

    name: str
    inputs: int
    outputs: int
    count: int


@dataclass(frozen=True)
class ModelShape:
    """What an estimate needs to know about a model.

    hidden, layers, vocab: sizes.
    total:   parameters, each shared one once.
    linear:  parameters of the weight matrices that a recipe may store in codes and adapters may adapt: the linear
             layers but for heads and routers.
    head:    elements of the output head's matrix (also where it is tied to the embedding).
    tied:    the head is the embedding.
    layer:   parameters of the last decoder layer.
    linears: these layers, by name.
    config:  the configuration it was built from, for tracing.
    """

    model_type: str
    hidden: int
    layers: int
    vocab: int
    total: int
    linear: int
    head: int
    tied: bool
    layer: int
    linears: tuple[LinearShape, ...]
    config: Any = field(repr=False, compare=False, default=None)

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Count the model of a transformers configuration, or of the contents of a `config.json`.

        Raises ModelError for an architecture that transformers does not build as a causal language model.
        """
        config = as_config(config)
        model = meta_model(config)
        text = config.get_text_config()
        _, layers = decoder_layers(model)
        modules = dict(model.named_modules())
        found: dict[tuple[str, int, int], int] = {}
        linear = 0
        for name in linear_names(model):
            key = (name.rpartition(".")[2], *linear_sizes(modules[name]))
            found[key] = found.get(key, 0) + 1
            linear += modules[name].weight.numel()
        head = model.get_output_embeddings()
        return cls(
            model_type=config.model_type,
            hidden=text.hidden_size,
            layers=len(layers),
            vocab=text.vocab_size,
            total=sum(parameter.numel() for parameter in model.parameters()),
            linear=linear,
            head=head.weight.numel() if head is not None else text.vocab_size * text.hidden_size,
            tied=is_tied(model),
            layer=sum(parameter.numel() for parameter in layers[-1].parameters()),
            linears=tuple(LinearShape(*key, count) for key, count in found.items()),
            config=config,
        )

    def lora_parameters(self, rank: int, targets: Iterable[str] = ("all",)) -> int:
        """Parameters of A and B of rank `rank` on the named linear layers (`all`: every one inside the layers)."""
        wanted = set(targets)
        return sum(
            rank * (row.inputs + row.outputs) * row.count
            for row in self.linears
            if "all" in wanted or row.name in wanted
        )


def as_config(config: Any) -> Any:
    """A transformers configuration of its own copy, from one or from the contents of a `config.json`."""
    from transformers import AutoConfig

    if not isinstance(config, Mapping):
        return copy.deepcopy(config)
    values = dict(config)
    kind = values.pop("model_type", None)
    if kind is None:
        raise ModelError("the model's configuration has no model_type", where="config.json")
    try:
        return AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise ModelError(
            f"transformers does not know the architecture {kind!r}", where="config.json", fix="update transformers"
        ) from error


def meta_model(config: Any, **settings: Any) -> Any:
    """The model of a configuration on the meta device: every module and shape, no storage."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **settings)
    except ValueError as error:
        raise ModelError(
            f"{config.model_type!r} is not a causal language model that transformers builds", where="config.json"
        ) from error


def linear_sizes(module: Any) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer, also of GPT-2's transposed kind."""
    if hasattr(module, "in_features"):
        return module.in_features, module.out_features
    return module.nx, module.nf
