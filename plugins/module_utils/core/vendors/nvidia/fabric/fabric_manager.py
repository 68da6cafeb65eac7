# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Calls to the fabric manager of NVSwitch hosts in shared-NVSwitch mode: read, activate, and deactivate its GPU partitions.

Facts: NVIDIA's Fabric Manager User Guide, "Fabric Manager SDK" and "Fabric Manager Config File"; the library is
libnvfm.so.1 of the package nvidia-fabricmanager. The first field of each structure contains its size and version. From
H100 on, the fabric manager identifies a GPU by its physical ID only, which equals NVML's module ID. UUID and PCI
address are empty there, or the address is all zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from ....errors import AcceleratorError, BackendUnavailable, FabricRejected, InUse
from ....host import pci
from ....host.system import System
from ....model import Device
from ....texts import join_problems

LOG = logging.getLogger(__name__)

CONFIGURATION = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
LIBRARY = "libnvfm.so.1"
BARE_METAL, SHARED_NVSWITCH = "0", "1"
CONNECT_MILLISECONDS = 5000
#: Seconds. The last list of partitions is valid for this time while the fabric manager does not answer. The list
#: depends on the baseboard. Otherwise each restart of the fabric manager would change the ResourceSlices twice.
KNOWN_SECONDS = 600.0

# Return values, fmReturn_t.
SUCCESS, BADPARAM, GENERIC_ERROR, NOT_SUPPORTED, UNINITIALIZED = 0, -1, -2, -3, -4
TIMEOUT, VERSION_MISMATCH, IN_USE, NOT_CONFIGURED, CONNECTION_NOT_VALID, NVLINK_ERROR = -5, -6, -7, -8, -9, -10
#: The fabric manager failed to change a partition, or rejects the change. TIMEOUT is that of a GPU or of an NVSwitch.
REJECTIONS = frozenset({BADPARAM, GENERIC_ERROR, TIMEOUT, NVLINK_ERROR})
_WORDS: Mapping[int, str] = {
    BADPARAM: "it refused an argument",
    GENERIC_ERROR: "it met an error that it has no name for",
    NOT_SUPPORTED: "it does not run in shared-NVSwitch mode",
    UNINITIALIZED: "the library is not initialized",
    TIMEOUT: "a GPU or an NVSwitch did not answer it in time",
    VERSION_MISMATCH: "the library and the fabric manager have different versions",
    IN_USE: "the partition, or a GPU of it, is in use",
    NOT_CONFIGURED: "it is still starting",
    CONNECTION_NOT_VALID: "it cannot be reached",
    NVLINK_ERROR: "an NVLink has an error",
}
_HINT = (
    "Check `systemctl status nvidia-fabricmanager` and /var/log/fabricmanager.log; its version must equal the driver's."
)

_MOST_TEXT, _MOST_UUID, _MOST_ADDRESS = 256, 80, 32
MOST_GPUS, MOST_PARTITIONS = 16, 64
#: The text by which the dynamic loader reports a missing library, because ctypes sets no errno.
_MISSING = os.strerror(errno.ENOENT)


class ConnectParameters(ctypes.Structure):
    """fmConnectParams_v1."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("addressInfo", ctypes.c_char * _MOST_TEXT),
        ("timeoutMs", ctypes.c_uint),
        ("addressIsUnixSocket", ctypes.c_uint),
    )


class GpuInfo(ctypes.Structure):
    """fmFabricPartitionGpuInfo_t."""

    _fields_ = (
        ("physicalId", ctypes.c_uint),
        ("uuid", ctypes.c_char * _MOST_UUID),
        ("pciBusId", ctypes.c_char * _MOST_ADDRESS),
        ("numNvLinksAvailable", ctypes.c_uint),
        ("maxNumNvLinks", ctypes.c_uint),
        ("nvlinkLineRateMBps", ctypes.c_uint),
    )


class PartitionInfo(ctypes.Structure):
    """fmFabricPartitionInfo_t."""

    _fields_ = (
        ("partitionId", ctypes.c_uint),
        ("isActive", ctypes.c_uint),
        ("numGpus", ctypes.c_uint),
        ("gpuInfo", GpuInfo * MOST_GPUS),
    )


class ActivatedList(ctypes.Structure):
    """fmActivatedFabricPartitionList_v1."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("numPartitions", ctypes.c_uint),
        ("partitionIds", ctypes.c_uint * MOST_PARTITIONS),
    )


class PartitionList(ctypes.Structure):
    """fmFabricPartitionList_v2."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("numPartitions", ctypes.c_uint),
        ("maxNumPartitions", ctypes.c_uint),
        ("partitionInfo", PartitionInfo * MOST_PARTITIONS),
    )


def version_of(structure: type[ctypes.Structure]) -> int:
    """Return the first field of a structure: MAKE_FM_PARAM_VERSION, with version 1 for all structures used here."""
    return ctypes.sizeof(structure) | 1 << 24


@dataclass(frozen=True)
class Member:
    """A GPU of a partition. ``uuid`` and ``pci_address`` are empty if the fabric manager does not return them."""

    physical_id: int
    uuid: str = ""
    pci_address: str = ""


@dataclass(frozen=True)
class FabricPartition:
    """GPUs that the switches connect with each other, and with no other GPU, while the partition is active."""

    number: int
    is_active: bool
    members: tuple[Member, ...]


class NoPartitions(BackendUnavailable):
    """The fabric has no partitions: the fabric manager runs in another mode, or its library is not installed."""


class NoFabricPartition(AcceleratorError):
    """The whole GPUs of a claim are not exactly one partition of the fabric."""

    default_code = "no-fabric-partition"


@dataclass(frozen=True)
class Options:
    """The fabric manager's configuration: its mode and its address.

    ``resumes`` is FABRIC_MODE_RESTART, see ``FabricManager``. ``is_bare_metal`` is the default mode, "bare metal or full
    passthrough", in which all switches serve all GPUs of the host.
    """

    is_shared: bool
    address: str
    is_socket: bool
    resumes: bool = False
    is_bare_metal: bool = False


def read_options(text: str) -> Options:
    """Return the options in the text of fabricmanager.cfg. The text is empty for a host without a fabric manager."""
    pairs = (line.partition("#")[0].partition("=") for line in text.splitlines())
    values = {key.strip(): value.strip() for key, equals, value in pairs if equals}
    path = values.get("FM_CMD_UNIX_SOCKET_PATH", "")
    host, port = values.get("FM_CMD_BIND_INTERFACE", "127.0.0.1"), values.get("FM_CMD_PORT_NUMBER", "6666")
    shared, resumes = values.get("FABRIC_MODE") == SHARED_NVSWITCH, values.get("FABRIC_MODE_RESTART") == "1"
    is_bare_metal = bool(text) and values.get("FABRIC_MODE", BARE_METAL) == BARE_METAL
    return Options(shared, path or f"{host}:{port}", bool(path), resumes, is_bare_metal)


def options_of(system: System) -> Options:
    """Return the options of this host's fabric manager; those of an empty file without one.

    Raises OSError on a read error.
    """
    try:
        return read_options(system.read_text(CONFIGURATION))
    except (FileNotFoundError, NotADirectoryError):
        return read_options("")


def physical_ids(devices: Iterable[Device], partitions: Sequence[FabricPartition]) -> dict[str, int]:
    """Return the fabric manager's physical ID of each GPU that is in a partition, by the GPU's UUID.

    A GPU is identified by UUID or PCI address. Module IDs are used only if the fabric manager returns neither for any
    GPU, because on HGX A100 they differ from the physical IDs. Raises AcceleratorError if the returned identities
    contradict each other.
    """
    members = {member for partition in partitions for member in partition.members}
    has_identities = any(member.uuid or member.pci_address for member in members)
    found: dict[str, int] = {}
    for device in devices:
        if not has_identities:
            if any(member.physical_id == device.module for member in members) and device.module is not None:
                found[device.uuid] = device.module
            continue
        for member in members:
            same = [
                ours == theirs
                for ours, theirs in ((device.uuid, member.uuid), (device.pci_address, member.pci_address))
                if theirs
            ]
            if not any(same):
                continue
            if not all(same) or found.setdefault(device.uuid, member.physical_id) != member.physical_id:
                raise AcceleratorError(
                    f"The fabric manager returns contradicting identities for {device.describe()}: physical id {member.physical_id} as "
                    f"{member.uuid or 'no UUID'} at {member.pci_address or 'no address'}",
                    hint=_HINT,
                    code="fabric",
                )
    return found


def attributes(physical_id: int, partitions: Iterable[FabricPartition]) -> dict[str, int]:
    """Return the attributes ``partition<N>`` of a GPU: the ID of the partition of N GPUs that contains it.

    If several partitions of one size contain the GPU, the attribute of that size is left out.
    """
    by_size: dict[int, list[int]] = {}
    for partition in partitions:
        if any(member.physical_id == physical_id for member in partition.members):
            by_size.setdefault(len(partition.members), []).append(partition.number)
    return {f"partition{size}": numbers[0] for size, numbers in sorted(by_size.items()) if len(numbers) == 1}


def find_partition(devices: Sequence[Device], partitions: Sequence[FabricPartition]) -> FabricPartition:
    """Return the partition that consists of exactly these GPUs. Raises NoFabricPartition with the list of partitions."""
    known = physical_ids(devices, partitions)
    wanted = {known.get(device.uuid) for device in devices}
    for partition in partitions:
        if {member.physical_id for member in partition.members} == wanted:
            return partition
    names = ", ".join(f"{device.describe()} (module {known.get(device.uuid, '?')})" for device in devices)
    offered = join_problems(
        f"{each.number} has modules {', '.join(str(member.physical_id) for member in each.members)}"
        for each in partitions
    )
    raise NoFabricPartition(
        f"{names}: no partition of the NVSwitch fabric has exactly these GPUs. Partitions that exist: {offered or 'none'}",
        hint=f"Ask for N GPUs with the constraint matchAttribute: gpu.nvidia.com/partitionN in one claim; N here is {len(devices)}.",
    )


def reject_overlap(wanted: FabricPartition, partitions: Iterable[FabricPartition]) -> None:
    """Raise InUse if an active partition shares a GPU with the wanted partition."""
    mine = {member.physical_id for member in wanted.members}
    for other in partitions:
        shared = mine & {member.physical_id for member in other.members}
        if other.is_active and other.number != wanted.number and shared:
            raise InUse(
                f"Partition {wanted.number} of the NVSwitch fabric cannot be activated: partition {other.number}, which is active, contains its "
                f"modules {', '.join(map(str, sorted(shared)))}",
                hint="Deactivate that partition, or delete the pods of the claim that uses it.",
            )


class FabricManager:
    """The connection to the fabric manager.

    Methods that call the library block, so call them on a thread with a deadline. Calls are serialized.

    With FABRIC_MODE_RESTART=1, a restarted fabric manager keeps the routes of the switches, rejects all calls, and
    waits up to 60 s for the list of active partitions (User Guide, "Resiliency"). This class sends the partitions that
    were active at the last call of this process. If this process has not read them yet, it sends those that ``claimed``
    returns, or no list if ``claimed`` is not set.
    """

    def __init__(
        self,
        system: System,
        load: Callable[[str], Any] = ctypes.CDLL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system = system
        self._load = load
        self._clock = clock
        self._lock = threading.Lock()
        self._library: Any = None
        self._handle: ctypes.c_void_p | None = None
        self._known: tuple[float, tuple[FabricPartition, ...]] = (0.0, ())
        self._active: frozenset[int] | None = None
        self._remembered: set[int] | None = None
        self.claimed: Callable[[], Collection[int]] | None = None
        self._is_used = self._is_bare_metal = False
        self.refresh_mode()

    @property
    def is_used(self) -> bool:
        """Return whether the configuration had shared-NVSwitch mode when it was last read."""
        return self._is_used

    @property
    def is_bare_metal(self) -> bool:
        """Return whether the configuration had bare-metal mode when it was last read."""
        return self._is_bare_metal

    def refresh_mode(self) -> None:
        """Read the mode from the configuration, and keep the previous one after a read error.

        Does not call the library.
        """
        with contextlib.suppress(OSError):
            options = options_of(self._system)
            self._is_used, self._is_bare_metal = options.is_shared, options.is_bare_metal

    @property
    def active(self) -> frozenset[int] | None:
        """The partitions that were active at the last ``refresh_partitions``; None if that failed, or in other modes."""
        return self._active

    def forget_active(self) -> None:
        """Delete the list of active partitions before the next ``refresh_partitions``."""
        self._active = None

    def refresh_partitions(self) -> None:
        """Update the list of partitions that ``attributes`` and ``active`` use. Raises BackendUnavailable."""
        self._known = (self._clock(), self.partitions())
        self._active = frozenset(each.number for each in self._known[1] if each.is_active)

    def attributes(self, device: Device) -> Mapping[str, int]:
        """Return the attributes of a whole GPU: its module, and its partition of each size. Does not call the library."""
        updated, partitions = self._known
        if not self._is_used or not partitions or self._clock() - updated > KNOWN_SECONDS:
            return {}
        try:
            number = physical_ids([device], partitions).get(device.uuid)
        except AcceleratorError:  # the error of a claim for this GPU names it
            return {}
        if number is None:
            return {}
        module = {"gpuModuleID": device.module} if device.module is not None else {}
        return {**module, **attributes(number, partitions)}

    def partitions(self) -> tuple[FabricPartition, ...]:
        """Return the partitions of the fabric. Raises BackendUnavailable."""
        answer = PartitionList(version=version_of(PartitionList))
        self._call(
            "fmGetSupportedFabricPartitions", "Listing the partitions of the NVSwitch fabric", ctypes.byref(answer)
        )
        found = tuple(_partition(each) for each in answer.partitionInfo[: min(answer.numPartitions, MOST_PARTITIONS)])
        self._remembered = {each.number for each in found if each.is_active}
        return found

    def find(self, devices: Sequence[Device]) -> tuple[int, bool]:
        """Return the number of the partition of these GPUs, and whether it is active.

        Raises NoFabricPartition or BackendUnavailable.
        """
        found = find_partition(devices, self.partitions())
        return found.number, found.is_active

    def activate(self, number: int) -> None:
        """Activate a partition unless it is active.

        Raises InUse, NoFabricPartition, FabricRejected, or BackendUnavailable.
        """
        partitions = self.partitions()
        wanted = next((each for each in partitions if each.number == number), None)
        if wanted is None:
            raise NoFabricPartition(f"The NVSwitch fabric has no partition {number} any more", hint=_HINT)
        if not wanted.is_active:
            reject_overlap(wanted, partitions)
            doing = f"Activating partition {number} of the NVSwitch fabric"
            self._call("fmActivateFabricPartition", doing, number, REJECTIONS)
            self._remember(number, is_active=True)

    def deactivate(self, number: int) -> None:
        """Deactivate a partition if it exists and is active. Raises BackendUnavailable or FabricRejected.

        The mode of the running fabric manager is used first, because it can differ from the file. If it does not
        answer, the file decides whether this is an error.
        """
        try:
            partitions = self.partitions()
        except NoPartitions:
            return
        except BackendUnavailable:
            self.refresh_mode()
            if self._is_used:
                raise
            return
        if any(each.number == number and each.is_active for each in partitions):
            doing = f"Deactivating partition {number} of the NVSwitch fabric"
            self._call("fmDeactivateFabricPartition", doing, number, REJECTIONS | {IN_USE})
            self._remember(number, is_active=False)

    def _remember(self, number: int, *, is_active: bool) -> None:
        """Record that a partition was activated or deactivated."""
        self._remembered = {*(self._remembered or ()), number} if is_active else (self._remembered or set()) - {number}

    def close(self) -> None:
        """Close the connection. The next call opens a new one. Another process can change partitions in between."""
        with self._lock:
            self._disconnect()
            self._remembered = None

    def _call(self, function: str, doing: str, argument: Any, rejections: Collection[int] = ()) -> None:
        """Call the library.

        If the connection was lost, for example after a restart of the fabric manager, reconnect and retry once.

        Raises FabricRejected for the return values in ``rejections``, InUse, or BackendUnavailable.
        """
        with self._lock:
            value = self._once(function, doing, argument)
            if value in (CONNECTION_NOT_VALID, UNINITIALIZED):
                self._disconnect()
                value = self._once(function, doing, argument)
            if value == NOT_CONFIGURED and self._resume():
                value = self._once(function, doing, argument)
        if value in rejections:
            raise FabricRejected(f"{doing}: the fabric manager rejects it: {_WORDS[value]} (error {value})", hint=_HINT)
        if value == IN_USE:
            raise InUse(f"{doing}: {_WORDS[IN_USE]}", hint=_HINT)
        if value != SUCCESS:
            raise _unavailable(doing, value)

    def _once(self, function: str, doing: str, argument: Any) -> int:
        self._connect(doing)
        return int(getattr(self._library, function)(self._handle, argument))

    def _resume(self) -> bool:
        """Send the list of active partitions to a fabric manager that waits for it, and return whether it accepts the list."""
        with contextlib.suppress(OSError):
            if self.claimed is None or not options_of(self._system).resumes:
                return False
            numbers = sorted(self.claimed() if self._remembered is None else self._remembered)[:MOST_PARTITIONS]
            active = ActivatedList(version=version_of(ActivatedList), numPartitions=len(numbers))
            active.partitionIds[: len(numbers)] = numbers
            value = int(self._library.fmSetActivatedFabricPartitions(self._handle, ctypes.byref(active)))
            outcome = "accepts" if value == SUCCESS else f"rejects (error {value})"
            LOG.warning("the fabric manager was restarted, and %s the list of active partitions: %s", outcome, numbers)
            return value == SUCCESS
        return False

    def _connect(self, doing: str) -> None:
        if self._handle is not None:
            return
        if self._library is None:
            try:
                self._library = self._load(LIBRARY)
            except OSError as error:
                # Other errors, such as too many open files, do not mean that the package is missing.
                kind = NoPartitions if _MISSING in str(error) else BackendUnavailable
                raise kind(
                    f"{doing}: the library {LIBRARY} cannot be loaded: {error}",
                    hint=f"Install nvidia-fabricmanager in the driver's version, or set FABRIC_MODE=0 in {CONFIGURATION}.",
                ) from error
        value = int(self._library.fmLibInit())
        if value not in (SUCCESS, IN_USE):
            raise _unavailable(doing, value)
        try:
            options = options_of(self._system)
        except OSError as error:
            raise BackendUnavailable(f"{doing}: {CONFIGURATION} cannot be read: {error}", hint=_HINT) from error
        parameters = ConnectParameters(
            version=version_of(ConnectParameters),
            addressInfo=options.address.encode(),
            timeoutMs=CONNECT_MILLISECONDS,
            addressIsUnixSocket=options.is_socket,
        )
        handle = ctypes.c_void_p()
        value = int(self._library.fmConnect(ctypes.byref(parameters), ctypes.byref(handle)))
        if value != SUCCESS:
            raise _unavailable(f"{doing}: connecting to {options.address}", value)
        self._handle = handle

    def _disconnect(self) -> None:
        if self._handle is not None:
            self._library.fmDisconnect(self._handle)
            self._handle = None


def _unavailable(doing: str, value: int) -> BackendUnavailable:
    found = _WORDS.get(value, f"it returned error {value}")
    kind = NoPartitions if value == NOT_SUPPORTED else BackendUnavailable
    return kind(f"{doing}: the fabric manager failed: {found}", hint=_HINT, code="fabric")


def _partition(info: PartitionInfo) -> FabricPartition:
    members = tuple(_member(each) for each in info.gpuInfo[: min(info.numGpus, MOST_GPUS)])
    return FabricPartition(int(info.partitionId), bool(info.isActive), members)


def _member(info: GpuInfo) -> Member:
    uuid, address = (value.decode("ascii", "replace") for value in (info.uuid, info.pciBusId))
    # Without a UUID, an address of zeros means that the fabric manager does not know the address.
    if not uuid and not address.strip("0:."):
        address = ""
    try:
        return Member(int(info.physicalId), uuid, pci.normalize_address(address) if address else "")
    except ValueError as error:
        raise BackendUnavailable(
            f"The fabric manager returns an invalid PCI address for module {info.physicalId}: {error}", hint=_HINT
        ) from error
