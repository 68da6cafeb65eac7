# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Makes and destroys slices, at exactly the place that is wanted, and says in words why one could not be. On the chip's lane."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from .. import room
from ..errors import AcceleratorError, DoesNotFit, InUse, InvalidLayout, NotFound, NotPermitted, Unsupported
from ..model import Device, Partition, Placement, Process, Profile
from ..system import System
from . import names
from .chips import Chip
from .driver_files import slice_node
from .families import family_of
from .readings import Source

# How long the node of a slice may take to appear.
NODE_SECONDS = 5.0
_PERIOD = 0.02


def create(
    source: Source,
    system: System,
    chip: Chip,
    device: Device,
    profile_id: int,
    placement: Placement,
    read: Callable[[], Device],
    slice_id: int | None = None,
) -> Partition:
    """Make a slice at a placement. ``device`` is the chip as it is, ``read`` reads it again.

    With a ``slice_id`` that was chosen before it has that one: whoever wrote it down knows the slice by it.

    Raises NotFound, InvalidLayout, DoesNotFit, InUse, NotPermitted, Unsupported, DeviceFaulty; nothing stays behind then.
    """
    if not device.partitioning.supported:
        raise Unsupported(f"{device.describe()} cannot be cut into slices")
    profile = _profile(device, profile_id, placement)
    doing = f"Creating a slice {profile.name} at {placement} on {device.describe()}"
    slice_id = _free_id(device, placement, slice_id, doing)
    try:
        source.create(chip.spot, profile.name, slice_id, names.group_of(placement))
    except NotPermitted as error:
        raise NotPermitted(f"{doing}: {error.message}", hint=source.hindrance(chip.spot) or error.hint) from error
    except InUse as error:
        held = ", ".join(map(str, device.processes))
        raise InUse(
            f"{doing}: the whole chip is in use" + (f" by {held}" if held else ""),
            pids=[each.pid for each in device.processes],
            hint="End what has the chip open, containers among it.",
        ) from error
    except AcceleratorError as error:
        if error.code == "partition":
            raise _no_room(device, placement, doing, read) from error
        raise
    now = read()
    made = next((each for each in now.partitions if each.instance_id == slice_id), None)
    if made is None or made.key != (profile.profile_id, placement.start, placement.size):
        found = made.describe() if made is not None else "no slice with that id"
        if made is not None:
            source.destroy(chip.spot, slice_id)
        raise AcceleratorError(
            f"{doing}: the driver said that slice {slice_id} was made, and afterwards there is {found}",
            hint="Look whether something else makes slices on this machine, such as a device plugin.",
            code="not-created",
        )
    _await_node(system, slice_id)
    return made


def destroy(source: Source, chip: Chip, device: Device, slice_id: int, read: Callable[[], Device]) -> None:
    """Destroy a slice that nobody uses: the driver would destroy it under whoever does. ``read`` reads the chip again.

    Raises NotFound, InUse, DeviceFaulty.
    """
    found = next((each for each in device.partitions if each.instance_id == slice_id), None)
    if found is None:
        raise NotFound(f"{device.describe()} has no slice {slice_id}")
    if found.processes:
        raise InUse(
            f"Destroying slice {slice_id} of {device.describe()}: it is in use by {', '.join(map(str, found.processes))}",
            pids=_pids(found.processes),
            hint="End the container that has it.",
        )
    try:
        source.destroy(chip.spot, slice_id)
    except NotFound as error:
        # Whoever takes it for gone would leave it for ever.
        if any(each.instance_id == slice_id for each in read().partitions):
            raise AcceleratorError(
                f"Destroying slice {slice_id} of {device.describe()}: the driver says that it is not there, and the chip lists it still",
                hint="Look at the kernel log. It is tried again.",
                code="not-destroyed",
            ) from error
        raise


def choose_id(device: Device, placement: Placement, taken: Collection[int] = ()) -> int:
    """Return the id to make a slice at a placement with, beside the slices that are there and ids that others are to have. Pure.

    Raises InUse when none is left.
    """
    ids = {*(each.instance_id for each in device.partitions), *taken}
    family = family_of(device.pci_device_id)
    number = names.free_number(family, placement, {names.number_of(each) for each in ids})
    if number is None:
        there = ", ".join(each.describe() for each in device.partitions) or "none"
        raise InUse(
            f"No id is left for a slice at {placement} on {device.describe()}, of {family.numbers}; slices on it: {there}",
            hint="Remove slices that this driver did not make.",
        )
    return names.slice_id(device.minor, number)


def _free_id(device: Device, placement: Placement, wanted: int | None, doing: str) -> int:
    """Return the id of a slice that is about to be made. Raises DoesNotFit, naming what is in the way."""
    blockers = room.in_the_way(placement, device.partitions)
    blockers = blockers or [each for each in device.partitions if each.instance_id == wanted]
    try:
        if not blockers:
            return choose_id(device, placement) if wanted is None else wanted
    except InUse:
        blockers = list(device.partitions)
    in_the_way = ", ".join(each.describe() for each in blockers)
    raise DoesNotFit(f"{doing}: there is no room; in the way: {in_the_way}", blockers=blockers)


def _no_room(device: Device, placement: Placement, doing: str, read: Callable[[], Device]) -> DoesNotFit:
    """Say why the chip refused: its counters or its vGroups do not allow it, which may differ from what was known of them."""
    now = read().partitions
    there = ", ".join(each.describe() for each in now) or "none"
    before = [each.key for each in device.partitions]
    changed = "" if [each.key for each in now] == before else "; they have changed since they were looked at"
    return DoesNotFit(
        f"{doing}: the chip has no room for it; slices on it: {there}{changed}",
        blockers=[each for each in now if each.placement.clashes(placement)] or now,
        hint="What is free in all may lie apart, or the chip keeps it for itself. Another chip may have room.",
    )


def _await_node(system: System, slice_id: int) -> None:
    """Wait until the kernel has made a slice's node; that it is not there is said when a container is to have it."""
    until = time.monotonic() + NODE_SECONDS
    while not system.exists(slice_node(slice_id)) and time.monotonic() < until:
        time.sleep(_PERIOD)


def _profile(device: Device, profile_id: int, placement: Placement) -> Profile:
    profile = device.profile(profile_id)
    if profile is None:
        raise NotFound(
            f"{device.describe()} has no template with the number {profile_id}; it has "
            + (", ".join(f"{each.name} ({each.profile_id})" for each in device.profiles) or "none")
        )
    if placement not in profile.placements:
        raise InvalidLayout(
            f"{profile.name} cannot be at {placement} on {device.describe()}; its placements are "
            + ", ".join(str(each) for each in profile.placements)
        )
    return profile


def _pids(processes: Sequence[Process]) -> list[int]:
    return [each.pid for each in processes if each.pid]
