"""The training loop, to be read in one sitting.

    resume → until the last step: step, record, evaluate, save → final evaluation → best weights

What each part does lies in its own file: `step` (one optimizer step), `evaluate` (held-out loss), `saving`
(checkpoints), `plan` (when), `best`, `guard`, `signals`.  Here is only their order.
"""

from __future__ import annotations

import time
from pathlib import Path

from lumen.checkpoint import Store, TrainState, seed_everything, set_rng_state
from lumen.core.log import say
from lumen.models.device import training_gpu
from lumen.monitor.memory import memory_metrics
from lumen.monitor.progress import ProgressBar
from lumen.monitor.report import Reporter
from lumen.monitor.thermal import guard_for
from lumen.objectives import objective
from lumen.trainer.best import Best
from lumen.trainer.evaluate import HeldOut, held_out_loss
from lumen.trainer.plan import Cadence, total_steps
from lumen.trainer.run import Run
from lumen.trainer.saving import Resume, check_data, restore, restore_best, save_checkpoint
from lumen.trainer.schedule import make_schedule, warmup_steps
from lumen.trainer.signals import StopFlag, stop_signals
from lumen.trainer.step import Stepper, StepResult, end_of_epoch


class Loop:
    """One training: `Loop(run, store, resume).train()`; afterwards `state`, `reporter`, `last_eval` tell the rest."""

    def __init__(self, run: Run, store: Store, resume: Resume | None = None):
        config = run.config
        self.run, self.store, self.config = run, store, config
        self.state = resume.state if resume else TrainState()
        self.total = total_steps(config, run.train_loader)
        warmup = warmup_steps(self.total, warmup_steps=config.warmup_steps, warmup_ratio=config.warmup_ratio)
        schedule = make_schedule(
            config.lr_scheduler_type, total=self.total, warmup=warmup, lr=config.learning_rate,
            options=config.lr_scheduler_kwargs,
        )  # fmt: skip
        self.objective = objective(config.stage)
        self.step = Stepper(run, self.objective, schedule)
        self.cadence = Cadence(config, self.total)
        self.best = Best(config, self.state)
        self.last_eval: HeldOut | None = None
        self.last_checkpoint: Path | None = resume.directory if resume else None
        self.pending_random = None
        if resume:
            check_data(resume, run)
            self.pending_random = restore(resume, run)
            self.step.scaler.load_state(self.state.scaler)
            self.step.guard.load_state(self.state.guard)
            say(f"resuming {resume.directory} at step {self.state.step} of {self.total}")
        self.thermal = guard_for(config.monitor, training_gpu(run.device))
        self.reporter = Reporter(config, run.output_dir, resume_step=self.state.step if resume else None)

    def train(self) -> StopFlag:
        """Train to the last step, or until a signal asks to stop; either way everything is saved."""
        run, state = self.run, self.state
        hidden = self.config.disable_tqdm
        shown = None if hidden is None else not hidden
        bar = ProgressBar(self.total, start=state.step, enabled=shown, device=run.device)
        with stop_signals() as stop, bar:
            self.reporter.bar = bar
            if self.owes_evaluation():
                self.evaluate(stop)
            # Random state comes last, just before the first fetch: building and evaluating may have drawn numbers.
            if self.pending_random is not None:
                set_rng_state(self.pending_random)
            else:
                seed_everything(self.config.seed)
            while state.step < self.total and not stop and not self.best.should_stop:
                result = self.step(state.step, lambda: bool(stop))
                if result is None:
                    break
                self.account(result)
                epoch_ended = end_of_epoch(run.train_loader)
                if self.cadence.logs(state.step):
                    self.record()
                improved = self.cadence.evaluates(state.step, epoch_ended) and self.evaluate(stop)
                if self.cadence.saves(state.step, epoch_ended) or (improved and self.keeps_best):
                    self.save()
                if self.thermal is not None:
                    for event in self.thermal.after_step(result.seconds, self.save, lambda: bool(stop)):
                        self.reporter.write({"step": state.step, "event": event})
            self.finish(stop)
        return stop

    def account(self, result: StepResult) -> None:
        """Add a step to the state and to the record that is being collected."""
        state, loader = self.state, self.run.train_loader
        state.step += 1
        state.optimizer_steps = self.run.optimizer.num_steps
        state.loader = loader.state()
        state.epoch = loader.epoch + loader.position / loader.batches_per_epoch(loader.epoch)
        state.tokens += result.tokens
        state.loss_tokens += result.loss_tokens
        state.train_seconds += result.seconds
        state.scaler, state.guard = self.step.scaler.state(), self.step.guard.state()
        window = state.window
        window["steps"] = window.get("steps", 0) + 1
        window["seconds"] = window.get("seconds", 0.0) + result.seconds
        window["tokens"] = window.get("tokens", 0) + result.tokens
        if result.applied:
            for key, value in (
                ("loss_sum", result.loss * result.loss_tokens),
                ("loss_tokens", result.loss_tokens),
                ("correct", result.num_correct),
            ):
                window[key] = window.get(key, 0) + value
            window["grad_norm"] = result.grad_norm
            state.total_loss += result.loss
            state.total_loss_steps += 1
        else:
            self.reporter.write({"step": state.step, "event": "step skipped: loss or gradient not finite"})
        self.reporter.step(state.step, result)

    def record(self) -> None:
        """Write the training record of the steps since the last one."""
        state, window = self.state, self.state.window
        labelled = window.get("loss_tokens", 0)
        seconds = max(window.get("seconds", 0.0), 1e-9)
        record = {
            "step": state.step,
            "epoch": round(state.epoch, 6),
            "train/loss": window["loss_sum"] / labelled if labelled else float("nan"),
            "train/accuracy": window["correct"] / labelled if labelled else 0.0,
            "train/grad_norm": window.get("grad_norm", float("nan")),
            "train/learning_rate": self.step.learning_rate(state.step - 1),
            "train/tokens_total": state.tokens,
            "train/loss_tokens_total": state.loss_tokens,
            "train/tokens_per_second": round(window.get("tokens", 0) / seconds, 1),
            "train/step_seconds": round(seconds / max(window.get("steps", 1), 1), 6),
            "train/skipped_total": self.step.guard.skipped,
            **memory_metrics(self.run.device),
            **(self.thermal.metrics() if self.thermal is not None else {}),
        }
        if self.step.scaler.enabled:
            record["train/loss_scale"] = self.step.scaler.scale
        self.reporter.write(record)
        window.clear()

    def evaluate(self, stop: StopFlag) -> bool:
        """Held-out loss now; returns whether it is the best so far.  A signal ends it early and nothing is recorded."""
        if self.run.eval_loader is None:
            return False
        batches = self.run.eval_loader.one_pass()
        result = held_out_loss(self.run.model, batches, self.objective, self.run.device, stop=lambda: bool(stop))
        if result is None:
            return False
        self.last_eval, self.state.last_eval_step = result, self.state.step
        metrics = result.metrics()
        self.reporter.write({"step": self.state.step, "epoch": round(self.state.epoch, 6), **metrics})
        return self.state.step > 0 and self.best.update(metrics, self.state.step)

    def owes_evaluation(self) -> bool:
        """Before the first fetch: the evaluation on start, or one that a signal cut short before the resume."""
        step = self.state.step
        if step == 0:
            return self.config.eval_on_start
        due = self.cadence.evaluates(step, end_of_epoch(self.run.train_loader))
        return due and self.state.last_eval_step != step

    @property
    def keeps_best(self) -> bool:
        """Whether a checkpoint is saved whenever an evaluation is the best so far."""
        return self.config.load_best_model_at_end or self.config.save_strategy == "best"

    def save(self) -> None:
        """Commit a checkpoint of this step, unless there is one."""
        path = self.store.path(self.state.step)
        if self.last_checkpoint != path:
            self.last_checkpoint = save_checkpoint(self.run, self.store, self.state)

    def finish(self, stop: StopFlag) -> None:
        """After the last step: record, evaluate, save, and take the best weights where that was asked for."""
        started = time.perf_counter()
        if self.state.window and not stop:
            self.record()
        if not stop and self.state.last_eval_step != self.state.step:
            self.evaluate(stop)
        if self.config.save_strategy != "no" or stop:
            self.save()
        best = self.state.best_step
        if self.config.load_best_model_at_end and not stop and best is not None and best != self.state.step:
            restore_best(self.run, self.store.path(best))
            say(f"the weights of step {best} are the best (held-out {self.state.best_metric:.4f}) and are kept")
        self.reporter.close()
        if self.thermal is not None:
            self.thermal.close()
        self.finish_seconds = time.perf_counter() - started
