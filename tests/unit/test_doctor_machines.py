"""The doctor on recorded machines: exactly the expected findings, no false alarm, and the page that lists them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.recorded import FOLDER, PAGE, Recorded, device_of, findings, names, open_machine, page

from lumen.doctor.examine import CHECKS, FAILED, exit_code
from lumen.doctor.finding import Finding


@pytest.fixture(params=names())
def examined(request: pytest.FixtureRequest) -> tuple[Recorded, list[Finding]]:
    return findings(request.param)


def test_every_machine_gives_exactly_its_findings(examined: tuple[Recorded, list[Finding]]) -> None:
    recorded, found = examined
    lines = "\n".join(f"{f.status} {f.check}: {f.saw} | {f.fix}" for f in found if f.status != "ok")
    assert {f.check: f.status for f in found if f.status != "ok"} == recorded.values["expect"], lines
    assert len({f.check for f in found}) == len(found)
    by_name = {f.check: f for f in found}
    for check, text in recorded.values.get("says", {}).items():
        assert text in f"{by_name[check].saw} | {by_name[check].fix}", f"{by_name[check].saw} | {by_name[check].fix}"
    assert device_of(recorded) == recorded.values["device"]
    assert exit_code(found) == int("broken" in recorded.values["expect"].values())


def test_every_finding_has_evidence_a_reason_and_a_fix(examined: tuple[Recorded, list[Finding]]) -> None:
    for finding in examined[1]:
        assert finding.saw and finding.why and FAILED not in finding.saw, finding
        assert finding.fix or finding.status in ("ok", "note"), f"{finding.check} tells no fix"
        assert json.loads(json.dumps(finding.as_dict()))["check"] == finding.check


def test_there_are_enough_machines_and_every_check_finds_something_somewhere() -> None:
    assert len(names()) >= 30
    expected: dict[str, set[str]] = {}
    import yaml

    for name in names():
        for check, status in yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["expect"].items():
            expected.setdefault(check, set()).add(status)
    never = {check.name for check in CHECKS} - set(expected)
    assert never == {"kernel", "nvidia-isa"}, "these two only tell"


def test_the_page_of_machines_is_in_step() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.helpers.recorded"


def test_a_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    from lumen.doctor.examine import examine
    from lumen.hardware import View

    found = examine(View(tmp_path, {}))
    assert not [f for f in found if FAILED in f.saw]
    assert {f.check for f in found if f.status == "broken"} == {"torch"}


def test_a_check_that_crashes_is_a_note(tmp_path: Path) -> None:
    from dataclasses import replace

    from lumen.doctor.examine import examine

    def crash(case: object) -> None:
        raise KeyError("x")

    view = open_machine("epyc-cpu", tmp_path).view
    (found,) = examine(view, [replace(CHECKS[0], look=crash)])
    assert found.status == "note" and "KeyError" in found.saw
