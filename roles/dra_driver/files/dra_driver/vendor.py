# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""One vendor's driver on this node: its parts, brought up in any order.

Nothing has to be there when it starts: not the kubelet, not the API server, not the devices' driver, not a device. Each part
keeps trying on its own and logs one line whenever its state changes. What the parts share is in ``supervisors.shared``.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

from .api.events import EventRecorder
from .api.resources import ResourceApi
from .claims.companions import ServiceManager
from .claims.execute import Hands
from .claims.guard import DeviceGuard
from .claims.ownership import Ownership
from .claims.service import ClaimService
from .claims.store import Store
from .commands import probe
from .config import Configuration
from .core.backend import Backend
from .core.device_locks import DeviceLocks
from .core.system import System
from .core.telemetry import Telemetry
from .kubelet.server import PluginServer
from .kubelet.sockets import lock_instance
from .metrics import Metrics
from .monitoring.view import View
from .publish.publisher import Publisher
from .supervisors import hardware, recovery, sockets, storage
from .supervisors.hardware import HardwareWatch
from .supervisors.health import HealthKeeper, Picture, PictureHealth
from .supervisors.lending import Lending
from .supervisors.listener import Listener
from .supervisors.pool import PoolKeeper
from .supervisors.reconciler import Reconciler
from .supervisors.recovery import Recovery
from .supervisors.remedy import Remedy
from .supervisors.reports import Reports
from .supervisors.shared import Conditions, Shared, Snapshot, keep
from .supervisors.sockets import SocketKeeper
from .supervisors.status import SOCKET, Status, StatusServer, status_of
from .supervisors.storage import StoreKeeper

# Calls to the hardware wait; this many devices are worked on at once, those that do not answer among them.
THREADS = 32
PARTS = (storage.PART, sockets.PART, hardware.PART, recovery.PART)
# How long the driver's own socket may take to answer that it prepares nothing.
ANSWER_SECONDS = 20.0
# Operations under way when the driver is stopped get this long to finish.
DRAIN_SECONDS = 10
# So many looks in a row may be missed until the health of devices counts as unknown.
STALE_LOOKS = 4


class VendorDriver:
    """Runs one backend's driver until it is cancelled. ``reached`` is told each stage of work that is complete.

    ``identity`` says what is wrong with whom the driver is to the API server; "" where nothing is.
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
        reached: Callable[[str], None],
        identity: Callable[[], str] = lambda: "",
    ) -> None:
        self._identity = identity
        self._configuration = configuration
        self._backend = backend
        self._system = system
        self._api = api
        self._metrics = metrics
        self._reached = reached
        self.driver = configuration.driver_name or backend.driver_name
        self.pool = configuration.pool_name or configuration.node_name
        self._directory = configuration.state_directory_of(self.driver)
        self._look_soon = asyncio.Event()
        self._reports = Reports(
            events, source=api, driver=self.driver, node_name=configuration.node_name, stale=self.look_again
        )
        self._snapshots = Shared(Snapshot())
        self._pictures = Shared(Picture())
        self._boot_id = ""
        self._server: PluginServer | None = None
        self._service: ClaimService | None = None
        self._publisher = Publisher(
            api=api,
            driver=self.driver,
            pool=self.pool,
            node_name=configuration.node_name,
            metrics=metrics,
            report_problem=self._reports.problem,
        )
        self._conditions = Conditions(*PARTS)

    def look_again(self) -> None:
        """Look at the hardware now: somebody has changed it."""
        self._look_soon.set()

    async def run(self, started: asyncio.Event) -> None:
        """Bring everything up and keep it so. ``started`` is set once the sockets serve.

        Raises AcceleratorError only for what no waiting can mend: another instance, a socket path that is too long.
        """
        directory = self._configuration.state_directory_of(self.driver)
        with lock_instance(directory):
            boot_id = self._system.boot_id()
            keeper = StoreKeeper(
                f"{directory}/state.db",
                system=self._system,
                cdi_directory=self._configuration.cdi_directory,
                cdi_kind=self._backend.cdi_kind,
                boot_id=boot_id,
                conditions=self._conditions,
                report_problem=self._reports.problem,
            )
            self._boot_id = boot_id
            status = StatusServer(f"{directory}/{SOCKET}", self.status)
            telling = asyncio.get_running_loop().create_task(keep("status", status.run))
            executor = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix=self._backend.vendor)
            try:
                store, rebuilt = await keeper.open()
                try:
                    await self._serve(directory, store, executor, boot_id, started, suspect=rebuilt)
                finally:
                    store.close()
            finally:
                executor.shutdown(wait=False, cancel_futures=True)
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)

    def status(self) -> Status:
        """Return how the driver is at this moment."""
        found = {
            storage.PART: "" if self._conditions.problem_of(storage.PART) else storage.unwritable(self._directory),
            "identity": self._identity(),
            "publish": self._publisher.problem,
        }
        return status_of(
            self.driver,
            self._pictures.value,
            [*self._conditions.problems, *(f"{part}: {text}" for part, text in found.items() if text)],
            boot_id=self._boot_id,
            published=self._publisher.is_current,
            registered=self._server is not None and self._server.registered,
        )

    async def answers(self) -> None:
        """See that this driver's own socket answers, by a call that the kubelet would make. Raises NotAlive.

        A socket that is being made again, or that somebody else has, is in hands already, and no reason to end the process.
        """
        if self._server is not None and not self._conditions.problem_of(sockets.PART):
            directory = self._configuration.state_directory_of(self.driver)
            await asyncio.to_thread(probe.call, f"{directory}/dra.sock", ANSWER_SECONDS)

    def view(self) -> View:
        """Return how the driver is at this moment, for whoever watches. Called on the driver's loop."""
        behind, service = self._publisher.behind_since, self._service
        problems = dict(problem.split(": ", 1) for problem in self.status().problems)
        return View(
            driver=self.driver,
            pool=self.pool,
            picture=self._pictures.value,
            records=tuple(service.store.claims.values()) if service is not None else (),
            parts=(*PARTS, "identity", "publish", "kubelet"),
            problems=problems,
            published=self.status().published,
            behind_seconds=0.0 if behind is None else time.monotonic() - behind,
            owing=service.undoing.owing if service is not None else frozenset(),
            under_way=service.under_way if service is not None else 0,
        )

    def telemetry(self, seconds: float) -> tuple[Telemetry, ...]:
        """Return what the devices do, on any thread. Raises BackendUnavailable."""
        return self._backend.telemetry(seconds)

    async def _serve(
        self,
        directory: str,
        store: Store,
        executor: ThreadPoolExecutor,
        boot_id: str,
        started: asyncio.Event,
        *,
        suspect: bool,
    ) -> None:
        configuration = self._configuration
        self._backend.remember(device for record in store.claims.values() for device in record.away)
        ownership = Ownership(store, boot_id)
        locks = DeviceLocks(directory, f"the driver {self.driver}")
        guard = DeviceGuard(locks)
        watch = HardwareWatch(
            self._backend,
            driver=self.driver,
            pool=self.pool,
            rules=configuration.layout,
            interval=configuration.inventory_interval,
            full_interval=configuration.full_inventory_interval,
            ownership=ownership,
            snapshots=self._snapshots,
            conditions=self._conditions,
            lending=Lending(locks, guard),
            soon=self._look_soon,
            report_problem=self._reports.problem,
        )
        service = ClaimService(
            driver=self.driver,
            hands=Hands(
                self._backend,
                self.driver,
                self._system,
                configuration.cdi_directory,
                f"{directory}/metadata",
                self._reached,
                ServiceManager(self._system),
                self._metrics,
            ),
            store=store,
            source=self._api,
            reporter=self._reports,
            metrics=self._metrics,
            executor=executor,
            boot_id=boot_id,
            inventory=lambda: self._snapshots.value.inventory,
            ownership=ownership,
            devices=guard,
            refresh=watch.look,
        )
        self._service = service
        store.observer = self._metrics.commit
        if suspect:
            service.suspect.update(store.claims)
        keeper = HealthKeeper(
            driver=self.driver,
            directory=directory,
            system=self._system,
            boot_id=boot_id,
            effects=configuration.health_effects,
            snapshots=self._snapshots,
            pictures=self._pictures,
            soon=self._look_soon,
            teller=self._reports,
            claims=lambda: tuple(store.claims.values()),
        )
        self._server = server = PluginServer(
            service,
            health=PictureHealth(self._pictures, self.pool, STALE_LOOKS * configuration.inventory_interval),
            driver=self.driver,
            service_path=f"{directory}/dra.sock",
            registration_path=f"{configuration.registry_directory}/{self.driver}-reg.sock",
            metrics=self._metrics,
        )
        served = SocketKeeper(server, driver=self.driver, conditions=self._conditions)
        recovering = Recovery(
            service,
            snapshots=self._snapshots,
            conditions=self._conditions,
            reporter=self._reports,
            look=watch.look,
            reached=self._reached,
            boot_id=boot_id,
            metrics=self._metrics,
        )
        reconciler = Reconciler(
            service,
            source=self._api,
            reporter=self._reports,
            pool=self.pool,
            boot_id=boot_id,
            snapshots=self._snapshots,
            metrics=self._metrics,
        )
        remedy = Remedy(
            driver=self.driver,
            pictures=self._pictures,
            claims=lambda: tuple(store.claims.values()),
            reset=watch.reset,
            was_reset=keeper.was_reset,
            report=self._reports.problem,
        )
        listener = Listener(self._backend, driver=self.driver, soon=self._look_soon, heard=keeper.heard)
        pool = PoolKeeper(self._publisher, self._pictures)
        await served.start()
        started.set()
        try:
            await asyncio.gather(
                keep("hardware", watch.run),
                keep("listen", listener.run),
                keep("health", keeper.run),
                *([keep("remedy", remedy.run)] if configuration.health_reset else []),
                keep("recovery", recovering.run),
                keep("pool", pool.run),
                keep("publish", self._publisher.run),
                keep("reconcile", reconciler.run),
                keep("sockets", served.run),
            )
        finally:
            await served.stop()
            await service.drain(DRAIN_SECONDS)
            watch.close()
            locks.drop_all()
