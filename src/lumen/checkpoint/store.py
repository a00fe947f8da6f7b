"""How a checkpoint is committed: whole or not there.

    output_dir/checkpoint-120.tmp-4711/     being written; swept at the next start if the process died
    output_dir/checkpoint-120/              appeared by one rename, after everything in it was flushed to the disk
        manifest.json                       size and sha256 of every other file: the commit marker

Which one is newest is never written down anywhere: a pointer can outlive what it points to.  `latest()` looks at the
directories, newest first, and takes the first whose manifest verifies, so a damaged newest falls back to the previous
one with a warning.  Retention (`save_total_limit`) deletes old ones only while a newer one verifies, and never the
best one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lumen.core.errors import CheckpointError
from lumen.core.files import atomic_directory, atomic_write_json, sha256_file
from lumen.core.log import warn

MANIFEST = "manifest.json"
_NAME = re.compile(r"^checkpoint-(\d+)$")
_LEFTOVER = re.compile(r"^checkpoint-\d+\.(tmp|old)-\d+(\..*)?$")


class Store:
    """The checkpoints of one run.

    root: the run's output_dir.
    limit: how many to keep (HF's `save_total_limit`); None keeps all.  At least one is always kept.
    """

    def __init__(self, root: Path | str, *, limit: int | None = None):
        self.root = Path(root)
        self.limit = limit

    def path(self, step: int) -> Path:
        """Directory of one step's checkpoint."""
        return self.root / f"checkpoint-{step}"

    def steps(self) -> list[int]:
        """Steps that have a directory, ascending; verified or not."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.match(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """Yield an empty directory to fill; it becomes `checkpoint-STEP` when the block ends without an error.

        Raises CheckpointError when the disk refuses (full, read-only); what was committed before is untouched.
        """
        try:
            with atomic_directory(self.path(step)) as directory:
                yield directory
                atomic_write_json(directory / MANIFEST, {"step": step, "files": _describe(directory)})
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {error.strerror or error}",
                where=str(self.path(step)),
                fix="free disk space or choose another output_dir, then run the same command to resume",
            ) from error

    def problem(self, directory: Path, *, contents: bool = True) -> str | None:
        """Why a checkpoint cannot be used, or None.  `contents=False` compares sizes only."""
        manifest = directory / MANIFEST
        try:
            files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
            for name, expected in files.items():
                path = directory / name
                if not path.is_file():
                    return f"{name} is missing"
                if path.stat().st_size != expected["bytes"]:
                    return f"{name} has {path.stat().st_size} bytes, the manifest says {expected['bytes']}"
                if contents and sha256_file(path) != expected["sha256"]:
                    return f"{name} does not match its checksum"
        except FileNotFoundError:
            return f"{MANIFEST} is missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{MANIFEST} cannot be read ({error})"
        return None

    def latest(self) -> Path | None:
        """The newest checkpoint that verifies; warns about each newer one that does not."""
        for step in reversed(self.steps()):
            directory = self.path(step)
            problem = self.problem(directory)
            if problem is None:
                return directory
            warn(f"{directory.name} is damaged ({problem}); looking for an earlier one")
        return None

    def prune(self, *, best: int | None = None) -> list[int]:
        """Delete what retention does not keep; returns the deleted steps.

        Kept: the newest `limit` that are whole, and the best.  Damaged ones do not count and go once a whole newer
        one exists.  Nothing is deleted when none verifies.
        """
        if self.limit is None:
            return []
        limit = max(1, self.limit)
        keep: list[int] = []
        for step in reversed(self.steps()):
            # The newest kept one is checked in full, because everything older may be deleted on its word.
            if len(keep) < limit and self.problem(self.path(step), contents=not keep) is None:
                keep.append(step)
        if not keep:
            return []
        if best is not None and best not in keep and best in self.steps():
            if len(keep) == limit and limit > 1:
                keep.pop()  # as in HF: the best one counts among the limit, the newest always stays
            keep.append(best)
        doomed = [step for step in self.steps() if step not in keep and step < max(keep)]
        for step in doomed:
            self.remove(step)
        return doomed

    def remove(self, step: int) -> None:
        """Delete one checkpoint: first it stops being one (a rename), then its files go."""
        directory = self.path(step)
        aside = directory.with_name(f"{directory.name}.old-0")
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def sweep(self) -> list[str]:
        """Remove what an interrupted save or deletion left behind; returns the names.

        An `.old-` directory whose checkpoint is gone was moved aside by a save of the same step that died before its
        own rename: it is whole, so it is moved back.
        """
        swept: list[str] = []
        if not self.root.is_dir():
            return swept
        for entry in sorted(self.root.iterdir()):
            if not _LEFTOVER.match(entry.name):
                continue
            original = self.root / entry.name.partition(".")[0]
            if ".old-" in entry.name and not original.exists() and self.problem(entry) is None:
                entry.rename(original)
            else:
                shutil.rmtree(entry, ignore_errors=True)
            swept.append(entry.name)
        return swept


def _describe(directory: Path) -> dict[str, dict[str, int | str]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in files
    }
