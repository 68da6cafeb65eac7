# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Layout rules and nvidia-mig-parted files: their meaning, and refused ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from board_model import board_names, device
from dra_driver.core.errors import AcceleratorError, InvalidLayout, Unsupported
from dra_driver.core.partitioning.layout_plan import plan_layout
from dra_driver.core.partitioning.rules import (
    Match,
    Rule,
    WantedPartition,
    parse_rules,
    unmatched_indices,
    wanted_for,
)
from dra_driver.core.vendors.nvidia.mig_parted import (
    configuration_of,
    file_in_config_map,
    possible_configurations,
    rules_from_mig_parted,
)
from dra_driver.core.vendors.nvidia.profiles import parse_name
from hypothesis import given
from hypothesis import strategies as st


def test_rules_first_match_wins() -> None:
    rules = parse_rules(
        [
            {"match": {"index": [0]}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 4}},
            {"match": {"product": "*H100*", "vendor": "nvidia"}, "mode": "dynamic"},
            {"match": {"pci_address": "00000000:12:00.0"}, "mode": "whole"},
        ]
    )
    assert wanted_for(device("h100-80", 0), rules) == rules[0]
    assert wanted_for(device("h100-80", 1), rules) == rules[1]
    assert wanted_for(device("l4", 2), rules) == rules[2]
    assert wanted_for(device("l4", 3), rules) is None
    assert rules[0].partitions == (WantedPartition("3g.40gb", 1), WantedPartition("1g.10gb", 4))
    assert rules[0].describe() == "static: 1 × 3g.40gb + 4 × 1g.10gb" and rules[1].describe() == "dynamic"


def test_match_requires_all_keys_and_any_value() -> None:
    gpu = device("h100-80", 1)
    assert Match().matches(gpu)
    assert Match(index=(0, 1), uuid=(gpu.uuid,), pci_address=("x", gpu.pci_address)).matches(gpu)
    assert not Match(index=(1,), vendor=("huawei",)).matches(gpu)
    assert not Match(product=("*A100*", "H100*")).matches(gpu)


def test_parse_rules_whole_device_with_shares() -> None:
    shared, alone = parse_rules([{"match": {"index": 7}, "mode": "whole", "shares": 4}, {"match": {}, "mode": "whole"}])
    assert (shared.shares, alone.shares) == (4, 0)
    assert (shared.describe(), alone.describe()) == ("whole, in 4 shares", "whole")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"mode": "dynamic", "shares": 4},
            "rule 1, key shares: only mode whole has shares, this rule's mode is dynamic",
        ),
        ({"mode": "whole", "shares": 1}, "key shares: expected a number from 2 to 1024, not 1"),
        ({"mode": "whole", "shares": True}, "not True"),
        ({"mode": "whole", "shares": "4"}, "not '4'"),
    ],
)
def test_parse_rules_impossible_shares_are_rejected(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidLayout, match=message):
        parse_rules([{"match": {}, **rule}])


def test_parse_rules_partitions_with_placements() -> None:
    (rule,) = parse_rules(
        [
            {
                "match": {},
                "mode": "static",
                "partitions": [
                    {"profile": "3g.40gb", "placement": 4},
                    {"profile": "1g.10gb", "count": 2},
                    {"profile": "2g.20gb"},
                ],
            }
        ]
    )
    assert rule.partitions == (
        WantedPartition("3g.40gb", 1, 4),
        WantedPartition("1g.10gb", 2),
        WantedPartition("2g.20gb", 1),
    )
    assert parse_rules([{"match": {}, "mode": "static", "partitions": {}}])[0].partitions == ()
    assert parse_rules([{"match": {}, "mode": "static", "partitions": {"1g.10gb": 0}}])[0].partitions == ()


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (None, "list of rules, not nothing"),
        ({}, "list of rules, not dict"),
        (["x"], "Layout rule 1: expected a mapping, not str"),
        ([{"match": {}, "mode": "dynamic"}, {"mode": "whole"}], "Layout rule 2: the key match is missing"),
        ([{"match": {}, "mode": "shared"}], "rule 1, key mode: 'shared' is not one of static, dynamic, whole"),
        ([{"match": {}}], "key mode: None"),
        ([{"match": {}, "mode": "static"}], "key partitions is missing"),
        ([{"match": {}, "mode": "dynamic", "partitions": {"1g.5gb": 1}}], "only mode static"),
        ([{"match": {}, "mode": "whole", "partition": {}}], "unknown key partition.*Known are match, mode, partitions"),
        ([{"match": {"name": "x"}, "mode": "whole"}], "key match: unknown key name"),
        ([{"match": [], "mode": "whole"}], "key match: expected a mapping, not list"),
        ([{"match": {"index": "0"}, "mode": "whole"}], "match.index: expected a number"),
        ([{"match": {"index": True}, "mode": "whole"}], "match.index: expected a number"),
        ([{"match": {"index": [-1]}, "mode": "whole"}], "match.index: expected a number"),
        ([{"match": {"index": []}, "mode": "whole"}], "match.index: an empty list"),
        ([{"match": {"uuid": 3}, "mode": "whole"}], "match.uuid: expected a text"),
        (
            [{"match": {"pci_address": "nonsense"}, "mode": "whole"}],
            "match.pci_address: 'nonsense' is not a PCI address",
        ),
        ([{"match": {}, "mode": "static", "partitions": "1g.5gb"}], "expected a mapping of profile to count"),
        ([{"match": {}, "mode": "static", "partitions": {"1g.5gb": -1}}], "count of 1g.5gb must be a number"),
        ([{"match": {}, "mode": "static", "partitions": {"1g.5gb": True}}], "count of 1g.5gb must be a number"),
        ([{"match": {}, "mode": "static", "partitions": {"1g.5gb": "2"}}], "count of 1g.5gb must be a number"),
        ([{"match": {}, "mode": "static", "partitions": {5: 1}}], "5 is not the name of a profile"),
        ([{"match": {}, "mode": "static", "partitions": [{"profile": ""}]}], "entry 1: '' is not the name"),
        ([{"match": {}, "mode": "static", "partitions": [{"profile": "x", "placement": "0"}]}], "placement must be"),
        ([{"match": {}, "mode": "static", "partitions": [{"profile": "x", "placement": 0, "count": 2}]}], "count 2"),
        ([{"match": {}, "mode": "static", "partitions": [{"name": "x"}]}], "entry 1: unknown key name"),
        ([{"match": {}, "mode": "static", "partitions": ["1g.5gb"]}], "entry 1: expected a mapping, not str"),
    ],
)
def test_parse_rules_error_names_rule_and_key(document: Any, text: str) -> None:
    with pytest.raises(InvalidLayout, match=text):
        parse_rules(document)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["", "static", "dynamic", "1g.5gb", "0:0.0", "x"]),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["match", "mode", "partitions", "index", "uuid", "profile", "placement", "count", "1g.5gb"]
            ),
            each,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_parse_rules_any_document_is_read_or_rejected(document: Any) -> None:
    try:
        rules = parse_rules(document)
    except InvalidLayout as error:
        assert str(error)
    else:
        assert all(isinstance(rule, Rule) and rule.mode in ("static", "dynamic", "whole") for rule in rules)


def parted(*entries: dict[str, Any], name: str = "chosen") -> dict[str, Any]:
    return {"version": "v1", "mig-configs": {name: list(entries)}}


ALL_DISABLED = {"devices": "all", "mig-enabled": False}
ALL_ENABLED: dict[str, Any] = {"devices": "all", "mig-enabled": True, "mig-devices": {}}


def modes(rules: tuple[Rule, ...]) -> list[tuple[str, tuple[tuple[str, int], ...]]]:
    return [(rule.mode, tuple((each.profile, each.count) for each in rule.partitions)) for rule in rules]


def test_mig_parted_all_disabled_and_all_enabled() -> None:
    gpus = [device("a100-40", 0, enabled=True), device("a100-40", 1)]
    off = rules_from_mig_parted(parted(ALL_DISABLED), "chosen", gpus)
    assert modes(off) == [("whole", ()), ("whole", ())]
    on = rules_from_mig_parted(parted(ALL_ENABLED), "chosen", gpus)
    assert modes(on) == [("static", ()), ("static", ())]
    assert [rule.match.uuid for rule in on] == [(gpus[0].uuid,), (gpus[1].uuid,)]


def test_mig_parted_all_of_a_profile_fills_every_board() -> None:
    """The configurations all-<profile> that mig-parted ships fill each board, for each profile."""
    for name in board_names():
        gpu = device(name)
        for profile in gpu.profiles:
            entry = {"devices": "all", "mig-enabled": True, "mig-devices": {profile.name: profile.maximum}}
            (rule,) = rules_from_mig_parted(parted(entry), "chosen", [gpu])
            plan = plan_layout(gpu, rule)
            made = [step for step in plan.to_dict()["steps"] if step["step"] == "create_partition"]
            assert [step["profile"] for step in made] == [profile.name] * profile.maximum


def test_mig_parted_all_balanced_applies_by_device_filter() -> None:
    """One configuration for several boards applies to each board its own entry, by PCI device id."""
    document = parted(
        {
            "device-filter": ["0x20B010DE", "0x20F110DE"],
            "devices": "all",
            "mig-enabled": True,
            "mig-devices": {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1},
        },
        {
            "device-filter": "0x233010DE",
            "devices": "all",
            "mig-enabled": True,
            "mig-devices": {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
        },
        name="all-balanced",
    )
    a100, h100, l4 = device("a100-40", 0), device("h100-80", 1), device("l4", 2)
    assert a100.pci_device_id in (0x20B010DE, 0x20F110DE) and h100.pci_device_id == 0x233010DE
    rules = rules_from_mig_parted(document, "all-balanced", [a100, h100, l4])
    assert modes(rules) == [
        ("static", (("1g.5gb", 2), ("2g.10gb", 1), ("3g.20gb", 1))),
        ("static", (("1g.10gb", 2), ("2g.20gb", 1), ("3g.40gb", 1))),
    ]
    for gpu, rule in zip((a100, h100), rules):
        assert plan_layout(gpu, rule).steps


def test_mig_parted_filter_with_subsystem_matches_it() -> None:
    gpu = device("h100-80")
    entry = {**ALL_ENABLED, "device-filter": f"0x233010DE:0x{gpu.pci_subsystem_id:08X}"}
    assert len(rules_from_mig_parted(parted(entry), "chosen", [gpu])) == 1
    other = replace(gpu, pci_subsystem_id=0x1234)
    assert rules_from_mig_parted(parted(entry), "chosen", [other]) == ()


def test_mig_parted_later_entry_wins_and_index_is_by_pci_address() -> None:
    low, high = device("h100-80", 0), device("h100-80", 1)
    swapped = [replace(low, index=1), replace(high, index=0)]
    document = parted(ALL_DISABLED, {"devices": [1], "mig-enabled": True, "mig-devices": {"1g.10gb": 7}})
    rules = rules_from_mig_parted(document, "chosen", swapped)
    assert [(rule.match.uuid, rule.mode) for rule in rules] == [((low.uuid,), "whole"), ((high.uuid,), "static")]


def test_mig_parted_unnamed_gpus_are_not_changed() -> None:
    document = parted({"devices": [0], "mig-enabled": False})
    rules = rules_from_mig_parted(document, "chosen", [device("h100-80", 0), device("h100-80", 1)])
    assert len(rules) == 1


def test_mig_parted_all_skips_gpus_without_mig_but_index_does_not() -> None:
    gpus = [device("l4", 0), device("h100-80", 1)]
    assert len(rules_from_mig_parted(parted(ALL_ENABLED), "chosen", gpus)) == 1
    with pytest.raises(Unsupported, match="names device 0, but NVIDIA L4"):
        rules_from_mig_parted(parted({**ALL_ENABLED, "devices": [0, 1]}), "chosen", gpus)


def test_mig_parted_disabled_mig_is_valid_without_mig() -> None:
    gpus = [device("l4", 0), device("h100-80", 1)]
    rules = rules_from_mig_parted(parted({"devices": [0, 1], "mig-enabled": False}), "chosen", gpus)
    assert [rule.match.uuid for rule in rules] == [(gpus[1].uuid,)]


def test_configuration_of_gpus_leaves_them_unchanged() -> None:
    """The described file leaves the GPUs unchanged. Each GPU is in an entry, also those without MIG, as mig-parted's assert requires."""
    gpus = [device("l4", 3), device("h100-80", 0, places=((9, 4), (19, 0), (19, 1))), device("h100-80", 1)]
    document, left_out = configuration_of(gpus, "mine")
    assert left_out == ()
    assert document == parted(
        {"devices": [0], "mig-enabled": True, "mig-devices": {"1g.10gb": 2, "3g.40gb": 1}},
        {"devices": [1, 2], "mig-enabled": False},
        name="mine",
    )
    rules = rules_from_mig_parted(document, "mine", gpus)
    assert len(rules) == 2
    for gpu in gpus[1:]:
        (rule,) = (rule for rule in rules if rule.match.matches(gpu))
        assert plan_layout(gpu, rule).steps == ()


def test_configuration_of_equal_gpus_needs_no_indices() -> None:
    gpus = [device("h100-80", 0), device("h100-80", 1)]
    assert configuration_of(gpus, "off")[0] == parted(ALL_DISABLED, name="off")
    assert configuration_of([], "off")[0] == parted(ALL_DISABLED, name="off")
    assert configuration_of(gpus, "off", [1])[0] == parted({"devices": [0, 2], "mig-enabled": False}, name="off")


def test_possible_configurations_fit_each_board() -> None:
    """For each configuration on each board, the rules can be planned and fill the stated partitions."""
    for name in board_names():
        gpu = device(name)
        document = possible_configurations([gpu])
        for chosen in document["mig-configs"]:
            (rule,) = rules_from_mig_parted(document, chosen, [gpu])
            plan_layout(gpu, rule)
    balanced = possible_configurations([device("h100-80")])["mig-configs"]["all-balanced"]
    assert balanced == [
        {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}}
    ]
    assert "all-1g.10gb.me" in possible_configurations([device("h100-80")])["mig-configs"]


def test_possible_configurations_mixed_boards_use_filters() -> None:
    gpus = [device("h100-80", 0), device("a30", 1), device("l4", 2), device("h100-80", 3)]
    document = possible_configurations(gpus)
    assert all(len(entries) == 1 for name, entries in document["mig-configs"].items() if "g." in name)
    rules = rules_from_mig_parted(document, "all-balanced", gpus)
    assert [sum(each.count for each in rule.partitions) for rule in rules] == [4, 3, 4]
    assert len(rules_from_mig_parted(document, "all-1g.6gb", gpus)) == 1
    assert list(possible_configurations([device("l4")])["mig-configs"]) == ["all-disabled", "all-enabled"]


@pytest.mark.parametrize(
    ("instances", "why"),
    [
        (0, "no compute instance"),
        (1, "one compute instance that does not fill it"),
        (2, "2 compute instances that share it"),
    ],
)
def test_configuration_of_excludes_manually_created_partitions(instances: int, why: str) -> None:
    gpu = device("h100-80", places=((19, 0), (19, 1)))
    odd = replace(gpu.partitions[0], uuid="", compute_instances=instances)
    document, left_out = configuration_of([replace(gpu, partitions=(odd, gpu.partitions[1]))], "mine")
    assert document["mig-configs"]["mine"][0]["mig-devices"] == {"1g.10gb": 1}
    assert left_out[0].startswith("1g.10gb at 0:1 on ") and f": it has {why}" in left_out[0]


def test_mig_parted_profile_spellings_are_added_up() -> None:
    entry = {
        "devices": "all",
        "mig-enabled": True,
        "mig-devices": {"1c.1g.5gb": 1, "1g.5gb": 2, "1g.5gb+me": 1, "3g.20gb": 0},
    }
    (rule,) = rules_from_mig_parted(parted(entry), "chosen", [device("a100-40")])
    assert modes((rule,)) == [("static", (("1g.5gb", 3), ("1g.5gb+me", 1)))]
    assert parse_name("1c.1g.5gb") == parse_name("1g.5gb")
    assert len(plan_layout(device("a100-40", enabled=True), rule).steps) == 4


@pytest.mark.parametrize(
    ("document", "error", "text"),
    [
        (None, InvalidLayout, "mig-parted file: it is empty, expected version and mig-configs"),
        ({}, InvalidLayout, "mig-parted file: it is empty"),
        ("text", InvalidLayout, "mig-parted file: expected a mapping"),
        ({"kind": "ConfigMap", "data": {"config.yaml": "version: v1"}}, InvalidLayout, "wrapped in a ConfigMap"),
        (
            parted({**ALL_ENABLED, "mig-devices": {"1G.5GB": 1}}),
            InvalidLayout,
            "'chosen', entry 1, key mig-devices: '1G",
        ),
        ({"version": "v2", "mig-configs": {}}, InvalidLayout, "version 'v2'"),
        ({"version": "v1"}, InvalidLayout, "mig-configs must be"),
        ({"version": "v1", "configs": {}}, InvalidLayout, "unknown key configs"),
        (parted(ALL_DISABLED, name="all-disabled"), InvalidLayout, "no configuration 'chosen'.*It has all-disabled"),
        ({"version": "v1", "mig-configs": {"chosen": {}}}, InvalidLayout, "must be a list"),
        (parted({**ALL_ENABLED, "mig": 1}), InvalidLayout, "entry 1: unknown key mig"),
        (parted({**ALL_ENABLED, "devices": "0"}), InvalidLayout, "key devices: expected 'all' or a list"),
        (parted({**ALL_ENABLED, "devices": [True]}), InvalidLayout, "key devices"),
        (parted({"devices": "all"}), InvalidLayout, "key mig-enabled"),
        (parted({"devices": "all", "mig-enabled": True}), InvalidLayout, "key mig-devices: a mapping"),
        (parted({**ALL_DISABLED, "mig-devices": {"1g.5gb": 1}}), InvalidLayout, "not possible when MIG is disabled"),
        (parted({**ALL_ENABLED, "mig-devices": {"1g.5gb": 0}}), InvalidLayout, "all counts are 0"),
        (parted({**ALL_ENABLED, "mig-devices": {"1g.5gb": "7"}}), InvalidLayout, "count of 1g.5gb"),
        (parted({**ALL_ENABLED, "mig-devices": {"small": 1}}), InvalidLayout, "'small' is not the name"),
        (parted({**ALL_ENABLED, "device-filter": "20B0"}), InvalidLayout, "device-filter: '20B0'"),
        (
            parted({**ALL_ENABLED, "mig-devices": {"1c.2g.10gb": 1}}),
            Unsupported,
            "1c.2g.10gb asks for .* does not fill",
        ),
        (
            parted({**ALL_ENABLED, "mig-devices": {"MIG 2c.3g.20gb+me": 1}}),
            Unsupported,
            "Write 3g.20gb.me for the whole",
        ),
    ],
)
def test_mig_parted_error_is_named(document: Any, error: type[AcceleratorError], text: str) -> None:
    with pytest.raises(error, match=text):
        rules_from_mig_parted(document, "chosen", [device("a100-40")])


def test_mig_parted_numeric_yaml_name_is_found() -> None:
    (rule,) = rules_from_mig_parted(
        {"version": "v1", "mig-configs": {2026: [ALL_DISABLED]}}, "2026", [device("a100-40")]
    )
    assert rule.mode == "whole"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"config.yaml": "a", "other": "b"}, "a"),
        ({"mine.yaml": "c"}, "c"),
    ],
)
def test_file_in_config_map_is_found(data: dict[str, str], expected: str) -> None:
    assert file_in_config_map({"apiVersion": "v1", "kind": "ConfigMap", "data": data}) == expected
    assert file_in_config_map(parted(ALL_DISABLED)) is None


@pytest.mark.parametrize("data", [None, {}, {"a": "x", "b": "y"}])
def test_config_map_without_single_file_is_rejected(data: Any) -> None:
    with pytest.raises(InvalidLayout, match=r"expected config\.yaml or one file"):
        file_in_config_map({"kind": "ConfigMap", "data": data})


def test_parse_rules_equal_placements_are_rejected_with_entries() -> None:
    partitions = [{"profile": "1g.10gb", "placement": 0}, {"profile": "1g.10gb", "placement": 0}]
    with pytest.raises(InvalidLayout, match=r"entry 2: placement 0 is that of entry 1 already"):
        parse_rules([{"match": {}, "mode": "static", "partitions": partitions}])


def test_indices_without_device_are_named() -> None:
    gpus = [device("a100-40", index) for index in range(4)]
    rules = parse_rules(
        [
            {"match": {"index": [0, 8]}, "mode": "whole"},
            {"match": {"index": [3, 5], "vendor": "ascend"}, "mode": "whole"},
            {"match": {"index": [0, 1]}, "mode": "whole"},
            {"match": {"index": 6}, "mode": "whole"},
        ]
    )
    first, second = unmatched_indices(rules, gpus, unread=[7])
    assert "Layout rule 1, key match.index: there is no device 8; the devices are 0, 1, 2, 3" in first
    assert "rule 4" in second and "no device 6" in second
    assert unmatched_indices(rules[:1], gpus, unread=[8]) == ()


def test_mig_parted_unreadable_gpu_keeps_its_index() -> None:
    gpus = [device("a100-40", index) for index in (0, 1, 3)]
    rules = rules_from_mig_parted(parted({**ALL_ENABLED, "devices": [1, 2, 3]}), "chosen", gpus, unread=[2])
    assert [rule.match.uuid for rule in rules] == [(gpus[1].uuid,), (gpus[2].uuid,)]


@pytest.mark.parametrize("mode", ["whole", "dynamic"])
def test_parse_rules_passthrough_is_a_boolean(mode: str) -> None:
    (rule,) = parse_rules([{"match": {}, "mode": mode, "passthrough": True}])
    assert rule.passthrough and rule.describe() == f"{mode}, or passed through"
    (rule,) = parse_rules([{"match": {}, "mode": mode, "passthrough": False}])
    assert not rule.passthrough and rule.describe() == mode


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mode": "whole", "passthrough": "yes"}, "key passthrough: expected true or false, not 'yes'"),
        (
            {"mode": "static", "partitions": {}, "passthrough": True},
            "statically partitioned device cannot be passed through as a whole",
        ),
        ({"mode": "whole", "shares": 4, "passthrough": True}, "a device has shares or passthrough, not both"),
    ],
)
def test_parse_rules_invalid_passthrough_is_rejected(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidLayout, match=message):
        parse_rules([{"match": {}, **more}])
