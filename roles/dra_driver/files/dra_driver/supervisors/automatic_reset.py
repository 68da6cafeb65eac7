# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Reset idle devices that need a reset, if the configuration enables it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import Any, Callable

from ..claims.store.records import ClaimRecord
from ..core.errors import AcceleratorError
from ..core.health.resets import RESET_BLOCKED, blocked_reset
from ..core.health.tracker import needs_reset
from ..core.model import Device
from ..logs import fields, operation
from .driver_state import Shared
from .health import HardwareState

LOG = logging.getLogger(__name__)

# Seconds until an unsuccessful reset is repeated, and the maximum number of resets while a device stays faulty.
RETRY_SECONDS = 3600.0
MAX_ATTEMPTS = 3


def idle_groups(hardware_state: HardwareState, records: Collection[ClaimRecord]) -> tuple[tuple[Device, ...], ...]:
    """Return the unused groups of devices that must be reset together. The first device of each group is the one that needs the reset.

    A device needs a reset if it reports so itself, or if it has a fault that only a reset ends. A group is unused if none of its devices
    has claims, processes, or partitions.
    """
    survey = hardware_state.snapshot.survey
    if survey is None:
        return ()
    claimed_uuids = {uuid for record in records for uuid in record.device_uuids}
    devices = sorted(survey.devices.values(), key=lambda each: each.index)
    addresses = {device.pci_address for device in devices}
    groups = []
    for device in devices:
        if not needs_reset(device, hardware_state.faults.get(device.uuid, ())):
            continue
        group = (device, *(each for each in devices if each is not device and device.is_reset_with(each)))
        all_known = device.resets_alone or addresses.issuperset(device.linked)
        if all_known and all(is_idle(each) and each.uuid not in claimed_uuids for each in group):
            groups.append(group)
    return tuple(groups)


def next_reset(
    groups: Iterable[Sequence[Device]], attempts: Mapping[str, tuple[float, ...]], now: float
) -> tuple[str, ...]:
    """Return the UUIDs of the first group that can be reset now, or an empty tuple.

    ``attempts`` are the times of earlier resets by device UUID, and ``now`` is the current time, both of the same clock.
    """
    for group in groups:
        attempt_times = attempts.get(group[0].uuid, ())
        if len(attempt_times) >= MAX_ATTEMPTS or (attempt_times and now - attempt_times[-1] < RETRY_SECONDS):
            continue
        if blocked_reset(group) is None:
            return tuple(each.uuid for each in group)
    return ()


def is_idle(device: Device) -> bool:
    """Return whether a device has no processes and no partitions, so that a reset affects no user."""
    return not device.processes and not device.partitions


class AutomaticReset:
    """Reset faulty devices of one vendor that nothing uses.

    ``reset`` resets devices together while no other work runs, and ``was_reset`` is then called for each device. ``report`` gets the
    reason and the message of an Event about a failed or blocked reset, and ``report_done`` about a completed one. An obstacle, for example
    a linked device in use, blocks a reset. A blocked reset does not count as an attempt, and follows when a scan finds no obstacle.
    """

    def __init__(
        self,
        *,
        driver: str,
        hardware_states: Shared[HardwareState],
        claims: Callable[[], Collection[ClaimRecord]],
        reset: Callable[[tuple[str, ...]], Awaitable[Any]],
        was_reset: Callable[[str], None],
        report: Callable[[str, str], None],
        report_done: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._hardware_states = hardware_states
        self._claims = claims
        self._reset = reset
        self._was_reset = was_reset
        self._report = report
        self._report_done = report_done
        self._clock = clock
        self._attempts: dict[str, tuple[float, ...]] = {}
        self._blocked_reasons: frozenset[str] = frozenset()  # of the reported blocked resets

    async def run(self) -> None:
        """Watch the health of the devices until canceled."""
        async for hardware_state in self._hardware_states.follow():
            self._attempts = {uuid: times for uuid, times in self._attempts.items() if hardware_state.faults.get(uuid)}
            groups = idle_groups(hardware_state, self._claims())
            self._report_blocked(str(error) for error in map(blocked_reset, groups) if error is not None)
            uuids = next_reset(groups, self._attempts, self._clock())
            if uuids:
                await self._reset_devices(uuids)

    def _report_blocked(self, reasons: Iterable[str]) -> None:
        """Report the reasons of blocked resets. A reason is reported again only after it was absent in between."""
        current = frozenset(reasons)
        for reason in sorted(current - self._blocked_reasons):
            LOG.warning("%s", reason, extra=fields(driver=self._driver))
            self._report("ResetBlocked", reason)
        self._blocked_reasons = current

    async def _reset_devices(self, uuids: tuple[str, ...]) -> None:
        before = dict(self._attempts)
        for uuid in uuids:
            self._attempts[uuid] = (*self._attempts.get(uuid, ()), self._clock())
        names = ", ".join(uuids)
        with operation():
            LOG.warning("resetting %s: it needs that, and nothing uses it", names, extra=fields(driver=self._driver))
            try:
                await self._reset(uuids)
            except AcceleratorError as error:
                if error.code == RESET_BLOCKED:  # the obstacle is newer than the last scan
                    self._attempts = before
                    self._report_blocked({*self._blocked_reasons, str(error)})
                    return
                LOG.warning("%s could not be reset: %s", names, error, extra=fields(driver=self._driver))
                self._report("ResetFailed", f"{names} needs a reset, which failed: {error}")
                return
            LOG.info("%s was reset", names, extra=fields(driver=self._driver))
            self._report_done("DeviceReset", f"{names} needed a reset, which was made while nothing used it")
        for uuid in uuids:
            self._was_reset(uuid)
