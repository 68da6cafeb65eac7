# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the facts of the driver and of GPUs from NVML and the kernel, as objects of the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ...errors import NotPermitted
from ...host import pci
from ...host.passthrough import IOMMU_NODE
from ...host.system import System
from ...model import Device, Health, Partition, Passthrough, Process, Version, frozen
from ..host_texts import text_or_empty
from . import sysfs
from .attributes import FixedFacts, read_attributes
from .board_facts import BoardFacts, DriverFacts
from .fabric.fabric import read_links
from .mig_reader import read_partitions, update_mig_mode
from .nvml import NO_INSTANCE, Nvml, text

LOG = logging.getLogger(__name__)

TEMPERATURE_SENSOR = 0  # NVML_TEMPERATURE_GPU

# CUDA compute capabilities. From Hopper (9.0) on, a change of the MIG mode needs no reset.
_FIRST_WITHOUT_RESET = (9, 0)
# Earlier GPUs are reset together with the GPUs that NVLink connects: manual of nvidia-smi, --gpu-reset.
_FIRST_RESET_ALONE = (8, 0)


def read_driver(nvml: Nvml) -> DriverFacts:
    """Return the versions of the driver and of its CUDA."""
    version = str(nvml.call("nvmlSystemGetDriverVersion", doing="Reading the driver's version"))
    cuda = int(nvml.call("nvmlSystemGetCudaDriverVersion_v2", doing="Reading the CUDA version"))
    cuda_version = f"{cuda // 1000}.{cuda % 1000 // 10}"
    attributes: dict[str, Version] = {}
    for name, reported in (("driverVersion", version), ("cudaDriverVersion", cuda_version)):
        parsed = Version.coerce_or_none(reported)
        if parsed is None:
            LOG.warning(
                "GPUs are published without %s: %r is not a version, expected numbers with dots", name, reported
            )
        else:
            attributes[name] = parsed
    return DriverFacts(version, cuda_version, MappingProxyType(attributes))


def read_minor(nvml: Nvml, handle: Any, doing: str) -> int:
    """Return the minor number of a GPU's device node. A change of the MIG mode can change it."""
    return int(nvml.call("nvmlDeviceGetMinorNumber", handle, doing=doing))


def read_board(nvml: Nvml, system: System, handle: Any, driver: DriverFacts) -> BoardFacts:
    """Read the fixed facts of a GPU, except its profiles. Raises DeviceFaulty or AcceleratorError."""
    uuid = str(nvml.call("nvmlDeviceGetUUID", handle, doing="Reading a GPU's UUID"))
    doing = f"Reading the facts of GPU {uuid}"
    address = nvml.call("nvmlDeviceGetPciInfo_v3", handle, doing=doing)
    bus_id = pci.normalize_address(text(address.busId))
    product = str(nvml.call("nvmlDeviceGetName", handle, doing=doing))
    memory = nvml.optional("nvmlDeviceGetMemoryInfo", handle, doing=doing)  # None if it is the host's memory
    memory_bytes = int(memory.total) if memory is not None else 0
    major, minor = nvml.call("nvmlDeviceGetCudaComputeCapability", handle, doing=doing)
    root, node = pci.pcie_root(system, bus_id), pci.numa_node(system, bus_id)
    fixed = FixedFacts(product, (major, minor), bus_id, root, node)
    attributes = {**read_attributes(nvml, handle, fixed, doing), **driver.attributes}
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


def read_device(
    nvml: Nvml, system: System, board: BoardFacts, known: Sequence[Partition] | None, health: Health
) -> Device:
    """Read the changing facts of a GPU except its health, and return them with all other facts.

    ``known`` are the partitions if they cannot have changed; then they are not read. Raises DeviceFaulty or
    AcceleratorError.
    """
    partitioning = update_mig_mode(nvml, board)
    processes = read_processes(nvml, system, board.handle, board.uuid)
    partitions: tuple[Partition, ...] = ()
    if partitioning.enabled and known is not None:
        partitions = tuple(replace(each, processes=processes.get(each.instance_id, ())) for each in known)
    elif partitioning.enabled:
        partitions = read_partitions(nvml, board, processes)
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
        processes=tuple(process for each in processes.values() for process in each),
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

    The driver answers other calls, such as the query of modes, from its memory.

    GPUs that share the host's memory do not report memory, so the call reads their temperature. Raises DeviceFaulty or
    AcceleratorError.
    """
    doing = f"Querying GPU {uuid}"
    if nvml.optional("nvmlDeviceGetMemoryInfo", handle, doing=doing) is None:
        nvml.optional("nvmlDeviceGetTemperature", handle, TEMPERATURE_SENSOR, doing=doing)


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
            found.setdefault(key, {})[each.pid] = Process(each.pid, text_or_empty(system, f"/proc/{each.pid}/comm"))
    return {key: tuple(by_pid[pid] for pid in sorted(by_pid)) for key, by_pid in found.items()}
