"""What a run reports."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from lumen.core import Config, Count, Int, NonNegative, Positive, StrList


def _reports(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in ("none", "tensorboard", "all")]
    if unknown:
        raise ValueError(
            f"must be none or tensorboard; {unknown[0]} is not supported (metrics.jsonl is always written)"
        )
    return names


Port = Annotated[Int, Field(ge=0, le=65535)]


class MonitorSection(Config):
    """Watching the machine while it trains."""

    max_temperature_c: NonNegative | None = None
    """°C of the training device above which training rests between steps; 0: never. Default: null, 85 on a GPU, never
    on the CPU."""

    critical_temperature_c: Positive | None = None
    """°C at which a checkpoint is saved and training pauses until the device is cool. Default: null,
    max_temperature_c + 10."""

    temperature_hysteresis_c: Positive = 5.0
    """°C below max_temperature_c at which full speed returns. Default: 5."""

    temperature_interval_s: Positive = 5.0
    """Seconds between two readings of the temperature. Default: 5."""

    prometheus_port: Port | None = None
    """Serve the run's metrics for Prometheus on this port; 0: any free one. Default: null, not served."""

    prometheus_host: str = "127.0.0.1"
    """Address to serve them on. Default: 127.0.0.1, this machine only."""

    @model_validator(mode="after")
    def _in_order(self) -> MonitorSection:
        maximum = 85.0 if self.max_temperature_c is None else self.max_temperature_c
        if maximum and self.critical_temperature_c is not None and self.critical_temperature_c <= maximum:
            raise ValueError(f"critical_temperature_c must be above max_temperature_c ({maximum:g})")
        return self


class MonitorConfig(Config):
    """Metrics, plots and the progress bar. metrics.jsonl is always written."""

    logging_steps: Count = 10
    """Optimizer steps between two training records. Default: 10."""

    logging_first_step: bool = False
    """Also record the first step. Default: false."""

    logging_dir: str | None = None
    """Folder of TensorBoard files. Default: `runs` in output_dir."""

    report_to: Annotated[StrList, AfterValidator(_reports)] = ["none"]
    """none, tensorboard, or all (which is tensorboard). Default: none."""

    run_name: str | None = None
    """Name of the run in reports. Default: output_dir's last part."""

    plot_loss: bool = True
    """Draw the loss curves into loss.png at the end. Default: true (LLaMA-Factory: false)."""

    disable_tqdm: bool | None = None
    """Switch the progress bar off. Default: null, off where standard error is no terminal."""

    monitor: MonitorSection = MonitorSection()
    """Temperature limits and Prometheus. Default: slower above 85 °C on a GPU, no endpoint."""
