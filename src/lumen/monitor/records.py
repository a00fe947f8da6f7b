"""metrics.jsonl: one JSON object a line, appended and flushed as the run goes.

Every line has `step` and `time` (seconds since 1970), and either metrics (`train/loss`, `eval/loss`, …) or an
`event`. A resumed run continues the file: lines past the checkpoint's step are cut off first, because those steps are
made again. A line that a crash left half-written is cut off too.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from lumen.core.files import atomic_write_text
from lumen.monitor.names import check_names

FILE_NAME = "metrics.jsonl"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; an unfinished last line is left out."""
    records = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "step" in record:
                records.append(record)
    return records


class Records:
    """The metrics file of a run.

    directory:   the run's output_dir.
    resume_step: keep the lines up to this step; None starts an empty file.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None):
        self.path = directory / FILE_NAME
        kept = [] if resume_step is None else [r for r in read_records(self.path) if r["step"] <= resume_step]
        self.records: list[dict[str, Any]] = kept
        atomic_write_text(self.path, "".join(_line(record) for record in kept))
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record (`step` and metrics or an event) and flush it."""
        check_names(record)
        record = {**record, "time": round(time.time(), 3)}
        self.records.append(record)
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(record: dict[str, Any]) -> str:
    # JSON has no NaN or infinity; a reader elsewhere must not fail on the line that matters most
    plain = {k: (str(v) if isinstance(v, float) and not math.isfinite(v) else v) for k, v in record.items()}
    return json.dumps(plain, ensure_ascii=False) + "\n"
