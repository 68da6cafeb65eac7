# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Answers questions about chips by DCMI: the way that everything goes on a machine with a driver.

No call here starts a program.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Callable

from .. import pci
from ..errors import AcceleratorError, DeviceFaulty, NotFound
from ..model import UNKNOWN_ERROR, Process
from ..system import System
from . import names
from .attributes import SuperPod, super_pod
from .dcmi import Dcmi, Spot
from .driver_files import version_of
from .families import DIES_AS_ONE, Family, family_of
from .readings import MEBIBYTE, NETWORK, Condition, Identity, SliceReading, SliceReadings, Told, Work
from .structures import (
    BoardInfo,
    ChipInfo,
    CreatedSlice,
    CreateSlice,
    DieId,
    Event,
    EventFilter,
    HbmInfo,
    Label,
    MemoryInfo,
    PciInfo,
    ProcessMemory,
    SliceQuery,
    SuperPodInfo,
    TotalResource,
    text,
)
from .templates import CORES, HELPERS, exact

ANY = 0xFFFFFFFF
VDIE = 1
_INBAND = 1
_STARTED = 3  # DCMI_BOOT_STATUS_FINISH
_PROCESSES = 1024
_ERRORS = 128
_TEXT = 256
# dcmi_get_device_info: what it is about, and what of that.
_SLICES, _ONE, _TOTAL, _ACTIVITY = 52, 0, 1, 5
_POD, _POD_INFO = 12, 1
_DEVICE_SHARE = 0x8001
#: dcmi_get_topo_info_by_device_id.
_LINKS: Mapping[int, str] = MappingProxyType({0: "X", 1: "SYS", 2: "PHB", 3: "HCCS", 4: "PXB", 5: "PIX"})
# dcmi_get_device_utilization_rate and dcmi_get_device_frequency: what is asked for.
_RATE_OF_CORES = 2
_DDR, _HBM, _CORES_NOW = 1, 6, 7
_MEGAHERTZ = 1_000_000
_BEGINS: Mapping[int, bool] = MappingProxyType({0: False, 1: True})
_AMP, _DOCKER, _SINGLE_DIE = 0, 0, 1

_TELL = ctypes.CFUNCTYPE(None, ctypes.POINTER(Event))
#: What the library was given to call. It has no function that takes one back, so they last as long as the process.
_SUBSCRIBED: list[Any] = []


class Library:
    """The source that is the vendor's library."""

    name = "DCMI"

    def __init__(self, system: System) -> None:
        self._system = system
        self._dcmi = Dcmi(system)
        self._lock = threading.Lock()
        self._told: Callable[[Told], object] | None = None
        self._subscribed: bool | None = None

    @property
    def is_open(self) -> bool:
        """Whether open() has succeeded."""
        return self._dcmi.is_open

    def open(self) -> None:
        """Load and initialise the library. Raises BackendUnavailable."""
        self._dcmi.open()

    def close(self) -> None:
        """Make no more calls."""
        self._dcmi.close()

    def driver_version(self) -> str:
        """Return the driver's version by its files, else the library's own."""
        version = version_of(self._system)
        if version:
            return version
        found = ctypes.create_string_buffer(_TEXT)
        there = self._dcmi.of_machine("get_dcmi_version", found, _TEXT)
        return text(found) if there else ""

    def spots(self) -> tuple[Spot, ...]:
        """Return where chips are."""
        return self._dcmi.spots()

    def uuid(self, spot: Spot) -> str:
        """Return the UUID of the chip at a spot."""
        die, doing = DieId(), f"Asking {spot} who it is"
        self._dcmi.about(spot, "get_device_die_v2", VDIE, ctypes.byref(die), doing=doing)
        return names.chip_uuid(tuple(die.words))

    def identity(self, spot: Spot) -> Identity:
        """Return all that does not change about the chip at a spot."""
        doing, dcmi = f"Reading the facts of {spot}", self._dcmi
        logic_id = dcmi.logic_id(spot, doing)
        address, info, board = PciInfo(), ChipInfo(), BoardInfo()
        dcmi.about(spot, "get_device_pcie_info_v2", ctypes.byref(address), doing=doing)
        if not dcmi.optional(spot, "get_device_chip_info_v2", ctypes.byref(info), doing=doing):
            # What came before it fills the same fields but for the last.
            dcmi.about(spot, "get_device_chip_info", ctypes.byref(info), doing=doing)
        has_board = dcmi.answered(spot, "get_device_board_info", ctypes.byref(board), doing=doing)
        label = self._label(spot, doing)
        size, _used = self._memory(spot, doing)
        return Identity(
            physical_id=dcmi.physical_id(logic_id, doing),
            logic_id=logic_id,
            uuid=self.uuid(spot),
            model=text(info.chip_name),
            pci_address=pci.normalise_bus_id(
                f"{address.domain & 0xFFFF:04x}:{address.bus & 0xFF:02x}:{address.slot & 0x1F:02x}.{address.function & 7}"
            ),
            pci_device_id=(address.device & 0xFFFF) << 16 | address.vendor & 0xFFFF,
            pci_subsystem_id=(address.subsystem_device & 0xFFFF) << 16 | address.subsystem_vendor & 0xFFFF,
            memory_bytes=size * MEBIBYTE,
            board_id=board.board if has_board else None,
            product=text(label.product) or text(info.npu_name),
            card_serial=text(label.serial),
            super_pod=self._super_pod(spot, family_of(address.device & 0xFFFF), doing),
        )

    def link(self, one: Spot, other: Spot) -> str | None:
        """Return what lies between two chips."""
        found = self._dcmi.between(one, other, f"Asking what lies between {one} and {other}")
        if found is None or found in _LINKS:
            return None if found is None else _LINKS[found]
        return "SIO" if one.card == other.card else "NA"  # what joins the dies of a module came after these numbers

    def slices(self, spot: Spot) -> SliceReadings | None:
        """Return what a chip shares out, and its slices. Raises DeviceFaulty where it lists one of which it says that it is not there."""
        doing = f"Listing the slices of {spot}"
        missing: list[int] = []
        # One that was destroyed by somebody else since the list was made is not in the next list.
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
            f"{doing}: it lists {', '.join(map(str, missing))} and says that there is no such slice",
            hint="Look at the kernel log. It is asked again.",
            code=UNKNOWN_ERROR,
        )

    def _slice(self, spot: Spot, slice_id: int, doing: str) -> SliceReading | None:
        """Return what one that is listed tells of itself; None where the chip says that there is no such slice, or nothing of the kind."""
        query = SliceQuery(slice_id=slice_id)
        try:
            is_told = self._information(spot, _SLICES, _ONE, query, doing)
        except NotFound:
            return None
        return _slice(query) if is_told else None

    def is_shared(self, spot: Spot) -> bool | None:
        """Whether several containers may have a chip at a time."""
        value, size, doing = (
            ctypes.c_uint(0),
            ctypes.c_uint(ctypes.sizeof(ctypes.c_uint)),
            f"Asking whether {spot} can be shared",
        )
        arguments = (_DEVICE_SHARE, ctypes.c_uint(0), ctypes.byref(value), ctypes.byref(size))
        return bool(value.value) if self._dcmi.answered(spot, "get_device_info", *arguments, doing=doing) else None

    def processes(self, spot: Spot) -> tuple[Process, ...]:
        """Return the processes that have a chip, or a slice of it, open."""
        found, count = (ProcessMemory * _PROCESSES)(), ctypes.c_int(0)
        there = self._dcmi.optional(
            spot, "get_device_resource_info", found, ctypes.byref(count), doing=f"Reading the processes of {spot}"
        )
        if not there:
            return ()
        pids = sorted({int(each.pid) for each in found[: max(min(count.value, _PROCESSES), 0)]})
        return tuple(Process(pid) for pid in pids)

    def condition(self, spot: Spot, without: Collection[str] = ()) -> Condition:
        """Return what a chip says of its health."""
        doing, dcmi = f"Asking {spot} how it is", self._dcmi
        level, result, has_port = ctypes.c_uint(0), ctypes.c_int(0), False
        count, codes = ctypes.c_int(0), (ctypes.c_uint * _ERRORS)()
        dcmi.about(spot, "get_device_health", ctypes.byref(level), doing=doing)
        dcmi.optional(spot, "get_device_errorcode_v2", ctypes.byref(count), codes, ctypes.c_uint(_ERRORS), doing=doing)
        if NETWORK not in without:
            has_port = dcmi.answered(spot, "get_device_network_health", ctypes.byref(result), doing=doing)
        errors = tuple(codes[: max(min(count.value, _ERRORS), 0)])
        return Condition(level.value, errors, result.value if has_port else None)

    def work(self, spot: Spot) -> Work:
        """Return what a chip tells of its present work."""
        doing = f"Reading what {spot} does"
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
        """Return what a slice tells of its present work."""
        query = SliceQuery(slice_id=slice_id)
        if not self._information(spot, _SLICES, _ACTIVITY, query, f"Reading what slice {slice_id} does"):
            return Work()
        computing = query.info.computing
        total, free = int(computing.memory_total), int(computing.memory_free)
        return Work(
            memory_total=total * MEBIBYTE if total else None,
            memory_used=max(total - free, 0) * MEBIBYTE if total else None,
            utilization=computing.utilization / 100 if computing.utilization <= 100 else None,
        )

    def create(self, spot: Spot, template: str, slice_id: int, group: int | None) -> None:
        """Make a slice. What is made with another id than was asked for is taken back."""
        doing = f"Creating slice {slice_id} ({template}) on {spot}"
        wanted = CreateSlice(slice_id=slice_id, group=ANY if group is None else group, template=template.encode())
        made = CreatedSlice()
        self._dcmi.about(spot, "create_vdevice", ctypes.byref(wanted), ctypes.byref(made), doing=doing)
        if made.slice_id != slice_id:
            self.destroy(spot, made.slice_id)
            raise AcceleratorError(
                f"{doing} failed: the driver made one with the id {made.slice_id}, which was taken back",
                hint="Update the driver: this one chooses the ids of slices by itself.",
                code="other-slice",
            )

    def destroy(self, spot: Spot, slice_id: int) -> None:
        """Destroy a slice."""
        doing = f"Destroying slice {slice_id} of {spot}"
        self._dcmi.about(spot, "set_destroy_vdevice", ctypes.c_uint(slice_id), doing=doing)

    def reset(self, spot: Spot) -> None:
        """Reset a chip."""
        self._dcmi.about(spot, "set_device_reset", _INBAND, doing=f"Resetting {spot}")

    def is_started(self, spot: Spot) -> bool:
        """Whether a chip has come up; one that does not tell has."""
        status, doing = ctypes.c_int(0), f"Asking whether {spot} has come up"
        if not self._dcmi.answered(spot, "get_device_boot_status", ctypes.byref(status), doing=doing):
            return True
        return status.value == _STARTED

    def hindrance(self, spot: Spot) -> str:
        """Return what of the machine's modes keeps a chip from being cut."""
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

    def subscribe(self, told: Callable[[Told], object]) -> bool:
        """Have a function told of faults. The library is asked once in the life of this object."""
        with self._lock:
            self._told = told
            if not self._subscribed:
                tell = _TELL(self._hear)
                _SUBSCRIBED.append(tell)
                self._subscribed = self._dcmi.subscribe(EventFilter(), tell)
            return self._subscribed

    def _hear(self, event: Any) -> None:
        """Take an event from the library, on a thread of its own."""
        fault, told = event.contents.fault, self._told
        if told is not None:
            told(Told(int(fault.logic_id), int(fault.code), _BEGINS.get(int(fault.assertion)), text(fault.name)))

    def _label(self, spot: Spot, doing: str) -> Label:
        label = Label()
        self._dcmi.of_card(spot, "get_card_elabel_v2", ctypes.byref(label), doing=doing)
        return label

    def _memory(self, spot: Spot, doing: str) -> tuple[int, int]:
        """Return how much memory a chip has, and how much of it is used, in MB. Where there is HBM the other pair says nothing."""
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
        """Fill a structure with ``dcmi_get_device_info``; False where the chip has no such thing."""
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
    """Return what a chip shares out. What it does not tell is 0, as what it does not have is: nothing is counted of either."""
    told = {CORES: total.computing.cores, HELPERS: float(total.computing.helpers)}
    told.update({name: getattr(total.media, name) for name in ("vpc", "venc", "vdec", "jpegd", "jpege")})
    return {name: exact(value) for name, value in told.items() if value > 0}
