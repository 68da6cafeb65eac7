# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parse PCI components and machines from the JSON files into validated, frozen values.

Each file names the sources of its figures under ``sources``: ``*`` applies to the whole file, every other key to its
field. A value marked *chosen* has no vendor source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .boards import Board, parse_board, parse_npu_board
from .documents import read_json, take
from .errors import DescriptionError

ADDRESS = re.compile(r"^(?P<domain>[0-9a-f]{4}):(?P<bus>[0-9a-f]{2}):(?P<device>[01][0-9a-f])\.(?P<function>[0-7])$")
ROOT_BUS = re.compile(r"^pci(?P<domain>[0-9a-f]{4}):(?P<bus>[0-9a-f]{2})$")
MAXIMUM_GPUS = 32
# Directories of machine profiles: those with GPUs, and those with only NPUs
MACHINE_FOLDERS = ("machines", "ascend/machines")
# Name of the NPU driver
NPU_DRIVER = "devdrv_device_driver"


@dataclass(frozen=True)
class Component:
    """A PCI function other than an accelerator: bridge, NIC, or NVSwitch."""

    key: str
    name: str
    kind: str
    pci: Mapping[str, Any]
    driver: str


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node: its CPU list (kernel notation) and its distance to each node, in node order."""

    node: int
    cpus: str
    distances: tuple[int, ...]


@dataclass(frozen=True)
class Npu:
    """The position of a chip: its card, its index on the card, and its number on the host."""

    card: int
    chip: int
    physical: int
    hccs_group: int | None = None
    ip: str | None = None


@dataclass(frozen=True)
class Device:
    """One PCI function of a machine. ``path`` holds the sysfs components from the root bus to the function itself."""

    address: str
    kind: str
    path: tuple[str, ...]
    numa: int
    board: str | None = None
    component: str | None = None
    minor: int | None = None
    module: int | None = None
    memory_numa: int | None = None
    interface: str | None = None
    rdma: str | None = None
    npu: Npu | None = None

    @property
    def sort_key(self) -> tuple[int, ...]:
        """Return the sort key of the PCI bus order, which is the order of NVML's indexes."""
        return address_key(self.address)


@dataclass(frozen=True)
class Machine:
    """A server: its devices in PCI order, its NUMA nodes, and the links of its GPUs.

    ``ascend`` holds the common values of all its NPUs: ``interface``, ``work_mode``, ``multi_die_policy``,
    ``super_pod``, ``unified_bus``.
    """

    name: str
    product: str
    numa: tuple[NumaNode, ...]
    roots: tuple[tuple[str, int], ...]
    devices: tuple[Device, ...]
    nvlink: str | None
    nvlink_pairs: tuple[tuple[str, str], ...]
    fabric: Mapping[str, Any] | None
    ascend: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[Device, ...]:
        """Return the GPUs in the order of their indexes."""
        return tuple(device for device in self.devices if device.kind == "gpu")

    @property
    def npus(self) -> tuple[Device, ...]:
        """Return the NPUs in the order of the PCI bus."""
        return tuple(device for device in self.devices if device.kind == "npu")

    @property
    def chips(self) -> tuple[tuple[Device, Npu], ...]:
        """Return each NPU with its position."""
        return tuple((device, device.npu) for device in self.npus if device.npu is not None)

    @property
    def is_on_unified_bus(self) -> bool:
        """Return whether the NPUs have no PCI functions. Their addresses are then only names for control commands."""
        return bool(self.ascend.get("unified_bus"))

    @property
    def vendors(self) -> tuple[str, ...]:
        """Return the vendors of its accelerators."""
        return ("nvidia",) * bool(self.gpus) + ("ascend",) * bool(self.npus)

    def numa_node(self, number: int) -> NumaNode:
        """Return the NUMA node with this number."""
        return next(node for node in self.numa if node.node == number)


@dataclass(frozen=True)
class Catalogue:
    """The components of machines, by key."""

    boards: Mapping[str, Board]
    components: Mapping[str, Component]
    npu_boards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def pci(self, device: Device) -> tuple[Mapping[str, Any], str]:
        """Return a device's configuration space facts and the name of its driver."""
        if device.kind == "gpu":
            return self.boards[device.board or ""].pci, "nvidia"
        if device.kind == "npu":
            return self.npu_boards[device.board or ""]["pci"], NPU_DRIVER
        component = self.components[device.component or ""]
        return component.pci, component.driver


def address_key(address: str) -> tuple[int, ...]:
    """Return ``0000:1b:00.0`` as numbers (domain, bus, device, function)."""
    match = ADDRESS.match(address)
    if match is None:
        raise DescriptionError(f"PCI address {address!r}: expected dddd:bb:dd.f in lower-case hexadecimal")
    return tuple(int(match.group(part), 16) for part in ("domain", "bus", "device", "function"))


def _boards_in(folder: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield each board's key, its data, and its file. Raise a DescriptionError if the file name differs from the
    board's.
    """
    for path in sorted(folder.glob("*.json")):
        data = read_json(path)
        if data.get("board") != path.stem:
            raise DescriptionError(
                f"{path}: holds board {data.get('board')!r}, expected {path.stem!r} as the file is named"
            )
        yield path.stem, data, str(path)


def load_catalogue(folder: Path) -> Catalogue:
    """Load all boards in the subdirectories ``boards`` and ``ascend/boards``, and all components in components.json."""
    path = folder / "components.json"
    components = {
        key: Component(
            key=key,
            name=take(data, "name", str, str(path)),
            kind=take(data, "kind", str, str(path)),
            pci=data,
            driver=take(data, "driver", str, str(path)),
        )
        for key, data in read_json(path).items()
    }
    return Catalogue(
        boards={key: parse_board(data, where) for key, data, where in _boards_in(folder / "boards")},
        components=components,
        npu_boards={key: parse_npu_board(data, where) for key, data, where in _boards_in(folder / "ascend/boards")},
    )


def _walk(
    nodes: Sequence[Mapping[str, Any]], path: tuple[str, ...]
) -> Iterator[tuple[Mapping[str, Any], tuple[str, ...]]]:
    for node in nodes:
        here = (*path, str(node.get("address")))
        yield node, here
        yield from _walk(node.get("children", ()), here)


def _npu(entry: Mapping[str, Any], where: str) -> Npu:
    card, chip, physical = (take(entry, key, int, where) for key in ("card", "chip", "physical"))
    return Npu(card, chip, physical, entry.get("hccs_group"), entry.get("ip"))


def parse_machine(data: Mapping[str, Any], catalogue: Catalogue, where: str) -> Machine:
    """Return the machine of a machine file's content, validated against the catalog."""
    numa = tuple(
        NumaNode(node["node"], node["cpus"], tuple(node["distances"])) for node in take(data, "numa", list, where)
    )
    numbers = [node.node for node in numa]
    for node in numa:
        if len(node.distances) != len(numa) or node.distances[numbers.index(node.node)] != 10:
            raise DescriptionError(
                f"{where}: NUMA node {node.node} has distances {list(node.distances)}, "
                "expected one for each node and 10 to itself"
            )
    roots: list[tuple[str, int]] = []
    devices: list[Device] = []
    for root in take(data, "roots", list, where):
        bus, node = take(root, "bus", str, where), take(root, "numa", int, where)
        match = ROOT_BUS.match(bus)
        if match is None or node not in numbers:
            raise DescriptionError(
                f"{where}: root {bus!r} on NUMA node {node!r}, expected pcidddd:bb and one of {numbers}"
            )
        roots.append((bus, node))
        for entry, path in _walk(take(root, "devices", list, where), (bus,)):
            address, kind = str(entry.get("address")), take(entry, "kind", str, where)
            key = address_key(address)
            if key[0] != int(match.group("domain"), 16):
                raise DescriptionError(f"{where}: {address} is under {bus} but in another domain")
            known: Mapping[str, Any] = {"gpu": catalogue.boards, "npu": catalogue.npu_boards}.get(
                kind, catalogue.components
            )
            model = take(entry, "board" if kind in ("gpu", "npu") else "model", str, where)
            if model not in known:
                raise DescriptionError(f"{where}: {address} is a {model!r}, expected one of {', '.join(sorted(known))}")
            devices.append(
                Device(
                    address=address,
                    kind=kind,
                    path=path,
                    numa=node,
                    board=model if kind in ("gpu", "npu") else None,
                    component=None if kind in ("gpu", "npu") else model,
                    minor=take(entry, "minor", int, where) if kind == "gpu" else None,
                    module=entry.get("module"),
                    memory_numa=entry.get("memory_numa"),
                    interface=entry.get("interface"),
                    rdma=entry.get("rdma"),
                    npu=_npu(entry, where) if kind == "npu" else None,
                )
            )
    devices.sort(key=lambda device: device.sort_key)
    addresses = [device.address for device in devices]
    minors = [device.minor for device in devices if device.minor is not None]
    numbers_of_npus = [device.npu.physical for device in devices if device.npu is not None]
    for what, values in (
        ("PCI address", addresses),
        ("device minor", minors),
        ("physical id", numbers_of_npus),
        ("root bus", [bus for bus, _node in roots]),
    ):
        if len(set(values)) != len(values):
            raise DescriptionError(f"{where}: a {what} occurs twice in {values}")
    if not (minors or numbers_of_npus) or any(minor not in range(MAXIMUM_GPUS) for minor in minors):
        raise DescriptionError(
            f"{where}: GPUs with minors {minors} and {len(numbers_of_npus)} NPUs, "
            f"expected GPUs with minors below {int(MAXIMUM_GPUS)}, NPUs, or both"
        )
    pairs = tuple((str(pair[0]), str(pair[1])) for pair in data.get("nvlink_pairs", ()))
    for address in [address for pair in pairs for address in pair]:
        if not any(device.address == address and device.kind == "gpu" for device in devices):
            raise DescriptionError(f"{where}: nvlink_pairs names {address}, which is no GPU of this machine")
    return Machine(
        name=take(data, "machine", str, where),
        product=take(data, "product", str, where),
        numa=numa,
        roots=tuple(sorted(roots)),
        devices=tuple(devices),
        nvlink=data.get("nvlink"),
        nvlink_pairs=pairs,
        fabric=data.get("fabric"),
        ascend={
            key: data[key]
            for key in ("interface", "work_mode", "multi_die_policy", "super_pod", "unified_bus")
            if key in data
        },
    )


def machine_names(folder: Path) -> list[str]:
    """Return the names of the existing machine profiles, sorted."""
    return sorted(path.stem for each in MACHINE_FOLDERS for path in (folder / each).glob("*.json"))


def load_machine(folder: Path, name: str, catalogue: Catalogue) -> Machine:
    """Load the machine profile with this name. The error for an unknown one lists the known names."""
    path = next((path for each in MACHINE_FOLDERS if (path := folder / each / f"{name}.json").is_file()), None)
    if path is None:
        raise DescriptionError(
            f"machine profile {name!r} is unknown, expected one of {', '.join(machine_names(folder))}"
        )
    data = read_json(path)
    if not data.get("sources", {}).get("*"):
        raise DescriptionError(f"{path}: sources has no * entry that says where the figures come from")
    machine = parse_machine(data, catalogue, str(path))
    if machine.name != name:
        raise DescriptionError(f"{path}: holds machine {machine.name!r}, expected {name!r} as the file is named")
    return machine
