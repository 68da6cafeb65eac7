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

# The seconds until a reset without success is repeated, and the maximum number of resets until the device is healthy
# again.
AGAIN_SECONDS = 3600.0
MOST_ATTEMPTS = 3


def idle_groups(hardware_state: HardwareState, records: Collection[ClaimRecord]) -> tuple[tuple[Device, ...], ...]:
    """Return the groups of devices to reset together that nothing uses. The first device of a group needs the reset.

    A device needs a reset by its own report or by a fault that only a reset ends. Neither it nor a device that is reset
    together with it may have claims, processes, or partitions.
    """
    survey = hardware_state.snapshot.survey
    if survey is None:
        return ()
    held = {uuid for record in records for uuid in record.device_uuids}
    devices = sorted(survey.devices.values(), key=lambda each: each.index)
    addresses = {device.pci_address for device in devices}
    groups = []
    for device in devices:
        if not needs_reset(device, hardware_state.faults.get(device.uuid, ())):
            continue
        group = (device, *(each for each in devices if each is not device and device.is_reset_with(each)))
        all_known = device.resets_alone or addresses.issuperset(device.linked)
        if all_known and all(is_idle(each) and each.uuid not in held for each in group):
            groups.append(group)
    return tuple(groups)


def due(groups: Iterable[Sequence[Device]], attempts: Mapping[str, tuple[float, ...]], now: float) -> tuple[str, ...]:
    """Return the UUIDs of the first of these groups that can be reset now, or an empty tuple."""
    for group in groups:
        tried = attempts.get(group[0].uuid, ())
        if len(tried) >= MOST_ATTEMPTS or (tried and now - tried[-1] < AGAIN_SECONDS):
            continue
        if blocked_reset(group) is None:
            return tuple(each.uuid for each in group)
    return ()


def is_idle(device: Device) -> bool:
    """Return whether a device has no processes and no partitions, so that a reset affects no user."""
    return not device.processes and not device.partitions


class Remedy:
    """Reset devices of one vendor.

    ``reset`` resets devices together while no other work runs; ``was_reset`` is called for each. ``report`` is called
    for failed and blocked resets, and ``report_done`` for completed ones: with reason and message of an Event. A blocked reset is
    not an attempt. It is made when the scan no longer reports an obstacle.
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
        self._blocked: frozenset[str] = frozenset()  # the reported reasons

    async def run(self) -> None:
        """Watch the health of the devices until canceled."""
        async for hardware_state in self._hardware_states.follow():
            for uuid in [each for each in self._attempts if not hardware_state.faults.get(each)]:
                del self._attempts[uuid]
            groups = idle_groups(hardware_state, self._claims())
            self._report_blocked(str(error) for error in map(blocked_reset, groups) if error is not None)
            uuids = due(groups, self._attempts, self._clock())
            if uuids:
                await self._try(uuids)

    def _report_blocked(self, reasons: Iterable[str]) -> None:
        """Report resets that are not possible now, each once until it is possible."""
        found = frozenset(reasons)
        for reason in sorted(found - self._blocked):
            LOG.warning("%s", reason, extra=fields(driver=self._driver))
            self._report("ResetBlocked", reason)
        self._blocked = found

    async def _try(self, uuids: tuple[str, ...]) -> None:
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
                    self._report_blocked({*self._blocked, str(error)})
                    return
                LOG.warning("%s could not be reset: %s", names, error, extra=fields(driver=self._driver))
                self._report("ResetFailed", f"{names} needs a reset, which failed: {error}")
                return
            LOG.info("%s was reset", names, extra=fields(driver=self._driver))
            self._report_done("DeviceReset", f"{names} needed a reset, which was made while nothing used it")
        for uuid in uuids:
            self._was_reset(uuid)
