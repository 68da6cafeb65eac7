# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims for a group of whole devices: all members or none, from the locks to the metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from backend_model import DEFAULT_KNOBS, DRIVER, ModelBackend, ModelGpus
from claim_settings_test import config, settings
from claim_steps import prepare, prepare_all, run, unprepare
from dra_driver.claims.claim_statuses import prepared_entries
from dra_driver.claims.startup_recovery import corrected_content, pids_using
from dra_driver.claims.store.records import DOCUMENT_VERSION, ClaimRecord, record_of_document
from dra_driver.commands.claims import device_of
from dra_driver.core.dra.composite_devices import compose
from dra_driver.core.dra.resource_slices import COMBINED
from dra_driver.core.health import tracker as health_tracker
from dra_driver.core.health.conditions import Severity
from dra_driver.core.health.tracker import Moment
from dra_driver.core.model import GROUP, AttributeValue, Device, Fault, Finding, Offer
from dra_driver.core.store.prepared_claims import prepared_claims, prepared_partitions
from dra_driver.inventory import Survey
from dra_driver.kubelet.pod_resources import ContainerDevice
from dra_driver.metrics import Metrics, Stopwatch
from dra_driver.monitoring.view import assignments, holdings
from dra_driver.publish.api_compatibility import (
    COUNTERS,
    SHARED_COUNTERS,
    TAINTS,
    Content,
    fit_to_server,
    needed_features,
)
from dra_driver.publish.publish_plan import Identity, probe_slice
from machine_model import POOL, Claims, Node

PAIR, OTHER = "pair-0", "pair-2"
SMALL = "gpu-1-mig-1g10gb-19-0"
A, B, C, D = ModelGpus.uuids(4)


class Pairs:
    """A composer that pairs adjacent GPUs by index, if both exist."""

    def groups(self, devices: Sequence[Device]) -> tuple[Offer, ...]:
        by_index = {device.index: device for device in devices}
        return tuple(
            self.pair(by_index[first], by_index[first + 1])
            for first in (0, 2)
            if first in by_index and first + 1 in by_index
        )

    def pair(self, *members: Device) -> Offer:
        uuids = tuple(each.uuid for each in members)
        name = f"pair-{members[0].index}"
        described = self.attributes_of("pair", members)
        return Offer(name, GROUP, uuids[0], False, "pair", None, None, None, described, {}, members=uuids)

    def attributes_of(self, kind: str, devices: Sequence[Device]) -> Mapping[str, AttributeValue]:
        return {"type": "gpu-group", "group": kind, "indices": ",".join(str(each.index) for each in devices)}


@pytest.fixture(autouse=True)
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelBackend, "grouping", Pairs())


def nodes_in(node: Node, uid: str) -> list[set[str]]:
    """Return the device nodes of the GPUs in each CDI device of a claim."""
    return [
        {each["path"] for each in device["containerEdits"]["deviceNodes"] if each["path"][-1].isdigit()}
        for device in node.cdi(uid)["devices"]
    ]


def test_composite_claim_has_all_members_in_one_device(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", PAIR)
        assert await prepare(node, claim) == ""
        (held,) = node.store.claims[claim.uid].devices
        assert (held.kind, held.profile, held.members, held.device_uuid) == (GROUP, "pair", (A, B), A)
        assert held.cdi_id == f"k8s.gpu.nvidia.com/claim={claim.uid}-{PAIR}"
        assert node.store.claims[claim.uid].device_uuids == tuple(sorted((A, B)))
        (nodes,) = nodes_in(node, claim.uid)
        assert {"/dev/nvidia0", "/dev/nvidia1"} <= nodes and "/dev/nvidia2" not in nodes
        text = node.system.read_text(f"{node.service.hardware.files.path(claim.uid)}/r0.json")
        (reported,) = json.loads(text.splitlines()[0])["requests"][0]["devices"]
        assert reported["name"] == PAIR and reported["attributes"]["indices"] == {"string": "0,1"}
        assert (await prepare(node, claim), len(node.cdi_files())) == ("", 1), "asked again it stands"
        assert await unprepare(node, claim) == "" and node.store.claims == {} and not node.cdi_files()

    run(tmp_path, scenario, count=4)


@pytest.mark.parametrize("dynamic", [True, False])
def test_composite_member_is_allocated_once(tmp_path: Path, dynamic: bool) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        pair = claims.allocate("pair", PAIR)
        taken = [claims.allocate(f"t{n}", name) for n, name in enumerate(("gpu-1", *([SMALL] if dynamic else [])))]
        for other in taken:
            assert await prepare(node, other) == ""
            error = await prepare(node, pair)
            assert f"Device {PAIR} of claim default/pair is still prepared for claim" in error, error
            assert await unprepare(node, other) == ""
        assert await prepare(node, pair) == ""
        for other in (*taken, claims.allocate("first", "gpu-0"), claims.allocate("again", PAIR)):
            assert "is still prepared for claim default/pair" in await prepare(node, other)
        assert await prepare(node, claims.allocate("beside", OTHER)) == ""
        error = await prepare(node, claims.allocate("both", "gpu-3", {"device": OTHER, "request": "x"}))
        assert "is still prepared" in error

    run(tmp_path, scenario, count=4, **({} if dynamic else {"rules": ()}))


def test_composite_claim_with_a_group_and_its_member_is_rejected(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        error = await prepare(node, claims.allocate("both", PAIR, "gpu-1"))
        assert "holds gpu-1 and pair-0, which overlap" in error and node.store.claims == {}
        watching = {"device": PAIR, "adminAccess": True}
        assert await prepare_all(node, claims.allocate("a", PAIR), claims.allocate("b", watching)) == ["", ""]

    run(tmp_path, scenario, count=4)


def test_composite_member_with_partitions_is_rejected(tmp_path: Path) -> None:
    """A partition was created after the scheduler's decision: it stays, and the claim is refused by name."""

    async def scenario(node: Node, claims: Claims) -> None:
        node.backend.set_partitioning(B, True)
        device = node.backend.device(B)
        profile = device.profile(19)
        node.backend.create_partition(B, 19, profile.placements[0])
        error = await prepare(node, claims.allocate("a", PAIR))
        assert (
            "pair-0 cannot be prepared as a whole device" in error
            and "1g.10gb at 0:1" in error
            and node.store.claims == {}
        )
        await node.scan()
        assert PAIR not in node.inventory.offers and OTHER in node.inventory.offers
        assert node.survey is not None and node.survey.left_out == {PAIR: f"{B} is not offered whole"}

    run(tmp_path, scenario, count=4)


def test_composite_prepare_disables_partitioning_on_every_member(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        for uuid in (A, B):
            node.backend.set_partitioning(uuid, True)
        assert await prepare(node, claims.allocate("a", PAIR)) == ""
        assert [each.partitioning.enabled for each in node.gpus.devices()[:2]] == [False, False]

    run(tmp_path, scenario, count=4)


def test_composite_settings_apply_to_every_member_until_the_claim_ends(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", PAIR, config=[settings(powerLimit=300, graphicsClocks={"maximum": 900})])
        assert await prepare(node, claim) == ""
        with node.gpus.state() as state:
            limits = [state[uuid]["knobs"]["powerLimit"] for uuid in (A, B, C)]
        assert limits == [300, 300, DEFAULT_KNOBS["powerLimit"]]
        assert await unprepare(node, claim) == ""
        with node.gpus.state() as state:
            assert all(state[uuid]["knobs"] == DEFAULT_KNOBS for uuid in (A, B))
        sharing = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {"strategy": "MPS"}}
        error = await prepare(node, claims.allocate("b", PAIR, config=[config(sharing)]))
        assert "stands for several devices" in error and node.store.claims == {}
        error = await prepare(node, claims.allocate("c", PAIR, config=[settings(powerLimit=1)]))
        assert f"cannot set device {PAIR} ({A})" in error

    run(tmp_path, scenario, count=4)


def test_composite_restarted_driver_restores_its_groups(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", PAIR)
        assert await prepare(node, claim) == ""
        node.service.hardware.remove_cdi(claim.uid)
        (record,) = node.store.claims.values()
        for boot in ("boot-1", "boot-2"):
            again = Node(tmp_path, claims, count=4, boot_id=boot)
            await again.start()
            (found,) = again.store.claims.values()
            assert found.devices == record.devices and found.boot_id == boot
            (nodes,) = nodes_in(again, claim.uid)
            assert {"/dev/nvidia0", "/dev/nvidia1"} <= nodes
            assert await prepare(again, claim) == ""
            assert "is still prepared" in await prepare(again, claims.allocate("b", SMALL))
            again.close()

    run(tmp_path, scenario, count=4)


def test_composite_prepare_interrupted_is_undone(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def reached(stage: str) -> None:
        if stage == "recorded-preparing":
            raise Killed

    async def main() -> None:
        claims = Claims()
        node = Node(tmp_path, claims, count=4, reached=reached)
        await node.start()
        with pytest.raises(Killed):
            claim = claims.allocate("a", PAIR, config=[settings(powerLimit=300)])
            await node.service._prepare(claim, Stopwatch(Metrics(), "prepare"))
        node.close()
        again = Node(tmp_path, claims, count=4)
        await again.start()
        assert again.store.claims == {} and await prepare(again, claims.allocate("b", "gpu-1")) == ""
        again.close()

    asyncio.run(main())


def test_composite_removed_member_fails_the_claim(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", PAIR)
        assert await prepare(node, claim) == ""
        record = node.store.claims[claim.uid]
        node.service.suspect.add(claim.uid)
        whole = node.gpus.devices
        node.gpus.devices = lambda: tuple(each for each in whole() if each.uuid != B)
        assert f"device {B} is not on this node" in await prepare(node, claim)
        await node.scan()
        assert PAIR not in node.inventory.offers
        assert "which this node no longer has" in await prepare(node, claims.allocate("b", PAIR))
        assert await unprepare(node, claim) == "" and record.uid not in node.store.claims

    run(tmp_path, scenario, count=4)


def test_composite_faulty_member_taints_the_group(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        node.backend.faults[1] = Fault("no-answer", "It does not answer.")
        await node.scan()
        survey = node.survey
        assert survey is not None
        faults = {
            finding.uuid: health_tracker.apply_scan((), finding, Moment(1.0, "boot-1", 1.0))
            for finding in survey.findings
            if finding.fault
        }
        effects = {Severity.DEGRADED: "NoSchedule"}
        tainted = {
            offer.name: [taint.key for taint in offer.taints]
            for offer in health_tracker.tainted(DRIVER, survey.offers, survey.devices, faults, effects)
            if offer.kind in (GROUP, "device")
        }
        sick = [f"{DRIVER}/no-answer"]
        assert tainted == {"gpu-0": [], "gpu-1": sick, "gpu-2": [], "gpu-3": [], PAIR: sick, OTHER: []}
        pair = node.inventory.offers[PAIR]
        assert [each.sign.cause for each in health_tracker.faults_of_offer(pair, survey.devices, faults)] == [
            "no-answer"
        ]
        error = await prepare(node, claims.allocate("a", PAIR))
        assert f"device {B} is faulty" in error and A not in error
        assert await prepare(node, claims.allocate("b", "gpu-0")) == ""

    run(tmp_path, scenario, count=4)


def test_composite_monitoring_names_every_member(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", PAIR)
        assert await prepare(node, claim) == ""
        record = node.store.claims[claim.uid]
        held = holdings([record])
        assert [(each.device.name, each.uuid, each.device_uuid) for each in held] == [(PAIR, A, A), (PAIR, B, B)]
        container = ContainerDevice("default", "p", "c", "a", DRIVER, POOL, PAIR, "")
        assert [each.uuid for _user, each in assignments(DRIVER, [record], [container], {})] == [A, B]
        (entry,) = prepared_entries(DRIVER, record, node.inventory.offers, node.store.identity)
        assert entry["device"] == PAIR and entry["data"]["uuids"] == [A, B] and entry["data"]["indices"] == "0,1"
        assert "uuid" not in entry["data"]
        assert device_of(record.devices[0])["members"] == [A, B]
        with node.gpus.state() as state:
            state[B]["pids"] = [4711]
        assert pids_using(record, {each.uuid: each for each in node.gpus.devices()}) == (4711,)
        assert record.kind == GROUP
        # Modules and the layout read it from the store, device by device.
        (read,) = prepared_claims(str(tmp_path / "state" / "state.db"))
        assert [(each.name, each.device_uuid, each.kind) for each in read.devices] == [
            (PAIR, A, GROUP),
            (PAIR, B, GROUP),
        ]
        assert [each.device_uuid for each in prepared_partitions([read])] == [A, B]

    run(tmp_path, scenario, count=4)


def test_composite_record_is_rejected_by_an_older_release(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", PAIR)
        plain = claims.allocate("b", "gpu-2")
        assert await prepare_all(node, claim, plain) == ["", ""]
        record, other = (node.store.claims[each.uid] for each in (claim, plain))
        assert json.loads(record.document)["version"] == 5 < DOCUMENT_VERSION
        assert json.loads(other.document)["version"] == 1 and "members" not in other.document
        assert record_of_document(record.document) == record
        for wrong in ("gpu", [1], {}):
            document = json.loads(record.document)
            document["devices"][0]["members"] = wrong
            with pytest.raises(ValueError, match="members"):
                record_of_document(json.dumps(document))
        # A restored copy of the store lacks the claim, but its CDI file names it: an old record with a member is dropped.
        (member,) = (replace(other.devices[0], name="gpu-1", device_uuid=B),)
        stale = ClaimRecord("u2", "default", "old", "prepared", "boot-1", 0.0, (member,))
        assert corrected_content({"u2": stale}, [record], "boot-1") == {record.uid: record}

    run(tmp_path, scenario, count=4)


# ---------------------------------------------------------------------- features of the API server


def content(node: Node) -> Content:
    found: Survey | None = node.survey
    assert found is not None
    return Content(found.offers, found.counter_sets)


@pytest.mark.parametrize("dynamic", [True, False])
def test_composite_server_without_shared_counters_gets_no_groups(tmp_path: Path, dynamic: bool) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        whole = content(node)
        assert {PAIR, OTHER} < {offer.name for offer in whole.offers} and fit_to_server(whole, ()) == (whole, ())
        # Before 1.35 counters are in the slices of their devices, and no counter set is shared.
        old, (reported,) = fit_to_server(whole, (), COMBINED)
        assert reported.feature == SHARED_COUNTERS and reported.names == (OTHER, PAIR) and "1.35" in reported.describe()
        node.backend.grouping = None
        await node.scan()
        assert old == content(node)
        # Where the server drops counters, single devices remain, and nothing that overlaps them.
        few, withheld = fit_to_server(whole, {COUNTERS})
        assert [offer.name for offer in few.offers] == [f"gpu-{n}" for n in range(4)] and few.counter_sets == ()
        assert {PAIR, OTHER} <= set(withheld[0].names) and not any(needed_features(offer) for offer in few.offers)

    run(tmp_path, scenario, count=4, **({} if dynamic else {"rules": ()}))


def test_composite_probe_has_counters_and_no_group(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        for layout, counted in (("separate", True), (COMBINED, False)):
            body = probe_slice(Identity(DRIVER, POOL, POOL), content(node), layout, {"uid": "u"})
            names = [device["name"] for device in body["spec"]["devices"]] if body else []
            assert names == (["gpu-0"] if counted else [])

    run(tmp_path, scenario, count=4, rules=())


def test_composite_tainted_group_is_withheld_if_the_server_drops_taints(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        node.backend.faults[1] = Fault("no-answer", "It does not answer.")
        await node.scan()
        assert node.survey is not None
        finding: Finding = node.survey.findings[1]
        faults = {B: health_tracker.apply_scan((), finding, Moment(1.0, "b", 1.0))}
        offers = health_tracker.tainted(DRIVER, node.survey.offers, node.survey.devices, faults)
        kept, _withheld = fit_to_server(Content(offers, node.survey.counter_sets), {TAINTS})
        assert {"gpu-1", PAIR}.isdisjoint(offer.name for offer in kept.offers)

    run(tmp_path, scenario, count=4, rules=())


def test_composite_groups_without_offers_are_left_out(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        assert node.survey is not None
        lone = compose((), (), Pairs().groups(node.gpus.devices()))
        assert lone.offers == () and set(lone.left_out) == {PAIR, OTHER}

    run(tmp_path, scenario, count=4)
