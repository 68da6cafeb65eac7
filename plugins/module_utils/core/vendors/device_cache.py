# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The common part of the vendors' caches: the fixed facts, and the last read values, of each device."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

from ..model import Device


class FixedFacts(Protocol):
    """The facts of a physical device that stay the same until it is reset or replaced."""

    @property
    def uuid(self) -> str:
        """Return the UUID of the device."""

    @property
    def index(self) -> int:
        """Return the index of the device."""


Facts = TypeVar("Facts", bound=FixedFacts)


class DeviceCache(Generic[Facts]):
    """The known devices by UUID. Safe for threads.

    The fixed facts are deleted when the vendor's library is closed. The last read values stay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts: dict[str, Facts] = {}
        self._last: dict[str, Device] = {}

    def cached_facts(self) -> tuple[Facts, ...]:
        """Return the cached facts, ordered by index."""
        with self._lock:
            return tuple(sorted(self._facts.values(), key=lambda facts: facts.index))

    def last_devices(self) -> tuple[Device, ...]:
        """Return the last read values of each device."""
        with self._lock:
            return tuple(self._last.values())

    def last_device(self, uuid: str) -> Device | None:
        """Return the last read values of a device; None for an unknown device."""
        with self._lock:
            return self._last.get(uuid)

    def last_device_at(self, index: int) -> Device | None:
        """Return the last read values of the device that last had this index; None if no device had it."""
        return next((device for device in self.last_devices() if device.index == index), None)
