# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""GPUs for tests with their state in a file, and a backend for them.

The core's own functions create its offers. State in a file survives a killed process, as on a real GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import board_model
from dra_driver.core.discovery.device_workers import Call, Lanes
from dra_driver.core.dra.composite_devices import Grouping
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, DeviceFaulty, DoesNotFit, InUse, NotFound
from dra_driver.core.health.conditions import Severity, Sign
from dra_driver.core.host.cdi import ContainerEdits, DeviceNode
from dra_driver.core.host.companions import Companion, SharedDevice
from dra_driver.core.model import (
    FIRST_READ_PENDING,
    AttributeValue,
    CounterSet,
    Device,
    Fault,
    Finding,
    Health,
    Notice,
    Offer,
    OfferArranger,
    Partition,
    Partitioning,
    Passthrough,
    Placement,
    Process,
    Surroundings,
)
from dra_driver.core.schema import Boolean, Choice, Integer, UniqueStrings
from dra_driver.core.settings.knobs import COMPUTE_MODES, Knob, clocks
from dra_driver.core.telemetry import Telemetry
from dra_driver.core.vendors.nvidia import mps, offers, vendor
from dra_driver.core.vendors.nvidia.configs import CONFIG_KINDS, DEVICE_CLASSES, DEVICE_TYPES, INTERVALS
from dra_driver.core.vendors.nvidia.container import container_edits
from dra_driver.core.vendors.nvidia.fabric.fabric_manager import NoFabricPartition
from pci_model import PciSystem

DRIVER = "gpu.nvidia.com"
BOARD = "h100-80"
#: The settings of an untouched GPU. Clocks and time slice can be set, but not read.
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
    """GPUs in a JSON file: for each UUID whether partitioning is enabled, the partitions, and the processes."""

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
        """Reboot: a Hopper board keeps no state, and processes end."""
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


class ModelFabric:
    """The fabric of a model: it uses ``fabric`` and ``active`` of its backend, which counts the calls and has the failures."""

    def __init__(self, backend: ModelBackend) -> None:
        self._backend = backend

    @property
    def is_used(self) -> bool:
        return bool(self._backend.fabric)

    @property
    def active(self) -> frozenset[int] | None:
        return frozenset(self._backend.active) if self.is_used and self._backend.fabric_answers else None

    def set_claimed(self, claimed: Callable[[], Collection[int]]) -> None:
        self._backend.claimed_fabric_partitions = claimed

    def find(self, devices: Sequence[Device]) -> tuple[int, bool]:
        self._backend._call("fabric_partition", tuple(device.index for device in devices))
        wanted = {device.index for device in devices}
        for number, members in self._backend.fabric.items():
            if set(members) == wanted:
                return number, number in self._backend.active
        raise NoFabricPartition(f"No partition of the fabric has exactly {wanted}; there are {self._backend.fabric}")

    def activate(self, number: int) -> None:
        fabric, active = self._backend.fabric, self._backend.active
        self._backend._call("activate_fabric_partition", number)
        for other in active - {number}:
            if set(fabric[other]) & set(fabric[number]):
                raise InUse(f"Partition {other} has GPUs of partition {number}")
        active.add(number)

    def deactivate(self, number: int) -> None:
        self._backend._call("deactivate_fabric_partition", number)
        self._backend.active.discard(number)


class ModelBackend:
    """The core's Backend on ModelGpus. ``failures`` has errors to raise, by method name."""

    facts = vendor.FACTS
    vendor = "nvidia"
    driver_name = DRIVER
    partitions_outlive_boot = False
    has_companions = True
    grouping: Grouping | None = None
    arranged: OfferArranger | None = None
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
        self.gates: dict[int, threading.Event] = {}  # by index: the event that a GPU's first reading waits for
        # Partitions of the fabric by number, with the indices of GPUs (empty without a fabric), and the active ones.
        self.fabric: dict[int, tuple[int, ...]] = {}
        self.active: set[int] = set()
        self.fabric_answers = True
        self.claimed_fabric_partitions: Callable[[], Collection[int]] = frozenset
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
                fault = Fault(FIRST_READ_PENDING, "It is still being read")
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
        """Wait for a notice of the test. Raise BackendUnavailable without a driver."""
        if not self.present:
            raise BackendUnavailable("The NVIDIA driver is not loaded", hint="Load it.")
        with contextlib.suppress(queue.Empty):
            return (self.notices.get(timeout=min(seconds, 0.2)),)
        return ()

    def has_devices(self) -> bool:
        """Return whether the driver is loaded."""
        return self.present

    def surroundings(self) -> Surroundings:
        """Return the surroundings of the model: whether its driver is loaded, and its GPUs."""
        gpus = self.gpus.devices() if self.present else ()
        return Surroundings((self.present,), frozenset(gpu.pci_address for gpu in gpus))

    def reopen(self) -> None:
        self._call("renew")
        self.open()

    def ask(self, uuid: str) -> Call[Device]:
        return self._lanes.submit(uuid, lambda: self.device(uuid), 60.0)

    def run_on_device(self, uuid: str, function: Callable[[], Answer]) -> Answer:
        return self._lanes.run(uuid, function, 60.0)

    def start_on_device(self, uuid: str, function: Callable[[], Answer]) -> Call[Answer]:
        return self._lanes.submit(uuid, function, 60.0)

    def leave(self, uuid: str) -> None:
        self._lanes.leave(uuid)

    def on_lane(self, uuid: str, function: Callable[[], Answer], deadline: float) -> Answer:
        """Run a call that can hang."""
        return self._lanes.run(uuid, function, deadline)

    def rests(self) -> bool:
        """Wait until no call is running, including hung calls, and return whether this succeeded."""
        deadline = time.monotonic() + 30.0
        while self._lanes.hung() and time.monotonic() < deadline:
            time.sleep(0.001)  # a released call may still be returning
        return not self._lanes.hung() and self._lanes.rest(30.0)

    def _there(self) -> tuple[Device, ...]:
        """Return the devices that are bound to their own driver, and the known absent ones."""
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
        self.away.pop(uuid, None)
        if self.present:
            self.device(uuid)

    def use_number_file(self, directory: str, *, writes: bool = False, is_referred: bool = True) -> None:
        self._call("number_by", directory, writes, is_referred)

    def add_detached(self, devices: Iterable[Device]) -> None:
        self.away.update({device.uuid: device for device in devices})

    @property
    def fabric_partitions(self) -> ModelFabric:
        return ModelFabric(self)

    def resource_name(self, device: Device, profile: str | None) -> str:
        return vendor.resource_name(device, profile)

    def device_nodes(self, device: Device) -> tuple[str, ...]:
        return (f"/dev/nvidia{device.minor}",)

    def describe_unrestored(self) -> str:
        return ""

    def machine_edits(self) -> ContainerEdits:
        return container_edits.NOTHING

    def device(self, uuid: str) -> Device:
        self._call("device", uuid)
        if not self.present and uuid not in self.away:
            raise BackendUnavailable("The NVIDIA driver is not loaded", hint="Load it.")
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
                raise DoesNotFit(f"{existing.describe()} blocks the placement", blockers=[existing])
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
            "powerLimit": Knob(now["powerLimit"], Integer(200, 700, "W")),
            "computeMode": Knob(now["computeMode"], Choice(COMPUTE_MODES)),
            "graphicsClocks": Knob(None, clocks(345, 1980, defaults={"minimum": 345})),
            "timeSlice": Knob(None, Choice(INTERVALS)),
            "workloadProfiles": Knob(
                now["workloadProfiles"], UniqueStrings(Choice(("max-p", "max-q", "compute")), most=3)
            ),
            "persistence": Knob(None if uuid in self.away else now["persistence"], Boolean()),
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

    def companion_edits(self, companion: Companion) -> ContainerEdits:
        return mps.edits(companion)

    def offers(
        self, device: Device, dynamic: bool, owned: Collection[tuple[int, int, int]] = (), passthrough: bool = False
    ) -> tuple[Offer, ...]:
        return offers.offers(device, dynamic, owned, passthrough)

    def parts(self, device: Device) -> Mapping[str, int]:
        return offers.shareable_capacities(device)

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
