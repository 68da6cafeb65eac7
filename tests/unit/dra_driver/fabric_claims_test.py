# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims on a node with fabric partitions: activated for the claim, deactivated after the last one, never those of an administrator."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backend_model import ModelGpus
from claim_steps import prepare, run, unprepare
from dra_driver.claims.claim_fabric import claimed_partitions, to_deactivate
from dra_driver.claims.pending_cleanups import PendingDeactivation
from dra_driver.claims.store.records import ClaimRecord, DeviceRecord, record_of_document
from dra_driver.claims.store.tables import Change
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, FabricRejected
from dra_driver.core.host.pci import DEVICES, DRIVERS
from dra_driver.metrics import Metrics, Stopwatch
from machine_model import Claims, Node

RULES = ({"match": {}, "mode": "dynamic", "passthrough": True},)
FABRIC = {1: (0, 1, 2, 3), 2: (0, 1), 3: (2, 3), 4: (0,), 5: (1,), 6: (2,), 7: (3,)}


def with_fabric(node: Node) -> Node:
    node.backend.fabric = dict(FABRIC)
    return node


def persistence(node: Node) -> list[bool]:
    with node.gpus.state() as state:
        return [entry["knobs"]["persistence"] for entry in state.values()]


def test_pair_is_activated_and_deactivated(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node)
        claim = claims.allocate("pair", "gpu-0", "gpu-1")
        assert await prepare(node, claim) == ""
        assert node.backend.active == {2}
        assert persistence(node) == [False, False, True, True]
        assert await unprepare(node, claim) == ""
        assert node.backend.active == set()
        assert persistence(node) == [True] * 4
        names = [name for name, _arguments in node.backend.calls]
        first = names.index("set_knobs"), names.index("activate_fabric_partition")
        assert first == tuple(sorted(first)), "persistence goes off before the partition is activated"

    run(tmp_path, scenario, rules=RULES, count=4)


@pytest.mark.parametrize("devices", [("gpu-1", "gpu-2"), ("gpu-0", "gpu-1", "gpu-2"), ("gpu-vfio-0", "gpu-vfio-3")])
def test_devices_without_a_partition_are_rejected_before_any_change(tmp_path: Path, devices: Any) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node)
        output = await prepare(node, claims.allocate("wrong", *devices))
        assert "No partition of the fabric has exactly" in output
        assert node.backend.active == set() and node.store.claims == {} and persistence(node) == [True] * 4

    run(tmp_path, scenario, rules=RULES, count=4)


@pytest.mark.parametrize(
    ("devices", "number"),
    [(("gpu-2",), 6), (("gpu-vfio-2", "gpu-vfio-3"), 3), (("gpu-0", "gpu-1", "gpu-2", "gpu-3"), 1)],
)
def test_partition_of_each_size_and_kind(tmp_path: Path, devices: tuple[str, ...], number: int) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node)
        claim = claims.allocate("some", *devices)
        assert await prepare(node, claim) == "" and node.backend.active == {number}
        assert await unprepare(node, claim) == "" and node.backend.active == set()

    run(tmp_path, scenario, rules=RULES, count=4)


def test_partitioned_devices_and_administrators_claims_need_no_fabric_partition(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node)
        assert await prepare(node, claims.allocate("part", "gpu-0-mig-1g10gb-19-0")) == ""
        assert await prepare(node, claims.allocate("look", {"device": "gpu-3", "adminAccess": True})) == ""
        assert node.backend.active == set()
        assert not [each for each in node.backend.calls if "fabric" in each[0]]

    run(tmp_path, scenario, rules=RULES, count=4)


def test_fabric_partition_of_an_administrator_stays_active(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node).backend.active = {2}
        claim = claims.allocate("pair", "gpu-0", "gpu-1")
        assert await prepare(node, claim) == ""
        assert await unprepare(node, claim) == ""
        assert node.backend.active == {2} and persistence(node) == [True] * 4

    run(tmp_path, scenario, rules=RULES, count=4)


def test_overlap_with_an_active_partition_is_rejected_and_nothing_stays(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node).backend.active = {1}
        output = await prepare(node, claims.allocate("pair", "gpu-0", "gpu-1"))
        assert "Partition 1 has GPUs of partition 2" in output
        assert node.backend.active == {1} and node.store.claims == {} and persistence(node) == [True] * 4

    run(tmp_path, scenario, rules=RULES, count=4)


def test_fabric_manager_that_does_not_answer_keeps_the_claim(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node)
        claim = claims.allocate("pair", "gpu-0", "gpu-1")
        node.backend.failures["fabric_partition"] = [BackendUnavailable("The fabric manager cannot be reached")]
        assert "cannot be reached" in await prepare(node, claim) and node.store.claims == {}
        assert await prepare(node, claim) == ""
        node.backend.failures["deactivate_fabric_partition"] = [BackendUnavailable("The fabric manager is away")]
        assert "is away" in await unprepare(node, claim)
        assert node.backend.active == {2} and claim.uid in node.store.claims
        assert await unprepare(node, claim) == "" and node.backend.active == set()

    run(tmp_path, scenario, rules=RULES, count=4)


def reject_deactivation(node: Node, times: int = 1) -> None:
    rejection = FabricRejected("The fabric manager rejects it: generic error")
    node.backend.failures["deactivate_fabric_partition"] = [rejection] * times


def test_rejected_deactivation_ends_claim_and_is_retried_before_next_activation(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node)
        claim = claims.allocate("pair", "gpu-0", "gpu-1")
        assert await prepare(node, claim) == ""
        reject_deactivation(node, 3)
        assert await unprepare(node, claim) == ""
        assert node.store.claims == {} and node.cdi_files() == () and node.backend.active == {2}
        (event,) = node.reports.failures
        assert event[:2] == (claim, "Unprepare") and "The claim has ended. The driver retries" in str(event[2])
        assert node.owing() == set(ModelGpus.uuids(2)) and persistence(node) == [True] * 4
        assert "deactivation of partition 2 of the fabric" in " ".join(node.service.unprepare_runner.pending)
        alone = claims.allocate("one", "gpu-0")
        assert "deactivation of partition 2 of the fabric" in await prepare(node, alone)
        assert node.store.claims == {} and node.backend.active == {2}
        other = claims.allocate("other", "gpu-2", "gpu-3")
        assert await prepare(node, other) == "", "a partition without these devices does not wait"
        assert await prepare(node, claims.allocate("part", "gpu-1-mig-1g10gb-19-0")) == ""
        (cleanup,) = node.service.unprepare_runner.fabric_cleanups
        with pytest.raises(FabricRejected):
            await node.service.housekeeping.complete_fabric_cleanup(cleanup)
        assert await prepare(node, alone) == ""
        assert node.backend.active == {4, 3} and node.owing() == frozenset()
        assert not [key for key in node.store.meta if key.startswith("owed-fabric:")]

    run(tmp_path, scenario, rules=RULES, count=4)


@pytest.mark.parametrize("boot", ["boot-1", "boot-2"])
def test_rejected_deactivation_is_pending_after_restart_and_void_after_reboot(tmp_path: Path, boot: str) -> None:
    claims = Claims()

    async def main() -> None:
        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4))
        await node.start()
        claim = claims.allocate("pair", "gpu-vfio-0", "gpu-vfio-1")
        assert await prepare(node, claim) == ""
        reject_deactivation(node)
        assert await unprepare(node, claim) == "" and node.owing() == set(ModelGpus.uuids(2))
        node.close()
        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4, boot_id=boot))
        node.backend.active = {2} if boot == "boot-1" else set()
        await node.start()
        pending = node.service.unprepare_runner.fabric_cleanups
        assert [cleanup.number for cleanup in pending] == ([2] if boot == "boot-1" else [])
        for cleanup in pending:
            await node.service.housekeeping.complete_fabric_cleanup(cleanup)
        assert node.owing() == frozenset() and node.backend.active == set()
        assert not [key for key in node.store.meta if key.startswith("owed-fabric:")]
        node.close()

    asyncio.run(main())


def unload_driver(node: Node) -> None:
    """Unload NVIDIA's kernel driver: the library cannot be opened, and no GPU is bound to the driver."""
    node.backend.present = False
    for index in range(node.gpus.count):
        link = node.system.path(f"{DEVICES}/{node.gpus.template(index).pci_address}/driver")
        if link.resolve().name == "nvidia":
            link.unlink()
    node.system.path(f"{DRIVERS}/nvidia").rmdir()
    node.service.set_ready("NVML is not available")


@pytest.mark.parametrize("machine", [False, True])
def test_unprepare_with_unloaded_driver_deactivates_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: bool
) -> None:
    monkeypatch.setattr("dra_driver.claims.operations.READY_SECONDS", 0.1)
    devices = ("gpu-vfio-0", "gpu-vfio-1") if machine else ("gpu-0", "gpu-1")

    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node)
        claim = claims.allocate("pair", *devices)
        assert await prepare(node, claim) == "" and node.backend.active == {2}
        unload_driver(node)
        node.backend.failures["deactivate_fabric_partition"] = [BackendUnavailable("The fabric manager is away")]
        assert "is away" in await unprepare(node, claim)
        assert node.backend.active == {2} and claim.uid in node.store.claims
        assert await unprepare(node, claim) == ""
        assert node.backend.active == set() and node.store.claims == {} and node.cdi_files() == ()
        addresses = [node.gpus.template(index).pci_address for index in range(4)]
        assert [node.system.driver(address) for address in addresses] == [""] * 4
        assert [(node.system.path(f"{DEVICES}/{each}/driver_override")).read_text().strip() for each in addresses] == [
            "(null)"
        ] * 4, "the kernel binds the GPUs when the driver is loaded"
        node.system.path(f"{DRIVERS}/nvidia").mkdir()
        node.system.boot(addresses)
        node.backend.present = True
        assert node.owing() == set(ModelGpus.uuids(2))
        for uuid in sorted(node.owing()):
            await node.service.housekeeping.settle(uuid)
        assert node.owing() == frozenset() and persistence(node) == [True] * 4

    run(tmp_path, scenario, rules=RULES, count=4)


@pytest.mark.parametrize("devices", [("gpu-0", "gpu-1"), ("gpu-vfio-0", "gpu-vfio-1")])
def test_partition_that_a_restart_of_the_fabric_manager_lost_is_activated_again(
    tmp_path: Path, devices: tuple[str, ...]
) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node)
        claim = claims.allocate("pair", *devices)
        assert await prepare(node, claim) == ""
        node.backend.active = set()
        assert await prepare(node, claim) == "" and node.backend.active == {2}
        node.backend.active = set()
        await node.service.restore(claim.uid)
        assert node.backend.active == {2}

    run(tmp_path, scenario, rules=RULES, count=4)


def test_reboot_activates_the_partition_of_a_claim_again(tmp_path: Path) -> None:
    claims = Claims()

    async def main() -> None:
        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4))
        await node.start()
        claim = claims.allocate("pair", "gpu-0", "gpu-1")
        assert await prepare(node, claim) == ""
        node.close()
        node.gpus.reboot()
        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4, boot_id="boot-2"))
        await node.start()
        assert node.backend.active == {2} and persistence(node) == [False, False, True, True]
        assert await unprepare(node, claim) == "" and node.backend.active == set()
        node.close()

    asyncio.run(main())


def test_claim_ends_without_fabric_partitions(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node)
        claim = claims.allocate("pair", "gpu-0", "gpu-1")
        assert await prepare(node, claim) == ""
        node.backend.fabric = {}  # another mode since then
        assert await prepare(node, claim) == "" and node.store.claims[claim.uid].devices[0].fabric
        assert await unprepare(node, claim) == "" and node.store.claims == {}

    run(tmp_path, scenario, rules=RULES, count=4)


def test_temporarily_unreadable_mode_leaves_no_active_partition(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        with_fabric(node)
        claim = claims.allocate("pair", "gpu-0", "gpu-1")
        assert await prepare(node, claim) == ""
        node.backend.fabric = {}
        assert await prepare(node, claim) == ""
        with_fabric(node)
        assert await unprepare(node, claim) == "" and node.backend.active == set()
        alone = claims.allocate("one", "gpu-0")
        assert await prepare(node, alone) == "" and node.backend.active == {4}

    run(tmp_path, scenario, rules=RULES, count=4)


@pytest.mark.parametrize("previous", [{}, {"partition": 2, "activated": False}])
def test_restore_that_fails_after_activation_leaves_no_active_partition(
    tmp_path: Path, previous: dict[str, Any]
) -> None:
    """A claim of an earlier release, or one with an administrator's partition, which the reboot has deactivated: no partition stays active."""
    claims = Claims()

    async def main() -> None:
        node = Node(tmp_path, claims, rules=RULES, count=4)
        await node.start()
        claim = claims.allocate("pair", "gpu-0", "gpu-1")
        assert await prepare(node, claim) == ""
        kept = node.store.claims[claim.uid]
        await node.store.commit(
            Change(put=replace(kept, devices=tuple(each.with_changes(fabric=previous) for each in kept.devices)))
        )
        node.close()
        node.gpus.reboot()

        def reached(stage: str) -> None:
            if stage == "fabric-activated":
                raise AcceleratorError("a later step fails")

        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4, boot_id="boot-2", reached=reached))
        with pytest.raises(AcceleratorError, match="a later step fails"):
            await node.start()
        assert node.backend.active == {2}
        node.service.set_ready()
        assert await unprepare(node, claim) == ""
        assert node.backend.active == set() and persistence(node) == [True] * 4
        node.close()

    asyncio.run(main())


def test_claim_that_was_not_restored_after_a_reboot_keeps_no_partition_active(tmp_path: Path) -> None:
    claims = Claims()

    async def main() -> None:
        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4))
        await node.start()
        claim = claims.allocate("one", "gpu-2")
        assert await prepare(node, claim) == ""
        shared = node.store.claims[claim.uid]
        other = replace(
            shared, uid="other", name="other", devices=tuple(each.with_changes(share_id="s") for each in shared.devices)
        )
        await node.store.commit(Change(put=other))
        node.close()
        node.gpus.reboot()
        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4, boot_id="boot-2"))
        restore = node.service.restore

        async def restore_one(uid: str) -> None:
            if uid == claim.uid:
                await restore(uid)

        node.service.restore = restore_one  # type: ignore[method-assign]
        await node.start()
        assert node.backend.active == {6}
        assert await unprepare(node, claim) == "" and node.backend.active == set()
        node.close()

    asyncio.run(main())


class Killed(BaseException):
    """Simulated end of the process."""


STAGES = ("recorded-preparing", "settings-applied", "fabric-activated", "recording-prepared", "cdi-written")


@pytest.mark.parametrize("machine", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_killed_driver_leaves_no_active_partition(tmp_path: Path, stage: str, machine: bool) -> None:
    """A driver that is killed at any stage: after a restart the claim and its partition are complete or removed."""
    claims, devices = Claims(), ("gpu-vfio-0", "gpu-vfio-1") if machine else ("gpu-0", "gpu-1")

    def reached(now: str) -> None:
        if now == stage:
            raise Killed

    async def main() -> None:
        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4, reached=reached))
        await node.start()
        claim = claims.allocate("pair", *devices)
        with pytest.raises(Killed):
            await node.service._prepare(claim, Stopwatch(Metrics(), "prepare"))
        active = set(node.backend.active)
        node.close()
        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4))
        node.backend.active = active
        await node.start()
        assert node.backend.active == ({2} if claim.uid in node.store.claims else set())
        assert await unprepare(node, claim) == ""
        assert node.backend.active == set() and persistence(node) == [True] * 4
        node.close()

    asyncio.run(main())


@pytest.mark.parametrize("stage", ["unprepare-started", "fabric-deactivated", "settings-restored", "cdi-removed"])
def test_driver_killed_in_unprepare_leaves_no_active_partition(tmp_path: Path, stage: str) -> None:
    claims = Claims()

    def reached(now: str) -> None:
        if now == stage:
            raise Killed

    async def main() -> None:
        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4, reached=reached))
        await node.start()
        claim = claims.allocate("pair", "gpu-0", "gpu-1")
        assert await prepare(node, claim) == ""
        with pytest.raises(Killed):
            await node.service._unprepare(claim, Stopwatch(Metrics(), "unprepare"))
        active = set(node.backend.active)
        node.close()
        node = with_fabric(Node(tmp_path, claims, rules=RULES, count=4))
        node.backend.active = active
        await node.start()
        assert await unprepare(node, claim) == ""
        assert node.backend.active == set() and persistence(node) == [True] * 4 and node.store.claims == {}
        node.close()

    asyncio.run(main())


def record(uid: str, number: int | None, *, ours: bool) -> ClaimRecord:
    fabric = {} if number is None else {"partition": number, "activated": ours}
    held = DeviceRecord("r", "node-1", "gpu-0", "GPU-0", "device", fabric=fabric)
    return ClaimRecord(uid, "default", uid, "prepared", "boot-1", 0.0, (held,))


@pytest.mark.parametrize(
    ("ours", "other", "expected"),
    [(True, None, 4), (True, 4, None), (False, None, None)],
)
def test_last_claim_deactivates_partitions_of_the_driver(ours: bool, other: int | None, expected: int | None) -> None:
    mine = record("mine", 4, ours=ours)
    others = [] if other is None else [record("other", other, ours=True)]
    assert to_deactivate(mine, [mine, *others]) == expected
    # The other claim's record does not mention the fabric, but has the same device.
    assert to_deactivate(mine, [mine, record("other", None, ours=False)]) is None


def test_claimed_partitions_are_those_of_this_boot_and_of_pending_cleanup() -> None:
    records = [
        record("ours", 4, ours=True),
        record("administrators", 5, ours=False),
        record("none", None, ours=False),
        replace(record("preparing", 6, ours=True), state="preparing"),
        replace(record("former", 7, ours=True), boot_id="boot-0"),
    ]
    pending, void = PendingDeactivation(8, frozenset({"GPU-0"})), PendingDeactivation(9, frozenset({"GPU-1"}))
    assert claimed_partitions(records, {**pending.to_meta("boot-1"), **void.to_meta("boot-0")}, "boot-1") == {4, 5, 8}


def test_record_with_a_partition_is_read_back_and_is_unknown_to_older_releases() -> None:
    with_one, without = record("with", 4, ours=True), record("without", None, ours=True)
    assert record_of_document(with_one.document) == with_one
    assert '"version":6' in with_one.document and '"version":1' in without.document
