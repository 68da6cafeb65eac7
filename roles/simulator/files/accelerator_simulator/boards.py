# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Boards: parsed from the JSON files into validated, frozen values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .documents import take
from .errors import DescriptionError

HEXADECIMAL = re.compile(r"^0x[0-9a-f]{4,6}$")
# NVML_GPU_INSTANCE_PROFILE_* of nvml.h
GPU_INSTANCE_PROFILES = {
    "1_SLICE": 0,
    "2_SLICE": 1,
    "3_SLICE": 2,
    "4_SLICE": 3,
    "7_SLICE": 4,
    "8_SLICE": 5,
    "6_SLICE": 6,
    "1_SLICE_REV1": 7,
    "2_SLICE_REV1": 8,
    "1_SLICE_REV2": 9,
    "1_SLICE_GFX": 10,
    "2_SLICE_GFX": 11,
    "4_SLICE_GFX": 12,
    "1_SLICE_NO_ME": 13,
    "2_SLICE_NO_ME": 14,
    "1_SLICE_ALL_ME": 15,
    "2_SLICE_ALL_ME": 16,
    "3_SLICE_GFX": 17,
}
# NVML_DEVICE_ARCH_* and NVML_BRAND_* of nvml.h
ARCHITECTURES = {"turing": 6, "ampere": 7, "ada": 8, "hopper": 9, "blackwell": 10}
BRANDS = {"quadro": 1, "tesla": 2, "quadro-rtx": 12, "nvidia-rtx": 13, "nvidia": 14}
# NVML_NVLINK_VERSION_* by the generation that product briefs name
NVLINK_VERSIONS = {0: 0, 3: 4, 4: 6, 5: 7}
# NVML_POWER_PROFILE_* of nvml.h in the order of their numbers, without those that no simulated board has
WORKLOAD_PROFILES = (
    "MAX_P",
    "MAX_Q",
    "COMPUTE",
    "MEMORY_BOUND",
    "NETWORK",
    "BALANCED",
    "LLM_INFERENCE",
    "LLM_TRAINING",
    "RBM",
    "DCPCIE",
    "HMMA_SPARSE",
    "HMMA_DENSE",
    "SYNC_BALANCED",
    "HPC",
)
MODE_CHANGES = {"reset": "pending", "immediate": "immediate"}
MAXIMUM_GPU_INSTANCE_PROFILES = 16


@dataclass(frozen=True)
class Profile:
    """One MIG profile of a board. Memory is in MiB, placements are in the board's memory slices."""

    name: str
    enum: int
    id: int
    slices: int
    memory_mib: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg_engines: int
    optical_flow_engines: int
    instances: int
    starts: tuple[int, ...]
    size: int

    @property
    def attributes(self) -> str:
        """Return the part of the name after the memory: ``+me``, ``+gfx``, ``-me`` … or an empty string."""
        match = re.match(r"^\d+g\.\d+gb(?P<attributes>.*)$", self.name)
        return match.group("attributes") if match else ""


@dataclass(frozen=True)
class Mig:
    """The MIG properties of a board. ``mode_change`` is ``reset`` (pending until a reset) or ``immediate``."""

    mode_change: str
    mode_persistent: bool
    memory_slices: int
    compute_slices: int
    maximum_instances: int
    engines: Mapping[str, int]
    profiles: tuple[Profile, ...]

    @property
    def unit_multiprocessors(self) -> int:
        """Return the multiprocessors of one compute slice: those of the plain smallest profile."""
        return next(profile.multiprocessors for profile in self.profiles if profile.enum == 0)


@dataclass(frozen=True)
class Board:
    """One product. Groups that are not interpreted keep the structure of the file."""

    key: str
    name: str
    architecture: str
    brand: str
    compute_capability: str
    multiprocessors: int
    cores: int
    part: Mapping[str, str]
    pci: Mapping[str, Any]
    memory: Mapping[str, int]
    power: Mapping[str, int]
    clocks: Mapping[str, Any]
    temperature: Mapping[str, int | None]
    nvlink: Mapping[str, int]
    ecc: bool
    fabric_attached: bool
    mig: Mig | None
    workload_profiles: tuple[str, ...] = ()


def profile_name(slices: int, memory_mib: int, total_mib: int, attributes: str = "") -> str:
    """Return the name by the driver's naming rule (NVIDIA's go-nvlib, ``mig_profile.go``).

    The displayed gigabytes are the memory in eighths of the board, rounded up, times the board's GiB rounded up.
    Halves are rounded up.
    """
    eighths = -(-memory_mib * 8 // total_mib)
    gigabytes = int(eighths * -(-total_mib // 1024) / 8 + 0.5)
    return f"{slices}g.{gigabytes}gb{attributes}"


def parse_profile(data: Mapping[str, Any], where: str) -> Profile:
    """Return one row of a board's profile table."""
    where = f"{where}, profile {data.get('name')}"
    placements = take(data, "placements", dict, where)
    enum = GPU_INSTANCE_PROFILES.get(take(data, "profile", str, where))
    if enum is None:
        raise DescriptionError(
            f"{where}: unknown profile {data['profile']!r}, expected one of {', '.join(GPU_INSTANCE_PROFILES)}"
        )
    numbers = {
        key: take(data, key, int, where)
        for key in (
            "id",
            "slices",
            "memory_mib",
            "multiprocessors",
            "copy_engines",
            "decoders",
            "encoders",
            "jpeg_engines",
            "optical_flow_engines",
            "instances",
        )
    }
    return Profile(
        name=take(data, "name", str, where),
        enum=enum,
        starts=tuple(take(placements, "starts", list, where)),
        size=take(placements, "size", int, where),
        **numbers,
    )


def check_mig(mig: Mig, total_mib: int, multiprocessors: int, where: str) -> None:
    """Raise a DescriptionError if a profile table contradicts itself or the board."""
    enums = [profile.enum for profile in mig.profiles]
    identifiers = [profile.id for profile in mig.profiles]
    names = [profile.name for profile in mig.profiles]
    for what, values in (("profile", enums), ("id", identifiers), ("name", names)):
        if len(set(values)) != len(values):
            raise DescriptionError(f"{where}: a profile's {what} occurs twice in {values}")
    if 0 not in enums:
        raise DescriptionError(f"{where}: no 1_SLICE profile, which every board has")
    if len(enums) > MAXIMUM_GPU_INSTANCE_PROFILES:
        raise DescriptionError(f"{where}: {len(enums)} profiles, expected at most {int(MAXIMUM_GPU_INSTANCE_PROFILES)}")
    if mig.mode_change not in MODE_CHANGES:
        raise DescriptionError(
            f"{where}: mode_change is {mig.mode_change!r}, expected one of {', '.join(MODE_CHANGES)}"
        )
    budget = {
        "decoders": "decoder",
        "encoders": "encoder",
        "jpeg_engines": "jpeg",
        "optical_flow_engines": "optical_flow",
        "copy_engines": "copy",
    }
    for profile in mig.profiles:
        row = f"{where}, profile {profile.name}"
        expected = profile_name(profile.slices, profile.memory_mib, total_mib, profile.attributes)
        if profile.name != expected:
            raise DescriptionError(
                f"{row}: the naming rule gives {expected} for {profile.memory_mib} MiB of {total_mib}"
            )
        if not profile.starts or list(profile.starts) != sorted(set(profile.starts)):
            raise DescriptionError(f"{row}: starts {list(profile.starts)}, expected them ascending and distinct")
        if profile.size < 1 or profile.starts[0] < 0 or profile.starts[-1] + profile.size > mig.memory_slices:
            raise DescriptionError(
                f"{row}: placements {list(profile.starts)}:{profile.size} leave the {mig.memory_slices} memory slices"
            )
        if not 1 <= profile.instances <= len(profile.starts):
            raise DescriptionError(
                f"{row}: {profile.instances} instances, expected 1 to the {len(profile.starts)} placements"
            )
        if profile.slices > mig.compute_slices or profile.multiprocessors > multiprocessors:
            raise DescriptionError(f"{row}: more compute than the board has")
        for key, engine in budget.items():
            if getattr(profile, key) > mig.engines.get(engine, 0):
                raise DescriptionError(
                    f"{row}: {key} {int(getattr(profile, key))}, the board has {int(mig.engines.get(engine, 0))}"
                )


def _check_pci(pci: Mapping[str, Any], where: str) -> None:
    for key in ("vendor", "device", "subsystem_vendor", "subsystem_device", "class"):
        if not HEXADECIMAL.match(str(pci.get(key))):
            raise DescriptionError(f"{where}: pci.{key} is {pci.get(key)!r}, expected 0x and hexadecimal digits")


def parse_board(data: Mapping[str, Any], where: str) -> Board:
    """Return the board of a board file's content, validated."""
    architecture, brand = take(data, "architecture", str, where), take(data, "brand", str, where)
    if architecture not in ARCHITECTURES:
        raise DescriptionError(f"{where}: architecture {architecture!r}, expected one of {', '.join(ARCHITECTURES)}")
    if brand not in BRANDS:
        raise DescriptionError(f"{where}: brand {brand!r}, expected one of {', '.join(BRANDS)}")
    if take(data, "nvlink", dict, where).get("version") not in NVLINK_VERSIONS:
        raise DescriptionError(
            f"{where}: nvlink.version is {data['nvlink'].get('version')!r}, expected one of {sorted(NVLINK_VERSIONS)}"
        )
    workload_profiles = tuple(data.get("workload_profiles", ()))
    if unknown := [name for name in workload_profiles if name not in WORKLOAD_PROFILES]:
        raise DescriptionError(
            f"{where}: workload_profiles has {unknown[0]!r}, expected {', '.join(WORKLOAD_PROFILES)}"
        )
    pci, memory, multiprocessors = (
        take(data, "pci", dict, where),
        take(data, "memory", dict, where),
        take(data, "multiprocessors", int, where),
    )
    _check_pci(pci, where)
    if not take(data, "sources", dict, where).get("*"):
        raise DescriptionError(f"{where}: sources has no * entry that says where the figures come from")
    partition, mig = take(data, "mig", dict, where), None
    if take(partition, "capable", bool, where):
        mig = Mig(
            mode_change=take(partition, "mode_change", str, where),
            mode_persistent=take(partition, "mode_persistent", bool, where),
            memory_slices=take(partition, "memory_slices", int, where),
            compute_slices=take(partition, "compute_slices", int, where),
            maximum_instances=take(partition, "maximum_instances", int, where),
            engines=take(partition, "engines", dict, where),
            profiles=tuple(parse_profile(row, where) for row in take(partition, "profiles", list, where)),
        )
        check_mig(mig, memory["total_mib"], multiprocessors, where)
    return Board(
        key=take(data, "board", str, where),
        name=take(data, "name", str, where),
        architecture=architecture,
        brand=brand,
        compute_capability=take(data, "compute_capability", str, where),
        multiprocessors=multiprocessors,
        cores=take(data, "cores", int, where),
        part=take(data, "part", dict, where),
        pci=pci,
        memory=memory,
        power=take(data, "power", dict, where),
        clocks=take(data, "clocks", dict, where),
        temperature=take(data, "temperature", dict, where),
        nvlink=take(data, "nvlink", dict, where),
        ecc=take(data, "ecc", bool, where),
        fabric_attached=take(data, "fabric_attached", bool, where),
        mig=mig,
        workload_profiles=workload_profiles,
    )


def parse_npu_board(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the data of an NPU board's file unchanged, after validating its PCI IDs and sources."""
    pci = take(data, "pci", dict, where)
    _check_pci(pci, where)
    if not take(data, "sources", dict, where).get("*"):
        raise DescriptionError(f"{where}: sources has no * entry that says where the figures come from")
    return data
