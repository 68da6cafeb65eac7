# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Calls to the fabric manager for the driver: on a thread of their own, each with a deadline."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Callable, TypeVar

from ..errors import AcceleratorError, BackendUnavailable, FabricRejected, InUse
from ..lanes import Lanes
from ..model import Device, Finding
from ..system import System
from .fabric_manager import FabricManager, NoFabricPartition

LOG = logging.getLogger(__name__)
Answer = TypeVar("Answer")

LANE = "fabric"  # no UUID is spelled so
LISTING = "Listing the partitions of the NVSwitch fabric"


class FabricCalls:
    """The partitions of the NVSwitch fabric: see ``core.fabric.FabricPartitions``. ``seconds`` is the deadline of a call."""

    def __init__(self, system: System, lanes: Lanes, seconds: float) -> None:
        self._manager = FabricManager(system)
        self._lanes = lanes
        self._seconds = seconds
        self._problem = ""

    @property
    def is_used(self) -> bool:
        """Whether the fabric manager is configured for shared-NVSwitch mode."""
        return self._manager.is_used

    @property
    def active(self) -> frozenset[int] | None:
        """The active partitions at the last scan; None in other modes, and if the fabric manager did not answer."""
        return self._manager.active

    def set_claimed(self, claimed: Callable[[], Collection[int]]) -> None:
        """Set the function that returns the partitions that claims use. See FabricManager."""
        self._manager.claimed = claimed

    def find(self, devices: Sequence[Device]) -> tuple[int, bool]:
        """Return the number of the partition that consists of exactly these GPUs, and whether it is active."""
        return self._run(partial(self._manager.find, devices), LISTING)

    def activate(self, number: int) -> None:
        """Activate a partition."""
        self._run(partial(self._manager.activate, number), f"Activating partition {number} of the NVSwitch fabric")

    def deactivate(self, number: int) -> None:
        """Deactivate a partition."""
        self._run(partial(self._manager.deactivate, number), f"Deactivating partition {number} of the NVSwitch fabric")

    def look(self, seconds: float) -> None:
        """Read mode and partitions for a scan. A failed call is logged: GPUs are published without the attributes, and claims get the error."""
        self._manager.forget_active()
        self._manager.refresh_mode()
        if not self.is_used:
            return
        problem = ""
        try:
            self._run(self._manager.look, LISTING, seconds)
        except AcceleratorError as error:
            problem = str(error)
        if problem and problem != self._problem:
            LOG.warning("%s", problem)
        self._problem = problem

    def attributes(self, device: Device) -> Mapping[str, int]:
        """Return the attributes of a whole GPU, as of the last scan."""
        return self._manager.attributes(device)

    def with_attributes(self, finding: Finding) -> Finding:
        """Return what a scan found of a GPU, with these attributes."""
        device = finding.device
        attributes = self.attributes(device) if device is not None else {}
        if device is None or not attributes:
            return finding
        return replace(finding, device=replace(device, whole_attributes=attributes))

    def close(self) -> None:
        """End the connection to the fabric manager, unless it hangs."""
        with contextlib.suppress(AcceleratorError):
            self._run(self._manager.close, "Ending the connection to the fabric manager")

    def _run(self, function: Callable[[], Answer], doing: str, seconds: float | None = None) -> Answer:
        """Call the fabric manager. An error is the node's, unless it is about what a claim requested."""
        try:
            return self._lanes.run(LANE, function, seconds or self._seconds, doing=doing)
        except (BackendUnavailable, FabricRejected, NoFabricPartition, InUse):
            raise
        except AcceleratorError as error:
            raise BackendUnavailable(error.message, hint=error.hint) from error
