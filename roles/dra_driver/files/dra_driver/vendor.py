# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run one vendor's driver on this node. Its parts can start in any order.

Nothing must be available at the start: not the kubelet, the API server, the devices' driver, or any device. Each part
retries on its own, and logs one line when its state changes (``serving``).

A second instance of the same driver may run at the same time, for example during an update without downtime. Exactly
one instance is active (``supervisors.active_instance``). The newer one first checks that it could serve. Then it
registers with the kubelet, queues calls, and asks the active instance to hand over. The active instance completes its
running work and becomes the standby.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, Callable

from .api.events import EventRecorder
from .api.resources import ResourceApi
from .commands import probe
from .config import Configuration
from .core.errors import AcceleratorError
from .core.host.system import System
from .core.telemetry import Telemetry
from .core.vendors.protocol import Backend
from .kubelet.server import DRAIN_SECONDS, PluginServer
from .kubelet.sockets import paths_of, remove_unserved
from .logs import StateLog, fields
from .machine import PART as MACHINE
from .machine import ForeignState, check_machine, remaining_problem
from .metrics import Metrics
from .monitoring.view import DriverView
from .serving import PARTS, Serving
from .supervisors import driver_state, sockets, store_recovery
from .supervisors.active_instance import PART as TURN
from .supervisors.active_instance import ActiveInstanceLock
from .supervisors.driver_state import Conditions, Shared, keep_running
from .supervisors.health import HardwareHealth, HardwareState
from .supervisors.kubelet_calls import KubeletCalls
from .supervisors.layout import LayoutDifferences
from .supervisors.reporting.event_texts import EventReporter
from .supervisors.sockets import SocketSupervisor
from .supervisors.status import Role, Status, StatusServer, status_of

LOG = logging.getLogger(__name__)

# The timeout, in seconds, of the liveness call to the driver's own socket. The call prepares nothing.
ANSWER_SECONDS = 20.0
# How long a new instance waits for the kubelet to register it, in seconds. Without a kubelet there are no calls.
REGISTER_SECONDS = 15.0
POLL_SECONDS = 0.05
# Device health counts as unknown after this number of missed scans.
STALE_SCANS = 4
# Seconds between checks for remaining claims, if a device plugin offers the devices.
REMAINING_CLAIMS_SECONDS = 1.0
# The maximum duration, in seconds, of running calls at a handover. The kubelet waits no longer.
HAND_OVER_SECONDS = 40.0
# Seconds between checks whether an administrator has accepted the machine.
MACHINE_SECONDS = 5.0
# Seconds during which calls are accepted after the registration was withdrawn, at a handover.
WITHDRAWAL_SECONDS = 3.0


class VendorDriver:
    """Run one backend's driver until it is cancelled. ``report_stage`` is called with each completed stage of work.

    ``identity`` returns the problem with the driver's identity at the API server, or "". ``refused`` returns the
    settings of a later configuration that are not applied, each with the reason.
    """

    def __init__(
        self,
        *,
        configuration: Configuration,
        backend: Backend,
        system: System,
        api: ResourceApi,
        events: EventRecorder,
        metrics: Metrics,
        report_stage: Callable[[str], None],
        identity: Callable[[], str] = lambda: "",
        refused: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._identity = identity
        self._refused = refused
        self._reload = asyncio.Event()
        self._configuration = configuration
        self._backend = backend
        self._system = system
        self._api = api
        self._metrics = metrics
        self._report_stage = report_stage
        self.driver = configuration.driver_name or backend.driver_name
        api.client.opaque_of.add(self.driver)
        self.pool = configuration.pool_name or configuration.node_name
        self._directory = configuration.state_directory_of(self.driver)
        self._paths = paths_of(self._directory, configuration.registry_directory, self.driver, configuration.instance)
        self._scan_requested = asyncio.Event()
        self._reports = EventReporter(
            events, source=api, driver=self.driver, node_name=configuration.node_name, request_scan=self.request_scan
        )
        self._boot_id = ""
        #: The reason why the state directory belongs to a different machine, or "".
        self._machine_problem = ""
        self._role = Role.STARTING
        self._server: PluginServer | None = None
        self._serving = self._new_serving()

    def request_scan(self) -> None:
        """Scan the hardware now, because it was changed."""
        self._scan_requested.set()

    def apply_configuration(self, configuration: Configuration) -> None:
        """Apply a new configuration that needs no new process. Calls are queued in the meantime, and none fails.

        If nothing differs, the hardware is scanned.
        """
        same = replace(configuration, digest="") == replace(self._configuration, digest="")
        self._configuration = configuration
        if same:
            self.request_scan()
        else:
            self._reload.set()

    async def run(self, started: asyncio.Event) -> None:
        """Start all parts and keep them running.

        ``started`` is set when the sockets serve, or while another instance is active. Raises AcceleratorError only for
        problems that waiting cannot solve: another process of the same instance, a socket path that is too long, a
        missing directory, or work that does not end at a handover.
        """
        self._boot_id = self._system.boot_id()
        instance_lock = ActiveInstanceLock(self._directory, self._configuration.instance, self._boot_id)
        is_active, takes_over = await instance_lock.acquire_or_wait_for_disk(), not instance_lock.was_handed_over
        status = StatusServer(self._paths.status, self.status)
        status_task = asyncio.get_running_loop().create_task(keep_running("status", status.run))
        try:
            await self._verify_machine(started)
            while True:
                self._serving = self._new_serving()
                await self._wait_and_serve(instance_lock, started, is_active=is_active, takes_over=takes_over)
                is_active = takes_over = False
        except asyncio.CancelledError:
            instance_lock.delete_note()
            raise
        finally:
            instance_lock.release()
            status_task.cancel()
            await asyncio.gather(status_task, return_exceptions=True)

    async def _verify_machine(self, started: asyncio.Event) -> None:
        """Return if the state directory belongs to this machine, or as soon as an administrator accepts the machine.

        Until then the driver publishes no device and does not serve the kubelet, but the process reports its status. Raises ForeignState
        when an administrator resets the state.
        """
        try:
            await asyncio.to_thread(check_machine, self._system, self._directory)
        except ForeignState as error:
            state = StateLog(LOG)
            self._machine_problem = str(error)
            started.set()
            while self._machine_problem:
                state.report(self._machine_problem, level=logging.ERROR, driver=self.driver)
                await asyncio.sleep(MACHINE_SECONDS)
                self._machine_problem = await asyncio.to_thread(remaining_problem, self._system, self._directory)
            LOG.info("the state directory belongs to this machine now", extra=fields(driver=self.driver))

    def status(self) -> Status:
        """Return the driver's current status."""
        serving = self._serving
        found = {
            MACHINE: self._machine_problem,
            store_recovery.PART: ""
            if serving.conditions.problem_of(store_recovery.PART)
            else store_recovery.unwritable(self._directory),
            "identity": self._identity(),
            "publish": serving.publisher.problem,
            "device-nodes": self._denied_nodes() if self._configuration.device_rules else "",
        }
        return status_of(
            self.driver,
            serving.hardware_states.value,
            [*serving.conditions.problems, *(f"{part}: {text}" for part, text in found.items() if text)],
            boot_id=self._boot_id,
            published=serving.publisher.is_current if serving.plugin is None else serving.plugin.is_current,
            registered=self._is_known_to_kubelet,
            instance=self._configuration.instance,
            role=self._role,
            configuration="" if self._reload.is_set() else self._configuration.digest,
            refused=self._refused(),
            kubelet_interface=self._configuration.kubelet_interface,
            resources=serving.plugin.resources if serving.plugin is not None else (),
            not_offered=serving.plugin.not_offered if serving.plugin is not None else None,
            pending_cleanup=serving.service.unprepare_runner.pending if serving.service is not None else (),
        )

    def _denied_nodes(self) -> str:
        """Return which device nodes the pod's container may not open, and the remedy; "" if it may open all.

        Vendors' drivers get most major numbers when they are loaded, so a reboot can change them. The container has the numbers of the
        last run of the playbook.
        """
        denied = [
            path
            for path in self._system.find_nodes(self._backend.facts.library_device_nodes)
            if not self._system.can_read(path)
        ]
        if not denied:
            return ""
        return (
            f"the pod's container may not open {', '.join(denied[:3])} ({len(denied)} device nodes), probably because major numbers have "
            f"changed since the last run of the playbook. Run dra.accelerators.site with --limit for this node."
        )

    @property
    def _is_known_to_kubelet(self) -> bool:
        """Return whether pods can get devices through the kubelet: by claims, or as offered resources."""
        if self._configuration.serves_claims:
            return self._server is not None and self._server.registered
        plugin = self._serving.plugin
        return plugin is not None and plugin.is_connected

    async def check_own_socket(self) -> None:
        """Verify that this driver's own socket answers a call of the kubelet's kind. Raises NotAlive.

        A socket that is being created again, or that another process owns, is reported elsewhere, and is no reason to
        end the process.
        """
        if self._server is not None and not self._serving.conditions.problem_of(sockets.PART):
            await asyncio.to_thread(probe.call, self._paths.service, ANSWER_SECONDS)

    def view(self) -> DriverView:
        """Return the driver's current state for metrics. Call this on the driver's event loop."""
        publisher, service = self._serving.publisher, self._serving.service
        behind = publisher.outdated_since
        problems = dict(problem.split(": ", 1) for problem in self.status().problems)
        return DriverView(
            driver=self.driver,
            pool=self.pool,
            hardware_state=self._serving.hardware_states.value,
            records=tuple(service.store.claims.values()) if service is not None else (),
            parts=(*PARTS, TURN, MACHINE, "identity", "publish", "kubelet", "device-nodes"),
            problems=problems,
            published=self.status().published,
            behind_seconds=0.0 if behind is None else time.monotonic() - behind,
            pending=service.unprepare_runner.pending_uuids if service is not None else frozenset(),
            under_way=service.calls_in_progress if service is not None else 0,
            resources=self._serving.plugin.resources if self._serving.plugin is not None else (),
            differing=self._serving.differing.value.number,
        )

    def telemetry(self, seconds: float) -> tuple[Telemetry, ...]:
        """Return metrics of the devices, and of the partitions that were created for claims. Can run on any thread.

        Raises BackendUnavailable. Partitions of an administrator are left out, because the administrator could not
        destroy a partition that this process has queried.
        """
        service = self._serving.service
        claims = tuple(service.store.claims.values()) if service is not None else ()
        made = {
            each.partition_uuid for claim in claims for each in claim.devices if each.created and each.partition_uuid
        }
        return self._backend.telemetry(seconds, made)

    def _new_serving(self, previous: Serving | None = None) -> Serving:
        """Return the parts for the current configuration.

        Data for the kubelet and its calls are kept from the previous ones.
        """
        self._reload.clear()
        return Serving(
            configuration=self._configuration,
            driver=self.driver,
            pool=self.pool,
            directory=self._directory,
            boot_id=self._boot_id,
            backend=self._backend,
            system=self._system,
            api=self._api,
            reports=self._reports,
            metrics=self._metrics,
            report_stage=self._report_stage,
            scan_requested=self._scan_requested,
            hardware_states=previous.hardware_states if previous is not None else Shared(HardwareState()),
            differing=previous.differing if previous is not None else Shared(LayoutDifferences()),
            reported_steps=previous.reported_steps if previous is not None else Shared(frozenset()),
            conditions=previous.conditions if previous is not None else Conditions(*PARTS),
        )

    async def _wait_and_serve(
        self, instance_lock: ActiveInstanceLock, started: asyncio.Event, *, is_active: bool, takes_over: bool
    ) -> None:
        """Wait until this is the active instance, serve, and hand over when another instance requests it.

        ``is_active`` is whether this is the active instance already. ``takes_over`` is whether it requests a handover.
        """
        serving, kubelet_calls = self._serving, KubeletCalls(self.driver)
        server = PluginServer(
            kubelet_calls,
            health=HardwareHealth(
                serving.hardware_states, self.pool, lambda: STALE_SCANS * self._configuration.inventory_interval
            ),
            driver=self.driver,
            service_path=self._paths.service,
            registration_path=self._paths.registration,
            metrics=self._metrics,
        )
        socket_supervisor = SocketSupervisor(server, driver=self.driver, conditions=serving.conditions)
        connection_wanted, is_connected, is_serving = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def serve_kubelet() -> None:
            await connection_wanted.wait()
            if not self._configuration.serves_claims:
                started.set()
                is_connected.set()
                await self._serve_remaining_claims(server, socket_supervisor)
            self._server = server
            await socket_supervisor.start()
            started.set()
            is_connected.set()
            await keep_running("sockets", socket_supervisor.run)

        async def connect_to_kubelet() -> None:
            connection_wanted.set()
            await is_connected.wait()

        async def work() -> None:
            if not is_active and takes_over:
                await self._take_over_from_active(instance_lock, server, connect_to_kubelet)
            elif not is_active:
                self._report_standby(started)
                await instance_lock.wait_until_free()
            self._role = Role.SERVING
            serving.conditions.report(TURN)
            instance_lock.delete_note()
            self._remove_unserved_sockets()
            is_serving.set()
            await self._serving.run(kubelet_calls, connect_to_kubelet, taken_over=not is_active)

        async def wait_for_handover_request() -> str:
            await is_serving.wait()
            return await instance_lock.wait_for_request()

        async def wait_for_configuration() -> None:
            await is_serving.wait()
            await self._reload.wait()

        loop, grace, settle = asyncio.get_running_loop(), DRAIN_SECONDS, 0.0
        kubelet_task, work_task, handover_task = (
            loop.create_task(each()) for each in (serve_kubelet, work, wait_for_handover_request)
        )
        reload_task = loop.create_task(wait_for_configuration())
        try:
            while True:
                tasks = (kubelet_task, work_task, handover_task, reload_task)
                done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if done != {reload_task}:
                    break
                await self._end_previous_parts(kubelet_calls, work_task)
                self._serving = self._new_serving(serving)
                work_task = loop.create_task(self._serving.run(kubelet_calls, connect_to_kubelet, taken_over=True))
                reload_task = loop.create_task(wait_for_configuration())
            done -= {reload_task}
            for task in done:
                task.result()
            LOG.info("handing over", extra=fields(driver=self.driver, to=handover_task.result()))
            self._role, grace, settle = Role.STANDBY, HAND_OVER_SECONDS, WITHDRAWAL_SECONDS
            serving.conditions.report(TURN, f"{handover_task.result()} takes over")
        finally:
            # The registration is withdrawn first. Then running calls are completed, and the parts end.
            await _cancel_and_wait(kubelet_task, handover_task, reload_task)
            await socket_supervisor.stop(grace, settle)
            self._server = None
            await _cancel_and_wait(work_task)
        await self._hand_over(instance_lock)

    async def _serve_remaining_claims(self, server: PluginServer, served: SocketSupervisor) -> None:
        """Serve the kubelet while claims remain from the time when this node served claims. Never returns."""
        conditions = self._serving.conditions
        conditions.report(sockets.PART)
        while True:
            service = self._serving.service
            if service is not None and service.store.claims and self._server is None:
                LOG.info("serving the claims that are left", extra=fields(driver=self.driver))
                self._server = server
                await served.start()
                serving = asyncio.ensure_future(keep_running("sockets", served.run))
                try:
                    while service.store.claims and not serving.done():
                        await asyncio.sleep(REMAINING_CLAIMS_SECONDS)
                    if serving.done():
                        serving.result()
                finally:
                    await _cancel_and_wait(serving)
                await served.stop()
                self._server = None
                conditions.report(sockets.PART)
            await asyncio.sleep(REMAINING_CLAIMS_SECONDS)

    def _remove_unserved_sockets(self) -> None:
        """Remove the sockets of killed instances."""
        registry = self._configuration.registry_directory
        removed = remove_unserved(self._directory, registry, self.driver, self._paths)
        if removed:
            LOG.info("removed sockets of ended processes", extra=fields(driver=self.driver, sockets=removed))

    def _report_standby(self, started: asyncio.Event) -> None:
        self._role = Role.STANDBY
        self._serving.conditions.report(TURN, "another instance serves; this one takes up again when that one ends")
        LOG.info("standing by: another instance serves", extra=fields(driver=self.driver))
        started.set()

    async def _take_over_from_active(
        self, instance_lock: ActiveInstanceLock, server: PluginServer, connect_to_kubelet: Callable[[], Awaitable[None]]
    ) -> None:
        """Take over from the active instance once this instance can serve and is registered with the kubelet."""
        self._role = Role.WAITING
        state, delay = StateLog(LOG), driver_state.RETRY_FIRST
        while True:
            if instance_lock.try_acquire():
                return
            try:
                await self._serving.check_can_serve()
                break
            except AcceleratorError as error:
                text = f"another instance serves, and this one could not: {error}"
                state.report(text, level=logging.WARNING, driver=self.driver)
                self._serving.conditions.report(TURN, text)
                await asyncio.sleep(delay)
                delay = min(delay * 2, driver_state.RETRY_LIMIT)
        self._serving.conditions.report(TURN, "another instance serves; waiting until it hands over")
        await connect_to_kubelet()
        deadline = time.monotonic() + REGISTER_SECONDS
        while self._configuration.serves_claims and not server.registered and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        LOG.info("asking to take over", extra=fields(driver=self.driver, registered=server.registered))
        await instance_lock.request_handover()
        LOG.info("taken over", extra=fields(driver=self.driver))

    async def _end_previous_parts(self, kubelet_calls: KubeletCalls, working: asyncio.Task[Any]) -> None:
        """End the parts of the previous configuration: complete the running work first, while new calls are queued."""
        LOG.info("the configuration has changed", extra=fields(driver=self.driver))
        kubelet_calls.close()
        if self._serving.service is not None:
            await self._serving.service.drain(HAND_OVER_SECONDS)
        await _cancel_and_wait(working)
        with contextlib.suppress(AcceleratorError):
            await asyncio.to_thread(self._backend.close)  # listeners end here, and the next parts start new ones

    async def _hand_over(self, instance_lock: ActiveInstanceLock) -> None:
        """Release the hardware and the lock of the active instance. Raises AcceleratorError if work hangs, so that the process ends."""
        service = self._serving.service
        with contextlib.suppress(AcceleratorError):
            await asyncio.to_thread(self._backend.close)
        if service is not None and service.calls_in_progress:
            raise AcceleratorError(
                f"{service.calls_in_progress} claims are still under way, and another instance is to take over",
                hint="This process ends, so that it does not work on devices of the other instance.",
                code="does-not-end",
            )
        instance_lock.hand_over()


async def _cancel_and_wait(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
