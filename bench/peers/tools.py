"""The tools that are compared: environment, settings file, command, and the log whose lines are steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVS = HERE / "envs"
SOURCE = HERE.parents[1] / "src"
PACKAGES = {
    "peft": ["torch==2.13.0", "peft==0.21.2", "transformers==5.24.0", "accelerate==1.15.0"],
    # `===`: the default build.  LLaMA-Factory imports torchaudio, whose wheels on PyPI need CUDA's libraries to load,
    # so a CPU build of torch beside them breaks the import.  What runs on the CPU is the same code in both builds.
    "llamafactory": ["torch===2.13.0", "torchvision===0.28.0", "torchaudio===2.11.1", "llamafactory==0.9.5"],
}
LEARNING_RATE = 1e-4


def python_of(tool: str) -> Path:
    """The interpreter of a peer's environment; the running one for Lumen."""
    return Path(sys.executable) if tool.startswith("lumen") else ENVS / tool / "bin" / "python"


def make_environment(tool: str) -> None:
    """Create a peer's own environment where it is not there."""
    if tool.startswith("lumen") or (ENVS / tool / "ready").exists():
        return
    print(f"making the environment of {tool} (once)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVS / tool)], check=True)
    pip = [str(python_of(tool)), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, PACKAGES[tool][0]], check=True)  # torch first, so that nothing chooses another
    subprocess.run([*pip, *PACKAGES[tool]], check=True)
    (ENVS / tool / "ready").touch()


def versions(tool: str) -> dict[str, str]:
    """Versions of what matters in a tool's environment."""
    names = ["torch", "transformers", "peft", "accelerate", "llamafactory", "trl"]
    code = (
        "import importlib.metadata as m, json, platform\n"
        "v = {'python': platform.python_version()}\n"
        f"for n in {names!r}:\n"
        "    try: v[n] = m.version(n)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(v))"
    )
    return json.loads(subprocess.run([python_of(tool), "-c", code], check=True, capture_output=True, text=True).stdout)


@dataclass
class Job:
    """One training run of one tool.

    command, environment: how it is started.  step_log: a JSON-lines file that grows by a line with `step_key` for
    every optimizer step.  adapter: where the result lies.
    """

    command: list[str]
    step_log: Path
    step_key: str
    adapter: Path
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass
class Shape:
    """What is trained: the rows' name, batch × accumulation, and steps or epochs."""

    rows: str
    batch: int
    accumulation: int
    steps: int | None = None
    epochs: int | None = None

    def length(self, steps_key: str, epochs_key: str) -> dict[str, Any]:
        return {steps_key: self.steps} if self.steps else {epochs_key: float(self.epochs or 1)}


def peft_job(shape: Shape, model: Path, data: Path, out: Path, extra: dict[str, Any]) -> Job:
    """PEFT + Hugging Face Trainer; `extra` goes to peft_trainer.py's settings."""
    settings = {
        "model": str(model),
        "rows": str(data / f"{shape.rows}.json"),
        "log": str(out / "steps.jsonl"),
        "output_dir": str(out / "adapter"),
        "learning_rate": LEARNING_RATE,
        "batch": shape.batch,
        "accumulation": shape.accumulation,
        **shape.length("steps", "epochs"),
        **extra,
    }
    file = out / "settings.json"
    file.write_text(json.dumps(settings, indent=1))
    command = [str(python_of("peft")), str(HERE / "peft_trainer.py"), str(file)]
    return Job(command, out / "steps.jsonl", "step", out / "adapter")


def shared_keys(shape: Shape, model: Path, data: Path, out: Path) -> dict[str, Any]:
    """What a LLaMA-Factory file and ours say alike: the same keys with the same values."""
    return {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_target": "all",
        "dataset": f"peers_{shape.rows}",
        "dataset_dir": str(data),
        "cutoff_len": 512,
        "output_dir": str(out / "adapter"),
        "overwrite_output_dir": True,
        "per_device_train_batch_size": shape.batch,
        "gradient_accumulation_steps": shape.accumulation,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "bf16": True,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_gradient_checkpointing": True,
        "packing": False,
        "seed": 42,
        **shape.length("max_steps", "num_train_epochs"),
    }


def llamafactory_job(shape: Shape, model: Path, data: Path, out: Path, extra: dict[str, Any]) -> Job:
    """LLaMA-Factory through its own command line."""
    file = out / "llamafactory.yaml"
    keys = {**shared_keys(shape, model, data, out), "template": "smollm2", "overwrite_cache": True, **extra}
    file.write_text(json.dumps(keys, indent=1))  # JSON is YAML
    command = [str(python_of("llamafactory")), "-m", "llamafactory.cli", "train", str(file)]
    job = Job(command, out / "adapter" / "trainer_log.jsonl", "loss", out / "adapter")
    job.environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(out / "cache"), "DISABLE_VERSION_CHECK": "1"}
    return job


def lumen_job(shape: Shape, model: Path, data: Path, out: Path, extra: dict[str, Any]) -> Job:
    """Lumen's command line on the same file, but the template is the tokenizer's own, and compiling is told, not
    judged by the length of a run that a benchmark makes short."""
    file = out / "lumen.yaml"
    keys = {**shared_keys(shape, model, data, out), "overwrite_cache": True, "compile": "on", **extra}
    file.write_text(json.dumps(keys, indent=1))
    command = [sys.executable, "-m", "lumen", "train", str(file)]
    job = Job(command, out / "adapter" / "metrics.jsonl", "train/loss", out / "adapter")
    # a cache of compiled code of its own, so that every run compiles and its first step counts that
    job.environment |= {"PYTHONPATH": str(SOURCE), "TORCHINDUCTOR_CACHE_DIR": str(out / "compiled")}
    return job


def lumen_int8_job(shape: Shape, model: Path, data: Path, out: Path, extra: dict[str, Any]) -> Job:
    """Lumen with recipe int8: not the peers' arithmetic, so it has a line of its own."""
    return lumen_job(shape, model, data, out, {**extra, "quant": {"recipe": "int8"}})


def lumen_int8_backward_job(shape: Shape, model: Path, data: Path, out: Path, extra: dict[str, Any]) -> Job:
    """Lumen with recipe int8-backward (forward in bf16): likewise."""
    return lumen_job(shape, model, data, out, {**extra, "quant": {"recipe": "int8-backward"}})


JOBS = {
    "peft": peft_job,
    "llamafactory": llamafactory_job,
    "lumen": lumen_job,
    "lumen-int8": lumen_int8_job,
    "lumen-int8-backward": lumen_int8_backward_job,
}
