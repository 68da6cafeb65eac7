# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module device_repartition on nodes with simulated boards, and the fleet plan from its answers."""

from __future__ import annotations

import json
import time
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._drain.drain_plan import Consent
from ansible_collections.dra.accelerators.plugins.module_utils._layout.operation_record import (
    await_unprepared,
    is_current,
    wanted_record,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout.repartition_fleet import (
    Cluster,
    fleet_plan,
    is_limit,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import InUse
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition.progress import parse as steps_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition.record import Moment, Record
from drain_world import DRIVER, claim_of
from driver_store import claim
from hypothesis import given
from hypothesis import strategies as st
from migration_world import pod

if TYPE_CHECKING:
    from conftest import Node

FIRST = {"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 4}}
SECOND = {"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}}
Json = dict[str, Any]


def planned(node: Node, directory: Path, *rules: Json, former: list[Json] | None = None, **more: Any) -> Json:
    options = {
        "layout": list(rules),
        "former_layout": former or [],
        "kubelet_root": str(directory),
        "vendor": ["nvidia"],
    }
    return node.module("device_repartition", {**options, **more}, diff=True)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "kubelet/plugins/gpu.nvidia.com"
    directory.mkdir(parents=True)
    return directory


def test_plan_reports_affected_claims_and_changes_nothing(node: Node, tmp_path: Path, state: Path) -> None:
    before = node.layout(FIRST)["after"][0]
    part = next(each for each in before["partitions"] if each["profile"] == "1g.10gb")
    claim(state / "state.db", before["uuid"], part)
    answer = planned(node, tmp_path / "kubelet", SECOND, former=[FIRST])
    assert not answer["changed"] and answer["vendors"] == ["nvidia"] and answer["rules_differ"]
    (operation,) = answer["operations"]
    assert len(operation["going"]) == 2 and operation["claims"] == []  # the two free ones
    assert [step["step"] for step in operation["steps"]] == ["destroy_partition"] * 2 + ["create_partition"]
    assert len(operation["kept"]) == 3 and not operation["resumes"] and not operation["tells_driver"]
    assert len(answer["untouched"]) == 7 and len(answer["diff"]) == 1
    assert "2g.20gb" in answer["diff"][0]["after"] and "2g.20gb" not in answer["diff"][0]["before"]
    assert len(node.partitions()[0]) == 5
    # The affected claims are named, and the result is the same as of the layout's own module.
    (whole,) = planned(node, tmp_path / "kubelet", {"match": {"index": 0}, "mode": "whole"})["operations"]
    assert whole["claims"] == ["team-a/training"] and whole["restarts"]
    node.layout(*operation["wanted"])
    assert planned(node, tmp_path / "kubelet", SECOND, former=[SECOND])["operations"] == []
    assert not planned(node, tmp_path / "kubelet", SECOND, former=[SECOND])["rules_differ"]
    node.layout(*operation["former"])
    assert [(each["profile"], each["placement"]["start"]) for each in before["partitions"]] == node.partitions()[0]


def test_plan_driver_update_for_changed_publication(node: Node, tmp_path: Path, state: Path) -> None:
    assert state.is_dir()
    old = [{"match": {}, "mode": "dynamic"}]
    answer = planned(node, tmp_path / "kubelet", FIRST, *old, former=old)
    (operation,) = answer["operations"]
    assert operation["tells_driver"]
    mine = {"uuid": [operation["devices"][0]["uuid"]]}
    assert next(each for each in operation["driver_layout_before"] if each["match"] == mine)["mode"] == "dynamic"
    assert next(each for each in operation["driver_layout"] if each["match"] == mine)["mode"] == "static"
    assert operation["driver_layout"][-1] == old[0]


def test_plan_ecc_change_needs_reset_consent(node: Node, tmp_path: Path, state: Path) -> None:
    settings = [{"match": {"index": 0}, "ecc": False}]
    rule = {"match": {}, "mode": "whole"}
    silent = planned(node, tmp_path / "kubelet", rule, former=[rule], settings=settings)
    assert silent["failed"] and silent["error_code"] == "reset-needs-consent" and "ECC" in silent["msg"]
    never = planned(node, tmp_path / "kubelet", rule, former=[rule], settings=settings, settings_reset="never")
    assert never["operations"] == []
    yes = planned(node, tmp_path / "kubelet", rule, former=[rule], settings=settings, settings_reset="when_needed")
    (found,) = yes["operations"]
    assert found["resets"] and found["settings"] and found["names"] and found["emptied"] == []


def test_plan_has_boot_settings_before_and_after_each_operation(node: Node, tmp_path: Path, state: Path) -> None:
    desired = {"match": {"index": [0, 1]}, "ecc": False, "power_limit": 400}
    kept = [{"match": {}, "ecc": True}]
    options = {"settings": [desired], "settings_reset": "when_needed", "boot_settings": kept}
    rule = {"match": {}, "mode": "whole"}
    first, second = planned(node, tmp_path / "kubelet", rule, former=[rule], **options)["operations"]

    def own(operation: Json) -> Json:
        return {"match": {"uuid": [operation["devices"][0]["uuid"]]}, "ecc": False, "power_limit": 400}

    assert first["boot_settings_before"] == kept and first["boot_settings"] == [own(first), *kept]
    assert second["boot_settings_before"] == first["boot_settings"]
    assert second["boot_settings"] == [own(second), own(first), *kept]
    # An earlier run was killed after it wrote its rules, before or after it changed the GPU.
    record = Record(first["operation"], (first["devices"][0]["uuid"],), "applying", time.time() + 9, (), ())
    (state / "repartition.json").write_text(json.dumps({"version": 1, **record.to_dict()}))
    options["boot_settings"] = first["boot_settings"]
    again, _second = planned(node, tmp_path / "kubelet", rule, former=[rule], **options)["operations"]
    assert again["resumes"] and again["boot_settings"] == first["boot_settings"]
    assert again["boot_settings_before"] == [{**own(first), "ecc": True}, *kept]
    # A layout alone changes no settings.
    layout = planned(node, tmp_path / "kubelet", FIRST, former=[rule])["operations"]
    assert [(each["boot_settings_before"], each["boot_settings"]) for each in layout] == [([], [])]


@pytest.mark.parametrize("changed", ["nothing", "boot settings", "settings", "all"])
def test_plan_resumed_operation_restores_settings_before_first_run(
    node: Node, tmp_path: Path, state: Path, changed: str
) -> None:
    """The first run was killed after it changed these settings: the resumed operation restores the values from before that run."""
    desired = {"match": {"index": 0}, "ecc": False, "power_limit": 400, "compute_mode": "ExclusiveProcess"}
    kept = [{"match": {"index": [0, 1]}, "ecc": True, "power_limit": 500}, {"match": {}, "persistence": True}]
    options: Json = {"settings": [desired], "settings_reset": "when_needed", "boot_settings": kept}
    before, after = {"match": {"index": 0}, "mode": "whole"}, FIRST
    (first,) = planned(node, tmp_path / "kubelet", after, former=[before], reset="when_needed", **options)["operations"]
    names = ("operation", "driver", "wanted", "former", "former_settings", "former_boot_settings")
    written = {name: first[name] for name in names}
    step = {"state": "present", "kubelet_root": str(tmp_path / "kubelet"), "devices": [first["devices"][0]["uuid"]]}
    assert node.module("device_repartition", {**step, **written})["changed"]
    record = node.module("device_repartition", {**step, "operation": first["operation"], "driver": first["driver"]})[
        "record"
    ]
    assert [record[name] for name in names[4:]] == [first[name] for name in names[4:]]
    if changed in ("boot settings", "all"):
        options["boot_settings"] = first["boot_settings"]
    if changed in ("settings", "all"):
        settings = {"settings": first["settings"], "reset": "when_needed", "record": str(tmp_path / "settings.json")}
        assert node.module("nvidia_gpu", {**settings, "state_path": str(state / "state.db")})["changed"]
    (again,) = planned(node, tmp_path / "kubelet", after, former=[before], reset="when_needed", **options)["operations"]
    assert again["resumes"] and bool(again["settings"]) == (changed not in ("settings", "all"))
    assert again["former_settings"] == first["former_settings"]
    assert again["boot_settings"] == first["boot_settings"]
    uuid = {"uuid": step["devices"]}
    assert again["boot_settings_before"] == [{**kept[0], "match": uuid}, *kept]


def test_plan_layout_that_does_not_fit_is_rejected(node: Node, tmp_path: Path, state: Path) -> None:
    answer = planned(node, tmp_path / "kubelet", {**FIRST, "partitions": {"7g.80gb": 2}})
    assert answer["failed"] and answer["error_code"] == "does-not-fit"


def test_record_is_written_renewed_and_removed(node: Node, tmp_path: Path, state: Path) -> None:
    path = state / "repartition.json"
    options = {
        "kubelet_root": str(tmp_path / "kubelet"),
        "driver": "gpu.nvidia.com",
        "operation": "repartition-1",
        "devices": ["GPU-1"],
        "former": [{"match": {"uuid": ["GPU-1"]}, "mode": "whole"}],
        "wanted": [{"match": {"uuid": ["GPU-1"]}, "mode": "dynamic"}],
    }
    begin = {**options, "state": "present", "seconds": 600}
    assert node.module("device_repartition", begin, check=True)["changed"] and not path.exists()
    first = node.module("device_repartition", begin)
    assert first["changed"] and json.loads(path.read_text())["step"] == "draining"
    assert time.time() < first["record"]["until"] <= time.time() + 600
    assert not node.module("device_repartition", begin)["changed"]
    # The previous state in the record does not change with the progress of the operation.
    further = node.module("device_repartition", {**begin, "step": "applying", "former": options["wanted"]})
    assert further["changed"] and further["record"]["former"] == options["former"]
    other = node.module("device_repartition", {**begin, "operation": "repartition-2"})
    assert other["failed"] and other["error_code"] == "other-operation"
    stays = node.module("device_repartition", {**options, "state": "absent", "operation": "repartition-2"})
    assert not stays["changed"] and path.exists()
    ended = node.module("device_repartition", {**options, "state": "absent"})
    assert ended["changed"] and not path.exists()
    assert not node.module("device_repartition", {**options, "state": "absent"})["changed"]
    node_answer = [each.step for each in steps_of((state / "repartition-steps.json").read_text())]
    assert node_answer == ["draining", "applying", "ended"], "for the node driver, which reports it"


def test_record_failure_is_stored_with_reason(node: Node, tmp_path: Path, state: Path) -> None:
    options = {
        "kubelet_root": str(tmp_path / "kubelet"),
        "driver": "gpu.nvidia.com",
        "operation": "repartition-1",
        "devices": ["GPU-1"],
    }
    for more in ({"step": "applying"}, {"step": "reverting", "reason": "refused"}):
        assert node.module("device_repartition", {**options, **more, "state": "present"})["changed"]
    # The list is informational: if it cannot be written, the operation continues and reports it.
    file = state / "repartition-steps.json"
    kept = file.read_text()
    file.unlink()
    file.mkdir()
    ended = node.module("device_repartition", {**options, "state": "absent", "reason": "refused"})
    assert ended["changed"] and not (state / "repartition.json").exists()
    assert [(each.step, each.reason) for each in steps_of(kept)] == [("applying", ""), ("reverting", "refused")]


def test_record_without_driver_directory_writes_nothing(node: Node, tmp_path: Path) -> None:
    options = {"state": "present", "driver": "gpu.nvidia.com", "operation": "a", "devices": ["GPU-1"]}
    answer = node.module("device_repartition", {**options, "kubelet_root": str(tmp_path)})
    assert answer["failed"] and answer["error_code"] == "no-driver"


def test_apply_is_rejected_until_driver_has_unprepared(node: Node, tmp_path: Path, state: Path) -> None:
    """A pod was deleted by force, so the API server has no claim, but the driver still does: the change is refused."""
    board = node.layout(FIRST)["after"][0]
    (operation,) = planned(node, tmp_path / "kubelet", SECOND)["operations"]
    part = next(each for each in board["partitions"] if each["uuid"] == operation["going"][0]["uuid"])
    claim(state / "state.db", board["uuid"], part)
    options = {
        "state": "present",
        "kubelet_root": str(tmp_path / "kubelet"),
        "devices": [board["uuid"]],
        "unprepare_timeout": 0,
        **{key: operation[key] for key in ("driver", "operation", "wanted", "former", "going", "restarts")},
    }
    assert node.module("device_repartition", options)["changed"]
    refused = node.module("device_repartition", {**options, "step": "applying"})
    assert refused["failed"] and refused["error_code"] == "still-prepared" and refused["claims"] == ["team-a/training"]
    assert json.loads((state / "repartition.json").read_text())["step"] == "draining"
    (state / "state.db").unlink()
    assert node.module("device_repartition", {**options, "step": "applying"})["record"]["step"] == "applying"


def test_await_unprepared_polls_until_timeout() -> None:
    now, seen = [0.0], [("a/one", "a/two"), ("a/two",), ()]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    await_unprepared(lambda: seen.pop(0), DRIVER, 60, clock=lambda: now[0], sleep=sleep)
    assert not seen and now[0] == 2.0
    with pytest.raises(InUse, match="a/one") as caught:
        await_unprepared(lambda: ("a/one",), DRIVER, 60, clock=lambda: now[0], sleep=sleep)
    assert now[0] == 62.0 and caught.value.claims == ("a/one",) and caught.value.code == "still-prepared"


def test_killed_run_is_resumed(node: Node, tmp_path: Path, state: Path) -> None:
    node.layout(FIRST)
    (operation,) = planned(node, tmp_path / "kubelet", SECOND)["operations"]
    uuid = operation["devices"][0]["uuid"]
    record = Record(
        operation["operation"],
        (uuid,),
        "applying",
        time.time() + 9,
        (),
        ({"match": {}, "mode": "dynamic"},),
        ("gpu-0-old",),
    )
    (state / "repartition.json").write_text(json.dumps({"version": 1, **record.to_dict()}))
    answer = planned(node, tmp_path / "kubelet", SECOND)
    (again,) = answer["operations"]
    assert again["operation"] == operation["operation"] and again["resumes"]
    assert again["former"] == [{"match": {}, "mode": "dynamic"}] and "gpu-0-old" in again["names"]
    assert [each["operation"] for each in answer["unfinished"]] == [operation["operation"]]
    # An operation that is complete on the silicon only has to be closed.
    node.layout(SECOND)
    done = planned(node, tmp_path / "kubelet", SECOND)
    assert done["operations"] == [] and len(done["unfinished"]) == 1


def test_record_is_renewed_before_expiry() -> None:
    params = {
        "operation": "a",
        "devices": ["x"],
        "step": "draining",
        "seconds": 100,
        "wanted": [],
        "former": [],
        "names": [],
        "former_settings": None,
        "former_boot_settings": None,
    }

    def fresh(there: Record, now: Moment) -> bool:
        return is_current(wanted_record(params, there, now), there, now)

    def at(seconds: float, boot: str = "boot-1") -> Moment:
        return Moment(boot, 1000.0 + seconds, 5e8 - seconds)

    there = wanted_record(params, None, at(0))
    assert fresh(there, at(5)) and not fresh(there, at(20))
    # After a reboot the record names the new boot.
    assert not fresh(there, Moment("boot-2", 1.0, 5e8))
    with pytest.raises(InUse):
        wanted_record({**params, "operation": "b"}, there, at(99))
    # The expired record of another operation is replaced.
    assert wanted_record({**params, "operation": "b"}, there, at(200)).operation == "b"


# ---- the plan of a fleet


def published(
    node: str, name: str, kind: str = "mig", *, gpu: int | None = None, taints: tuple[Json, ...] = ()
) -> Json:
    """Return a published device. ``gpu`` is its physical GPU, by default the device itself."""
    return {
        "driver": DRIVER,
        "pool": node,
        "node": node,
        "name": name,
        "type": kind,
        "attributes": {} if gpu is None else {"parentUUID": f"GPU-{gpu}"},
        "taints": list(taints),
    }


def node_answer(*operations: Json, **more: Any) -> Json:
    nothing: Json = {"unfinished": [], "unread": [], "untouched": [], "before": [], "rules_differ": False}
    return {"operations": list(operations), **nothing, **more}


def operation(index: int, *names: str, **more: Any) -> Json:
    return {
        "driver": DRIVER,
        "operation": f"repartition-{index}",
        "devices": [{"index": index}],
        "names": list(names),
        "claims": [],
        "going": [{"profile": "1g.10gb"}],
        "kept": [],
        "steps": [],
        "wanted": [{"mode": "dynamic"}],
        "resets": False,
        **more,
    }


USERS = [pod("p1", on="a", owner=("ReplicaSet", "web")), pod("p2", on="a", owner=("ReplicaSet", "web"))]
CLAIMS = [claim_of("c1", "a", "part-1", pods=(USERS[0],)), claim_of("c2", "a", "part-2", pods=(USERS[1],))]
DEVICES = [published("a", f"part-{number}") for number in range(4)] + [
    published("b", f"part-{number}") for number in range(4)
]
CLUSTER = Cluster(DEVICES, CLAIMS, USERS, [])


def test_join_evicts_only_users_of_deleted_devices() -> None:
    plan = fleet_plan(
        {"a": node_answer(operation(0, "part-1", "gpu-0")), "b": node_answer()}, CLUSTER, Consent(True), "50%", 4
    )
    (found,) = plan["nodes"]["a"]["operations"]
    assert found["published"] == ["part-1"] and found["claims"] == ["default/c1"]
    assert [(each["namespace"], each["name"], each["node"]) for each in plan["evicted"]] == [("default", "p1", "a")]
    assert plan["staying"] == ["default/p2"] and plan["blocked"] == []
    assert plan["table"][1].split() == ["a", "0", "1", "x", "1g.10gb", "dynamic", "-", "default/c1", "(p1)"]
    assert "1 pods are evicted; 1 other pods" in plan["table"][2]


def test_join_lists_claims_with_and_without_pods() -> None:
    claims = [*CLAIMS, claim_of("alone", "a", "part-3"), claim_of("elsewhere", "b", "part-0")]
    boards = [{"uuid": f"GPU-{index}", "partitions": ["1g.10gb at 0"] * index} for index in range(4)]
    kept = [{"profile": "3g.40gb"}, {"profile": "1g.10gb"}]
    nodes = {
        "a": node_answer(
            # A claim that is prepared on the node but deleted in the API server still counts.
            operation(0, "part-1", "part-3", claims=["team/gone"], kept=kept),
            operation(1, "part-0"),
            untouched=boards[2:],
            before=boards,
        ),
        "b": node_answer(untouched=boards, before=boards),
    }
    plan = fleet_plan(nodes, Cluster(DEVICES, claims, USERS, []), Consent(True), "100%", 1)
    assert plan["table"] == [
        "node  device  goes         comes    stays                     claims and pods",
        "a     0       1 x 1g.10gb  dynamic  1 x 3g.40gb, 1 x 1g.10gb  default/alone (no pod)",
        "                                                              default/c1 (p1)",
        "                                                              team/gone (no pod)",
        "a     1       1 x 1g.10gb  dynamic  -                         nobody",
        "1 pods are evicted; 1 other pods with devices are not affected.",
        "a: 2 devices, 7 partitions, 1 claim untouched.",
        "Nothing is to do on 1 other node.",
    ]
    stays = {name: each["stays"] for name, each in plan["nodes"].items()}
    assert stays["a"] == {"devices": 2, "partitions": 7, "claims": ["default/c2"]}
    assert stays["b"] == {"devices": 4, "partitions": 6, "claims": ["default/elsewhere"]}


def test_join_without_consent_is_blocked_waiting_is_not() -> None:
    nodes = {"a": node_answer(operation(0, "part-1"))}
    assert "default/p1" in fleet_plan(nodes, CLUSTER, Consent(None), "50%", 1)["blocked"][0]
    waits = fleet_plan(nodes, CLUSTER, Consent(False), "50%", 1)
    assert waits["blocked"] == [] and "must end before the changes" in waits["table"][-2]


def test_join_pods_without_controller_need_separate_consent() -> None:
    alone = pod("p1", on="a", owner=None)
    cluster = Cluster(DEVICES, [claim_of("c1", "a", "part-1", pods=(alone,))], [alone], [])
    nodes = {"a": node_answer(operation(0, "part-1"))}
    assert "no controller" in fleet_plan(nodes, cluster, Consent(True), "50%", 1)["blocked"][0]
    assert fleet_plan(nodes, cluster, Consent(True, True), "50%", 1)["blocked"] == []


@pytest.mark.parametrize(
    ("limit", "most", "at_a_time", "blocked"),
    [
        ("100%", 9, 2, 0),
        ("25%", 9, 1, 0),
        ("50%", 9, 2, 0),
        ("100%", 1, 1, 0),
        ("3", 9, 1, 0),
        ("1", 9, 1, 1),
        ("12%", 9, 1, 1),
    ],
)
def test_join_batch_size_is_limited_by_capacity(limit: str, most: int, at_a_time: int, blocked: int) -> None:
    nodes = {each: node_answer(operation(0, "part-0", "part-1"), operation(1, "part-2")) for each in "ab"}
    plan = fleet_plan(nodes, Cluster(DEVICES, [], [], []), Consent(), limit, most)
    assert plan["at_a_time"] == at_a_time and len(plan["blocked"]) == blocked


def closes(rule: str | None, device: str, effect: str = "NoSchedule", pool: str = "b") -> Json:
    """Return a taint rule of another manager."""
    selector = {"driver": DRIVER, "pool": pool, "device": device} if device else {} if rule else None
    return {
        "metadata": {"name": rule or "r"},
        "spec": {"deviceSelector": selector, "taint": {"key": "k", "effect": effect}},
    }


#: Two nodes with two GPUs each, each GPU in four partitions.
HALVES = [published(node, f"gpu-{gpu}-part-{part}", gpu=gpu) for node in "ab" for gpu in (0, 1) for part in range(4)]


def test_join_capacity_counts_physical_devices() -> None:
    names = [f"gpu-0-part-{part}" for part in range(4)]
    nodes = {"a": node_answer(operation(0, *names)), "b": node_answer(operation(0, *names))}
    plan = fleet_plan(nodes, Cluster(HALVES, [], [], []), Consent(), "25%", 9)
    assert plan["blocked"] == [] and plan["at_a_time"] == 1
    (found,) = plan["nodes"]["a"]["operations"]
    assert found["closes"] == {f"{DRIVER}/mig": ["a/GPU-0"]}
    assert fleet_plan(nodes, Cluster(HALVES, [], [], []), Consent(), "2", 9)["at_a_time"] == 2


ILL = {"key": "gpu.nvidia.com/unhealthy", "value": "lost", "effect": "NoExecute"}


@pytest.mark.parametrize(
    ("ill", "rule", "blocked"),
    [
        (None, None, False),
        (ILL, None, True),
        ({**ILL, "effect": "None"}, None, False),
        (None, closes("r", "gpu-1-part-0"), True),
        (None, closes("r", "gpu-1-part-0", "None"), False),
        (None, closes("r", "gpu-9"), False),
        # A rule without a selector applies to every device: this operation taints no further device.
        (None, closes(None, ""), False),
        # The rules that an interrupted run of this operation left behind count once.
        (None, closes("r", "gpu-0-part-1", pool="a"), False),
    ],
)
def test_join_capacity_counts_unavailable_devices(ill: Json | None, rule: Json | None, *, blocked: bool) -> None:
    devices = [
        {**each, "taints": [ill]} if ill and (each["node"], each["name"]) == ("b", "gpu-1-part-2") else each
        for each in HALVES
    ]
    nodes = {"a": node_answer(operation(0, "gpu-0-part-1", "gpu-0-part-2"))}
    plan = fleet_plan(nodes, Cluster(devices, [], [], [], [rule] if rule else []), Consent(), "1", 1)
    assert bool(plan["blocked"]) is blocked
    if blocked:
        assert "are unavailable already" in plan["blocked"][0] and "b/GPU-1" in plan["blocked"][0]


@given(st.data())
def test_join_tainted_devices_stay_within_limit(data: st.DataObject) -> None:
    """For any nodes and operations, the number of tainted devices stays within the limit."""
    names = [f"gpu-{gpu}" for gpu in range(4)]
    devices = [published(node, name) for node in "abc" for name in names]
    rules = [
        closes("r", data.draw(st.sampled_from(names)), pool=node) for node in data.draw(st.sets(st.sampled_from("abc")))
    ]
    nodes = {
        node: node_answer(
            *(
                operation(number, *chosen)
                for number, chosen in enumerate(
                    data.draw(st.lists(st.sets(st.sampled_from(names), min_size=1), max_size=2))
                )
            )
        )
        for node in "abc"
    }
    limit = data.draw(st.integers(1, 12))
    plan = fleet_plan(nodes, Cluster(devices, [], [], [], rules), Consent(), str(limit), 3)
    gone = {f"{each['spec']['deviceSelector']['pool']}/{each['spec']['deviceSelector']['device']}" for each in rules}
    sets = [
        [set(one["closes"][f"{DRIVER}/mig"]) for one in plan["nodes"][node]["operations"]] or [set()] for node in "abc"
    ]
    alone = any(len(each - gone) > max(limit - len(gone), 0) for node in sets for each in node)
    assert bool(plan["blocked"]) == alone
    if not alone:
        for together in combinations(sets, plan["at_a_time"]):
            for chosen in product(*together):
                added = set().union(*chosen) - gone
                assert not added or len(gone | added) <= limit


def test_join_leftovers_of_earlier_run_are_found() -> None:
    rule = {
        "metadata": {
            "name": "r",
            "labels": {"dra.accelerators/drain": "repartition"},
            "annotations": {"dra.accelerators/drain-node": "b"},
        },
        "spec": {"deviceSelector": {"driver": DRIVER, "pool": "b", "device": "part-1"}},
    }
    left = {"operation": "repartition-9", "step": "applying"}
    plan = fleet_plan(
        {"a": node_answer(), "b": node_answer(unfinished=[left])}, Cluster(DEVICES, [], [], [rule]), Consent(), "25%", 1
    )
    assert [each["name"] for each in plan["nodes"]["b"]["leftover_rules"]] == ["r"]
    assert plan["nodes"]["a"]["leftover_rules"] == []
    assert "nothing to do" in plan["table"][0] and "repartition-9" in plan["table"][1]
    assert plan["idle"] == ["a"]


def test_join_node_without_changes_is_idle() -> None:
    nodes = {"a": node_answer(), "b": node_answer(operation(0, "part-1")), "c": node_answer(rules_differ=True)}
    assert fleet_plan(nodes, CLUSTER, Consent(True), "50%", 1)["idle"] == ["a"]


@pytest.mark.parametrize(
    ("node", "operation_of", "since", "renewed", "found"),
    [
        ("gone", "repartition", "2026-01-01T00:00:00Z", "", True),
        ("gone", "repartition", "2026-01-01T05:00:00Z", "", False),
        ("gone", "repartition", "2026-01-01T00:00:00Z", "2026-01-01T05:00:00Z", False),
        ("gone", "repartition", "", "", False),
        ("gone", "nvidia-driver", "2026-01-01T00:00:00Z", "", False),
        ("b", "repartition", "2026-01-01T00:00:00Z", "", False),
    ],
)
def test_join_rules_on_other_nodes_are_leftover_by_age(
    node: str, operation_of: str, since: str, renewed: str, *, found: bool
) -> None:
    notes = {
        "dra.accelerators/drain-node": node,
        "dra.accelerators/drain-since": since,
        "dra.accelerators/drain-renewed": renewed,
    }
    rule = {
        "metadata": {"name": "r", "labels": {"dra.accelerators/drain": operation_of}, "annotations": notes},
        "spec": {"deviceSelector": {"driver": DRIVER, "pool": node, "device": "part-1"}},
    }
    cluster = Cluster(DEVICES, [], [], [rule])
    plan = fleet_plan({"b": node_answer()}, cluster, Consent(), "25%", 1, now="2026-01-01T06:00:00Z")
    assert [each["node"] for each in plan["strays"]] == ([node] if found else [])
    assert any("not in this run" in line for line in plan["table"]) is found


def test_limits_are_numbers_and_percentages() -> None:
    assert [is_limit(text) for text in ("1", "25%", "100%", "0.5%")] == [True] * 4
    assert [is_limit(text) for text in ("0", "-1", "", "%", "101%", "0%", "many")] == [False] * 7
