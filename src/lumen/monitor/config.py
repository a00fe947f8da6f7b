"""What a run reports."""

from __future__ import annotations

from lumen.core import Config, Int, StrList


class MonitorConfig(Config):
    """Metrics, plots and the progress bar. metrics.jsonl is always written."""

    logging_steps: Int = 10
    """Optimizer steps between two training records. Default: 10."""

    logging_first_step: bool = False
    """Also record the first step. Default: false."""

    logging_dir: str | None = None
    """Folder of TensorBoard files. Default: `runs` in output_dir."""

    report_to: StrList = ["none"]
    """none or tensorboard. Default: none."""

    run_name: str | None = None
    """Name of the run in reports. Default: output_dir's last part."""

    plot_loss: bool = False
    """Write the loss curves as PNG at the end. Default: false."""

    disable_tqdm: bool | None = None
    """Switch the progress bar off. Default: null, off where standard error is no terminal."""
