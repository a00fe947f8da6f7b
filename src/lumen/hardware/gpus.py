"""The GPUs of a machine, from what the kernel and the drivers write down.

* AMD: the KFD topology, whose `gfx_target_version` is the true instruction set, whatever an override pretends.  A
  chip that is cut into partitions, or is made of two dies, has a node for each.
* NVIDIA: /proc/driver/nvidia.
* What is on the PCI bus without a driver that could compute with it: `idle_gpus`.

**Memory of a GPU that shares the system's.**  Such a GPU has a part that the firmware cut out for it (VRAM) and may
borrow system memory (GTT); they are not added up.  Since Linux 6.10 the driver serves compute from GTT alone where GTT
is the larger of the two, and from the cut-out part alone otherwise; before, always from the cut-out part.
[S: amdgpu's `apu_prefer_gtt`: an APU whose VRAM is smaller than its GTT]
"""

from __future__ import annotations

from dataclasses import dataclass

from lumen.hardware import chips
from lumen.hardware.architectures import ARCHITECTURES
from lumen.hardware.text import number, pairs, version_pair
from lumen.hardware.view import View

TOPOLOGY = "/sys/class/kfd/kfd/topology/nodes"
GTT_SINCE = (6, 10)
"""Linux release from which an APU computes in GTT."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    index:     its place among the GPUs of its vendor, as the runtime counts without visibility variables.
    memory:    bytes a run can use; for a GPU that shares the system's memory see the module's head.
    vram, gtt: bytes cut out by the firmware, and of system memory that the driver may lend.
    chip:      name in the chip table, '' where it is not clear which product it is.
    pci:       bus address, '' where not told.
    uuid:      as visibility variables name it (`GPU-…`), '' where not told.
    partition: compute partition mode of an Instinct (SPX, DPX, QPX, CPX), '' where there is none.
    """

    vendor: str
    index: int
    arch: str
    name: str
    memory: int
    shared_memory: bool = False
    compute_units: int = 0
    chip: str = ""
    pci: str = ""
    render_node: str = ""
    vram: int = 0
    gtt: int = 0
    uuid: str = ""
    partition: str = ""

    @property
    def trainable(self) -> bool:
        """Whether it is worth training on: not the display part of a desktop CPU that no torch carries."""
        facts = ARCHITECTURES.get(self.arch)
        if facts is None:
            return self.vendor == "nvidia" or self.compute_units >= 8
        return not (facts.shared_memory and facts.pytorch == "no")


@dataclass(frozen=True)
class BusGpu:
    """A graphics or compute device on the PCI bus.  accelerator: it has no display part (an Instinct)."""

    vendor: str
    pci: str
    device: str
    driver: str
    accelerator: bool


def gfx_name(target_version: int) -> str:
    """KFD's decimal gfx_target_version as an architecture name: 90402 gfx942, 90010 gfx90a, 110501 gfx1151."""
    major, minor, stepping = target_version // 10000, target_version // 100 % 100, target_version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def override_arch(value: str) -> str:
    """The architecture that HSA_OVERRIDE_GFX_VERSION makes of every GPU: 11.0.0 is gfx1100; '' where it is not one."""
    parts = value.strip().split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return ""
    return f"gfx{int(parts[0])}{int(parts[1]):x}{int(parts[2]):x}"


def apu_memory(vram: int, gtt: int, kernel: str) -> int:
    """Bytes that compute can use on a GPU that shares the system's memory (see the module's head)."""
    release = version_pair(kernel)
    return gtt if vram < gtt and (release is None or release >= GTT_SINCE) else vram


def amd_gpus(view: View, kernel: str) -> list[Gpu]:
    """The GPU nodes of the KFD topology, in the order in which the runtime counts them."""
    found: list[Gpu] = []
    for folder in view.glob(f"{TOPOLOGY}/*"):
        properties = pairs(view.read(f"{folder}/properties"))
        target = number(properties.get("gfx_target_version", ""))
        if not target:
            continue
        found.append(_amd_gpu(view, folder, properties, gfx_name(target), len(found), kernel))
    return found


def _amd_gpu(view: View, folder: str, properties: dict[str, str], arch: str, index: int, kernel: str) -> Gpu:
    render = f"renderD{number(properties.get('drm_render_minor', ''))}"
    device = f"/sys/class/drm/{render}/device"
    banks = [pairs(view.read(path)) for path in view.glob(f"{folder}/mem_banks/*/properties")]
    own = sum(number(bank.get("size_in_bytes", "")) for bank in banks if bank.get("heap_type") in ("1", "2"))
    partition = view.read(f"{device}/current_compute_partition").upper()
    # A partition's node has its share in its own bank; the device file tells the whole chip's.
    vram = own if partition not in ("", "SPX") and own else number(view.read(f"{device}/mem_info_vram_total")) or own
    gtt = number(view.read(f"{device}/mem_info_gtt_total"))
    facts = ARCHITECTURES.get(arch)
    shared = bool(facts and facts.shared_memory)
    memory = apu_memory(vram, gtt, kernel) if shared else vram
    units = number(properties.get("simd_count", "")) // max(1, number(properties.get("simd_per_cu", ""), 1))
    product = view.read(f"{device}/product_name")
    chip = chips.match_chip(product) if product else None
    chip = chip or chips.identify(arch, units, memory)
    location = number(properties.get("location_id", ""))
    unique = number(properties.get("unique_id", ""))
    name = product or (f"AMD {chip.name}" if chip else f"AMD GPU ({arch}, {units} CUs)")
    if partition not in ("", "SPX"):
        name += f" ({partition} partition)"
    return Gpu(
        vendor="amd",
        index=index,
        arch=arch,
        name=name,
        memory=memory,
        shared_memory=shared,
        compute_units=units,
        chip=chip.name if chip else "",
        pci=f"{number(properties.get('domain', '')):04x}:{location >> 8:02x}:{location >> 3 & 31:02x}.{location & 7}"
        if location
        else "",
        render_node=render if view.exists(device) else "",
        vram=vram,
        gtt=gtt,
        uuid=f"GPU-{unique:016x}" if unique else "",
        partition=partition,
    )


def nvidia_gpus(view: View) -> list[Gpu]:
    """NVIDIA's GPUs in the order of their bus addresses."""
    found: list[Gpu] = []
    for folder in view.glob("/proc/driver/nvidia/gpus/*"):
        values = pairs(view.read(f"{folder}/information"), ":")
        name = values.get("Model", "NVIDIA GPU")
        chip = chips.match_chip(name)
        uuid = values.get("GPU UUID", "")
        found.append(
            Gpu(
                vendor="nvidia",
                index=len(found),
                arch=chip.arch if chip else "",
                name=name,
                memory=int(chip.memory_gb * 1e9) if chip else 0,
                compute_units=chip.cus if chip else 0,
                chip=chip.name if chip else "",
                pci=folder.rpartition("/")[2],
                vram=int(chip.memory_gb * 1e9) if chip else 0,
                uuid=uuid if uuid.startswith("GPU-") else "",
            )
        )
    return found


_VENDORS = {0x1002: "amd", 0x10DE: "nvidia"}


def bus_gpus(view: View) -> tuple[BusGpu, ...]:
    """AMD's and NVIDIA's display controllers and accelerators on the PCI bus, whatever drives them."""
    found = []
    for folder in view.glob("/sys/bus/pci/devices/*"):
        vendor = _VENDORS.get(number(view.read(f"{folder}/vendor")))
        kind = number(view.read(f"{folder}/class")) >> 8
        if vendor is None or kind not in (0x0300, 0x0302, 0x0380, 0x1200):
            continue
        events = pairs(view.read(f"{folder}/uevent"), "=")
        device = f"{number(view.read(f'{folder}/device')):04x}"
        accelerator = kind == 0x1200 or (vendor == "nvidia" and kind == 0x0302)
        found.append(BusGpu(vendor, folder.rpartition("/")[2], device, events.get("DRIVER", ""), accelerator))
    return tuple(found)
