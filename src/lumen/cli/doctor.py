"""`lumen doctor`: is this machine fit for training, and what exactly is to be done where it is not?"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from lumen.doctor.examine import examine, exit_code, to_repair
from lumen.doctor.finding import BROKEN, NOTE, OK, WARNING, Finding
from lumen.doctor.probes import disk_finding, judge, work
from lumen.hardware import View

MARKS = {OK: "  ok  ", NOTE: " note ", WARNING: " WARN ", BROKEN: "BROKEN"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lumen doctor",
        description="Checks this machine: driver, torch, GPUs, settings, and whether products are right. "
        "Exit status 1 when something is broken.",
    )
    parser.add_argument("--json", action="store_true", help="for a machine to read")
    parser.add_argument(
        "--fix", action="store_true", help="print a shell script that repairs what was found; runs nothing"
    )
    parser.add_argument("--quick", action="store_true", help="read only: no product, collective or disk is tried")
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="measure the disk of this folder (default: here)"
    )
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    worked = None if arguments.quick else work()
    findings = examine(View(), seen=worked.gpus if worked else None, carried=worked.carried if worked else None)
    if worked is not None:
        findings += [*judge(worked), disk_finding(arguments.folder)]
    seconds = time.monotonic() - started
    if arguments.json:
        counts = {status: sum(f.status == status for f in findings) for status in (OK, NOTE, WARNING, BROKEN)}
        values = {"findings": [f.as_dict() for f in findings], "counts": counts, "seconds": round(seconds, 2)}
        print(json.dumps(values, indent=2, ensure_ascii=False))
    elif arguments.fix:
        print(script(findings))
    else:
        print("\n".join(report(findings, seconds)))
    return exit_code(findings)


def report(findings: Sequence[Finding], seconds: float) -> list[str]:
    """For a person: everything that was looked at, by group, then what to do."""
    lines: list[str] = []
    for group in dict.fromkeys(f.group for f in findings):
        lines.append(group)
        lines += [f"  {MARKS[f.status]}  {f.check:<16}  {f.saw}" for f in findings if f.group == group]
    wrong = to_repair(findings)
    if wrong:
        lines += ["", "what to do"]
    for finding in wrong:
        lines += [f"  {MARKS[finding.status].strip()} {finding.check}: {finding.why}", f"      {finding.fix}"]
    broken = sum(f.status == BROKEN for f in findings)
    summary = f"{broken} broken, {len(wrong) - broken} warning(s)" if wrong else "nothing to repair"
    return [*lines, "", f"{len(findings)} checks in {seconds:.1f} s: {summary}"]


def script(findings: Sequence[Finding]) -> str:
    """A shell script with the commands of the findings; what only a person can do stands in it as a comment."""
    lines = ["#!/bin/sh", "# Printed by `lumen doctor --fix`. Read it before you run it.", "set -e"]
    for finding in to_repair(findings):
        lines += ["", f"# {finding.status}: {finding.check}: {_one_line(finding.saw)}"]
        lines += list(finding.script) or [f"# by hand: {_one_line(finding.fix)}"]
        if any(line.startswith(("export ", "unset ")) for line in finding.script):
            lines.append("# this holds in the shell that runs it: put it where your runs start, e.g. ~/.profile")
    if len(lines) == 3:
        lines += ["", f"echo {shlex.quote('lumen doctor found nothing to repair')}"]
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return " ".join(text.split())
