"""Processor time of one training step, by itself: packed natural rows or rows of exactly the cutoff, one thread.

    python -m bench.step --model MODEL --data ALPACA.json --recipe bf16 --steps 6 [--profile] [key=value ...]

Builds the run as `lumen train` does and makes optimizer steps of batch 2 × 512 by hand.  Prints the median of wall and
processor time of the counted steps and, with --profile, where the time goes by operation.  Run it pinned to a core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="alpaca JSON file")
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--skip", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("keys", nargs="*", help="further configuration keys")
    options = parser.parse_args()

    import torch

    from lumen.objectives import objective
    from lumen.trainer.build import build
    from lumen.trainer.config import RunConfig
    from lumen.trainer.step import Stepper

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    keys: dict[str, object] = {}
    for word in options.keys:
        key, _, value = word.partition("=")
        try:
            keys[key] = json.loads(value)
        except ValueError:
            keys[key] = value
    with tempfile.TemporaryDirectory() as folder:
        columns = {"prompt": "instruction", "query": "input", "response": "output"}
        info = {"rows": {"file_name": str(options.data.resolve()), "columns": columns}}
        (Path(folder) / "dataset_info.json").write_text(json.dumps(info))
        settings = {
            "model_name_or_path": options.model, "dataset": "rows", "dataset_dir": folder, "output_dir": folder,
            "finetuning_type": "lora", "lora_rank": 8, "lora_alpha": 16, "lora_target": "all", "cutoff_len": 512,
            "packing": True, "per_device_train_batch_size": 2, "bf16": True, "compile": "on", "learning_rate": 1e-4,
            "disable_gradient_checkpointing": True, "device": "cpu", "quant": {"recipe": options.recipe},
            "max_samples": 60, **keys,
        }  # fmt: skip
        run = build(RunConfig.model_validate(settings))
    stepper = Stepper(run, objective("sft"), lambda step: 1.0)
    walls, processors, losses, tokens = [], [], [], []
    profiler = None
    before = resource.getrusage(resource.RUSAGE_SELF)
    for step in range(options.steps + options.skip):
        if options.profile and step == options.steps + options.skip - 1:
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            profiler.__enter__()
        if step == options.skip:
            before = resource.getrusage(resource.RUSAGE_SELF)
        wall, processor = time.perf_counter(), time.process_time()
        result = stepper(step, lambda: False)
        assert result is not None
        if step >= options.skip:
            walls.append(time.perf_counter() - wall)
            processors.append(time.process_time() - processor)
        losses.append(result.loss)
        tokens.append((result.tokens, result.loss_tokens))
    if profiler is not None:
        profiler.__exit__(None, None, None)
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=70))
    print("losses", " ".join(f"{x:.5f}" for x in losses))
    print("tokens, labelled", *tokens)
    each = " ".join(f"{x:.2f}" for x in processors)
    print(f"{options.recipe}: wall {statistics.median(walls):.3f} s, processor {statistics.median(processors):.3f} s")
    print(f"processor s of each step: {each}")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    share = (usage.ru_stime - before.ru_stime, usage.ru_minflt - before.ru_minflt)
    print(
        f"in the system {share[0] / len(walls):.3f} s and {share[1] / len(walls):.0f} page faults a step; "
        f"peak {usage.ru_maxrss / 1e6:.2f} GB"
    )


if __name__ == "__main__":
    main()
