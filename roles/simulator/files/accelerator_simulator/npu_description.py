# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Render machines with NPUs from the JSON files in ``ascend`` to the text that the simulated libdcmi loads
(``dcmi/MACHINE_FORMAT.md``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .hardware import Catalogue, Device, Machine, Npu

SUPER_POD = "super-pod"
RESOURCES = ("aicore", "aicpu", "vpc", "venc", "vdec", "jpegd", "jpege", "pngd")
# Bit positions of the server, the module, and the die on its module in a die's number within its super-pod. The lowest
# bits are the physical ID.
_SERVER_BIT, _MODULE_BIT, _DIE_BIT = 22, 18, 16
# Default major number of the vNPU nodes (chosen).
SLICE_MAJOR = 237


@dataclass(frozen=True)
class NpuSettings:
    """The values that one installation adds to a machine profile.

    ``identity`` is any text that differs between machines: serial numbers and die IDs are derived from it. ``library``
    holds more statements for the whole machine, such as ``{"guard-destroy": True}``, which override the machine's. Its
    ``super-pod`` applies to each chip: the servers of a super-pod are one machine profile with different ``server``
    values, {"super-pod": {"server": 3}}. A machine without a super-pod gets one only with an ``id``.
    """

    identity: str
    driver_version: str
    dev_root: str = "/dev"
    sys_root: str = "/sys"
    etc_root: str = "/etc"
    slice_major: int = SLICE_MAJOR
    library: Mapping[str, Any] | None = None


def die_id(identity: str, kind: str, address: str) -> str:
    """Return the stable 40 hexadecimal digits of the die at an address of the machine with that identity."""
    return hashlib.sha256(f"{identity}/{kind}/{address}".encode()).hexdigest()[:40]


def card_serial(identity: str, card: int) -> str:
    """Return a serial number of 20 characters."""
    digest = hashlib.sha256(f"{identity}/card/{card}".encode()).hexdigest()
    return f"1023{int(digest, 16) % 10**16:016d}"


def _pairs(**values: Any) -> str:
    return " ".join(
        "{}={}".format(key.replace("_", "-"), _word(value)) for key, value in values.items() if value is not None
    )


def _word(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _slicing_lines(slicing: Mapping[str, Any]) -> Iterator[str]:
    yield "slices {}".format(
        _pairs(
            maximum=slicing["maximum"],
            groups=slicing.get("groups"),
            needs_amp=slicing.get("needs_amp"),
            needs_single_die=slicing.get("needs_single_die"),
            sriov=slicing.get("sriov"),
            aicpu_whole=slicing.get("aicpu_whole"),
        )
    )
    yield f"totals {_pairs(**slicing['totals'])}"
    for row in slicing["templates"]:
        yield "template {}".format(
            _pairs(
                name=row["name"],
                memory=row["memory_gb"],
                mib=row.get("memory_mib"),
                places=row.get("places"),
                vm_only=row.get("vm_only"),
                **{resource: row[resource] for resource in RESOURCES if resource in row},
            )
        )


def _npu_lines(
    machine: Machine, catalogue: Catalogue, device: Device, npu: Npu, settings: NpuSettings
) -> Iterator[str]:
    board, address = catalogue.npu_boards[device.board or ""], device.address
    pci, memory, frequency = board["pci"], board["memory"], board["frequency"]
    for key in ("type", "name", "version", "product", "model", "manufacturer"):
        yield f"{key} {board[key]}"
    yield f"npu-name {board['npu_name']}"
    yield f"serial {card_serial(settings.identity, npu.card)}"
    for key in ("card", "chip", "physical"):
        yield f"{key} {getattr(npu, key)}"
    yield f"aicores {board['aicores']}"
    yield f"ids {_pairs(**board['ids'], slot=npu.card)}"
    yield f"pci-address {address}"
    yield f"pci-device-id {pci['device']}{pci['vendor'][2:]}"
    yield f"pci-subsystem-id {pci['subsystem_device']}{pci['subsystem_vendor'][2:]}"
    yield f"pci-path {'/'.join(device.path)}"
    yield f"numa-node {device.numa}"
    yield f"cpu-affinity {machine.numa_node(device.numa).cpus}"
    yield f"vdie {die_id(settings.identity, 'vdie', address)}"
    yield f"ndie {die_id(settings.identity, 'ndie', address)}"
    yield "memory {}".format(
        _pairs(kind=memory["kind"], mib=memory["total_mib"], gb=memory["nominal_gb"], used=memory["idle_mib"])
    )
    yield "frequency {}".format(
        _pairs(
            memory=frequency["memory_mhz"],
            aicore=frequency["aicore_mhz"],
            aicore_maximum=frequency["aicore_maximum_mhz"],
            control=frequency["control_mhz"],
        )
    )
    yield f"temperature {board['temperature']['idle_c']}"
    if board["power"]["idle_deciwatt"] is not None:
        yield f"power {board['power']['idle_deciwatt']}"
    if npu.hccs_group is not None:
        yield f"hccs-group {npu.hccs_group}"
    if npu.ip is not None:
        yield f"ip {npu.ip}"
    if board.get("management_controller"):
        yield "management-controller yes"
    if board.get("sio"):
        yield "sio yes"
    if "ub_ports" in board:
        yield f"ub-ports {_pairs(**board['ub_ports'])}"
    said = {**machine.ascend.get("super_pod", {}), **(settings.library or {}).get(SUPER_POD, {})}
    if "id" in said:
        pod = {key: int(value) for key, value in said.items()}  # a template renders numbers as strings
        sdid = pod.get("server", 0) << _SERVER_BIT | npu.card << _MODULE_BIT | npu.chip << _DIE_BIT | npu.physical
        yield f"super-pod {_pairs(sdid=sdid, **pod)}"
    if "slicing" in board:
        yield from _slicing_lines(board["slicing"])


def render_npus(machine: Machine, catalogue: Catalogue, settings: NpuSettings) -> str:
    """Return the whole description of a machine's NPUs, one statement per line, for the library's ``load``."""
    statements: dict[str, Any] = {
        "driver-version": settings.driver_version,
        "dev-root": settings.dev_root,
        "sys-root": settings.sys_root,
        "etc-root": settings.etc_root,
        "slice-major": settings.slice_major,
    }
    for key in ("interface", "work_mode", "multi_die_policy", "unified_bus"):
        if key in machine.ascend:
            statements[key.replace("_", "-")] = machine.ascend[key]
    statements.update({key: value for key, value in (settings.library or {}).items() if key != SUPER_POD})
    lines = [f"# {machine.name}: {machine.product}", "format 1"]
    lines += [f"{key} {_word(value)}" for key, value in statements.items()]
    for device, npu in machine.chips:
        lines.append("npu")
        lines += ["  " + line for line in _npu_lines(machine, catalogue, device, npu, settings)]
    return "\n".join(lines) + "\n"
