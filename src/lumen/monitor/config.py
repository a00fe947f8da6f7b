"""What a run reports."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from lumen.core import Config, Count, StrList


def _reports(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in ("none", "tensorboard", "all")]
    if unknown:
        raise ValueError(
            f"must be none or tensorboard; {unknown[0]} is not supported (metrics.jsonl is always written)"
        )
    return names


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
