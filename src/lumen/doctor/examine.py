"""All checks on one machine, in the order in which a person repairs things."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lumen.doctor import amd, device, host, nvidia, software, tuning
from lumen.doctor.finding import BROKEN, NOTE, WARNING, Case, Check, Finding
from lumen.hardware import Gpu, View

CHECKS: tuple[Check, ...] = (
    *host.CHECKS, *software.CHECKS, *amd.CHECKS, *tuning.CHECKS, *nvidia.CHECKS, *device.CHECKS,
)  # fmt: skip
FAILED = "the check itself failed: "


def examine(
    view: View,
    checks: Iterable[Check] = CHECKS,
    *,
    seen: Sequence[Gpu] | None = None,
    carried: Sequence[str] | None = None,
) -> list[Finding]:
    """What every check that applies says of a machine.  A check that crashes is reported as a note, never raised.

    seen, carried: what torch reports, where it was asked.
    """
    case = Case(view, seen, carried)
    found = []
    for check in checks:
        try:
            result = check.look(case)
        except Exception as error:
            found.append(
                Finding(
                    check.name, check.group, NOTE, f"{FAILED}{type(error).__name__}: {error}", check.why, "report it"
                )
            )
            continue
        if result is not None:
            found.append(
                Finding(check.name, check.group, result.status, result.saw, check.why, result.fix, result.script)
            )
    return found


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where something is broken, else 0."""
    return int(any(finding.status == BROKEN for finding in findings))


def to_repair(findings: Iterable[Finding]) -> list[Finding]:
    """Warnings and broken things, the broken first."""
    wrong = [finding for finding in findings if finding.status in (WARNING, BROKEN)]
    return sorted(wrong, key=lambda finding: finding.status != BROKEN)
