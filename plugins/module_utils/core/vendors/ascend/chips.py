# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The cached data of each chip between two scans: fixed facts and last read values.

All functions that call the source run on the lane of the chip.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ...errors import AcceleratorError, BackendUnavailable, DeviceFaulty, NotFound
from ...host import pci
from ...host.system import System
from ...model import UNKNOWN_ERROR, AttributeValue, Device, Health, Partition, Partitioning, Process, Profile, frozen
from ...partitioning.capacity import MEMORY
from . import names, sharing, topology
from .attributes import ChipFacts, attributes
from .dcmi.dcmi import Spot
from .driver_files import version_of
from .families import Family, family_of, is_paired
from .health import codes
from .npu_smi.npu_smi import Templates
from .readings import NETWORK, Identity, SliceReading, SliceReadings, Source
from .templates import CORES, Template, Totals, capacities_of, profile_id, profiles_of

#: The number of places of a vNPU with an unknown template. If the chip does not report its cores, it counts as large.
_LARGE, _SMALL = 2, 1
#: Seconds. The host's modes are cached for this time.
HINDRANCE_SECONDS = 60.0


@dataclass
class Chip:
    """The fixed facts of a chip until it is replaced. Used on the chip's lane only, except for the topology.

    ``links`` are the links to later chips in the list, by their position. ``templates`` is None while they could not be
    read. ``unanswered`` names the queries that the chip does not support.
    """

    spot: Spot
    identity: Identity
    family: Family
    firmware: str
    pcie_root: str | None
    numa_node: int | None
    links: Mapping[Spot, str]
    associated_card: int | None = None
    templates: tuple[Template, ...] | None = None
    totals: Totals | None = None
    profiles: tuple[Profile, ...] = ()
    capacities: Mapping[str, int] = field(default_factory=dict)
    unanswered: set[str] = field(default_factory=set)

    @property
    def uuid(self) -> str:
        """The UUID of the chip."""
        return self.identity.uuid

    @property
    def place(self) -> topology.Chip:
        """The chip's numbers for the topology."""
        return topology.Chip(self.identity.physical_id, self.spot.card, self.spot.chip)


class Chips:
    """The known chips by UUID. Safe for threads."""

    def __init__(self, source: Source, system: System) -> None:
        self.source = source
        self._system = system
        self._templates = Templates(system, self._template_table)
        self._lock = threading.Lock()
        self._driver_version: str | None = None
        self._kept: dict[str, Chip] = {}
        self._last: dict[str, Device] = {}
        self._attributes: dict[str, Mapping[str, AttributeValue]] = {}
        self._units: dict[str, tuple[str, ...]] = {}
        self._hindrances: dict[Spot, tuple[float, str]] = {}  # each entry is used on its chip's lane

    def _template_table(self, spot: Spot) -> str | None:
        """Return the table of a card's templates from the current source."""
        return self.source.template_table(spot)

    @property
    def driver_version(self) -> str:
        """The driver's version in its spelling. Raises BackendUnavailable before the library is open."""
        if self._driver_version is None:
            raise BackendUnavailable("The chips' library is not open", hint="Open the backend first.")
        return self._driver_version

    def begin(self, driver_version: str) -> None:
        """Start a session of the source. The positions of chips may have changed since the last one."""
        with self._lock:
            self._driver_version = driver_version
            self._kept.clear()
        self._templates.forget()

    def end(self) -> None:
        """Delete all data that is valid for a session only. The last read values stay."""
        with self._lock:
            self._driver_version = None
            self._kept.clear()

    def kept(self) -> tuple[Chip, ...]:
        """Return the cached facts, ordered by physical ID."""
        with self._lock:
            return tuple(sorted(self._kept.values(), key=lambda chip: chip.identity.physical_id))

    def known(self) -> tuple[Device, ...]:
        """Return the last read values of each chip."""
        with self._lock:
            return tuple(self._last.values())

    def last(self, uuid: str) -> Device | None:
        """Return the last read values of a chip; None for an unknown chip."""
        with self._lock:
            return self._last.get(uuid)

    def last_at(self, index: int) -> Device | None:
        """Return the last read values of the chip with this index; None without one."""
        with self._lock:
            return next((device for device in self._last.values() if device.index == index), None)

    def indices(self, spots: Sequence[Spot]) -> Mapping[Spot, int]:
        """Return the index of the chip at each position: its physical ID, or an unused number if that was never read."""
        with self._lock:
            known = {chip.spot: chip.identity.physical_id for chip in self._kept.values()}
            taken = {*known.values(), *(device.index for device in self._last.values())}
        found: dict[Spot, int] = {}
        for position, spot in enumerate(spots):
            index = known.get(spot)
            if index is None:
                # Chips are usually numbered in the order of their cards, so a known chip with this index may be this
                # one.
                index = position if position not in found.values() else max({*taken, *found.values()}, default=-1) + 1
            found[spot] = index
        return found

    def key_at(self, spot: Spot) -> str:
        """Return the lane of the chip at a position: its UUID if known."""
        with self._lock:
            return next((chip.uuid for chip in self._kept.values() if chip.spot == spot), str(spot))

    def forget(self, uuid: str, taken_away: bool = False) -> None:
        """Delete the cached facts of a chip; with ``taken_away`` also its last read values."""
        with self._lock:
            self._kept.pop(uuid, None)
            if taken_away:
                self._last.pop(uuid, None)
                self._attributes.pop(uuid, None)

    def chip(self, uuid: str) -> Chip:
        """Return the fixed facts of a chip. Raises NotFound."""
        with self._lock:
            found = self._kept.get(uuid)
        if found is None:
            raise NotFound(f"This machine has no NPU {uuid}", hint="It may have been removed. Scan the NPUs again.")
        return found

    def reset_unit(self, uuid: str) -> tuple[str, ...]:
        """Return the chips that the driver resets together with this one, including it, ordered by position.

        Raises NotFound.
        """
        own = self.chip(uuid)
        with self._lock:
            units = [self._kept[each] for each in self._units.get(uuid, ()) if each in self._kept]
        return tuple(each.uuid for each in sorted(units or [own], key=lambda each: each.spot))

    def named(self, logic_id: int) -> str:
        """Return the UUID of the chip with this logic ID, which events use; "" without one."""
        with self._lock:
            return next((chip.uuid for chip in self._kept.values() if chip.identity.logic_id == logic_id), "")

    def scan(self, spot: Spot, spots: Sequence[Spot], full: bool) -> Device:
        """Scan the chip at a position and return its facts: identity, health, and changing facts; with ``full`` all facts."""
        uuid = self.source.uuid(spot)
        with self._lock:
            chip = None if full else self._kept.get(uuid)
        if chip is None or chip.spot != spot:
            chip = self._meet(spot, spots)
        return self._read(chip, self._health(chip))

    def read(self, uuid: str) -> Device:
        """Read the changing facts of a chip. The health is that of the last scan, so that claims do not wait for it."""
        last = self.last(uuid)
        return self._read(self.chip(uuid), last.health if last is not None else Health())

    def settle(self) -> None:
        """Compute the topology of the chips after a scan of all of them."""
        kept = self.kept()
        if not kept:
            return
        spots = {chip.spot: chip.identity.physical_id for chip in kept}
        links = {
            pair: link
            for chip in kept
            for other, link in chip.links.items()
            if other in spots
            for pair in ((spots[chip.spot], spots[other]), (spots[other], spots[chip.spot]))
        }
        # A node's name is not unique across clusters and is unknown here. The ID of a die is unique and permanent.
        machine = kept[0].uuid.removeprefix("NPU-")
        found: dict[str, Mapping[str, AttributeValue]] = {}
        units: dict[str, tuple[str, ...]] = {}
        for family in {chip.family.word: chip.family for chip in kept}.values():
            mine = [chip for chip in kept if chip.family == family]
            placed = topology.places(family, [chip.place for chip in mine], links, mine[0].identity.board_id)
            for chip in mine:
                found[chip.uuid] = attributes(self._facts(chip), machine, placed[chip.identity.physical_id])
            uuids = {chip.identity.physical_id: chip.uuid for chip in mine}
            cards: dict[int, list[int]] = {}
            for chip in mine:
                cards.setdefault(chip.spot.card, []).append(chip.identity.physical_id)
            for chip in mine:
                unit = topology.reset_unit(family, chip.place, placed, cards, chip.associated_card)
                units[chip.uuid] = tuple(uuids[each] for each in unit)
        with self._lock:
            self._attributes.update(found)
            self._units = units
            for uuid, device in self._last.items():
                if uuid in found:
                    self._last[uuid] = replace(device, attributes=found[uuid])

    def dressed(self, device: Device) -> Device:
        """Return a device with its topology attributes, the devices of its reset unit, and a sign for a mixed card."""
        with self._lock:
            device = replace(device, attributes=self._attributes.get(device.uuid, device.attributes))
            addresses = {chip.uuid: chip.identity.pci_address for chip in self._kept.values()}
            unit = [addresses[each] for each in self._units.get(device.uuid, ()) if each in addresses]
            device = replace(device, linked=tuple(sorted(set(unit) - {device.pci_address})))
            cards = {chip.uuid: chip.spot.card for chip in self._kept.values()}
            cut = {cards.get(each.uuid) for each in self._last.values() if each.partitions}
        is_mixed = not device.partitions and cards.get(device.uuid) in cut - {None}
        if not is_mixed or not is_paired(device.pci_device_id, device.pci_subsystem_id):
            return device
        return replace(device, health=replace(device.health, signs=(*device.health.signs, codes.MIXED_CARD)))

    def _facts(self, chip: Chip) -> ChipFacts:
        identity = chip.identity
        return ChipFacts(
            family=chip.family,
            at=chip.place,
            uuid=chip.uuid,
            model=identity.model,
            product=identity.product,
            card_serial=identity.card_serial,
            driver_version=self.driver_version,
            firmware_version=chip.firmware,
            pci_address=identity.pci_address,
            pcie_root=chip.pcie_root,
            numa_node=chip.numa_node,
            super_pod=identity.super_pod,
        )

    def _meet(self, spot: Spot, spots: Sequence[Spot]) -> Chip:
        identity = self.source.identity(spot)
        family = family_of(identity.pci_device_id)
        self._templates.retry(spot)
        links: dict[Spot, str] = {}
        for other in spots[spots.index(spot) + 1 :] if spot in spots else ():
            link = self.source.link(spot, other)
            if link is None:
                break  # a chip that does not report one link reports no others
            links[other] = link
        chip = Chip(
            spot=spot,
            identity=identity,
            family=family,
            firmware=version_of(self._system, "firmware"),
            pcie_root=pci.pcie_root(self._system, identity.pci_address),
            numa_node=pci.numa_node(self._system, identity.pci_address),
            links=MappingProxyType(links),
            associated_card=self.source.associated_card(spot) if family.is_module else None,
        )
        with self._lock:
            for uuid in [each.uuid for each in self._kept.values() if each.spot == spot]:
                del self._kept[uuid]
            self._kept[chip.uuid] = chip
        return chip

    def _health(self, chip: Chip) -> Health:
        condition = self.source.condition(chip.spot, chip.unanswered)
        if condition.network is None:
            chip.unanswered.add(NETWORK)
        of_port = codes.network_sign(condition.network) if condition.network is not None else None
        return Health((*codes.signs(condition.level, condition.errors), *((of_port,) if of_port is not None else ())))

    def _slices(self, chip: Chip) -> SliceReadings | None:
        """Return the readings of a chip's vNPUs; None for a chip that cannot be partitioned.

        A chip that had vNPUs cannot have become such a chip. If it reports that, the reading is a fault, because the
        driver would never destroy vNPUs that it considers gone. Raises DeviceFaulty.
        """
        readings = self.source.slices(chip.spot) or self.source.slices(chip.spot)
        last = self._last.get(chip.uuid)
        if readings is None and last is not None and last.partitions:
            raise DeviceFaulty(
                f"Listing the slices of {chip.spot}: it reports no slices, and it had {len(last.partitions)}",
                hint="Check the kernel log. The next scan queries it again.",
                code=UNKNOWN_ERROR,
            )
        return readings

    def _read(self, chip: Chip, health: Health) -> Device:
        readings = self._slices(chip) if chip.family.supports_vnpus else None
        if readings is not None:
            self._settle_profiles(chip, readings)
        processes = tuple(
            each if each.name else Process(each.pid, _command(self._system, each.pid))
            for each in self.source.processes(chip.spot)
        )
        partitions = _partitions(chip, readings, processes) if readings is not None else ()
        device = Device(
            vendor=names.VENDOR,
            index=chip.identity.physical_id,
            minor=chip.identity.physical_id,
            uuid=chip.uuid,
            product=chip.identity.product or f"Ascend {chip.identity.model}",
            pci_address=chip.identity.pci_address,
            pcie_root=chip.pcie_root,
            numa_node=chip.numa_node,
            memory_bytes=chip.identity.memory_bytes,
            memory_slices=chip.family.places if chip.profiles else 0,
            attributes={},
            capacities=chip.capacities or _whole_capacities(chip),
            partitioning=Partitioning(
                supported=readings is not None,
                enabled=bool(partitions),
                pending=bool(partitions),
                has_mode=False,
                blocked=self._hindrance(chip.spot) if readings is not None else "",
            ),
            profiles=chip.profiles,
            partitions=partitions,
            processes=processes,
            health=health,
            pci_device_id=chip.identity.pci_device_id,
            pci_subsystem_id=chip.identity.pci_subsystem_id,
            unshareable=sharing.obstacle(self.source.is_shared(chip.spot)),
        )
        device = self._with_attributes(chip, device)
        with self._lock:
            self._last[device.uuid] = device
        return device

    def _hindrance(self, spot: Spot) -> str:
        """Return the modes of the host that prevent vNPUs; "" without any.

        Cached for a minute, because npu-smi is slow.
        """
        now = time.monotonic()
        asked, known = self._hindrances.get(spot, (now - HINDRANCE_SECONDS, ""))
        if now - asked >= HINDRANCE_SECONDS:
            with contextlib.suppress(AcceleratorError):  # without an answer no mode is known to prevent vNPUs
                known = self.source.hindrance(spot)
            self._hindrances[spot] = (now, known)
        return known

    def _with_attributes(self, chip: Chip, device: Device) -> Device:
        """Return a device with its attributes. Before the topology is computed, they are those of a single chip."""
        with self._lock:
            known = self._attributes.get(device.uuid)
        if known is None:
            alone = topology.Place((chip.place.physical_id,), (chip.place.physical_id,))
            known = attributes(self._facts(chip), chip.uuid.removeprefix("NPU-"), alone)
        return replace(device, attributes=known)

    def _settle_profiles(self, chip: Chip, readings: SliceReadings) -> None:
        """Store the profiles of a chip in its facts. They are read once, and again after a failure."""
        if chip.templates is not None:
            return
        identity = chip.identity
        kind = (
            identity.pci_device_id,
            identity.pci_subsystem_id,
            identity.board_id,
            identity.model,
            identity.memory_bytes,
        )
        templates = self._templates.of(kind, chip.spot)
        if templates is None:
            return
        chip.templates = templates
        chip.totals = Totals(readings.totals, identity.memory_bytes)
        chip.profiles = profiles_of(chip.family, templates, chip.totals)
        chip.capacities = capacities_of(chip.family, templates, chip.totals)


def _whole_capacities(chip: Chip) -> Mapping[str, int]:
    return frozen({"memory": chip.identity.memory_bytes} if chip.identity.memory_bytes else {})


def _partitions(chip: Chip, readings: SliceReadings, processes: Sequence[Process]) -> tuple[Partition, ...]:
    """Return the existing vNPUs, ordered by placement."""
    profiles = {profile.name: profile for profile in chip.profiles}
    placed = names.found_placements(
        chip.family, [(each.slice_id, each.group, _places(each, profiles)) for each in readings.slices]
    )
    used = [each for each in readings.slices if each.is_used]
    found = []
    for each in readings.slices:
        profile = profiles.get(each.template)
        capacities = _capacities(each, profile)
        holders = _holders(each, processes if len(used) == 1 else ()) if each.is_used else ()
        found.append(
            Partition(
                uuid=names.slice_uuid(chip.uuid, each.slice_id),
                profile=each.template,
                profile_id=profile_id(each.template),
                placement=placed[each.slice_id],
                instance_id=each.slice_id,
                compute_instance_id=None,
                memory_bytes=capacities.get(MEMORY, 0),
                processes=holders,
                capacities=capacities,
                has_chosen_id=True,
                elsewhere=names.elsewhere(chip.family, each.slice_id, placed[each.slice_id]),
            )
        )
    return tuple(sorted(found, key=lambda each: (each.placement, each.instance_id)))


def _places(reading: SliceReading, profiles: Mapping[str, Profile]) -> int:
    profile = profiles.get(reading.template)
    if profile is not None:
        return profile.size
    return _SMALL if 0 < reading.cores <= 1 else _LARGE


def _capacities(reading: SliceReading, profile: Profile | None) -> Mapping[str, int]:
    """Return the capacities of a vNPU: those of its template, and its own memory if it reports it."""
    known = profile.capacities if profile is not None else {CORES: math.floor(reading.cores)}
    reported = {MEMORY: reading.memory_bytes} if reading.memory_bytes else {}
    return frozen({name: amount for name, amount in {**known, **reported}.items() if amount or profile is not None})


def _holders(reading: SliceReading, processes: Iterable[Process]) -> tuple[Process, ...]:
    """Return the users of a vNPU. A chip reports processes without their vNPU, so in doubt the user is the container."""
    return tuple(processes) or (Process(0, f"container {reading.container}".strip()),)


def _command(system: System, pid: int) -> str:
    try:
        return system.read_text(f"/proc/{pid}/comm").strip()
    except OSError:
        return ""
