# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Create and destroy vNPUs at a given placement, with errors that explain a rejection.

Call all functions on the chip's lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction

from ...errors import (
    AcceleratorError,
    BackendUnavailable,
    DoesNotFit,
    InUse,
    NotFound,
    NotPermitted,
    Unsupported,
)
from ...host.system import System
from ...model import Device, Partition, Placement, Process, Profile
from ...partitioning import capacity as partitioning_capacity
from ..profile_lookup import find_profile
from . import names
from .chips import Chip
from .driver_files import slice_node
from .families import family_of, helpers_of
from .health.faults import TRANSIENT
from .readings import Source
from .templates import HELPERS, shortages

# Seconds. The timeout for the device node of a new vNPU.
NODE_SECONDS = 5.0
_PERIOD = 0.02
#: The pauses, in seconds, before a change is repeated that failed with a transient code and without effect.
CHANGE_PAUSES = (0.2, 1.0)


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
    """Create a vNPU at a placement. ``device`` is the current state of the chip, and ``read`` reads it again.

    With ``slice_id``, the vNPU gets this ID, which the caller has chosen and may have recorded. Raises NotFound,
    InvalidLayout, DoesNotFit, InUse, NotPermitted, Unsupported, or DeviceFaulty; then no vNPU remains.
    """
    if not device.partitioning.supported:
        raise Unsupported(f"{device.describe()} cannot be cut into slices")
    profile = find_profile(device.profiles, profile_id, placement, device=device.describe(), term="template")
    doing = f"Creating a slice {profile.name} at {placement} on {device.describe()}"
    number = slice_id = _free_id(device, placement, slice_id, doing)
    failed = _change(
        lambda: source.create(chip.spot, profile.name, number, names.group_of(placement)),
        # After any other code, a vNPU with that ID belongs to another program.
        lambda now, error: error.code in TRANSIENT and number in _ids(now),
        read,
    )
    if failed is not None:
        error, refused = failed
        raise _refusal(source, chip, refused, profile, placement, doing, error) from error
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
    """Destroy a vNPU that is not in use. The driver would also destroy one in use. ``read`` reads the chip again.

    Raises NotFound, InUse, or DeviceFaulty.
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
    missing: list[NotFound] = []

    def remove() -> None:
        try:
            source.destroy(chip.spot, slice_id)
        except NotFound as error:
            missing.append(error)
            raise

    failed = _change(remove, lambda now, _error: slice_id not in _ids(now), read)
    if failed is not None and missing:
        # If the vNPU counted as destroyed, it would remain forever.
        raise AcceleratorError(
            f"Destroying slice {slice_id} of {device.describe()}: the driver reports that it does not exist, but the chip still lists it",
            hint="Check the kernel log. The driver retries it.",
            code="not-destroyed",
        ) from failed[0]
    if failed is not None:
        raise failed[0]
    if missing:
        raise missing[0]


def _change(
    change: Callable[[], None], is_done: Callable[[Device, AcceleratorError], bool], read: Callable[[], Device]
) -> tuple[AcceleratorError, Device] | None:
    """Call ``change``, and return None, or its error with the state of the chip afterwards.

    A code of DCMI does not show whether the call had an effect, so the state of the chip decides. Without effect, a
    change with a transient code is repeated.
    """
    pauses = iter(CHANGE_PAUSES)
    while True:
        try:
            change()
        except BackendUnavailable:
            raise
        except AcceleratorError as error:
            now, pause = read(), next(pauses, None)
            if is_done(now, error):
                return None
            if pause is None or error.code not in TRANSIENT:
                return error, now
            time.sleep(pause)
        else:
            return None


def _ids(device: Device) -> set[int]:
    return {each.instance_id for each in device.partitions}


def choose_id(device: Device, placement: Placement, taken: Collection[int] = ()) -> int:
    """Return the ID for a new vNPU at a placement, different from those of existing vNPUs and from ``taken``.

    Raises InUse if no ID is free.
    """
    ids = {*(each.instance_id for each in device.partitions), *taken}
    family = family_of(device.pci_device_id)
    number = names.free_number(family, placement, {names.number_of(each) for each in ids})
    if number is None:
        there = ", ".join(each.describe() for each in device.partitions) or "none"
        raise InUse(
            f"No ID is free for a vNPU at {placement} on {device.describe()}, which has {family.numbers} IDs; vNPUs on it: {there}",
            hint="Remove slices that this driver did not make.",
        )
    return names.slice_id(device.minor, number)


def _free_id(device: Device, placement: Placement, wanted: int | None, doing: str) -> int:
    """Return the ID for a vNPU to create. Raises DoesNotFit with the vNPUs that prevent it."""
    blockers = partitioning_capacity.overlapping(placement, device.partitions)
    blockers = blockers or [each for each in device.partitions if each.instance_id == wanted]
    try:
        if not blockers:
            return choose_id(device, placement) if wanted is None else wanted
    except InUse:
        blockers = list(device.partitions)
    blocked_by = ", ".join(each.describe() for each in blockers)
    raise DoesNotFit(f"{doing}: the placement is not available; occupied by {blocked_by}", blockers=blockers)


def _refusal(
    source: Source,
    chip: Chip,
    now: Device,
    profile: Profile,
    placement: Placement,
    doing: str,
    error: AcceleratorError,
) -> AcceleratorError:
    """Return the reason for a rejected vNPU, from the chip's state afterwards.

    One code of DCMI has several meanings, and versions differ.
    """
    if isinstance(error, NotPermitted):
        return NotPermitted(f"{doing}: {error.message}", hint=source.hindrance(chip.spot) or error.hint)
    if now.processes and not now.partitions:
        return _in_use(now, doing, error)
    missing = shortages(profile.capacities, _free(source, chip, now))
    if missing or (not isinstance(error, InUse) and error.code in ("invalid-argument", "partition")):
        return _insufficient_resources(now, placement, doing, missing, error)
    return _in_use(now, doing, error) if isinstance(error, InUse) else error


def _free(source: Source, chip: Chip, now: Device) -> Mapping[str, Fraction]:
    free = dict(source.free(chip.spot))
    if HELPERS in free and not now.partitions:
        # The first vNPU moves cores from control to AICPU.
        free[HELPERS] = helpers_of(chip.family, free[HELPERS]) or free[HELPERS]
    return free


def _in_use(now: Device, doing: str, error: AcceleratorError) -> InUse:
    holders = ", ".join(map(str, now.processes))
    return InUse(
        f"{doing}: the whole chip is in use" + (f" by {holders}" if holders else f"; {error.message}"),
        pids=_pids(now.processes),
        hint="End the processes and containers that use the chip.",
    )


def _insufficient_resources(
    now: Device, placement: Placement, doing: str, missing: Sequence[str], error: AcceleratorError
) -> DoesNotFit:
    there = ", ".join(each.describe() for each in now.partitions) or "none"
    reason = "; ".join(missing) or f"its free resources suffice, but the call failed: {error.message}"
    return DoesNotFit(
        f"{doing}: the chip rejects the vNPU: {reason}; vNPUs on it: {there}",
        blockers=[each for each in now.partitions if each.placement.conflicts_with(placement)] or now.partitions,
        hint="The free resources may not be contiguous, or the chip reserves them. Another chip may have enough free resources.",
    )


def _await_node(system: System, slice_id: int) -> None:
    """Wait until the kernel has created a vNPU's node. A missing node is reported when a container needs it."""
    until = time.monotonic() + NODE_SECONDS
    while not system.exists(slice_node(slice_id)) and time.monotonic() < until:
        time.sleep(_PERIOD)


def _pids(processes: Sequence[Process]) -> list[int]:
    return [each.pid for each in processes if each.pid]
