# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Calls to the fabric manager for the driver, on a separate lane and each with a deadline."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Callable, TypeVar

from ....discovery.device_workers import Lanes
from ....errors import AcceleratorError, BackendUnavailable, FabricRejected, InUse
from ....health.resets import blocked_reset
from ....host.system import System
from ....model import PASSTHROUGH, Device, Finding, Offer, Taint
from ..vendor import FACTS
from .fabric_manager import FabricManager, NoFabricPartition
from .fabric_process import FabricProcess

LOG = logging.getLogger(__name__)
Answer = TypeVar("Answer")

LANE = "fabric"  # no UUID has this form
#: The taint of GPUs for virtual machines on hosts with NVSwitches while the fabric manager runs in bare-metal mode.
FABRIC_MODE = Taint(f"{FACTS.driver_name}/fabric-mode", "NoSchedule", "bare-metal")
LISTING = "Listing the partitions of the NVSwitch fabric"


class FabricCalls:
    """The partitions of the NVSwitch fabric (``core.vendors.fabric_partitions.FabricPartitions``). ``seconds`` is the deadline of a call."""

    def __init__(self, system: System, lanes: Lanes, seconds: float) -> None:
        self._manager = FabricManager(system)
        self._process = FabricProcess(system)
        self._lanes = lanes
        self._seconds = seconds
        self._problem = ""

    @property
    def is_used(self) -> bool:
        """Return whether the fabric manager is configured for shared-NVSwitch mode."""
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

    def refresh(self, seconds: float) -> None:
        """Read mode and partitions for a scan.

        After a logged failure, GPUs are published without the attributes, and claims get the error.
        """
        self._manager.forget_active()
        self._manager.refresh_mode()
        if not self.is_used:
            return
        problem = ""
        try:
            self._run(self._manager.refresh_partitions, LISTING, seconds)
        except AcceleratorError as error:
            problem = str(error)
        if problem and problem != self._problem:
            LOG.warning("%s", problem)
        self._problem = problem

    def attributes(self, device: Device) -> Mapping[str, int]:
        """Return the attributes of a whole GPU at the last scan."""
        return self._manager.attributes(device)

    def with_attributes(self, finding: Finding) -> Finding:
        """Return the finding of a scan with these attributes, and with the reason why the GPU cannot be reset."""
        device = finding.device
        if device is None:
            return finding
        attributes, blocked = self.attributes(device), self._process.why_reset_blocked(device)
        if not attributes and not blocked:
            return finding
        return replace(finding, device=replace(device, whole_device_attributes=attributes, reset_blocked=blocked))

    def check_reset(self, devices: Iterable[Device]) -> None:
        """Raise Unsupported if one of these GPUs cannot be reset now."""
        error = blocked_reset(replace(each, reset_blocked=self._process.why_reset_blocked(each)) for each in devices)
        if error is not None:
            raise error

    def with_taints(self, device: Device, offers: Sequence[Offer]) -> tuple[Offer, ...]:
        """Return the offers with a taint on GPUs for virtual machines whose NVLinks would not work there.

        Facts: NVIDIA's Fabric Manager User Guide, "Virtualization Models": with FABRIC_MODE=0 NVLinks work in a virtual
        machine only if it has all GPUs and switches. CUDA does not initialize on a single GPU, unless the guest's
        driver has NVreg_NvLinkDisable=1.
        """
        if not (device.switched and self._manager.is_bare_metal):
            return tuple(offers)
        return tuple(
            replace(each, taints=(*each.taints, FABRIC_MODE)) if each.kind == PASSTHROUGH else each for each in offers
        )

    def close(self) -> None:
        """Close the connection to the fabric manager, unless it hangs."""
        with contextlib.suppress(AcceleratorError):
            self._run(self._manager.close, "Ending the connection to the fabric manager")

    def _run(self, function: Callable[[], Answer], doing: str, seconds: float | None = None) -> Answer:
        """Call the fabric manager. Its errors are errors of the node, unless they concern the request of a claim."""
        try:
            return self._lanes.run(LANE, function, seconds or self._seconds, doing=doing)
        except (BackendUnavailable, FabricRejected, NoFabricPartition, InUse):
            raise
        except AcceleratorError as error:
            raise BackendUnavailable(error.message, hint=error.hint) from error
