# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims for slices of Ascend chips from allocation to destruction, beside slices that an administrator makes by hand.

The scheduler, the driver's plans and a model of the silicon play together; nothing is left out but the calls themselves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import chip_model as model
import pytest
from chip_model import CHIPS, Silicon
from dra_driver.claims.allocation import AllocatedDevice, Allocation, ClaimError, OpaqueConfig
from dra_driver.claims.plan import Inventory, plan_prepare, plan_restore, plan_undo
from dra_driver.claims.records import ClaimRecord, ClaimReference
from dra_driver.core.ascend import names
from dra_driver.core.ascend.configs import CONFIG_KINDS, VERSION
from dra_driver.core.ascend.offers import counter_set, offers
from dra_driver.core.model import Device, Offer, OwnedPartition
from hypothesis import given, settings
from hypothesis import strategies as st

POOL, KINDS = "node-1", ["310P", "910B4", "910A", "A3"]


class Scene:
    """One chip, the claims on it, and what the scheduler believes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.silicon = Silicon(kind)
        self.records: dict[str, ClaimRecord] = {}
        self.held: dict[str, Offer] = {}
        self.foreign: set[int] = set()

    @property
    def device(self) -> Device:
        """What a look finds: only what the silicon tells, so that every place is worked out from ids and vGroups."""
        family, rows = CHIPS[self.kind].family, CHIPS[self.kind].rows
        told = [
            (each, group if family.groups else None, 1 if rows[name][0] == 1 else 2)
            for each, (name, group) in self.silicon.slices.items()
        ]
        placed = names.found_placements(family, told)
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
        """What the scheduler could give to a claim for a slice, in its order."""
        left = dict(counter_set(self.device, self.owned).counters)
        published = {each.name: each for each in self.published}
        for held in self.held.values():  # what the scheduler does not find it does not count
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
        """Prepare a claim; one that dies has written its record, and not yet made its slice."""
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
        )
        assert plan.mode_changes == () and len(plan.creates) == 1
        self.records[uid] = plan.record
        (entry,) = plan.creates
        assert entry.placement is not None and entry.profile is not None
        if dies:
            return
        taken = {names.number_of(each) for each in self.silicon.slices}
        number = names.free_number(CHIPS[self.kind].family, entry.placement, taken)
        assert number == entry.placement.start, "what is recorded is what is made"
        made = names.slice_id(0, number)
        assert self.silicon.create(entry.profile, made, names.group_of(entry.placement) or 0)
        done = replace(entry, partition_uuid=names.slice_uuid(device.uuid, made), instance_id=made)
        self.records[uid] = plan.record.as_prepared([done], "boot")

    def unprepare(self, uid: str) -> None:
        device = self.device
        for each in plan_undo(self.records.pop(uid), {device.uuid: device}, {}).destructions:
            assert each.instance_id not in self.foreign
            del self.silicon.slices[each.instance_id]
        del self.held[uid]

    def cut_by_hand(self, template: str) -> None:
        """What the tool does when it is given neither an id nor a vGroup: the first of both, pairs first."""
        made = min(set(range(names.slice_id(0, 0), names.slice_id(0, 15) + 1)) - set(self.silicon.slices))
        groups = range(CHIPS[self.kind].family.groups or 1)
        busy = {group for _name, group in self.silicon.slices.values()}
        for group in sorted(groups, key=lambda each: (each not in busy, each)):
            if self.silicon.create(template, made, group):
                self.foreign.add(made)
                return

    def check(self) -> None:
        """Every prepared claim has its slice, and nobody else's slice has gone."""
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
def test_claims_come_and_go_beside_slices_made_by_hand(kind: str, data: st.DataObject) -> None:
    scene = Scene(kind)
    templates = sorted(CHIPS[kind].rows)
    for step in range(data.draw(st.integers(1, 14))):
        what = data.draw(st.sampled_from(["claim", "claim", "claim", "death", "end", "hand", "unhand"]))
        if what in ("claim", "death"):
            fitting = scene.fitting()
            if fitting:
                scene.prepare(f"c{step}", data.draw(st.sampled_from(fitting)), dies=what == "death")
                if what == "death":
                    scene.unprepare(f"c{step}")  # as a start does with what was half done
        elif what == "end" and scene.records:
            scene.unprepare(data.draw(st.sampled_from(sorted(scene.records))))
        elif what == "hand":
            scene.cut_by_hand(data.draw(st.sampled_from(templates)))
        elif what == "unhand" and scene.foreign:
            gone = data.draw(st.sampled_from(sorted(scene.foreign)))
            scene.foreign.remove(gone)
            del scene.silicon.slices[gone]
        scene.check()
    for uid in sorted(scene.records):
        scene.unprepare(uid)
    assert set(scene.silicon.slices) == scene.foreign


@given(data=st.data())
@settings(max_examples=40)
def test_a_310p_is_filled_with_any_set_in_any_order(data: st.DataObject) -> None:
    counts = dict(data.draw(st.sampled_from(model.multisets("310P"))))
    scene = Scene("310P")
    for number, template in enumerate(data.draw(st.permutations([*Counter(counts).elements()]))):
        scene.prepare(f"c{number}", scene.fitting(template)[0])
        scene.check()
    assert Counter(name for name, _group in scene.silicon.slices.values()) == counts
    for template in CHIPS["310P"].rows:
        more = {**counts, template: counts.get(template, 0) + 1}
        assert bool(scene.fitting(template)) == model.can_exist("310P", more)


def test_a_configuration_names_the_template_and_another_one_is_refused() -> None:
    def asks_for(template: str) -> tuple[OpaqueConfig, ...]:
        return (OpaqueConfig("FromClaim", (), {"apiVersion": VERSION, "kind": "VnpuConfig", "template": template}),)

    scene = Scene("310P")
    (offer, *_others) = scene.fitting("vir02")
    scene.prepare("same", offer, configs=asks_for("vir02"))
    (other, *_others) = scene.fitting("vir01")
    with pytest.raises(ClaimError, match=f"VnpuConfig asks for vir02, and the request was given {other.name}") as found:
        scene.prepare("other", other, configs=asks_for("vir02"))
    assert found.value.code == "config-refused" and "other" not in scene.records
    with pytest.raises(ClaimError, match="the name of a template"):
        scene.prepare("wrong", other, configs=asks_for("vir02/../"))
