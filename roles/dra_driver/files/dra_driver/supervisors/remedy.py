# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Reset idle devices that need a reset, if the configuration enables it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Collection, Mapping
from typing import Any, Callable

from ..claims.records import ClaimRecord
from ..core.errors import AcceleratorError
from ..core.health import needs_reset
from ..core.model import Device
from ..logs import fields, operation
from .health import Picture
from .shared import Shared

LOG = logging.getLogger(__name__)

# A reset that did not help is tried again after so many seconds, and so often in all until the device was well in between.
AGAIN_SECONDS = 3600.0
MOST_ATTEMPTS = 3


def due(
    picture: Picture, records: Collection[ClaimRecord], attempts: Mapping[str, tuple[float, ...]], now: float
) -> tuple[str, ...]:
    """Return the UUIDs of devices to be reset together, the first group that may be; nothing when there is none. Pure.

    A device is reset when it needs that, by its own report or by a fault that nothing but a reset ends, and nothing uses it or
    any of those that are reset along with it: no claim, no process, no partition.
    """
    survey = picture.snapshot.survey
    if survey is None:
        return ()
    held = {uuid for record in records for uuid in record.device_uuids}
    by_address = {device.pci_address: device for device in survey.devices.values()}
    for device in sorted(survey.devices.values(), key=lambda each: each.index):
        if not needs_reset(device, picture.ailments.get(device.uuid, ())):
            continue
        tried = attempts.get(device.uuid, ())
        if len(tried) >= MOST_ATTEMPTS or (tried and now - tried[-1] < AGAIN_SECONDS):
            continue
        group = [device, *(by_address[address] for address in device.linked if address in by_address)]
        if len(group) == 1 + len(device.linked) and all(is_idle(each) and each.uuid not in held for each in group):
            return tuple(each.uuid for each in group)
    return ()


def is_idle(device: Device) -> bool:
    """Whether a reset of a device would take nothing from anybody."""
    return not device.processes and not device.partitions


class Remedy:
    """One vendor's devices. ``reset`` resets some together once nobody works with any; ``was_reset`` is told of each.

    ``report`` is for resets that failed, ``told`` for those that were made: reason and message of an Event.
    """

    def __init__(
        self,
        *,
        driver: str,
        pictures: Shared[Picture],
        claims: Callable[[], Collection[ClaimRecord]],
        reset: Callable[[tuple[str, ...]], Awaitable[Any]],
        was_reset: Callable[[str], None],
        report: Callable[[str, str], None],
        told: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._pictures = pictures
        self._claims = claims
        self._reset = reset
        self._was_reset = was_reset
        self._report = report
        self._told = told
        self._clock = clock
        self._attempts: dict[str, tuple[float, ...]] = {}

    async def run(self) -> None:
        """Follow the health of the devices until cancelled."""
        async for picture in self._pictures.follow():
            for uuid in [each for each in self._attempts if not picture.ailments.get(each)]:
                del self._attempts[uuid]
            uuids = due(picture, self._claims(), self._attempts, self._clock())
            if uuids:
                await self._try(uuids)

    async def _try(self, uuids: tuple[str, ...]) -> None:
        for uuid in uuids:
            self._attempts[uuid] = (*self._attempts.get(uuid, ()), self._clock())
        names = ", ".join(uuids)
        with operation():
            LOG.warning("resetting %s: it needs that, and nothing uses it", names, extra=fields(driver=self._driver))
            try:
                await self._reset(uuids)
            except AcceleratorError as error:
                LOG.warning("%s could not be reset: %s", names, error, extra=fields(driver=self._driver))
                self._report("ResetFailed", f"{names} needs a reset, which failed: {error}")
                return
            LOG.info("%s was reset", names, extra=fields(driver=self._driver))
            self._told("DeviceReset", f"{names} needed a reset, which was made while nothing used it")
        for uuid in uuids:
            self._was_reset(uuid)
