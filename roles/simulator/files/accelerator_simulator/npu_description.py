# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Machines with NPUs: from the JSON files in ``ascend`` to the text that the simulated libdcmi loads (``dcmi/MACHINE_FORMAT.md``)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DescriptionError
from .hardware import read_json

RESOURCES = ("aicore", "aicpu", "vpc", "venc", "vdec", "jpegd", "jpege", "pngd")
# A die of a super-pod: its number is made of the server's and of the die's place in it (chosen).
DIES_PER_SERVER = 16


@dataclass(frozen=True)
class NpuSettings:
    """What one installation adds to a machine profile.

    ``identity`` is any text that differs between machines: serial numbers and die ids follow from it. ``library`` holds
    further statements for the whole machine, such as ``{"guard-destroy": True}``; it wins over what the machine says.
    """

    identity: str
    driver_version: str
    dev_root: str = "/dev"
    sys_root: str = "/sys"
    etc_root: str = "/etc"
    library: Mapping[str, Any] | None = None


def die_id(identity: str, kind: str, address: str) -> str:
    """The 40 hexadecimal digits of a die at an address of the machine with that identity; the same ones every time."""
    return hashlib.sha256(f"{identity}/{kind}/{address}".encode()).hexdigest()[:40]


def card_serial(identity: str, card: int) -> str:
    """A serial number of 20 characters."""
    digest = hashlib.sha256(f"{identity}/card/{card}".encode()).hexdigest()
    return f"1023{int(digest, 16) % 10**16:016d}"


def load_npu_machine(folder: Path, name: str) -> dict[str, Any]:
    """The machine profile of ``folder``/ascend/machines, with the boards it is made of under ``boards``."""
    path = folder / "ascend/machines" / f"{name}.json"
    if not path.is_file():
        known = sorted(entry.stem for entry in (folder / "ascend/machines").glob("*.json"))
        raise DescriptionError(f"machine profile {name!r} is unknown, expected one of {', '.join(known)}")
    machine: dict[str, Any] = read_json(path)
    if machine.get("machine") != name:
        raise DescriptionError(
            f"{path}: holds machine {machine.get('machine')!r}, expected {name!r} as the file is named"
        )
    machine["boards"] = {}
    for key in {entry["board"] for entry, _path, _numa in npus(machine)}:
        board_path = folder / "ascend/boards" / f"{key}.json"
        board = read_json(board_path)
        for data, where in ((board, board_path), (machine, path)):
            if not data.get("sources", {}).get("*"):
                raise DescriptionError(f"{where}: sources has no * entry that says where the figures come from")
        machine["boards"][key] = board
    return machine


def npus(machine: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], tuple[str, ...], int]]:
    """Every chip in the order of the PCI bus, with the components of its sysfs path and its NUMA node."""

    def walk(nodes: Any, path: tuple[str, ...], numa: int) -> Iterator[tuple[Mapping[str, Any], tuple[str, ...], int]]:
        for node in nodes:
            here = (*path, str(node["address"]))
            if node["kind"] == "npu":
                yield node, here, numa
            yield from walk(node.get("children", ()), here, numa)

    for root in machine["roots"]:
        yield from walk(root["devices"], (root["bus"],), root["numa"])


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
    machine: Mapping[str, Any], entry: Mapping[str, Any], path: tuple[str, ...], numa: int, settings: NpuSettings
) -> Iterator[str]:
    board = machine["boards"][entry["board"]]
    address, pci, memory, frequency = entry["address"], board["pci"], board["memory"], board["frequency"]
    for key in ("type", "name", "version", "product", "model", "manufacturer"):
        yield f"{key} {board[key]}"
    yield f"npu-name {board['npu_name']}"
    yield f"serial {card_serial(settings.identity, entry['card'])}"
    for key in ("card", "chip", "physical"):
        yield f"{key} {entry[key]}"
    yield f"aicores {board['aicores']}"
    yield f"ids {_pairs(**board['ids'], slot=entry['card'])}"
    yield f"pci-address {address}"
    yield f"pci-device-id {pci['device']}{pci['vendor'][2:]}"
    yield f"pci-subsystem-id {pci['subsystem_device']}{pci['subsystem_vendor'][2:]}"
    yield f"pci-path {'/'.join(path)}"
    yield f"numa-node {numa}"
    yield "cpu-affinity {}".format({node["node"]: node["cpus"] for node in machine["numa"]}[numa])
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
    if "hccs_group" in entry:
        yield f"hccs-group {entry['hccs_group']}"
    if "ip" in entry:
        yield f"ip {entry['ip']}"
    if board.get("management_controller"):
        yield "management-controller yes"
    if board.get("sio"):
        yield "sio yes"
    if "super_pod" in machine:
        pod = machine["super_pod"]
        yield f"super-pod {_pairs(sdid=pod['server'] * DIES_PER_SERVER + entry['physical'], **pod)}"
    if "slicing" in board:
        yield from _slicing_lines(board["slicing"])


def render_npus(machine: Mapping[str, Any], settings: NpuSettings) -> str:
    """The whole description of a machine, one statement a line, ready for the library's ``load``."""
    statements = {
        "driver-version": settings.driver_version,
        "dev-root": settings.dev_root,
        "sys-root": settings.sys_root,
        "etc-root": settings.etc_root,
    }
    for key in ("interface", "work_mode", "multi_die_policy"):
        if key in machine:
            statements[key.replace("_", "-")] = machine[key]
    statements.update(settings.library or {})
    lines = [f"# {machine['machine']}: {machine['product']}", "format 1"]
    lines += [f"{key} {_word(value)}" for key, value in statements.items()]
    for entry, path, numa in npus(machine):
        lines.append("npu")
        lines += ["  " + line for line in _npu_lines(machine, entry, path, numa, settings)]
    return "\n".join(lines) + "\n"
