# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read GPUs and their MIG instances from NVML and the kernel, as objects of the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ...errors import AcceleratorError, InvalidLayout, NotFound, NotPermitted, Unsupported
from ...host import pci
from ...host.passthrough import IOMMU_NODE
from ...host.system import System
from ...model import (
    AttributeValue,
    Device,
    Health,
    Partition,
    Partitioning,
    Passthrough,
    Placement,
    Process,
    Profile,
    Version,
    frozen,
)
from . import profiles as profile_names
from . import sysfs
from .board_facts import BoardFacts, ComputeProfile, DriverFacts, ModeFacts
from .fabric.fabric import read_links
from .nvml import COMPUTE_INSTANCE_PROFILES, ENGINE_PROFILE_SHARED, GPU_INSTANCE_PROFILES, NO_INSTANCE, Nvml, text

LOG = logging.getLogger(__name__)

TEMPERATURE_SENSOR = 0  # NVML_TEMPERATURE_GPU

MEBIBYTE = 1024 * 1024

_BRANDS: Mapping[int, str] = MappingProxyType(
    {
        1: "Quadro",
        2: "Tesla",
        3: "NVS",
        4: "Grid",
        5: "GeForce",
        6: "Titan",
        7: "NvidiaVApps",
        8: "NvidiaVPC",
        9: "NvidiaVCS",
        10: "NvidiaVWS",
        11: "NvidiaCloudGaming",
        12: "QuadroRTX",
        13: "NvidiaRTX",
        14: "Nvidia",
        15: "GeForceRTX",
        16: "TitanRTX",
    }
)
_ADDRESSING_MODES: Mapping[int, str] = MappingProxyType({0: "None", 1: "HMM", 2: "ATS"})
_FIRST_WITHOUT_RESET = (9, 0)  # from Hopper on, a change of the MIG mode needs no reset
_FIRST_RESET_ALONE = (
    8,
    0,
)  # earlier GPUs are reset together with the GPUs that NVLink connects: manual of nvidia-smi, --gpu-reset


def read_driver(nvml: Nvml) -> DriverFacts:
    """Return the versions of the driver and of its CUDA."""
    version = str(nvml.call("nvmlSystemGetDriverVersion", doing="Reading the driver's version"))
    cuda = int(nvml.call("nvmlSystemGetCudaDriverVersion_v2", doing="Reading the CUDA version"))
    cuda_version = f"{cuda // 1000}.{cuda % 1000 // 10}"
    attributes: dict[str, Version] = {}
    for name, spelled in (("driverVersion", version), ("cudaDriverVersion", cuda_version)):
        found = Version.coerce_or_none(spelled)
        if found is None:
            LOG.warning("GPUs are published without %s: %r is not a version, expected numbers with dots", name, spelled)
        else:
            attributes[name] = found
    return DriverFacts(version, cuda_version, MappingProxyType(attributes))


def architecture(major: int, minor: int) -> str:
    """Return the architecture name of a CUDA compute capability."""
    if major == 7:
        return "Volta" if minor < 5 else "Turing"
    if major == 8:
        return "Ampere" if minor < 9 else "Ada Lovelace"
    names = {1: "Tesla", 2: "Fermi", 3: "Kepler", 5: "Maxwell", 6: "Pascal", 9: "Hopper", 10: "Blackwell"}
    return names.get(major, "Blackwell" if major in (11, 12) else "Unknown")


def read_minor(nvml: Nvml, handle: Any, doing: str) -> int:
    """Return the minor number of a GPU's device node. A change of the MIG mode can change it."""
    return int(nvml.call("nvmlDeviceGetMinorNumber", handle, doing=doing))


def read_board(nvml: Nvml, system: System, handle: Any, driver: DriverFacts) -> BoardFacts:
    """Read the fixed facts of a GPU, except its profiles. Raises DeviceFaulty or AcceleratorError."""
    uuid = str(nvml.call("nvmlDeviceGetUUID", handle, doing="Reading a GPU's UUID"))
    doing = f"Reading the facts of GPU {uuid}"
    address = nvml.call("nvmlDeviceGetPciInfo_v3", handle, doing=doing)
    bus_id = pci.normalise_bus_id(text(address.busId))
    product = str(nvml.call("nvmlDeviceGetName", handle, doing=doing))
    memory = nvml.optional("nvmlDeviceGetMemoryInfo", handle, doing=doing)  # None if it is the host's memory
    memory_bytes = int(memory.total) if memory is not None else 0
    major, minor = nvml.call("nvmlDeviceGetCudaComputeCapability", handle, doing=doing)
    root, node = pci.pcie_root(system, bus_id), pci.numa_node(system, bus_id)
    attributes: dict[str, AttributeValue] = {
        "productName": product,
        "brand": _BRANDS.get(nvml.optional("nvmlDeviceGetBrand", handle, default=0, doing=doing), "Unknown"),
        "architecture": architecture(major, minor),
        "cudaComputeCapability": Version(f"{major}.{minor}.0"),
        **driver.attributes,
        "resource.kubernetes.io/pciBusID": bus_id,
    }
    if root is not None:
        attributes["resource.kubernetes.io/pcieRoot"] = root
    if node is not None:
        attributes["resource.kubernetes.io/numaNode"] = node
    mode = nvml.optional("nvmlDeviceGetAddressingMode", handle, doing=doing)
    if mode in _ADDRESSING_MODES:
        attributes["addressingMode"] = _ADDRESSING_MODES[mode]
    # From Hopper on, GPUs report whether they have joined an NVSwitch fabric.
    module = nvml.number("nvmlDeviceGetModuleId", handle, doing=doing)
    linked, switched = read_links(nvml, handle, doing) if (major, minor) < _FIRST_WITHOUT_RESET else ((), False)
    return BoardFacts(
        handle=handle,
        index=int(nvml.call("nvmlDeviceGetIndex", handle, doing=doing)),
        minor=read_minor(nvml, handle, doing),
        uuid=uuid,
        product=product,
        pci_address=bus_id,
        pci_device_id=int(address.pciDeviceId),
        pci_subsystem_id=int(address.pciSubSystemId),
        pcie_root=root,
        numa_node=node,
        memory_bytes=memory_bytes,
        needs_reset=(major, minor) < _FIRST_WITHOUT_RESET,
        attributes=MappingProxyType(attributes),
        linked=linked,
        resets_alone=(major, minor) >= _FIRST_RESET_ALONE,
        passthrough=read_passthrough(system, bus_id),
        driver_version=driver.driver_version,
        switched=switched,
        module=module,
    )


def read_passthrough(system: System, address: str) -> Passthrough | None:
    """Return the facts of a GPU that can be passed through to a virtual machine; None without an IOMMU."""
    addresses = sysfs.gpus_on_the_bus(system)
    if pci.iommu_group(system, address) is None or address not in addresses:
        return None
    return Passthrough(
        number=addresses.index(address),
        memory_bytes=pci.memory_regions(system, address),
        iommufd=system.device_number(IOMMU_NODE) is not None,
    )


def read_profiles(nvml: Nvml, handle: Any, memory_bytes: int, pci_device_id: int) -> tuple[Profile, ...]:
    """Return the MIG profiles that NVML reports for a GPU. Empty if the board, its mode, or the driver reports none."""
    found: list[Profile] = []
    for number in range(GPU_INSTANCE_PROFILES):
        info = _profile_info(nvml, handle, number)
        if info is None or any(profile.profile_id == info.id for profile in found):
            continue  # not supported, or a second number of a profile that was found already
        placements = _placements(nvml, handle, info.id)
        if not placements:
            continue
        megabytes = int(info.memorySizeMB)
        name = text(getattr(info, "name", b"")) or profile_names.computed_name(
            number, info.sliceCount, megabytes, memory_bytes
        )
        name = name.removeprefix("MIG ")
        capacities = {
            "multiprocessors": info.multiprocessorCount,
            "copyEngines": info.copyEngineCount,
            "decoders": info.decoderCount,
            "encoders": info.encoderCount,
            "jpegEngines": info.jpegCount,
            "ofaEngines": info.ofaCount,
            "memory": megabytes * MEBIBYTE,
        }
        found.append(
            Profile(
                name=name,
                profile_id=int(info.id),
                memory_bytes=megabytes * MEBIBYTE,
                capacities=frozen(capacities),
                attributes=MappingProxyType({}),
                placements=placements,
                maximum=profile_names.maximum_of(info.id, info.instanceCount, placements, pci_device_id),
                compute_slices=int(info.sliceCount),
                number=number,
                aliases=_aliases(name),
            )
        )
    return tuple(found)


def read_device(
    nvml: Nvml, system: System, board: BoardFacts, known: Sequence[Partition] | None, health: Health
) -> Device:
    """Read the changing facts of a GPU except its health, and return them with all other facts.

    ``known`` are the partitions if they cannot have changed; then they are not read. Raises DeviceFaulty or
    AcceleratorError.
    """
    partitioning = settle(nvml, board)
    holders = read_processes(nvml, system, board.handle, board.uuid)
    partitions: tuple[Partition, ...] = ()
    if partitioning.enabled and known is not None:
        partitions = tuple(replace(each, processes=holders.get(each.instance_id, ())) for each in known)
    elif partitioning.enabled:
        partitions = read_partitions(nvml, board, holders)
    return Device(
        vendor="nvidia",
        index=board.index,
        minor=board.minor,
        uuid=board.uuid,
        product=board.product,
        pci_address=board.pci_address,
        pcie_root=board.pcie_root,
        numa_node=board.numa_node,
        memory_bytes=board.memory_bytes,
        memory_slices=board.memory_slices,
        attributes=board.attributes,
        capacities=frozen({"memory": board.memory_bytes} if board.memory_bytes else {}),
        partitioning=partitioning,
        profiles=board.profiles,
        partitions=partitions,
        processes=tuple(process for each in holders.values() for process in each),
        pci_device_id=board.pci_device_id,
        pci_subsystem_id=board.pci_subsystem_id,
        linked=board.linked,
        resets_alone=board.resets_alone,
        passthrough=board.passthrough,
        driver_version=board.driver_version,
        clique=board.clique,
        switched=board.switched,
        module=board.module,
        name_number=board.name_number,
        health=health,
    )


def probe(nvml: Nvml, handle: Any, uuid: str) -> None:
    """Make a call that the GPU itself must answer.

    The driver answers other calls, such as that for modes, from its memory.

    GPUs that share the host's memory do not report memory, so the call reads their temperature. Raises DeviceFaulty or
    AcceleratorError.
    """
    doing = f"Asking GPU {uuid}"
    if nvml.optional("nvmlDeviceGetMemoryInfo", handle, doing=doing) is None:
        nvml.optional("nvmlDeviceGetTemperature", handle, TEMPERATURE_SENSOR, doing=doing)


def read_partitioning(nvml: Nvml, board: BoardFacts) -> Partitioning:
    """Return the MIG mode of a GPU, now and after the next reset."""
    try:
        current, pending = nvml.call(
            "nvmlDeviceGetMigMode", board.handle, doing=f"Reading the MIG mode of {board.uuid}"
        )
    except Unsupported:
        return Partitioning(supported=False)
    partitioning = Partitioning(True, bool(current), bool(pending), board.needs_reset)
    board.last_mode = (time.monotonic(), partitioning)
    return partitioning


def read_processes(nvml: Nvml, system: System, handle: Any, uuid: str) -> dict[int | None, tuple[Process, ...]]:
    """Return the processes that use a GPU, by the ID of their GPU instance; None for the GPU itself."""
    found: dict[int | None, dict[int, Process]] = {}
    for function in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"):
        try:
            running = nvml.optional(function, handle, default=(), doing=f"Reading the processes of {uuid}")
        except NotPermitted:
            running = ()
        for each in running:
            instance = getattr(each, "gpuInstanceId", None)
            key = None if instance in (None, NO_INSTANCE) else int(instance)
            found.setdefault(key, {})[each.pid] = Process(each.pid, _command(system, each.pid))
    return {key: tuple(by_pid[pid] for pid in sorted(by_pid)) for key, by_pid in found.items()}


def settle(nvml: Nvml, board: BoardFacts, seconds: float = 0.0) -> Partitioning:
    """Return the MIG mode of a GPU, read at most ``seconds`` ago, and store the profiles of that mode in its facts."""
    last = board.last_mode
    is_new = last is not None and time.monotonic() - last[0] < seconds
    partitioning = last[1] if last is not None and is_new else read_partitioning(nvml, board)
    if partitioning.supported:
        _settle_profiles(nvml, board, partitioning.enabled)
    return partitioning


def read_partitions(
    nvml: Nvml, board: BoardFacts, holders: Mapping[int | None, tuple[Process, ...]]
) -> tuple[Partition, ...]:
    """Return the existing GPU instances, ordered by start."""
    found: list[Partition] = []
    doing = f"Listing the GPU instances of {board.uuid}"
    for profile in board.profiles:
        for instance in nvml.listed(
            "nvmlDeviceGetGpuInstances",
            "c_nvmlGpuInstance_t",
            len(profile.placements),
            board.handle,
            profile.profile_id,
            doing=doing,
        ):
            try:
                found.append(read_partition(nvml, board, profile, instance, holders))
            except NotFound:
                continue  # another program has destroyed it since the list was read
    return tuple(sorted(found, key=lambda partition: (partition.placement, partition.profile_id)))


def read_partition(
    nvml: Nvml,
    board: BoardFacts,
    profile: Profile,
    instance: Any,
    holders: Mapping[int | None, tuple[Process, ...]],
    compute: Sequence[tuple[ComputeProfile, Any]] | None = None,
) -> Partition:
    """Return one GPU instance with the compute instance that fills it.

    An instance without a compute instance, or with several, has no UUID here. ``compute`` are its compute instances
    with their profiles, if the caller has created them; otherwise they are listed.
    """
    doing = f"Reading a GPU instance of {board.uuid}"
    info = nvml.call("nvmlGpuInstanceGetInfo", instance, doing=doing)
    if compute is None:
        compute = compute_instances(nvml, board, profile, instance)
    uuid, compute_id = "", None
    if len(compute) == 1:
        kind, handle = compute[0]
        if kind.multiprocessors >= full_profile(board.compute_profiles[profile.profile_id], profile).multiprocessors:
            details = nvml.call("nvmlComputeInstanceGetInfo_v2", handle, doing=doing)
            uuid, compute_id = str(nvml.call("nvmlDeviceGetUUID", details.device, doing=doing)), int(details.id)
    return Partition(
        uuid=uuid,
        profile=profile.name,
        profile_id=profile.profile_id,
        placement=Placement(int(info.placement.start), int(info.placement.size)),
        instance_id=int(info.id),
        compute_instance_id=compute_id,
        memory_bytes=profile.memory_bytes,
        processes=holders.get(int(info.id), ()),
        compute_instances=len(compute),
        capacities=profile.capacities,
    )


def compute_profiles(nvml: Nvml, board: BoardFacts, profile_id: int, instance: Any) -> tuple[ComputeProfile, ...]:
    """Return the compute instance profiles of a GPU instance profile. They are read once per profile."""
    known = board.compute_profiles.get(profile_id)
    if known is not None:
        return known
    found: list[ComputeProfile] = []
    for number in range(COMPUTE_INSTANCE_PROFILES):
        info = _compute_profile_info(nvml, instance, number)
        if info is not None:
            found.append(ComputeProfile(info.id, info.multiprocessorCount, info.sliceCount, info.instanceCount))
    board.compute_profiles[profile_id] = tuple(found)
    return board.compute_profiles[profile_id]


def compute_instances(
    nvml: Nvml, board: BoardFacts, profile: Profile, instance: Any
) -> tuple[tuple[ComputeProfile, Any], ...]:
    """Return the compute instances of a GPU instance with their profiles.

    The profile that fills the instance is queried first. If one such compute instance exists, no space is left for
    others.
    """
    kinds = compute_profiles(nvml, board, profile.profile_id, instance)
    if not kinds:
        return ()
    full = full_profile(kinds, profile)
    found: list[tuple[ComputeProfile, Any]] = []
    for kind in (full, *(each for each in kinds if each != full)):
        handles = nvml.listed(
            "nvmlGpuInstanceGetComputeInstances",
            "c_nvmlComputeInstance_t",
            max(kind.maximum, 1),
            instance,
            kind.profile_id,
            doing=f"Listing the compute instances of a GPU instance of {board.uuid}",
        )
        found.extend((kind, handle) for handle in handles)
        if kind == full and handles:
            break
    return tuple(found)


def full_profile(kinds: tuple[ComputeProfile, ...], profile: Profile) -> ComputeProfile:
    """Return the compute instance profile that fills a GPU instance, by its multiprocessors.

    The number of slices is ambiguous: on an H100, a 1g.20gb is filled by the revision with 26 multiprocessors, not by
    the profile with one slice. Raises Unsupported without profiles.
    """
    if not kinds:
        raise Unsupported(f"The driver offers no compute instance for the profile {profile.name}")
    wanted = profile.capacities["multiprocessors"]
    exact = [kind for kind in kinds if kind.multiprocessors == wanted]
    return exact[0] if exact else max(kinds, key=lambda kind: (kind.multiprocessors, kind.slices))


def _settle_profiles(nvml: Nvml, board: BoardFacts, mode: bool) -> None:
    """Store the profiles of a MIG mode in the board's facts. They are read once for each mode."""
    if mode not in board.of_mode:
        profiles = read_profiles(nvml, board.handle, board.memory_bytes, board.pci_device_id)
        slices = max((each.end for profile in profiles for each in profile.placements), default=0)
        board.of_mode[mode] = ModeFacts(profiles, slices, {})
    board.mode = mode


def _profile_info(nvml: Nvml, handle: Any, number: int) -> Any:
    return _newest_answer(nvml, "nvmlDeviceGetGpuInstanceProfileInfo", handle, number)


def _compute_profile_info(nvml: Nvml, instance: Any, number: int) -> Any:
    function = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
    return _newest_answer(nvml, function, instance, number, ENGINE_PROFILE_SHARED)


def _newest_answer(nvml: Nvml, function: str, *arguments: Any) -> Any:
    """Query a profile in the newest structure version that the driver supports; None for an unsupported profile."""
    for version in (2, 1):
        try:
            return nvml.call(function, *arguments, version)
        except Unsupported as error:
            if version == 2 and error.code == "function-not-found":
                continue
            return None
        except AcceleratorError as error:
            if error.code == "invalid-argument":
                return None  # a profile that this driver does not support
            raise
    return None


def _placements(nvml: Nvml, handle: Any, profile_id: int) -> tuple[Placement, ...]:
    try:
        found = nvml.counted(
            "nvmlDeviceGetGpuInstancePossiblePlacements", "c_nvmlGpuInstancePlacement_t", handle, profile_id
        )
    except Unsupported:
        return ()
    return tuple(sorted(Placement(int(each.start), int(each.size)) for each in found))


def _aliases(name: str) -> tuple[str, ...]:
    try:
        return profile_names.aliases(name)
    except InvalidLayout:
        return ()  # a name in a newer form, used in its exact spelling


def _command(system: System, pid: int) -> str:
    try:
        return system.read_text(f"/proc/{pid}/comm").strip()
    except OSError:
        return ""
