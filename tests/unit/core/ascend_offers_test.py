# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Published chips and vNPUs: the counters admit all allocations that the silicon accepts, and no other ones."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import chip_model as model
import pytest
from chip_model import CHIPS, MIB, Silicon, can_exist, device, multisets, partition, profiles
from dra_driver.core.dra.resource_slices import build_pool
from dra_driver.core.errors import DoesNotFit
from dra_driver.core.model import Offer, Placement
from dra_driver.core.partitioning import capacity as partitioning_capacity
from dra_driver.core.partitioning import placement as partitioning_placement
from dra_driver.core.partitioning.rules import WantedPartition
from dra_driver.core.vendors.ascend import names, templates
from dra_driver.core.vendors.ascend.attributes import ChipFacts, SuperPod, attributes
from dra_driver.core.vendors.ascend.offers import counter_set, offers
from dra_driver.core.vendors.ascend.topology import Chip, Place
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.order_model import MIXES, served, trace

KINDS = sorted(CHIPS)
#: §1.3 of the reference: each set of vNPUs that uses all cores and AICPUs of a 310P.
COMPLETE = [
    {"vir04": 1, "vir04_3c": 1},
    {"vir04": 1, "vir02": 1, "vir02_1c": 1},
    {"vir04": 1, "vir02_1c": 1, "vir01": 2},
    {"vir04_3c": 1, "vir02": 2},
    {"vir04_3c": 1, "vir02": 1, "vir01": 2},
    {"vir04_3c": 1, "vir01": 4},
    {"vir02": 3, "vir02_1c": 1},
    {"vir02": 2, "vir02_1c": 1, "vir01": 2},
    {"vir02": 1, "vir02_1c": 1, "vir01": 4},
    {"vir02_1c": 1, "vir01": 6},
    {"vir04_4c_dvpp": 1, "vir04_3c_ndvpp": 1},
    {"vir04": 1, "vir04_3c_ndvpp": 1},
    {"vir04_3c_ndvpp": 1, "vir02": 2},
    {"vir04_3c_ndvpp": 1, "vir02": 1, "vir01": 2},
    {"vir04_3c_ndvpp": 1, "vir01": 4},
]


def possible(kind: str) -> list[Offer]:
    return [offer for offer in offers(device(kind), True) if offer.kind == "partition"]


def fits(left: Mapping[str, int], offer: Offer) -> bool:
    return all(amount <= left[name] for name, amount in offer.consumes.items())


def take(left: dict[str, int], offer: Offer, sign: int = 1) -> None:
    for name, amount in offer.consumes.items():
        left[name] -= sign * amount


def first_fit(
    published: Sequence[Offer], left: Mapping[str, int], name: str, held: Collection[str] = ()
) -> Offer | None:
    """Return the offer that the scheduler allocates to a claim for one vNPU of a template."""
    return next((o for o in published if o.profile == name and o.name not in held and fits(left, o)), None)


def reached(kind: str) -> set[tuple[tuple[str, int], ...]]:
    """Return each multiset of templates that claims can get one after the other, starting with an empty chip."""
    published, start = possible(kind), dict(counter_set(device(kind)).counters)
    found: set[tuple[tuple[str, int], ...]] = set()
    seen: set[frozenset[str]] = set()
    frontier: list[tuple[frozenset[str], dict[str, int]]] = [(frozenset(), start)]
    by_name = {offer.name: offer for offer in published}
    while frontier:
        held, left = frontier.pop()
        found.add(tuple(sorted(Counter(str(by_name[name].profile) for name in held).items())))
        for template in CHIPS[kind].rows:
            offer = first_fit(published, left, template, held)
            if offer is not None and held | {offer.name} not in seen:
                seen.add(held | {offer.name})
                rest = dict(left)
                take(rest, offer)
                frontier.append((held | {offer.name}, rest))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_counters_admit_exactly_the_possible_sets(kind: str) -> None:
    assert reached(kind) == {tuple(sorted(each)) for each in multisets(kind)}


def test_complete_sets_of_310p_are_15_with_22_more_maximal() -> None:
    found = [dict(each) for each in reached("310P")]
    rows = CHIPS["310P"].rows
    complete = [
        each
        for each in found
        if sum(rows[name][0] * n for name, n in each.items()) == 8
        and sum(rows[name][2] * n for name, n in each.items()) == 7
    ]
    assert sorted(map(sorted, map(dict.items, complete))) == sorted(map(sorted, map(dict.items, COMPLETE)))
    maximal = [
        each for each in found if not any(can_exist("310P", {**each, name: each.get(name, 0) + 1}) for name in rows)
    ]
    assert len(maximal) == 15 + 22 and {"vir01": 7} in maximal


def test_offers_chips_of_a_pair_have_no_dynamic_slices() -> None:
    """Chips of a 300I Duo (PCI subsystem 0110) have no dynamic vNPUs, because the vendor does not support them. Static ones are published."""
    duo = {"pci_subsystem_id": 0x0110_19E5}
    (whole,) = offers(device("310P", **duo), True)
    assert whole.kind == "device" and whole.counter_set and whole.consumes == counter_set(device("310P")).counters
    place = next(each for each in profiles("310P") if each.name == "vir02").placements[1]
    there = partition("310P", "vir02", place)
    (cut,) = offers(device("310P", [there], **duo), True)
    assert (cut.partition_uuid, cut.dynamic) == (there.uuid, False)
    assert len(offers(device("310P", pci_subsystem_id=0x0100_19E5), True)) > 20
    assert len(offers(device("910B4", **duo), True)) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_profile_maximum_equals_largest_possible_count(kind: str) -> None:
    for profile in profiles(kind):
        assert profile.maximum == max(n for n in range(17) if can_exist(kind, {profile.name: n}))
    assert partitioning_capacity.counted_profiles(device(kind)) == ()
    expected = {
        "310P": {
            "vir01": 7,
            "vir02": 3,
            "vir02_1c": 4,
            "vir04": 1,
            "vir04_3c": 2,
            "vir04_3c_ndvpp": 2,
            "vir04_4c_dvpp": 1,
        },
        "910B4": {"vir10_3c_16g": 2, "vir10_4c_16g_m": 1, "vir10_3c_16g_nm": 2, "vir05_1c_8g": 4},
        "910A": {"vir02": 14, "vir04": 8, "vir08": 4, "vir16": 2},
        "910A-30": {"vir02": 14, "vir16": 1},
    }
    if kind in expected:
        assert {profile.name: profile.maximum for profile in profiles(kind)} == expected[kind]


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_counters_never_admit_what_the_silicon_rejects(kind: str, data: st.DataObject) -> None:
    """Claims start and end in any order, each on any device that the counters permit. A vNPU is created where its offer says."""
    published = possible(kind)
    left, silicon = dict(counter_set(device(kind)).counters), Silicon(kind)
    held: dict[str, tuple[Offer, int]] = {}
    for _step in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.integers(0, 2)) == 0:
            offer, made = held.pop(data.draw(st.sampled_from(sorted(held))))
            del silicon.slices[made]
            take(left, offer, -1)
            continue
        free = [offer for offer in published if offer.name not in held and fits(left, offer)]
        if not free:
            continue
        offer = data.draw(st.sampled_from(free))
        assert offer.placement is not None and offer.profile is not None
        group = names.group_of(offer.placement)
        number = offer.placement.start
        if group is None:  # the number is selected at creation
            number = min(set(range(16)) - {names.number_of(each) for each in silicon.slices})
        made = names.slice_id(0, number)
        assert silicon.create(offer.profile, made, group or 0)
        take(left, offer)
        held[offer.name] = (offer, made)


@given(st.lists(st.sampled_from(sorted(CHIPS["310P"].rows)), max_size=9))
def test_placements_on_empty_310p_never_run_out(wanted: list[str]) -> None:
    """A set that fits by its sums also fits by its placements, in any order, if nothing is destroyed."""
    published, left = possible("310P"), dict(counter_set(device("310P")).counters)
    counts: Counter[str] = Counter()
    for name in wanted:
        offer = first_fit(published, left, name)
        assert (offer is not None) == can_exist("310P", counts + Counter([name]))
        if offer is not None:
            counts[name] += 1
            take(left, offer)


def test_placement_order_serves_most_claims() -> None:
    """The order of the places serves more claims on eight chips than orders from the first, from the last, and by name."""
    ours, counters = possible("310P"), counter_set(device("310P")).counters
    others = {
        "first": sorted(ours, key=lambda offer: (offer.profile, offer.placement)),
        "last": sorted(ours, key=lambda offer: (offer.profile, offer.placement), reverse=True),
        "name": sorted(ours, key=lambda offer: offer.name),
    }
    sizes = {name: max(1, int(row[0])) for name, row in CHIPS["310P"].rows.items()}
    events = [trace(sizes, 8, mix, seed=seed, claims=400) for mix in MIXES for seed in range(4)]
    found = {name: sum(served(each, counters, every) for every in events) for name, each in others.items()}
    best = sum(served(ours, counters, every) for every in events)
    assert best > max(found.values()), (best, found)


def test_placement_order_single_core_ascending_others_descending() -> None:
    starts = {
        name: [offer.placement.start for offer in possible("310P") if offer.profile == name and offer.placement]
        for name in CHIPS["310P"].rows
    }
    assert starts["vir01"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert all(starts[name] == [6, 4, 2, 0] for name in starts if name != "vir01")


@pytest.mark.parametrize("kind", KINDS)
def test_whole_chip_excludes_all_slices(kind: str) -> None:
    *others, whole = offers(device(kind), True)
    assert (whole.kind, whole.name, whole.attributes["type"]) == ("device", "npu-0", "npu")
    left = dict(counter_set(device(kind)).counters)
    assert fits(left, whole) and others
    take(left, whole)
    assert not any(fits(left, offer) for offer in others)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40)
def test_foreign_slices_only_fitting_devices_are_offered(kind: str, data: st.DataObject) -> None:
    published, left, silicon = possible(kind), dict(counter_set(device(kind)).counters), Silicon(kind)
    present = []
    for name in data.draw(st.lists(st.sampled_from(sorted(CHIPS[kind].rows)), max_size=6)):
        offer = first_fit(published, left, name, {f"npu-0-{each.profile}-{each.placement.start}" for each in present})
        if offer is None or offer.placement is None:
            continue
        place = offer.placement if offer.placement.size else Placement(data.draw(st.integers(0, 15)), 0)
        if any(each.placement.conflicts_with(place) for each in present):
            continue
        take(left, offer)
        present.append(partition(kind, name, place))
        assert silicon.create(name, present[-1].instance_id, names.group_of(place) or 0)
    chip = device(kind, present)
    found = offers(chip, True)
    assert len({offer.name for offer in found}) == len(found)
    static = [offer for offer in found if offer.partition_uuid]
    assert {offer.partition_uuid for offer in static} == {each.uuid for each in present}
    assert all(not offer.consumes and not offer.dynamic for offer in static)
    assert any(offer.kind == "device" for offer in found) == (not present)
    rest = dict(counter_set(chip, ()).counters)
    counts = Counter(each.profile for each in present)
    for name in CHIPS[kind].rows:
        offer = next((o for o in found if o.dynamic and o.profile == name and fits(rest, o)), None)
        if offer is not None:
            assert can_exist(kind, counts + Counter([name]))
            assert offer.placement is not None
            trial = Silicon(kind, dict(silicon.slices))
            number = offer.placement.start
            if offer.placement.is_number:
                number = min(set(range(16)) - {names.number_of(each) for each in silicon.slices})
            assert trial.create(name, names.slice_id(0, number), names.group_of(offer.placement) or 0)
        elif not CHIPS[kind].family.groups:
            assert not can_exist(kind, counts + Counter([name]))


@pytest.mark.parametrize("kind", ["310P", "910B3"])
def test_offers_slices_of_claims_change_nothing(kind: str) -> None:
    name = profiles(kind)[0].name
    present = [partition(kind, name, profiles(kind)[0].placements[1])]
    owned = [each.key for each in present]
    before, after = device(kind), device(kind, present)
    assert offers(after, True, owned) == offers(before, True)
    assert counter_set(after, owned) == counter_set(before, ())


def test_offers_names_are_stable_with_foreign_slices() -> None:
    """The scheduler counts a claim's device only while it is published: offers keep their names, whatever else is created."""
    (small, large) = profiles("910B3")
    before = [offer for offer in possible("910B3") if offer.profile == small.name]
    assert [offer.name for offer in before] == [f"npu-0-vir05-1c-16g-new-{ordinal}" for ordinal in range(4)]
    beside = [partition("910B3", small.name, Placement(1, 0)), partition("910B3", large.name, Placement(3, 0))]
    found = offers(device("910B3", beside), True)
    assert [offer for offer in found if offer.dynamic and offer.profile == small.name] == before
    assert {offer.name for offer in found if not offer.dynamic} == {"npu-0-vir05-1c-16g-1", "npu-0-vir10-3c-32g-3"}


def test_offers_unknown_slice_prevents_creation() -> None:
    strange = partition("310P", "vir01", Placement(0, 1), profile="vir03_x", profile_id=7, capacities={})
    (only,) = offers(device("310P", [strange]), True)
    assert only.name == "npu-0-vir03-x-0" and only.partition_uuid == strange.uuid


def test_offers_placement_with_used_number_is_withheld() -> None:
    """A vNPU in another group was created manually with the number of this place: the place is withheld."""
    stray = partition("310P", "vir02", Placement(0, 2), instance_id=names.slice_id(0, 4))
    dynamic = [offer for offer in offers(device("310P", [stray]), True) if offer.dynamic]
    assert dynamic and all(offer.placement is not None and offer.placement.start not in (0, 1, 4) for offer in dynamic)


def test_offers_static_slices_are_published_unchanged() -> None:
    chip = device("310P", [partition("310P", "vir04_3c", Placement(6, 2), 3)], 3)
    (only,) = offers(chip, False)
    assert only.name == "npu-3-vir04-3c-6" and only.partition_uuid == f"{chip.uuid}-154"
    assert dict(only.attributes) == {
        "type": "vnpu",
        "deviceType": "Ascend310P",
        "physicId": 3,
        "model": "310P",
        "uuid": f"{chip.uuid}-154",
        "parentUUID": chip.uuid,
        "template": "vir04_3c",
        "vGroup": 3,
        "vnpuID": 154,
    }
    assert only.capacities["memory"] == 10763 * MIB and only.counter_set is None
    assert [offer.name for offer in offers(device("310P", physical=3), False)] == ["npu-3"]


def test_profile_memory_is_measured_not_nominal() -> None:
    def megabytes(kind: str) -> dict[str, int]:
        return {profile.name: profile.memory_bytes // MIB for profile in profiles(kind)}

    assert megabytes("310P")["vir01"] == 2690 and megabytes("310P")["vir02"] == 5381
    assert megabytes("910B3") == {"vir05_1c_16g": 15360, "vir10_3c_32g": 30720}
    assert megabytes("910B4")["vir05_1c_8g"] == 7168 and megabytes("910B4")["vir10_3c_16g"] == 14336
    assert megabytes("910A-30") == {"vir02": 2048, "vir16": 16384}


def test_profile_fractional_amounts_are_exact() -> None:
    shared, totals = model.templates_and_totals("310P")
    half = replace(shared[0], name="vir00", amounts={**shared[0].amounts, "aiCPU": Fraction(1, 2)})
    third = replace(shared[1], name="vir03", amounts={**shared[1].amounts, "aiCPU": Fraction("1.25")})
    family = CHIPS["310P"].family
    found = {each.name: each for each in templates.profiles_of(family, (half, third), totals)}
    assert found["vir00"].capacities["aiCPU_4"] == 2 and found["vir03"].capacities["aiCPU_4"] == 5
    assert found["vir00"].maximum == 8, "cores run out before AICPUs"
    assert templates.capacities_of(family, (half, third), totals)["aiCPU_4"] == 28
    chip = device(
        "310P", profiles=tuple(found.values()), capacities=templates.capacities_of(family, (half, third), totals)
    )
    assert counter_set(chip).counters["aicpu-4"] == 28
    whole = offers(chip, True)[-1]
    assert whole.capacities["aiCPU"] == 7
    assert offers(chip, True)[0].capacities["aiCPU"] == 0, "less than one is not promised as one"


@given(st.integers(0, 64), st.integers(0, 99))
def test_exact_float_returns_intended_fraction(whole: int, hundredths: int) -> None:
    meant = Fraction(whole * 100 + hundredths, 100)
    (short,) = struct.unpack("f", struct.pack("f", meant))
    assert templates.exact(short) == meant == templates.exact(float(meant))


def test_profiles_unreported_totals_are_not_counted() -> None:
    shared, totals = model.templates_and_totals("310P")
    bare = templates.Totals({"aiCores": Fraction(8)}, totals.memory_bytes)
    found = templates.profiles_of(CHIPS["310P"].family, shared, bare)
    assert {tuple(each.capacities) for each in found} == {("aiCores", "memory")}
    assert templates.profiles_of(CHIPS["310P"].family, shared, templates.Totals({}, 1)) == ()
    shared, totals = model.templates_and_totals("910A")
    silent = replace(totals, amounts={key: each for key, each in totals.amounts.items() if key != "aiCPU"})
    assert templates.profiles_of(CHIPS["910A"].family, shared, silent) == profiles("910A"), "its generation is known"
    assert templates.profiles_of(model.FAMILIES[0xD806], shared, totals) == ()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=30)
def test_arrange_any_counts_fits_or_is_rejected(kind: str, data: st.DataObject) -> None:
    counts = data.draw(st.dictionaries(st.sampled_from(sorted(CHIPS[kind].rows)), st.integers(1, 4), min_size=1))
    wanted = tuple(WantedPartition(name.replace("_", "-"), count) for name, count in counts.items())
    if not can_exist(kind, counts):
        with pytest.raises(DoesNotFit):
            partitioning_placement.arrange(device(kind), wanted)
        return
    silicon = Silicon(kind)
    for profile, place in partitioning_placement.arrange(device(kind), wanted):
        assert silicon.create(profile.name, names.slice_id(0, place.start), names.group_of(place) or 0)
    assert Counter(name for name, _group in silicon.slices.values()) == Counter(counts)


@pytest.mark.parametrize("kind", KINDS)
def test_slice_with_all_facts_is_within_api_limits(kind: str) -> None:
    facts = ChipFacts(
        CHIPS[kind].family,
        Chip(3, 1, 1),
        model.uuid(3),
        model="M" * 70,
        product="Ω" * 40,
        card_serial="S" * 70,
        driver_version="25.0.rc1",
        firmware_version="7.7.0.1.231",
        pci_address="0000:13:00.0",
        pcie_root="pci0000:10",
        numa_node=1,
        super_pod=SuperPod(1, 2, 3, 4),
    )
    place_attributes = attributes(facts, "node-1", Place((2, 3), (0, 1, 2, 3)))
    place = profiles(kind)[0].placements[1]
    chip = device(kind, [partition(kind, profiles(kind)[0].name, place, 3)], 3, attributes=place_attributes)
    for dynamic in (False, True):
        sets = [counter_set(chip, ())] if dynamic else []
        published = offers(chip, dynamic)
        build_pool(driver=names.DRIVER_NAME, pool="n", node_name="n", offers=published, counter_sets=sets)


@pytest.mark.parametrize("layout", ["separate", "combined"])
@pytest.mark.parametrize("kind", KINDS)
def test_pool_of_eight_chips_is_within_api_limits(kind: str, layout: str) -> None:
    chips = [device(kind, physical=number) for number in range(8)]
    published = [offer for chip in chips for offer in offers(chip, True)]
    sets = [counter_set(chip) for chip in chips]
    build_pool(driver=names.DRIVER_NAME, pool="n", node_name="n", offers=published, counter_sets=sets, layout=layout)
    if kind == "310P":
        assert len(published) == 8 * (8 + 6 * 4 + 1)
