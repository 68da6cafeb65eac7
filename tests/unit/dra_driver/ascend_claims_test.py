# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims for vNPUs of Ascend chips, from allocation to destruction, next to vNPUs that an administrator creates.

The test combines a scheduler, the driver's plans, and a model of the silicon. It leaves out only the vendor calls.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import chip_model as model
import pytest
from chip_model import CHIPS, Silicon
from dra_driver.claims.allocation import AllocatedDevice, Allocation, ClaimError, OpaqueConfig
from dra_driver.claims.pending_cleanups import cleanups_in, cleanups_to_meta
from dra_driver.claims.plan import Inventory, plan_cleanup, plan_prepare, plan_restore, plan_undo, with_chosen_ids
from dra_driver.claims.store.records import ClaimRecord, ClaimReference, record_of_document
from dra_driver.core.errors import InUse
from dra_driver.core.model import Device, Offer, OwnedPartition, Profile
from dra_driver.core.vendors.ascend import names, slices
from dra_driver.core.vendors.ascend.configs import CONFIG_KINDS, VERSION
from dra_driver.core.vendors.ascend.offers import counter_set, offers
from hypothesis import given, settings
from hypothesis import strategies as st

POOL, KINDS = "node-1", ["310P", "910B4", "910A", "A3"]


class Scene:
    """One chip, the claims on it, and the scheduler's view of it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.silicon = Silicon(kind)
        self.records: dict[str, ClaimRecord] = {}
        self.held: dict[str, Offer] = {}
        self.foreign: set[int] = set()

    @property
    def device(self) -> Device:
        """Return the device as a scan finds it, with placements computed from the reported ids and vGroups only."""
        family, rows = CHIPS[self.kind].family, CHIPS[self.kind].rows
        reported = [
            (each, group if family.groups else None, 1 if rows[name][0] == 1 else 2)
            for each, (name, group) in self.silicon.slices.items()
        ]
        placed = names.found_placements(family, reported)
        return model.device(
            self.kind,
            [
                model.partition(
                    self.kind, name, placed[each], instance_id=each, uuid=names.slice_uuid(model.uuid(0), each)
                )
                for each, (name, _group) in sorted(self.silicon.slices.items())
            ],
        )

    @property
    def owned(self) -> set[OwnedPartition]:
        return {each.key for record in self.records.values() for each in record.devices if each.created and each.key}

    @property
    def published(self) -> tuple[Offer, ...]:
        return offers(self.device, True, self.owned)

    def fitting(self, template: str | None = None) -> list[Offer]:
        """Return the offers that fit a claim for a vNPU, in the scheduler's order."""
        left = dict(counter_set(self.device, self.owned).counters)
        published = {each.name: each for each in self.published}
        for held in self.held.values():  # the scheduler counts only published devices
            assert published.get(held.name) == held
            for name, amount in published[held.name].consumes.items():
                left[name] -= amount
        assert min(left.values()) >= 0
        return [
            offer
            for offer in self.published
            if offer.dynamic
            and offer.name not in {each.name for each in self.held.values()}
            and template in (None, offer.profile)
            and all(amount <= left[name] for name, amount in offer.consumes.items())
        ]

    def prepare(self, uid: str, offer: Offer, *, dies: bool = False, configs: tuple[OpaqueConfig, ...] = ()) -> None:
        """Prepare a claim. With ``dies`` the driver writes the record but does not create the vNPU."""
        self.held[uid] = offer
        device = self.device
        plan = plan_prepare(
            Allocation(ClaimReference("team", uid, uid), (AllocatedDevice("r", POOL, offer.name, "", False, configs),)),
            Inventory(POOL, {each.name: each for each in self.published}, frozenset({device.uuid})),
            {device.uuid: device},
            self.records,
            config_kinds=CONFIG_KINDS,
            cdi_kind=names.CDI_KIND,
            boot_id="boot",
            now=0.0,
            choose_id=slices.choose_id,
        )
        assert plan.mode_changes == () and len(plan.partitions_to_create) == 1
        self.records[uid] = plan.record
        (entry,) = plan.partitions_to_create
        assert entry.placement is not None and entry.profile is not None
        if dies:
            return
        made = entry.instance_id
        assert made == names.slice_id(0, entry.placement.start), "the record equals the created partition"
        assert self.silicon.create(entry.profile, made, names.group_of(entry.placement) or 0)
        done = replace(entry, partition_uuid=names.slice_uuid(device.uuid, made), instance_id=made)
        self.records[uid] = plan.record.as_prepared([done], "boot")

    def unprepare(self, uid: str) -> None:
        device = self.device
        for each in plan_undo(self.records.pop(uid), {device.uuid: device}, {}).destructions:
            assert each.instance_id not in self.foreign
            del self.silicon.slices[each.instance_id]
        del self.held[uid]

    def recover(self) -> None:
        """Unprepare the half-prepared claims, as the driver does at its start."""
        for uid in [record.uid for record in self.records.values() if not record.prepared]:
            self.unprepare(uid)

    def cut_by_hand(self, template: str) -> None:
        """Create a vNPU as the vendor tool does without an id and a vGroup: the lowest free id, in a used vGroup first.

        Ids that the driver has recorded are skipped: a vNPU with such an id cannot be distinguished from the claim's.
        """
        written = {each.instance_id for record in self.records.values() for each in record.devices}
        made = min(set(range(names.slice_id(0, 0), names.slice_id(0, 15) + 1)) - set(self.silicon.slices) - written)
        groups = range(CHIPS[self.kind].family.groups or 1)
        busy = {group for _name, group in self.silicon.slices.values()}
        for group in sorted(groups, key=lambda each: (each not in busy, each)):
            if self.silicon.create(template, made, group):
                self.foreign.add(made)
                return

    def check(self) -> None:
        """Assert that each prepared claim has its vNPU, and that no foreign vNPU was destroyed."""
        found = self.device
        for record in self.records.values():
            if record.prepared:
                restore = plan_restore(record, {found.uuid: found}, {found.uuid})
                assert restore.record.devices == record.devices
        assert self.foreign <= set(self.silicon.slices)
        assert len({offer.name for offer in self.published}) == len(self.published)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=25)
def test_claims_and_manual_vnpus_do_not_interfere(kind: str, data: st.DataObject) -> None:
    scene = Scene(kind)
    templates = sorted(CHIPS[kind].rows)
    for step in range(data.draw(st.integers(1, 14))):
        what = data.draw(st.sampled_from(["claim", "claim", "claim", "death", "end", "hand", "unhand"]))
        if what in ("claim", "death"):
            fitting = scene.fitting()
            if fitting:
                scene.prepare(f"c{step}", data.draw(st.sampled_from(fitting)), dies=what == "death")
                if what == "death":
                    for _cut in range(data.draw(st.integers(0, 2))):  # before the driver restarts
                        scene.cut_by_hand(data.draw(st.sampled_from(templates)))
                    scene.recover()
        elif what == "end" and scene.records:
            scene.unprepare(data.draw(st.sampled_from(sorted(scene.records))))
        elif what == "hand":
            scene.cut_by_hand(data.draw(st.sampled_from(templates)))
        elif what == "unhand" and scene.foreign:
            removed = data.draw(st.sampled_from(sorted(scene.foreign)))
            scene.foreign.remove(removed)
            del scene.silicon.slices[removed]
        scene.check()
    for uid in sorted(scene.records):
        scene.unprepare(uid)
    assert set(scene.silicon.slices) == scene.foreign


@given(data=st.data())
@settings(max_examples=40)
def test_chip_310p_is_filled_with_any_set_in_any_order(data: st.DataObject) -> None:
    counts = dict(data.draw(st.sampled_from(model.multisets("310P"))))
    scene = Scene("310P")
    for number, template in enumerate(data.draw(st.permutations([*Counter(counts).elements()]))):
        scene.prepare(f"c{number}", scene.fitting(template)[0])
        scene.check()
    assert Counter(name for name, _group in scene.silicon.slices.values()) == counts
    for template in CHIPS["310P"].rows:
        more = {**counts, template: counts.get(template, 0) + 1}
        assert bool(scene.fitting(template)) == model.can_exist("310P", more)


def offer_at(scene: Scene, template: str, start: int) -> Offer:
    (found,) = (
        each for each in scene.fitting(template) if each.placement is not None and each.placement.start == start
    )
    return found


def destroyed(scene: Scene, record: ClaimRecord) -> list[int]:
    """Return the ids of the vNPUs that undoing a claim destroys."""
    device = scene.device
    return [each.instance_id for each in plan_undo(record, {device.uuid: device}, {}).destructions]


def test_undo_keeps_a_vnpu_created_after_the_driver_died() -> None:
    """The driver dies before it creates the vNPU, and another tool creates the same template in the same vGroup: it is kept."""
    scene = Scene("310P")
    scene.prepare("c", offer_at(scene, "vir02", 2), dies=True)
    (held,) = scene.records["c"].devices
    assert (held.instance_id, held.partition_uuid) == (102, None)
    assert scene.silicon.create("vir02", 100, 1)
    (foreign,) = scene.device.partitions
    assert foreign.key == held.key and not held.describes(foreign)
    assert destroyed(scene, scene.records["c"]) == []
    # A vNPU with the recorded id is destroyed.
    del scene.silicon.slices[100]
    assert scene.silicon.create("vir02", 102, 1)
    assert destroyed(scene, scene.records["c"]) == [102]
    # Earlier releases did not record the id: only the place identifies the vNPU.
    before = replace(scene.records["c"], devices=(replace(held, instance_id=None),))
    assert destroyed(scene, before) == [102]


def test_undo_keeps_a_vnpu_recreated_by_an_administrator() -> None:
    scene = Scene("310P")
    scene.prepare("c", offer_at(scene, "vir02", 2))
    del scene.silicon.slices[102]
    assert scene.silicon.create("vir02", 100, 1)
    record, device = scene.records["c"], scene.device
    assert destroyed(scene, record) == []
    with pytest.raises(InUse, match="which this driver did not make"):
        plan_restore(record, {device.uuid: device}, {device.uuid}, slices.choose_id)


def test_restore_with_an_id_in_use_records_a_different_id_first() -> None:
    scene = Scene("310P")
    scene.prepare("c", offer_at(scene, "vir02", 2))
    del scene.silicon.slices[102]
    assert scene.silicon.create("vir01", 102, 3)
    record, device = scene.records["c"], scene.device
    planned = plan_restore(record, {device.uuid: device}, {device.uuid}, slices.choose_id).record
    (entry,) = planned.devices
    assert (entry.instance_id, entry.partition_uuid) == (107, None)
    (written,) = with_chosen_ids(record, planned).devices
    assert written == replace(record.devices[0], instance_id=107)
    assert scene.silicon.create("vir02", 107, 1)
    assert destroyed(scene, with_chosen_ids(record, planned)) == [107]
    assert destroyed(scene, record) == []


def test_choose_id_two_vnpus_with_ids_in_use_get_distinct_ids() -> None:
    scene = Scene("310P")
    device = scene.device
    places = [place for place in profile_of(device, "vir01").placements if place.start in (2, 3)]
    taken: list[int] = [102, 103]
    for place in places:
        taken.append(slices.choose_id(device, place, taken))
    assert taken == [102, 103, 107, 106]
    with pytest.raises(InUse, match="No ID is free for a vNPU at 2:1"):
        slices.choose_id(device, places[0], range(100, 108))


def profile_of(device: Device, template: str) -> Profile:
    found = device.find_profile(template)
    assert found is not None
    return found


def test_pending_cleanup_keeps_a_vnpu_created_by_another_tool() -> None:
    """A chip does not answer while its claim ends, and another tool replaces the vNPU: pending cleanup keeps the new one."""
    scene = Scene("310P")
    scene.prepare("c", offer_at(scene, "vir02", 2))
    (cleanup,) = plan_undo(scene.records["c"], {}, {}, (scene.device.uuid,)).cleanups
    kept = cleanups_in(cleanups_to_meta([cleanup], None), None)
    assert kept == (cleanup,) and kept[0].instance_id == 102
    assert [each.instance_id for each in plan_cleanup(scene.device, kept, {}).destructions] == [102]
    del scene.silicon.slices[102]
    assert scene.silicon.create("vir02", 100, 1)
    assert plan_cleanup(scene.device, kept, {}).destructions == ()
    # Earlier releases recorded a boot id there, and identified their pending cleanup by place only.
    previous = cleanups_in({cleanup.key: "5a3b71c0-96f6-4c1e-8f0e-2f1d9f3a7b11"}, None)
    assert previous == (cleanup,) and previous[0].instance_id is None
    assert [each.instance_id for each in plan_cleanup(scene.device, previous, {}).destructions] == [100]


def test_record_with_an_id_before_its_vnpu_is_read_by_the_previous_release() -> None:
    """The previous release reads a record with an id, because version and fields are the same."""
    scene = Scene("310P")
    scene.prepare("c", offer_at(scene, "vir02", 2), dies=True)
    document = json.loads(scene.records["c"].document)
    assert document["version"] == 1 and document["devices"][0]["instance_id"] == 102
    assert record_of_document(scene.records["c"].document) == scene.records["c"]


def test_config_with_a_different_template_is_rejected() -> None:
    def asks_for(template: str) -> tuple[OpaqueConfig, ...]:
        return (OpaqueConfig("FromClaim", (), {"apiVersion": VERSION, "kind": "VnpuConfig", "template": template}),)

    scene = Scene("310P")
    (offer, *_others) = scene.fitting("vir02")
    scene.prepare("same", offer, configs=asks_for("vir02"))
    (other, *_others) = scene.fitting("vir01")
    with pytest.raises(
        ClaimError, match=f"VnpuConfig requires the profile vir02, but the request has {other.name}"
    ) as found:
        scene.prepare("other", other, configs=asks_for("vir02"))
    assert found.value.code == "config-refused" and "other" not in scene.records
    with pytest.raises(ClaimError, match="the name of a template"):
        scene.prepare("wrong", other, configs=asks_for("vir02/../"))
