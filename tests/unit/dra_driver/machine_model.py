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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import board_model
from dra_driver.api.client import ApiError
from dra_driver.claims.execute import Hands
from dra_driver.claims.guard import DeviceGuard
from dra_driver.claims.ownership import Ownership
from dra_driver.claims.plan import Inventory
from dra_driver.claims.records import ClaimReference
from dra_driver.claims.recovery import plan_recovery, stale_marks
from dra_driver.claims.refusals import Refusals
from dra_driver.claims.service import ClaimService
from dra_driver.claims.settings import void_settings
from dra_driver.claims.store import Change, Store
from dra_driver.core.cdi import ContainerEdits, DeviceNode, list_specs
from dra_driver.core.companions import Companion, SharedDevice
from dra_driver.core.composed import Grouping
from dra_driver.core.device_locks import DeviceLocks
from dra_driver.core.documents import Choice, Several, Truth, Whole
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, DeviceFaulty, DoesNotFit, InUse, NotFound
from dra_driver.core.lanes import Call, Lanes
from dra_driver.core.layout import Rule, parse_rules
from dra_driver.core.model import (
    AWAITED,
    Arranged,
    AttributeValue,
    CounterSet,
    Device,
    Fault,
    Finding,
    Health,
    Notice,
    Offer,
    Partition,
    Partitioning,
    Passthrough,
    Placement,
    Process,
    Surroundings,
)
from dra_driver.core.nvidia import edits, mps, offers, vendor
from dra_driver.core.nvidia.configs import CONFIG_KINDS, DEVICE_CLASSES, DEVICE_TYPES, INTERVALS
from dra_driver.core.repartition_record import Watch
from dra_driver.core.settings import COMPUTE_MODES, Knob, clocks
from dra_driver.core.signs import Severity, Sign
from dra_driver.core.telemetry import Telemetry
from dra_driver.inventory import Survey, survey
from dra_driver.metrics import NoMetrics
from keeper_model import ModelKeeper
from pci_model import PciSystem

DRIVER = "gpu.nvidia.com"
POOL = "node-1"
BOARD = "h100-80"
#: What is set on a GPU that nobody has set anything on. Clocks and time slice can be set, and not read.
DEFAULT_KNOBS: Mapping[str, Any] = {
    "powerLimit": 700.0,
    "computeMode": "Default",
    "graphicsClocks": None,
    "timeSlice": "Default",
    "persistence": True,
    "workloadProfiles": [],
}
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
        return {"enabled": False, "next": 1, "partitions": [], "pids": [], "knobs": dict(DEFAULT_KNOBS)}

    def template(self, index: int) -> Device:
        return replace(board_model.device(self.board, index), passthrough=Passthrough(index, 1 << 37, False))

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
        """What a Hopper board keeps over a reboot: nothing. Programs end."""
        self.path.with_name("companions.json").unlink(missing_ok=True)
        with self.state() as state:
            for entry in state.values():
                entry.update(self._fresh())

    def devices(self) -> tuple[Device, ...]:
        with self.state() as state:
            return self.devices_in(state)

    def devices_in(self, state: Mapping[str, Any]) -> tuple[Device, ...]:
        found = []
        for index in range(self.count):
            device = self.template(index)
            entry = state.get(device.uuid)
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


Answer = TypeVar("Answer")


class ModelBackend:
    """Implements the core's Backend on ModelGpus. ``failures`` holds errors to raise, by method name."""

    facts = vendor.FACTS
    vendor = "nvidia"
    driver_name = DRIVER
    partitions_outlive_boot = False
    has_companions = True
    grouping: Grouping | None = None
    arranged: Arranged | None = None
    cdi_kind = "k8s.gpu.nvidia.com/claim"
    config_kinds = CONFIG_KINDS
    device_classes = DEVICE_CLASSES
    device_types = DEVICE_TYPES

    def __init__(self, gpus: ModelGpus, system: PciSystem | None = None) -> None:
        self.gpus = gpus
        self.system = system
        self.away: dict[str, Device] = {}
        self.failures: dict[str, list[AcceleratorError]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.present = True
        self.notices: queue.Queue[Notice] = queue.Queue()
        self.faults: dict[int, Fault] = {}  # by index, of GPUs that were known before
        self.conditions: dict[int, Health] = {}  # by index, of GPUs that answer
        self.strangers: tuple[Finding, ...] = ()  # GPUs that never answered
        self.gates: dict[int, threading.Event] = {}  # by index: what a GPU's first reading waits for
        self._lock = threading.Lock()
        self._lanes = Lanes("model")

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
        self._lanes.close()

    def discover(self, full: bool = False, patience: float | None = None) -> tuple[Finding, ...]:
        self._call("discover", full)
        if not self.present:
            raise BackendUnavailable("The NVIDIA driver is not loaded", hint="Load it.")
        found = []
        for device in self._there():
            gate = self.gates.get(device.index)
            if gate is not None and patience is None:
                assert gate.wait(30)
            elif gate is not None and not gate.is_set():
                fault = Fault(AWAITED, "It is still being read")
                found.append(Finding(device.index, device.describe(), device.uuid, None, fault))
                continue
            fault = self.faults.get(device.index)
            known = (
                replace(device, health=Health((Sign(fault.cause, Severity.DEGRADED, fault.message),)))
                if fault
                else replace(device, health=self.conditions.get(device.index, Health()))
            )
            found.append(Finding(device.index, device.describe(), device.uuid, known, fault))
        return (*found, *self.strangers)

    def wait_for_change(self, seconds: float) -> tuple[Notice, ...]:
        """Wait for what a test puts into ``notices``; a driver that is not there cannot be waited for."""
        if not self.present:
            raise BackendUnavailable("The NVIDIA driver is not loaded", hint="Load it.")
        with contextlib.suppress(queue.Empty):
            return (self.notices.get(timeout=min(seconds, 0.2)),)
        return ()

    def is_there(self) -> bool:
        """A model shows its GPUs while its driver is there."""
        return self.present

    def surroundings(self) -> Surroundings:
        """What a model shows: whether its driver is there, and its GPUs."""
        gpus = self.gpus.devices() if self.present else ()
        return Surroundings((self.present,), frozenset(gpu.pci_address for gpu in gpus))

    def renew(self) -> None:
        self._call("renew")
        self.open()

    def ask(self, uuid: str) -> Call[Device]:
        return self._lanes.submit(uuid, lambda: self.device(uuid), 60.0)

    def together(self, uuid: str, function: Callable[[], Answer]) -> Answer:
        return self._lanes.run(uuid, function, 60.0)

    def on_lane(self, uuid: str, function: Callable[[], Answer], deadline: float) -> Answer:
        """Make a call that may hang."""
        return self._lanes.run(uuid, function, deadline)

    def rests(self) -> bool:
        """Wait until nothing is under way, and return whether it is so."""
        return self._lanes.rest(30.0)

    def _there(self) -> tuple[Device, ...]:
        """Those that their own driver has, and those that are known to be away."""
        found = []
        for device in self.gpus.devices():
            if self.system is None or self.system.driver(device.pci_address) == "nvidia":
                self.away.pop(device.uuid, None)
                found.append(device)
            elif device.uuid in self.away:
                found.append(self.away[device.uuid])
        return tuple(found)

    def detach(self, uuid: str, action: Callable[[], None]) -> None:
        device = self.device(uuid)
        self._call("detach", uuid)
        action()
        self.away[uuid] = device

    def attach(self, uuid: str, action: Callable[[], None]) -> None:
        self._call("attach", uuid)
        action()
        self.device(uuid)

    def remember(self, devices: Iterable[Device]) -> None:
        self.away.update({device.uuid: device for device in devices})

    def resource_name(self, device: Device, profile: str | None) -> str:
        return vendor.resource_name(device, profile)

    def device_nodes(self, device: Device) -> tuple[str, ...]:
        return (f"/dev/nvidia{device.minor}",)

    def machine_edits(self) -> ContainerEdits:
        return edits.NOTHING

    def device(self, uuid: str) -> Device:
        self._call("device", uuid)
        for device in self._there():
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
        self._call("reset", tuple(uuids))
        for device in self.gpus.devices():
            if device.uuid in uuids:
                assert not device.partitions and not device.processes, "a device in use was reset"
                self.conditions.pop(device.index, None)

    def choose_id(self, device: Device, placement: Placement, taken: Collection[int] = ()) -> int | None:
        return None

    def create_partition(
        self, uuid: str, profile_id: int, placement: Placement, instance_id: int | None = None
    ) -> Partition:
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

    def knobs(self, uuid: str, names: Collection[str]) -> Mapping[str, Knob]:
        self._call("knobs", uuid, tuple(names))
        self.device(uuid)
        with self.gpus.state() as state:
            now = dict(state[uuid]["knobs"])
        knobs = {
            "powerLimit": Knob(now["powerLimit"], Whole(200, 700, "W")),
            "computeMode": Knob(now["computeMode"], Choice(COMPUTE_MODES)),
            "graphicsClocks": Knob(None, clocks(345, 1980, defaults={"minimum": 345})),
            "timeSlice": Knob(None, Choice(INTERVALS)),
            "workloadProfiles": Knob(now["workloadProfiles"], Several(Choice(("max-p", "max-q", "compute")), most=3)),
            "persistence": Knob(None if uuid in self.away else now["persistence"], Truth()),
        }
        return {name: knobs[name] for name in names if name in knobs}

    def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
        self._call("set_knobs", uuid, dict(values))
        self.device(uuid)
        if uuid in self.away:
            assert set(values) == {"persistence"}
            return
        with self.gpus.state() as state:
            for name, value in values.items():
                state[uuid]["knobs"][name] = DEFAULT_KNOBS[name] if value is None else value

    def telemetry(self, seconds: float, partitions: Collection[str] = ()) -> tuple[Telemetry, ...]:
        self._call("telemetry", seconds, frozenset(partitions))
        if not self.present:
            raise BackendUnavailable("The NVIDIA driver is not loaded", hint="Load it.")
        return tuple(
            Telemetry(each.uuid, each.uuid, power=70.5, memory_used=1024, memory_total=each.memory_bytes)
            for each in self.gpus.devices()
            if each.index not in self.faults
        )

    def companions(self, claim_uid: str, devices: Sequence[SharedDevice]) -> tuple[Companion, ...]:
        return mps.companions(claim_uid, devices)

    def refuse_without_companions(self) -> None:
        self._call("refuse_without_companions")

    def check_companion(self, companion: Companion) -> None:
        self._call("check_companion", companion.name)

    def companion_edits(self, companion: Companion) -> ContainerEdits:
        return mps.edits(companion)

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[tuple[int, int, int]] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        return offers.offers(device, dynamic, owned, passthrough)

    def parts(self, device: Device) -> Mapping[str, int]:
        return offers.parts(device)

    def counter_set(self, device: Device, owned: Collection[tuple[int, int, int]] | None = None) -> CounterSet:
        return offers.counter_set(device, owned)

    def driver_edits(self) -> ContainerEdits:
        self._call("driver_edits")
        return ContainerEdits(env=("NVIDIA_VISIBLE_DEVICES=void",))

    def device_attributes(
        self, device: Device, partition: Partition | None, is_for_machine: bool = False
    ) -> Mapping[str, AttributeValue]:
        return offers.attributes_for_machine(device) if is_for_machine else offers.attributes_of(device, partition)

    def share_edits(self, device: Device, consumed: Mapping[str, int]) -> ContainerEdits:
        return ContainerEdits()

    def device_edits(self, device: Device, partition: Partition | None, monitoring: bool = False) -> ContainerEdits:
        nodes = [DeviceNode(f"/dev/nvidia{device.minor}")]
        if monitoring:
            nodes.append(DeviceNode("/dev/nvidia-caps/monitor"))
        if partition is not None:
            nodes.append(DeviceNode(f"/dev/nvidia-caps/gi{partition.instance_id}"))
        return ContainerEdits(device_nodes=tuple(nodes))


def bus(folder: Path, gpus: ModelGpus) -> PciSystem:
    """The machine's bus with its GPUs, each in an IOMMU group of its own."""
    (folder / "root").mkdir(exist_ok=True)
    system = PciSystem(str(folder / "root"))
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
            raise ApiError(f"claim {namespace}/{name} not found", status=404) from None


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
        self.keeper = ModelKeeper(self.gpus)
        self.system = bus(folder, self.gpus)
        self.backend: Any = hardware or ModelBackend(self.gpus, self.system)
        self.claims = claims
        self.rules: tuple[Rule, ...] = parse_rules([dict(rule) for rule in rules])
        self.boot_id = boot_id
        self.reached = reached
        self.reports = Reports()
        self.store = Store.open(str(folder / "state" / "state.db"))
        self.executor = ThreadPoolExecutor(8)
        self.backend.remember(device for record in self.store.claims.values() for device in record.away)
        self.survey: Survey | None = None
        self.refusals = Refusals()
        self.looks_asked = 0
        self.ownership = Ownership(self.store, None if self.backend.partitions_outlive_boot else boot_id)
        self.service = ClaimService(
            driver=DRIVER,
            hands=Hands(self.backend, DRIVER, self.system, "/var/run/cdi", "/var/lib/metadata", reached, self.keeper),
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
            look_soon=self.look_soon,
            refusals=self.refusals,
            repartition=Watch(str(folder / "state")),
        )

    def look_soon(self) -> None:
        """Count how often the service asks for a look that nobody waits for."""
        self.looks_asked += 1

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
        marks = {
            **stale_marks(self.survey.devices, self.store.meta),
            **void_settings(self.store.meta, self.boot_id),
        }
        if marks:
            await self.store.commit(Change(meta=marks))
        self.service.suspect.update(plan.restore)
        for uid in plan.undo:
            await self.service.forget(uid)
        for uid in plan.stale_files:
            self.service.hands.remove_cdi(uid)
        for uid in await self.service.orphans():
            await self.service.end_companions(uid)
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
        found = survey(self.backend, findings, self.rules, owned)
        offers = self.refusals.tainted(DRIVER, found.offers, found.devices)
        self.survey = replace(found, offers=offers)

    @property
    def inventory(self) -> Inventory:
        return self.survey.inventory(POOL) if self.survey else Inventory(pool="", offers={}, dynamic=frozenset())

    def cdi_files(self) -> tuple[str, ...]:
        return list_specs(self.system, "/var/run/cdi", self.backend.cdi_kind)

    def cdi(self, uid: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.system.read_text(self.service.hands.cdi_path(uid)))
        return document

    def owing(self) -> frozenset[str]:
        """The UUIDs of the GPUs on which something is still to be undone."""
        return self.service.undoing.owing

    def partitions(self) -> list[tuple[str, str]]:
        """UUID of the GPU and of the partition, for every partition that exists."""
        return [(device.uuid, each.uuid) for device in self.gpus.devices() for each in device.partitions]

    def close(self) -> None:
        self.store.close()
        self.backend.close()
        self.executor.shutdown(wait=True)


def copy_of(folder: Path, target: Path) -> Path:
    """The disk as it is at this moment: what a process that is killed now leaves behind."""
    shutil.copytree(folder, target, symlinks=True, ignore=shutil.ignore_patterns("*.lock", "*.tmp"))
    return target
