# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Wherever the driver is killed, after its next start each claim is prepared or completely removed.

Hypothesis runs random operations on a node, kills it at a random stage (disk and GPUs keep their state of that moment)
or reboots it, starts it again, and compares all state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from backend_model import ALL_DYNAMIC, DEFAULT_KNOBS, DRIVER, ModelGpus
from dra_driver.claims.configs import SETTING_KEY
from dra_driver.claims.plan import PARTITIONING_KEY
from dra_driver.claims.store.records import ClaimReference
from dra_driver.core.vendors.nvidia import mps
from dra_driver.stages import PREPARE, UNPREPARE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_model import Claims, Node, bus, copy_of

from tests.cluster.stop_at import StopPoint

DEVICES = (
    "gpu-0",
    "gpu-1",
    "gpu-0-mig-1g10gb-19-0",
    "gpu-0-mig-1g10gb-19-6",
    "gpu-0-mig-3g40gb-9-4",
    "gpu-1-mig-7g80gb-0-0",
    "gpu-1-mig-2g20gb-14-2",
    "gpu-1-mig-1g10gb-19-2",
    "gpu-vfio-0",
    "gpu-vfio-1",
)
RULES = ({"match": {}, "mode": "dynamic", "passthrough": True},)
CLAIMS = ("a", "b", "c")
#: Settings for whole devices. Partitions ignore them.
SETTINGS = {
    "opaque": {
        "driver": DRIVER,
        "parameters": {
            "apiVersion": "dra.accelerators/v1alpha1",
            "kind": "DeviceSettings",
            "powerLimit": 300,
            "graphicsClocks": {"maximum": 900},
        },
    }
}
OF_SETTINGS = {"settings-applied", "settings-restored"}
OF_PASSTHROUGH = {"handed-over", "taken-back"}
OF_COMPANIONS = {"companion-started", "companions-stopped"}
#: Stages of claims whose devices are a partition of the fabric: the driver is killed at them in fabric_claims_test.py.
OF_FABRIC = {"fabric-activated", "fabric-deactivated"}


def shared(kind: str) -> dict[str, Any]:
    """Return a configuration with which containers of a claim share its devices of one kind through MPS."""
    sharing = {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "sharing": sharing}
    return {"opaque": {"driver": DRIVER, "parameters": parameters}}


#: The configuration of each claim, by its name.
CONFIGURED = {"a": [SETTINGS], "b": [SETTINGS, shared("GpuConfig"), shared("MigDeviceConfig")], "c": []}


def fitting(name: str, devices: Sequence[str]) -> list[dict[str, Any]]:
    """Return the configurations for a claim with these devices. A configuration that fits none of them would be refused."""
    kinds = {"partition" if "-mig-" in each else "machine" if "-vfio-" in each else "whole" for each in devices}
    return [
        each
        for each in CONFIGURED[name]
        if ("partition" if each["opaque"]["parameters"]["kind"] == "MigDeviceConfig" else "whole") in kinds
    ]


operations = st.one_of(
    st.tuples(st.just("prepare"), st.sampled_from(CLAIMS), st.lists(st.sampled_from(DEVICES), min_size=1, max_size=2)),
    st.tuples(st.just("unprepare"), st.sampled_from(CLAIMS), st.just(None)),
)
endings = st.tuples(st.sampled_from((*PREPARE, *UNPREPARE)), st.integers(1, 3), st.booleans())


class Killed(BaseException):
    """Simulated end of the process."""


class World:
    """A node over several starts, and the claims of its cluster."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory
        self.claims = Claims()
        self.life = 0
        self.boot = 1
        self.references: dict[str, ClaimReference] = {}
        self.disk = directory / "life-0"
        self.disk.mkdir()

    def live(self, steps: list[Any], ending: tuple[str, int, bool] | None) -> None:
        self.life += 1
        frozen: list[Path] = []

        def stop() -> None:
            if not frozen:
                frozen.append(copy_of(self.disk, self.folder / f"life-{self.life}"))
            raise Killed

        point = StopPoint(f"{ending[0]}:{ending[1]}", stop) if ending else StopPoint()

        def reached(stage: str) -> None:
            if frozen:
                raise Killed  # further actions of this process do not affect the next start
            if stage == "recording-prepared":
                await_written(nodes[0])
            point.reached(stage)

        nodes: list[Node] = []

        async def main() -> None:
            node = Node(self.disk, self.claims, rules=RULES, reached=reached, boot_id=f"boot-{self.boot}")
            nodes.append(node)
            try:
                await node.start()
                check(node)
                for verb, name, devices in steps:
                    if verb == "prepare":
                        # A claim keeps its allocation while it is prepared, as in a cluster.
                        if name not in self.references:
                            self.references[name] = self.claims.allocate(name, *devices, config=fitting(name, devices))
                        await node.service.prepare([self.references[name]])
                    elif name in self.references:
                        outcome = await node.service.unprepare([self.references[name]])
                        if not next(iter(outcome.values())).error:
                            self.claims.remove(self.references.pop(name))
                check(node)
            finally:
                node.close()

        with contextlib.suppress(Killed):
            asyncio.run(main())
        if frozen:
            self.disk = frozen[0]
        if ending and ending[2]:
            self.reboot()

    def reboot(self) -> None:
        self.boot += 1
        state = self.disk / "gpus.json"
        gpus = ModelGpus(state)
        gpus.reboot()
        bus(self.disk, gpus).boot(gpus.template(index).pci_address for index in range(gpus.count))
        shutil.rmtree(self.disk / "root/var/run/cdi", ignore_errors=True)


def await_written(node: Node) -> None:
    """Wait until the store's thread has written its changes: then the record exists, but no file."""
    deadline = time.monotonic() + 30
    while not node.store._queue.empty() or node.store._writing.locked():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def check(node: Node) -> None:
    """Assert that store, CDI directory, partitions, and modes agree."""
    records = node.store.claims
    assert all(record.prepared for record in records.values())
    assert set(node.cdi_files()) == {record.uid for record in records.values() if record.devices}
    wanted = {}
    for record in records.values():
        names = {entry["name"] for entry in node.cdi(record.uid)["devices"]}
        assert names == {device.cdi_name for device in record.devices}
        for device in record.devices:
            if device.created:
                wanted[device.device_uuid, device.partition_uuid] = device.instance_id
    existing = {
        (gpu.uuid, partition.uuid): partition.instance_id for gpu in node.gpus.devices() for partition in gpu.partitions
    }
    assert existing == wanted
    for gpu in node.gpus.devices():
        assert gpu.partitioning.enabled == bool(gpu.partitions), gpu.uuid
    assert {key.partition(":")[2] for key in node.store.meta if key.startswith(PARTITIONING_KEY)} == {
        gpu.uuid for gpu in node.gpus.devices() if gpu.partitioning.enabled
    }
    given = {device.device_uuid for record in records.values() for device in record.devices if device.passthrough}
    for index in range(node.gpus.count):
        gpu = node.gpus.template(index)
        driver = "vfio-pci" if gpu.uuid in given else "nvidia"
        override = node.system.read_text(f"/sys/bus/pci/devices/{gpu.pci_address}/driver_override").strip()
        assert (node.system.driver(gpu.pci_address), override) == (
            driver,
            "vfio-pci" if gpu.uuid in given else "(null)",
        )
    assert node.survey is not None and {offer.name for offer in node.survey.offers} >= set(DEVICES)
    set_by_claims = {
        device.device_uuid: device.settings
        for record in records.values()
        for device in record.devices
        if device.settings
    }
    assert {name: reported["devices"] for name, reported in node.companion_services.running().items()} == {
        each.name: each.environment["CUDA_VISIBLE_DEVICES"].split(",")
        for record in records.values()
        for each in mps.companions(record.uid, record.shared)
    }
    with node.gpus.state() as state:
        assert {uuid: entry["knobs"] for uuid, entry in state.items()} == {
            uuid: {**DEFAULT_KNOBS, **set_by_claims.get(uuid, {})} for uuid in state
        }
    assert {key for key in node.store.meta if key.startswith(SETTING_KEY)} == {
        f"{SETTING_KEY}{uuid}:{name}" for uuid, values in set_by_claims.items() for name in values
    }
    assert all(key.startswith((PARTITIONING_KEY, SETTING_KEY, "schema_version")) for key in node.store.meta)


@settings(suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.lists(operations, min_size=1, max_size=4), st.none() | endings), min_size=1, max_size=4))
def test_recovery_claim_is_prepared_or_removed(lives: list[Any]) -> None:
    # A kill is a copy of the files, so nothing depends on the durability of the disk. Memory is faster.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        world = World(Path(directory))
        for steps, ending in lives:
            world.live(steps, ending)
        world.live([], None)


@pytest.mark.parametrize("reboot", [False, True])
@pytest.mark.parametrize("stage", [stage for stage in PREPARE if stage not in OF_FABRIC])
def test_recovery_killed_at_each_stage_of_prepare(tmp_path: Path, stage: str, reboot: bool) -> None:
    world = World(tmp_path)
    second = {**dict.fromkeys(OF_SETTINGS, "gpu-1"), **dict.fromkeys(OF_PASSTHROUGH, "gpu-vfio-1")}
    devices = ["gpu-0-mig-1g10gb-19-0", second.get(stage, "gpu-1-mig-2g20gb-14-2")]
    claim = "b" if stage in OF_COMPANIONS else "a"
    world.live([("prepare", claim, devices)], (stage, 1, reboot))
    assert world.disk.name == "life-1", "the stage was never reached"
    world.live([("prepare", claim, devices), ("unprepare", claim, None)], None)
    world.live([], None)


@pytest.mark.parametrize("reboot", [False, True])
@pytest.mark.parametrize("stage", [stage for stage in UNPREPARE if stage not in OF_FABRIC])
def test_recovery_killed_at_each_stage_of_unprepare(tmp_path: Path, stage: str, reboot: bool) -> None:
    world = World(tmp_path)
    only = {**dict.fromkeys(OF_SETTINGS, "gpu-0"), **dict.fromkeys(OF_PASSTHROUGH, "gpu-vfio-0")}
    device = only.get(stage, "gpu-0-mig-1g10gb-19-0")
    claim = "b" if stage in OF_COMPANIONS else "a"
    steps = [("prepare", claim, [device]), ("unprepare", claim, None)]
    world.live(steps, (stage, 1, reboot))
    assert world.disk.name == "life-1", "the stage was never reached"
    world.live([("unprepare", claim, None)], None)
    world.live([], None)


def test_recovery_static_partition_is_restored_with_the_layout(tmp_path: Path) -> None:
    """After a reboot the layout creates the partition again with another number: the claim uses it."""
    from dra_driver.core.model import Placement

    claims = Claims()
    rules = ({"match": {}, "mode": "static", "partitions": {"3g.40gb": 1}},)

    async def first() -> str:
        node = Node(tmp_path, claims, rules=rules)
        gpu = node.gpus.template(0).uuid
        node.backend.set_partitioning(gpu, True)
        node.backend.create_partition(gpu, 9, Placement(4, 4))
        await node.start()
        claim = claims.allocate("a", "gpu-0-mig-3g40gb-9-4")
        outcome = await node.service.prepare([claim])
        assert outcome[claim.uid].error == ""
        node.close()
        return claim.uid

    uid = asyncio.run(first())

    async def second() -> None:
        gpus = ModelGpus(tmp_path / "gpus.json")
        gpus.reboot()
        with gpus.state() as state:
            for entry in state.values():
                entry["next"] = 5
        node = Node(tmp_path, claims, rules=rules, boot_id="boot-2")
        gpu = node.gpus.template(0).uuid
        await node.scan()
        node.service.set_ready()
        claim = ClaimReference("default", "a", uid)
        outcome = await node.service.prepare([claim])
        assert "does not exist" in outcome[uid].error
        node.backend.set_partitioning(gpu, True)
        made = node.backend.create_partition(gpu, 9, Placement(4, 4))
        outcome = await node.service.prepare([claim])
        assert outcome[uid].error == ""
        (device,) = node.store.claims[uid].devices
        assert (device.partition_uuid, device.instance_id, device.created) == (made.uuid, 5, False)
        assert any("gi5" in entry["path"] for entry in node.cdi(uid)["devices"][0]["containerEdits"]["deviceNodes"])
        node.close()

    asyncio.run(second())


def test_remains_without_a_handle_are_replaced(tmp_path: Path) -> None:
    """The driver was killed between GPU instance and compute instance during a restore: the remains are destroyed and created again."""
    claims = Claims()

    async def scenario() -> None:
        from dataclasses import replace

        from dra_driver.claims.plan import plan_restore

        node = Node(tmp_path, claims, rules=ALL_DYNAMIC)
        await node.start()
        claim = claims.allocate("a", "gpu-0-mig-1g10gb-19-0")
        await node.service.prepare([claim])
        (gpu, other) = node.gpus.devices()
        bare = replace(gpu, partitions=(replace(gpu.partitions[0], uuid=""),))
        plan = plan_restore(node.store.claims[claim.uid], {gpu.uuid: bare, other.uuid: other}, {gpu.uuid})
        assert [each.instance_id for each in plan.destructions] == [gpu.partitions[0].instance_id]
        assert [each.name for each in plan.partitions_to_create] == ["gpu-0-mig-1g10gb-19-0"]
        node.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("device", ["gpu-0", "gpu-1-mig-1g10gb-19-2"])
def test_start_hook_without_environment_rewrites_the_cdi_file(tmp_path: Path, device: str) -> None:
    """An earlier release wrote hooks without an environment; containers that restart must not run them."""
    claims = Claims()

    def without_environment(node: Node, uid: str) -> None:
        document = node.cdi(uid)
        document["containerEdits"]["hooks"] = [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook"}]
        node.system.write_atomic(node.service.hardware.cdi_path(uid), json.dumps(document).encode(), mode=0o644)

    async def live(reference: ClaimReference | None) -> ClaimReference:
        node = Node(tmp_path, claims, rules=RULES)
        await node.start()
        try:
            if reference is None:
                reference = claims.allocate("c", device)
                assert (await node.service.prepare([reference]))[reference.uid].error == ""
                without_environment(node, reference.uid)
                return reference
            for uid in sorted(node.service.suspect):
                await node.service.restore(uid)
            hooks = node.cdi(reference.uid).get("containerEdits", {}).get("hooks", [])
            assert all(hook.get("env") for hook in hooks)
            assert node.service.hardware.invalid_cdi_uids() == ()
            assert node.store.claims[reference.uid].prepared
            return reference
        finally:
            node.close()

    asyncio.run(live(asyncio.run(live(None))))
