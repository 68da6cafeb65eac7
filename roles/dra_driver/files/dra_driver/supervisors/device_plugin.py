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
from ..kubelet.sockets import FolderReplaced, SocketError
from ..logs import StateLog, fields
from ..metrics import Metrics
from . import driver_state
from .driver_state import Conditions, Shared
from .health import HardwareState
from .interface_change import Ways

LOG = logging.getLogger(__name__)
T = TypeVar("T")

PART = "device-plugin"
# Seconds between checks of the sockets, of the kubelet's connection, and of ended claims.
CHECK_SECONDS = 0.5
# Seconds between retries after a failure.
RETRY_SECONDS = 2.0
# Seconds that the kubelet has to connect after it accepted a registration.
CONNECT_SECONDS = 5.0


@dataclass
class _Kept:
    """A server, and the time of its next registration with the kubelet, on the event loop's clock."""

    server: ResourceServer
    due: float = 0.0
    delay: float = driver_state.RETRY_FIRST
    kubelet: sockets.Identity | None = None


class DevicePluginSupervisor:
    """Offer the devices of ``hardware_states`` to the kubelet.

    ``held`` returns the UUIDs of the devices that claims still have. ``directory`` is the kubelet's directory for
    device plugins. ``cdi_file`` is the CDI file with all offered devices.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        driver: str,
        directory: str,
        cdi_file: str,
        system: System,
        hardware_states: Shared[HardwareState],
        held: Callable[[], frozenset[str]],
        ways: Ways,
        conditions: Conditions,
        executor: ThreadPoolExecutor,
        metrics: Metrics,
    ) -> None:
        self._backend = backend
        self._driver = driver
        self._directory = directory
        self._kind = cdi_kind(backend.cdi_kind)
        self._file = cdi_file
        self._system = system
        self._hardware_states = hardware_states
        self._held = held
        self._ways = ways
        self._conditions = conditions
        self._executor = executor
        self._metrics = metrics
        self._state, self._lacking, self._missing = StateLog(LOG), StateLog(LOG), StateLog(LOG)
        #: The physical devices without any offered device, each with the reason.
        self.not_offered: Mapping[str, str] = {}
        self._kept: dict[str, _Kept] = {}
        self._devices: tuple[PluginDevice, ...] = ()
        self._edits: dict[str, ContainerEdits] = {}
        self._levels: tuple[Level, ...] = ()
        self._written: Mapping[str, Any] | None = None
        self._writing = asyncio.Lock()
        self._change = asyncio.Event()
        self._running: asyncio.Task[Any] | None = None
        self._problems: dict[str, str] = {}
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
            for resource in sorted({*found, *self._kept})
        )

    async def run(self) -> None:
        """Offer devices until canceled, or until ``close``. Raises FolderReplaced: the process must restart."""
        self._running = asyncio.current_task()
        await self._ways.end_claims()
        tasks = [asyncio.ensure_future(each()) for each in (self._follow, self._face)]
        try:
            done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Withdraw from the kubelet. No more devices are allocated; containers keep theirs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))
        await asyncio.gather(*(each.server.stop() for each in self._kept.values()))
        self._kept.clear()

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
        """Return the response for a container with these devices, from fresh facts of the devices.

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
        fresh, common = await self._thread(self._fresh, [known[name] for name in ids])
        allocation = given(self._kind, ids, fresh, common)
        async with self._writing:
            await self._write({**self._edits, **fresh}, common)
        LOG.info("allocated devices", extra=fields(driver=self._driver, resource=resource, devices=list(ids)))
        return allocation

    # ------------------------------------------------------------------ offered devices

    async def _follow(self) -> None:
        offered: tuple[HardwareState, frozenset[str]] | None = None
        while True:
            hardware_state, held = self._hardware_states.value, self._held()
            if offered is None or hardware_state is not offered[0] or held != offered[1]:
                offered = hardware_state, held
                if not await self._take(hardware_state, held):
                    offered = None
            await self._hardware_states.changed(RETRY_SECONDS if offered is None else CHECK_SECONDS)

    async def _take(self, hardware_state: HardwareState, held: frozenset[str]) -> bool:
        """Offer the devices of one state of the hardware.

        Return whether that worked; a device that cannot be allocated is no failure.
        """
        survey, problem = hardware_state.snapshot.survey, ""
        if survey is None:
            if hardware_state.snapshot.given_up:
                self._offer(tuple(replace(each, barred="no-answer") for each in self._devices))
            return True
        wanted = plugin_devices(
            self._backend, self._driver, survey.devices, hardware_state.faults, hardware_state.effects, held=held
        )
        self.not_offered = reasons_not_offered(survey.devices, wanted, held)
        missing = join_problems(f"{name} is not offered: {why}" for name, why in self.not_offered.items())
        self._missing.report(missing or "all devices are offered", level=logging.WARNING if missing else logging.INFO)
        try:
            edits, lacking, common = await self._thread(self._read, wanted, survey.devices)
            async with self._writing:
                await self._write(edits, common)
        except (AcceleratorError, OSError) as error:
            problem = f"no device can be allocated to pods until this is corrected: {error}"
            wanted = tuple(replace(each, barred=each.barred or "not-prepared") for each in wanted)
        else:
            self._edits = edits
            wanted = tuple(replace(each, barred=each.barred or lacking.get(each.id, "")) for each in wanted)
            self._lacking.report(
                join_problems(f"{name} cannot be allocated: {why}" for name, why in lacking.items())
                or "all devices can be allocated"
            )
        self._levels = levels(survey.devices, self._backend.grouping)
        self._offer(wanted)
        self._report("devices", problem)
        self.is_current = not problem
        return not problem

    def _offer(self, devices: tuple[PluginDevice, ...]) -> None:
        if devices == self._devices:
            return
        self._devices = devices
        change, self._change = self._change, asyncio.Event()
        change.set()

    def _read(
        self, wanted: Collection[PluginDevice], devices: Mapping[str, Device]
    ) -> tuple[dict[str, ContainerEdits], dict[str, str], ContainerEdits]:
        """Return the container edits of each device, the reasons for missing ones, and the edits common to all.

        Runs on a thread.
        """
        common = self._backend.driver_edits()
        edits: dict[str, ContainerEdits] = {}
        lacking: dict[str, str] = {}
        for each in wanted:
            try:
                edits[each.id] = self._edits_of(each, devices[each.device_uuid])
            except AcceleratorError as error:
                # A container that already has the device can restart with its previous edits.
                lacking[each.id] = str(error)
                if each.id in self._edits:
                    edits[each.id] = self._edits[each.id]
        return edits, lacking, common

    def _fresh(self, wanted: Collection[PluginDevice]) -> tuple[dict[str, ContainerEdits], ContainerEdits]:
        """Return the container edits of the devices, and the common ones, from fresh facts. Runs on a thread.

        Raises AcceleratorError for a device that has changed.
        """
        found = {each.id: self._edits_of(each, self._backend.device(each.device_uuid)) for each in wanted}
        return found, self._backend.driver_edits()

    def _edits_of(self, wanted: PluginDevice, device: Device) -> ContainerEdits:
        return self._backend.device_edits(device, partition_of(wanted, device))

    async def _write(self, edits: Mapping[str, ContainerEdits], common: ContainerEdits) -> None:
        """Write the CDI file if its content changed. Raises OSError.

        Without devices the file is kept, because containers may restart with it.
        """
        spec = specification(self._kind, edits, common)
        if spec is None or (spec == self._written and self._system.exists(self._file)):
            return
        await self._thread(write_spec, self._system, self._file, spec)
        self._written = spec

    # ------------------------------------------------------------------ the kubelet

    async def _face(self) -> None:
        """Serve each resource and keep the kubelet connected to it, until canceled. Raises FolderReplaced."""
        while True:
            change = self._change
            problems: list[str] = []
            for resource in sorted({*by_resource(self._devices), *self._kept}):
                try:
                    await self._serve(resource)
                except FolderReplaced:
                    raise
                except (OSError, AcceleratorError) as error:
                    problems.append(str(error))
            self._report("kubelet", join_problems(dict.fromkeys(problems), longest=LONGEST_CAUSE))
            with contextlib.suppress(asyncio.TimeoutError):
                await within(change.wait(), CHECK_SECONDS)

    async def _serve(self, resource: str) -> None:
        kept = self._kept.get(resource)
        if kept is None:
            await asyncio.to_thread(self._ways.note, [resource])
            kept = _Kept(ResourceServer(self, resource=resource, folder=self._directory, metrics=self._metrics))
            self._kept[resource] = kept
        if not kept.server.is_served:
            await kept.server.start()
            kept.due = 0.0
        if kept.server.is_connected:
            return
        now, kubelet = asyncio.get_running_loop().time(), sockets.identity_of(f"{self._directory}/{REGISTRATION}")
        if kubelet is None:
            return  # the kubelet is not running; the driver's status shows that it is not connected
        if kubelet != kept.kubelet:
            kept.kubelet, kept.due, kept.delay = kubelet, 0.0, driver_state.RETRY_FIRST
        if now < kept.due:
            return
        await asyncio.to_thread(self._refuse_others)
        kept.due, kept.delay = now + kept.delay, min(kept.delay * 2, driver_state.RETRY_LIMIT)
        await kept.server.register()
        LOG.info("the kubelet has registered a resource", extra=fields(driver=self._driver, resource=resource))
        kept.due, kept.delay = asyncio.get_running_loop().time() + CONNECT_SECONDS, driver_state.RETRY_FIRST

    def _refuse_others(self) -> None:
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
        return resource in self._kept and self._kept[resource].server.is_connected

    def _report(self, what: str, problem: str) -> None:
        """Record a problem, or its end (""), of ``what``. Two loops report, each under its own name."""
        self._problems[what] = problem
        found = join_problems(each for each in self._problems.values() if each)
        self._conditions.report(PART, found)
        self._state.report(
            found or "devices are offered by the device plugin", level=logging.WARNING if found else logging.INFO
        )

    async def _thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
