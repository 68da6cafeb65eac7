# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Offer one vendor's devices through the kubelet's device-plugin API instead of claims, and reconnect when the kubelet restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..core.dra.device_plugin_model import (
    AllocationResult,
    NotAllocatable,
    PluginDevice,
    ResourceStatus,
    by_resource,
    cdi_kind,
    given,
    partition_of,
    plugin_devices,
    preferred,
    reasons_not_offered,
    specification,
)
from ..core.dra.nearest_devices import Level, levels
from ..core.errors import AcceleratorError
from ..core.host.cdi import ContainerEdits, write_spec
from ..core.host.system import System
from ..core.model import Device
from ..core.texts import LONGEST_CAUSE, join_problems
from ..core.vendors.protocol import Backend
from ..deadlines import within
from ..kubelet import sockets
from ..kubelet.device_plugin import REGISTRATION, ResourceServer
from ..kubelet.sockets import DirectoryReplaced, SocketError
from ..logs import StateLog, fields
from ..metrics import Metrics
from . import driver_state
from .driver_state import Conditions, Shared, run_together
from .health import HardwareState
from .interface_change import InterfaceSwitch

LOG = logging.getLogger(__name__)
T = TypeVar("T")

PART = "device-plugin"  # the published name of this part in the status and the metrics
# Seconds between checks of the sockets, of the kubelet's connection, and of the devices that claims use.
CHECK_SECONDS = 0.5
# Seconds between retries after a failure.
RETRY_SECONDS = 2.0
# Seconds that the kubelet has to connect after it accepted a registration.
CONNECT_SECONDS = 5.0


@dataclass
class _ServedResource:
    """A resource that is served to the kubelet.

    ``register_at`` is the time of the next registration, on the event loop's clock, and ``next_delay`` the seconds until the one after
    it. ``kubelet`` is the identity of the kubelet's socket at the last registration.
    """

    server: ResourceServer
    register_at: float = 0.0
    next_delay: float = driver_state.RETRY_FIRST
    kubelet: sockets.Identity | None = None


class DevicePluginSupervisor:
    """Offer the devices of ``hardware_states`` to the kubelet. A barred device is offered as unhealthy, with the reason in ``barred``.

    ``held_uuids`` returns the UUIDs of the devices that claims still use. ``directory`` is the kubelet's directory for
    device plugins. ``cdi_path`` is the CDI file with all offered devices.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        driver: str,
        directory: str,
        cdi_path: str,
        system: System,
        hardware_states: Shared[HardwareState],
        held_uuids: Callable[[], frozenset[str]],
        interface_switch: InterfaceSwitch,
        conditions: Conditions,
        executor: ThreadPoolExecutor,
        metrics: Metrics,
    ) -> None:
        self._backend = backend
        self._driver = driver
        self._directory = directory
        self._kind = cdi_kind(backend.cdi_kind)
        self._cdi_path = cdi_path
        self._system = system
        self._hardware_states = hardware_states
        self._held_uuids = held_uuids
        self._interface_switch = interface_switch
        self._conditions = conditions
        self._executor = executor
        self._metrics = metrics
        self._problems_log, self._edits_log, self._offered_log = StateLog(LOG), StateLog(LOG), StateLog(LOG)
        #: The physical devices of which nothing is offered, each with the reason.
        self.not_offered: Mapping[str, str] = {}
        self._served: dict[str, _ServedResource] = {}
        self._devices: tuple[PluginDevice, ...] = ()
        self._device_edits: dict[str, ContainerEdits] = {}
        self._levels: tuple[Level, ...] = ()
        self._written_spec: Mapping[str, Any] | None = None
        self._write_lock = asyncio.Lock()
        self._change = asyncio.Event()
        self._run_task: asyncio.Task[Any] | None = None
        self._problems_by_loop: dict[str, str] = {}
        #: Whether the kubelet knows the result of the last hardware scan.
        self.is_current = False

    @property
    def is_connected(self) -> bool:
        """Return whether the kubelet watches the devices of all resources."""
        return self.is_current and all(self._is_connected(each) for each in by_resource(self._devices))

    @property
    def resources(self) -> tuple[ResourceStatus, ...]:
        """Return the resources that pods can request, and those that were offered before."""
        found = by_resource(self._devices)
        return tuple(
            ResourceStatus(
                resource,
                len(found.get(resource, ())),
                sum(each.is_healthy for each in found.get(resource, ())),
                self._is_connected(resource),
            )
            for resource in sorted({*found, *self._served})
        )

    async def run(self) -> None:
        """Offer devices until canceled, or until ``close``. Raises DirectoryReplaced: the process must restart."""
        self._run_task = asyncio.current_task()
        await self._interface_switch.stop_claims()
        await run_together(self._follow_hardware, self._serve_kubelet)

    async def close(self) -> None:
        """Withdraw from the kubelet. No more devices are allocated; containers keep theirs."""
        if self._run_task is not None:
            self._run_task.cancel()
            await asyncio.wait((self._run_task,))
        await asyncio.gather(*(each.server.stop() for each in self._served.values()))
        self._served.clear()

    # ------------------------------------------------------------------ calls of the kubelet

    def devices(self, resource: str) -> Sequence[PluginDevice]:
        """Return the current devices of a resource."""
        return [each for each in self._devices if each.resource == resource]

    def change(self) -> asyncio.Event:
        """Return an event that is set when devices may have changed."""
        return self._change

    def preferred(self, resource: str, available: Collection[str], must: Collection[str], size: int) -> Sequence[str]:
        """Return the IDs of the preferred devices. Raises ValueError."""
        return preferred(self.devices(resource), available, must, size, self._levels)

    async def allocate(self, resource: str, ids: Sequence[str]) -> AllocationResult:
        """Return the response for a container with these devices, from newly read facts about the devices.

        Raises AcceleratorError.
        """
        known = {each.id: each for each in self.devices(resource)}
        for name in ids:
            if name not in known:
                raise NotAllocatable(
                    f"{name} is no longer a device of {resource}", hint="A new pod gets another device."
                )
            if known[name].barred:
                raise NotAllocatable(
                    f"{known[name].name} ({name}) cannot be allocated: {known[name].barred}",
                    hint="`dra-driver status` on the node shows the fault and the remedy. A new pod gets another device.",
                )
        current_edits, common_edits = await self._run_on_thread(self._read_current_edits, [known[name] for name in ids])
        allocation = given(self._kind, ids, current_edits, common_edits)
        async with self._write_lock:
            await self._write_cdi_file({**self._device_edits, **current_edits}, common_edits)
        LOG.info("allocated devices", extra=fields(driver=self._driver, resource=resource, devices=list(ids)))
        return allocation

    # ------------------------------------------------------------------ offered devices

    async def _follow_hardware(self) -> None:
        """Offer the devices again after each change of the hardware or of the devices that claims use."""
        offered: tuple[HardwareState, frozenset[str]] | None = None
        while True:
            hardware_state, held_uuids = self._hardware_states.value, self._held_uuids()
            if offered is None or hardware_state is not offered[0] or held_uuids != offered[1]:
                offered = hardware_state, held_uuids
                if not await self._offer_hardware(hardware_state, held_uuids):
                    offered = None
            await self._hardware_states.changed(RETRY_SECONDS if offered is None else CHECK_SECONDS)

    async def _offer_hardware(self, hardware_state: HardwareState, held_uuids: frozenset[str]) -> bool:
        """Offer the devices of one state of the hardware. Return False if no device can be allocated because of an error."""
        survey, problem = hardware_state.snapshot.survey, ""
        if survey is None:
            if hardware_state.snapshot.given_up:
                self._set_devices(tuple(replace(each, barred="no-answer") for each in self._devices))
            return True
        devices = plugin_devices(
            self._backend, self._driver, survey.devices, hardware_state.faults, hardware_state.effects, held=held_uuids
        )
        self.not_offered = reasons_not_offered(survey.devices, devices, held_uuids)
        missing = join_problems(f"{name} is not offered: {why}" for name, why in self.not_offered.items())
        self._offered_log.report(
            missing or "all devices are offered", level=logging.WARNING if missing else logging.INFO
        )
        try:
            edits, missing_edits, common_edits = await self._run_on_thread(
                self._read_all_edits, devices, survey.devices
            )
            async with self._write_lock:
                await self._write_cdi_file(edits, common_edits)
        except (AcceleratorError, OSError) as error:
            problem = f"no device can be allocated to pods until this is corrected: {error}"
            devices = tuple(replace(each, barred=each.barred or "not-prepared") for each in devices)
        else:
            self._device_edits = edits
            devices = tuple(replace(each, barred=each.barred or missing_edits.get(each.id, "")) for each in devices)
            self._edits_log.report(
                join_problems(f"{name} cannot be allocated: {why}" for name, why in missing_edits.items())
                or "all devices can be allocated"
            )
        self._levels = levels(survey.devices, self._backend.grouping)
        self._set_devices(devices)
        self._report("devices", problem)
        self.is_current = not problem
        return not problem

    def _set_devices(self, devices: tuple[PluginDevice, ...]) -> None:
        if devices == self._devices:
            return
        self._devices = devices
        change, self._change = self._change, asyncio.Event()
        change.set()

    def _read_all_edits(
        self, devices: Collection[PluginDevice], physical_devices: Mapping[str, Device]
    ) -> tuple[dict[str, ContainerEdits], dict[str, str], ContainerEdits]:
        """Return the container edits of each device, the reasons why other devices have none, and the edits of every container.

        Runs on a thread.
        """
        common_edits = self._backend.driver_edits()
        edits: dict[str, ContainerEdits] = {}
        missing_edits: dict[str, str] = {}
        for each in devices:
            try:
                edits[each.id] = self._edits_of(each, physical_devices[each.device_uuid])
            except AcceleratorError as error:
                # A container that already has the device can restart with its previous edits.
                missing_edits[each.id] = str(error)
                if each.id in self._device_edits:
                    edits[each.id] = self._device_edits[each.id]
        return edits, missing_edits, common_edits

    def _read_current_edits(
        self, devices: Collection[PluginDevice]
    ) -> tuple[dict[str, ContainerEdits], ContainerEdits]:
        """Return the container edits of the devices, and those of every container, from newly read facts. Runs on a thread.

        Raises AcceleratorError for a device that has changed.
        """
        found = {each.id: self._edits_of(each, self._backend.device(each.device_uuid)) for each in devices}
        return found, self._backend.driver_edits()

    def _edits_of(self, plugin_device: PluginDevice, device: Device) -> ContainerEdits:
        return self._backend.device_edits(device, partition_of(plugin_device, device))

    async def _write_cdi_file(self, edits: Mapping[str, ContainerEdits], common_edits: ContainerEdits) -> None:
        """Write the CDI file of all offered devices if its content has changed. Raises OSError.

        Without devices the file is kept, because containers may restart with it.
        """
        spec = specification(self._kind, edits, common_edits)
        if spec is None or (spec == self._written_spec and self._system.exists(self._cdi_path)):
            return
        await self._run_on_thread(write_spec, self._system, self._cdi_path, spec)
        self._written_spec = spec

    # ------------------------------------------------------------------ the kubelet

    async def _serve_kubelet(self) -> None:
        """Serve each resource, and register it with the kubelet again when necessary, until canceled. Raises DirectoryReplaced."""
        while True:
            change = self._change
            problems: list[str] = []
            for resource in sorted({*by_resource(self._devices), *self._served}):
                try:
                    await self._serve_resource(resource)
                except DirectoryReplaced:
                    raise
                except (OSError, AcceleratorError) as error:
                    problems.append(str(error))
            self._report("kubelet", join_problems(dict.fromkeys(problems), longest=LONGEST_CAUSE))
            with contextlib.suppress(asyncio.TimeoutError):
                await within(change.wait(), CHECK_SECONDS)

    async def _serve_resource(self, resource: str) -> None:
        """Start the server of a resource if it does not run, and register it if it is due."""
        served = self._served.get(resource)
        if served is None:
            await asyncio.to_thread(self._interface_switch.record_resources, [resource])
            served = _ServedResource(
                ResourceServer(self, resource=resource, folder=self._directory, metrics=self._metrics)
            )
            self._served[resource] = served
        if not served.server.is_served:
            await served.server.start()
            served.register_at = 0.0
        if served.server.is_connected:
            return
        now, kubelet = asyncio.get_running_loop().time(), sockets.identity_of(f"{self._directory}/{REGISTRATION}")
        if kubelet is None:
            return  # the kubelet is not running; the driver's status shows that it is not connected
        if kubelet != served.kubelet:
            served.kubelet, served.register_at, served.next_delay = kubelet, 0.0, driver_state.RETRY_FIRST
        if now < served.register_at:
            return
        await asyncio.to_thread(self._refuse_other_plugins)
        served.register_at, served.next_delay = (
            now + served.next_delay,
            min(served.next_delay * 2, driver_state.RETRY_LIMIT),
        )
        await served.server.register()
        LOG.info("the kubelet has registered a resource", extra=fields(driver=self._driver, resource=resource))
        served.register_at, served.next_delay = (
            asyncio.get_running_loop().time() + CONNECT_SECONDS,
            driver_state.RETRY_FIRST,
        )

    def _refuse_other_plugins(self) -> None:
        """Raise SocketError if the vendor's own device plugin offers the same devices. Runs on a thread."""
        for name in sorted(os.listdir(self._directory)):  # noqa: PTH208  only the names are read
            path = f"{self._directory}/{name}"
            if name.startswith(self._backend.facts.device_plugins) and name.endswith(".sock"):
                server = sockets.server_of(path)
                if server is not None:
                    raise SocketError(
                        f"Another device plugin offers the same devices: {path} is served by {server}",
                        hint="Remove it from this node, or set this node's driver to serve claims (kubelet_interface).",
                        code="another-plugin",
                    )

    def _is_connected(self, resource: str) -> bool:
        return resource in self._served and self._served[resource].server.is_connected

    def _report(self, loop: str, problem: str) -> None:
        """Set the problem of one of the two loops, "" for none, and report the problems of both."""
        self._problems_by_loop[loop] = problem
        found = join_problems(each for each in self._problems_by_loop.values() if each)
        self._conditions.report(PART, found)
        self._problems_log.report(
            found or "devices are offered by the device plugin", level=logging.WARNING if found else logging.INFO
        )

    async def _run_on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
