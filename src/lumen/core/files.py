"""Files that are whole or not there.

A reader must never see half a file, also after a crash: contents go to a temporary name beside the target, are
flushed to the disk, and take the final name in one atomic rename; the directory is flushed so that the rename itself
survives.  A directory is published in the same way (`atomic_directory`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def fsync_path(path: Path) -> None:
    """Flush a file's contents, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old contents or all of the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys left as given and a final newline."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `path` by one rename when the block ends without an error.

    Everything below it is flushed first.  An existing `path` is moved aside before and removed after the rename, so
    at every moment the old or the new directory is whole on the disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for entry in sorted(temporary.rglob("*")):
            fsync_path(entry)
        fsync_path(temporary)
        replaced = None
        if path.exists():
            replaced = path.with_name(f"{path.name}.old-{os.getpid()}")
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        temporary.rename(path)
        fsync_path(path.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """Hex digest of a file's contents."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex digest of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()
