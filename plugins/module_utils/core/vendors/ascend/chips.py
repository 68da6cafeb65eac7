# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The cached data of each chip between two scans: fixed facts and last read values.

All functions that call the source run on the lane of the chip.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ...errors import AcceleratorError, BackendUnavailable, DeviceFaulty, NotFound
from ...host import pci
from ...host.system import System
from ...model import UNKNOWN_ERROR, AttributeValue, Device, Health, Partition, Partitioning, Process, Profile, frozen
from ...partitioning.capacity import MEMORY
from ..device_cache import DeviceCache
from ..host_texts import text_or_empty
from . import names, sharing, topology
from .attributes import ChipFacts, attributes
from .dcmi.dcmi import Spot
from .driver_files import version_of
from .families import Family, family_of, is_paired
from .health import codes
from .npu_smi.npu_smi import Templates
from .readings import NETWORK, Identity, SliceReading, SliceReadings, Source
from .templates import CORES, Template, Totals, capacities_of, profile_id, profiles_of

#: Seconds. The host's modes are cached for this time.
MODE_SECONDS = 60.0


@dataclass
class Chip:
    """The fixed facts of a chip until it is replaced. Used on the chip's lane only, except for the topology.

    ``links`` are the links to later chips in the list, by their position. ``templates`` is None while they could not be
    read. ``unsupported_queries`` names the queries that the chip does not support.
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
    unsupported_queries: set[str] = field(default_factory=set)

    @property
    def uuid(self) -> str:
        """The UUID of the chip."""
        return self.identity.uuid

    @property
    def index(self) -> int:
        """The index of the chip, which is its physical ID."""
        return self.identity.physical_id

    @property
    def place(self) -> topology.Chip:
        """The chip's numbers for the topology."""
        return topology.Chip(self.identity.physical_id, self.spot.card, self.spot.chip)


class Chips(DeviceCache[Chip]):
    """The known chips by UUID. Safe for threads."""

    def __init__(self, source: Source, system: System) -> None:
        super().__init__()
        self.source = source
        self._system = system
        # The source can be replaced later, so each call reads the attribute again.
        self._templates = Templates(system, lambda spot: self.source.template_table(spot))
        self._driver_version: str | None = None
        self._attributes: dict[str, Mapping[str, AttributeValue]] = {}
        self._reset_units: dict[str, tuple[str, ...]] = {}
        #: The time of the last query, and the mode that prevents vNPUs, by chip. Each entry is used on its chip's lane.
        self._blocking_modes: dict[Spot, tuple[float, str]] = {}

    @property
    def driver_version(self) -> str:
        """The driver's version in its spelling. Raises BackendUnavailable before the library is open."""
        if self._driver_version is None:
            raise BackendUnavailable("The chips' library is not open", hint="Open the backend first.")
        return self._driver_version

    def begin_session(self, driver_version: str) -> None:
        """Start a session of the source. The positions of chips may have changed since the last one."""
        with self._lock:
            self._driver_version = driver_version
            self._facts.clear()
        self._templates.forget()

    def end_session(self) -> None:
        """Delete all data that is valid for a session only. The last read values stay."""
        with self._lock:
            self._driver_version = None
            self._facts.clear()

    def indices(self, spots: Sequence[Spot]) -> Mapping[Spot, int]:
        """Return the index of the chip at each position: its physical ID, or an unused number if that was never read."""
        with self._lock:
            known = {chip.spot: chip.identity.physical_id for chip in self._facts.values()}
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

    def lane_of(self, spot: Spot) -> str:
        """Return the lane of the chip at a position: its UUID if known."""
        with self._lock:
            return next((chip.uuid for chip in self._facts.values() if chip.spot == spot), str(spot))

    def forget(self, uuid: str, *, is_removed: bool = False) -> None:
        """Delete the cached facts of a chip. Of a removed chip, also delete the last read values."""
        with self._lock:
            self._facts.pop(uuid, None)
            if is_removed:
                self._last.pop(uuid, None)
                self._attributes.pop(uuid, None)

    def chip(self, uuid: str) -> Chip:
        """Return the fixed facts of a chip. Raises NotFound."""
        with self._lock:
            found = self._facts.get(uuid)
        if found is None:
            raise NotFound(f"This machine has no NPU {uuid}", hint="It may have been removed. Scan the NPUs again.")
        return found

    def reset_unit(self, uuid: str) -> tuple[str, ...]:
        """Return the chips that the driver resets together with this one, including it, ordered by position.

        Raises NotFound.
        """
        own = self.chip(uuid)
        with self._lock:
            unit = [self._facts[each] for each in self._reset_units.get(uuid, ()) if each in self._facts]
        return tuple(each.uuid for each in sorted(unit or [own], key=lambda each: each.spot))

    def uuid_of_logic_id(self, logic_id: int) -> str:
        """Return the UUID of the chip with this logic ID, which events use; "" without one."""
        with self._lock:
            return next((chip.uuid for chip in self._facts.values() if chip.identity.logic_id == logic_id), "")

    def scan(self, spot: Spot, spots: Sequence[Spot], full: bool) -> Device:
        """Scan the chip at a position and return its facts: identity, health, and changing facts; with ``full`` all facts."""
        uuid = self.source.uuid(spot)
        with self._lock:
            chip = None if full else self._facts.get(uuid)
        if chip is None or chip.spot != spot:
            chip = self._read_facts(spot, spots)
        return self._read(chip, self._read_health(chip))

    def read(self, uuid: str) -> Device:
        """Read the changing facts of a chip. The health is that of the last scan, so that claims do not wait for it."""
        last = self.last_device(uuid)
        return self._read(self.chip(uuid), last.health if last is not None else Health())

    def update_topology(self) -> None:
        """Compute the topology of the chips after a scan of all of them."""
        chips = self.cached_facts()
        if not chips:
            return
        # A node's name is not unique across clusters and is unknown here. The ID of a die is unique and permanent.
        node = _die_of(chips[0])
        attributes_by_uuid: dict[str, Mapping[str, AttributeValue]] = {}
        reset_units: dict[str, tuple[str, ...]] = {}
        for family in {chip.family.word: chip.family for chip in chips}.values():
            members = [chip for chip in chips if chip.family == family]
            places = topology.places(
                family, [each.place for each in members], _links(chips), members[0].identity.board_id
            )
            uuids = {chip.index: chip.uuid for chip in members}
            cards: dict[int, list[int]] = {}
            for chip in members:
                cards.setdefault(chip.spot.card, []).append(chip.index)
            for chip in members:
                attributes_by_uuid[chip.uuid] = attributes(self._chip_facts(chip), node, places[chip.index])
                unit = topology.reset_unit(family, chip.place, places, cards, chip.associated_card)
                reset_units[chip.uuid] = tuple(uuids[each] for each in unit)
        with self._lock:
            self._attributes.update(attributes_by_uuid)
            self._reset_units = reset_units
            for uuid, device in self._last.items():
                if uuid in attributes_by_uuid:
                    self._last[uuid] = replace(device, attributes=attributes_by_uuid[uuid])

    def with_topology(self, device: Device) -> Device:
        """Return a device with its topology attributes, the devices of its reset unit, and a sign for a mixed card.

        A card is mixed if it has a partitioned chip and a whole one, and its family requires one kind.
        """
        with self._lock:
            addresses = {chip.uuid: chip.identity.pci_address for chip in self._facts.values()}
            unit = {addresses[each] for each in self._reset_units.get(device.uuid, ()) if each in addresses}
            cards = {chip.uuid: chip.spot.card for chip in self._facts.values()}
            partitioned_cards = {
                cards[each.uuid] for each in self._last.values() if each.partitions and each.uuid in cards
            }
            device = replace(
                device,
                attributes=self._attributes.get(device.uuid, device.attributes),
                linked=tuple(sorted(unit - {device.pci_address})),
            )
        is_mixed = not device.partitions and cards.get(device.uuid) in partitioned_cards
        if not is_mixed or not is_paired(device.pci_device_id, device.pci_subsystem_id):
            return device
        return replace(device, health=replace(device.health, signs=(*device.health.signs, codes.MIXED_CARD)))

    def _chip_facts(self, chip: Chip) -> ChipFacts:
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

    def _read_facts(self, spot: Spot, spots: Sequence[Spot]) -> Chip:
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
            for uuid in [each.uuid for each in self._facts.values() if each.spot == spot]:
                del self._facts[uuid]
            self._facts[chip.uuid] = chip
        return chip

    def _read_health(self, chip: Chip) -> Health:
        condition = self.source.condition(chip.spot, chip.unsupported_queries)
        if condition.network is None:
            chip.unsupported_queries.add(NETWORK)
        port_sign = codes.network_sign(condition.network) if condition.network is not None else None
        return Health(
            (*codes.signs(condition.level, condition.errors), *([port_sign] if port_sign is not None else []))
        )

    def _read_vnpus(self, chip: Chip) -> SliceReadings | None:
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
        readings = self._read_vnpus(chip) if chip.family.supports_vnpus else None
        if readings is not None:
            self._update_profiles(chip, readings)
        processes = tuple(
            each if each.name else Process(each.pid, text_or_empty(self._system, f"/proc/{each.pid}/comm"))
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
                blocked=self._blocking_mode(chip.spot) if readings is not None else "",
            ),
            profiles=chip.profiles,
            partitions=partitions,
            processes=processes,
            health=health,
            pci_device_id=chip.identity.pci_device_id,
            pci_subsystem_id=chip.identity.pci_subsystem_id,
            sharing_obstacle=sharing.sharing_obstacle(self.source.is_shared(chip.spot)),
        )
        device = self._with_attributes(chip, device)
        with self._lock:
            self._last[device.uuid] = device
        return device

    def _blocking_mode(self, spot: Spot) -> str:
        """Return the mode of the host that prevents vNPUs, with the remedy; "" without one.

        Cached for MODE_SECONDS, because npu-smi is slow.
        """
        now = time.monotonic()
        read_at, mode = self._blocking_modes.get(spot, (now - MODE_SECONDS, ""))
        if now - read_at >= MODE_SECONDS:
            with contextlib.suppress(AcceleratorError):  # without an answer no mode is known to prevent vNPUs
                mode = self.source.hindrance(spot)
            self._blocking_modes[spot] = (now, mode)
        return mode

    def _with_attributes(self, chip: Chip, device: Device) -> Device:
        """Return a device with its attributes. Before the topology is computed, they are those of a single chip."""
        with self._lock:
            known = self._attributes.get(device.uuid)
        if known is None:
            alone = topology.Place((chip.place.physical_id,), (chip.place.physical_id,))
            known = attributes(self._chip_facts(chip), _die_of(chip), alone)
        return replace(device, attributes=known)

    def _update_profiles(self, chip: Chip, readings: SliceReadings) -> None:
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


def _die_of(chip: Chip) -> str:
    """Return the ID of a chip's die."""
    return chip.uuid.removeprefix("NPU-")


def _links(chips: Sequence[Chip]) -> dict[tuple[int, int], str]:
    """Return the reported links between chips by pairs of physical IDs, each pair in both orders."""
    ids = {chip.spot: chip.index for chip in chips}
    return {
        pair: link
        for chip in chips
        for other, link in chip.links.items()
        if other in ids
        for pair in ((chip.index, ids[other]), (ids[other], chip.index))
    }


def _whole_capacities(chip: Chip) -> Mapping[str, int]:
    return frozen({"memory": chip.identity.memory_bytes} if chip.identity.memory_bytes else {})


def _partitions(chip: Chip, readings: SliceReadings, processes: Sequence[Process]) -> tuple[Partition, ...]:
    """Return the existing vNPUs, ordered by placement."""
    profiles = {profile.name: profile for profile in chip.profiles}
    placed = names.found_placements(
        chip.family, [(each.slice_id, each.group, _place_count(each, profiles)) for each in readings.slices]
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
                equivalent_placements=names.elsewhere(chip.family, each.slice_id, placed[each.slice_id]),
            )
        )
    return tuple(sorted(found, key=lambda each: (each.placement, each.instance_id)))


def _place_count(reading: SliceReading, profiles: Mapping[str, Profile]) -> int:
    """Return the number of places of a vNPU, from its template or from its cores. Without both it counts as 2."""
    profile = profiles.get(reading.template)
    if profile is not None:
        return profile.size
    return 1 if 0 < reading.cores <= 1 else 2


def _capacities(reading: SliceReading, profile: Profile | None) -> Mapping[str, int]:
    """Return the capacities of a vNPU: those of its template, and its own memory if it reports it."""
    known = profile.capacities if profile is not None else {CORES: math.floor(reading.cores)}
    reported = {MEMORY: reading.memory_bytes} if reading.memory_bytes else {}
    return frozen({name: amount for name, amount in {**known, **reported}.items() if amount or profile is not None})


def _holders(reading: SliceReading, processes: Iterable[Process]) -> tuple[Process, ...]:
    """Return the users of a vNPU. A chip reports processes without their vNPU, so in doubt the user is the container."""
    return tuple(processes) or (Process(0, f"container {reading.container}".strip()),)
