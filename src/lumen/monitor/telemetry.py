"""Temperature, power, memory, utilisation and clock of every GPU, from whichever source works.

Tried in this order: `amd-smi` and, where it is missing or answers nothing, `rocm-smi`; the kernel's own files under
/sys/class/drm, which need no tool at all; `nvidia-smi`.  The tools disagree with themselves: amd-smi prints a bare list
or an object with `gpu_data`, leaves that are numbers, `{"value", "unit"}` or "N/A", and sometimes good JSON with a
failing exit status; rocm-smi prints numbers as text.  All of that is read, and what is not known is None.

Units are base units: °C, watt, byte, hertz, ratios from 0 to 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lumen.hardware import View
from lumen.hardware.text import number

AMD_SMI = "amd-smi metric --json"
ROCM_SMI = "rocm-smi --showtemp --showpower --showuse --showmeminfo vram --json"
NVIDIA_SMI = (
    "nvidia-smi --query-gpu=index,name,temperature.gpu,power.draw,memory.used,memory.total,utilization.gpu,"
    "clocks.sm,ecc.errors.uncorrected.volatile.total --format=csv,noheader,nounits"
)


@dataclass(frozen=True)
class Reading:
    """One GPU at one moment; None: not told.

    device:       the source's index of it.
    sensors:      °C by place (edge, hotspot or junction, mem); temperature is the hottest of them.
    utilization:  0 to 1.  ecc: uncorrectable memory errors.
    """

    device: str
    sensors: Mapping[str, float] = field(default_factory=dict)
    power_watts: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    utilization: float | None = None
    clock_hertz: float | None = None
    ecc: int | None = None

    @property
    def temperature(self) -> float | None:
        """°C of the hottest sensor."""
        return max(self.sensors.values(), default=None)


@dataclass(frozen=True)
class Telemetry:
    """source: what answered, '' where nothing did.  tried: why the sources before it did not, in words."""

    source: str
    readings: tuple[Reading, ...] = ()
    tried: tuple[str, ...] = ()


def read_telemetry(view: View) -> Telemetry:
    """All GPUs of a machine.  Never raises; a machine without any source gives an empty answer and says why."""
    tried: list[str] = []
    for name, command, parse in (
        ("amd-smi", AMD_SMI, _amd_smi),
        ("rocm-smi", ROCM_SMI, _rocm_smi),
        ("sysfs", "", None),
        ("nvidia-smi", NVIDIA_SMI, _nvidia_smi),
    ):
        if parse is None:
            readings = _sysfs(view)
            reason = "no GPU with memory figures under /sys/class/drm"
        else:
            output = view.run(command)
            if output is None:
                tried.append(f"{name} is not installed")
                continue
            readings = parse(output.text)
            reason = "ran too long" if output.code == 124 else f"answered nothing usable (status {output.code})"
        if any(r.temperature is not None or r.memory_total for r in readings):
            return Telemetry(name, tuple(readings), tuple(tried))
        tried.append(f"{name}: {'tells N/A only' if readings else reason}")
    return Telemetry("", (), tuple(tried))


def cpu_temperature(view: View) -> float | None:
    """°C of the processor (AMD's k10temp or zenpower, Intel's coretemp), or None."""
    found = []
    for name in view.glob("/sys/class/hwmon/hwmon*/name"):
        if view.read(name) in ("k10temp", "zenpower", "coretemp"):
            folder = name.rpartition("/")[0]
            found += [number(view.read(path)) / 1000 for path in view.glob(f"{folder}/temp*_input")]
    return max(found, default=None)


def json_of(text: str) -> Any:
    """The JSON in a tool's output, which may stand behind warnings; None where there is none."""
    for start in sorted(i for i in (text.find("{"), text.find("[")) if i >= 0):
        try:
            return json.JSONDecoder().raw_decode(text[start:])[0]
        except ValueError:
            continue
    return None


def gpu_entries(text: str) -> list[dict[str, Any]]:
    """The GPUs of an amd-smi answer, whether it is a bare list or an object with `gpu_data`."""
    found = json_of(text)
    if isinstance(found, dict):
        found = found.get("gpu_data", [found] if "gpu" in found else [])
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


_SCALE = {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "mhz": 10**6, "ghz": 10**9, "mw": 1e-3}


def leaf(entry: Any, *path: str) -> float | None:
    """A number of an amd-smi answer in base units; None where it is missing or "N/A".

    amd-smi's MB are 2^20 bytes: an MI300X tells 196592 of them.
    """
    for name in path:
        entry = entry.get(name) if isinstance(entry, dict) else None
    unit = ""
    if isinstance(entry, dict):
        entry, unit = entry.get("value"), str(entry.get("unit") or "")
    try:
        return float(entry) * _SCALE.get(unit.lower(), 1)
    except (TypeError, ValueError):
        return None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _ratio(value: float | None) -> float | None:
    return None if value is None else min(1.0, max(0.0, value / 100))


def _amd_smi(text: str) -> list[Reading]:
    found: list[Reading] = []
    for entry in gpu_entries(text):
        sensors = {place: leaf(entry, "temperature", place) for place in ("edge", "hotspot", "mem")}
        found.append(
            Reading(
                device=str(entry.get("gpu", len(found))),
                sensors={place: value for place, value in sensors.items() if value is not None},
                power_watts=leaf(entry, "power", "socket_power"),
                memory_used=_whole(leaf(entry, "mem_usage", "used_vram")),
                memory_total=_whole(leaf(entry, "mem_usage", "total_vram")),
                utilization=_ratio(leaf(entry, "usage", "gfx_activity")),
                clock_hertz=leaf(entry, "clock", "gfx_0", "clk"),
                ecc=_whole(leaf(entry, "ecc", "total_uncorrectable_count")),
            )
        )
    return found


def _rocm_smi(text: str) -> list[Reading]:
    cards = json_of(text)
    found: list[Reading] = []
    for name, card in sorted(cards.items()) if isinstance(cards, dict) else ():
        if not name.startswith("card") or not isinstance(card, dict):
            continue
        sensors = {
            place: value
            for place, key in (("edge", "edge"), ("hotspot", "junction"), ("mem", "memory"))
            if (value := leaf(card, f"Temperature (Sensor {key}) (C)")) is not None
        }
        powers = [leaf(card, f"{kind} Graphics Package Power (W)") for kind in ("Average", "Current Socket")]
        found.append(
            Reading(
                device=name.removeprefix("card"),
                sensors=sensors,
                power_watts=next((power for power in powers if power is not None), None),
                memory_used=_whole(leaf(card, "VRAM Total Used Memory (B)")),
                memory_total=_whole(leaf(card, "VRAM Total Memory (B)")),
                utilization=_ratio(leaf(card, "GPU use (%)")),
            )
        )
    return found


def _sysfs(view: View) -> list[Reading]:
    found = []
    for total in view.glob("/sys/class/drm/card*/device/mem_info_vram_total"):
        folder = total.rpartition("/")[0]
        monitors = view.glob(f"{folder}/hwmon/hwmon*")
        sensors, power = {}, None
        for monitor in monitors:
            for path in view.glob(f"{monitor}/temp*_input"):
                label = view.read(path.replace("_input", "_label")) or "edge"
                sensors["hotspot" if label == "junction" else label] = number(view.read(path)) / 1000
            watts = [view.read(f"{monitor}/power1_{kind}") for kind in ("average", "input")]
            power = next((number(text) / 1e6 for text in watts if text), power)
        busy = view.read(f"{folder}/gpu_busy_percent")
        found.append(
            Reading(
                device=folder.split("/")[4].removeprefix("card"),
                sensors=sensors,
                power_watts=power,
                memory_used=number(view.read(f"{folder}/mem_info_vram_used")),
                memory_total=number(view.read(total)),
                utilization=_ratio(float(number(busy))) if busy else None,
            )
        )
    return found


def _nvidia_smi(text: str) -> list[Reading]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 9:
            continue
        temperature, power, used, total, busy, clock, ecc = (leaf({"x": cell}, "x") for cell in cells[2:])
        found.append(
            Reading(
                device=cells[0],
                sensors={} if temperature is None else {"edge": temperature},
                power_watts=power,
                memory_used=None if used is None else int(used * 2**20),
                memory_total=None if total is None else int(total * 2**20),
                utilization=_ratio(busy),
                clock_hertz=None if clock is None else clock * 1e6,
                ecc=_whole(ecc),
            )
        )
    return found
