# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A machine for tests: GPUs whose state lies in a file, a backend that works on them, and a node made of real parts.

The backend is the only part that is not the real one: what it offers comes from the core's own functions, the store is
SQLite, CDI files are files. State in a file outlives a process that is killed, as a GPU's does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import queue
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import board_model
from dra_driver.claims.execute import Hands
from dra_driver.claims.guard import DeviceGuard
from dra_driver.claims.ownership import Ownership
from dra_driver.claims.plan import Inventory
from dra_driver.claims.records import ClaimReference
from dra_driver.claims.recovery import plan_recovery, stale_marks
from dra_driver.claims.service import ClaimService
from dra_driver.claims.store import Change, Store
from dra_driver.core.cdi import ContainerEdits, DeviceNode, list_specs
from dra_driver.core.device_locks import DeviceLocks
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, DeviceFaulty, DoesNotFit, InUse, NotFound
from dra_driver.core.layout import Rule, parse_rules
from dra_driver.core.model import (
    AWAITED,
    CounterSet,
    Device,
    Fault,
    Finding,
    Health,
    Notice,
    Offer,
    Partition,
    Partitioning,
    Placement,
    Process,
)
from dra_driver.core.nvidia import offers
from dra_driver.core.nvidia.configs import CONFIG_KINDS
from dra_driver.core.system import System
from dra_driver.inventory import Survey, survey
from dra_driver.metrics import NoMetrics

DRIVER = "gpu.nvidia.com"
POOL = "node-1"
BOARD = "h100-80"
ALL_DYNAMIC = ({"match": {}, "mode": "dynamic"},)


class ModelGpus:
    """GPUs in a JSON file: for each UUID whether partitioning is on, the partitions, and who uses them."""

    def __init__(self, path: Path, board: str = BOARD, count: int = 2) -> None:
        self.path = path
        self.board = board
        self.count = count
        if not path.exists():
            self._save({self.template(index).uuid: self._fresh() for index in range(count)})

    @staticmethod
    def _fresh() -> dict[str, Any]:
        return {"enabled": False, "next": 1, "partitions": [], "pids": []}

    def template(self, index: int) -> Device:
        return board_model.device(self.board, index)

    @staticmethod
    def uuids(count: int) -> list[str]:
        return [board_model.device(BOARD, index).uuid for index in range(count)]

    def _save(self, state: Mapping[str, Any]) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(state))
        temporary.replace(self.path)

    @contextmanager
    def state(self) -> Iterator[dict[str, Any]]:
        with self.path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = json.loads(self.path.read_text())
            before = json.dumps(state)
            yield state
            if json.dumps(state) != before:
                self._save(state)

    def reboot(self) -> None:
        """What a Hopper board keeps over a reboot: nothing."""
        with self.state() as state:
            for entry in state.values():
                entry.update(self._fresh())

    def devices(self) -> tuple[Device, ...]:
        with self.state() as state:
            entries = dict(state)
        found = []
        for index in range(self.count):
            device = self.template(index)
            entry = entries.get(device.uuid)
            if entry is None:
                continue
            found.append(
                replace(
                    device,
                    partitioning=Partitioning(True, entry["enabled"], entry["enabled"]),
                    partitions=tuple(self._partition(device, each) for each in entry["partitions"]),
                    processes=tuple(Process(pid) for pid in entry["pids"]),
                )
            )
        return tuple(found)

    def _partition(self, device: Device, entry: Mapping[str, Any]) -> Partition:
        profile = device.profile(entry["profile_id"])
        assert profile is not None
        return board_model.partition(
            profile, entry["start"], device.uuid, entry["id"], processes=tuple(Process(pid) for pid in entry["pids"])
        )


class ModelBackend:
    """Implements the core's Backend on ModelGpus. ``failures`` holds errors to raise, by method name."""

    vendor = "nvidia"
    driver_name = DRIVER
    cdi_kind = "k8s.gpu.nvidia.com/claim"
    config_kinds = CONFIG_KINDS

    def __init__(self, gpus: ModelGpus) -> None:
        self.gpus = gpus
        self.failures: dict[str, list[AcceleratorError]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.present = True
        self.notices: queue.Queue[Notice] = queue.Queue()
        self.faults: dict[int, Fault] = {}  # by index, of GPUs that were known before
        self.strangers: tuple[Finding, ...] = ()  # GPUs that never answered
        self.gates: dict[int, threading.Event] = {}  # by index: what a GPU's first reading waits for
        self._lock = threading.Lock()

    def _call(self, name: str, *arguments: Any) -> None:
        with self._lock:
            self.calls.append((name, arguments))
            waiting = self.failures.get(name)
            if waiting:
                raise waiting.pop(0)

    def open(self) -> None:
        if not self.present:
            raise BackendUnavailable("The NVIDIA driver is not loaded", hint="Load it.")

    def close(self) -> None:
        pass

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        self._call("discover", full)
        if not self.present:
            raise BackendUnavailable("The NVIDIA driver is not loaded", hint="Load it.")
        found = []
        for device in self.gpus.devices():
            gate = self.gates.get(device.index)
            if gate is not None and patience is None:
                assert gate.wait(30)
            elif gate is not None and not gate.is_set():
                fault = Fault(AWAITED, "It is still being read")
                found.append(Finding(device.index, device.describe(), device.uuid, None, fault))
                continue
            fault = self.faults.get(device.index)
            known = replace(device, health=Health(False, (fault.cause,))) if fault else device
            found.append(Finding(device.index, device.describe(), device.uuid, known, fault))
        return (*found, *self.strangers)

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait for what a test puts into ``notices``; a driver that is not there cannot be waited for."""
        if not self.present:
            raise BackendUnavailable("The NVIDIA driver is not loaded", hint="Load it.")
        with contextlib.suppress(queue.Empty):
            return (self.notices.get(timeout=min(seconds, 0.2)),)
        return ()

    def device(self, uuid: str) -> Device:
        self._call("device", uuid)
        for device in self.gpus.devices():
            if device.uuid == uuid:
                fault = self.faults.get(device.index)
                if fault:
                    raise DeviceFaulty(fault.message, code=fault.cause)
                return device
        raise NotFound(f"There is no GPU {uuid}")

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        self._call("set_partitioning", uuid, enabled)
        with self.gpus.state() as state:
            entry = state[uuid]
            if entry["pids"]:
                raise InUse(f"Processes use {uuid}", pids=entry["pids"])
            if not enabled and entry["partitions"]:
                raise InUse(f"{uuid} has partitions")
            entry["enabled"] = enabled

    def reset(self, uuids: Sequence[str]) -> None:
        raise AssertionError("no test resets a device")

    def create_partition(self, uuid: str, profile_id: int, placement: Placement) -> Partition:
        self._call("create_partition", uuid, profile_id, placement)
        device = self.device(uuid)
        if not device.partitioning.enabled:
            raise InUse(f"Partitioning is off on {uuid}")
        for existing in device.partitions:
            if existing.placement.overlaps(placement):
                raise DoesNotFit(f"{existing.describe()} is in the way", blockers=[existing])
        with self.gpus.state() as state:
            entry = state[uuid]
            number = entry["next"]
            entry["next"] = number + 1
            entry["partitions"].append({"profile_id": profile_id, "start": placement.start, "id": number, "pids": []})
        made = next(each for each in self.device(uuid).partitions if each.instance_id == number)
        assert made.placement == placement
        return made

    def destroy_partition(self, uuid: str, instance_id: int) -> None:
        self._call("destroy_partition", uuid, instance_id)
        with self.gpus.state() as state:
            entry = state[uuid]
            found = [each for each in entry["partitions"] if each["id"] == instance_id]
            if not found:
                raise NotFound(f"{uuid} has no partition {instance_id}")
            if found[0]["pids"]:
                raise InUse(f"Partition {instance_id} of {uuid} is in use", pids=found[0]["pids"])
            entry["partitions"].remove(found[0])

    def offers(self, device: Device, dynamic: bool, owned: Collection[tuple[int, int, int]] = ()) -> tuple[Offer, ...]:
        return offers.offers(device, dynamic, owned)

    def counter_set(self, device: Device, owned: Collection[tuple[int, int, int]] | None = None) -> CounterSet:
        return offers.counter_set(device, owned)

    def driver_edits(self) -> ContainerEdits:
        self._call("driver_edits")
        return ContainerEdits(env=("NVIDIA_VISIBLE_DEVICES=void",))

    def device_edits(self, device: Device, partition: Partition | None) -> ContainerEdits:
        nodes = [DeviceNode(f"/dev/nvidia{device.minor}")]
        if partition is not None:
            nodes.append(DeviceNode(f"/dev/nvidia-caps/gi{partition.instance_id}"))
        return ContainerEdits(device_nodes=tuple(nodes))


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
            raise AcceleratorError(f"claim {namespace}/{name} not found", code="api-error") from None


class Reports:
    """Collects what would become Events."""

    def __init__(self) -> None:
        self.failures: list[tuple[ClaimReference, str, AcceleratorError]] = []

    def failed(self, claim: ClaimReference, verb: str, error: AcceleratorError) -> None:
        self.failures.append((claim, verb, error))


class Node:
    """A node's driver without its sockets: store, CDI folder, GPUs and the service over them, in one folder."""

    def __init__(
        self,
        folder: Path,
        claims: Claims,
        *,
        rules: Sequence[Mapping[str, Any]] = ALL_DYNAMIC,
        reached: Any = lambda stage: None,
        boot_id: str = "boot-1",
        count: int = 2,
        hardware: Any = None,
    ) -> None:
        self.folder = folder
        self.gpus = ModelGpus(folder / "gpus.json", count=count)
        self.backend: Any = hardware or ModelBackend(self.gpus)
        self.system = System(str(folder / "root"))
        (folder / "root").mkdir(exist_ok=True)
        self.claims = claims
        self.rules: tuple[Rule, ...] = parse_rules([dict(rule) for rule in rules])
        self.boot_id = boot_id
        self.reached = reached
        self.reports = Reports()
        self.store = Store.open(str(folder / "state" / "state.db"))
        self.executor = ThreadPoolExecutor(8)
        self.survey: Survey | None = None
        self.ownership = Ownership(self.store, boot_id)
        self.service = ClaimService(
            driver=DRIVER,
            hands=Hands(self.backend, self.system, "/var/run/cdi", reached),
            store=self.store,
            source=claims,
            reporter=self.reports,
            metrics=NoMetrics(),
            executor=self.executor,
            boot_id=boot_id,
            inventory=lambda: self.inventory,
            ownership=self.ownership,
            devices=DeviceGuard(DeviceLocks(str(folder / "state"), "the driver")),
            refresh=self.look,
        )

    async def start(self) -> None:
        """What the daemon does when its hardware answers: look, recover, serve."""
        await self.look()
        assert self.survey is not None
        plan = plan_recovery(
            self.store.claims,
            self.cdi_files(),
            self.survey.devices,
            self.store.meta,
            dynamic=self.survey.dynamic,
            boot_id=self.boot_id,
        )
        marks = stale_marks(self.survey.devices, self.store.meta)
        if marks:
            await self.store.commit(Change(meta=marks))
        self.service.suspect.update(plan.restore)
        for uid in plan.undo:
            await self.service.forget(uid)
        for uid in plan.stale_files:
            self.service.hands.remove_cdi(uid)
        for change in plan.mode_changes:
            await self.service.switch_off(change.device_uuid)
        for uid in plan.restore:
            await self.service.restore(uid)
        await self.look()
        self.service.set_ready()

    async def look(self) -> None:
        with self.ownership.observe() as observation:
            findings = self.backend.discover()
            owned = observation.owned()
        self.survey = survey(self.backend, findings, self.rules, owned)

    @property
    def inventory(self) -> Inventory:
        return self.survey.inventory(POOL) if self.survey else Inventory(pool="", offers={}, dynamic=frozenset())

    def cdi_files(self) -> tuple[str, ...]:
        return list_specs(self.system, "/var/run/cdi", self.backend.cdi_kind)

    def cdi(self, uid: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.system.read_text(self.service.hands.cdi_path(uid)))
        return document

    def partitions(self) -> list[tuple[str, str]]:
        """UUID of the GPU and of the partition, for every partition that exists."""
        return [(device.uuid, each.uuid) for device in self.gpus.devices() for each in device.partitions]

    def close(self) -> None:
        self.store.close()
        self.executor.shutdown(wait=True)


def copy_of(folder: Path, target: Path) -> Path:
    """The disk as it is at this moment: what a process that is killed now leaves behind."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.lock", "*.tmp"))
    return target
