"""How a machine is looked at: files, commands, environment, packages, device nodes, disks.  All of it can be replaced.

`View()` is this machine.  `View(root, ...)` with recorded values is another one: a test, or a report that somebody
sent in, is then looked at by the very code that looks at a real machine.  Nothing here raises for what is missing:
absence is an answer.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND_SECONDS = 4.0
"""How long a vendor's tool may take; a hanging driver must not hang the doctor."""


@dataclass(frozen=True)
class Output:
    """What a command gave: exit status (124: it ran too long) and standard output."""

    code: int
    text: str


@dataclass(frozen=True)
class Node:
    """A device node: numeric group, permission bits, and whether this process may read and write it."""

    group: int
    mode: int
    usable: bool


@dataclass(frozen=True)
class Space:
    """Bytes of a file system, and its type ('' where unknown)."""

    total: int
    free: int
    kind: str = ""


def read(path: Path) -> str:
    """A file's text, or '' where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""


class View:
    """One machine, as it can be seen.

    root:          folder that holds its files (`/` for this one).
    environment:   its variables.
    commands:      recorded outputs by command line (`amd-smi static --json`); None runs them.
    packages:      recorded Python distributions, name → version; None asks this interpreter.
    requires:      recorded requirements of torch (`triton-rocm==3.7.1`); None asks this interpreter.
    nodes:         recorded device nodes by path; None looks at the files.
    groups:        recorded numeric groups of the process.
    spaces:        recorded file systems by mount point or folder; None asks the system.
    torch_version: text of torch/version.py; None finds the torch that this interpreter would import.

    Whatever is None is live only where root is `/`; on a recorded root it is empty.
    """

    def __init__(
        self,
        root: Path | str = "/",
        environment: Mapping[str, str] | None = None,
        *,
        commands: Mapping[str, Output] | None = None,
        packages: Mapping[str, str] | None = None,
        requires: Sequence[str] | None = None,
        nodes: Mapping[str, Node] | None = None,
        groups: Iterable[int] | None = None,
        spaces: Mapping[str, Space] | None = None,
        torch_version: str | None = None,
    ):
        self.root = Path(root)
        self.live = self.root == Path("/")
        self.environment: Mapping[str, str] = os.environ if environment is None else environment
        self._commands, self._packages, self._requires = commands, packages, requires
        self._nodes, self._spaces, self._torch = nodes, spaces, torch_version
        self._groups = None if groups is None else frozenset(groups)
        self._ran: dict[str, Output | None] = {}

    def path(self, name: str) -> Path:
        """Where a file of the machine lies here."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """A file's text, stripped; '' where there is none."""
        return read(self.path(name)).strip()

    def exists(self, name: str) -> bool:
        """Whether a file, folder or node is there."""
        try:
            return self.path(name).exists() or name in (self._nodes or {})
        except OSError:
            return False

    def glob(self, pattern: str) -> list[str]:
        """Absolute names on that machine that fit a pattern, sorted with numbers in their order."""
        try:
            found = [f"/{path.relative_to(self.root)}" for path in self.root.glob(pattern.lstrip("/"))]
        except OSError:
            return []
        return sorted(found, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])

    def run(self, command: str, seconds: float = COMMAND_SECONDS) -> Output | None:
        """Output of a command given as words separated by spaces; None where it is not installed.  Run once."""
        if command not in self._ran:
            self._ran[command] = self._run(command, seconds)
        return self._ran[command]

    def _run(self, command: str, seconds: float) -> Output | None:
        if self._commands is not None or not self.live:
            return (self._commands or {}).get(command)
        try:
            done = subprocess.run(
                command.split(), capture_output=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return Output(124, "")
        except OSError:
            return None
        return Output(done.returncode, done.stdout.decode("utf-8", "replace"))

    def node(self, name: str) -> Node | None:
        """A device node, or None where there is none."""
        if self._nodes is not None and name in self._nodes:
            return self._nodes[name]
        path = self.path(name)
        try:
            status = path.stat()
        except OSError:
            return None
        usable = os.access(path, os.R_OK | os.W_OK)
        return Node(status.st_gid, status.st_mode & 0o777, usable if self.live else True)

    def groups(self) -> frozenset[int]:
        """Numeric groups of this process."""
        if self._groups is not None or not self.live:
            return self._groups or frozenset()
        return frozenset([*os.getgroups(), os.getegid()])

    def group_name(self, number: int) -> str:
        """The name of a group by /etc/group, '' where it has none (usual in a container)."""
        for line in self.read("/etc/group").splitlines():
            name, _, rest = line.partition(":")
            if rest.split(":")[1:2] == [str(number)]:
                return name
        return ""

    def packages(self) -> Mapping[str, str]:
        """Installed Python distributions: plain name (lower case, dashes) → version."""
        if self._packages is None:
            found: dict[str, str] = {}
            for item in importlib.metadata.distributions() if self.live else ():
                name = (item.metadata["Name"] if item.metadata else "") or ""
                found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), item.version or "")
            self._packages = found
        return self._packages

    def torch_requires(self) -> list[str]:
        """What the installed torch asks for, as requirement lines."""
        if self._requires is not None or not self.live:
            return list(self._requires or ())
        try:
            return list(importlib.metadata.requires("torch") or ())
        except importlib.metadata.PackageNotFoundError:
            return []

    def torch_version_text(self) -> str:
        """The text of torch/version.py; torch is not imported."""
        if self._torch is not None:
            return self._torch
        if not self.live:
            return ""
        try:
            spec = importlib.util.find_spec("torch")
        except (ImportError, ValueError):
            return ""
        return read(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""

    def space(self, name: str) -> Space | None:
        """Room of the file system that holds a folder; None where it is not known."""
        if self._spaces is not None or not self.live:
            return (self._spaces or {}).get(name)
        try:
            found = os.statvfs(name)
        except OSError:
            return None
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, self._kind(name))

    def _kind(self, name: str) -> str:
        """The type of the file system that a folder lies on, by the longest mount point above it."""
        best = ("", "")
        folder = os.path.realpath(name)
        for line in self.read("/proc/self/mounts").splitlines():
            words = line.split()
            if (
                len(words) > 2
                and (folder + "/").startswith(words[1].rstrip("/") + "/")
                and len(words[1]) >= len(best[0])
            ):
                best = (words[1], words[2])
        return best[1]

    @property
    def container(self) -> bool:
        """Whether this is inside a container (Docker, Podman, Kubernetes, LXC).

        An image that was unpacked onto a virtual machine's disk keeps its marker file; its root is a disk, though.
        """
        marks = ("docker", "kubepods", "libpod", "containerd", "/lxc/")
        if any(mark in self.read("/proc/self/cgroup") for mark in marks):
            return True
        if not (self.exists("/.dockerenv") or self.exists("/run/.containerenv")):
            return False
        roots = [line.split()[0] for line in self.read("/proc/self/mounts").splitlines() if line.split()[1:2] == ["/"]]
        return not any(root.startswith("/dev/") and "docker" not in root for root in roots)
