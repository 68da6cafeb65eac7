# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepare and unprepare claims as the kubelet expects, on real files and a real store."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from backend_model import ALL_DYNAMIC, DRIVER
from claim_steps import SMALL, SMALL_2, prepare_all, run, unprepare_all
from dra_driver.claims.store.records import ClaimReference
from dra_driver.core.dra.device_metadata import POD_CLAIM_ANNOTATION
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.host.system import System
from dra_driver.core.repartition import record as records
from dra_driver.core.repartition.record import Record
from machine_model import Claims, Node

WHOLE = "gpu-0"
LARGE = "gpu-0-mig-3g40gb-9-4"


def test_whole_device(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", WHOLE)
        assert await prepare_all(node, claim) == [""]
        (device,) = node.store.claims[claim.uid].devices
        assert device.cdi_id == f"k8s.gpu.nvidia.com/claim={claim.uid}-gpu-0"
        spec = node.cdi(claim.uid)
        assert [entry["name"] for entry in spec["devices"]] == [f"{claim.uid}-gpu-0"]
        assert spec["cdiVersion"] == "0.6.0"
        assert node.partitions() == []
        assert await unprepare_all(node, claim) == [""]
        assert node.cdi_files() == ()
        assert node.store.claims == {}

    run(tmp_path, scenario)


def test_partition_is_created_at_its_placement_and_destroyed(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        first, second = claims.allocate("a", SMALL), claims.allocate("b", LARGE)
        assert await prepare_all(node, first, second) == ["", ""]
        gpu = node.gpus.devices()[0]
        assert gpu.partitioning.enabled
        assert sorted(each.key for each in gpu.partitions) == [(9, 4, 4), (19, 0, 1)]
        assert await unprepare_all(node, first) == [""]
        assert node.gpus.devices()[0].partitioning.enabled
        assert await unprepare_all(node, second) == [""]
        assert node.partitions() == []
        assert not node.gpus.devices()[0].partitioning.enabled
        assert set(node.store.meta) == {"schema_version"}

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (ClaimReference("default", "a", ""), "UID"),
        (ClaimReference("default", "a", ".."), "UID"),
        (ClaimReference("default", "a", "../../plugins_registry"), "UID"),
        (ClaimReference("default", "a", "u" * 300), "UID"),
        (ClaimReference("default", "../../nodes/node-1", "0uid-a"), "name"),
        (ClaimReference("default", "", "0uid-a"), "name"),
        (ClaimReference("default?watch=1", "a", "0uid-a"), "namespace"),
    ],
)
def test_prepare_invalid_claim_name_is_rejected_without_changes(
    tmp_path: Path, found: ClaimReference, what: str
) -> None:
    """Names of files and requests contain the uid: an invalid uid is refused, and no other file is read or removed."""

    async def scenario(node: Node, claims: Claims) -> None:
        kept = claims.allocate("kept", WHOLE)
        assert await prepare_all(node, kept) == [""]
        before, reads = sorted(tmp_path.rglob("*")), claims.reads
        for outcomes in (await node.service.unprepare([found]), await node.service.prepare([found])):
            (outcome,) = outcomes.values()
            assert outcome.code == "invalid-claim" and what in outcome.error, outcome
        assert (sorted(tmp_path.rglob("*")), claims.reads) == (before, reads)
        assert node.reports.failures == []

    run(tmp_path, scenario)


def test_mode_that_an_administrator_switched_on_stays_on(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        node.backend.set_partitioning(node.gpus.template(0).uuid, True)
        claim = claims.allocate("a", SMALL)
        assert await prepare_all(node, claim) == [""]
        assert await unprepare_all(node, claim) == [""]
        assert node.gpus.devices()[0].partitioning.enabled

    run(tmp_path, scenario)


def test_whole_device_switches_an_idle_mode_off(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        node.backend.set_partitioning(node.gpus.template(0).uuid, True)
        assert await prepare_all(node, claims.allocate("a", WHOLE)) == [""]
        assert not node.gpus.devices()[0].partitioning.enabled

    run(tmp_path, scenario)


def test_prepare_again_answers_the_same_without_the_api(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        first = (await node.service.prepare([claim]))[claim.uid]
        claims.failures = [AcceleratorError("the API server is away")]
        calls = len(node.backend.calls)
        second = (await node.service.prepare([claim]))[claim.uid]
        assert second == first
        assert len(node.backend.calls) == calls

    run(tmp_path, scenario)


def test_prepare_device_attributes_are_at_the_pod_claim_name(tmp_path: Path) -> None:
    devices = ({"device": SMALL, "request": "r/first"}, {"device": "gpu-1", "request": "w"})
    directory = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/gpu"
    claims, seen = Claims(), {}

    def read(node: Node, uid: str) -> dict[str, Any]:
        return {
            mount["containerPath"]: json.loads(node.system.read_text(mount["hostPath"]).splitlines()[0])
            for device in node.cdi(uid)["devices"]
            for mount in device["containerEdits"].get("mounts", ())
        }

    async def first() -> None:
        node = Node(tmp_path, claims)
        await node.start()
        claim = claims.allocate("of-template-x7", *devices)
        claims.claims["default", claim.name]["metadata"]["annotations"] = {POD_CLAIM_ANNOTATION: "gpu"}
        assert await prepare_all(node, claim) == [""]
        seen.update(read(node, claim.uid))
        path = node.service.hardware.files.path(claim.uid)
        node.system.make_file(
            f"{path}/.r.json.4194305-1.tmp", b"a part of what a driver wrote that was killed meanwhile"
        )
        node.close()

    async def after_a_reboot() -> None:
        node = Node(tmp_path, claims, boot_id="boot-2")
        node.gpus.reboot()
        await node.start()
        claim = ClaimReference("default", "of-template-x7", "0uid-of-template-x7")
        assert read(node, claim.uid) == seen, "the pod's name for the claim is not in the record"
        assert node.system.list_directory(node.service.hardware.files.path(claim.uid)) == ("r.json", "w.json")
        node.close()

    async def after_another() -> None:
        """/run is empty after a reboot, and only the pod has its name for the claim."""
        shutil.rmtree(tmp_path / "root/var/run/cdi")
        node = Node(tmp_path, claims, boot_id="boot-3")
        node.gpus.reboot()
        await node.start()
        claim = ClaimReference("default", "of-template-x7", "0uid-of-template-x7")
        for written in (set(read(node, claim.uid)), set(node.system.list_directory("/var/run/cdi"))):
            assert written, "it was made again, under a name that no container looks for"
        assert set(read(node, claim.uid)).isdisjoint(seen)
        assert await prepare_all(node, claim) == [""]
        assert set(read(node, claim.uid)) == set(seen)
        changed = len(node.backend.calls)
        assert await prepare_all(node, claim) == [""]
        assert len(node.backend.calls) == changed, "and that was all"
        node.close()

    async def of_a_release_before() -> None:
        node = Node(tmp_path, claims, boot_id="boot-3")
        await node.start()
        claim = ClaimReference("default", "of-template-x7", "0uid-of-template-x7")
        previous = node.system.path(f"/var/lib/metadata/{claim.uid}")
        previous.parent.mkdir(parents=True)
        node.system.path(node.service.hardware.files.path(claim.uid)).rename(previous)
        changed = len(node.backend.calls)
        assert await prepare_all(node, claim) == [""]
        assert len(node.backend.calls) == changed and previous.is_dir(), "containers see it at this path"
        assert node.service.hardware.files.uids() == (claim.uid,)
        assert await unprepare_all(node, claim) == [""]
        assert node.service.hardware.files.uids() == () and not previous.exists()
        node.close()

    asyncio.run(first())
    assert set(seen) == {f"{directory}/{request}/{DRIVER}-metadata.json" for request in ("r", "w")}
    (request,) = seen[f"{directory}/r/{DRIVER}-metadata.json"]["requests"]
    assert (request["name"], request["devices"][0]["name"]) == ("r/first", SMALL)
    assert request["devices"][0]["attributes"]["uuid"]["string"].startswith("MIG-")
    asyncio.run(after_a_reboot())
    asyncio.run(after_another())
    asyncio.run(of_a_release_before())


@pytest.mark.parametrize(
    ("device", "outlive", "waits"),
    [(WHOLE, False, [False]), (SMALL, False, [False, False]), (SMALL, True, [True, False])],
)
def test_one_prepare_costs_one_read_and_one_commit_for_each_transition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, outlive: bool, waits: list[bool]
) -> None:
    """A claim whose hardware needs no change has one transition, because there is nothing to undo.

    ``waits`` has whether each transition waits for the disk before the next action: an interrupted start need not
    survive a power cut that undoes it. The sync of the last transition runs while files are written.
    """
    synced = []
    real_sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(descriptor), real_sync(descriptor)))

    async def scenario(node: Node, claims: Claims) -> None:
        commits = []
        real = node.store._write_changes

        def counted(changes: Any) -> None:
            commits.extend(changes)
            real(changes)

        node.store._write_changes = counted  # type: ignore[method-assign]
        node.backend.partitions_outlive_boot = outlive
        claim = claims.allocate("a", device)
        assert await prepare_all(node, claim) == [""]
        assert (claims.reads, [change.durable for change in commits], len(synced)) == (1, waits, 1)
        changes = ("set_partitioning", "create_partition") if device == SMALL else ()
        scans = ("device", "discover", "driver_edits")
        assert tuple(name for name, _arguments in node.backend.calls if name not in scans) == changes
        commits.clear()
        assert await unprepare_all(node, claim) == [""]
        assert ([change.durable for change in commits], len(synced)) == ([True], 1)

    run(tmp_path, scenario)


def test_prepare_overlap_is_rejected_with_the_other_claim(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        holder = claims.allocate("holder", LARGE)
        assert await prepare_all(node, holder) == [""]
        for device in (LARGE, WHOLE, "gpu-0-mig-4g40gb-5-0", "gpu-0-mig-7g80gb-0-0"):
            (error,) = await prepare_all(node, claims.allocate("late", device))
            if device == "gpu-0-mig-4g40gb-5-0":  # slices 0 to 3: no overlap
                assert error == ""
                await unprepare_all(node, ClaimReference("default", "late", "0uid-late"))
            else:
                assert "default/holder" in error
        assert set(node.store.claims) == {holder.uid}

    run(tmp_path, scenario)


def test_prepare_admin_access_ignores_overlap_and_creates_nothing(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        holder = claims.allocate("holder", SMALL)
        assert await prepare_all(node, holder) == [""]
        admin = claims.allocate("admin", {"device": WHOLE, "adminAccess": True}, {"device": SMALL, "adminAccess": True})
        nothing = claims.allocate("nothing", {"device": LARGE, "adminAccess": True})
        assert await prepare_all(node, admin) == [""]
        watched = [node.cdi(each.uid)["devices"] for each in (admin, holder)]
        assert [["/dev/nvidia-caps/monitor" in str(device) for device in devices] for devices in watched] == [
            [True, True],
            [False],
        ]
        assert "does not exist" in (await prepare_all(node, nothing))[0]
        assert await unprepare_all(node, admin) == [""]
        assert len(node.partitions()) == 1

    run(tmp_path, scenario)


def test_shares_of_one_device_differ_by_their_id(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        one = claims.allocate("one", {"device": WHOLE, "shareID": "11111111-1111-1111-1111-111111111111"})
        two = claims.allocate("two", {"device": WHOLE, "shareID": "22222222-2222-2222-2222-222222222222"})
        same = claims.allocate("same", {"device": WHOLE, "shareID": "22222222-2222-2222-2222-222222222222"})
        assert await prepare_all(node, one, two) == ["", ""]
        assert "default/two" in (await prepare_all(node, same))[0]

    run(tmp_path, scenario)


def test_prepare_invalid_claim_does_not_fail_the_others(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        good, missing = claims.allocate("good", WHOLE), ClaimReference("default", "missing", "u")
        removed = claims.allocate("gone", "gpu-7")
        errors = await prepare_all(node, good, missing, removed)
        assert errors[0] == ""
        assert "not found" in errors[1]
        assert "gpu-7" in errors[2]
        # The order of the two failures is undefined.
        assert sorted((claim.name, verb) for claim, verb, _message in node.reports.failures) == [
            ("gone", "Prepare"),
            ("missing", "Prepare"),
        ]

    run(tmp_path, scenario)


def test_replaced_and_unallocated_claims(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claims.allocate("a", WHOLE, uid="new")
        assert "was replaced" in (await prepare_all(node, ClaimReference("default", "a", "old")))[0]
        bare = claims.allocate("b", WHOLE)
        claims.claims["default", "b"]["status"] = {}
        assert "not allocated" in (await prepare_all(node, bare))[0]

    run(tmp_path, scenario)


def test_pod_claim_annotation_with_a_path_is_rejected(tmp_path: Path) -> None:
    """Users can set the annotation on their claims, and its value becomes a part of a path: a path is rejected."""

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", WHOLE)
        claims.claims["default", "a"]["metadata"]["annotations"] = {POD_CLAIM_ANNOTATION: "../../../../etc"}
        (error,) = await prepare_all(node, claim)
        assert POD_CLAIM_ANNOTATION in error and "'../../../../etc'" in error
        assert not node.service.store.claims

    run(tmp_path, scenario)


def test_results_of_other_drivers_are_ignored(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        mixed = claims.allocate("mixed", WHOLE, {"device": "nic-0", "driver": "dra.net", "pool": "elsewhere"})
        assert await prepare_all(node, mixed) == [""]
        assert [device.name for device in node.store.claims[mixed.uid].devices] == [WHOLE]
        foreign = claims.allocate("foreign", "nic-0", driver="dra.net")
        assert await prepare_all(node, foreign) == [""]
        assert foreign.uid not in node.cdi_files()
        assert await unprepare_all(node, foreign) == [""]

    run(tmp_path, scenario)


def test_unprepare_unknown_claim_succeeds(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        assert await unprepare_all(node, ClaimReference("default", "never", "seen")) == [""]

    run(tmp_path, scenario)


def test_unprepare_uses_the_stored_record(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare_all(node, claim) == [""]
        claims.remove(claim)
        node.rules = ()  # the device is no longer dynamic
        await node.scan()
        assert await unprepare_all(node, claim) == [""]
        assert node.partitions() == []

    run(tmp_path, scenario)


def test_claims_of_one_gpu_wait_for_each_other_and_others_do_not(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        import threading

        gate, entered = threading.Event(), threading.Event()
        real = node.backend.create_partition

        def slow(uuid: str, *arguments: Any) -> Any:
            if uuid == node.gpus.template(0).uuid:
                entered.set()
                assert gate.wait(10)
            return real(uuid, *arguments)

        node.backend.create_partition = slow  # type: ignore[method-assign]
        first, second = claims.allocate("first", SMALL), claims.allocate("second", SMALL_2)
        other = claims.allocate("other", "gpu-1-mig-1g10gb-19-0")
        waiting = asyncio.gather(prepare_all(node, first), prepare_all(node, second))
        await asyncio.to_thread(entered.wait, 10)
        assert await asyncio.wait_for(prepare_all(node, other), 5) == [""]
        assert not waiting.done()
        gate.set()
        assert await waiting == [[""], [""]]

    run(tmp_path, scenario)


def test_prepare_call_canceled_by_the_kubelet_continues(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        call = asyncio.get_running_loop().create_task(node.service.prepare([claim]))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await node.service.drain(5)
        assert node.store.claims[claim.uid].prepared

    run(tmp_path, scenario)


def test_same_claim_asked_for_many_times_at_once(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        results = await asyncio.gather(*(prepare_all(node, claim) for _attempt in range(15)))
        assert results == [[""]] * 15
        assert len(node.partitions()) == 1
        assert claims.reads == 2  # by the first request, and once by those that arrived during it

    run(tmp_path, scenario)


def test_prepare_before_ready_reports_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.claims.operations.READY_SECONDS", 0.01)

    async def scenario(node: Node, claims: Claims) -> None:
        node.service.set_ready("The NVIDIA driver is not loaded")
        (error,) = await prepare_all(node, claims.allocate("a", WHOLE))
        assert "not loaded" in error

    run(tmp_path, scenario)


def test_unprepare_whole_device_without_the_gpu_driver_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.claims.operations.READY_SECONDS", 0.01)

    async def scenario(node: Node, claims: Claims) -> None:
        whole, small = claims.allocate("whole", "gpu-1"), claims.allocate("small", SMALL)
        assert await prepare_all(node, whole, small) == ["", ""]
        node.service.set_ready("The NVIDIA driver is not loaded")
        node.backend.present = False
        assert await unprepare_all(node, whole) == [""]
        assert "not loaded" in (await unprepare_all(node, small))[0]
        assert set(node.store.claims) == {small.uid}

    run(tmp_path, scenario)


def test_prepare_adopted_partition_is_never_destroyed(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        from dra_driver.core.model import Placement

        gpu = node.gpus.template(0).uuid
        node.backend.set_partitioning(gpu, True)
        made = node.backend.create_partition(gpu, 19, Placement(6, 1))
        await node.scan()
        name = "gpu-0-mig-1g10gb-19-6"
        assert node.inventory.offers[name].partition_uuid == made.uuid
        assert WHOLE not in node.inventory.offers
        claim = claims.allocate("a", name)
        assert await prepare_all(node, claim) == [""]
        assert node.store.claims[claim.uid].devices[0].partition_uuid == made.uuid
        assert await unprepare_all(node, claim) == [""]
        assert node.partitions() == [(gpu, made.uuid)]

    run(tmp_path, scenario, rules=ALL_DYNAMIC)


def test_prepare_partition_at_the_placement_is_kept(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        from dra_driver.core.model import Placement

        gpu = node.gpus.template(0).uuid
        node.backend.set_partitioning(gpu, True)
        made = node.backend.create_partition(gpu, 19, Placement(0, 1))
        (error,) = await prepare_all(node, claims.allocate("a", SMALL))
        assert "did not make" in error.replace("this driver did not make", "did not make")
        assert node.partitions() == [(gpu, made.uuid)]

    run(tmp_path, scenario)


def test_prepare_device_in_repartition_is_rejected_and_others_succeed(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        held, new, other = claims.allocate("a", SMALL), claims.allocate("b", SMALL_2), claims.allocate("c", "gpu-1")
        assert await prepare_all(node, held) == [""]
        uuid = node.gpus.devices()[0].uuid
        until = time.time() + 600
        records.write(System(), str(tmp_path / "state"), Record("repartition-7", (uuid,), "draining", until, (), ()))
        refused, served = await prepare_all(node, new, other)
        assert "repartition-7" in refused and "The kubelet retries" in refused and served == ""
        # A claim that is already prepared is served and unprepared.
        assert await prepare_all(node, held) == [""]
        assert await unprepare_all(node, held) == [""]
        records.remove(System(), str(tmp_path / "state"))
        assert await prepare_all(node, new) == [""]

    run(tmp_path, scenario)
