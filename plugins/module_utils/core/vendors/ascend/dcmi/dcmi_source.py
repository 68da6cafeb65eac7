# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The source that uses DCMI, for a host with a driver.

Only ``template_table`` starts a program.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Callable

from ....errors import AcceleratorError, DeviceFaulty, NotFound
from ....host import pci
from ....host.system import System
from ....model import UNKNOWN_ERROR, Process
from .. import names
from ..attributes import SuperPod, super_pod
from ..driver_files import version_of
from ..families import DIES_AS_ONE, UNIFIED_BUS_ID, UNKNOWN, VENDOR_ID, Family, family_of
from ..npu_smi.npu_smi import Tool
from ..readings import MEBIBYTE, NETWORK, Condition, Identity, SliceReading, SliceReadings, Told, Work
from ..templates import CORES, HELPERS, SHARED, exact
from ..topology import UNKNOWN_LINK
from .dcmi import Dcmi, Spot
from .structures import (
    BoardInfo,
    ChipInfo,
    CreatedSlice,
    CreateSlice,
    DieId,
    Event,
    EventFilter,
    FreeResource,
    HbmInfo,
    Label,
    MemoryInfo,
    PciInfo,
    ProcessMemory,
    SliceQuery,
    SuperPodInfo,
    TotalResource,
    UnifiedBusInfo,
    text,
)

ANY = 0xFFFFFFFF
VDIE = 1
_INBAND = 1
_STARTED = 3  # DCMI_BOOT_STATUS_FINISH
_PROCESSES = 1024
_PROCESS_READS = 3
_ERRORS = 128
_TEXT = 256
# dcmi_get_device_info: main commands and subcommands.
_SLICES, _ONE, _TOTAL, _FREE, _ACTIVITY = 52, 0, 1, 2, 5
_POD, _POD_INFO = 12, 1
_DEVICE_SHARE = 0x8001
#: dcmi_get_topo_info_by_device_id, by `dcmi_interface_api.h` of hicann/driver.
_LINKS: Mapping[int, str] = MappingProxyType(
    {0: "X", 1: "SYS", 2: "PHB", 3: "HCCS", 4: "PXB", 5: "PIX", 6: "SIO", 7: "HCCS_SW", 8: "UB", 9: UNKNOWN_LINK}
)
# dcmi_get_device_utilization_rate and dcmi_get_device_frequency: types.
_RATE_OF_CORES = 2
_DDR, _HBM, _CORES_NOW = 1, 6, 7
_MEGAHERTZ = 1_000_000
_BEGINS: Mapping[int, bool] = MappingProxyType({0: False, 1: True})
_AMP, _DOCKER, _SINGLE_DIE = 0, 0, 1

_EVENT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.POINTER(Event))
#: The functions registered with the library. It cannot unregister them, so they are kept until the process ends.
_SUBSCRIBED: list[Any] = []


class Library:
    """The source that uses the vendor's library."""

    name = "DCMI"

    def __init__(self, system: System) -> None:
        self._system = system
        self._dcmi = Dcmi(system)
        self._lock = threading.Lock()
        self._callback: Callable[[Told], object] | None = None
        self._subscribed: bool | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the library is open."""
        return self._dcmi.is_open

    def open(self) -> None:
        """Load and initialize the library. Raises BackendUnavailable."""
        self._dcmi.open()

    def close(self) -> None:
        """Reject further calls."""
        self._dcmi.close()

    def driver_version(self) -> str:
        """Return the driver's version from its files, or else that of the library."""
        version = version_of(self._system)
        if version:
            return version
        found = ctypes.create_string_buffer(_TEXT)
        there = self._dcmi.of_machine("get_dcmi_version", found, _TEXT)
        return text(found) if there else ""

    def spots(self) -> tuple[Spot, ...]:
        """Return the positions of the chips."""
        return self._dcmi.spots()

    def uuid(self, spot: Spot) -> str:
        """Return the UUID of the chip at a position."""
        die, doing = DieId(), f"Reading the UUID of {spot}"
        self._dcmi.about(spot, "get_device_die_v2", VDIE, ctypes.byref(die), doing=doing)
        return names.chip_uuid(tuple(die.words))

    def identity(self, spot: Spot) -> Identity:
        """Return the fixed facts of the chip at a position."""
        doing, dcmi = f"Reading the facts of {spot}", self._dcmi
        logic_id = dcmi.logic_id(spot, doing)
        info, board = ChipInfo(), BoardInfo()
        address, device_id, subsystem_id = self._on_bus(spot, doing)
        if not dcmi.optional(spot, "get_device_chip_info_v2", ctypes.byref(info), doing=doing):
            # The older function fills the same fields except the last.
            dcmi.about(spot, "get_device_chip_info", ctypes.byref(info), doing=doing)
        has_board = dcmi.answered(spot, "get_device_board_info", ctypes.byref(board), doing=doing)
        label = self._label(spot, doing)
        size, _used = self._memory(spot, doing)
        return Identity(
            physical_id=dcmi.physical_id(logic_id, doing),
            logic_id=logic_id,
            uuid=self.uuid(spot),
            model=text(info.chip_name),
            pci_address=address,
            pci_device_id=device_id,
            pci_subsystem_id=subsystem_id,
            memory_bytes=size * MEBIBYTE,
            board_id=board.board if has_board else None,
            product=text(label.product) or text(info.npu_name),
            card_serial=text(label.serial),
            super_pod=self._super_pod(spot, family_of(device_id), doing),
        )

    def _on_bus(self, spot: Spot, doing: str) -> tuple[str, int, int]:
        """Return the PCI address, the device ID, and the subsystem ID of a chip.

        A chip on the unified bus has no address.

        Chips of the newest generation support one of two queries for this, depending on their mainboard
        (`dcmiv2_basic_info_intf.c` of hicann/driver).
        """
        found, dcmi = PciInfo(), self._dcmi
        query = dcmi.optional if dcmi.is_second else dcmi.about
        if query(spot, "get_device_pcie_info_v2", ctypes.byref(found), doing=doing) is not False:
            address = f"{found.domain & 0xFFFF:04x}:{found.bus & 0xFF:02x}:{found.slot & 0x1F:02x}.{found.function & 7}"
            return (
                pci.normalize_address(address),
                (found.device & 0xFFFF) << 16 | found.vendor & 0xFFFF,
                (found.subsystem_device & 0xFFFF) << 16 | found.subsystem_vendor & 0xFFFF,
            )
        ids = UnifiedBusInfo()
        dcmi.answered(spot, "get_device_ub_id_info", ctypes.byref(ids), doing=doing)
        is_known = family_of(ids.device) is not UNKNOWN
        return "", ids.device << 16 | ids.vendor if is_known else UNIFIED_BUS_ID << 16 | VENDOR_ID, 0

    def link(self, one: Spot, other: Spot) -> str | None:
        """Return the link between two chips; None if it is not reported."""
        found = self._dcmi.between(one, other, f"Reading the link between {one} and {other}")
        return None if found is None else _LINKS.get(found, UNKNOWN_LINK)

    def slices(self, spot: Spot) -> SliceReadings | None:
        """Return the resources that vNPUs of a chip share, and its vNPUs.

        Raises DeviceFaulty if the chip lists a vNPU and reports that it does not exist.
        """
        doing = f"Listing the slices of {spot}"
        missing: list[int] = []
        # If another program has destroyed a vNPU since the list was read, the next list does not have it.
        for _list in range(2):
            total = TotalResource()
            if not self._information(spot, _SLICES, _TOTAL, total, doing):
                return None
            found = {
                each: self._slice(spot, each, doing)
                for each in total.slice_ids[: min(total.count, len(total.slice_ids))]
            }
            missing = [slice_id for slice_id, reading in found.items() if reading is None]
            if not missing:
                return SliceReadings(_totals(total), tuple(each for each in found.values() if each is not None))
        raise DeviceFaulty(
            f"{doing}: it lists {', '.join(map(str, missing))} and reports that there is no such slice",
            hint="Check the kernel log. The next scan queries it again.",
            code=UNKNOWN_ERROR,
        )

    def free(self, spot: Spot) -> Mapping[str, Fraction]:
        """Return the free resources of a chip for vNPUs."""
        free = FreeResource()
        if not self._information(spot, _SLICES, _FREE, free, f"Reading the free resources of {spot}"):
            return {}
        resources = {CORES: free.computing.cores, HELPERS: float(free.computing.helpers)}
        resources.update({name: getattr(free.media, name) for name in SHARED if name not in resources})
        return {name: exact(value) for name, value in resources.items()}

    def _slice(self, spot: Spot, slice_id: int, doing: str) -> SliceReading | None:
        """Return the reading of a listed vNPU; None if the chip reports that it does not exist, or does not support the query."""
        query = SliceQuery(slice_id=slice_id)
        try:
            is_answered = self._information(spot, _SLICES, _ONE, query, doing)
        except NotFound:
            return None
        return _slice(query) if is_answered else None

    def template_table(self, spot: Spot) -> str | None:
        """Return the table of a card's templates from npu-smi, because the library has no function for it."""
        return Tool(self._system).template_table(spot)

    def is_shared(self, spot: Spot) -> bool | None:
        """Return whether several containers can use a chip at a time; None if it is not reported."""
        value, size, doing = (
            ctypes.c_uint(0),
            ctypes.c_uint(ctypes.sizeof(ctypes.c_uint)),
            f"Reading whether {spot} can be shared",
        )
        arguments = (_DEVICE_SHARE, ctypes.c_uint(0), ctypes.byref(value), ctypes.byref(size))
        return bool(value.value) if self._dcmi.answered(spot, "get_device_info", *arguments, doing=doing) else None

    def processes(self, spot: Spot) -> tuple[Process, ...]:
        """Return the processes that have a chip, or one of its vNPUs, open."""
        found, count, doing = (ProcessMemory * _PROCESSES)(), ctypes.c_int(0), f"Reading the processes of {spot}"
        for attempt in range(_PROCESS_READS):
            try:
                there = self._dcmi.optional(spot, "get_device_resource_info", found, ctypes.byref(count), doing=doing)
                break
            except AcceleratorError:
                # The driver reads one process after the other. A process that ends during this fails the call.
                if attempt == _PROCESS_READS - 1:
                    raise
        if not there:
            return ()
        pids = sorted({int(each.pid) for each in found[: max(min(count.value, _PROCESSES), 0)]})
        return tuple(Process(pid) for pid in pids)

    def condition(self, spot: Spot, without: Collection[str] = ()) -> Condition:
        """Return the health of a chip."""
        doing, dcmi = f"Reading the health of {spot}", self._dcmi
        level, result, has_port = ctypes.c_uint(0), ctypes.c_int(0), False
        count, codes = ctypes.c_int(0), (ctypes.c_uint * _ERRORS)()
        dcmi.about(spot, "get_device_health", ctypes.byref(level), doing=doing)
        dcmi.optional(spot, "get_device_errorcode_v2", ctypes.byref(count), codes, ctypes.c_uint(_ERRORS), doing=doing)
        if NETWORK not in without:
            has_port = dcmi.answered(spot, "get_device_network_health", ctypes.byref(result), doing=doing)
        errors = tuple(codes[: max(min(count.value, _ERRORS), 0)])
        return Condition(level.value, errors, result.value if has_port else None)

    def work(self, spot: Spot) -> Work:
        """Return the telemetry of a chip."""
        doing = f"Reading the telemetry of {spot}"
        power, temperature, rate = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_uint(0)
        has_power = self._dcmi.answered(spot, "get_device_power_info", ctypes.byref(power), doing=doing)
        has_temperature = self._dcmi.answered(spot, "get_device_temperature", ctypes.byref(temperature), doing=doing)
        has_rate = self._dcmi.answered(
            spot, "get_device_utilization_rate", _RATE_OF_CORES, ctypes.byref(rate), doing=doing
        )
        size, used = self._memory(spot, doing)
        return Work(
            power=power.value / 10 if has_power else None,
            temperature=float(temperature.value) if has_temperature else None,
            memory_used=used * MEBIBYTE if size else None,
            memory_total=size * MEBIBYTE if size else None,
            utilization=rate.value / 100 if has_rate and rate.value <= 100 else None,
            clocks=self._clocks(spot, doing),
        )

    def work_of_slice(self, spot: Spot, slice_id: int) -> Work:
        """Return the telemetry of a vNPU."""
        query = SliceQuery(slice_id=slice_id)
        if not self._information(spot, _SLICES, _ACTIVITY, query, f"Reading the telemetry of slice {slice_id}"):
            return Work()
        computing = query.info.computing
        total, free = int(computing.memory_total), int(computing.memory_free)
        return Work(
            memory_total=total * MEBIBYTE if total else None,
            memory_used=max(total - free, 0) * MEBIBYTE if total else None,
            utilization=computing.utilization / 100 if computing.utilization <= 100 else None,
        )

    def create(self, spot: Spot, template: str, slice_id: int, group: int | None) -> None:
        """Create a vNPU. If the driver creates it with a different ID, it is destroyed and AcceleratorError is raised."""
        doing = f"Creating slice {slice_id} ({template}) on {spot}"
        wanted = CreateSlice(slice_id=slice_id, group=ANY if group is None else group, template=template.encode())
        made = CreatedSlice()
        self._dcmi.change(spot, "create_vdevice", ctypes.byref(wanted), ctypes.byref(made), doing=doing)
        if made.slice_id != slice_id:
            self.destroy(spot, made.slice_id)
            raise AcceleratorError(
                f"{doing} failed: the driver created one with the id {made.slice_id}, which was destroyed again",
                hint="Update the driver: this one ignores the requested ids of slices.",
                code="other-slice",
            )

    def destroy(self, spot: Spot, slice_id: int) -> None:
        """Destroy a vNPU."""
        doing = f"Destroying slice {slice_id} of {spot}"
        self._dcmi.change(spot, "set_destroy_vdevice", ctypes.c_uint(slice_id), doing=doing)

    def reset(self, spot: Spot) -> None:
        """Reset a chip."""
        self._dcmi.change(spot, "set_device_reset", _INBAND, doing=f"Resetting {spot}")

    def rescan(self, spot: Spot) -> None:
        """Rescan the bus for a chip after a reset. The function does not exist if the driver rescans itself."""
        self._dcmi.answered(spot, "rescan_soc", doing=f"Rescanning {spot} after its reset")

    def associated_card(self, spot: Spot) -> int | None:
        """Return the card that is reset together with that of a chip; -1 without one, None if it is not reported."""
        card, doing = ctypes.c_int(-1), f"Reading the associated card of {spot}"
        is_answered = self._dcmi.answered(spot, "get_netdev_brother_device", ctypes.byref(card), doing=doing)
        return card.value if is_answered else None

    def is_started(self, spot: Spot) -> bool:
        """Return whether a chip has started. A chip that does not report its state counts as started."""
        status, doing = ctypes.c_int(0), f"Reading whether {spot} has started"
        if not self._dcmi.answered(spot, "get_device_boot_status", ctypes.byref(status), doing=doing):
            return True
        return status.value == _STARTED

    def hindrance(self, spot: Spot) -> str:
        """Return the mode of the host that prevents vNPUs, with the remedy; "" without one."""
        mode, policy, work = ctypes.c_int(_DOCKER), ctypes.c_uint(_SINGLE_DIE), ctypes.c_ubyte(_AMP)
        self._dcmi.of_machine("get_vdevice_mode", ctypes.byref(mode))
        self._dcmi.of_machine("get_multi_die_policy", ctypes.byref(policy))
        self._dcmi.of_card(spot, "get_npu_work_mode", ctypes.byref(work), doing=f"Reading the work mode of {spot}")
        if mode.value != _DOCKER:
            return "Slices are made for virtual machines here; `npu-smi set -t vnpu-mode -d 0` has them made for containers."
        if work.value != _AMP:
            return "The chips work in SMP mode; the management controller sets AMP (`ipmcset -d npuworkmode -v 0`) while the host is off."
        if policy.value != _SINGLE_DIE:
            return DIES_AS_ONE
        return ""

    def subscribe(self, callback: Callable[[Told], object]) -> bool:
        """Register a function for fault events. The library is called until it accepts one registration."""
        with self._lock:
            self._callback = callback
            if not self._subscribed:
                native_callback = _EVENT_CALLBACK(self._forward)
                _SUBSCRIBED.append(native_callback)
                self._subscribed = self._dcmi.subscribe(EventFilter(), native_callback)
            return self._subscribed

    def _forward(self, event: Any) -> None:
        """Forward an event from the library. Runs on a thread of the library."""
        fault, callback = event.contents.fault, self._callback
        if callback is not None:
            callback(Told(int(fault.logic_id), int(fault.code), _BEGINS.get(int(fault.assertion)), text(fault.name)))

    def _label(self, spot: Spot, doing: str) -> Label:
        label = Label()
        self._dcmi.of_card(spot, "get_card_elabel_v2", ctypes.byref(label), doing=doing)
        return label

    def _memory(self, spot: Spot, doing: str) -> tuple[int, int]:
        """Return the total and the used memory of a chip in MB. With HBM, the other query has no valid values."""
        hbm, memory = HbmInfo(), MemoryInfo()
        if self._dcmi.optional(spot, "get_device_hbm_info", ctypes.byref(hbm), doing=doing) and hbm.size:
            return int(hbm.size), int(hbm.used)
        if self._dcmi.optional(spot, "get_device_memory_info_v3", ctypes.byref(memory), doing=doing):
            return int(memory.size), max(int(memory.size) - int(memory.available), 0)
        return 0, 0

    def _clocks(self, spot: Spot, doing: str) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for name, kinds in (("aicore", (_CORES_NOW,)), ("memory", (_HBM, _DDR))):
            for kind in kinds:
                value = ctypes.c_uint(0)
                if self._dcmi.answered(spot, "get_device_frequency", kind, ctypes.byref(value), doing=doing):
                    found[name] = float(value.value) * _MEGAHERTZ
                    break
        return found

    def _super_pod(self, spot: Spot, family: Family, doing: str) -> SuperPod | None:
        info, size = SuperPodInfo(), ctypes.c_uint(ctypes.sizeof(SuperPodInfo))
        arguments = (_POD, ctypes.c_uint(_POD_INFO), ctypes.byref(info), ctypes.byref(size))
        if not self._dcmi.answered(spot, "get_device_info", *arguments, doing=doing):
            return None
        return super_pod(
            family, int(info.pod), int(info.server), int(info.number), chassis=int(info.chassis), kind=int(info.type)
        )

    def _information(self, spot: Spot, what: int, part: int, place: Any, doing: str) -> bool:
        """Fill a structure with ``dcmi_get_device_info``. Return False if the chip does not support the query."""
        size = ctypes.c_uint(ctypes.sizeof(place))
        arguments = (what, ctypes.c_uint(part), ctypes.byref(place), ctypes.byref(size))
        return self._dcmi.optional(spot, "get_device_info", *arguments, doing=doing)


def _slice(query: SliceQuery) -> SliceReading:
    info = query.info
    used = bool(info.status or info.is_container_used)
    container = int(info.container)
    return SliceReading(
        slice_id=int(query.slice_id),
        template=text(info.template),
        group=None if info.group == ANY else int(info.group),
        is_used=used,
        container="" if container in (0, (1 << 48) - 1, (1 << 64) - 1) else f"{container:012x}",
        cores=exact(info.computing.cores),
        memory_bytes=int(info.computing.memory) * MEBIBYTE,
    )


def _totals(total: TotalResource) -> Mapping[str, Fraction]:
    """Return the total resources of a chip. A value of 0 means not reported or not available, so it is left out."""
    resources = {CORES: total.computing.cores, HELPERS: float(total.computing.helpers)}
    resources.update({name: getattr(total.media, name) for name in SHARED if name not in resources})
    return {name: exact(value) for name, value in resources.items() if value > 0}
