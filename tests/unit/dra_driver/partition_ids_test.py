# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A claim for a partition with a number instead of a place: the number is selected at planning time, and is in the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numbered_model as model
import pytest
from dra_driver.claims.allocation import AllocatedDevice, Allocation, ClaimError
from dra_driver.claims.plan import Inventory, PreparePlan, plan_prepare, plan_restore, plan_undo
from dra_driver.claims.store.records import ClaimRecord, ClaimReference
from dra_driver.core.errors import InUse
from dra_driver.core.health.conditions import Severity, Sign
from dra_driver.core.health.tracker import TrackedFault
from dra_driver.core.model import PARTITION, Device, Offer, Placement
from hypothesis import given
from hypothesis import strategies as st

POOL = "node-1"


def offer(name: str, ordinal: int, **changes: Any) -> Offer:
    facts: dict[str, Any] = {
        "name": f"dev-0-{name}-{ordinal}",
        "kind": PARTITION,
        "device_uuid": model.UUID,
        "dynamic": True,
        "profile": name,
        "profile_id": model.IDS[name],
        "placement": Placement(ordinal, 0),
        "partition_uuid": None,
        "attributes": {},
        "capacities": {},
    }
    facts.update(changes)
    return Offer(**facts)


OFFERS: Mapping[str, Offer] = {
    each.name: each for name in model.TAKES for ordinal in range(4) for each in [offer(name, ordinal)]
}


def plan(
    uid: str, *names: str, device: Device, records: Mapping[str, ClaimRecord], admin: bool = False, **offers: Offer
) -> PreparePlan:
    allocated = tuple(AllocatedDevice(f"r{at}", POOL, name, "", admin, ()) for at, name in enumerate(names))
    return plan_prepare(
        Allocation(ClaimReference("team", uid, uid), allocated),
        Inventory(POOL, {**OFFERS, **{each.name: each for each in offers.values()}}, frozenset({model.UUID})),
        {model.UUID: device},
        records,
        config_kinds=(),
        cdi_kind="k8s.example.com/claim",
        boot_id="boot",
        now=1.0,
    )


def numbers(plan: PreparePlan) -> list[int | None]:
    return [each.placement_start for each in plan.record.devices]


def test_plan_chooses_the_lowest_free_number() -> None:
    device = model.device([("quarter", 0), ("half", 2)])
    first = plan("a", "dev-0-quarter-2", "dev-0-quarter-3", device=device, records={})
    assert numbers(first) == [1, 3]
    assert [each.name for each in first.record.devices] == ["dev-0-quarter-2", "dev-0-quarter-3"]
    assert all(each.created and each.placement_size == 0 for each in first.record.devices)
    assert first.mode_changes == () == plan("c", "dev-0-half-0", device=model.device(), records={}).mode_changes
    second = plan("b", "dev-0-quarter-1", device=device, records={"a": first.record})
    assert numbers(second) == [4], "what a record has is taken before its partition is there"


@given(st.data())
def test_numbers_are_used_by_one_partition_at_a_time(data: st.DataObject) -> None:
    """Claims start and end: each existing partition has the number in its record."""
    device, records = model.device(), dict[str, ClaimRecord]()
    for step in range(data.draw(st.integers(1, 12))):
        held = {each.name for record in records.values() for each in record.devices}
        free = sorted(set(OFFERS) - held)
        if records and data.draw(st.booleans()):
            uid = data.draw(st.sampled_from(sorted(records)))
            removed = {each.instance_id for each in plan_undo(records.pop(uid), {model.UUID: device}, {}).destructions}
            device = replace(device, partitions=tuple(e for e in device.partitions if e.instance_id not in removed))
        elif free:
            name = data.draw(st.sampled_from(free))
            made = plan(f"c{step}", name, device=device, records=records)
            (entry,) = made.record.devices
            assert entry.placement_start is not None
            taken = {each.placement.start for each in device.partitions}
            taken |= {
                e.placement_start
                for record in records.values()
                for e in record.devices
                if e.placement_start is not None
            }
            assert entry.placement_start == min(set(range(model.NUMBERS)) - taken)
            records[f"c{step}"] = made.record
            if data.draw(st.booleans()):  # otherwise the driver was killed before it created the partition
                assert entry.profile is not None
                there = model.partition(entry.profile, entry.placement_start)
                device = replace(device, partitions=(*device.partitions, there))
        keys = [each.key for record in records.values() for each in record.devices]
        assert len({key[1] for key in keys if key}) == len(keys)


def test_plan_without_a_free_number_is_rejected() -> None:
    few = tuple(replace(each, placements=each.placements[:1]) for each in model.device().profiles)
    device = model.device([("quarter", 0)], profiles=few)
    with pytest.raises(InUse, match="number") as refused:
        plan("a", "dev-0-quarter-1", device=device, records={})
    assert "quarter" in str(refused.value)


def test_plan_missing_profile_is_rejected() -> None:
    with pytest.raises(ClaimError, match="half") as refused:
        plan("a", "dev-0-half-0", device=model.device(profiles=()), records={})
    assert refused.value.code == "device-gone"


def test_plan_device_of_another_claim_is_rejected() -> None:
    device = model.device()
    first = plan("a", "dev-0-half-0", device=device, records={})
    with pytest.raises(InUse, match="team/a"):
        plan("b", "dev-0-half-0", device=device, records={"a": first.record})


def test_plan_admin_access_uses_the_partition_of_a_claim() -> None:
    first = plan("a", "dev-0-quarter-3", device=model.device(), records={})
    device = model.device([("quarter", 0), ("quarter", 3)])
    watching = plan("b", "dev-0-quarter-3", device=device, records={"a": first.record}, admin=True)
    (entry,) = watching.record.devices
    assert (entry.placement_start, entry.partition_uuid, entry.created) == (0, "PART-quarter-0", False)
    with pytest.raises(ClaimError, match="does not exist"):
        plan("c", "dev-0-quarter-0", device=device, records={}, admin=True)


def test_plan_partition_of_an_administrator_keeps_its_number() -> None:
    there = offer("half", 5, dynamic=False, partition_uuid="PART-half-5")
    found = plan("a", there.name, device=model.device([("half", 5)]), records={}, there=there)
    (entry,) = found.record.devices
    assert (entry.placement_start, entry.partition_uuid, entry.created) == (5, "PART-half-5", False)


def test_restore_uses_the_recorded_number_or_rejects_if_in_use() -> None:
    record = plan("a", "dev-0-quarter-2", device=model.device(), records={}).record
    made = replace(record.devices[0], partition_uuid="PART-quarter-0", instance_id=100)
    record = record.as_prepared([made], "boot")
    again = plan_restore(record, {model.UUID: model.device()}, {model.UUID})
    assert numbers(again) == [0] and len(again.partitions_to_create) == 1
    with pytest.raises(InUse, match="half"):
        plan_restore(record, {model.UUID: model.device([("half", 0)])}, {model.UUID})
    assert not plan_restore(record, {model.UUID: model.device([("quarter", 0)])}, {model.UUID}).partitions_to_create


def test_fault_of_a_partition_does_not_affect_a_device_with_the_same_number() -> None:
    fault = TrackedFault(Sign("x", Severity.FAILED, "It broke.", instance=102), 0.0, 0.0)
    device = model.device([("half", 2)])
    assert not fault.applies_to(offer("half", 2), device)
    assert fault.applies_to(offer("half", 2, dynamic=False), device)
