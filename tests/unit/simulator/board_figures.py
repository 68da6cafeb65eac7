# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Expected figures of boards, independent of the role's board files.

Sources: NVIDIA's product briefs and architecture papers (units, clocks, memory, power, links), outputs of real boards
in public threads (memory as `nvidia-smi` prints it, PCI ids, power limits), ``nvml.h`` for enumerations. ``UNKNOWN``
names each number in the role's files without an independent source. These numbers are not compared.
"""

from __future__ import annotations

from typing import Any


def figures(
    identifiers: str,
    capability: str,
    units: tuple[int, int],
    memory: tuple[int, int, int],
    banks: int,
    power: tuple[int, int, int],
    clocks: tuple[int, ...],
    links: tuple[int, int, int],
    pcie: int,
) -> dict[str, Any]:
    """Return the figures of one board: PCI device and subsystem, capability, multiprocessors and cores, memory (MiB, BAR1, bits), and so on."""
    device, subsystem = identifiers.split()
    return {
        "pci.vendor": "0x10de",
        "pci.device": device,
        "pci.subsystem_vendor": "0x10de",
        "pci.subsystem_device": subsystem,
        "pci.class": "0x030200",
        "pci.max_link_generation": pcie,
        "pci.max_link_width": 16,
        "pci.bars[1].size": memory[1] << 20,
        "compute_capability": capability,
        "multiprocessors": units[0],
        "cores": units[1],
        "memory.total_mib": memory[0],
        "memory.bar1_mib": memory[1],
        "memory.bus_width_bits": memory[2],
        "memory.row_remap_banks": banks,
        "power.default_mw": power[0] * 1000,
        "power.minimum_mw": power[1] * 1000,
        "power.maximum_mw": power[2] * 1000,
        "clocks.graphics_minimum_mhz": clocks[0],
        "clocks.graphics_maximum_mhz": clocks[1],
        "clocks.graphics_application_mhz": clocks[2],
        "clocks.memory_mhz": clocks[3],
        **{f"clocks.memory_lower_mhz[{index}]": clock for index, clock in enumerate(clocks[4:])},
        "nvlink.links": links[0],
        "nvlink.version": links[1],
        "nvlink.mb_per_second": links[2],
    }


#: Row remapper banks: 128 for each memory stack on Ampere, 512 on Hopper. Those of later boards and of GDDR boards are
#: unknown.
FIGURES: dict[str, dict[str, Any]] = {
    "a100-40": figures("0x20b0 0x134f", "8.0", (108, 6912), (40960, 65536, 5120), 640, (400, 100, 400), (210, 1410, 1095, 1215),
                       (12, 3, 25000), 4),
    "a100-80": figures("0x20b2 0x1463", "8.0", (108, 6912), (81920, 131072, 5120), 640, (400, 100, 400), (210, 1410, 1275, 1593),
                       (12, 3, 25000), 4),
    "a30": figures("0x20b7 0x1532", "8.0", (56, 3584), (24576, 32768, 3072), 384, (165, 100, 165), (210, 1440, 1440, 1215),
                   (4, 3, 25000), 4),
    "h100-80": figures("0x2330 0x16c1", "9.0", (132, 16896), (81559, 131072, 5120), 2560, (700, 200, 700), (345, 1980, 1980, 2619, 1593),
                       (18, 4, 26562), 5),
    "h200-141": figures("0x2335 0x18bf", "9.0", (132, 16896), (143771, 262144, 6016), 3072, (700, 200, 700), (345, 1980, 1980, 3201, 2201),
                        (18, 4, 26562), 5),
    "b200-180": figures("0x2901 0x1999", "10.0", (148, 18944), (183359, 262144, 8192), 3840, (1000, 200, 1000),
                        (120, 1965, 1965, 3996), (18, 5, 53125), 5),
    "gb200-186": figures("0x2941 0x2046", "10.0", (152, 19456), (189471, 262144, 8192), 3968, (1200, 200, 1200),
                         (120, 2062, 2062, 3996), (18, 5, 53125), 6),
    "l4": figures("0x27b8 0x16ca", "8.9", (58, 7424), (23034, 32768, 192), 192, (72, 40, 72), (210, 2040, 2040, 6251), (0, 0, 0), 4),
    "t4": figures("0x1eb8 0x12a2", "7.5", (40, 2560), (15360, 256, 256), 0, (70, 60, 70), (300, 1590, 1590, 5001), (0, 0, 0), 3),
    "rtx-pro-6000": figures("0x2bb5 0x204e", "12.0", (188, 24064), (97887, 131072, 512), 1536, (600, 300, 600),
                            (180, 2430, 2430, 12481), (0, 0, 0), 5),
}  # fmt: skip

#: For all boards: sizes of BARs other than that of the memory, idle readings, and limits that depend on the firmware.
#: The role's values are from one output, or are chosen.
UNKNOWN_OF_ALL = {
    "pci.revision",
    "pci.bars[0].index",
    "pci.bars[0].size",
    "pci.bars[1].index",
    "pci.bars[2].index",
    "pci.bars[2].size",
    "memory.reserved_mib",
    "power.idle_mw",
    "clocks.graphics_idle_mhz",
    "clocks.graphics_step_mhz",
    "clocks.video_maximum_mhz",
    "temperature.idle_c",
    "temperature.slowdown_c",
    "temperature.shutdown_c",
    "temperature.maximum_operating_c",
    "temperature.memory_maximum_c",
    "mig.maximum_instances",
}
#: For one board: known from one source only, which the role's file names, or chosen there.
UNKNOWN: dict[str, set[str]] = {
    "l4": {"memory.row_remap_banks"},
    "rtx-pro-6000": {
        "memory.row_remap_banks",
        "power.minimum_mw",
        "clocks.graphics_minimum_mhz",
        "clocks.graphics_maximum_mhz",
        "clocks.graphics_application_mhz",
        "clocks.memory_mhz",
    },
    "b200-180": {"pci.subsystem_device", "memory.row_remap_banks"},
    "gb200-186": {"pci.subsystem_device", "memory.row_remap_banks", "power.minimum_mw"},
}
#: Profiles without a public output: (profile, number) of the values that the role chose by the rule in the text.
UNKNOWN_OF_PROFILES: dict[str, dict[str, str]] = {
    "b200-180": {
        "3g.90gb decoders": "as on Hopper; the MIG user guide says 1",
        "4g.90gb decoders": "as on Hopper; the MIG user guide says 1",
        "7g.180gb decoders": "as on Hopper; the MIG user guide says 1",
        "3g.90gb jpeg_engines": "as the decoders",
        "4g.90gb jpeg_engines": "as the decoders",
        "7g.180gb jpeg_engines": "as the decoders",
        "3g.90gb multiprocessors": "two less than 4g, as 3g of Hopper is four less",
        "4g.90gb multiprocessors": "twice 2g",
    },
    "gb200-186": {
        f"{profile} {number}": "by the B200"
        for profile in ("3g.93gb", "4g.93gb", "7g.186gb")
        for number in ("decoders", "jpeg_engines", "memory_mib", "multiprocessors", "copy_engines")
        if (profile, number) != ("7g.186gb", "multiprocessors")
    },
}
