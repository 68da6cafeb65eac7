# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Differences of devices from a layout, descriptions, modes alone, and checkpoints: plans without devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._layout import checkpoint
from ansible_collections.dra.accelerators.plugins.module_utils._layout import describe as states
from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import (
    LayoutFailed,
    apply,
    apply_reset_option,
    assign,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout.layout_module import Layouts, partition_devices
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import (
    AcceleratorError,
    InUse,
    NotFound,
    Unsupported,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Fault, Finding, Process
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.layout_differences import compare
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.store.prepared_claims import PreparedPartition

from tests.unit.core import board_model, chip_model

# Profile ids of an H100 with 80 GB.
SMALL, LARGE = 19, 9
STATIC = {"match": {}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 1}}


def gpu(index: int = 0, *places: tuple[int, int], **changes: Any) -> Any:
    return board_model.device("h100-80", index, places=places, **changes)


def by_hand(device: Any, profile: str, instances: int = 0) -> Any:
    """Return the device with its partitions of a profile in a form that only their creator can create again."""
    return replace(
        device,
        partitions=tuple(
            replace(each, uuid="", compute_instances=instances) if each.profile == profile else each
            for each in device.partitions
        ),
    )


def held(device: Any, number: int, *, created: bool) -> Any:
    each = device.partitions[number]
    return PreparedPartition("team-a/training", device.uuid, each.uuid, each.profile_id, each.placement, created)


def compared(devices: list[Any], *rules: dict[str, Any], prepared: Any = (), **more: Any) -> list[dict[str, Any]]:
    return compare(devices, parse_rules(list(rules)), prepared, **more)


def kinds(assigned: Any) -> list[list[str]]:
    return [[step.to_dict()["step"] for step in one.plan.steps] for one in assigned]


# ---- comparison


def test_compare_equal_layout_has_no_difference() -> None:
    assert compared([gpu(0, (LARGE, 4), (SMALL, 0))], STATIC) == []


def test_compare_unmatched_device_has_no_difference() -> None:
    assert compared([gpu(1)], {**STATIC, "match": {"index": 0}}) == []


def test_compare_names_missing_and_surplus_partitions() -> None:
    device = gpu(0, (SMALL, 0), (SMALL, 1))
    (found,) = compared([device], STATIC, prepared=[held(device, 1, created=False)])
    assert [each["profile"] for each in found["missing"]] == ["3g.40gb"]
    # The partition that a claim holds is the one that can stay.
    assert [(each["placement"]["start"], each["owner"]) for each in found["surplus"]] == [(0, "administrator")]
    assert found["mode"] == {"found": True, "requested": True}
    assert "missing: 3g.40gb at 4; not requested: 1g.10gb at 0" in found["message"]
    assert device.uuid in found["message"] and found["error"] is None


def test_compare_mode_difference_states_reset() -> None:
    (found,) = compared([gpu()], STATIC)
    assert found["mode"] == {"found": False, "requested": True}
    assert "partitioning is off and is to be on;" in found["message"]
    (found,) = compared([board_model.device("a100-40")], {"match": {}, "mode": "static", "partitions": {}})
    assert "partitioning is off and is to be on, which takes a reset" in found["message"]


def test_compare_surplus_held_by_claim_is_reported() -> None:
    device = gpu(0, (SMALL, 0))
    (found,) = compared([device], {"match": {}, "mode": "whole"}, prepared=[held(device, 0, created=False)])
    assert "team-a/training" in found["held_by"][0]
    assert found["surplus"][0]["claims"] == ["team-a/training"]


def test_compare_impossible_layout_is_reported() -> None:
    (found,) = compared([gpu()], {**STATIC, "partitions": {"3g.40gb": 3}})
    assert found["error"]["code"] == "does-not-fit"
    assert "does not fit" in found["message"]


@pytest.mark.parametrize(
    ("enabled", "mode", "differs"),
    [(True, "static", False), (False, "static", True), (True, "whole", True), (False, "whole", False)],
)
def test_compare_mode_only(enabled: bool, mode: str, differs: bool) -> None:
    rule = STATIC if mode == "static" else {"match": {}, "mode": mode}
    assert bool(compared([gpu(enabled=enabled)], rule, mode_only=True)) is differs


# ---- modes alone


def assigned_modes(devices: list[Any], *rules: dict[str, Any], prepared: Any = ()) -> Any:
    return states.assign_modes(devices, parse_rules(list(rules)), prepared)


def test_mode_only_switches_without_partitions() -> None:
    assigned, errors = assigned_modes([gpu(), gpu(1, (SMALL, 0)), gpu(2)], STATIC)
    assert errors == ()
    assert kinds(assigned) == [["set_partitioning"], [], ["set_partitioning"]]
    assert [one.rule.mode for one in assigned] == ["static"] * 3


def test_mode_only_keeps_partitions_if_mode_stays() -> None:
    device = by_hand(gpu(0, (SMALL, 0), (LARGE, 4)), "1g.10gb")
    assigned, errors = assigned_modes([device], STATIC, prepared=[held(device, 1, created=True)])
    assert (kinds(assigned), errors) == ([[]], ())


def test_mode_only_disabling_deletes_unused_partitions() -> None:
    device = gpu(0, (SMALL, 0))
    assigned, _errors = assigned_modes([device], {"match": {}, "mode": "whole"})
    assert kinds(assigned) == [["destroy_partition", "set_partitioning"]]
    assigned, errors = assigned_modes(
        [device], {"match": {}, "mode": "whole"}, prepared=[held(device, 0, created=True)]
    )
    assert assigned == ()
    assert [error.code for error in errors] == ["in-use"]


def test_mode_only_reverts_pending_change() -> None:
    device = board_model.device("a100-40", enabled=True, pending=False)
    assigned, _errors = assigned_modes([device], {"match": {}, "mode": "static", "partitions": {}})
    assert [step.to_dict()["enabled"] for step in assigned[0].plan.steps] == [True]


def test_mode_only_dynamic_enables_mode_if_reset_is_needed() -> None:
    assigned, _errors = assigned_modes([gpu(), board_model.device("a100-40", 1)], {"match": {}, "mode": "dynamic"})
    assert kinds(assigned) == [[], ["set_partitioning", "reset_device"]]
    assert {one.rule.mode for one in assigned} == {"dynamic"}


def test_mode_only_unsupported_device_is_rejected() -> None:
    _assigned, errors = assigned_modes([board_model.device("l4")], STATIC)
    assert [error.code for error in errors] == ["unsupported"]


# ---- descriptions


def test_describe_devices_changes_nothing() -> None:
    devices = [gpu(0, (LARGE, 4), (SMALL, 0)), gpu(1), gpu(2, (LARGE, 4), (SMALL, 0)), board_model.device("l4", 3)]
    rules, left_out = states.describe_devices(devices)
    assert rules == [
        {
            "match": {"vendor": "nvidia", "index": [0, 2]},
            "mode": "static",
            "partitions": [{"profile": "1g.10gb", "placement": 0}, {"profile": "3g.40gb", "placement": 4}],
        },
        {"match": {"vendor": "nvidia", "index": [1, 3]}, "mode": "whole"},
    ]
    assert left_out == []
    assert compare(devices, parse_rules(rules)) == []


def test_describe_equal_devices_needs_no_indices() -> None:
    rules, _left_out = states.describe_devices([gpu(), gpu(1)])
    assert rules == [{"match": {"vendor": "nvidia"}, "mode": "whole"}]


def test_describe_device_with_partitions_of_claims_is_dynamic() -> None:
    device = gpu(0, (SMALL, 0), (LARGE, 4))
    rules, left_out = states.describe_devices([device], [held(device, 1, created=True)])
    assert rules == [{"match": {"vendor": "nvidia"}, "mode": "dynamic"}]
    assert len(left_out) == 1
    assert left_out[0].startswith(
        f"{device.partitions[0].describe()} on {device.describe()}: a device with partitions of claims has the mode dynamic"
    )


def test_describe_excludes_manually_created_partitions() -> None:
    device = by_hand(gpu(0, (SMALL, 0), (LARGE, 4)), "1g.10gb", instances=2)
    rules, left_out = states.describe_devices([device])
    assert rules[0]["partitions"] == [{"profile": "3g.40gb", "placement": 4}]
    assert "1g.10gb at 0:1, created manually with 2 compute instances, on NVIDIA H100" in left_out[0]


def test_describe_numbered_partitions_by_count() -> None:
    profile = min(
        (each for each in chip_model.profiles("910B3") if each.is_numbered), key=lambda each: each.memory_bytes
    )
    slices = [chip_model.partition("910B3", profile.name, place) for place in profile.placements[:2]]
    chip = chip_model.device("910B3", slices)
    rules, _left_out = states.describe_devices([chip])
    assert rules[0]["partitions"] == [{"profile": profile.name, "count": 2}]
    assert rules[0]["match"] == {"vendor": "ascend"}
    assert compare([chip], parse_rules(rules)) == []


# ---- checkpoints


def kept(devices: list[Any], prepared: Any = ()) -> Any:
    return checkpoint.parse(checkpoint.to_text("nvidia", devices, prepared), "/checkpoint", "nvidia")


def restored(before: list[Any], now: list[Any], *, then: Any = (), prepared: Any = (), **more: Any) -> Any:
    found = checkpoint.restoration(kept(before, then), now, more.pop("faulty", ()), prepared, **more)
    return (*checkpoint.assign_restoration(now, found, prepared), found.left_out)


def test_checkpoint_restores_placements_and_modes_only() -> None:
    before = [gpu(0, (LARGE, 0), (SMALL, 5)), gpu(1)]
    now = [gpu(0), gpu(1, (SMALL, 0)), gpu(2, (SMALL, 3))]
    assigned, errors, left_out = restored(before, now)
    assert (errors, left_out) == ((), ())
    assert kinds(assigned) == [
        ["set_partitioning", "create_partition", "create_partition"],
        ["destroy_partition", "set_partitioning"],
    ]
    made = [step.to_dict() for step in assigned[0].plan.steps[1:]]
    assert [(step["profile"], step["start"]) for step in made] == [("3g.40gb", 0), ("1g.10gb", 5)]


def test_checkpoint_of_current_state_changes_nothing() -> None:
    device = by_hand(gpu(0, (LARGE, 4), (SMALL, 0)), "1g.10gb")
    assert kinds(restored([device], [device])[0]) == [[]]


def test_checkpoint_is_independent_of_ids() -> None:
    device = gpu(0, (LARGE, 4))
    other = replace(device, partitions=tuple(replace(one, uuid="MIG-x", instance_id=9) for one in device.partitions))
    assert checkpoint.to_text("nvidia", [device], ()) == checkpoint.to_text("nvidia", [other], ())


def test_checkpoint_partitions_of_claims_are_restored_with_claim() -> None:
    device = gpu(0, (LARGE, 4), (SMALL, 0))
    claim = held(device, 1, created=True)
    (assigned,), _errors, left_out = restored([device], [gpu(0, enabled=True)], then=[claim], prepared=[claim])
    assert [step.start for step in map(_placement, assigned.plan.steps)] == [4, 0]
    assert left_out == ()
    (assigned,), _errors, left_out = restored([device], [gpu(0, enabled=True)], then=[claim])
    assert len(assigned.plan.steps) == 1
    gone = device.partitions[1]
    assert left_out == (
        f"{gone.profile} at {gone.placement} on {device.describe()} was created for the claim team-a/training, which is no longer prepared",
    )


def _placement(step: Any) -> Any:
    return step.placement


def test_checkpoint_partitions_of_later_claims_block() -> None:
    now = gpu(0, (SMALL, 0))
    assigned, errors, _left_out = restored([gpu(0)], [now], prepared=[held(now, 0, created=True)])
    assert assigned == ()
    assert [(error.code, error.claims) for error in errors] == [("in-use", ("team-a/training",))]


def test_checkpoint_manual_partition_stays_or_is_reported() -> None:
    before = by_hand(gpu(0, (LARGE, 4), (SMALL, 0)), "1g.10gb", instances=2)
    there = by_hand(gpu(0, (SMALL, 0)), "1g.10gb", instances=2)
    (assigned,), _errors, _left_out = restored([before], [there])
    assert [step.to_dict()["step"] for step in assigned.plan.steps] == ["create_partition"]
    # A partition in a different form counts as a different one.
    for now in (gpu(0, (LARGE, 4)), gpu(0, (SMALL, 0)), by_hand(gpu(0, (SMALL, 0)), "1g.10gb")):
        with pytest.raises(
            Unsupported, match=r"manually created partitions that no longer exist: 1g.10gb at 0:1 on NVIDIA H100"
        ) as raised:
            restored([before], [now])
        assert raised.value.code == "foreign-partition"
    (assigned,), _errors, left_out = restored([before], [gpu(0, enabled=True)], leave_out_foreign=True)
    assert len(assigned.plan.steps) == 1
    assert "was created manually and cannot be restored" in left_out[0]


def test_checkpoint_names_manually_created_partitions() -> None:
    (text,) = checkpoint.unrestorable([by_hand(gpu(0, (SMALL, 0)), "1g.10gb")])
    assert "no compute instance" in text and "in a form that no profile has" in text
    (text,) = checkpoint.unrestorable([board_model.device("a100-40", pending=True)])
    assert "pending until a reset" in text


def test_reset_is_blocked_by_manual_partition_of_linked_device() -> None:
    """Boards with a direct link: a reset of one destroys partitions of the other, so a manually created one blocks it."""
    first, second = board_model.device("a30", 0), board_model.device("a30", 1, enabled=True)
    profile = first.profiles[0]
    odd = board_model.partition(profile, profile.placements[0].start, second.uuid, 1, uuid="", compute_instances=0)
    first = replace(first, linked=(second.pci_address,))
    second = replace(second, linked=(first.pci_address,), partitions=(odd,))
    was_on = replace(first, partitioning=replace(first.partitioning, enabled=True, pending=True))
    _assigned, errors, _left_out = restored([was_on, second], [first, second])
    assert [error.code for error in errors] == ["foreign-partition"]
    assert second.uuid in str(errors[0])


def test_blocked_reset_is_rejected_or_deferred_to_reboot() -> None:
    blocked = replace(board_model.device("a100-40"), reset_blocked="nothing connects it. Connect it")
    assigned, errors = assign([blocked], parse_rules([{"match": {}, "mode": "static", "partitions": {}}]), ())
    assert not errors
    with pytest.raises(Unsupported, match="Connect it") as raised:
        apply_reset_option(assigned, "when_needed")
    assert raised.value.code == "reset-blocked"
    (waiting,) = apply_reset_option(assigned, "never")
    assert waiting.withheld


@pytest.mark.parametrize("check_mode", [True, False])
def test_check_mode_warns_of_processes_preventing_reset(tmp_path: Path, check_mode: bool) -> None:
    device = board_model.device("a100-40")
    rules = parse_rules([{"match": {}, "mode": "static", "partitions": {}}])
    queried: list[tuple[str, ...]] = []
    warnings: list[str] = []

    def holders(uuids: Any) -> tuple[Process, ...]:
        queried.append(tuple(uuids))
        return (Process(42, "nv-hostengine", unit="unit nvidia-dcgm.service"),)

    def refuse(*_arguments: Any) -> None:
        raise InUse("it is in use")

    backend: Any = SimpleNamespace(
        vendor="nvidia",
        cdi_kind="k8s.gpu.nvidia.com/claim",
        use_number_file=lambda _directory: None,
        add_detached=lambda _devices: None,
        discover=lambda: (Finding(0, device.describe(), device.uuid, device, None),),
        set_partitioning=refuse,
    )
    module: Any = SimpleNamespace(
        params={"state_path": str(tmp_path / "state.db")}, check_mode=check_mode, warn=warnings.append
    )
    layouts = Layouts("nvidia_mig", "GPU", lambda _scan: rules, holders=holders)
    if not check_mode:
        with pytest.raises(LayoutFailed):
            partition_devices(module, backend, layouts)
        assert not queried and not warnings
        return
    assert partition_devices(module, backend, layouts)["changed"] and queried == [(device.uuid,)]
    (warning,) = warnings
    assert device.describe() in warning and "42 (nv-hostengine, unit nvidia-dcgm.service)" in warning


def test_checkpoint_missing_or_unreadable_device_is_named() -> None:
    before = [gpu(0), gpu(1)]
    with pytest.raises(NotFound, match=r"does not exist.*Nothing was changed") as raised:
        restored(before, [gpu(0)])
    assert raised.value.code == "device-missing" and before[1].uuid in str(raised.value)
    other = replace(gpu(1), uuid="GPU-other", product="NVIDIA Other")
    with pytest.raises(NotFound, match="Its PCI address belongs to NVIDIA Other"):
        restored(before, [gpu(0), other])
    for uuid in (before[1].uuid, ""):  # a device that was never read has no UUID
        silent = Finding(1, "GPU 1", uuid, None, Fault("no-answer", "It does not answer"))
        with pytest.raises(AcceleratorError, match="cannot be read: It does not answer") as raised:
            restored(before, [gpu(0)], faulty=[silent])
        assert raised.value.code == "unread"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "damaged-record"),
        ("{}", "damaged-record"),
        ('{"version": 2, "vendor": "nvidia", "devices": []}', "damaged-record"),
        ('{"version": 1, "vendor": "nvidia", "devices": [{}]}', "damaged-record"),
        ('{"version": 1, "vendor": "ascend", "devices": []}', "other-vendor"),
    ],
)
def test_checkpoint_invalid_document_is_rejected(text: str, code: str) -> None:
    with pytest.raises(AcceleratorError, match="/checkpoint") as raised:
        checkpoint.parse(text, "/checkpoint", "nvidia")
    assert raised.value.code == code


class Machine:
    """Two GPUs. The second one rejects partitions."""

    def __init__(self, devices: list[Any]) -> None:
        self.devices = {device.uuid: device for device in devices}
        self.destroyed: list[int] = []

    def discover(self) -> tuple[Any, ...]:
        return tuple(Finding(each.index, each.describe(), each.uuid, each) for each in self.devices.values())

    def device(self, uuid: str) -> Any:
        return self.devices[uuid]

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        state = replace(self.devices[uuid].partitioning, enabled=enabled, pending=enabled)
        self.devices[uuid] = replace(self.devices[uuid], partitioning=state)

    def create_partition(self, uuid: str, _profile: int, _placement: Any) -> Any:
        if self.devices[uuid].index == 1:
            raise AcceleratorError("It does not want to")

    def destroy_partition(self, _uuid: str, instance_id: int) -> None:
        self.destroyed.append(instance_id)


def test_manual_partition_survives_failure_on_other_device() -> None:
    odd = by_hand(gpu(0, (SMALL, 0)), "1g.10gb")
    machine = Machine([odd, gpu(1, enabled=True)])
    assigned, _errors, _left_out = restored(
        [by_hand(gpu(0, (LARGE, 4), (SMALL, 0)), "1g.10gb"), gpu(1, (SMALL, 0))], list(machine.devices.values())
    )
    with pytest.raises(LayoutFailed):
        apply(machine, assigned)
    assert machine.destroyed == []
