# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Render the flat text that the simulated library loads, as ``nvml/MACHINE_FORMAT.md`` defines it."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .boards import (
    ARCHITECTURES,
    BRANDS,
    MODE_CHANGES,
    NVLINK_VERSIONS,
    WORKLOAD_PROFILES,
    Board,
    Mig,
    Profile,
)
from .errors import DescriptionError
from .hardware import Catalogue, Device, Machine

IDENTITY_NAMESPACE = uuid.UUID("0b8f7a0e-6f1d-5a53-9c1e-2f4f5be6a0d1")
# NVML_COMPUTE_INSTANCE_PROFILE_* by slices, and the one that fills a double-memory 1g with more SMs than one slice's
COMPUTE_INSTANCE_PROFILES = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
COMPUTE_INSTANCE_1_SLICE_REV1 = 7
# Starts in compute slices inside a GPU instance, by its number of slices (MIG user guide)
COMPUTE_STARTS: dict[int, dict[int, tuple[int, ...]]] = {
    1: {1: (0,)},
    2: {1: (0, 1), 2: (0,)},
    3: {1: (0, 1, 2), 2: (0,), 3: (0,)},
    4: {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)},
    7: {1: (0, 1, 2, 3, 4, 5, 6), 2: (0, 2, 4), 3: (0, 4), 4: (0,), 7: (0,)},
}
NVLINKS_PER_GPU_MAXIMUM = 36
# NVML_GPU_FABRIC_HEALTH_MASK: bandwidth not degraded, no route recovery, routes healthy, no access timeout recovery
HEALTHY_FABRIC_MASK = 0xAA
# NVML_GPU_FABRIC_HEALTH_SUMMARY
FABRIC_HEALTH_NOT_SUPPORTED, FABRIC_HEALTHY = 0, 1
FABRIC_STATE_COMPLETED = 3


@dataclass(frozen=True)
class Settings:
    """The values that one installation adds to a machine profile.

    ``identity`` is any text that differs between machines: UUIDs and serial numbers are derived from it. The roots are
    the directories that the library reads. ``driver_version`` is empty if NVIDIA's driver is not loaded. ``library``
    holds more statements for the whole machine, such as ``{"operation-delay": 1000}`` or ``{"profile-info-versions":
    False}``.
    """

    identity: str
    driver_version: str
    cuda_version: str
    ascend_driver_version: str = "25.2.0"
    proc_root: str = "/proc/driver/nvidia"
    dev_root: str = "/dev"
    sys_root: str = "/sys"
    caps_major: int = 236
    cluster_uuid: str | None = None
    clique: int | None = None
    library: Mapping[str, Any] | None = None


def gpu_uuid(identity: str, address: str) -> str:
    """Return the stable ``GPU-…`` UUID of the board at an address of the machine with that identity."""
    return "GPU-{}".format(uuid.uuid5(IDENTITY_NAMESPACE, f"{identity}/gpu/{address}"))


def serial_number(identity: str, address: str) -> str:
    """Return a serial number of 13 digits."""
    digest = hashlib.sha256((f"{identity}/serial/{address}").encode()).hexdigest()
    return f"165{int(digest, 16) % 10**10:010d}"


def guid(identity: str, address: str) -> str:
    """Return the fabric GUID of a GPU: 32 hexadecimal digits."""
    return hashlib.sha256((f"{identity}/guid/{address}").encode()).hexdigest()[:32]


def _pairs(**values: Any) -> str:
    return " ".join("{}={}".format(key.replace("_", "-"), value) for key, value in values.items() if value is not None)


def _placements(starts: Sequence[int], size: int) -> str:
    return f"{','.join(map(str, starts))}:{size}"


def _flag(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _identifier(high: str, low: str) -> str:
    return f"0x{int(high, 16):04x}{int(low, 16):04x}"


def _step(clocks: Mapping[str, Any]) -> int:
    step = clocks["graphics_step_mhz"]
    return int(step) if step == int(step) else int(step * 2)


def compute_profiles(mig: Mig, profile: Profile) -> Iterator[Mapping[str, Any]]:
    """Yield the compute instance profiles of one GPU instance profile, in the order of their numbers.

    A compute instance of all slices has all multiprocessors, a smaller one has its slices' share. If the smallest GPU
    instance has more multiprocessors than a slice (double memory on Hopper and later), one slice and the whole are two
    profiles, and the whole is 1_SLICE_REV1.
    """
    unit = mig.unit_multiprocessors
    for slices, starts in COMPUTE_STARTS[profile.slices].items():
        whole = slices == profile.slices
        if whole and not (slices == 1 and profile.multiprocessors != unit):
            name, multiprocessors = profile.name, profile.multiprocessors
        else:
            name, multiprocessors = f"{slices}c.{profile.name}", slices * unit
        yield {
            "enum": COMPUTE_INSTANCE_PROFILES[slices],
            "name": name,
            "slices": slices,
            "multiprocessors": multiprocessors,
            "starts": starts,
            "size": slices,
        }
    if profile.slices == 1 and profile.multiprocessors != unit:
        yield {
            "enum": COMPUTE_INSTANCE_1_SLICE_REV1,
            "name": profile.name,
            "slices": 1,
            "multiprocessors": profile.multiprocessors,
            "starts": (0,),
            "size": 1,
        }


def _mig_lines(mig: Mig) -> Iterator[str]:
    yield f"mig {MODE_CHANGES[mig.mode_change]}"
    yield f"mig-slices {_pairs(memory=mig.memory_slices, compute=mig.compute_slices)}"
    for profile in mig.profiles:
        yield "gpu-instance-profile {}".format(
            _pairs(
                enum=profile.enum,
                id=profile.id,
                name=profile.name,
                memory=profile.memory_mib,
                slices=profile.slices,
                multiprocessors=profile.multiprocessors,
                copy=profile.copy_engines,
                decoder=profile.decoders,
                encoder=profile.encoders,
                jpeg=profile.jpeg_engines,
                ofa=profile.optical_flow_engines,
                maximum=profile.instances,
                p2p="no",
                gfx=_flag("+gfx" in profile.attributes),
                placements=_placements(profile.starts, profile.size),
            )
        )
        for compute in compute_profiles(mig, profile):
            yield "compute-instance-profile {}".format(
                _pairs(
                    gi=profile.enum,
                    enum=compute["enum"],
                    id=compute["enum"],
                    name=compute["name"],
                    slices=compute["slices"],
                    multiprocessors=compute["multiprocessors"],
                    maximum=len(compute["starts"]),
                    placements=_placements(compute["starts"], compute["size"]),
                )
            )


def _nvlink_lines(machine: Machine, device: Device, board: Board) -> Iterator[str]:
    links, speed = board.nvlink["links"], board.nvlink["mb_per_second"]
    version = NVLINK_VERSIONS[board.nvlink["version"]]
    switches = [entry.address for entry in machine.devices if entry.kind == "nvswitch"]
    peers = [
        other for pair in machine.nvlink_pairs if device.address in pair for other in pair if other != device.address
    ]
    for link in range(links):
        if machine.nvlink == "switch":
            # A rack's NVSwitches are in separate trays: they have no PCI address on this machine.
            yield "nvlink {} {}".format(
                link,
                _pairs(
                    version=version,
                    state="active",
                    remote="switch",
                    speed=speed,
                    address=switches[link * len(switches) // links] if switches else None,
                ),
            )
        elif peers:
            yield "nvlink {} {}".format(
                link, _pairs(version=version, state="active", remote="gpu", address=peers[0], speed=speed)
            )
        else:
            # Nothing is plugged in: without `remote`, the library takes the link for one to a switch.
            yield f"nvlink {link} {_pairs(version=version, state='inactive', remote='gpu', speed=speed)}"


def _fabric_lines(machine: Machine, device: Device, board: Board, settings: Settings) -> Iterator[str]:
    if not board.fabric_attached or machine.nvlink != "switch":
        return
    rack = machine.fabric
    cluster = settings.cluster_uuid or (rack["cluster_uuid"] if rack else str(uuid.UUID(int=0)))
    clique = settings.clique if settings.clique is not None else (rack["clique"] if rack else 0)
    blackwell = board.architecture == "blackwell"
    yield "fabric {}".format(
        _pairs(
            state=FABRIC_STATE_COMPLETED,
            status=0,
            cluster=cluster,
            clique=clique,
            health_mask="0x%x" % (HEALTHY_FABRIC_MASK if rack else 0),
            health_summary=FABRIC_HEALTHY if blackwell else FABRIC_HEALTH_NOT_SUPPORTED,
        )
    )
    if rack:
        yield "platform {}".format(
            _pairs(
                chassis=rack["chassis"],
                slot=rack["slot"],
                tray=rack["tray"],
                host=rack["host"],
                peer_type=1,
                module=device.module,
                ib_guid=guid(settings.identity, device.address),
            )
        )


def _workload_profile_lines(board: Board) -> Iterator[str]:
    """Yield the profiles with priorities in the order of their numbers. The goals MAX_P and MAX_Q exclude each other."""
    numbers = {name: WORKLOAD_PROFILES.index(name) for name in board.workload_profiles}
    goals = sum(1 << number for name, number in numbers.items() if name in ("MAX_P", "MAX_Q"))
    for priority, number in enumerate(sorted(numbers.values())):
        conflicts = goals & ~(1 << number) if goals >> number & 1 else 0
        yield f"workload-profile {number} {_pairs(priority=priority, conflicts=f'{conflicts:#x}')}"


def _gpu_lines(machine: Machine, device: Device, board: Board, settings: Settings) -> Iterator[str]:
    pci, memory, power, clocks, temperature = board.pci, board.memory, board.power, board.clocks, board.temperature
    before_ampere = ARCHITECTURES[board.architecture] < ARCHITECTURES["ampere"]
    yield f"uuid {gpu_uuid(settings.identity, device.address)}"
    yield f"minor {device.minor or 0}"
    yield f"name {board.name}"
    yield f"serial {serial_number(settings.identity, device.address)}"
    yield "board-part-number {}".format(board.part["board"])
    yield "vbios-version {}".format(board.part["vbios"])
    yield "inforom-image-version {}".format(board.part["inforom_image"])
    yield f"brand {BRANDS[board.brand]}"
    yield f"architecture {ARCHITECTURES[board.architecture]}"
    yield f"compute-capability {board.compute_capability}"
    yield f"pci-address {device.address}"
    yield "pci-device-id {}".format(_identifier(pci["device"], pci["vendor"]))
    yield "pci-subsystem-id {}".format(_identifier(pci["subsystem_device"], pci["subsystem_vendor"]))
    yield "pci-class {}".format(pci["class"])
    yield "pci-path {}".format("/".join(device.path))
    yield "pcie {}".format(_pairs(generation=pci["max_link_generation"], width=pci["max_link_width"]))
    yield f"numa-node {device.numa}"
    if device.memory_numa is not None:
        # Memory that CPUs access coherently: over NVLink C2C, with the CPU's page tables
        yield f"coherent-numa-node {device.memory_numa}"
        yield "addressing-mode ats"
    yield f"cpu-affinity {machine.numa_node(device.numa).cpus}"
    yield "memory {}".format(_pairs(total=memory["total_mib"], reserved=memory["reserved_mib"], used=0))
    yield f"memory-bus-width {memory['bus_width_bits']}"
    yield f"bar1-memory {memory['bar1_mib']}"
    yield f"cores {board.cores}"
    yield "power {}".format(
        _pairs(
            default=power["default_mw"],
            minimum=power["minimum_mw"],
            maximum=power["maximum_mw"],
            usage=power["idle_mw"],
        )
    )
    yield "temperature {}".format(
        _pairs(
            gpu=temperature["idle_c"],
            shutdown=temperature["shutdown_c"],
            slowdown=temperature["slowdown_c"],
            memory_maximum=temperature["memory_maximum_c"],
            gpu_maximum=temperature["maximum_operating_c"],
        )
    )
    graphics = _pairs(
        minimum=clocks["graphics_minimum_mhz"], maximum=clocks["graphics_maximum_mhz"], step=_step(clocks)
    )
    for memory_clock in (clocks["memory_mhz"], *clocks.get("memory_lower_mhz", ())):
        yield f"memory-clock {memory_clock} {graphics}"
    idle, highest = clocks["graphics_idle_mhz"], clocks["graphics_maximum_mhz"]
    yield "clocks {}".format(
        _pairs(graphics=idle, sm=idle, memory=clocks["memory_mhz"], video=min(clocks["video_maximum_mhz"], 765))
    )
    yield "maximum-clocks {}".format(
        _pairs(graphics=highest, sm=highest, memory=clocks["memory_mhz"], video=clocks["video_maximum_mhz"])
    )
    yield "application-clocks {}".format(
        _pairs(graphics=clocks["graphics_application_mhz"], memory=clocks["memory_mhz"])
    )
    yield from _workload_profile_lines(board)
    yield f"ecc {_flag(board.ecc)}"
    yield f"row-remapping {_flag(not before_ampere)}"
    if not before_ampere:
        yield "row-remapper-banks {}".format(memory["row_remap_banks"])
    yield f"page-retirement {_flag(before_ampere)}"
    yield "persistence yes"
    if device.module is not None:
        yield f"module-id {device.module}"
    if board.mig is not None:
        engines = board.mig.engines
        yield "engines {}".format(
            _pairs(
                copy=engines["copy"],
                decoder=engines["decoder"],
                encoder=engines["encoder"],
                jpeg=engines["jpeg"],
                ofa=engines["optical_flow"],
            )
        )
    yield from _nvlink_lines(machine, device, board)
    yield from _fabric_lines(machine, device, board, settings)
    if board.mig is None:
        yield "mig none"
    else:
        yield from _mig_lines(board.mig)


def render(machine: Machine, catalogue: Catalogue, settings: Settings) -> str:
    """Return the whole description of a machine, one statement per line, for the library's ``load``."""
    lines: list[str] = [
        f"# {machine.name}: {machine.product}",
        "format 1",
        f"driver-version {settings.driver_version}",
        f"cuda-version {settings.cuda_version}",
        f"proc-root {settings.proc_root}",
        f"dev-root {settings.dev_root}",
        f"sys-root {settings.sys_root}",
        f"caps-major {settings.caps_major}",
    ]
    lines += [f"{key} {_flag(value)}" for key, value in sorted((settings.library or {}).items())]
    for device in machine.gpus:
        lines.append("gpu")
        lines += ["  " + line for line in _gpu_lines(machine, device, catalogue.boards[device.board or ""], settings)]
    return "\n".join(lines) + "\n"


def parse(text: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the statements of a description: those of the machine, and those of each GPU.

    Repeated statements (profiles, NVLinks, memory clocks) are lists of dictionaries. This is the parser for
    :func:`render`. The library has its own parser.
    """
    machine: dict[str, str] = {}
    gpus: list[dict[str, Any]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, _blank, value = line.partition(" ")
        if key == "gpu":
            gpus.append({})
            continue
        target: dict[str, Any] = gpus[-1] if gpus else machine
        if key in ("gpu-instance-profile", "compute-instance-profile"):
            target.setdefault(key, []).append(_read_pairs(value.split(), number))
        elif key in ("nvlink", "memory-clock", "workload-profile"):
            first, *rest = value.split()
            target.setdefault(key, []).append(dict(_read_pairs(rest, number), number=first))
        elif key in target:
            raise DescriptionError(f"line {number}: {key} occurs twice, expected it once")
        else:
            target[key] = value
    return machine, gpus


def _read_pairs(words: Sequence[str], number: int) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise DescriptionError(f"line {number}: {word!r}, expected name=value")
        pairs[key] = value
    return pairs
