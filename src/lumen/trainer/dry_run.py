"""`--dry-run`: everything up to the first step, then the plan in words."""

from __future__ import annotations

from lumen.monitor.memory import readable_bytes
from lumen.objectives import objective
from lumen.trainer.build import batch_tokens, build
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
    most = batch_tokens(config, loader) * accumulation
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
        f"memory         {memory_line(run)}",
        f"output         {config.output_dir}",
    ]
    if "quant" in run.facts:
        lines += ["", str(run.facts["quant"])]
    return [*lines, "", *data.lines(), "", "dry run: nothing was trained"]


def memory_line(run: object) -> str:
    """The estimate in words."""
    from lumen.trainer.run import Run

    assert isinstance(run, Run)
    weights = sum(p.numel() * p.element_size() for p in run.model.parameters())
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    states = sum(p.numel() * (8 if p.element_size() == 4 else 12) for p in trainable)
    grads = sum(p.numel() * p.element_size() for p in trainable)
    chosen = run.facts["checkpointing"]
    activations = 0 if chosen.on else chosen.activation_bytes
    total = weights + states + grads + activations
    return (
        f"about {readable_bytes(total)}: weights {readable_bytes(weights)}, optimizer {readable_bytes(states)}, "
        f"gradients {readable_bytes(grads)}, activations {readable_bytes(activations)}"
    )
