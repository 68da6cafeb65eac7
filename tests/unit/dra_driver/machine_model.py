# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A node for tests: real components on the model of a backend.

Only the backend is a model. The store is SQLite, and CDI files are files.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend_model import ALL_DYNAMIC, DRIVER, ModelBackend, ModelGpus
from companion_model import ModelCompanionServices
from dra_driver import stages
from dra_driver.api.client import ApiError
from dra_driver.claims.configs import obsolete_setting_entries
from dra_driver.claims.container_files import ContainerFiles
from dra_driver.claims.hardware_executor import HardwareExecutor
from dra_driver.claims.locking import DeviceGuard
from dra_driver.claims.operations import ClaimContext
from dra_driver.claims.partitions.ownership import Ownership
from dra_driver.claims.pending_cleanups import obsolete_fabric_cleanup_entries
from dra_driver.claims.plan import Inventory
from dra_driver.claims.refusals import Refusals
from dra_driver.claims.service import ClaimService
from dra_driver.claims.startup_recovery import obsolete_partitioning_entries, plan_recovery
from dra_driver.claims.store.records import ClaimReference
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.tables import Change
from dra_driver.core.discovery.device_locks import DeviceLocks
from dra_driver.core.dra import device_metadata
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.host.cdi import list_specs
from dra_driver.core.partitioning.rules import Rule, parse_rules
from dra_driver.core.repartition.record import Watch
from dra_driver.inventory import Survey, survey
from dra_driver.metrics import Metrics
from pci_model import PciSystem

POOL = "node-1"


def bus(directory: Path, gpus: ModelGpus) -> PciSystem:
    """Return the node's PCI bus with its GPUs, each in its own IOMMU group."""
    (directory / "root").mkdir(exist_ok=True)
    system = PciSystem(str(directory / "root"))
    for index in range(gpus.count):
        system.add(gpus.template(index).pci_address, str(40 + index), "nvidia")
    return system


class Claims:
    """The ResourceClaims of a cluster, allocated by the test."""

    def __init__(self) -> None:
        self.claims: dict[tuple[str, str], dict[str, Any]] = {}
        self.reads = 0
        self.failures: list[AcceleratorError] = []

    def allocate(
        self,
        name: str,
        *devices: str | Mapping[str, Any],
        uid: str = "",
        config: Sequence[Mapping[str, Any]] = (),
        driver: str = DRIVER,
    ) -> ClaimReference:
        reference = ClaimReference("default", name, uid or f"0uid-{name}")
        results = []
        for number, device in enumerate(devices):
            given = {"device": device} if isinstance(device, str) else dict(device)
            results.append({"request": f"r{number}", "driver": driver, "pool": POOL, **given})
        self.claims["default", name] = {
            "metadata": {"namespace": "default", "name": name, "uid": reference.uid},
            "status": {"allocation": {"devices": {"results": results, "config": list(config)}}},
        }
        return reference

    def remove(self, reference: ClaimReference) -> None:
        self.claims.pop((reference.namespace, reference.name), None)

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        self.reads += 1
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        try:
            return self.claims[namespace, name]
        except KeyError:
            raise ApiError(f"claim {namespace}/{name} not found", status=404, reason="NotFound") from None


class Reports:
    """A collector of the reports that would become Events."""

    def __init__(self) -> None:
        self.failures: list[tuple[ClaimReference, str, AcceleratorError]] = []

    def failed(self, claim: ClaimReference, verb: str, error: AcceleratorError) -> None:
        self.failures.append((claim, verb, error))


class Node:
    """A node's driver without sockets: store, CDI directory, GPUs, and the service, all in one directory."""

    def __init__(
        self,
        directory: Path,
        claims: Claims,
        *,
        rules: Sequence[Mapping[str, Any]] = ALL_DYNAMIC,
        reached: Any = lambda stage: None,
        boot_id: str = "boot-1",
        count: int = 2,
        hardware: Any = None,
    ) -> None:
        self.folder = directory
        self.gpus = ModelGpus(directory / "gpus.json", count=count)
        self.companion_services = ModelCompanionServices(self.gpus)
        self.system = bus(directory, self.gpus)
        self.backend: Any = hardware or ModelBackend(self.gpus, self.system)
        self.claims = claims
        self.rules: tuple[Rule, ...] = parse_rules([dict(rule) for rule in rules])
        self.boot_id = boot_id
        self.reached = reached

        def known(stage: str) -> None:
            assert stage in stages.STAGES, f"{stage} is not in stages.py"
            reached(stage)

        self.reports = Reports()
        self.store = Store.open(str(directory / "state" / "state.db"))
        self.executor = ThreadPoolExecutor(8)
        self.backend.add_detached(
            device for record in self.store.claims.values() for device in record.passthrough_devices
        )
        self.survey: Survey | None = None
        self.refusals = Refusals()
        self.scan_requests = 0
        self.ownership = Ownership(self.store, None if self.backend.partitions_outlive_boot else boot_id)
        folder_of_files = device_metadata.folder("/var/run/cdi", self.backend.cdi_kind)
        files = ContainerFiles(self.backend, DRIVER, self.system, folder_of_files, previous="/var/lib/metadata")
        context = ClaimContext(
            driver=DRIVER,
            hardware=HardwareExecutor(
                self.backend, DRIVER, self.system, "/var/run/cdi", files, known, self.companion_services
            ),
            store=self.store,
            source=claims,
            reporter=self.reports,
            metrics=Metrics(),
            executor=self.executor,
            boot_id=boot_id,
            inventory=lambda: self.inventory,
            ownership=self.ownership,
            devices=DeviceGuard(DeviceLocks(str(directory / "state"), "the driver")),
        )
        self.service = ClaimService(
            context,
            refresh=self.scan,
            request_scan=self.request_scan,
            refusals=self.refusals,
            repartition=Watch(str(directory / "state")),
        )

    def request_scan(self) -> None:
        """Count the scans that the service requests without waiting for them."""
        self.scan_requests += 1

    async def start(self) -> None:
        """Start as the daemon does when its hardware answers: scan, recover, serve."""
        await self.scan()
        assert self.survey is not None
        plan = plan_recovery(
            self.store.claims,
            self.cdi_files(),
            self.survey.devices,
            self.store.meta,
            dynamic=self.survey.dynamic,
            boot_id=self.boot_id,
            invalid=self.service.hardware.invalid_cdi_uids(),
        )
        marks = {
            **obsolete_partitioning_entries(self.survey.devices, self.store.meta),
            **obsolete_fabric_cleanup_entries(self.store.meta, self.boot_id),
            **obsolete_setting_entries(self.store.meta, self.boot_id),
        }
        if marks:
            await self.store.commit(Change(meta=marks))
        self.service.suspect.update(plan.restore)
        for uid in plan.undo:
            await self.service.forget(uid)
        for uid in plan.stale_files:
            self.service.hardware.remove_cdi(uid)
        for uid in await self.service.housekeeping.orphaned_companions():
            await self.service.housekeeping.stop_orphaned_companions(uid)
        for change in plan.mode_changes:
            await self.service.housekeeping.disable_partitioning(change.device_uuid)
        for uid in plan.restore:
            await self.service.restore(uid)
        await self.scan()
        self.service.set_ready()

    async def scan(self) -> None:
        with self.ownership.observe() as observation:
            findings = self.backend.discover()
            owned = observation.owned()
        found = survey(self.backend, findings, self.rules, owned)
        offers = self.refusals.taint_offers(DRIVER, found.offers, found.devices)
        self.survey = replace(found, offers=offers)

    @property
    def inventory(self) -> Inventory:
        return self.survey.inventory(POOL) if self.survey else Inventory(pool="", offers={}, dynamic=frozenset())

    def cdi_files(self) -> tuple[str, ...]:
        return list_specs(self.system, "/var/run/cdi", self.backend.cdi_kind)

    def cdi(self, uid: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.system.read_text(self.service.hardware.cdi_path(uid)))
        return document

    def owing(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs with pending cleanup."""
        return self.service.unprepare_runner.pending_uuids

    def partitions(self) -> list[tuple[str, str]]:
        """Return the UUID of the GPU and of the partition, for each partition."""
        return [(device.uuid, each.uuid) for device in self.gpus.devices() for each in device.partitions]

    def close(self) -> None:
        self.store.close()
        self.backend.close()
        self.executor.shutdown(wait=True)


def copy_of(directory: Path, target: Path) -> Path:
    """Copy the current files: the state that a process leaves behind if it is killed now."""
    shutil.copytree(directory, target, symlinks=True, ignore=shutil.ignore_patterns("*.lock", "*.tmp"))
    return target
