# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fleet report as data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._report import node_report
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Clique
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.waiting import waiting
from ansible_collections.dra.accelerators.plugins.modules import accelerator_report
from fleet_page import SCHEMA, TAINT, Json, published

from tests.fleets import BROKEN, Fleet, boards
from tests.report_page import page
from tests.unit.core import board_model, chip_model

SMALL, LARGE = 19, 9


def device(picture: Json, node: str, index: int) -> Json:
    (found,) = [each for each in picture["nodes"] if each["name"] == node]
    (one,) = [each for each in found["devices"] if each["index"] == index]
    jsonschema.validate(picture, SCHEMA)
    return dict(one)


def test_device_shows_its_claims() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(2))
    fleet.claim("training", "node-1", "gpu-0", pods=("trainer",))
    fleet.claim("notebook", "node-1", published(fleet, "node-1", "gpu-1-mig-3g40gb-9-4"))
    picture = fleet.picture()
    whole, part = device(picture, "node-1", 0), device(picture, "node-1", 1)
    assert (whole["state"], whole["claims"], whole["fits"]) == ("full", ["research/training"], {})
    assert whole["used_bytes"] == picture["models"][0]["memory_bytes"]
    assert part["state"] == "partly" and part["claims"] == []
    (held,) = part["partitions"]
    assert (held["profile"], held["start"], held["size"], held["claims"]) == ("3g.40gb", 4, 4, ["research/notebook"])
    assert part["used_bytes"] == held["memory_bytes"] > 0
    # Four small partitions or one more large partition fit into the other half.
    assert part["fits"]["3g.40gb"] == 1 and part["fits"]["1g.10gb"] == 4 and "" not in part["fits"]
    assert picture["claims"][0]["pods"] == ["trainer"]
    assert picture["totals"]["full"] == picture["totals"]["partly"] == 1


def test_partition_of_node_and_cluster_is_one() -> None:
    first, made = boards(1)[0], board_model.device("h100-80", places=((LARGE, 0), (SMALL, 4)))
    cut = replace(first, partitions=made.partitions, partitioning=made.partitioning)
    fleet = Fleet()
    fleet.node("node-1", [cut])
    fleet.claim("notebook", "node-1", published(fleet, "node-1", "gpu-0-mig-3g40gb-9-0"))
    found = device(fleet.picture(), "node-1", 0)
    assert [(each["profile"], each["start"], each["claims"]) for each in found["partitions"]] == [
        ("3g.40gb", 0, ["research/notebook"]),
        ("1g.10gb", 4, []),
    ]
    assert found["partitions"][0]["uuid"] == cut.partitions[0].uuid
    assert found["partitions"][1]["owner"] == "administrator" and found["state"] == "partly"


def test_silent_node_shows_published_devices() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(2))
    fleet.claim("notebook", "node-1", published(fleet, "node-1", "gpu-1-mig-1g10gb-19-2"))
    answered = fleet.picture()
    fleet.answers["node-1"] = {}
    silent = fleet.picture()
    assert silent["nodes"][0]["source"] == "cluster" and silent["totals"]["silent"] == 1
    for index in (0, 1):
        mine, theirs = device(silent, "node-1", index), device(answered, "node-1", index)
        same = ("uuid", "pci", "root", "numa", "partitions", "used_bytes", "state", "fits", "published")
        assert {key: mine[key] for key in same} == {key: theirs[key] for key in same}
    assert {key: silent["models"][0][key] for key in ("product", "memory_bytes", "slices")} == {
        key: answered["models"][0][key] for key in ("product", "memory_bytes", "slices")
    }
    fleet.slices.clear()
    fleet.claims.clear()
    assert fleet.picture()["nodes"][0]["source"] == "none"


def known_before() -> tuple[Fleet, Json]:
    """Return a fleet with a faulty device and a device that differs, and its report from three hours earlier."""
    fleet, devices = Fleet(), boards(3)
    devices[1] = replace(devices[1], health=BROKEN)
    fleet.node("node-1", devices, [{"match": {"index": 2}, "mode": "static", "partitions": {"3g.40gb": 2}}])
    fleet.claim("training", "node-1", "gpu-0", pods=("trainer",))
    return fleet, fleet.picture(generated="2026-11-24T07:00:00Z")


def test_silent_node_shows_health_and_drift_with_age() -> None:
    fleet, former = known_before()
    assert "as_of" not in device(former, "node-1", 1)
    fleet.answers["node-1"] = {}
    found = fleet.picture(former=former)
    well, sick, other = (device(found, "node-1", index) for index in range(3))
    assert {"at": "2026-11-24T07:00:00Z", "seconds": 3 * 3600} == well["as_of"] == sick["as_of"] == other["as_of"]
    assert sick["state"] == "sick" and sick["health"] == device(former, "node-1", 1)["health"] != []
    assert other["drift"] is not None and other["drift"] == device(former, "node-1", 2)["drift"]
    assert well["claims"] == ["research/training"] and found["nodes"][0]["source"] == "cluster"
    assert (found["totals"]["sick"], found["totals"]["drifting"], found["totals"]["silent"]) == (1, 1, 1)
    # The age counts from the last answer, independent of later unanswered reports.
    later = fleet.picture(former=found, generated="2026-11-25T07:00:00Z")
    assert device(later, "node-1", 1)["as_of"] == {"at": "2026-11-24T07:00:00Z", "seconds": 24 * 3600}
    text = page(later)
    assert "State from 24 h ago (2026-11-24 07:00:00 UTC)" in text
    # After the node answers, no value is from an earlier report.
    fleet.node("node-1", boards(3), publish=False)
    assert "as_of" not in device(fleet.picture(former=later), "node-1", 1)


def test_silent_node_without_slices_shows_previous_devices() -> None:
    fleet, former = known_before()
    fleet.answers["node-1"] = {}
    fleet.slices.clear()
    found = fleet.picture(former=former)
    assert found["nodes"][0]["source"] == "none" and len(found["nodes"][0]["devices"]) == 3
    whole, sick = device(found, "node-1", 0), device(found, "node-1", 1)
    # The first device is withheld. Its claims come from the cluster, not from the earlier report.
    assert (whole["state"], whole["claims"], whole["fits"], sick["state"]) == ("withheld", [], {}, "sick")
    assert found["models"][0] == former["models"][0]
    alone = fleet.picture(cluster=False, former=former)
    assert device(alone, "node-1", 1)["state"] == "sick"


def test_unavailable_vendor_driver_shows_previous_devices() -> None:
    fleet, former = known_before()
    away = node_report.Answer("nvidia", "gpu.nvidia.com", None, (), "no library")
    fleet.answers["node-1"] = node_report.node_report([away], None, "", {"kernel": "", "release": "", "drivers": {}})
    found = fleet.picture(former=former)
    assert found["nodes"][0]["source"] == "node" and found["totals"]["silent"] == 0
    assert device(found, "node-1", 0)["claims"] == ["research/training"]
    assert device(found, "node-1", 1)["state"] == "sick" and device(found, "node-1", 1)["as_of"]["seconds"] == 3 * 3600
    # Without an earlier report the published devices are shown, as for any node without an answer.
    assert len(fleet.picture()["nodes"][0]["devices"]) == 3
    # A device that is missing from a node's answer does not return from the earlier report.
    fleet.answers["node-1"] = {}
    fleet.slices.clear()
    fleet.node("node-1", boards(2))
    assert len(fleet.picture(former=former)["nodes"][0]["devices"]) == 2


@pytest.mark.parametrize("content", ["no json", "[]", '{"version": 0}', '{"version": 1, "nodes": [{}]}'])
def test_previous_report_invalid_is_rejected(tmp_path: Path, content: str) -> None:
    file = tmp_path / "former.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(AcceleratorError, match="previous") as refused:
        accelerator_report.read_previous(str(file))
    assert refused.value.code == "previous-unreadable"


def test_previous_report_is_optional(tmp_path: Path) -> None:
    assert accelerator_report.read_previous(str(tmp_path / "none.json")) is None
    assert accelerator_report.read_previous(None) is None
    (tmp_path / "former.json").write_text(json.dumps(known_before()[1]), encoding="utf-8")
    assert accelerator_report.read_previous(str(tmp_path / "former.json")) == known_before()[1]


def test_faulty_and_withheld_devices_are_shown() -> None:
    fleet, devices = Fleet(), boards(3)
    devices[1] = replace(devices[1], health=BROKEN)
    fleet.node("node-1", devices)
    fleet.rules = [
        {
            "metadata": {"name": "one"},
            "spec": {"deviceSelector": {"pool": "node-1", "device": "gpu-2"}, "taint": TAINT},
        },
        {"metadata": {"name": "told"}, "spec": {"deviceSelector": {}, "taint": {**TAINT, "effect": "None"}}},
    ]
    picture = fleet.picture()
    assert device(picture, "node-1", 1)["state"] == "sick"
    partly = device(picture, "node-1", 2)
    assert partly["state"] == "free" and partly["kept_away"] == 1 and "" not in partly["fits"]
    assert [each["rule"] for each in partly["taints"]] == ["one"]
    assert device(picture, "node-1", 0)["taints"] == []
    fleet.rules[0]["spec"]["deviceSelector"] = {"pool": "node-1"}
    assert device(fleet.picture(), "node-1", 2)["state"] == "withheld"
    fleet.rules.clear()
    fleet.slices.clear()
    assert device(fleet.picture(), "node-1", 0)["state"] == "withheld", "no driver publishes it"
    assert device(fleet.picture(cluster=False), "node-1", 0)["state"] == "free"


def test_drift_is_shown_as_steps() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(2), [{"match": {"index": 1}, "mode": "static", "partitions": {"3g.40gb": 2}}])
    picture = fleet.picture()
    assert device(picture, "node-1", 0)["drift"] is None
    assert device(picture, "node-1", 1)["drift"]["steps"] == ["partitioning on", "+ 3g.40gb at 0", "+ 3g.40gb at 4"]
    assert picture["totals"]["drifting"] == picture["totals"]["drifting_nodes"] == 1


def test_fragmented_room_is_counted() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(4))
    for index in range(4):
        fleet.claim(f"half-{index}", "node-1", published(fleet, "node-1", f"gpu-{index}-mig-3g40gb-9-0"))
    room = {each["profile"]: each for each in fleet.picture()["room"]}
    assert (room[""]["now"], room[""]["at_most"], room[""]["of"]) == (0, 2, 4)
    assert (room["3g.40gb"]["now"], room["3g.40gb"]["devices"], room["3g.40gb"]["nodes"]) == (4, 4, 1)


def test_groups_have_display_names() -> None:
    fleet = Fleet()
    fleet.node("node-1", [replace(boards(1)[0], clique=Clique("f00d", 3))])
    assert device(fleet.picture(), "node-1", 0)["groups"] == {"fabric": "f00d.3"}
    chip = chip_model.device("910B3", attributes={"hccsRing": "node-1-ring-0", "cardID": "node-1-card-0"})
    fleet = Fleet()
    fleet.node("node-1", [chip], publish=False)
    assert device(fleet.picture(cluster=False), "node-1", 0)["groups"] == {
        "HCCS ring": "node-1-ring-0",
        "card": "node-1-card-0",
    }


def places(picture: Json) -> list[tuple[int | None, str, Json]]:
    (node,) = picture["nodes"]
    jsonschema.validate(picture, SCHEMA)
    return [(each["numa"], each["root"], each["groups"]) for each in node["devices"]]


def test_device_positions_and_links_are_shown() -> None:
    fleet = Fleet()
    fleet.node("node-1", [replace(each, switched=True) for each in boards(8)])
    assert places(fleet.picture()) == [
        (numa, root, {"NVLink": "0-7"})
        for numa, root in zip(
            [0] * 4 + [1] * 4,
            [each for each in ("pci0000:10", "pci0000:20", "pci0000:30", "pci0000:40") for _twice in (0, 1)],
        )
    ]
    # A device that is not registered in the fabric reaches no other device. Registered devices report the fabric's
    # name.
    devices = boards(4)
    devices = [replace(each, switched=each.index != 1) for each in devices]
    devices[3] = replace(devices[3], switched=False, clique=Clique("f00d", 3))
    fleet = Fleet()
    fleet.node("node-1", devices)
    assert [groups for _numa, _root, groups in places(fleet.picture())] == [
        {"NVLink": "0, 2"},
        {},
        {"NVLink": "0, 2"},
        {"fabric": "f00d.3"},
    ]


def test_directly_linked_gpus_are_one_group() -> None:
    pairs = boards(6, "a30")
    joined = {0: (1,), 1: (0,), 2: (3,), 3: (2, 4), 4: (3,)}
    fleet = Fleet()
    fleet.node(
        "node-1",
        [
            replace(each, linked=tuple(pairs[other].pci_address for other in joined.get(each.index, ())))
            for each in pairs
        ],
    )
    found = places(fleet.picture())
    assert [groups for _numa, _root, groups in found] == [{"NVLink": "0-1"}] * 2 + [{"NVLink": "2-4"}] * 3 + [{}]
    assert [numa for numa, _root, _groups in found] == [0, 0, 0, 1, 1, 1]
    fleet = Fleet()
    fleet.node("node-1", [replace(boards(1)[0], switched=True)])
    assert places(fleet.picture())[0][2] == {}, "one alone is no group"


def test_pending_claims_have_reasons() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(1))
    fleet.pending_pod("later-0", "later", "0/1 nodes are available", "2026-11-24T09:30:00Z")
    fleet.pending_pod("early-0", "early", "0/1 nodes are available", "2026-11-24T08:30:00Z")
    fleet.claim("nobodys")
    reasons = {"research/later": {"message": "Its quota is used up.", "remedy": "Ask for more."}}
    first, second = fleet.picture(reasons=reasons)["waiting"]
    assert (first["claim"], first["pods"], first["since"]) == ("research/early", ["early-0"], "2026-11-24T08:30:00Z")
    assert first["reason"]["source"] == "scheduler" and first["reason"]["code"] == "Unschedulable"
    assert second["reason"] == {
        "source": "given",
        "code": "",
        "message": "Its quota is used up.",
        "remedy": "Ask for more.",
    }
    assert fleet.picture()["totals"]["waiting"] == 2, "a claim without a pod is not pending"


def test_pending_pod_without_claim_is_shown() -> None:
    pod = {
        "metadata": {"name": "p", "namespace": "n", "creationTimestamp": "2026-11-24T08:00:00Z"},
        "spec": {"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "t"}]},
    }
    (found,) = waiting([], [pod], {})
    assert (found["claim"], found["pods"], found["reason"]["source"]) == ("", ["p"], "nobody")
    for made, claims in (("c", ["n/c"]), (None, [])):
        status = {"resourceClaimStatuses": [{"name": "a", **({"resourceClaimName": made} if made else {})}]}
        facts = {"namespace": "n", "name": "c", "allocated": False, "deleting": False, "pods": []}
        facts |= {"device_classes": [], "created": "2026-11-24T08:00:00Z"}
        assert [each["claim"] for each in waiting([facts], [{**pod, "status": status}], {})] == claims
    assert accelerator_report.checked_reasons({"n/c": {"message": "m"}})
    with pytest.raises(accelerator_report.AcceleratorError, match="a message"):
        accelerator_report.checked_reasons({"n/c": {}})
