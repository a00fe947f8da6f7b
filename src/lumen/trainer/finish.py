"""After the last step: final weights and card, results, plot, the reading of the curves, and what to do next."""

from __future__ import annotations

import math
from typing import Any

from lumen.checkpoint import versions
from lumen.core.errors import LumenError
from lumen.core.files import atomic_write_json, atomic_write_text
from lumen.core.log import notes, say, warn
from lumen.hardware import probe
from lumen.monitor.memory import peak_process_bytes, readable_bytes
from lumen.monitor.plot import plot_loss
from lumen.monitor.reading import Reading, curve, read_curves
from lumen.trainer.loop import Loop
from lumen.trainer.run import Run, RunResult
from lumen.trainer.saving import publish_final
from lumen.trainer.signals import StopFlag


def results(loop: Loop) -> dict[str, float]:
    """The figures of a run, by HF's names where HF has one."""
    state, device = loop.state, loop.run.device
    seconds = max(state.train_seconds, 1e-9)
    figures: dict[str, float] = {
        "epoch": round(state.epoch, 4),
        "steps": state.step,
        "train_loss": state.total_loss / state.total_loss_steps if state.total_loss_steps else math.nan,
        "train_runtime": round(state.train_seconds, 3),
        "train_steps_per_second": round(state.step / seconds, 4),
        "train_tokens": state.tokens,
        "train_loss_tokens": state.loss_tokens,
        "tokens_per_second": round(state.tokens / seconds, 2),
        "skipped_steps": loop.step.guard.skipped,
        "peak_process_bytes": peak_process_bytes(),
    }
    if device.type == "cuda":
        import torch

        figures["peak_gpu_bytes"] = torch.cuda.max_memory_allocated(device)
    if loop.last_eval is not None:
        figures |= {
            "eval_loss": loop.last_eval.loss,
            "eval_perplexity": loop.last_eval.perplexity,
            "eval_accuracy": loop.last_eval.accuracy,
            "eval_tokens": loop.last_eval.tokens,
            "eval_runtime": round(loop.last_eval.seconds, 3),
        }
    if loop.state.best_metric is not None:
        figures["best_metric"] = loop.state.best_metric
    return figures


def card_facts(run: Run, figures: dict[str, float]) -> dict[str, Any]:
    """What the model's card tells of the run."""
    config = run.config
    hyperparameters = {
        "stage": config.stage,
        "method": config.finetuning_type,
        "learning rate": config.learning_rate,
        "schedule": config.lr_scheduler_type,
        "batch": f"{config.per_device_train_batch_size} × {config.gradient_accumulation_steps}",
        "epochs": figures["epoch"],
        "steps": figures["steps"],
        "cutoff_len": config.cutoff_len,
        "recipe": config.quant.recipe,
        "dtype": str(run.dtype).removeprefix("torch."),
        "seed": config.seed,
    }
    kept = ("train_loss", "eval_loss", "eval_perplexity", "eval_accuracy", "tokens_per_second")
    return {
        "base": run.facts.get("base", config.model_name_or_path),
        "title": config.run_name or run.output_dir.name,
        "summary": "Trained with Lumen.",
        "data": {"datasets": ", ".join(config.dataset or []), "rows": len(run.train_loader.store)},
        "hyperparameters": hyperparameters,
        "results": {key: figures[key] for key in kept if key in figures},
        "versions": versions(),
    }


def finish(loop: Loop, stop: StopFlag) -> RunResult:
    """Write everything that a finished run leaves, say where it lies, and return it."""
    run, figures = loop.run, results(loop)
    best = loop.state.best_step
    best_path = loop.store.path(best) if best is not None and best in loop.store.steps() else None
    result = RunResult(
        run.output_dir, loop.state.step, figures, best_path, loop.last_checkpoint, exit_code=stop.exit_code
    )
    if stop:
        say(f"stopped at step {loop.state.step} of {loop.total}; everything is saved in {loop.last_checkpoint}")
        say("run the same command again to go on from there")
        return result
    publish_final(run, card_facts(run, figures))
    _write_results(loop, figures)
    reading = read(loop)
    result.reading = [*reading.lines, *reading.advice]
    _draw(loop, reading)
    _tell(loop, figures, reading, result)
    return result


def read(loop: Loop) -> Reading:
    """The reading of this run's curves."""
    records = loop.reporter.records
    return read_curves(curve(records, "train/loss"), curve(records, "eval/loss"), skipped=loop.step.guard.skipped)


def _write_results(loop: Loop, figures: dict[str, float]) -> None:
    directory = loop.run.output_dir
    plain = {key: (value if math.isfinite(value) else str(value)) for key, value in figures.items()}
    atomic_write_json(directory / "all_results.json", plain)
    atomic_write_json(directory / "train_results.json", {k: v for k, v in plain.items() if not k.startswith("eval_")})
    if loop.last_eval is not None:
        atomic_write_json(directory / "eval_results.json", {k: v for k, v in plain.items() if k.startswith("eval_")})


def _draw(loop: Loop, reading: Reading) -> None:
    config = loop.config
    if not config.plot_loss:
        return
    path = loop.run.output_dir / "loss.png"
    title = config.run_name or loop.run.output_dir.name
    subtitle = f"{config.model_name_or_path} · {config.finetuning_type} · {reading.verdict}"
    try:
        plot_loss(loop.reporter.records, path, title=title, subtitle=subtitle)
    except (ImportError, OSError, LumenError, ValueError) as error:
        warn(f"the loss plot could not be drawn: {error}")


def _tell(loop: Loop, figures: dict[str, float], reading: Reading, result: RunResult) -> None:
    run, config = loop.run, loop.config
    held = f"held-out loss {figures['eval_loss']:.4f}, " if "eval_loss" in figures else ""
    say(
        f"done: {loop.state.step} steps, {held}{figures['tokens_per_second']:,.0f} tokens/s, "
        f"peak memory {readable_bytes(figures.get('peak_gpu_bytes', figures['peak_process_bytes']))}"
    )
    for line in reading.lines:
        say(f"reading ({reading.verdict}): {line}")
    for advice in reading.advice:
        say(f"  try: {advice}")
    what = "adapter" if run.is_adapter else "model"
    curves = f"   curves: {run.output_dir / 'loss.png'}" if config.plot_loss else ""
    say(f"{what}: {run.output_dir}{curves}   metrics: {loop.reporter.file.path}")
    if run.is_adapter:
        say(f"next:  lumen chat {config.model_name_or_path} --adapter {run.output_dir}")
        say(f"       lumen merge --adapter {run.output_dir} --out DIRECTORY")
    else:
        say(f"next:  lumen chat {run.output_dir}")
    if result.best_checkpoint is not None:
        say(f"best:  {result.best_checkpoint}")


def write_run_files(run: Run, resolved: str) -> None:
    """What the run is, written before the first step: config, versions, hardware, data, quantisation, notes."""
    directory = run.output_dir
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write_text(directory / "config.yaml", resolved)
    run_facts: dict[str, Any] = {
        "versions": versions(),
        "hardware": probe().as_dict(),
        "device": str(run.device),
        "dtype": str(run.dtype).removeprefix("torch."),
        "data_fingerprint": run.data_fingerprint,
        "notes": notes(),
    }
    parameters = run.facts.get("parameters")
    if parameters is not None:
        run_facts["parameters"] = {"trainable": parameters.trainable, "total": parameters.total}
    quant = run.facts.get("quant")
    if quant is not None:
        run_facts["quantisation"] = quant.to_dict()
    atomic_write_json(directory / "run.json", run_facts)
    report = run.facts.get("data")
    if report is not None:
        report.write(directory)
