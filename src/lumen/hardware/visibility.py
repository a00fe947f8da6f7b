"""Which GPUs the visibility variables leave, and in which order torch then counts them.

On AMD three variables act in two layers:

1. `ROCR_VISIBLE_DEVICES` (the runtime below) takes indices or `GPU-<id>` of all GPUs.  Set but empty it hides all.
2. `HIP_VISIBLE_DEVICES`, or `CUDA_VISIBLE_DEVICES` where that is unset or empty, then takes indices *of what step 1
   left*.  So `ROCR_VISIBLE_DEVICES=2` with `HIP_VISIBLE_DEVICES=2` is no GPU at all: there is only index 0 now.

On NVIDIA there is `CUDA_VISIBLE_DEVICES` alone; empty hides all.  Everywhere a list ends at its first index that does
not exist, and a repeated index leaves nothing.  [S: HIP and ROCr runtime sources, ROCm's page on GPU isolation;
T: torch 2.13's own parser, which is the oracle of the tests]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lumen.hardware.gpus import Gpu

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
_NONE = ("", "-1", "none", "void", "nodevfiles")
"""Values by which people hide every GPU on purpose."""


@dataclass(frozen=True)
class Visible:
    """gpus: what is left, in torch's order.  steps: what each variable did, in words.  problems: what is wrong with
    them.  on_purpose: every GPU is hidden and a variable says just that."""

    gpus: tuple[Gpu, ...]
    steps: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    on_purpose: bool = False


def _match(gpu: Gpu, word: str) -> bool:
    return bool(gpu.uuid) and gpu.uuid.lower().startswith(word.lower()) and len(word) > 4


def _filter(gpus: Sequence[Gpu], name: str, value: str) -> tuple[list[Gpu], str, list[str]]:
    """(what a list of indices or ids leaves, what it did in words, problems)."""
    left: list[Gpu] = []
    problems = []
    for word in (part.strip() for part in value.split(",")):
        if word.lower().startswith(("gpu-", "mig-")):
            found = [gpu for gpu in gpus if _match(gpu, word)]
            if not found and (word.lower().startswith("mig-") or not all(gpu.uuid for gpu in gpus)):
                problems.append(f"{name} names {word}, whose GPU cannot be told from files")
                break
        else:
            found = [gpus[int(word)]] if word.isdigit() and int(word) < len(gpus) else []
        if not found:
            if word.lower() not in _NONE:
                problems.append(
                    f"{name}={value}: there is no GPU {word} among {len(gpus)}; the list ends before it"
                    if gpus
                    else f"{name}={value} selects among no GPUs"
                )
            break
        if found[0] in left:
            problems.append(f"{name}={value} repeats {word}, which leaves no GPU")
            left = []
            break
        left.append(found[0])
    kept = ", ".join(f"{gpu.index} ({gpu.arch or gpu.name})" for gpu in left) or "none"
    return left, f"{name}={value} leaves GPU {kept}", problems


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str], vendor: str) -> Visible:
    """What of `gpus` a torch built for `vendor` (amd, nvidia) sees under these variables."""
    left = [gpu for gpu in gpus if gpu.vendor == vendor]
    if not left:
        return Visible(())
    steps: list[str] = []
    problems: list[str] = []
    masks = []
    if vendor == "amd":
        if ROCR in environment:
            masks.append((ROCR, environment[ROCR]))
        second = HIP if environment.get(HIP) else CUDA
        if environment.get(second):
            masks.append((second, environment[second]))
        if environment.get(HIP) and environment.get(CUDA) and environment[HIP] != environment[CUDA]:
            problems.append(f"{HIP}={environment[HIP]} and {CUDA}={environment[CUDA]} differ; HIP takes the first")
        elif environment.get(HIP) == "" and not environment.get(CUDA):
            problems.append(f"{HIP} is set but empty: HIP ignores it, torch's own count takes it for no GPU")
        if len(masks) == 2:
            problems.append(f"{ROCR} and {second} are both set: the indices of {second} count what {ROCR} left")
    elif CUDA in environment:
        masks.append((CUDA, environment[CUDA]))
    for name, value in masks:
        left, step, wrong = _filter(left, name, value)
        steps.append(step)
        problems += wrong
    on_purpose = not left and any(value.strip().lower() in _NONE for _, value in masks)
    return Visible(tuple(left), tuple(steps), tuple(problems), on_purpose)
