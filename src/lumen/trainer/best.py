"""Which evaluation is the best so far, and when to stop because none gets better."""

from __future__ import annotations

from lumen.checkpoint import TrainState
from lumen.core.errors import ConfigError
from lumen.trainer.config import RunConfig

METRICS = {"loss": "eval/loss", "perplexity": "eval/perplexity", "accuracy": "eval/accuracy"}


class Best:
    """Follows one evaluation metric; its memory is the TrainState, so it survives a resume."""

    def __init__(self, config: RunConfig, state: TrainState):
        name = (config.metric_for_best_model or "eval_loss").removeprefix("eval_")
        if name not in METRICS:
            raise ConfigError(
                f"metric_for_best_model {config.metric_for_best_model!r} is not measured",
                where="metric_for_best_model",
                fix=f"use one of {', '.join('eval_' + n for n in METRICS)}",
            )
        self.key = METRICS[name]
        larger = config.greater_is_better
        self.sign = 1.0 if (name == "accuracy" if larger is None else larger) else -1.0
        self.patience = config.early_stopping_steps
        self.state = state

    def update(self, metrics: dict[str, float], step: int) -> bool:
        """Take an evaluation; returns whether it is the best so far."""
        value, best = metrics[self.key], self.state.best_metric
        if value == value and (best is None or self.sign * value > self.sign * best):
            self.state.best_metric, self.state.best_step = value, step
            self.state.evals_without_improvement = 0
            return True
        self.state.evals_without_improvement += 1
        return False

    @property
    def should_stop(self) -> bool:
        """Whether early stopping says enough."""
        return self.patience is not None and self.state.evals_without_improvement >= self.patience
