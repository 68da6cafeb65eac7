# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module accelerator_report: the answer of a node, the answers of a fleet, and the written report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.filter.markdown_text import markdown_text
from ansible_collections.dra.accelerators.plugins.filter.node_answers import node_answers
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.claim_reader import facts_of
from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import NodeScan
from ansible_collections.dra.accelerators.plugins.module_utils._report import node_report
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import (
    devices as published_devices,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.health.conditions import Severity, Sign
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Fault, Finding, Health
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.answers import fleet_report
from ansible_collections.dra.accelerators.plugins.module_utils.core.store.prepared_claims import PreparedPartition
from ansible_collections.dra.accelerators.plugins.modules import accelerator_report
from driver_store import claim

from tests.unit.ansible_process import PYTHON, run_ansible
from tests.unit.core import board_model

if TYPE_CHECKING:
    from conftest import Node

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
DRIVER = "gpu.nvidia.com"
SMALL, LARGE = 19, 9
VERSIONS = {"kernel": "6.1", "release": "0.1.0-1a2b3c4d", "environment": "0123456789ab"}
STATIC = {"match": {}, "mode": "static", "partitions": {"3g.40gb": 1}}


def gpu(index: int = 0, *places: tuple[int, int], **changes: Any) -> Any:
    return board_model.device("h100-80", index, places=places, **changes)


def report(
    *devices: Any, rules: Any = None, faulty: Any = (), prepared: Any = (), versions: Any = None
) -> dict[str, Any]:
    answer = node_report.Answer("nvidia", DRIVER, NodeScan(devices, tuple(faulty), tuple(prepared)))
    return node_report.node_report(
        [answer], None if rules is None else parse_rules(rules), "test", versions or VERSIONS
    )


def codes(found: dict[str, Any]) -> list[str]:
    return [one["code"] for one in found["attention"]]


# ---- one node


def test_node_report_healthy_node_needs_no_attention() -> None:
    found = report(gpu(0, (LARGE, 4)), gpu(1, (LARGE, 0)), rules=[STATIC])
    assert found["attention"] == []
    assert found["layout"]["matches"] and found["layout"]["known"]
    assert [each["partitions"][0]["owner"] for each in found["devices"]] == ["administrator"] * 2
    assert found["versions"]["drivers"] == {"nvidia": "580.95.5"}


def test_node_report_without_layout_has_no_difference() -> None:
    found = report(gpu(0, (LARGE, 4)))
    assert not found["layout"]["known"] and found["attention"] == []


def test_node_report_difference_and_rejection_are_reported() -> None:
    device = gpu(0, (SMALL, 0))
    held = PreparedPartition(
        "team-a/training", device.uuid, device.partitions[0].uuid, SMALL, device.partitions[0].placement
    )
    found = report(device, rules=[{"match": {}, "mode": "whole"}], prepared=[held])
    assert codes(found) == ["layout-differs", "layout-refused"]
    assert found["layout"]["refused"][0]["code"] == "in-use"
    assert found["devices"][0]["claims"] == ["team-a/training"]
    assert found["devices"][0]["partitions"][0]["claims"] == ["team-a/training"]
    found = report(board_model.device("a100-40"), rules=[{"match": {}, "mode": "static", "partitions": {}}])
    assert found["layout"]["resets"] == [found["devices"][0]["uuid"]]


def test_node_report_fault_has_remedy() -> None:
    sick = replace(
        gpu(), health=Health((Sign("lost", Severity.FAILED, "It has fallen off the bus", "Start it again."),))
    )
    odd = gpu(1, (SMALL, 0))
    odd = replace(odd, partitions=(replace(odd.partitions[0], uuid="", compute_instances=2),))
    waiting = board_model.device("a100-40", 2, pending=True)
    silent = Finding(3, "GPU 3", "GPU-3", None, Fault("no-answer", "It does not answer"))
    found = report(sick, odd, waiting, faulty=[silent])
    assert codes(found) == ["device-unhealthy", "made-by-hand", "mode-pending", "device-unread"]
    assert found["attention"][0]["remedy"] == "Start it again." and found["attention"][0]["device"] == sick.uuid
    assert found["unread"] == ["GPU 3: It does not answer"]


def test_node_report_unavailable_driver_is_reported() -> None:
    found = node_report.node_report([node_report.Answer("nvidia", DRIVER, None, (), "no library")], None, "", VERSIONS)
    assert codes(found) == ["driver-unavailable"]
    assert found["drivers"][0]["reason"] == "no library"


# ---- a fleet


def slices(node: str, *devices: Json) -> Json:
    spec = {"driver": DRIVER, "nodeName": node, "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}}
    return {"metadata": {"name": f"{node}-1"}, "spec": {**spec, "devices": list(devices)}}


def published(name: str, uuid: str, parent: str = "", **more: Any) -> Json:
    own = {"uuid": {"string": uuid}, "parentUUID": {"string": parent}}
    return {"name": name, "attributes": {key: each for key, each in own.items() if each["string"]}, **more}


def allocated(name: str, node: str, *devices: str, pods: tuple[str, ...] = ()) -> Json:
    results = [{"request": "r", "driver": DRIVER, "pool": node, "device": each} for each in devices]
    status: Json = {"reservedFor": [{"resource": "pods", "name": each} for each in pods]}
    if devices:
        status["allocation"] = {"devices": {"results": results}}
    return {"metadata": {"name": name, "namespace": "default"}, "status": status}


def fleet(nodes: Json, objects: list[Json], claims: list[Json]) -> Json:
    return fleet_report(nodes, published_devices(objects, claims), facts_of(claims, objects, {}))


def test_fleet_report_healthy_fleet_needs_no_attention() -> None:
    first, second = gpu(0, (LARGE, 4)), gpu(1)
    nodes = {"node-1": report(first), "node-2": report(second)}
    # A partition that can be created is recognized by its GPU.
    objects = [
        slices("node-1", published("gpu-0-mig", first.partitions[0].uuid, first.uuid)),
        slices("node-2", published("gpu-1", second.uuid), published("gpu-1-mig", "", second.uuid)),
    ]
    found = fleet(nodes, objects, [allocated("training", "node-2", "gpu-1")])
    assert found["attention"] == []
    assert found["totals"]["nodes"] == 2 and found["totals"]["published"] == 3 and found["totals"]["partitions"] == 1
    assert found["nodes"]["node-2"]["cluster_claims"] == ["default/training"]
    assert found["nodes"]["node-2"]["published"]["held"] == 1
    assert found["products"] == {first.product: 2}
    assert found["versions"]["driver of nvidia"] == {"580.95.5": ["node-1", "node-2"]}


def test_fleet_report_compares_nodes_with_cluster() -> None:
    first, second = gpu(0), gpu(1)
    nodes = {"node-1": report(first, second), "node-2": {}}
    taint = {"key": "broken", "value": "yes", "effect": "NoSchedule"}
    objects = [
        slices("node-1", published("gpu-0", first.uuid, taints=[taint]), published("gpu-9", "GPU-gone")),
        slices("node-3", published("gpu-0", "GPU-third")),
    ]
    claims = [allocated("old", "node-1", "gpu-8"), allocated("waiting", "node-1", pods=("worker",))]
    found = fleet(nodes, objects, claims)
    assert {one["code"]: one["node"] for one in found["attention"]} == {
        "node-silent": "node-2",
        "not-published": "node-1",
        "published-and-gone": "node-1",
        "tainted": "node-1",
        "node-unknown": "node-3",
        "claim-of-the-past": "",
        "claim-waits": "",
    }
    assert found["silent"] == ["node-2"]
    assert found["totals"]["waiting"] == 1
    assert second.uuid in found["nodes"]["node-1"]["unpublished"][0]


def test_fleet_report_names_nodes_with_other_versions() -> None:
    nodes = {"node-1": report(gpu()), "node-2": report(gpu(1), versions={**VERSIONS, "release": "0.2.0-00000000"})}
    found = fleet_report(nodes, None, [])
    assert codes(found) == ["versions-differ"] and not found["cluster"]
    assert "0.2.0-00000000 on node-2" in found["attention"][0]["message"]


# ---- the module, and the playbook


def test_module_on_node_with_gpus(node: Node, tmp_path: Path) -> None:
    done = node.layout({**STATIC, "match": {"index": 0}})
    state = done["after"][0]
    store = tmp_path / "plugins" / DRIVER / "state.db"
    store.parent.mkdir(parents=True)
    claim(store, state["uuid"], state["partitions"][0], created=True)
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps([{"match": {}, "mode": "whole"}]))
    options = {
        "vendor": ["nvidia"],
        "layout_file": str(layout),
        "kubelet_root": str(tmp_path),
        "root": str(tmp_path / "none"),
    }
    found = node.module("accelerator_report", options)["ansible_facts"]["accelerator_report"]
    assert found["claims"][0]["name"] == "training" and found["devices"][0]["partitions"][0]["owner"] == "claim"
    assert found["layout"]["source"] == str(layout) and not found["layout"]["matches"]
    assert codes(found) == ["layout-differs", "layout-refused"]
    contains = yaml.safe_load(accelerator_report.RETURN)["ansible_facts"]["contains"]["accelerator_report"]["contains"]
    assert set(found) <= set(contains)
    assert set(fleet_report({"node-1": found}, None, [])) <= set(contains)

    layout.write_text("[")
    assert node.module("accelerator_report", options)["error_code"] == "layout-unreadable"
    node.driver = False
    layout.unlink()
    found = node.module("accelerator_report", options)["ansible_facts"]["accelerator_report"]
    assert codes(found) == ["driver-unavailable"] and not found["drivers"][0]["available"]


def test_module_unknown_vendor_is_rejected(run_here: Callable[..., dict[str, Any]]) -> None:
    assert run_here("accelerator_report", {"vendor": ["nobody"]})["error_code"] == "unknown-vendor"


def rendered(found: Json) -> str:
    template = (ROOT / "playbooks/templates/report.md.j2").read_text()
    # The settings of Ansible's template module.
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    environment.filters["dra.accelerators.markdown_text"] = markdown_text
    return environment.from_string(template).render(accelerator_report=found)


def test_markdown_report_has_all_findings() -> None:
    first, second = gpu(0, (LARGE, 4)), gpu(1, health=Health((Sign("lost", Severity.FAILED, "It is lost"),)))
    objects = [slices("node-1", published("gpu-0", first.uuid), published("gpu-1", second.uuid))]
    found = fleet(
        {"node-1": report(first, second, rules=[STATIC]), "node-2": {}}, objects, [allocated("a", "node-1", "gpu-0")]
    )
    text = rendered(found)
    assert text.startswith("# Accelerators\n\nNodes: 1, devices: 2, with 1")
    assert (
        f"| 0 | {first.product} | 3g.40gb | none | healthy |\n| 1 | {second.product} | whole | none | lost |\n" in text
    )
    assert "Layout (test): devices that differ: 1.\n" in text
    assert "Published: 2, available: 1, in use: 1.\n" in text
    assert "* **node-2**: node-2 has not answered. Find out why the query failed. (node-silent)\n" in text
    assert "| driver of nvidia | 580.95.5 | node-1 |\n" in text
    alone = fleet_report({"node-1": report(gpu())}, None, [])
    assert "\nNone.\n" in rendered(alone) and "The node has no layout.\n" in rendered(alone)


def report_play(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the playbook on this machine, which has no accelerators, and on an unreachable host."""
    common = {"ansible_python_interpreter": str(PYTHON), "accelerator_become": False}
    hosts = {
        "away": {**common, "ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1},
        "here": {**common, "ansible_connection": "local", "accelerator_node_name": "node-1"},
    }
    (directory / "hosts.yml").write_text(yaml.safe_dump({"accelerator_nodes": {"hosts": hosts}}))
    variables = {"accelerator_report_cluster": False, "accelerator_report_file": str(directory / "out.md")}
    variables |= {"accelerator_kubelet_root": str(directory)}
    return run_ansible(
        [
            *(Path(sys.executable).with_name("ansible-playbook"), "--inventory", directory / "hosts.yml"),
            *(ROOT / "playbooks/report.yml", "--extra-vars", json.dumps(variables), *arguments),
        ],
        env={
            **os.environ,
            "ANSIBLE_LOCAL_TEMP": str(directory / "l"),
            "ANSIBLE_REMOTE_TEMP": str(directory / "r"),
            **environment,
        },
    )


@pytest.mark.parametrize("injected", [True, False], ids=["facts-as-variables", "facts-by-themselves"])
def test_playbook_queries_nodes_and_writes_report(tmp_path: Path, injected: bool) -> None:
    report_play(tmp_path, ANSIBLE_INJECT_FACT_VARS=str(injected))
    text = (tmp_path / "out.md").read_text()
    assert text.startswith("# Accelerators\n\nNodes: 1, devices: 0")
    assert "## node-1\n" in text and "**away**: away has not answered." in text
    picture = json.loads((tmp_path / "out.json").read_text())
    assert [(each["name"], each["source"]) for each in picture["nodes"]] == [("away", "none"), ("node-1", "node")]
    page = (tmp_path / "out.html").read_text()
    start = page.index(">", page.index('id="data"')) + 1
    assert json.loads(page[start : page.index("</script>", start)]) == picture


@pytest.mark.prove
def test_playbook_ignores_facts_of_earlier_runs(tmp_path: Path) -> None:
    """A fact cache has the earlier answer of a node that is unreachable now: it does not count as an answer."""
    cache = {"ANSIBLE_CACHE_PLUGIN": "jsonfile", "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(tmp_path / "facts")}
    report_play(tmp_path, "--limit", "here,localhost", **cache)
    (answered,) = (tmp_path / "facts").glob("*here")
    answered.with_name(answered.name.replace("here", "away")).write_bytes(answered.read_bytes())
    report_play(tmp_path, **cache)
    text = (tmp_path / "out.md").read_text()
    assert "**away**: away has not answered." in text and "## away\n" not in text


def test_playbook_excludes_nodes_of_other_clusters() -> None:
    """Nodes of other clusters are left out, even if their names are equal."""
    answer = {"ansible_facts": {"accelerator_report": {"devices": []}}}
    hostvars = {
        "a1": {"accelerator_node_name": "n1", "accelerator_kubeconfig": "/a", "accelerator_node_answer": answer},
        "a2": {"accelerator_kubeconfig": "/a"},
        "b1": {"accelerator_node_name": "n1", "accelerator_kubeconfig": "/b"},
    }
    found = node_answers(["a1", "a2", "b1"], hostvars, ["a1"])
    assert found["nodes"] == {"n1": {"devices": []}, "a2": {}}
    assert found["not_asked"] == ["a2"] and found["hosts"] == {"n1": "a1", "a2": "a2"}


def test_playbook_excludes_unnamed_hosts_outside_limit() -> None:
    """The name of a host outside the limit is a template with facts, which only hosts of the run have."""
    hostvars = {
        "a1": {"accelerator_node_name": "n1"},
        "a2": {"accelerator_node_name": "{{ ansible_facts['nodename'] }}"},
        "a3": {"accelerator_kubeconfig": "{{ ansible_facts['nodename'] }}"},
    }
    found = node_answers(["a1", "a2", "a3"], hostvars, ["a1"])
    assert found == {"nodes": {"n1": {}}, "not_asked": [], "hosts": {"n1": "a1"}}
    with pytest.raises(AnsibleFilterError, match="accelerator_node_name of a2"):
        node_answers(["a1", "a2", "a3"], hostvars, ["a1", "a2"])


def test_answers_of_other_runs_count_as_missing() -> None:
    answers = {"a": {"run": "1"}, "b": {"run": "2"}, "c": {}, "d": {"no": "run"}}
    assert accelerator_report.reports_of_run(answers, "1") == {"a": {"run": "1"}, "b": {}, "c": {}, "d": {}}
    assert accelerator_report.reports_of_run(answers, "") == answers


@pytest.mark.prove
def test_playbook_does_not_query_nodes_outside_limit(tmp_path: Path) -> None:
    done = report_play(tmp_path, "--limit", "here")
    assert done.returncode == 0, done.stdout
    text = (tmp_path / "out.md").read_text()
    assert "One node was not asked in this run: away (nodes-not-asked)" in text and "has not answered" not in text
    picture = json.loads((tmp_path / "out.json").read_text())
    assert [(each["name"], each["asked"]) for each in picture["nodes"]] == [("away", False), ("node-1", True)]
    assert picture["totals"]["silent"] == 0 and 'mark sick">silent' not in (tmp_path / "out.html").read_text()


@pytest.mark.prove
def test_playbook_failed_query_is_reported_and_fails_the_run(tmp_path: Path) -> None:
    done = report_play(
        tmp_path,
        "--limit",
        "here",
        "--extra-vars",
        '{"accelerator_layouts": [{"hosts": "here", "layout": [{"no": 1}]}]}',
    )
    assert done.returncode == 2, done.stdout
    assert "**node-1**: node-1 has not answered." in (tmp_path / "out.md").read_text()
