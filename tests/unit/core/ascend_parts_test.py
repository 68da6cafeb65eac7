# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Ascend chips: names and numbers, topology, claims for adjacent chips, error codes, and the file of saved vNPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations

import pytest
from chip_model import CHIPS, partition
from dra_driver.core.discovery.device_workers import DeviceBusy
from dra_driver.core.errors import AcceleratorError, DeviceFaulty, InUse, NotPermitted
from dra_driver.core.health.conditions import Severity
from dra_driver.core.model import Placement, Version
from dra_driver.core.partitioning import capacity as partitioning_capacity
from dra_driver.core.vendors.ascend import names, topology
from dra_driver.core.vendors.ascend.attributes import ChipFacts, SuperPod, attributes
from dra_driver.core.vendors.ascend.families import FAMILIES, UNKNOWN, Family, family_of
from dra_driver.core.vendors.ascend.health import codes, faults
from dra_driver.core.vendors.ascend.templates import CORES, Template, Totals, profiles_of
from hypothesis import given
from hypothesis import strategies as st

BY_WORD: Mapping[str, Family] = {each.word: each for each in FAMILIES.values()}
IDS = st.integers(0, 63)

# ---------------------------------------------------------------------- names


@given(IDS, st.integers(0, 15))
def test_slice_id_is_unique_and_reversible(physical: int, number: int) -> None:
    found = names.slice_id(physical, number)
    assert 100 <= found <= 1123 and names.number_of(found) == number
    assert len({names.slice_id(p, n) for p in (physical, physical ^ 1) for n in (number, number ^ 1)}) == 4


@pytest.mark.parametrize("wrong", [(64, 0), (0, 16), (-1, 0)])
def test_slice_id_out_of_range_is_rejected(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no slice"):
        names.slice_id(*wrong)
    with pytest.raises(ValueError, match="99 is no"):
        names.number_of(99)


def test_chip_uuid_is_derived_from_die_id() -> None:
    assert names.chip_uuid((0x2C30A, 0, 1, 0xFFFFFFFF, 7)) == "NPU-0002c30a0000000000000001ffffffff00000007"
    assert names.slice_uuid("NPU-x", 117) == "NPU-x-117"
    for wrong in ((0, 0, 0, 0, 0), (1, 2, 3, 4), (1, 2, 3, 4, 1 << 32)):
        with pytest.raises(ValueError, match="VDIE"):
            names.chip_uuid(wrong)


def test_family_by_pci_id() -> None:
    assert family_of(0xD500) is family_of(0xD500 << 16 | 0x19E5) is BY_WORD["310P"]
    assert family_of(0xD999) is UNKNOWN and not UNKNOWN.supports_vnpus and not BY_WORD["950"].supports_vnpus


@given(st.permutations(range(8)), st.data())
def test_found_placements_of_foreign_slices_do_not_overlap(numbers: Sequence[int], data: st.DataObject) -> None:
    """For any ids, placements in a vGroup do not overlap: one or two of size 1, or one of size 2."""
    family = BY_WORD["310P"]
    given_: list[tuple[int, int | None, int]] = []
    for group in range(4):
        sizes = data.draw(st.sampled_from([[], [1], [1, 1], [2]]))
        given_ += [(names.slice_id(3, numbers[2 * group + at]), group, size) for at, size in enumerate(sizes)]
    found = names.found_placements(family, data.draw(st.permutations(given_)))
    assert {each for each, _group, _size in given_} == set(found)
    for slice_id, group, size in given_:
        assert found[slice_id].size == size and names.group_of(found[slice_id]) == group
        own = names.number_of(slice_id)
        if size == 1 and own // 2 == group:
            assert found[slice_id].start == own, "one of ours is where its number says"
    assert not any(one.overlaps(other) for one, other in combinations(found.values(), 2))


def test_found_placements_without_vgroups_use_numbers() -> None:
    assert names.found_placements(BY_WORD["910B"], [(119, None, 2)]) == {119: Placement(3, 0)}
    assert names.group_of(Placement(3, 0)) is None


def test_free_number_avoids_used_numbers() -> None:
    small, large = BY_WORD["310P"], BY_WORD["910B"]
    assert names.free_number(small, Placement(4, 2), {0, 1}) == 4
    assert names.free_number(small, Placement(4, 2), {4}) == 7
    assert names.free_number(small, Placement(5, 1), {5}) == 7
    assert names.free_number(small, Placement(7, 1), {7}) == 5
    assert names.free_number(small, Placement(4, 2), set(range(8))) is None
    assert names.free_number(large, Placement(4, 0), {4}) is None


# ---------------------------------------------------------------------- topology


def groups(kind: str, placed: Mapping[int, topology.Place]) -> tuple[tuple[int, ...], ...]:
    """Return the cards or rings with more than one chip, each as its chips' physical ids."""
    return tuple(sorted({each for place in placed.values() if len(each := getattr(place, kind)) > 1}))


def chips(count: int, per_card: int = 1) -> list[topology.Chip]:
    return [topology.Chip(number, number // per_card, number % per_card) for number in range(count)]


@pytest.mark.parametrize(
    ("word", "there", "rings", "cards"),
    [
        ("910A", chips(8), [range(4), range(4, 8)], []),
        ("910B", chips(16), [range(8), range(8, 16)], []),
        ("910B", chips(8), [range(8)], []),
        ("910_93", chips(16, 2), [range(16)], [range(n, n + 2) for n in range(0, 16, 2)]),
        ("310P", chips(8, 2), [range(n, n + 2) for n in range(0, 8, 2)], [range(n, n + 2) for n in range(0, 8, 2)]),
        ("310P", chips(8), [], []),
        ("310", chips(8, 4), [], [range(4), range(4, 8)]),
    ],
)
def test_places_rings_and_cards_by_generation(
    word: str, there: list[topology.Chip], rings: list[range], cards: list[range]
) -> None:
    placed = topology.places(BY_WORD[word], there)
    assert groups("ring", placed) == tuple(tuple(each) for each in rings)
    assert groups("card", placed) == tuple(tuple(each) for each in cards)
    assert all(each.physical_id in placed[each.physical_id].ring for each in there)


def test_places_missing_chip_does_not_change_its_ring() -> None:
    placed = topology.places(BY_WORD["910A"], [each for each in chips(8) if each.physical_id != 2])
    assert groups("ring", placed) == ((0, 1, 3), (4, 5, 6, 7))


def test_places_reported_links_have_priority() -> None:
    links = {(a, b): "XLink" if a // 2 == b // 2 else "SYS" for a in range(4) for b in range(4) if a != b}
    placed = topology.places(BY_WORD["910B"], chips(4), links)
    assert groups("ring", placed) == ((0, 1), (2, 3))
    far = dict.fromkeys(links, "PHB")
    assert groups("ring", topology.places(BY_WORD["910B"], chips(4), far)) == ()
    assert groups("ring", topology.places(BY_WORD["910B"], chips(8), board_id=0x33)) == ()


def test_place_attributes_are_unique_in_the_cluster() -> None:
    placed = topology.places(BY_WORD["910A"], chips(8))
    found = [topology.attributes("n" * 80 + "1", each, placed[each.physical_id]) for each in chips(8)]
    assert len({each["cardID"] for each in found}) == 8 and len({each["hccsRing"] for each in found}) == 2
    assert all(len(str(each["hccsRing"])) <= 64 and "1-ring-" in str(each["hccsRing"]) for each in found)
    alone = topology.attributes("node", topology.Chip(0, 5), topology.Place((0,), (0,)), "SN1")
    assert dict(alone) == {"cardID": "SN1", "chipID": 0}


def test_chip_attributes_have_expected_values() -> None:
    facts = ChipFacts(
        BY_WORD["910_93"],
        topology.Chip(3, 1, 1),
        names.chip_uuid((1, 2, 3, 4, 5)),
        model="Ascend910",
        card_serial="SN7",
        driver_version="25.0.RC1.1",
        firmware_version="7.7.0.1.231",
        pci_address="0000:c1:00.0",
        numa_node=0,
        super_pod=SuperPod(7, 2, 4711),
    )
    found = attributes(facts, "node", topology.Place((2, 3), tuple(range(16))))
    assert dict(found) == {
        "deviceType": "Ascend910",
        "physicId": 3,
        "vdie": "0000000100000002000000030000000400000005",
        "cardID": "SN7",
        "chipID": 1,
        "hccsRing": "node-ring-0",
        "model": "Ascend910",
        "resource.kubernetes.io/pciBusID": "0000:c1:00.0",
        "resource.kubernetes.io/numaNode": 0,
        "driverVersion": Version("25.0.0-rc.1.1"),
        "firmwareVersion": Version("7.7.0"),
        "superPodID": 7,
        "serverID": 2,
        "sdid": 4711,
    }


# ---------------------------------------------------------------------- codes and faults


def test_signs_of_error_codes_have_severity_and_remedy() -> None:
    (reset,) = codes.signs(3, [0x80E18008])
    assert (reset.severity, reset.is_mended_by_reset, reset.value) == (Severity.FAILED, True, "80e18008")
    (broken,) = codes.signs(3, [0xA2301001])
    assert broken.severity is Severity.FAILED and not broken.is_mended_by_reset, "the graver of two groups counts"
    mild, level = codes.signs(2, [0x80E01801])
    assert mild.severity is Severity.INFORMATIVE
    assert (level.cause, level.severity, level.value) == ("health", Severity.DEGRADED, "alarm")
    (unknown,) = codes.signs(2, [0x12345678, 0x12345678])
    assert unknown.severity is Severity.DEGRADED and "list" in unknown.remedy
    assert codes.signs(0, []) == ()
    (silent,) = codes.signs(codes.ABSENT, [])
    assert silent.severity is Severity.DEGRADED and silent.value == "unknown"
    assert len(codes.KINDS) > 300


@pytest.mark.parametrize("word", ["OK", "Warning", "Alarm", "Critical", "UNKNOWN"])
def test_levels_have_names(word: str) -> None:
    assert codes.LEVELS[codes.level_of(word.upper())] == word
    assert codes.level_of("") == codes.ABSENT


def test_network_sign_of_port_state() -> None:
    assert codes.network_sign(0) is codes.network_sign(6) is codes.network_sign(8) is None
    found = codes.network_sign(3)
    assert found is not None and found.severity is Severity.INFORMATIVE and "reach" in found.message


def test_error_of_call_codes_returns_matching_errors() -> None:
    lost = faults.error_of(-8007, "Reading a chip")
    assert isinstance(lost, DeviceFaulty) and lost.code == "npu-lost"
    assert faults.sign(lost).severity is Severity.FAILED and str(lost).startswith("Reading a chip failed: ")
    assert isinstance(faults.error_of(-8020, "x"), InUse) and isinstance(faults.error_of(-8002, "x"), NotPermitted)
    assert faults.error_of(-1, "x").code == "unknown-error"
    for code in faults.CODES:
        error = faults.error_of(code, "Doing it")
        assert str(code) in error.message
        if isinstance(error, DeviceFaulty):
            assert error.code in faults.SEVERITIES
    assert faults.code_of_exit(217) == -8255 and faults.code_of_exit(215) == -8001 and faults.code_of_exit(1) is None


def test_rejection_hints_name_dcmi_requirements() -> None:
    refused, busy = faults.error_of(-8002, "x"), faults.error_of(-8013, "x")
    assert all(word in refused.hint for word in ("root", "host", "privileged container", "virtual machine", "310P"))
    assert isinstance(busy, InUse) and "processes that use the chip" in busy.hint and "ordinary container" in busy.hint


def test_faulty_unreadable_chip_has_a_fault() -> None:
    assert faults.as_fault(NotPermitted("no")).code == "no-permission"
    assert faults.as_fault(DeviceBusy("late")).code == "no-answer"
    assert faults.as_fault(AcceleratorError("x")).code == "unknown-error"


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=6), st.integers(0, 7))
def test_found_placements_small_slice_leaves_other_half_of_vgroup(there: set[tuple[int, int]], start: int) -> None:
    """For vNPUs with one core, by number and vGroup: another one fits into a vGroup exactly if it has fewer than two."""
    family = CHIPS["310P"].family
    slices: dict[int, tuple[int, int | None, int]] = {}
    for number, group in sorted(there):
        held = [each for each in slices.values() if each[1] == group]
        # A number belongs to one vNPU, and a number of the place itself states the place.
        if number not in slices and len(held) < 2 and number != start:
            slices[number] = (names.slice_id(0, number), group, 1)
    placed = names.found_placements(family, slices.values())
    partitions = [
        partition(
            "310P",
            "vir01",
            placed[each],
            instance_id=each,
            equivalent_placements=names.elsewhere(family, each, placed[each]),
        )
        for each, _group, _size in slices.values()
    ]
    wanted = Placement(start, 1)
    group = start // 2
    fixed = {names.number_of(each) for each, at, _size in slices.values() if at == group} & {start}
    has_room = sum(at == group for _each, at, _size in slices.values()) < 2 and not fixed
    assert (partitioning_capacity.overlapping(wanted, partitions) == []) == has_room


# ---------------------------------------------------------------------- memory of slices


def names_of_910b4(memory: int) -> dict[str, int]:
    """Return the vNPUs of a chip with 20 cores and the templates of a 910B4, and their memory in MiB."""
    reported = [
        Template("vir05_1c_8g", {CORES: Fraction(5)}, Fraction(8)),
        Template("vir10_3c_16g", {CORES: Fraction(10)}, Fraction(16)),
    ]
    totals = Totals({CORES: Fraction(20)}, memory << 30)
    return {each.name: each.memory_bytes >> 20 for each in profiles_of(BY_WORD["910B"], reported, totals)}


def test_profiles_of_board_with_more_memory_than_templates() -> None:
    """HAMi issue 1497: on a 910B4-1 with an older driver, the vNPU of half the cores has 30720 MiB."""
    assert names_of_910b4(32) == {"vir05_1c_8g": 7168, "vir10_3c_16g": 14336}
    assert names_of_910b4(64) == {"vir05_1c_8g": 15360, "vir10_3c_16g": 30720}
