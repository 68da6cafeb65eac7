# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# ruff: noqa: ARG002  the answers for missing features use no argument
"""The common part of the vendors' backends: calls on lanes, and the answers for features that a vendor does not have.

A lane is a queue of calls with one thread. Each device has a lane, so a device that hangs does not block the others.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, TypeVar

from ..discovery.device_workers import TOGETHER_SECONDS, Call, Lanes
from ..errors import AcceleratorError, BackendUnavailable, Unsupported
from ..host.cdi import ContainerEdits
from ..host.companions import Companion, SharedDevice
from ..model import Device, Partition, Placement
from ..settings.knobs import Knob
from ..telemetry import Telemetry
from .device_cache import FixedFacts
from .vendor_facts import VendorFacts

Answer = TypeVar("Answer")
Facts = TypeVar("Facts", bound=FixedFacts)

LIBRARY = "library"  # the lane of calls that concern no single device; no UUID has this form


@dataclass(frozen=True)
class Deadlines:
    """The deadlines of calls in seconds.

    ``library`` is that of a call that concerns no single device, ``scan`` that of a read of one device, ``full_scan``
    that of a device's first read, and ``change`` that of a change of one device.
    """

    library: float = 60.0
    scan: float = 10.0
    full_scan: float = 30.0
    change: float = 60.0


class MissingFeatures:
    """The answers of the protocol for features that a vendor's devices do not have.

    A vendor's class overrides the methods for features that its devices have.
    """

    _device_term: str

    def knobs(self, uuid: str, names: Collection[str]) -> Mapping[str, Knob]:
        """Return no settings."""
        return {}

    def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
        """Raise Unsupported for every setting."""
        if values:
            raise Unsupported(f"{self._device_term} {uuid} has no {', '.join(values)} that could be set")

    def companions(self, claim_uid: str, devices: Sequence[SharedDevice]) -> tuple[Companion, ...]:
        """Return no programs."""
        return ()

    def refuse_without_companions(self) -> None:
        """Do nothing, because claims need no programs."""

    def companion_edits(self, companion: Companion) -> ContainerEdits:
        """Return empty edits."""
        return ContainerEdits()

    def detach(self, uuid: str, action: Callable[[], None]) -> None:
        """Raise Unsupported, because the devices are not passed through."""
        raise Unsupported(f"{self._device_term} {uuid} cannot be passed through to a virtual machine")

    def attach(self, uuid: str, action: Callable[[], None]) -> None:
        """Raise Unsupported, because the devices are not passed through."""
        self.detach(uuid, action)

    def add_detached(self, devices: Iterable[Device]) -> None:
        """Do nothing, because no device is ever detached."""

    def use_number_file(self, directory: str, *, writes: bool = False, is_referred: bool = True) -> None:
        """Do nothing, because the index of a device does not depend on other devices."""

    def settle(self, seconds: float) -> None:
        """Do nothing, because no program runs in the background."""

    def machine_edits(self) -> ContainerEdits:
        """Return empty edits, because the devices are not passed through."""
        return ContainerEdits()

    def share_edits(self, device: Device, consumed: Mapping[str, int]) -> ContainerEdits:
        """Return empty edits, because containers see nothing of their share."""
        return ContainerEdits()


class LaneBackend(MissingFeatures, ABC):
    """A backend with one lane for each device, so that calls to different devices run in parallel. Safe for threads.

    A vendor's class implements the methods of the protocol that are missing here, the five methods marked "For the
    vendor", and replaces the answers for the features that its devices have.

    ``device_term`` is the term for one device of the vendor, for messages.
    """

    facts: VendorFacts
    _deadlines: Deadlines

    def __init__(self, deadlines: Deadlines, device_term: str) -> None:
        self._lanes = Lanes(self.facts.word)
        self._deadlines = deadlines
        self._device_term = device_term
        #: The UUIDs of the devices that were faulty at the last scan.
        self._faulty: frozenset[str] = frozenset()

    # For the vendor

    @abstractmethod
    def _read(self, uuid: str) -> Device:
        """Read the changing facts of a device, on its lane. For the vendor."""

    @abstractmethod
    def _refuse_closed(self) -> None:
        """Raise BackendUnavailable if the library is not open. For the vendor."""

    @abstractmethod
    def _own_change(self, uuid: str) -> AbstractContextManager[object]:
        """Return the context that suppresses the events of a change by this process. For the vendor."""

    @abstractmethod
    def _create(self, uuid: str, profile_id: int, placement: Placement, instance_id: int | None) -> Partition:
        """Create a partition, on the lane of its device. For the vendor."""

    @abstractmethod
    def _destroy(self, uuid: str, instance_id: int) -> None:
        """Destroy a partition, on the lane of its device. For the vendor."""

    # Calls on lanes

    def device(self, uuid: str) -> Device:
        """Read and return the current facts of one device. Raises NotFound, DeviceFaulty, or BackendUnavailable."""
        return self.ask(uuid).result()

    def ask(self, uuid: str) -> Call[Device]:
        """Start reading the current facts of one device."""
        doing = f"Reading the facts of {self._device_term} {uuid}"
        return self._lanes.submit(uuid, partial(self._read, uuid), self._deadlines.scan, doing=doing)

    def run_on_device(self, uuid: str, function: Callable[[], Answer]) -> Answer:
        """Run a function that makes several calls for one device on its lane. A caller that runs on the lane continues there."""
        if self._lanes.is_mine(uuid):
            return function()
        return self._lanes.run(uuid, function, self._deadlines.scan, doing=f"Working on {self._device_term} {uuid}")

    def start_on_device(self, uuid: str, function: Callable[[], Answer]) -> Call[Answer]:
        """Start a function that makes several calls for one device on its lane. Calls of other threads wait until it leaves the lane."""
        return self._lanes.submit(uuid, function, TOGETHER_SECONDS, doing=f"Working on {self._device_term} {uuid}")

    def leave(self, uuid: str) -> None:
        """Continue the calling function off the device's lane, so that the lane can serve other calls."""
        self._lanes.leave(uuid)

    def create_partition(
        self, uuid: str, profile_id: int, placement: Placement, instance_id: int | None = None
    ) -> Partition:
        """Create a partition at exactly this placement. The vendor's class states how ``instance_id`` is chosen."""
        return self._change(
            uuid,
            partial(self._create, uuid, profile_id, placement, instance_id),
            f"Creating a partition at {placement} on {self._device_term} {uuid}",
            late=lambda made: self._destroy(uuid, made.instance_id),
        )

    def destroy_partition(self, uuid: str, instance_id: int) -> None:
        """Destroy a partition that is not in use."""
        doing = f"Destroying partition {instance_id} of {self._device_term} {uuid}"
        self._change(uuid, partial(self._destroy, uuid, instance_id), doing)

    def _change(
        self, uuid: str, change: Callable[[], Answer], doing: str, late: Callable[[Answer], object] | None = None
    ) -> Answer:
        """Run a change of one device on its lane, without events about it. ``late`` undoes a change that ended after its deadline."""

        def changing() -> Answer:
            with self._own_change(uuid):
                return change()

        return self._lanes.run(uuid, changing, self._deadlines.change, doing=doing, late=late)

    def _run_for_library(self, function: Callable[[], Answer], doing: str) -> Answer:
        """Make a call that concerns no single device. Its errors are errors of the node."""
        try:
            return self._lanes.run(LIBRARY, function, self._deadlines.library, doing=doing)
        except BackendUnavailable:
            raise
        except AcceleratorError as error:
            raise BackendUnavailable(error.message, hint=error.hint) from error

    def _gather_telemetry(
        self, seconds: float, devices: Iterable[Facts], read: Callable[[Facts], tuple[Telemetry, ...]]
    ) -> tuple[Telemetry, ...]:
        """Return the telemetry of these devices. Devices that are faulty or do not answer in time are left out."""
        self._refuse_closed()
        until = time.monotonic() + seconds
        calls = [
            self._lanes.submit(
                each.uuid,
                partial(read, each),
                self._deadlines.scan,
                doing=f"Reading the telemetry of {self._device_term} {each.uuid}",
            )
            for each in devices
            if each.uuid not in self._faulty
        ]
        found: list[Telemetry] = []
        for call in calls:
            with contextlib.suppress(AcceleratorError):  # a scan reports the fault; the device can also be in a reset
                found += call.result(until)
        return tuple(found)
