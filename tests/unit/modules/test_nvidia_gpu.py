# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module nvidia_gpu on nodes with simulated boards: set, verify, refuse, record, and restore."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.settings.knobs import (
    encode_previous_value,
    setting_key,
)
from driver_store import claim

if TYPE_CHECKING:
    from conftest import Node

ALL: dict[str, Any] = {"match": {}}
BOOT = System().boot_id()


def record_of(node: Node) -> Path:
    return node.root / "records/settings.json"


def set_up(node: Node, *rules: dict[str, Any], check: bool = False, **more: Any) -> dict[str, Any]:
    """Run the module with rules. Without rules restore all settings."""
    options = {"record": str(record_of(node)), "state_path": str(node.root / "state.db"), **more}
    given = {"settings": list(rules)} if rules else {"state": "absent"}
    return node.module("nvidia_gpu", {**given, **options}, check=check, diff=True)


def shown(node: Node, index: int = 0) -> dict[str, Any]:
    """Return the settings of a GPU as the silicon reports them."""
    gpu = json.loads(node.simulator("show", "--json"))["gpus"][index]
    names = {
        "power": "power_limit_mw",
        "low": "locked_clock_minimum_mhz",
        "high": "locked_clock_maximum_mhz",
        "persistence": "persistence_mode",
        "mode": "compute_mode",
        "slice": "time_slice",
        "ecc": "ecc_current",
    }
    return {word: gpu[name] for word, name in names.items()}


def smi(node: Node, *words: str) -> None:
    """Run nvidia-smi as an administrator does."""
    subprocess.run(["nvidia-smi", *words], env=node.environment(), check=True, capture_output=True)


def restart(node: Node) -> None:
    """Reboot the node: the boards lose their volatile settings, and the record has a previous boot id."""
    node.reboot()
    record = json.loads(record_of(node).read_text())
    record_of(node).write_text(json.dumps({**record, "boot_id": "a previous boot"}))


TUNED = {
    "match": {"index": 0},
    "persistence": False,
    "compute_mode": "ExclusiveProcess",
    "power_limit": 500,
    "graphics_clocks": {"maximum": 1410},
    "time_slice": "Long",
}


def test_settings_check_mode_equals_run_and_second_run_changes_nothing(node: Node) -> None:
    before = shown(node)
    dry_run = set_up(node, TUNED, check=True)
    assert dry_run["changed"] and shown(node) == before and not record_of(node).exists()

    assert not dry_run["up_to_date"]
    done = set_up(node, TUNED)
    assert set_up(node, TUNED, check=True)["up_to_date"]
    assert (done["steps"], done["diff"], done["devices"]) == (dry_run["steps"], dry_run["diff"], dry_run["devices"])
    assert len(done["steps"]) == 5 and all(step["indices"] == [0] for step in done["steps"])
    (gpu,) = done["devices"]
    assert gpu["after"]["graphics_clocks"] == {"minimum": 345, "maximum": 1410}
    assert (gpu["before"]["power_limit"], gpu["after"]["power_limit"]) == (700, 500)
    assert gpu["allowed"]["power_limit"] == "a whole number from 200 to 700 W"
    assert "power_limit: 700 W\n" in done["diff"][0]["before"] and "power_limit: 500 W\n" in done["diff"][0]["after"]
    now = shown(node)
    assert (now["power"], now["low"], now["high"]) == (500_000, 345, 1410)

    again = set_up(node, TUNED)
    assert not again["changed"] and again["diff"] == [] and again["devices"][0]["before"] == gpu["after"]
    # Restored values: the saved ones, and the default where no value could be read.
    gone = set_up(node)
    assert gone["changed"] and shown(node) == before
    assert not record_of(node).parent.exists()
    assert not set_up(node)["changed"]


def test_absent_restores_only_changed_settings(node: Node) -> None:
    """The module restores only settings that it changed, to the values that an administrator had set."""
    smi(node, "-i", "0", "-pl", "600")
    smi(node, "-i", "1", "-pl", "300")
    set_up(node, {**ALL, "power_limit": 300})
    set_up(node, {**ALL, "power_limit": 400})
    assert shown(node)["power"] == shown(node, 1)["power"] == 400_000
    set_up(node)
    assert (shown(node)["power"], shown(node, 1)["power"], shown(node, 2)["power"]) == (600_000, 300_000, 700_000)


def test_manually_changed_value_is_set_again(node: Node) -> None:
    set_up(node, {**ALL, "power_limit": 300})
    smi(node, "-i", "0", "-pl", "650")
    done = set_up(node, {**ALL, "power_limit": 300})
    assert [step["description"].split(" of ")[0] for step in done["steps"]] == ["set power_limit"]
    set_up(node)
    assert shown(node)["power"] == 700_000


def test_exclusive_restores_settings_without_rule(node: Node) -> None:
    set_up(node, {"match": {"index": [0, 1]}, "power_limit": 300, "graphics_clocks": {"maximum": 1200}})
    rule = {"match": {"index": 0}, "power_limit": 300}
    assert not set_up(node, rule)["changed"]
    done = set_up(node, rule, exclusive=True)
    assert sorted((step["indices"][0], step["setting"]) for step in done["steps"]) == [
        (0, "graphics_clocks"),
        (1, "graphics_clocks"),
        (1, "power_limit"),
    ]
    assert (shown(node)["power"], shown(node)["high"]) == (300_000, 0)
    assert (shown(node, 1)["power"], shown(node, 1)["high"]) == (700_000, 0)
    assert not set_up(node, rule, exclusive=True)["changed"]


def test_absent_restores_matching_gpus(node: Node) -> None:
    set_up(node, {**ALL, "power_limit": 300})
    set_up(node, {"match": {"index": [2, 3]}}, state="absent")
    assert [shown(node, index)["power"] // 1000 for index in range(5)] == [300, 300, 700, 700, 300]


@pytest.mark.parametrize("check", [True, False])
def test_unsupported_value_is_rejected_with_range(node: Node, check: bool) -> None:
    before = shown(node), shown(node, 1)
    result = set_up(
        node,
        {
            "match": {"index": 1},
            "power_limit": 900,
            "graphics_clocks": {"minimum": 100, "maximum": 5000},
            "time_slice": "Huge",
        },
        {**ALL, "power_limit": 300},
        check=check,
    )
    assert result["failed"] and result["error_code"] == "invalid-settings"
    for words in (
        "power_limit is 900; expected a whole number from 200 to 700 W",
        "graphics_clocks.minimum is 100; expected a whole number from 345 to 1980 MHz",
        "graphics_clocks.maximum is 5000; expected a whole number from 345 to 1980 MHz",
        "time_slice is 'Huge'; expected Default, Short, Medium or Long",
    ):
        assert words in result["msg"]
    assert (shown(node), shown(node, 1)) == before and not record_of(node).exists()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("machine", ["1xT4", "8xH100"])
def test_unsupported_setting_is_rejected(make_node: Callable[[str], Node], machine: str, check: bool) -> None:
    node = make_node(machine)
    result = set_up(node, {**ALL, "memory_clocks": {"maximum": 1593}, "workload_profiles": ["max-q"]}, check=check)
    assert result["failed"] and result["error_code"] == "invalid-settings"
    for name in ("memory_clocks", "workload_profiles"):
        assert f"{name} is not supported by this device" in result["msg"]


def test_workload_profiles_are_set(make_node: Callable[[str], Node]) -> None:
    node = make_node("8xB200")
    rule = {"match": {"index": 0}, "workload_profiles": ["max-q", "llm-training"]}
    assert set_up(node, rule)["devices"][0]["after"]["workload_profiles"] == ["llm-training", "max-q"]
    assert not set_up(node, rule)["changed"]
    assert set_up(node)["devices"][0]["after"]["workload_profiles"] == []


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ({"power_limit": 300}, "the key match is missing"),
        ({"match": {"indx": 0}}, "Settings rule 1, key match: unknown key indx"),
        ({**ALL, "mig_mode": True}, "Partitions, and the mode that they need, are a layout's"),
        ({**ALL, "power_limit": "much"}, "power_limit is 'much'"),
        ({**ALL, "graphics_clocks": {"minimum": 900}}, "graphics_clocks.maximum is missing"),
        ({**ALL, "graphics_clocks": {"minimum": 900, "maximum": 800}}, "no more than the maximum, 800 MHz"),
        ({**ALL, "compute_mode": "Some"}, "expected Default, ExclusiveProcess or Prohibited"),
    ],
)
def test_invalid_rule_is_rejected(shared_node: Node, rule: dict[str, Any], named: str) -> None:
    result = set_up(shared_node, rule)
    assert result["failed"] and result["error_code"] == "invalid-settings"
    assert named in result["msg"]


def test_process_on_gpu_blocks_disruptive_setting(node: Node) -> None:
    node.simulator("fault", "2", "process", "4711")
    result = set_up(node, {**ALL, "compute_mode": "ExclusiveProcess"})
    assert result["failed"] and (result["error_code"], result["pids"]) == ("in-use", [4711])
    assert "compute_mode of NVIDIA H100" in result["msg"] and "4711" in result["msg"]
    assert shown(node)["mode"] == 0
    # Settings that do not disturb the claim are applied.
    assert set_up(node, {**ALL, "power_limit": 500, "graphics_clocks": {"maximum": 1410}})["changed"]


def held(node: Node, index: int, **settings: Any) -> str:
    """Prepare a claim in this boot with these settings and the saved previous values."""
    gpu = set_up(node, {"match": {"index": index}}, check=True)["devices"][0]
    before = {setting_key(gpu["uuid"], name): encode_previous_value(BOOT, value[0]) for name, value in settings.items()}
    claim(
        node.root / "state.db",
        gpu["uuid"],
        boot_id=BOOT,
        meta=before,
        settings={name: value[1] for name, value in settings.items()},
    )
    return str(gpu["uuid"])


@pytest.mark.parametrize("check", [True, False])
def test_claim_on_gpu_blocks_disruptive_setting(node: Node, check: bool) -> None:
    held(node, 1)
    result = set_up(node, {**ALL, "compute_mode": "Prohibited"}, check=check)
    assert result["failed"] and (result["error_code"], result["claims"]) == ("in-use", ["team-a/training"])
    assert shown(node)["mode"] == 0


def test_value_of_claim_is_kept_and_saved_value_counts(node: Node) -> None:
    set_up(node, {**ALL, "power_limit": 600, "graphics_clocks": {"minimum": 345, "maximum": 1410}})
    held(
        node,
        0,
        powerLimit=(600, 300),
        graphicsClocks=({"minimum": 345, "maximum": 1410}, {"minimum": 900, "maximum": 900}),
    )
    smi(node, "-i", "0", "-pl", "300")
    # A run does not change the claim's own value,
    assert not set_up(node, {**ALL, "power_limit": 600, "graphics_clocks": {"maximum": 1410}})["changed"]
    # and refuses a different value, which the claim's end would overwrite.
    for more in ({"power_limit": 500}, {"graphics_clocks": {"maximum": 1200}}):
        result = set_up(node, {**ALL, **more})
        assert result["failed"] and result["claims"] == ["team-a/training"], result
        assert "for the time of the claim" in result["msg"]
    assert shown(node)["power"] == 300_000
    # Settings that do not affect the claim's settings can change.
    done = set_up(node, {**ALL, "persistence": False})
    assert done["changed"] and [each["claims"] for each in done["devices"][:2]] == [["team-a/training"], []]


def test_mig_gpu_keeps_compute_mode_only(node: Node) -> None:
    node.layout({"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1}})
    rule = {"match": {"index": [0, 1]}, "compute_mode": "ExclusiveProcess", "power_limit": 500}
    done = set_up(node, rule)
    assert sorted((step["indices"][0], step["setting"]) for step in done["steps"]) == [
        (0, "power_limit"),
        (1, "compute_mode"),
        (1, "power_limit"),
    ]
    assert done["devices"][0]["withheld"] == {"compute_mode": "MIG is on"}
    assert "compute_mode of NVIDIA H100 80GB HBM3 0" in str(done["warnings"])
    assert not set_up(node, rule)["changed"]


def test_ecc_needs_reset_consent(node: Node) -> None:
    rule = {"match": {"index": 0}, "ecc": False, "power_limit": 500}
    result = set_up(node, rule)
    assert result["failed"] and result["error_code"] == "reset-needs-consent"
    assert shown(node)["power"] == 700_000

    later = set_up(node, rule, reset="never")
    assert later["reset_required"] and later["devices"][0]["reset_required"]
    assert (later["devices"][0]["after"]["ecc"], later["devices"][0]["after"]["ecc_pending"]) == (True, False)
    assert "ecc after the next reset: off" in later["diff"][0]["after"]
    waiting = set_up(node, rule, reset="never")
    assert not waiting["changed"] and waiting["reset_required"]
    restart(node)
    after = set_up(node, rule, reset="never")
    assert [step["setting"] for step in after["steps"]] == ["power_limit"] and not after["reset_required"]
    # The setting and its saved previous value survive the reboot.
    back = set_up(node, reset="never")
    assert (back["devices"][0]["after"]["ecc"], back["devices"][0]["after"]["ecc_pending"]) == (False, True)
    assert not record_of(node).exists()


def test_ecc_reset_precedes_other_settings(node: Node) -> None:
    set_up(node, {"match": {"index": 0}, "graphics_clocks": {"maximum": 1410}})
    rule = {"match": {"index": 0}, "ecc": False, "power_limit": 500, "time_slice": "Short"}
    dry_run = set_up(node, rule, reset="when_needed", check=True)
    done = set_up(node, rule, reset="when_needed")
    assert [step["step"] for step in done["steps"]] == ["set", "reset", "set", "set"]
    assert done["steps"] == dry_run["steps"] and done["devices"] == dry_run["devices"]
    now = shown(node)
    # A reset clears the clocks: the module sets them again.
    assert (now["high"], now["power"], done["devices"][0]["after"]["ecc"]) == (1410, 500_000, False)
    assert not set_up(node, rule)["changed"]
    set_up(node, reset="when_needed")
    assert (shown(node)["high"], shown(node)["power"]) == (0, 700_000)


def test_reset_is_blocked_by_users(node: Node) -> None:
    rule = {"match": {"index": [0, 1, 2]}, "ecc": False}
    node.simulator("fault", "1", "process", "4711")
    node.layout({"match": {"index": 2}, "mode": "static", "partitions": {"3g.40gb": 1}})
    held(node, 0)
    result = set_up(node, rule, reset="when_needed")
    assert result["failed"] and result["error_code"] == "several"
    assert (result["pids"], result["claims"]) == ([4711], ["team-a/training"])
    assert "would take partitions along: 3g.40gb" in result["msg"]
    assert not record_of(node).exists()


def test_linked_gpus_reset_alone_from_ampere_on(make_node: Callable[[str], Node]) -> None:
    node = make_node("4xA30")
    node.simulator("fault", "1", "process", "4711")
    done = set_up(node, {"match": {"index": 0}, "ecc": False}, reset="when_needed")
    assert [step["indices"] for step in done["steps"]] == [[0], [0]]


def test_linked_gpus_reset_together_before_ampere(make_node: Callable[[str], Node]) -> None:
    node = make_node("4xA30")
    node.edit_boards("compute-capability 8.0", "compute-capability 7.0")
    rule = {"match": {"index": 0}, "ecc": False}
    done = set_up(node, rule, reset="when_needed")
    assert [step["indices"] for step in done["steps"]] == [[0], [0, 1]]
    node.simulator("fault", "1", "process", "4711")
    result = set_up(node, reset="when_needed")
    assert result["failed"] and result["pids"] == [4711]


def test_run_killed_before_first_change_is_resumed(node: Node) -> None:
    """The record exists without the clocks: the next run sets them and keeps the saved previous values."""
    rule = {"match": {"index": 0}, "graphics_clocks": {"maximum": 1410}, "power_limit": 500}
    set_up(node, rule)
    record = json.loads(record_of(node).read_text())
    (note,) = record["devices"].values()
    note["set"] = {}
    record_of(node).write_text(json.dumps(record))
    smi(node, "-i", "0", "-rgc")
    done = set_up(node, rule)
    assert [step["setting"] for step in done["steps"]] == ["graphics_clocks"]
    assert shown(node)["high"] == 1410
    set_up(node)
    assert (shown(node)["high"], shown(node)["power"]) == (0, 700_000)


def test_reboot_clears_settings_and_record(node: Node) -> None:
    rule = {**ALL, "power_limit": 500, "graphics_clocks": {"maximum": 1410}}
    set_up(node, rule)
    restart(node)
    assert shown(node)["high"] == 0
    assert set_up(node, rule)["changed"]
    assert shown(node)["high"] == 1410
    restart(node)
    behind = set_up(node, check=True)
    assert not behind["changed"] and not behind["up_to_date"] and record_of(node).exists(), (
        "the record is of a boot that is over"
    )
    assert not set_up(node)["changed"]
    assert not record_of(node).exists()


def test_failed_change_restores_earlier_ones(node: Node) -> None:
    set_up(node, {"match": {"index": 0}, "power_limit": 600})
    before, record = shown(node), record_of(node).read_text()
    node.simulator("fault", "1", "call", "nvmlDeviceSetGpuLockedClocks", "fail", "999")
    result = set_up(node, {"match": {"index": [0, 1]}, "power_limit": 500, "graphics_clocks": {"maximum": 1410}})
    assert result["failed"] and "Set back:" in result["msg"] and len(result["undone"]) == 2, result
    assert shown(node) == before and record_of(node).read_text() == record


def test_unreadable_gpu_is_named_and_others_are_set(node: Node) -> None:
    node.simulator("fault", "3", "lost")
    done = set_up(node, {**ALL, "power_limit": 500})
    assert [device["index"] for device in done["devices"]] == [0, 1, 2, 4, 5, 6, 7]
    assert "One GPU keeps its settings: GPU 3: " in str(done["warnings"])


def test_damaged_record_is_rejected(node: Node) -> None:
    set_up(node, {**ALL, "power_limit": 500})
    record_of(node).write_text('{"version": 9}')
    result = set_up(node, {**ALL, "power_limit": 400})
    assert result["failed"] and result["error_code"] == "damaged-record"
    assert shown(node)["power"] == 500_000


def test_without_driver_fails(node: Node) -> None:
    node.driver = False
    assert set_up(node, {**ALL, "power_limit": 400})["failed"]
