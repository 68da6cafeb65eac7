# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The tasks of a serving instance: the store, the hardware, the claims, and the pool.

Each task is restarted separately.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .api.resources import ResourceApi
from .claims import claim_fabric
from .claims.claim_state import ClaimState
from .claims.companion_services import ServiceManager
from .claims.container_files import ContainerFiles
from .claims.hardware_executor import HardwareExecutor
from .claims.operations import ClaimContext
from .claims.service import ClaimService
from .claims.store.store import Store, refuse_other_releases
from .config import Configuration
from .core.discovery.device_locks import REQUEST, DeviceLocks
from .core.dra import device_metadata
from .core.dra.device_plugin_model import PLUGIN_FILE, cdi_kind
from .core.errors import AcceleratorError
from .core.host.cdi import spec_path
from .core.host.system import System
from .core.repartition.progress import StartedStep
from .core.settings.settings_record import record_path
from .core.vendors.protocol import Backend
from .kubelet.pod_resources import container_devices, socket_path
from .metrics import Metrics
from .publish.publisher import Publisher
from .supervisors import hardware, recovery, sockets, store_recovery
from .supervisors.automatic_reset import AutomaticReset
from .supervisors.claim_status_writer import ClaimStatusWriter
from .supervisors.device_plugin import DevicePluginSupervisor
from .supervisors.driver_state import Conditions, Shared, Snapshot, keep_running
from .supervisors.hardware import FIRST_READ_SECONDS, HardwareWatch
from .supervisors.hardware_notices import DeviceEventListener
from .supervisors.health import HardwareState, HealthSupervisor
from .supervisors.interface_change import InterfaceSwitch, RemainingClaims
from .supervisors.kubelet_calls import KubeletCalls
from .supervisors.layout import LayoutDifferences, LayoutSupervisor
from .supervisors.library_release import LibraryLock
from .supervisors.pool_updates import PoolUpdater
from .supervisors.pre_binding import PreBindingPreparer
from .supervisors.reconciler import Reconciler
from .supervisors.recovery import Recovery
from .supervisors.repartitioning import StepReporter
from .supervisors.reporting.event_texts import EventReporter
from .supervisors.reporting.missing_device_events import MissingDevices
from .supervisors.store_recovery import StoreSupervisor

# The maximum number of devices with a hardware call at a time, including devices that do not answer.
THREADS = 32
PARTS = (store_recovery.PART, sockets.PART, hardware.PART, recovery.PART)
# The computed container edits of all devices are reused for this time, in seconds. It is several times the duration of
# one claim.
EDITS_SECONDS = 0.02
# How long, in seconds, operations in progress may take when the driver stops.
DRAIN_SECONDS = 10
# How long, in seconds, a call waits for an instance that took over from another one. It opens its devices again, and
# they may have to wake up.
TAKEN_OVER_SECONDS = 30.0

#: The work of each task by its name. A task never ends.
Tasks = dict[str, Callable[[], Awaitable[None]]]


@dataclass(frozen=True)
class ServingParts:
    """The objects that several tasks of a serving instance use."""

    claims: ClaimState
    statuses: ClaimStatusWriter
    health: HealthSupervisor
    watch: HardwareWatch
    service: ClaimService


class Serving:
    """The work of one driver while this instance serves.

    A new object is created each time the instance starts to serve.

    ``conditions``, ``hardware_states``, ``differing``, ``publisher``, and ``service`` can be read from the beginning.
    """

    def __init__(
        self,
        *,
        configuration: Configuration,
        driver: str,
        pool: str,
        directory: str,
        boot_id: str,
        backend: Backend,
        system: System,
        api: ResourceApi,
        reports: EventReporter,
        metrics: Metrics,
        report_stage: Callable[[str], None],
        scan_requested: asyncio.Event,
        hardware_states: Shared[HardwareState],
        differing: Shared[LayoutDifferences],
        reported_steps: Shared[frozenset[StartedStep]],
        conditions: Conditions,
    ) -> None:
        self._configuration = configuration
        self._driver = driver
        self._pool = pool
        self._directory = directory
        self._boot_id = boot_id
        self._backend = backend
        self._system = system
        self._api = api
        self._reports = reports
        self._metrics = metrics
        self._report_stage = report_stage
        self._scan_requested = scan_requested
        self._snapshots = Shared(Snapshot())
        self.hardware_states = hardware_states
        self.differing = differing
        self.reported_steps = reported_steps
        self.conditions = conditions
        self.service: ClaimService | None = None
        #: The device plugin, if the devices are not offered for claims.
        self.plugin: DevicePluginSupervisor | None = None
        self.publisher = Publisher(
            api=api,
            driver=driver,
            pool=pool,
            node_name=configuration.node_name,
            metrics=metrics,
            report_problem=reports.problem,
        )

    @property
    def _plugin_file(self) -> str:
        """The path of the CDI file for pods that use devices without a claim."""
        return spec_path(self._configuration.cdi_directory, cdi_kind(self._backend.cdi_kind), PLUGIN_FILE)

    async def check_can_serve(self) -> None:
        """Check whether this instance could serve.

        It reads the format of the store and the hardware, and changes nothing.

        Raises AcceleratorError with the reason if it cannot serve.
        """
        await asyncio.to_thread(refuse_other_releases, f"{self._directory}/state.db")
        locks = DeviceLocks(self._directory, f"the driver {self._driver}")
        if locks.is_taken(REQUEST):
            raise AcceleratorError(f"The vendor's library is lent to {locks.holder_of(REQUEST)}", code="library-lent")
        try:
            self._backend.use_number_file(self._directory)
            await asyncio.to_thread(self._backend.open)
            await asyncio.to_thread(self._backend.discover, True, FIRST_READ_SECONDS)
        finally:
            await asyncio.to_thread(self._backend.close)

    async def run(
        self, kubelet_calls: KubeletCalls, connect_to_kubelet: Callable[[], Awaitable[None]], *, taken_over: bool
    ) -> None:
        """Serve until cancelled.

        Once the store is open, ``kubelet_calls`` forwards calls, and ``connect_to_kubelet`` connects to the kubelet.

        Devices are not published before that, because another process that serves the socket can be another publisher.
        ``taken_over`` means that calls may already be waiting.
        """
        executor = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix=self._backend.vendor)
        store_supervisor = StoreSupervisor(
            f"{self._directory}/state.db",
            system=self._system,
            cdi_directory=self._configuration.cdi_directory,
            cdi_kind=self._backend.cdi_kind,
            boot_id=self._boot_id,
            conditions=self.conditions,
            report_problem=self._reports.problem,
            settings_record=record_path(self._backend.vendor),
        )
        try:
            store, rebuilt = await store_supervisor.open()
            store_supervisor.follow(store)
            try:
                await self._work(
                    store,
                    store_supervisor,
                    executor,
                    kubelet_calls,
                    connect_to_kubelet,
                    suspect=rebuilt,
                    taken_over=taken_over,
                )
            finally:
                store.close()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    async def _work(
        self,
        store: Store,
        store_supervisor: StoreSupervisor,
        executor: ThreadPoolExecutor,
        kubelet_calls: KubeletCalls,
        connect_to_kubelet: Callable[[], Awaitable[None]],
        *,
        suspect: bool,
        taken_over: bool,
    ) -> None:
        self._prepare_backend(store)
        parts = self._create_parts(store, executor, taken_over=taken_over)
        self.service = parts.service
        store.observer = self._metrics.commit
        if suspect:
            parts.service.suspect.update(store.claims)
        tasks = {
            "store": store_supervisor.watch,
            **self._hardware_tasks(parts),
            **self._claim_tasks(parts),
            **self._layout_tasks(parts.claims),
            **self._interface_tasks(parts, executor, kubelet_calls),
        }
        try:
            await connect_to_kubelet()
            await asyncio.gather(*(keep_running(name, task) for name, task in tasks.items()))
        finally:
            if self.plugin is not None:
                await self.plugin.close()
            await parts.service.drain(DRAIN_SECONDS)
            parts.watch.close()
            parts.claims.locks.drop_all()

    def _prepare_backend(self, store: Store) -> None:
        """Pass the facts of the stored claims to the backend: device numbers, fabric partitions, and removed devices."""
        self._backend.use_number_file(
            self._directory,
            writes=True,
            is_referred=bool(store.claims) or any(rule.match.index is not None for rule in self._configuration.layout),
        )
        if self._backend.fabric_partitions is not None:
            self._backend.fabric_partitions.set_claimed(
                lambda: claim_fabric.claimed_partitions(tuple(store.claims.values()), store.meta, self._boot_id)
            )
        self._backend.add_detached(device for record in store.claims.values() for device in record.passthrough_devices)

    def _create_parts(self, store: Store, executor: ThreadPoolExecutor, *, taken_over: bool) -> ServingParts:
        claims = ClaimState.create(
            store,
            driver=self._driver,
            directory=self._directory,
            partitions_boot_id=None if self._backend.partitions_outlive_boot else self._boot_id,
        )
        statuses = self._claim_statuses(store)
        health = self._health_supervisor(claims)
        watch = self._hardware_watch(claims, health)
        service = ClaimService(
            self._claim_context(claims, executor, statuses, taken_over=taken_over),
            refresh=watch.scan,
            request_scan=self._scan_requested.set,
            refusals=claims.refusals,
            repartition=claims.repartition,
        )
        return ServingParts(claims=claims, statuses=statuses, health=health, watch=watch, service=service)

    def _claim_statuses(self, store: Store) -> ClaimStatusWriter:
        return ClaimStatusWriter(
            driver=self._driver,
            api=self._api,
            claims=lambda: store.claims,
            snapshots=self._snapshots,
            store=store.identity,
            missing=lambda: self.hardware_states.value.missing,
        )

    def _health_supervisor(self, claims: ClaimState) -> HealthSupervisor:
        return HealthSupervisor(
            driver=self._driver,
            directory=self._directory,
            system=self._system,
            boot_id=self._boot_id,
            effects=self._configuration.health_effects,
            snapshots=self._snapshots,
            hardware_states=self.hardware_states,
            scan_requested=self._scan_requested,
            reporter=self._reports,
            claims=claims.records,
        )

    def _hardware_watch(self, claims: ClaimState, health: HealthSupervisor) -> HardwareWatch:
        return HardwareWatch(
            self._backend,
            driver=self._driver,
            pool=self._pool,
            rules=self._configuration.layout,
            interval=self._configuration.inventory_interval,
            full_interval=self._configuration.full_inventory_interval,
            ownership=claims.ownership,
            snapshots=self._snapshots,
            conditions=self.conditions,
            library_lock=LibraryLock(claims.locks, claims.guard),
            scan_requested=self._scan_requested,
            report_problem=self._reports.problem,
            refusals=claims.refusals,
            repartition=claims.repartition,
            apply_repair_marks=health.apply_repair_marks,
            claims=claims.records,
        )

    def _claim_context(
        self, claims: ClaimState, executor: ThreadPoolExecutor, statuses: ClaimStatusWriter, *, taken_over: bool
    ) -> ClaimContext:
        return ClaimContext(
            driver=self._driver,
            hardware=self._hardware_executor(),
            store=claims.store,
            source=self._api,
            reporter=self._reports,
            metrics=self._metrics,
            executor=executor,
            boot_id=self._boot_id,
            inventory=lambda: self._snapshots.value.inventory,
            ownership=claims.ownership,
            devices=claims.guard,
            ready_seconds=TAKEN_OVER_SECONDS if taken_over else None,
            report_prepared=statuses.request_write,
        )

    def _hardware_executor(self) -> HardwareExecutor:
        cdi_directory = self._configuration.cdi_directory
        container_files = ContainerFiles(
            self._backend,
            self._driver,
            self._system,
            device_metadata.folder(cdi_directory, self._backend.cdi_kind),
            previous=f"{self._directory}/metadata",
        )
        return HardwareExecutor(
            self._backend,
            self._driver,
            self._system,
            cdi_directory,
            container_files,
            self._report_stage,
            ServiceManager(self._system),
            self._metrics,
            EDITS_SECONDS,
        )

    def _hardware_tasks(self, parts: ServingParts) -> Tasks:
        """Return the tasks that read the hardware."""
        listener = DeviceEventListener(
            self._backend,
            driver=self._driver,
            scan_requested=self._scan_requested,
            on_events=parts.health.record_events,
        )
        return {"hardware": parts.watch.run, "listen": listener.run, "health": parts.health.run}

    def _claim_tasks(self, parts: ServingParts) -> Tasks:
        """Return the tasks that keep prepared claims correct."""
        recovering = Recovery(
            parts.service,
            snapshots=self._snapshots,
            conditions=self.conditions,
            reporter=self._reports,
            scan=parts.watch.scan,
            report_stage=self._report_stage,
            boot_id=self._boot_id,
            metrics=self._metrics,
        )
        missing = MissingDevices(
            parts.service,
            snapshots=self._snapshots,
            conditions=self.conditions,
            scan_requested=self._scan_requested,
            reporter=self._reports,
            publish=parts.health.publish_missing_devices,
            note=parts.statuses.request_write,
        )
        reconciler = Reconciler(
            parts.service,
            source=self._api,
            reporter=self._reports,
            pool=self._pool,
            boot_id=self._boot_id,
            snapshots=self._snapshots,
            metrics=self._metrics,
            query_used_devices=functools.partial(container_devices, socket_path(self._configuration.kubelet_root)),
        )
        return {
            "recovery": recovering.run,
            "missing": missing.run,
            "reconcile": reconciler.run,
            "statuses": parts.statuses.run,
        }

    def _layout_tasks(self, claims: ClaimState) -> Tasks:
        """Return the tasks that report the layout and repartition runs."""
        layout = LayoutSupervisor(
            driver=self._driver,
            rules=self._configuration.layout,
            seconds=self._configuration.full_inventory_interval,
            snapshots=self._snapshots,
            known=self.differing,
            claims=claims.records,
            repartition=claims.repartition,
            annotate=self.publisher.set_notes,
            reporter=self._reports,
        )
        steps = StepReporter(
            driver=self._driver,
            node=self._configuration.node_name,
            directory=self._directory,
            repartition=claims.repartition,
            reported=self.reported_steps,
            devices=lambda: survey.devices if (survey := self._snapshots.value.survey) is not None else {},
            reporter=self._reports,
            counts=self._metrics,
        )
        return {"layout": layout.run, "repartition": steps.run}

    def _interface_tasks(self, parts: ServingParts, executor: ThreadPoolExecutor, kubelet_calls: KubeletCalls) -> Tasks:
        """Open ``kubelet_calls``, and return the tasks of the interface that offers the devices: claims, or the device plugin."""
        interface_switch = InterfaceSwitch(
            directory=self._directory,
            system=self._system,
            driver=self._driver,
            node_name=self._configuration.node_name,
            api=self._api,
            pod_resources=socket_path(self._configuration.kubelet_root),
            cdi_file=self._plugin_file,
            conditions=self.conditions,
        )
        if self._configuration.serves_claims:
            kubelet_calls.open(parts.service)
            return {**self._reset_tasks(parts), **self._publishing_tasks(parts, interface_switch)}
        self.plugin = self._plugin(parts, interface_switch, executor)
        kubelet_calls.open(RemainingClaims(parts.service, lambda: parts.claims.store.claims))
        return {"device-plugin": self.plugin.run}

    def _reset_tasks(self, parts: ServingParts) -> Tasks:
        """Return the task that resets faulty devices, if this is configured.

        The device plugin has no such task, because devices that are used without a claim are not recorded.
        """
        if not self._configuration.health_reset:
            return {}
        remedy = AutomaticReset(
            driver=self._driver,
            hardware_states=self.hardware_states,
            claims=parts.claims.records,
            reset=parts.watch.reset,
            was_reset=parts.health.end_reset_faults,
            report=self._reports.problem,
            report_done=self._reports.done,
        )
        return {"remedy": remedy.run}

    def _publishing_tasks(self, parts: ServingParts, interface_switch: InterfaceSwitch) -> Tasks:
        """Return the tasks that publish the devices and prepare claims before their pods are bound."""
        pool = PoolUpdater(self.publisher, self.hardware_states, self._backend.arranged, parts.claims.device_uuids)
        pre_binding = PreBindingPreparer(
            parts.service,
            client=self._api.client,
            api=self._api,
            statuses=parts.statuses,
            namespace=self._configuration.namespace,
            node_name=self._configuration.node_name,
            pool=self._pool,
            snapshots=self._snapshots,
            set_binding=self.publisher.set_binding,
            report_problem=self._reports.problem,
        )

        async def update_pool() -> None:
            await interface_switch.wait_for_plugin_pods()
            await pool.run()

        return {"pool": update_pool, "publish": self.publisher.run, "ahead": pre_binding.run}

    def _plugin(
        self, parts: ServingParts, interface_switch: InterfaceSwitch, executor: ThreadPoolExecutor
    ) -> DevicePluginSupervisor:
        """Return the device plugin.

        It does not offer devices that previous claims still use or that have pending cleanup.
        """
        return DevicePluginSupervisor(
            backend=self._backend,
            driver=self._driver,
            directory=self._configuration.plugins_directory,
            cdi_path=self._plugin_file,
            system=self._system,
            hardware_states=self.hardware_states,
            held_uuids=lambda: parts.service.unprepare_runner.pending_uuids | parts.claims.device_uuids(),
            interface_switch=interface_switch,
            conditions=self.conditions,
            executor=executor,
            metrics=self._metrics,
        )
