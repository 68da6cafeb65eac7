# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A device refuses a partition that its counters allow: the driver tries alternatives and taints similar offers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import chip_model as model
import pytest
from backend_model import DRIVER
from claim_steps import prepare, prepare_all, run, unprepare
from dra_driver.claims.plan import plan_restore
from dra_driver.claims.refusals import FIRST_SECONDS, LONGEST_SECONDS, REFUSED, Refusals, find_removable_partitions
from dra_driver.claims.store.records import ClaimRecord, DeviceRecord
from dra_driver.core.dra.device_json import FAILED_CONDITION
from dra_driver.core.errors import DoesNotFit, InUse
from dra_driver.core.model import Device, Offer, Partition, Process
from dra_driver.core.vendors.ascend.offers import counter_set, offers
from hypothesis import given
from hypothesis import strategies as st
from machine_model import Claims, Node
from supervisor_health_test import reasons, taints
from vendor_scene import Scene
from vendor_scene import run as played

SMALL, NEXT, LARGE = "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1", "gpu-0-mig-3g40gb-9-4"
NO_ROOM = "There is no room on the board, by the vendor"


class Clock:
    """A clock that a test can set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refusing(node: Node, times: int) -> None:
    node.backend.failures["create_partition"] = [DoesNotFit(NO_ROOM, hint="Look elsewhere.") for _each in range(times)]


def tainted(refusals: Refusals, device: Device, published: Iterable[Offer]) -> set[str]:
    found = refusals.taint_offers(DRIVER, published, {device.uuid: device})
    for offer in found:
        assert all((taint.key, taint.effect) == (f"{DRIVER}/{REFUSED}", "NoSchedule") for taint in offer.taints)
    return {offer.name for offer in found if offer.taints}


# ---------------------------------------------------------------------- offers that are closed to new claims


@given(st.sampled_from(sorted(model.CHIPS)), st.data())
def test_refusal_taints_exactly_the_offers_with_no_smaller_needs(kind: str, data: st.DataObject) -> None:
    device = model.device(kind)
    published = offers(device, True)
    possible = [offer for offer in published if offer.dynamic]
    refused = data.draw(st.sampled_from(possible))
    refusals = Refusals(Clock())
    refusals.add(refused, device)
    found = tainted(refusals, device, published)
    assert refused.name in found
    total = counter_set(device).counters
    for offer in published:
        # It may still be created where it fits next to less than the refused partition.
        rest = {name: total[name] - amount for name, amount in offer.consumes.items()}
        is_larger = offer.dynamic and all(offer.consumes.get(name, 0) >= n for name, n in refused.consumes.items())
        assert (offer.name in found) == is_larger, (refused.name, offer.name, rest)
    assert not any(offer.kind == "device" and offer.name in found for offer in published)
    # A created partition disproves the refusal.
    refusals.remove_disproved(refused)
    assert tainted(refusals, device, published) == set()


def test_refusal_ends_after_a_removal_or_a_growing_time() -> None:
    vir02 = [
        model.partition("310P", "vir02", place.placements[0])
        for place in model.profiles("310P")
        if place.name == "vir02"
    ]
    before = model.device("310P", vir02)
    (refused,) = [each for each in offers(before, True) if each.name == "npu-0-vir01-4"]
    clock = Clock()
    refusals = Refusals(clock)
    assert refusals.add(refused, before) == FIRST_SECONDS
    assert "npu-0-vir01-4" in tainted(refusals, before, offers(before, True))
    # A repeated refusal renews the taint, with the same duration as the first one.
    clock.now += FIRST_SECONDS - 1
    assert refusals.add(refused, before) == FIRST_SECONDS
    clock.now += FIRST_SECONDS - 1
    assert "npu-0-vir01-4" in tainted(refusals, before, offers(before, True))
    clock.now += 1
    assert tainted(refusals, before, offers(before, True)) == set()
    waited = []
    for _time in range(6):
        waited.append(refusals.add(refused, before))
        clock.now += waited[-1]
    assert waited == [120.0, 240.0, 480.0, LONGEST_SECONDS, LONGEST_SECONDS, LONGEST_SECONDS]
    # A new partition changes nothing. A deleted partition ends the refusal, and the backoff restarts.
    refusals.add(refused, before)
    profile = next(each for each in model.profiles("310P") if each.name == "vir01")
    more = model.device("310P", [*vir02, model.partition("310P", "vir01", profile.placements[6])])
    assert tainted(refusals, more, offers(more, True))
    empty = model.device("310P")
    assert tainted(refusals, empty, offers(empty, True)) == set()
    assert refusals.add(refused, empty) == FIRST_SECONDS


# ---------------------------------------------------------------------- partitions that can be cleared


def record(uid: str, *held: Partition, prepared: bool = True, created: bool = True) -> ClaimRecord:
    devices = [
        DeviceRecord(
            request="r",
            pool="p",
            name=f"npu-0-{each.profile}-{each.placement.start}",
            device_uuid=model.uuid(0),
            kind="partition",
            profile=each.profile,
            profile_id=each.profile_id,
            placement_start=each.placement.start,
            placement_size=each.placement.size,
            partition_uuid=each.uuid if prepared else None,
            created=created,
        )
        for each in held
    ]
    return ClaimRecord(uid, "n", uid, "prepared" if prepared else "preparing", "boot", 0.0, tuple(devices))


@given(st.data())
def test_clearance_destroys_only_idle_partitions_of_the_driver(data: st.DataObject) -> None:
    """Clearing destroys only the driver's own idle partitions that no kubelet has requested."""
    (profile,) = [each for each in model.profiles("310P") if each.name == "vir01"]
    partitions, records, waiting, allowed = [], [], set(), set()
    for place in profile.placements[: data.draw(st.integers(0, 7))]:
        used = (Process(0, "container"),) if data.draw(st.booleans()) else ()
        made = model.partition("310P", "vir01", place, processes=used)
        partitions.append(made)
        whose = data.draw(st.sampled_from(["foreign", "existing", "asked", "waiting", "leftover"]))
        uid = f"c{place.start}"
        if whose == "foreign":
            continue
        records.append(record(uid, made, prepared=whose != "leftover", created=whose != "existing"))
        if whose == "waiting":
            waiting.add(uid)
        if whose in ("waiting", "leftover") and not used:
            allowed.add(uid)
    device = model.device("310P", partitions)
    found = find_removable_partitions({device.uuid: device}, device.uuid, records, waiting)
    assert {each.uid for each in (*found.leftovers, *found.movable)} == allowed
    assert {each.uid for each in found.movable} == allowed & waiting
    moved = {key for each in found.movable for held in each.devices for key in [held.key]}
    assert {each.partition for each in found.destructions} == moved
    assert bool(found) == bool(allowed)
    # Without the device's lock nothing is cleared.
    assert not find_removable_partitions({}, device.uuid, records, waiting)


# ---------------------------------------------------------------------- claims


def test_refusal_error_names_the_taint_and_ends_with_the_next_partition(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        refusing(node, 1)
        error = await prepare(node, claim)
        assert (
            NO_ROOM in error
            and "Look elsewhere." in error
            and "60 s" in error
            and "its claim is then allocated again" in error
        )
        assert node.reports.failures[-1][2].code == "does-not-fit"
        assert node.partitions() == [] and node.store.claims == {} and node.cdi_files() == ()
        await node.scan()
        names = {offer.name for offer in node.inventory.offers.values() if offer.taints}
        assert SMALL in names and NEXT not in names and "gpu-0" not in names
        assert await prepare(node, claim) == ""
        await node.scan()
        assert not any(offer.taints for offer in node.inventory.offers.values())

    run(tmp_path, scenario)


def test_clearance_moves_claims_that_wait_for_their_pods(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        waiting, wanted = claims.allocate("waiting", NEXT), claims.allocate("wanted", SMALL)
        assert (await node.service.prepare_ahead(waiting)).error == ""
        before = [each.instance_id for each in node.gpus.devices()[0].partitions]
        refusing(node, 1)
        assert await prepare(node, wanted) == ""
        made = {each.placement.start: each.instance_id for each in node.gpus.devices()[0].partitions}
        assert set(made) == {0, 1} and made[0] < made[1] and made[1] not in before
        record = node.store.claims[waiting.uid]
        assert record.prepared and record.devices[0].instance_id == made[1]
        assert record.devices[0].partition_uuid in str(node.cdi(waiting.uid))
        assert waiting.uid not in node.service.suspect
        # The kubelet requests the claim: from now on its partition keeps its place.
        assert await prepare(node, waiting) == ""
        other = claims.allocate("other", LARGE)
        refusing(node, 1)
        assert NO_ROOM in await prepare(node, other)
        assert {each.placement.start: each.instance_id for each in node.gpus.devices()[0].partitions} == made

    run(tmp_path, scenario)


def test_clearance_without_success_restores_the_previous_state(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        waiting, wanted = claims.allocate("waiting", NEXT), claims.allocate("wanted", SMALL)
        assert (await node.service.prepare_ahead(waiting)).error == ""
        refusing(node, 2)
        assert NO_ROOM in await prepare(node, wanted)
        assert [each.placement.start for each in node.gpus.devices()[0].partitions] == [1]
        assert await prepare(node, waiting) == ""
        assert await unprepare(node, waiting) == "" and node.partitions() == []

    run(tmp_path, scenario)


def test_clearance_unrestored_claim_is_reported_and_prepared_on_request(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        waiting, wanted = claims.allocate("waiting", NEXT), claims.allocate("wanted", SMALL)
        assert (await node.service.prepare_ahead(waiting)).error == ""
        real, seen = node.backend.create_partition, []

        def failing(*arguments: Any) -> Partition:
            seen.append(arguments)
            if len(seen) in (1, 3):
                raise DoesNotFit(NO_ROOM)
            return real(*arguments)

        node.backend.create_partition = failing
        assert await prepare(node, wanted) == ""
        (failure,) = [each for each in node.reports.failures if each[0].uid == waiting.uid]
        assert failure[1] == "Restore" and waiting.uid in node.service.suspect
        assert [each.placement.start for each in node.gpus.devices()[0].partitions] == [0]
        assert await prepare(node, waiting) == ""
        assert sorted(each.placement.start for each in node.gpus.devices()[0].partitions) == [0, 1]

    run(tmp_path, scenario)


def test_clearance_destroys_leftover_partitions(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        left, wanted = claims.allocate("left", NEXT), claims.allocate("wanted", SMALL)
        # The partition is created, its CDI file is not, and the rollback fails.
        real = node.service.hardware.write_cdi

        def failing(*_arguments: Any, **_options: Any) -> None:
            gpu = node.gpus.devices()[0]
            node.backend.failures["destroy_partition"] = [InUse("A process monitors it", pids=[1])]
            assert len(gpu.partitions) == 1
            raise OSError("no file")

        object.__setattr__(node.service.hardware, "write_cdi", failing)
        assert "no file" in await prepare(node, left)
        object.__setattr__(node.service.hardware, "write_cdi", real)
        (remains,) = node.gpus.devices()[0].partitions
        assert remains.placement.start == 1 and not node.store.claims[left.uid].prepared
        refusing(node, 1)
        assert await prepare(node, wanted) == ""
        assert [each.placement.start for each in node.gpus.devices()[0].partitions] == [0]
        assert left.uid not in node.store.claims

    run(tmp_path, scenario)


def test_restart_during_clearance_creates_the_missing_partition(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        waiting = claims.allocate("waiting", NEXT)
        assert (await node.service.prepare_ahead(waiting)).error == ""
        gpu = node.gpus.devices()[0]
        node.backend.destroy_partition(gpu.uuid, gpu.partitions[0].instance_id)
        plan = plan_restore(node.store.claims[waiting.uid], {gpu.uuid: node.gpus.devices()[0]}, {gpu.uuid})
        assert [each.name for each in plan.partitions_to_create] == [NEXT]
        assert await prepare_all(node, claims.allocate("other", LARGE)) == [""]

    run(tmp_path, scenario)


# ---------------------------------------------------------------------- status in the cluster


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.SETTLE_SECONDS", 0.05)
    return tmp_path_factory.mktemp("r")


def test_refusal_is_reported_on_claim_and_pod_and_taints_the_offer(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        refused = [DoesNotFit(NO_ROOM, hint="Look elsewhere.")]
        scene.backend.failures["create_partition"] = list(refused)
        reference = scene.cluster.allocate("a", SMALL)
        claim = scene.cluster.claims["default", "a"]
        claim["status"]["reservedFor"] = [{"resource": "pods", "name": "pod-a", "uid": "0uid-pod-a"}]
        scene.api.put_claim(claim)
        assert NO_ROOM in await scene.call("NodePrepareResources", "a"), reference
        await scene.until(lambda: reasons(scene, "Pod") and taints(scene).get(SMALL))
        for kind in ("ResourceClaim", "Pod"):
            assert reasons(scene, kind) == {("PrepareFailed", "Warning")}
        assert all("its claim is then allocated again" in each["message"] for each in scene.api.events)
        (taint,) = taints(scene)[SMALL]
        assert (taint["key"], taint["effect"]) == (f"{DRIVER}/{REFUSED}", "NoSchedule")
        assert NEXT not in taints(scene) and "gpu-0" not in taints(scene)
        assert await scene.call("NodePrepareResources", "a") == ""
        scene.driver.request_scan()
        await scene.until(lambda: not taints(scene))

    played(short, scenario)


def test_refusal_before_binding_reschedules_the_pod_at_once(short: Path) -> None:
    from pre_binding_test import AHEAD, has_condition, reserve

    async def scenario(scene: Scene) -> None:
        scene.settings = AHEAD
        scene.api.act_as_controller()
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        scene.backend.failures["create_partition"] = [DoesNotFit(NO_ROOM)]
        reserve(scene, "a", SMALL)
        await scene.until(lambda: has_condition(scene, "a", FAILED_CONDITION))
        await scene.until(lambda: taints(scene).get(SMALL))

    played(short, scenario)
