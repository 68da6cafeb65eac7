# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Boards, PCI components and machines: from the JSON files to checked, frozen values.

Sources of the figures are named in each file under ``sources``: ``*`` speaks for the whole file, every other key for
the field that it names. A value marked *chosen* is ours, not the vendor's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DescriptionError

ADDRESS = re.compile(r"^(?P<domain>[0-9a-f]{4}):(?P<bus>[0-9a-f]{2}):(?P<device>[01][0-9a-f])\.(?P<function>[0-7])$")
ROOT_BUS = re.compile(r"^pci(?P<domain>[0-9a-f]{4}):(?P<bus>[0-9a-f]{2})$")
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
# NVML_POWER_PROFILE_* of nvml.h, in the order of their numbers, without those that no board of ours has
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
MAXIMUM_GPUS = 32
MAXIMUM_GPU_INSTANCE_PROFILES = 16


@dataclass(frozen=True)
class Profile:
    """One MIG profile of a board. Memory in MiB, placements in the board's memory slices."""

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
        """What follows the memory in the name: ``+me``, ``+gfx``, ``-me`` … or nothing."""
        match = re.match(r"^\d+g\.\d+gb(?P<attributes>.*)$", self.name)
        return match.group("attributes") if match else ""


@dataclass(frozen=True)
class Mig:
    """How a board partitions. ``mode_change`` is ``reset`` (pending until a reset) or ``immediate``."""

    mode_change: str
    mode_persistent: bool
    memory_slices: int
    compute_slices: int
    maximum_instances: int
    engines: Mapping[str, int]
    profiles: tuple[Profile, ...]

    @property
    def unit_multiprocessors(self) -> int:
        """Multiprocessors of one compute slice: those of the plain smallest profile."""
        return next(profile.multiprocessors for profile in self.profiles if profile.enum == 0)


@dataclass(frozen=True)
class Board:
    """One product. Groups that are only passed on keep the shape of the file."""

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


@dataclass(frozen=True)
class Component:
    """A PCI function that is not a GPU: bridge, NIC or NVSwitch."""

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

    @property
    def sort_key(self) -> tuple[int, ...]:
        """Order of the PCI bus, which is the order of NVML's indices."""
        return address_key(self.address)


@dataclass(frozen=True)
class Machine:
    """A server: its devices in PCI order, its NUMA nodes and how its GPUs are linked."""

    name: str
    product: str
    numa: tuple[NumaNode, ...]
    roots: tuple[tuple[str, int], ...]
    devices: tuple[Device, ...]
    nvlink: str | None
    nvlink_pairs: tuple[tuple[str, str], ...]
    fabric: Mapping[str, Any] | None

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs in the order of their indices."""
        return tuple(device for device in self.devices if device.kind == "gpu")

    def numa_node(self, number: int) -> NumaNode:
        """The NUMA node of that number."""
        return next(node for node in self.numa if node.node == number)


@dataclass(frozen=True)
class Catalogue:
    """Everything that machines are made of, by key."""

    boards: Mapping[str, Board]
    components: Mapping[str, Component]


def address_key(address: str) -> tuple[int, ...]:
    """``0000:1b:00.0`` as numbers (domain, bus, device, function)."""
    match = ADDRESS.match(address)
    if match is None:
        raise DescriptionError(f"PCI address {address!r}: expected dddd:bb:dd.f in lower-case hexadecimal")
    return tuple(int(match.group(part), 16) for part in ("domain", "bus", "device", "function"))


def profile_name(slices: int, memory_mib: int, total_mib: int, attributes: str = "") -> str:
    """The name that the driver's naming rule gives (nvidia.com's go-nvlib, ``mig_profile.go``).

    Shown gigabytes are the memory's eighths of the board, rounded up, times the board's GiB rounded up; halves round
    up.
    """
    eighths = -(-memory_mib * 8 // total_mib)
    gigabytes = int(eighths * -(-total_mib // 1024) / 8 + 0.5)
    return f"{slices}g.{gigabytes}gb{attributes}"


def read_json(path: Path) -> Any:
    """The content of a JSON file; a DescriptionError names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DescriptionError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DescriptionError(f"{path}: not JSON: {error}") from error


def _take(data: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    value = data.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DescriptionError(f"{where}: {key} is {value!r}, expected {getattr(kind, '__name__', kind)}")
    return value


def parse_profile(data: Mapping[str, Any], where: str) -> Profile:
    """One row of a board's profile table."""
    where = f"{where}, profile {data.get('name')}"
    placements = _take(data, "placements", dict, where)
    enum = GPU_INSTANCE_PROFILES.get(_take(data, "profile", str, where))
    if enum is None:
        raise DescriptionError(
            f"{where}: unknown profile {data['profile']!r}, expected one of {', '.join(GPU_INSTANCE_PROFILES)}"
        )
    numbers = {
        key: _take(data, key, int, where)
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
        name=_take(data, "name", str, where),
        enum=enum,
        starts=tuple(_take(placements, "starts", list, where)),
        size=_take(placements, "size", int, where),
        **numbers,
    )


def check_mig(mig: Mig, total_mib: int, multiprocessors: int, where: str) -> None:
    """Refuses a profile table that contradicts itself or the board; returns nothing."""
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


def parse_board(data: Mapping[str, Any], where: str) -> Board:
    """A board file's content, checked."""
    architecture, brand = _take(data, "architecture", str, where), _take(data, "brand", str, where)
    if architecture not in ARCHITECTURES:
        raise DescriptionError(f"{where}: architecture {architecture!r}, expected one of {', '.join(ARCHITECTURES)}")
    if brand not in BRANDS:
        raise DescriptionError(f"{where}: brand {brand!r}, expected one of {', '.join(BRANDS)}")
    if _take(data, "nvlink", dict, where).get("version") not in NVLINK_VERSIONS:
        raise DescriptionError(
            f"{where}: nvlink.version is {data['nvlink'].get('version')!r}, expected one of {sorted(NVLINK_VERSIONS)}"
        )
    workload_profiles = tuple(data.get("workload_profiles", ()))
    if unknown := [name for name in workload_profiles if name not in WORKLOAD_PROFILES]:
        raise DescriptionError(
            f"{where}: workload_profiles has {unknown[0]!r}, expected {', '.join(WORKLOAD_PROFILES)}"
        )
    pci, memory, multiprocessors = (
        _take(data, "pci", dict, where),
        _take(data, "memory", dict, where),
        _take(data, "multiprocessors", int, where),
    )
    for key in ("vendor", "device", "subsystem_vendor", "subsystem_device", "class"):
        if not HEXADECIMAL.match(str(pci.get(key))):
            raise DescriptionError(f"{where}: pci.{key} is {pci.get(key)!r}, expected 0x and hexadecimal digits")
    if not _take(data, "sources", dict, where).get("*"):
        raise DescriptionError(f"{where}: sources has no * entry that says where the figures come from")
    partition, mig = _take(data, "mig", dict, where), None
    if _take(partition, "capable", bool, where):
        mig = Mig(
            mode_change=_take(partition, "mode_change", str, where),
            mode_persistent=_take(partition, "mode_persistent", bool, where),
            memory_slices=_take(partition, "memory_slices", int, where),
            compute_slices=_take(partition, "compute_slices", int, where),
            maximum_instances=_take(partition, "maximum_instances", int, where),
            engines=_take(partition, "engines", dict, where),
            profiles=tuple(parse_profile(row, where) for row in _take(partition, "profiles", list, where)),
        )
        check_mig(mig, memory["total_mib"], multiprocessors, where)
    return Board(
        key=_take(data, "board", str, where),
        name=_take(data, "name", str, where),
        architecture=architecture,
        brand=brand,
        compute_capability=_take(data, "compute_capability", str, where),
        multiprocessors=multiprocessors,
        cores=_take(data, "cores", int, where),
        part=_take(data, "part", dict, where),
        pci=pci,
        memory=memory,
        power=_take(data, "power", dict, where),
        clocks=_take(data, "clocks", dict, where),
        temperature=_take(data, "temperature", dict, where),
        nvlink=_take(data, "nvlink", dict, where),
        ecc=_take(data, "ecc", bool, where),
        fabric_attached=_take(data, "fabric_attached", bool, where),
        mig=mig,
        workload_profiles=workload_profiles,
    )


def load_catalogue(folder: Path) -> Catalogue:
    """Every board of ``folder``/boards and every component of ``folder``/components.json."""
    boards: dict[str, Board] = {}
    for path in sorted((folder / "boards").glob("*.json")):
        board = parse_board(read_json(path), str(path))
        if board.key != path.stem:
            raise DescriptionError(f"{path}: holds board {board.key!r}, expected {path.stem!r} as the file is named")
        boards[board.key] = board
    path = folder / "components.json"
    components = {
        key: Component(
            key=key,
            name=_take(data, "name", str, str(path)),
            kind=_take(data, "kind", str, str(path)),
            pci=data,
            driver=_take(data, "driver", str, str(path)),
        )
        for key, data in read_json(path).items()
    }
    return Catalogue(boards=boards, components=components)


def _walk(
    nodes: Sequence[Mapping[str, Any]], path: tuple[str, ...]
) -> Iterator[tuple[Mapping[str, Any], tuple[str, ...]]]:
    for node in nodes:
        here = (*path, str(node.get("address")))
        yield node, here
        yield from _walk(node.get("children", ()), here)


def parse_machine(data: Mapping[str, Any], catalogue: Catalogue, where: str) -> Machine:
    """A machine file's content, checked against the catalogue."""
    numa = tuple(
        NumaNode(node["node"], node["cpus"], tuple(node["distances"])) for node in _take(data, "numa", list, where)
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
    for root in _take(data, "roots", list, where):
        bus, node = _take(root, "bus", str, where), _take(root, "numa", int, where)
        match = ROOT_BUS.match(bus)
        if match is None or node not in numbers:
            raise DescriptionError(
                f"{where}: root {bus!r} on NUMA node {node!r}, expected pcidddd:bb and one of {numbers}"
            )
        roots.append((bus, node))
        for entry, path in _walk(_take(root, "devices", list, where), (bus,)):
            address, kind = str(entry.get("address")), _take(entry, "kind", str, where)
            key = address_key(address)
            if key[0] != int(match.group("domain"), 16):
                raise DescriptionError(f"{where}: {address} is under {bus} but in another domain")
            known = catalogue.boards if kind == "gpu" else catalogue.components
            model = _take(entry, "board" if kind == "gpu" else "model", str, where)
            if model not in known:
                raise DescriptionError(f"{where}: {address} is a {model!r}, expected one of {', '.join(sorted(known))}")
            devices.append(
                Device(
                    address=address,
                    kind=kind,
                    path=path,
                    numa=node,
                    board=model if kind == "gpu" else None,
                    component=None if kind == "gpu" else model,
                    minor=_take(entry, "minor", int, where) if kind == "gpu" else None,
                    module=entry.get("module"),
                    memory_numa=entry.get("memory_numa"),
                    interface=entry.get("interface"),
                    rdma=entry.get("rdma"),
                )
            )
    devices.sort(key=lambda device: device.sort_key)
    addresses = [device.address for device in devices]
    minors = [device.minor for device in devices if device.minor is not None]
    for what, values in (
        ("PCI address", addresses),
        ("device minor", minors),
        ("root bus", [bus for bus, _node in roots]),
    ):
        if len(set(values)) != len(values):
            raise DescriptionError(f"{where}: a {what} occurs twice in {values}")
    if not 1 <= len(minors) <= MAXIMUM_GPUS or not all(0 <= minor < MAXIMUM_GPUS for minor in minors):
        raise DescriptionError(
            f"{where}: GPUs with minors {minors}, expected 1 to {int(MAXIMUM_GPUS)} GPUs with minors below that"
        )
    pairs = tuple((str(pair[0]), str(pair[1])) for pair in data.get("nvlink_pairs", ()))
    for address in [address for pair in pairs for address in pair]:
        if not any(device.address == address and device.kind == "gpu" for device in devices):
            raise DescriptionError(f"{where}: nvlink_pairs names {address}, which is no GPU of this machine")
    return Machine(
        name=_take(data, "machine", str, where),
        product=_take(data, "product", str, where),
        numa=numa,
        roots=tuple(sorted(roots)),
        devices=tuple(devices),
        nvlink=data.get("nvlink"),
        nvlink_pairs=pairs,
        fabric=data.get("fabric"),
    )


def load_machine(folder: Path, name: str, catalogue: Catalogue) -> Machine:
    """The machine profile ``name`` of ``folder``/machines; an unknown one is answered with the list of known ones."""
    path = folder / "machines" / (name + ".json")
    if not path.is_file():
        known = sorted(entry.stem for entry in (folder / "machines").glob("*.json"))
        raise DescriptionError(f"machine profile {name!r} is unknown, expected one of {', '.join(known)}")
    machine = parse_machine(read_json(path), catalogue, str(path))
    if machine.name != name:
        raise DescriptionError(f"{path}: holds machine {machine.name!r}, expected {name!r} as the file is named")
    return machine
