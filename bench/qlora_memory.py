"""How much memory NF4 QLoRA of a 1.1-billion-parameter llama takes: peak resident memory above what imports need.

A random checkpoint of TinyLlama-1.1B's shape (22 layers, hidden 2048, 32000 words, bf16, about 2.2 GB) is written in
shards by a process of its own, one layer in memory at a time.  A second process imports everything, notes its resident
memory (the baseline), and runs `lumen.train` on it for a few steps of batch 1 × 512 with gradient checkpointing.  The
peak is VmHWM, the kernel's own high-water mark, so nothing between two looks is missed.

    python -m bench.qlora_memory                      # the whole thing; minutes on 2 cores
    python -m bench.qlora_memory --layers 2 --steps 1 # a quick look
    python -m bench.qlora_memory --trace              # where it goes: resident memory after each stage
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_GB = 1.7
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def status(key: str) -> int:
    """Bytes that /proc/self/status gives for VmRSS, VmHWM, RssAnon or RssFile."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def write_checkpoint(folder: Path, layers: int) -> None:
    """config.json, tokenizer and one shard per decoder layer; never more than a layer in memory."""
    import torch
    from safetensors.torch import save_file
    from tests.helpers import tiny_tokenizer
    from transformers import LlamaConfig

    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}, dtype="bfloat16", pad_token_id=3, eos_token_id=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    h, i, v = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    kv = h // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]
    parts = {"self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h)}
    parts |= {"self_attn.o_proj": (h, h), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i)}
    norms = ("input_layernorm", "post_attention_layernorm")
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=source)

    index: dict[str, str] = {}

    def write(name: str, tensors: dict[str, Any]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}{name}.weight": draw(*shape) for name, shape in parts.items()}
        tensors |= {f"{prefix}{name}.weight": torch.ones(h, dtype=torch.bfloat16) for name in norms}
        write(f"layer-{layer:02}.safetensors", tensors)
    ends = {"model.embed_tokens.weight": draw(v, h), "model.norm.weight": torch.ones(h, dtype=torch.bfloat16)}
    write("ends.safetensors", {**ends, "lm_head.weight": draw(v, h)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def write_rows(path: Path) -> None:
    """Rows longer than the cut-off, of common words."""
    words = ["the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "they"]
    source = random.Random(0)
    rows = [{"instruction": "Write.", "output": " ".join(source.choices(words, k=2000))} for _ in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(folder: Path, options: argparse.Namespace, queue: Any) -> None:
    """Import, note the baseline, train, report."""
    import peft  # noqa: F401
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    import lumen
    import lumen.models.streaming
    import lumen.trainer.train

    stages: list[tuple[str, int, int]] = []

    def stage(name: str) -> None:
        stages.append((name, status("VmRSS"), status("VmHWM")))

    baseline = status("VmRSS")
    stage("imports")
    if options.trace:
        _trace(stage)
    started = time.monotonic()
    result = lumen.train(
        None,
        model_name_or_path=str(folder / "model"),
        dataset=str(folder / "rows.jsonl"),
        output_dir=str(folder / "out"),
        finetuning_type="lora",
        lora_target="all",
        lora_rank=options.rank,
        quant={"recipe": options.recipe},
        bf16=True,
        per_device_train_batch_size=1,
        cutoff_len=512,
        max_steps=options.steps,
        gradient_checkpointing=not options.no_checkpointing,
        compile="off",
        save_strategy="no",
        overwrite_cache=True,
        plot_loss=False,
        logging_steps=1,
    )
    stage("end")
    peak = status("VmHWM")
    queue.put(
        {
            "baseline_bytes": baseline,
            "peak_bytes": peak,
            "above_baseline_gb": (peak - baseline) / 1e9,
            "limit_gb": LIMIT_GB,
            "holds": (peak - baseline) / 1e9 <= LIMIT_GB,
            "recipe": options.recipe,
            "layers": options.layers,
            "steps": options.steps,
            "lora_rank": options.rank,
            "gradient_checkpointing": not options.no_checkpointing,
            "seconds": round(time.monotonic() - started, 1),
            "final_loss": getattr(result, "metrics", {}).get("train_loss"),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "stages_mb": {name: [round(rss / 1e6), round(high / 1e6)] for name, rss, high in stages},
        }
    )


def _trace(stage: Any) -> None:
    """Note resident memory after loading, adapting, and each forward and backward, by wrapping what build calls."""
    import torch

    import lumen.trainer.build as build

    for name in ("load_model", "adapt", "make_optimizer"):
        original = getattr(build, name)

        def wrapped(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            result = _original(*args, **kwargs)
            stage(_name)
            return result

        setattr(build, name, wrapped)
    backward = torch.Tensor.backward

    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        stage("forward")
        result = backward(self, *args, **kwargs)
        stage("backward")
        return result

    torch.Tensor.backward = traced  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--recipe", default="nf4")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here and use it again")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "model" / "model.safetensors.index.json").exists():
            (folder / "model").mkdir(parents=True, exist_ok=True)
            writer = context.Process(target=write_checkpoint, args=(folder / "model", options.layers))
            writer.start()
            writer.join()
        write_rows(folder / "rows.jsonl")
        queue = context.Queue()
        process = context.Process(target=measure, args=(folder, options, queue))
        process.start()
        while True:
            try:
                result = queue.get(timeout=5)
                break
            except Exception:
                if not process.is_alive():
                    raise SystemExit("the measured process ended without a result") from None
        process.join()
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
