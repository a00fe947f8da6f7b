"""The process that touches devices: `python -m lumen.doctor.worker SECONDS [PROBE ...]`.

Importing torch over a broken driver may hang or crash, and so may the first product on a GPU with a spoofed
architecture.  So this runs in a process of its own, under the doctor's deadline, and writes one JSON line after every
step: what was still running when it died or hung is the finding.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def say(**values: Any) -> None:
    """One line for the doctor."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    seconds, names = float(argv[0]), argv[1:]
    say(step="start", probe="import torch")
    import torch

    from lumen.doctor.collective import Collective

    pair = Collective(min(10.0, seconds)) if "collective" in names else None
    say(step="start", probe="torch sees")
    from lumen.hardware import probe
    from lumen.models.device import torch_gpus

    gpus = torch_gpus(probe())
    say(step="torch", version=torch.__version__, gpus=[vars(gpu) for gpu in gpus], carried=torch.cuda.get_arch_list())

    if pair is not None:
        say(step="start", probe="collective")
        say(step="collective", **pair.result())

    from lumen.doctor.numeric import PROBES, measure

    devices = [f"cuda:{index}" for index, gpu in enumerate(gpus) if gpu.trainable] or ["cpu"]
    for device in devices:
        for name in PROBES if device == devices[0] else ("gemm",):
            if name in names:
                say(step="start", probe=name, device=device)
                say(step="measured", **measure(name, device))
    say(step="end")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
