"""`--dry-run`: everything up to the first step, then the plan in words."""

from __future__ import annotations

from lumen.objectives import objective
from lumen.trainer.build import build, longest_row, memory_of
from lumen.trainer.config import RunConfig
from lumen.trainer.plan import steps_of_epoch, total_steps
from lumen.trainer.schedule import make_schedule, warmup_steps


def dry_run(config: RunConfig) -> list[str]:
    """Lines of the resolved plan.  Raises what training would raise before its first step."""
    run = build(config)
    objective(config.stage)
    loader, data = run.train_loader, run.facts["data"]
    total = total_steps(config, loader)
    warmup = warmup_steps(total, warmup_steps=config.warmup_steps, warmup_ratio=config.warmup_ratio)
    make_schedule(
        config.lr_scheduler_type, total=total, warmup=warmup, lr=config.learning_rate,
        options=config.lr_scheduler_kwargs,
    )  # fmt: skip
    accumulation = config.gradient_accumulation_steps
    lengths = loader.store.lengths
    rows = config.per_device_train_batch_size * accumulation
    most = longest_row(config, loader) * rows
    held = run.eval_loader
    checkpointing = run.facts["checkpointing"]
    lines = [
        f"model          {config.model_name_or_path} ({type(run.model).__name__})",
        f"device, dtype  {run.device}, {str(run.dtype).removeprefix('torch.')}",
        f"method         {config.finetuning_type}: {run.facts['parameters']}",
        f"recipe         {config.quant.recipe}",
        (
            f"data           {len(loader.store):,} rows to train on, {int(lengths.sum()):,} tokens "
            f"(longest {int(lengths.max()):,}), {0 if held is None else len(held.store):,} held out"
        ),
        (
            f"batch          {config.per_device_train_batch_size} rows × {accumulation} = {rows} rows a step, "
            f"at most {most:,} tokens"
        ),
        (
            f"steps          {total:,} ({steps_of_epoch(loader, 0, accumulation):,} an epoch), warm-up {warmup:,}, "
            f"{config.lr_scheduler_type} from {config.learning_rate:g}"
        ),
        f"checkpointing  {'on' if checkpointing.on else 'off'}: {checkpointing.why}",
        f"output         {config.output_dir}",
    ]
    lines += ["", "memory, estimated", *memory_of(config, run.model, loader, checkpointing=checkpointing.on).table()]
    if "quant" in run.facts:
        lines += ["", str(run.facts["quant"])]
    return [*lines, "", *data.lines(), "", "dry run: nothing was trained"]
