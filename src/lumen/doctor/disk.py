"""How fast the disk under a folder writes and reads, past the page cache: what offloading and checkpoints wait for."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

CHUNK, CHUNKS = 8 << 20, 16
"""Bytes of one write, and how many at most."""

SECONDS = 1.0
"""Writing stops after so long, reading too."""

SLOW = 100e6
"""Bytes a second below which offload to this disk makes no sense."""


@dataclass(frozen=True)
class Speed:
    """Bytes a second.  direct: reading went past the page cache for certain."""

    write: float
    read: float
    size: int
    direct: bool


def disk_speed(folder: Path) -> Speed:
    """Write a file of up to 128 MiB below `folder`, flush it, read it back, remove it.  Raises OSError."""
    path = folder / f".lumen-doctor-{os.getpid()}.tmp"
    chunk = os.urandom(1 << 20) * (CHUNK >> 20)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        started, written = time.perf_counter(), 0
        try:
            while written < CHUNK * CHUNKS and time.perf_counter() - started < SECONDS:
                written += os.write(descriptor, chunk)
            os.fsync(descriptor)
            write = written / (time.perf_counter() - started)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        read, direct = _read(path)
        return Speed(write, read, written, direct)
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[float, bool]:
    """(bytes a second, whether the page cache was bypassed): O_DIRECT where the file system has it."""
    direct = hasattr(os, "O_DIRECT")
    try:
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    except OSError:
        direct, descriptor = False, os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(-1, CHUNK) as buffer:
            started, count = time.perf_counter(), 0
            while time.perf_counter() - started < SECONDS:
                got = os.readv(descriptor, [buffer])
                if not got:
                    break
                count += got
            return count / (time.perf_counter() - started), direct
    finally:
        os.close(descriptor)
