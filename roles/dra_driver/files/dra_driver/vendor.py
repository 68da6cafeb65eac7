# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""One vendor's driver on this node: its hardware, its claims, its sockets and its pool, brought up in any order.

Nothing has to be there when it starts: not the kubelet, not the API server, not the GPU's driver, not a GPU. Each part
keeps trying on its own and logs one line whenever its state changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from .api.client import ApiError
from .api.events import EventRecorder, Subject
from .api.resources import ResourceApi
from .claims.allocation import allocated_here
from .claims.execute import Hands
from .claims.plan import PARTITIONING_KEY
from .claims.records import ClaimRecord, ClaimReference
from .claims.recovery import droppable, plan_recovery, records_in_files, stale_marks
from .claims.service import ClaimService
from .claims.store import Change, Store, StoreDamaged, StoreError
from .config import Configuration
from .core.backend import Backend
from .core.cdi import list_specs
from .core.errors import AcceleratorError
from .core.model import Device
from .core.system import System
from .inventory import Survey, owned_partitions, survey
from .kubelet.server import PluginServer
from .kubelet.sockets import SocketError, lock_instance
from .logs import StateLog, fields, operation
from .metrics import Metrics
from .publish.publisher import Content, Publisher
from .stages import StopPoint

LOG = logging.getLogger(__name__)

# Errors that say that the hardware is not what was published.
STALE_CODES = ("in-use", "device-gone", "partition-gone", "partitioning-on", "partitioning-off", "does-not-fit")
# NVML calls wait on hardware; this many devices are worked on at once.
THREADS = 16
RETRY_FIRST, RETRY_LIMIT = 1.0, 15.0
# So many failed looks at hardware that answered before, until its devices are withdrawn.
PATIENCE = 3
# How often claims are held against the API server, and how often one must be missing there before it is dropped.
RECONCILE_SECONDS = 600.0
MISSING_LIMIT = 2


class VendorDriver:
    """Runs one backend's driver until it is cancelled."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        backend: Backend,
        system: System,
        api: ResourceApi,
        events: EventRecorder,
        metrics: Metrics,
        stop_point: StopPoint,
    ) -> None:
        self._configuration = configuration
        self._backend = backend
        self._system = system
        self._api = api
        self._events = events
        self._metrics = metrics
        self._stop_point = stop_point
        self.driver = configuration.driver_name or backend.driver_name
        self.pool = configuration.pool_name or configuration.node_name
        self._state = StateLog(LOG)
        self._executor = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix=f"{backend.vendor}")
        self._lock: IO[bytes] | None = None
        self._store: Store | None = None
        self._server: PluginServer | None = None
        self._survey: Survey | None = None
        self._looking = asyncio.Lock()
        self._look_soon = asyncio.Event()
        self._boot_id = ""
        self._former_boot: set[str] = set()
        self._missing: dict[str, int] = {}
        self._publisher = Publisher(
            api=api,
            driver=self.driver,
            pool=self.pool,
            node_name=configuration.node_name,
            metrics=metrics,
            report_problem=self._report_problem,
        )

    async def run(self, started: asyncio.Event) -> None:
        """Bring everything up and keep it so. ``started`` is set once the sockets serve.

        Raises AcceleratorError only for what no waiting can mend: another instance, a socket path that is too long.
        """
        directory = self._configuration.state_directory_of(self.driver)
        self._lock = lock_instance(directory)
        self._boot_id = self._system.boot_id()
        store, rebuilt = await self._open_store(f"{directory}/state.db")
        self._store = store
        service = ClaimService(
            driver=self.driver,
            hands=Hands(self._backend, self._system, self._configuration.cdi_directory, self._stop_point.reached),
            store=store,
            source=self._api,
            reporter=self,
            metrics=self._metrics,
            executor=self._executor,
            boot_id=self._boot_id,
            refresh=lambda: self._look(service),
        )
        self._former_boot = {uid for uid, record in store.claims.items() if record.boot_id != self._boot_id}
        if rebuilt:
            service.suspect.update(store.claims)
        self._server = PluginServer(
            service,
            driver=self.driver,
            service_path=f"{directory}/dra.sock",
            registration_path=f"{self._configuration.registry_directory}/{self.driver}-reg.sock",
        )
        await self._start_server(self._server)
        started.set()
        try:
            await asyncio.gather(
                self._keep("hardware", lambda: self._follow_hardware(service)),
                self._keep("publish", self._publisher.run),
                self._keep("reconcile", lambda: self._reconcile(service)),
                self._keep("sockets", self._server.watch_sockets),
            )
        finally:
            await self._server.stop()
            await service.drain(10)
            store.close()
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._lock.close()

    @staticmethod
    async def _keep(name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do work that never ends; should it fail in a way that nobody foresaw, say so and begin anew."""
        while True:
            try:
                await work()
            except Exception:
                LOG.exception("%s failed and begins anew", name)
            await asyncio.sleep(RETRY_LIMIT)

    def look_again(self) -> None:
        """Look at the hardware now: somebody has changed it."""
        self._look_soon.set()

    def failed(self, claim: ClaimReference, verb: str, error: AcceleratorError) -> None:
        """Write an Event on a claim that could not be prepared or unprepared."""
        if error.code in STALE_CODES:
            self.look_again()  # the scheduler should stop offering what is not there
        subject = Subject("ResourceClaim", "resource.k8s.io/v1", claim.name, claim.uid, claim.namespace)
        self._events.warning(subject, f"{verb}Failed", f"{self.driver}: {error}", action=verb)

    def _report_problem(self, reason: str, message: str) -> None:
        node = self._configuration.node_name
        self._events.warning(Subject("Node", "v1", node, node), reason, f"{self.driver}: {message}", action="Publish")

    # ------------------------------------------------------------------ the store and the sockets

    async def _open_store(self, path: str) -> tuple[Store, bool]:
        """Open the store; a damaged or lost one is rebuilt from the CDI files. Returns whether it was."""
        state = StateLog(LOG)
        while True:
            try:
                if not Path(path).exists() and self._recorded():
                    raise StoreDamaged(f"The store {path} is not there, but prepared claims are")
                return Store.open(path), False
            except StoreDamaged as error:
                LOG.error("%s; it is rebuilt from CDI files", error)  # noqa: TRY400  the file is at fault, not the code
                try:
                    store = self._rebuild(path)
                except StoreError as second:
                    state.report(str(second), level=logging.ERROR)
                else:
                    aside = store.former or "nothing"
                    message = f"{error}. {aside} was set aside; {len(store.claims)} claims were found again"
                    LOG.warning("%s", message)
                    self._report_problem("StoreRebuilt", message)
                    return store, True
            except StoreError as error:
                state.report(str(error), level=logging.ERROR)
            await asyncio.sleep(5)

    def _recorded(self) -> tuple[ClaimRecord, ...]:
        return records_in_files(self._system, self._configuration.cdi_directory, self._backend.cdi_kind)

    def _rebuild(self, path: str) -> Store:
        records = self._recorded()
        # Who switched partitioning on is lost. Where only claims' partitions are, it was the driver.
        marks = {
            f"{PARTITIONING_KEY}{held.device_uuid}": self._boot_id
            for record in records
            for held in record.devices
            if held.created
        }
        return Store.rebuild(path, records, marks)

    async def _start_server(self, server: PluginServer) -> None:
        state = StateLog(LOG)
        while True:
            try:
                await server.start()
            except SocketError as error:
                state.report(str(error), level=logging.ERROR)
                await server.stop()
                await asyncio.sleep(2)
            else:
                LOG.info("serving the kubelet", extra=fields(driver=self.driver))
                return

    # ------------------------------------------------------------------ hardware

    async def _follow_hardware(self, service: ClaimService) -> None:
        delay, failures, recovered = RETRY_FIRST, PATIENCE, False
        while True:
            try:
                if failures >= PATIENCE:
                    await service.thread(self._backend.open)
                await self._look(service)
                if not recovered:
                    await self._recover(service)
                    recovered = True
                service.set_ready()
                failures, delay = 0, RETRY_FIRST
                self._report_devices(self._survey.devices.values() if self._survey else ())
                await self._pause(self._configuration.inventory_interval)
            except AcceleratorError as error:
                failures += 1
                if failures >= PATIENCE:
                    self._state.report(f"no devices: {error}", level=logging.WARNING, driver=self.driver)
                    service.set_ready(str(error))
                    self._publisher.set_content(Content())
                    with contextlib.suppress(AcceleratorError):
                        await service.thread(self._backend.close)
                await self._pause(delay)
                delay = min(delay * 2, RETRY_LIMIT)

    def _report_devices(self, devices: Collection[Device]) -> None:
        ill = [device for device in devices if not device.health.healthy]
        faults = [f"{device.describe()} is tainted: {', '.join(device.health.causes)}" for device in ill]
        faults += [f"one is not published: {text}" for text in self._backend.unanswered]
        message = f"{len(devices) - len(ill)} devices answer"
        if not faults:
            self._state.report(message, driver=self.driver)
            return
        message += f", {len(faults)} {'does' if len(faults) == 1 else 'do'} not: {'; '.join(faults)}"
        if self._state.report(message, level=logging.WARNING, driver=self.driver):
            self._report_problem("DevicesUnhealthy", message)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._look_soon.wait(), seconds)
        self._look_soon.clear()

    async def _look(self, service: ClaimService) -> None:
        """Look at the hardware and bring the inventory and the pool up to date."""
        async with self._looking:
            before = dict(service.store.claims)
            devices = await service.thread(self._backend.discover)
            # A partition of ours that was seen belongs to a record of before or of now; either keeps it ours.
            owned = owned_partitions([*before.values(), *service.store.claims.values()])
            found = await service.thread(survey, self._backend, devices, self._configuration.layout, owned)
            self._survey = found
            service.inventory = found.inventory(self.pool)
            self._publisher.set_content(Content(found.offers, found.counter_sets))

    async def _recover(self, service: ClaimService) -> None:
        """Bring the claims of an earlier run, or of before a reboot, to an end: prepared or cleanly gone."""
        store, current = service.store, self._survey
        if current is None:
            return
        with operation():
            files = await service.thread(
                list_specs, self._system, self._configuration.cdi_directory, self._backend.cdi_kind
            )
            plan = plan_recovery(
                store.claims,
                files,
                current.devices,
                store.meta,
                dynamic=current.dynamic,
                boot_id=self._boot_id,
            )
            self._stop_point.reached("recovery-planned")
            marks = stale_marks(current.devices, store.meta)
            if marks:
                await store.commit(Change(meta=marks))
            service.suspect.update(plan.restore)
            for uid in plan.undo:
                await self._recovery_step(service.forget(uid), "undo", uid)
            for uid in plan.stale_files:
                await self._recovery_step(service.thread(service.hands.remove_cdi, uid), "remove-cdi", uid)
            for change in plan.mode_changes:
                await self._recovery_step(service.switch_off(change.device_uuid), "switch-off", change.device_uuid)
            # From here on the kubelet is served: a claim that it asks for is restored then and there.
            service.set_ready()
            await asyncio.gather(*(self._recovery_step(service.restore(uid), "restore", uid) for uid in plan.restore))
            if plan.undo or plan.restore or plan.stale_files or plan.mode_changes:
                LOG.info(
                    "recovered",
                    extra=fields(undone=len(plan.undo), restored=len(plan.restore), stale_files=len(plan.stale_files)),
                )
                await self._look(service)

    async def _recovery_step(self, work: Any, what: str, subject: str) -> None:
        try:
            await work
        except (AcceleratorError, OSError) as error:
            LOG.warning("recovery: %s failed: %s", what, error, extra=fields(subject=subject))
            record = self._store.claims.get(subject) if self._store is not None else None
            if record is not None and isinstance(error, AcceleratorError):
                self.failed(record.reference, "Restore" if what == "restore" else "Unprepare", error)
        else:
            LOG.info("recovery: %s", what, extra=fields(subject=subject))
        self._stop_point.reached("recovery-step-done")

    # ------------------------------------------------------------------ claims against the API server

    async def _reconcile(self, service: ClaimService) -> None:
        """Drop claims that the API server no longer knows and nothing uses."""
        delay = RETRY_FIRST
        while True:
            try:
                if self._survey is not None:
                    for record in tuple(service.store.claims.values()):
                        await self._reconcile_one(service, record)
                    await asyncio.sleep(RECONCILE_SECONDS)
                delay = RETRY_FIRST
            except AcceleratorError:
                delay = min(delay * 2, 60.0)  # the publisher reports that the API server does not answer
            await asyncio.sleep(delay)

    async def _reconcile_one(self, service: ClaimService, record: ClaimRecord) -> None:
        if not record.prepared:
            # Either it is being prepared at this moment, or undoing it failed and the kubelet never asked again.
            if record.uid in service.suspect:
                with contextlib.suppress(AcceleratorError):
                    await service.forget(record.uid, prepared_too=False)
            return
        if await self._is_allocated_here(record):
            self._missing.pop(record.uid, None)
            return
        self._missing[record.uid] = self._missing.get(record.uid, 0) + 1
        from_former_boot = record.uid in self._former_boot and record.uid not in service.asked
        if not from_former_boot and self._missing[record.uid] < MISSING_LIMIT:
            return
        devices: Mapping[str, Any] = await service.thread(service.hands.facts, record.device_uuids)
        if not droppable(record, devices):
            return
        with operation():
            LOG.info(
                "claim is gone from the API server and nothing uses its devices: dropped",
                extra=fields(claim=record.describe(), uid=record.uid),
            )
            with contextlib.suppress(AcceleratorError):
                await service.forget(record.uid)
                self._missing.pop(record.uid, None)

    async def _is_allocated_here(self, record: ClaimRecord) -> bool:
        if not record.name:
            return True
        try:
            claim = await self._api.claim(record.namespace, record.name)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return allocated_here(claim, record.uid, self.driver, self.pool)

    def summary(self) -> dict[str, Any]:
        """Return the driver's state in a few words, for logs."""
        return {
            "driver": self.driver,
            "registered": self._server.registered if self._server else False,
            "claims": len(self._store.claims) if self._store else 0,
            "at": time.time(),
        }
