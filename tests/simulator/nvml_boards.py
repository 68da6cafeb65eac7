# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Partitioning tables of boards for the tests, written independently of the role's boards.

Sources: NVIDIA Multi-Instance GPU User Guide (r580), chapter Supported MIG Profiles; logs of real boards in threads of
gpu-operator and mig-parted. Memory is in MiB, placements are in memory slices.
"""

from __future__ import annotations

from typing import Any


def profile(
    name: str,
    identifier: int,
    maximum: int,
    starts: list[int],
    size: int,
    memory: int,
    slices: int,
    multiprocessors: int,
    **engines: int,
) -> dict[str, Any]:
    """Return one row."""
    return {
        "name": name,
        "id": identifier,
        "maximum": maximum,
        "starts": starts,
        "size": size,
        "memory": memory,
        "slices": slices,
        "multiprocessors": multiprocessors,
        "engines": engines,
    }


def eight_slices(
    names: tuple[str, ...],
    memory: tuple[int, ...],
    multiprocessors: tuple[int, ...],
    copy: tuple[int, ...],
    decoder: tuple[int, ...],
    jpeg: bool,
) -> dict[int, dict[str, Any]]:
    """Return the profiles of boards with 8 memory and 7 compute slices: 1g, 1g+me, 1g with double memory, 2g, 3g, 4g,
    7g.
    """
    rows = [
        (0, 19, 7, list(range(7)), 1, 1, 0),
        (7, 20, 1, list(range(7)), 1, 1, 0),
        (9, 15, 4, [0, 2, 4, 6], 2, 1, 1),
        (1, 14, 3, [0, 2, 4], 2, 2, 2),
        (2, 9, 2, [0, 4], 4, 3, 3),
        (3, 5, 1, [0], 4, 4, 4),
        (4, 0, 1, [0], 8, 7, 5),
    ]
    made = {}
    for enum, identifier, maximum, starts, size, slices, column in rows:
        special = identifier in {0, 20}
        decoders = max(decoder[column], 1) if identifier == 20 else decoder[column]
        made[enum] = profile(
            names[column] + ("+me" if identifier == 20 else ""),
            identifier,
            maximum,
            starts,
            size,
            memory[column],
            slices,
            multiprocessors[column],
            copy=copy[column],
            decoder=decoders,
            jpeg=decoders if jpeg else int(special),
            ofa=int(special),
        )
    return made


def quarter_profiles() -> dict[int, dict[str, Any]]:
    """Return the profiles of RTX PRO 6000 Blackwell: 12 memory slices, placements of 3, 6, and 12."""
    quarter, half = [0, 3, 6, 9], [0, 6]
    one = {"copy": 1, "decoder": 1, "encoder": 1, "jpeg": 1}
    two = {"copy": 2, "decoder": 2, "encoder": 2, "jpeg": 2}
    every = {"decoder": 4, "encoder": 4, "jpeg": 4, "ofa": 1}
    return {
        0: profile("1g.24gb", 14, 4, quarter, 3, 24187, 1, 46, **one),
        7: profile("1g.24gb+me", 21, 1, quarter, 3, 24187, 1, 46, **one, ofa=1),
        0xA: profile("1g.24gb+gfx", 47, 4, quarter, 3, 24187, 1, 46, **one),
        0xF: profile("1g.24gb+me.all", 65, 1, quarter, 3, 24187, 1, 46, copy=1, **every),
        0xD: profile("1g.24gb-me", 67, 4, quarter, 3, 24187, 1, 46, copy=1),
        1: profile("2g.48gb", 5, 2, half, 6, 48517, 2, 94, **two),
        0xB: profile("2g.48gb+gfx", 35, 2, half, 6, 48517, 2, 94, **two),
        0x10: profile("2g.48gb+me.all", 64, 1, half, 6, 48517, 2, 94, copy=2, **every),
        0xE: profile("2g.48gb-me", 66, 2, half, 6, 48517, 2, 94, copy=2),
        3: profile("4g.96gb", 0, 1, [0], 12, 97403, 4, 188, copy=4, **every),
        0xC: profile("4g.96gb+gfx", 32, 1, [0], 12, 97403, 4, 188, copy=4, **every),
    }


A30_PROFILES = {
    0: profile("1g.6gb", 14, 4, [0, 1, 2, 3], 1, 5949, 1, 14, copy=1, decoder=1),
    7: profile("1g.6gb+me", 21, 1, [0, 1, 2, 3], 1, 5949, 1, 14, copy=1, decoder=1, jpeg=1, ofa=1),
    1: profile("2g.12gb", 5, 2, [0, 2], 2, 11971, 2, 28, copy=2, decoder=2),
    8: profile("2g.12gb+me", 6, 1, [0, 2], 2, 11971, 2, 28, copy=2, decoder=2, jpeg=1, ofa=1),
    3: profile("4g.24gb", 0, 1, [0], 4, 24003, 4, 56, copy=4, decoder=4, jpeg=1, ofa=1),
}


def board(
    name: str,
    architecture: int,
    capability: str,
    device_id: str,
    memory: int,
    mig: str,
    profiles: dict[int, dict[str, Any]],
    **other: Any,
) -> dict[str, Any]:
    """Return a board with its tables."""
    whole = max((row["size"] for row in profiles.values()), default=0)
    return {
        "name": name,
        "architecture": architecture,
        "capability": capability,
        "device_id": device_id,
        "memory": memory,
        "mig": mig,
        "profiles": profiles,
        "memory_slices": whole,
        "compute_slices": {8: 7, 4: 4, 12: 4, 0: 0}[whole],
        **other,
    }


A100_ENGINES = {"copy": 7, "decoder": 5, "jpeg": 1, "ofa": 1}
H100_ENGINES = {"copy": 8, "decoder": 7, "jpeg": 7, "ofa": 1}
HOPPER_SHAPE = ((16, 26, 32, 60, 64, 132), (1, 1, 2, 3, 4, 8), (1, 1, 2, 3, 4, 7), True)
# Two copy engines for each of the small profiles: `nvidia-smi mig -lgip` of B200 (mig-parted pull requests 166, 187)
# and GB200 (mig-parted issue 227, gpu-operator pull request 1303). 6, 8, and 16 above 2g: the MIG user guide's table
# of the B200.
BLACKWELL_SHAPE = ((2, 2, 4, 6, 8, 16), (1, 1, 2, 3, 4, 7), True)
BLACKWELL_ENGINES = {"copy": 16, "decoder": 7, "jpeg": 7, "ofa": 1}
A100_SHAPE = ((14, 14, 28, 42, 56, 98), (1, 1, 2, 3, 4, 7), (0, 1, 1, 2, 2, 5), False)


def names(text: str) -> tuple[str, ...]:
    """Return the names of 1g, 1g with double memory, 2g, 3g, 4g, 7g with these gigabytes."""
    one, double, three, seven = text.split()
    return f"1g.{one}gb", f"1g.{double}gb", f"2g.{double}gb", f"3g.{three}gb", f"4g.{three}gb", f"7g.{seven}gb"


def sizes(one: float, double: float, three: float, seven: float) -> tuple[int, ...]:
    """Return the memory of the same six profiles in MiB, from GiB."""
    return tuple(round(1024 * gib) for gib in (one, double, double, three, three, seven))


BOARDS: dict[str, dict[str, Any]] = {
    "A30": board(
        "NVIDIA A30",
        7,
        "8.0",
        "0x20b710de",
        24576,
        "pending",
        A30_PROFILES,
        engines={"copy": 4, "decoder": 4, "jpeg": 1, "ofa": 1},
    ),
    "A100-40": board(
        "NVIDIA A100-SXM4-40GB",
        7,
        "8.0",
        "0x20b010de",
        40960,
        "pending",
        eight_slices(names("5 10 20 40"), sizes(4.75, 9.75, 19.62, 39.5), *A100_SHAPE),
        engines=A100_ENGINES,
    ),
    "A100-80": board(
        "NVIDIA A100-SXM4-80GB",
        7,
        "8.0",
        "0x20b210de",
        81920,
        "pending",
        eight_slices(names("10 20 40 80"), sizes(9.5, 19.5, 39.25, 78.75), *A100_SHAPE),
        engines=A100_ENGINES,
        order="reversed",
    ),
    "H100-80": board(
        "NVIDIA H100 80GB HBM3",
        9,
        "9.0",
        "0x233010de",
        81559,
        "immediate",
        eight_slices(names("10 20 40 80"), sizes(9.75, 19.62, 39.5, 79.25), *HOPPER_SHAPE),
        engines=H100_ENGINES,
    ),
    "H200-141": board(
        "NVIDIA H200",
        9,
        "9.0",
        "0x233510de",
        143771,
        "immediate",
        eight_slices(names("18 35 71 141"), sizes(16, 32.5, 69.75, 140), *HOPPER_SHAPE),
        engines=H100_ENGINES,
    ),
    "B200": board(
        "NVIDIA B200",
        10,
        "10.0",
        "0x290110de",
        183359,
        "immediate",
        eight_slices(names("23 45 90 180"), sizes(20.5, 44.25, 89, 178.5), (18, 30, 36, 70, 72, 148), *BLACKWELL_SHAPE),
        engines=BLACKWELL_ENGINES,
    ),
    "GB200": board(
        "NVIDIA GB200",
        10,
        "10.0",
        "0x294110de",
        189471,
        "immediate",
        eight_slices(names("23 47 93 186"), sizes(22, 45.5, 92, 184.5), (18, 32, 38, 74, 76, 152), *BLACKWELL_SHAPE),
        engines=BLACKWELL_ENGINES,
    ),
    "RTX-PRO-6000": board(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        10,
        "12.0",
        "0x2bb510de",
        97887,
        "immediate",
        quarter_profiles(),
        engines={"copy": 4, "decoder": 4, "encoder": 4, "jpeg": 4, "ofa": 1},
    ),
    "L4": board(
        "NVIDIA L4", 8, "8.9", "0x27b810de", 23034, "none", {}, engines={"copy": 2, "decoder": 4, "jpeg": 4, "ofa": 1}
    ),
}
