"""The chip table: computed peaks against the vendors' figures, and capability by name."""

from __future__ import annotations

import dataclasses

import pytest

from lumen.core.errors import HardwareError
from lumen.hardware import ARCHITECTURES, CHIPS, architecture, chips_of, find_chip, fp8_dialect, is_native
from lumen.hardware.chips import identify, match_chip
from lumen.hardware.cpus import CPUS, MICROARCHITECTURES, microarchitecture

# Published dense peaks: fp32, fp16, bf16, int8, fp8, mxfp8, mxfp4 in TFLOPS / TOPS; None: not native.
PUBLISHED = {
    "MI210": (22.6, 181, 181, 181, None, None, None),
    "MI250X": (47.9, 383, 383, 383, None, None, None),
    "MI300A": (122.6, 980.6, 980.6, 1961, 1961, None, None),
    "MI300X": (163.4, 1307.4, 1307.4, 2614.9, 2614.9, None, None),
    "MI325X": (163.4, 1307.4, 1307.4, 2614.9, 2614.9, None, None),
    "MI350X": (144.2, 2306.9, 2306.9, 4613.7, 4613.7, 4613.7, 9227.5),
    "MI355X": (157.3, 2516.6, 2516.6, 5033.2, 5033.2, 5033.2, 10066),
    "RX 7900 XTX": (61.4, 122.8, 122.8, 122.8, None, None, None),
    "PRO W7900": (61.3, 122.6, 122.6, 122.6, None, None, None),
    "RX 7600": (21.8, 43.5, 43.5, 43.5, None, None, None),
    "8060S": (29.7, 59.4, 59.4, 59.4, None, None, None),
    "780M": (8.3, 16.6, 16.6, 16.6, None, None, None),
    "RX 9070 XT": (48.7, 194.6, 194.6, 389, 389, None, None),
    "RX 9060 XT": (25.6, 102.6, 102.6, 205, 205, None, None),
    "RX 6900 XT": (23.0, 46.1, None, 92, None, None, None),
    "RX 6800": (16.2, 32.3, None, 64.7, None, None, None),
    "H100": (66.9, 989.4, 989.4, 1979, 1979, None, None),
    "H200": (66.9, 989.4, 989.4, 1979, 1979, None, None),
    "A100": (19.5, 312, 312, 624, None, None, None),
    "RTX 4090": (82.6, 165.2, 165.2, 661, 330, None, None),
}
ELEMENTS = ("fp32", "fp16", "bf16", "int8", "fp8", "mxfp8", "mxfp4")


@pytest.mark.parametrize("name", PUBLISHED)
def test_peaks_are_the_published_ones(name: str) -> None:
    chip = find_chip(name)
    for element, published in zip(ELEMENTS, PUBLISHED[name], strict=True):
        peak = chip.peak(element)
        if published is None:
            assert peak is None, f"{name} has no native {element}"
        else:
            assert peak == pytest.approx(published, rel=0.005), f"{name} {element}"


def test_every_chip_has_an_architecture_and_evidence() -> None:
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)
    for chip in CHIPS:
        assert chip.arch in ARCHITECTURES
        assert chip.evidence[:2] in ("T:", "S:", "M:")
        assert (chip.memory_gb == 0) == chip.architecture.shared_memory
    for row in ARCHITECTURES.values():
        assert row.evidence and all(tag[:2] in ("T:", "S:", "M:") for tag in row.evidence)
        assert (row.fp8 is not None) == row.native("fp8")


def test_fp8_dialect_follows_the_name_not_a_number() -> None:
    assert fp8_dialect("gfx942:sramecc+:xnack-") == "fnuz"
    for name in ("gfx950", "gfx1200", "gfx1201", "sm_89", "sm_90", "gfx1100", "gfx90a", "cpu"):
        assert fp8_dialect(name) == "ocp"
    # gfx1100 reports capability 11.0, above Hopper's 9.0, and has no FP8 unit.
    assert not is_native("gfx1100", "fp8") and is_native("sm_90", "fp8") and not is_native("sm_80", "fp8")
    assert [name for name, row in ARCHITECTURES.items() if row.fp8 == "fnuz"] == ["gfx942"]


def test_family_facts() -> None:
    for name, wave, lds in (("gfx90a", 64, 64), ("gfx942", 64, 64), ("gfx950", 64, 160), ("gfx1100", 32, 128)):
        assert (architecture(name).wave, architecture(name).lds_kib) == (wave, lds)
    assert architecture("gfx950").lds_workgroup_kib == 160 and architecture("gfx1201").lds_workgroup_kib == 64
    assert [name for name, row in ARCHITECTURES.items() if row.mx and row.vendor == "amd"] == ["gfx950"]
    assert not is_native("gfx1030", "bf16") and architecture("gfx1030").matrix == ""


def test_names_are_found_as_drivers_and_people_write_them() -> None:
    for text, name in (
        ("AMD Instinct MI300X OAM", "Instinct MI300X"),
        ("AMD Radeon RX 7900 XTX", "Radeon RX 7900 XTX"),
        ("Radeon(TM) 8060S Graphics", "Radeon 8060S"),
        ("Ryzen AI Max+ 395", "Radeon 8060S"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB SXM"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
    ):
        assert find_chip(text).name == name
    assert match_chip("AMD Radeon Graphics") is None
    assert [chip.name for chip in chips_of("gfx950")] == ["Instinct MI350X", "Instinct MI355X"]


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(HardwareError, match="MI300X"):
        find_chip("MI30X")
    with pytest.raises(HardwareError, match="gfx942"):
        architecture("gfx943")


def test_identify_tells_products_apart_or_says_nothing() -> None:
    xtx = identify("gfx1100", 96, 24 << 30)
    assert xtx is not None and xtx.name == "Radeon RX 7900 XTX"
    w7900 = identify("gfx1100", 96, 48 << 30)
    assert w7900 is not None and w7900.name == "Radeon PRO W7900"
    one_of_two = identify("gfx90a", 110, 64 << 30)
    assert one_of_two is not None and one_of_two.name == "Instinct MI250X"
    assert identify("gfx950", 256, 288 << 30) is None, "MI350X and MI355X differ in clock only"
    assert identify("gfx1100", 95, 24 << 30) is None


def test_devices_split_what_the_table_gives_for_the_whole_board() -> None:
    board = find_chip("MI250X")
    half = dataclasses.replace(board, cus=board.cus // board.devices)
    assert half.peak("bf16") == pytest.approx(191.5, rel=0.005)


def test_balance_is_operations_per_byte() -> None:
    assert find_chip("MI300X").balance("bf16") == pytest.approx(1307.4e12 / 5300e9, rel=1e-3)


def test_processors() -> None:
    assert microarchitecture("AuthenticAMD", 25, 17) == "Zen 4"
    assert microarchitecture("AuthenticAMD", 25, 33) == "Zen 3"
    assert microarchitecture("AuthenticAMD", 26, 2) == "Zen 5"
    assert microarchitecture("GenuineIntel", 6, 143) == "Sapphire Rapids"
    assert microarchitecture("SomethingElse", 1, 1) == ""
    assert "avx512_bf16" in MICROARCHITECTURES["Zen 4"].features
    assert "avx512_bf16" not in MICROARCHITECTURES["Zen 3"].features
    for chip in CPUS:
        assert chip.microarchitecture in MICROARCHITECTURES
