"""What the device computes, as findings: runs the worker under a deadline and judges its lines."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lumen.doctor.disk import SLOW, disk_speed
from lumen.doctor.finding import BROKEN, NOTE, OK, WARNING, Finding, gib
from lumen.hardware import Gpu

LIMIT = 15.0
"""Seconds the worker may take altogether; the doctor promises to end within 20."""

WHY = {
    "gemm": "a product that is silently wrong shows as a model that learns badly",
    "attention": "the same for attention and its three gradients",
    "quantise": "codes made here must be those made anywhere else",
    "int8": "int8 training uses these integer products",
    "fp8": "FP8 training uses these products, native or emulated",
    "allocator": "memory that changes what is written to it ruins everything",
    "collective": "the first collective is where several devices hang",
    "disk-speed": "offload and checkpoints wait for the disk",
    "probes": "what hangs or crashes here hangs or crashes a run",
}
NUMERIC = ("gemm", "attention", "quantise", "int8", "fp8", "allocator")


@dataclass
class Worked:
    """What the worker told before it ended.  running: the probe it was in, '' after a good end.  code: its status,
    None where it was stopped at the deadline.  tail: the end of its error output."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    running: str = ""
    code: int | None = 0
    tail: str = ""

    @property
    def gpus(self) -> list[Gpu] | None:
        """The GPUs that torch reports; None where torch never got so far."""
        told = next((line for line in self.lines if line["step"] == "torch"), None)
        return None if told is None else [Gpu(**values) for values in told["gpus"]]

    @property
    def carried(self) -> list[str]:
        """The architectures that torch has code for."""
        told = next((line for line in self.lines if line["step"] == "torch"), None)
        return told["carried"] if told else []


def work(
    probes: Sequence[str] = (*NUMERIC, "collective"), *, limit: float = LIMIT, command: Sequence[str] = ()
) -> Worked:
    """Run the worker and collect its lines; it and its ranks are ended at the deadline.

    command: instead of the worker, for tests.
    """
    folder = str(Path(__file__).parents[2])
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    }
    words = list(command) or [sys.executable, "-m", "lumen.doctor.worker", str(limit), *probes]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    told: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told.put(line)
        told.put(None)

    def collect() -> None:
        assert process.stderr is not None
        errors.extend(process.stderr)

    threads = [threading.Thread(target=target, daemon=True) for target in (listen, collect)]
    for thread in threads:
        thread.start()
    worked, deadline = Worked(), time.monotonic() + limit
    worked.running = "start"
    while True:
        try:
            line = told.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            worked.code = None
            break
        if line is None:
            worked.code = process.wait()
            break
        try:
            values = json.loads(line)
        except ValueError:
            continue  # a library that prints to standard output
        worked.lines.append(values)
        if values["step"] == "start":
            worked.running = " on ".join(filter(None, [values["probe"], values.get("device", "")]))
        elif values["step"] == "end":
            worked.running = ""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    threads[1].join(timeout=0.5)
    worked.tail = " | ".join(line.strip() for line in errors[-3:])
    return worked


def judge(worked: Worked, folder: str = "") -> list[Finding]:
    """The worker's lines as findings."""
    found = [_numeric(line) for line in worked.lines if line["step"] == "measured"]
    found += [_collective(line) for line in worked.lines if line["step"] == "collective"]
    if worked.running:
        died = (
            f"did not end within {LIMIT:.0f} s"
            if worked.code is None
            else f"ended with status {worked.code}" + (f" (signal {-worked.code})" if worked.code < 0 else "")
        )
        saw = f"the process that tries the device {died} in: {worked.running}" + (
            f"; {worked.tail}" if worked.tail else ""
        )
        if "No module named 'torch'" in worked.tail:
            found.append(Finding("probes", "device", NOTE, "not tried: torch is not installed", WHY["probes"]))
        elif worked.code is None and "cuda" not in worked.running and worked.running != "collective":
            load = f"; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
            again = "run it again when the machine is less busy; `lumen doctor --quick` leaves the probes out"
            found.append(Finding("probes", "device", WARNING, saw + load, WHY["probes"], again))
        else:
            fix = "unset HSA_OVERRIDE_GFX_VERSION; see `dmesg`; `lumen doctor --quick` leaves the probes out"
            found.append(Finding("probes", "device", BROKEN, saw, WHY["probes"], fix))
    return found


def _numeric(line: dict[str, Any]) -> Finding:
    name, place = line["probe"], f"on {line['device']}" + (f" ({line['target']})" if line["target"] != "cpu" else "")
    why = WHY[name]
    if line["error"]:
        status = BROKEN if name in ("gemm", "attention", "allocator") else WARNING
        return Finding(
            name,
            "device",
            status,
            f"{place}: does not run: {line['error']}",
            why,
            "use another recipe or build of torch",
        )
    if line["wrong"]:
        more = f" and {len(line['wrong']) - 1} more" if len(line["wrong"]) > 1 else ""
        fix = {
            "attention": "set flash_attn: disabled, and report it with the output of `lumen doctor --json`",
            "quantise": "report it with the output of `lumen doctor --json`",
        }.get(name, "export TORCH_BLAS_PREFER_HIPBLASLT=0, or another build of torch; do not train with this one")
        return Finding(name, "device", BROKEN, f"{place}: WRONG: {line['wrong'][0]}{more}", why, fix)
    return Finding(name, "device", OK, f"{place}: {line['count']} comparisons hold; worst: {line['worst']}", why)


def _collective(line: dict[str, Any]) -> Finding:
    why = WHY["collective"]
    if line["missing"]:
        names = " and ".join(f"rank {rank}" for rank in line["missing"])
        saw = f"{names} did not answer within {line['limit']:.0f} s"
    elif line["errors"]:
        saw = "; ".join(f"rank {rank}: {text}" for rank, text in line["errors"].items())
    elif not line["exact"]:
        saw = f"{line['backend']}: the sum is wrong"
    else:
        took = f"{line['seconds'] * 1000:.1f} ms"
        return Finding("collective", "device", OK, f"2 ranks, {line['backend']}: 1 MiB summed exactly in {took}", why)
    fix = "export GLOO_SOCKET_IFNAME=lo on one machine; with GPUs: iommu=pt, and NCCL_DEBUG=INFO says where it waits"
    return Finding("collective", "device", BROKEN, saw, why, fix)


def disk_finding(folder: Path) -> Finding:
    """Speed of the disk under a folder."""
    why = WHY["disk-speed"]
    try:
        speed = disk_speed(folder)
    except OSError as error:
        return Finding(
            "disk-speed",
            "host",
            WARNING,
            f"{folder}: {error.strerror or error}",
            why,
            "choose a folder that can be written: --folder DIR",
        )
    cache = "" if speed.direct else ", through the page cache"
    saw = f"{folder}: writes {speed.write / 1e6:.0f} MB/s, reads {speed.read / 1e6:.0f} MB/s ({gib(speed.size)}{cache})"
    if min(speed.write, speed.read) < SLOW:
        return Finding(
            "disk-speed",
            "host",
            WARNING,
            f"{saw}: slow",
            why,
            "offload to a local NVMe disk: --folder DIR measures another",
        )
    return Finding("disk-speed", "host", OK, saw, why)
