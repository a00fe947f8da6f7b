"""Torch and what stands around it: the build, its Triton, placeholder packages, flash-attn, allocator settings."""

from __future__ import annotations

import re

from lumen.doctor.finding import Case, Check, Result, broken, note, ok, warning
from lumen.hardware import ARCHITECTURES
from lumen.hardware.choice import KIND
from lumen.hardware.wheels import install_command

OLDEST = (2, 8)
TRITONS = ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton", "pytorch-triton-xpu")
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In the order in which torch 2.13 looks: the first that is set is taken. [T: torch 2.13's header]"""


def torch(case: Case) -> Result | None:
    """Which build of torch is installed, and whether it can drive the GPUs that are there."""
    found = case.machine.torch
    arch = case.amd[0].arch if case.amd else ""
    vendor = "amd" if case.amd else "nvidia" if case.nvidia else ""
    install = install_command(vendor, arch, case.machine.rocm).partition("&& ")[2] if vendor else "pip install torch"
    if found is None:
        return broken("torch is not installed", install, install)
    toolkit = f", {found.toolkit}" if found.toolkit else ""
    text = f"torch {found.version}: {found.kind} build{toolkit} (torch/version.py)"
    numbers = tuple(int(part) for part in re.findall(r"\d+", found.version)[:2])
    if numbers < OLDEST:
        return broken(f"{text}; Lumen needs 2.8", "pip install --upgrade 'torch>=2.8' from the index it came from")
    problem = case.choice.problem
    if problem is not None and problem.check == "torch":
        return broken(f"{text}; {problem.what}", problem.fix, problem.fix)
    others = {gpu.vendor for gpu in case.machine.gpus if gpu.trainable and KIND[gpu.vendor] != found.kind}
    if others and case.choice.gpu is not None:
        return note(f"{text}; it uses one vendor's GPUs only, not {', '.join(sorted(others)).upper()}'s")
    return ok(text)


def triton(case: Case) -> Result | None:
    """One Triton, the one that torch asks for."""
    packages = case.view.packages()
    there = {name: packages[name] for name in TRITONS if name in packages}
    wanted = [re.split(r"[\s=<>!;\[(]", line)[0].lower() for line in case.view.torch_requires()]
    pinned = next((name for name in wanted if "triton" in name), "")
    if not there:
        if pinned and case.torch_kind in ("rocm", "cuda"):
            fix = f"pip install {pinned} from the index that torch came from"
            return warning(f"torch asks for {pinned} and no Triton is installed: torch.compile fails on the GPU", fix)
        return None
    text = ", ".join(f"{name} {version}" for name, version in there.items())
    if len(there) > 1:
        keep = pinned if pinned in there else next((name for name in there if "rocm" in name), "triton")
        drop = [name for name in there if name != keep]
        commands = (
            f"pip uninstall -y {' '.join(drop)}",
            f"pip install --force-reinstall --no-deps {keep}=={there[keep]}",
        )
        return warning(
            f"{text}: both own the folder triton/, and the later one overwrote the earlier",
            f"keep {keep}, which torch asks for: {' && '.join(commands)}",
            *commands,
        )
    if pinned and pinned not in there and case.torch_kind == "rocm":
        return warning(
            f"{text}, but torch asks for {pinned}", f"pip uninstall -y {next(iter(there))}, then torch again"
        )
    return ok(f"{text}" + (", as torch asks" if pinned in there else ""))


def placeholders(case: Case) -> Result | None:
    """Packages on PyPI that only bear the names of AMD's device packages."""
    names = [
        f"{name} {version}"
        for name, version in case.view.packages().items()
        if re.match(r"(amd-torch-device|rocm-sdk-device)-", name) and (case.torch_kind != "rocm" or version < "0.1")
    ]
    if not names:
        return None
    plain = " ".join(name.split()[0] for name in names)
    return warning(
        f"{', '.join(names)}: placeholders on PyPI, without any code for a GPU",
        f"pip uninstall -y {plain}; the real ones are on AMD's index: "
        f"{install_command('amd', 'gfx1103').partition('&& ')[2]} (with your architecture)",
        f"pip uninstall -y {plain}",
    )


def flash_attention(case: Case) -> Result | None:
    """flash-attn on AMD: Composable Kernel on Instinct, its Triton backend elsewhere."""
    version = case.view.packages().get("flash-attn")
    if version is None or case.torch_kind != "rocm" or not case.amd:
        return None
    gpu = case.choice.gpu or case.amd[0]
    told = case.view.environment.get("FLASH_ATTENTION_TRITON_AMD_ENABLE", "")
    text = f"flash-attn {version} on {gpu.arch}, FLASH_ATTENTION_TRITON_AMD_ENABLE={told or '(unset)'}"
    facts = ARCHITECTURES.get(gpu.arch)
    if told == "TRUE" or (not told and facts is not None and facts.family.startswith("CDNA")):
        return ok(f"{text}: {'Triton' if told else 'Composable Kernel'} backend")
    export = "export FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE"
    wrong = "only the word TRUE switches it on" if told else "the Composable Kernel backend is for Instinct only"
    return warning(f"{text}: {wrong}", f"{export}, when it is built and when it runs", export)


def allocator(case: Case) -> Result | None:
    """Settings of torch's GPU allocator, which has three names for one thing."""
    given = {name: value for name in ALLOCATORS if (value := case.variable(name))}
    if not given:
        return None
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    if len(set(given.values())) > 1:
        first, *rest = given
        return warning(
            f"{text}: they differ, and torch takes {first}",
            f"keep one: unset {' '.join(rest)}",
            f"unset {' '.join(rest)}",
        )
    return ok(text)


def quantisation_packages(case: Case) -> Result | None:
    """bitsandbytes is not needed: said once, because people install it for QLoRA."""
    version = case.view.packages().get("bitsandbytes")
    return (
        None if version is None else note(f"bitsandbytes {version}: not used; Lumen's NF4 and optimizers are its own")
    )


CHECKS = (
    Check("torch", "software", "a build for another vendor, or none, runs on the CPU without saying so", torch),
    Check("triton", "software", "two packages own one folder: torch.compile then fails or compiles wrongly", triton),
    Check("placeholders", "software", "they look like GPU support and contain none", placeholders),
    Check("flash-attn", "software", "without its backend it fails at the first step, or falls back", flash_attention),
    Check("allocator", "software", "a setting that is not the one taken changes nothing", allocator),
    Check("bitsandbytes", "software", "a broken build of it must not matter", quantisation_packages),
)
