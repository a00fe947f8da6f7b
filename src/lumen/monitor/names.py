"""Every metric's name, once: as it stands in metrics.jsonl, and as Prometheus wants it.

Prometheus' rules: one prefix, base units (seconds, bytes), the unit as a suffix, `_total` for what only grows, ratios
between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """key: in metrics.jsonl.  prometheus: exported name.  kind: gauge, counter, histogram.  text: what, with unit."""

    key: str
    prometheus: str
    kind: str
    text: str


METRICS = (
    Metric("train/loss", "lumen_train_loss", "gauge", "mean loss per labelled token since the last record, nats"),
    Metric("train/accuracy", "lumen_train_token_accuracy_ratio", "gauge", "labelled tokens predicted right, 0 to 1"),
    Metric("train/grad_norm", "lumen_train_grad_norm", "gauge", "global gradient norm before clipping, last step"),
    Metric("train/learning_rate", "lumen_train_learning_rate", "gauge", "learning rate of the last step"),
    Metric("train/tokens_total", "lumen_train_tokens_total", "counter", "real (not padded) tokens trained on"),
    Metric("train/loss_tokens_total", "lumen_train_loss_tokens_total", "counter", "labelled tokens trained on"),
    Metric("train/tokens_per_second", "lumen_train_tokens_per_second", "gauge", "real tokens a second"),
    Metric("train/step_seconds", "lumen_train_step_duration_seconds", "histogram", "seconds of an optimizer step"),
    Metric("train/skipped_total", "lumen_train_skipped_steps_total", "counter", "steps skipped: not finite"),
    Metric("train/loss_scale", "lumen_train_loss_scale", "gauge", "fp16 loss scale"),
    Metric("eval/loss", "lumen_eval_loss", "gauge", "held-out loss per labelled token, nats"),
    Metric("eval/perplexity", "lumen_eval_perplexity", "gauge", "exp of the held-out loss"),
    Metric("eval/accuracy", "lumen_eval_token_accuracy_ratio", "gauge", "held-out tokens predicted right, 0 to 1"),
    Metric("eval/tokens", "lumen_eval_tokens", "gauge", "labelled held-out tokens"),
    Metric("eval/seconds", "lumen_eval_duration_seconds", "gauge", "seconds of the evaluation"),
    Metric("memory/process_bytes", "lumen_process_memory_bytes", "gauge", "resident memory of the process, bytes"),
    Metric("memory/process_peak_bytes", "lumen_process_peak_memory_bytes", "gauge", "its peak, bytes"),
    Metric("memory/gpu_bytes", "lumen_gpu_memory_used_bytes", "gauge", "GPU memory reserved by torch, bytes"),
    Metric(
        "thermal/temperature_celsius", "lumen_thermal_temperature_celsius", "gauge", "of the device that trains, °C"
    ),
    Metric("thermal/duty_ratio", "lumen_thermal_duty_ratio", "gauge", "share of time at work, 1 unless hot, 0 to 1"),
    Metric("thermal/rested_seconds_total", "lumen_thermal_rested_seconds_total", "counter", "seconds of rest when hot"),
    Metric("thermal/paused_seconds_total", "lumen_thermal_paused_seconds_total", "counter", "seconds of pause"),
    Metric("thermal/pauses_total", "lumen_thermal_pauses_total", "counter", "pauses at the critical temperature"),
    Metric("memory/gpu_peak_bytes", "lumen_gpu_peak_memory_bytes", "gauge", "peak GPU memory allocated, bytes"),
)

BY_KEY = {metric.key: metric for metric in METRICS}


def check_names(record: dict) -> None:
    """Assert that every metric (a key with a slash) of a record is one of the table."""
    unknown = [key for key in record if "/" in key and key not in BY_KEY]
    assert not unknown, f"metrics without an entry in names.py: {unknown}"
