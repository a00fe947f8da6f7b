"""Where a record goes: the metrics file always, the progress bar, TensorBoard when asked for."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from lumen.core.errors import ConfigError
from lumen.core.log import note
from lumen.monitor.config import MonitorConfig
from lumen.monitor.progress import ProgressBar
from lumen.monitor.prometheus import Endpoint
from lumen.monitor.records import Records

_ELSEWHERE = {"wandb", "swanlab", "mlflow", "comet_ml", "neptune", "clearml", "trackio", "dvclive", "azure_ml", "all"}


class HasNumbers(Protocol):
    """What the bar reads of a step's result."""

    loss: float
    tokens: int
    seconds: float


def reporters(report_to: list[str]) -> list[str]:
    """The known reporters of `report_to`; a service that is not built is noted by name, an unknown name refused."""
    chosen = []
    for name in report_to:
        if name == "tensorboard":
            chosen.append(name)
        elif name in _ELSEWHERE:
            note(f"report_to: {name} is not built and nothing is sent; metrics.jsonl holds every metric")
        elif name != "none":
            raise ConfigError(f"unknown reporter {name!r}", where="report_to", fix="use none or tensorboard")
    return chosen


class Reporter:
    """Takes the records of a run.

    directory:   the run's output_dir.
    resume_step: of the checkpoint that is resumed; records after it are dropped first.
    """

    def __init__(self, config: MonitorConfig, directory: Path, *, resume_step: int | None = None):
        self.file = Records(directory, resume_step=resume_step)
        self.bar: ProgressBar | None = None
        self.board: Any = None
        self._rate = 0.0
        self.endpoint: Endpoint | None = None
        if config.monitor.prometheus_port is not None:
            name = config.run_name or directory.name
            self.endpoint = Endpoint(name, config.monitor.prometheus_port, config.monitor.prometheus_host, version())
        if "tensorboard" in reporters(list(config.report_to)):
            self.board = _tensorboard(
                Path(config.logging_dir) if config.logging_dir else directory / "runs", resume_step
            )

    @property
    def records(self) -> list[dict[str, Any]]:
        """Every record of the run so far, resumed ones included."""
        return self.file.records

    def write(self, record: dict[str, Any]) -> None:
        """A record: `step`, and metrics or an event."""
        self.file.write(record)
        if self.endpoint is not None:
            self.endpoint.write(record)
        if self.bar is not None:
            self.bar.record(record)
        if self.board is not None:
            for key, value in record.items():
                if "/" in key:
                    self.board.add_scalar(key, value, record["step"])
            self.board.flush()

    def step(self, step: int, result: HasNumbers) -> None:
        """A step was made; moves the bar.  The rate shown is smoothed over about ten steps."""
        rate = result.tokens / max(result.seconds, 1e-9)
        if self.endpoint is not None:
            self.endpoint.step(result.seconds)
        self._rate = rate if self._rate == 0 else 0.9 * self._rate + 0.1 * rate
        if self.bar is not None:
            self.bar.step(step, loss=result.loss, tokens_per_second=self._rate)

    def close(self) -> None:
        """Close the files."""
        self.file.close()
        if self.endpoint is not None:
            self.endpoint.close()
        if self.board is not None:
            self.board.close()


def version() -> str:
    """Lumen's version as installed, '' from a checkout."""
    try:
        return metadata.version("lumen-train")
    except metadata.PackageNotFoundError:
        return ""


def _tensorboard(directory: Path, resume_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "report_to: tensorboard needs the tensorboard package",
            where="report_to",
            fix="pip install 'lumen-train[monitor]', or report_to: none",
        ) from error
    purge = None if resume_step is None else resume_step + 1
    return SummaryWriter(str(directory), purge_step=purge)
