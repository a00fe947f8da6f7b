"""Which device a run would take, and the masks that decide what it may choose from."""

from __future__ import annotations

from lumen.doctor.finding import Case, Check, Result, broken, note, ok, warning
from lumen.hardware.choice import vendor_of
from lumen.hardware.visibility import CUDA, HIP, ROCR, visible

MASKS = (ROCR, HIP, CUDA, "GPU_DEVICE_ORDINAL")


def device(case: Case) -> Result | None:
    """The choice, with its reason."""
    choice = case.choice
    if choice.problem is not None:
        problem = choice.problem
        return broken(
            f"no device: {problem.what}. Training refuses unless `use_cpu: true` is set",
            f"{problem.fix} (or `use_cpu: true`)",
        )
    if choice.index is None:
        return note(choice.why) if case.machine.gpus or case.machine.dxg else ok(choice.why)
    return ok(choice.why)


def visibility(case: Case) -> Result | None:
    """What the visibility variables leave, one step after the other."""
    given = {name: case.view.environment[name] for name in MASKS if name in case.view.environment}
    if not given or not case.machine.gpus:
        return None
    vendor = vendor_of(case.machine)
    found = visible(case.machine.gpus, case.view.environment, vendor)
    text = "; ".join(found.steps) or ", ".join(f"{name}={value or '(empty)'}" for name, value in given.items())
    if found.on_purpose:
        return note(f"{text}: hidden on purpose, runs take the CPU")
    problem = case.choice.problem
    if problem is not None and problem.check == "visibility":
        return broken(
            f"{text}; {'; '.join(found.problems)}", f"keep one variable: {problem.fix.partition(': ')[2]}",
            f"unset {' '.join(given)}",
        )  # fmt: skip
    if found.problems:
        last = [name for name in given if name != ROCR]
        return warning(
            f"{text}; {'; '.join(found.problems)}", f"keep one: unset {' '.join(last)}", f"unset {' '.join(last)}"
        )
    models = {gpu.name for gpu in case.nvidia}
    if vendor == "nvidia" and len(models) > 1 and case.variable("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return warning(
            f"{text}; the cards differ ({', '.join(sorted(models))}) and CUDA counts the fastest first, not by bus",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    return ok(text)


CHECKS = (
    Check("visibility", "device", "masks compose: a second one counts what the first left", visibility),
    Check("device", "device", "what `device: auto` takes; a GPU that is there never becomes a silent CPU run", device),
)
