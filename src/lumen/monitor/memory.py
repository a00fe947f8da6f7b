"""How much memory the process and the GPU hold, in bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def process_bytes() -> int:
    """Resident memory now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return peak_process_bytes()
    import resource

    return pages * resource.getpagesize()


def peak_process_bytes() -> int:
    """Largest resident memory of this process so far; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_metrics(device: torch.device) -> dict[str, int]:
    """Memory metrics of a record."""
    metrics = {"memory/process_bytes": process_bytes(), "memory/process_peak_bytes": peak_process_bytes()}
    if device.type == "cuda":
        metrics["memory/gpu_bytes"] = torch.cuda.memory_reserved(device)
        metrics["memory/gpu_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return metrics


def readable_bytes(count: float) -> str:
    """`3.3 GB` (10^9 bytes)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
