# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inventories with several clusters: playbooks query each host's cluster, and reject inventories without a node or with a node twice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.action.host_answer import part_about
from ansible_collections.dra.accelerators.plugins.filter.cluster_union import cluster_union
from ansible_collections.dra.accelerators.plugins.filter.node_name_conflicts import ROLES, node_name_conflicts
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import SETTLE_SECONDS
from playing import play as play_tasks

from tests.unit.ansible_process import PYTHON, run_ansible
from tests.unit.json_server import JsonHandler, JsonServer

ROOT = Path(__file__).resolve().parents[3]
Json = dict[str, Any]
UNIT = "dra-accelerators-driver.service"


class ClusterServer(JsonServer):
    """The lists of an API server: Nodes, and claims whose devices pods of a node use."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = list(nodes)
        self.claims: list[Json] = []
        self.lists: dict[str, list[Json]] = {}
        self.paths: list[str] = []
        #: The number of reads of a claim by name before it is deleted.
        self.reads_before_deletion = 0
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                server.paths.append(path)
                kind, _slash, name = path.rpartition("/")
                if path == "/apis/resource.k8s.io":
                    self.answer(200, {"versions": [{"version": "v1"}]})
                elif kind == "/api/v1/nodes":
                    found = {"metadata": {"name": name, "uid": name}, "spec": {}, "status": {}}
                    self.answer(
                        *((200, found) if name in server.nodes else (404, {"kind": "Status", "reason": "NotFound"}))
                    )
                elif kind == "/api/v1/namespaces":
                    self.answer(200, {"metadata": {"name": name}})
                elif kind.endswith("/resourceclaims"):
                    server.reads_before_deletion -= 1
                    if server.reads_before_deletion < 0:
                        server.claims = [each for each in server.claims if each["metadata"]["name"] != name]
                    found_claims = [each for each in server.claims if each["metadata"]["name"] == name]
                    self.answer(
                        *((200, found_claims[0]) if found_claims else (404, {"kind": "Status", "reason": "NotFound"}))
                    )
                else:
                    self.answer(
                        200, {"items": server.claims if name == "resourceclaims" else server.lists.get(name, [])}
                    )

            def do_DELETE(self) -> None:
                server.lists.clear()
                self.answer(200, {})

        super().__init__(Handler)

    def use(self, node: str, driver: str = "gpu.nvidia.com") -> None:
        """Add a claim of a pod that uses a device of a node."""
        result = {"request": "r", "driver": driver, "pool": node, "device": "gpu-0"}
        status = {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": f"pod-on-{node}"}],
        }
        metadata = {"namespace": "default", "name": f"claim-on-{node}"}
        self.claims.append({"metadata": metadata, "spec": {}, "status": status})

    def kubeconfig(self, path: Path) -> str:
        access = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(access), encoding="utf-8")
        return str(path)


@pytest.fixture
def clusters() -> Iterator[tuple[ClusterServer, ClusterServer]]:
    with ClusterServer("a1", "a2") as first, ClusterServer("b1", "b2") as second:
        yield first, second


def run_playbook(directory: Path, playbook: Path, groups: Json, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}), encoding="utf-8")
    return run_ansible(
        [
            *(Path(sys.executable).with_name("ansible-playbook"), "-i", directory / "hosts.yml", playbook),
            *("-e", json.dumps({"accelerator_become": False}), *arguments),
        ],
        env={
            **os.environ,
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCAL_TEMP": str(directory / "local"),
            "ANSIBLE_REMOTE_TEMP": str(directory / "remote"),
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
            "ANSIBLE_LIBRARY": str(directory / "library"),
        },
    )


def group(names: list[str], **variables: Any) -> Json:
    hosts: Json = {name: {} for name in names}
    common = {"ansible_connection": "local", "ansible_python_interpreter": str(PYTHON)}
    return {"hosts": hosts, "vars": {**common, **variables}}


def two_clusters(directory: Path, clusters: tuple[ClusterServer, ClusterServer]) -> Json:
    """Return the hosts a1 and a2 of the first cluster, and b1 and b2 of the second."""
    first, second = (server.kubeconfig(directory / f"kubeconfig-{name}") for name, server in zip("ab", clusters))
    children = {
        "first": group(["a1", "a2"], accelerator_kubeconfig=first),
        "second": group(["b1", "b2"], accelerator_kubeconfig=second),
    }
    return {"accelerator_nodes": {"children": children}}


# ---- remove

MODULE = """
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"answer": {"type": "dict"}}, supports_check_mode=True)
module.exit_json(**module.params["answer"])
"""


def removal(directory: Path, *, ours: bool = True, fails: str = "") -> Path:
    """Write the playbook remove up to the task that stops a node's driver. Nodes report this collection's driver.

    ``fails`` is a host that cannot be cordoned.
    """
    (directory / "library").mkdir()
    (directory / "library/answer.py").write_text(MODULE, encoding="utf-8")
    (directory / "tasks").symlink_to(ROOT / "playbooks/tasks")
    node = {
        "driver": {"configuration": []},
        "units": {UNIT: {"ours": ours}, "dra-accelerators-settings.service": {"ours": False}},
        "devices": "{{ devices_of_host | default({'nvidia': ['0000:18:00.0']}) }}",
    }
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    check = [
        {**each, "ansible.builtin.import_playbook": str(ROOT / "playbooks/check_inventory.yml")}
        for each in plays
        if "hosts" not in each
    ]
    read, take = (each for each in plays if each["name"] in ("Read the variables of the nodes", "Remove the driver"))
    take["gather_facts"] = False
    tasks = []
    for task in take["tasks"]:
        if "dra.accelerators.node_info" in task:
            task = {"name": task["name"], "answer": {"answer": node}, "register": task["register"]}
        if "block" in task:
            names = [each["name"] for each in task["block"]]
            # Nothing is written before this task, apart from the cordon.
            kept = task["block"][: names.index("Delete the pods")]
            kept = [each for each in kept if "kubernetes.core.k8s" not in each]
            cordon = {
                "ansible.builtin.fail": {"msg": "no cordon"},
                "when": f"inventory_hostname == '{fails}'",
                "register": "accelerator_cordon",
            }
            kept.insert(0, cordon)
            task = {
                "name": task["name"],
                "block": [*kept, {"ansible.builtin.debug": {"msg": "stops {{ inventory_hostname }}"}}],
                "always": [{"ansible.builtin.debug": {"msg": "uncordons {{ inventory_hostname }}"}}],
            }
        tasks.append(task)
    take["tasks"] = tasks
    path = directory / "play.yml"
    path.write_text(yaml.safe_dump([*check, read, take], sort_keys=False), encoding="utf-8")
    return path


def test_remove_reads_claims_when_the_scheduler_knows_the_cordon() -> None:
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    (take,) = (each for each in plays if each["name"] == "Remove the driver")
    (block,) = (each["block"] for each in take["tasks"] if "block" in each)
    names = [each["name"] for each in block]
    between = block[names.index("Cordon the node") + 1 : names.index("Read the claims of each cluster")]
    waits = [each["ansible.builtin.wait_for"] for each in between if "ansible.builtin.wait_for" in each]
    assert waits == [{"timeout": SETTLE_SECONDS}]


@pytest.mark.parametrize(("cordoned", "waits"), [("b", 1), ("abc", 1), ("", 0)])
def test_remove_waits_once_for_the_cordons_of_a_batch(tmp_path: Path, cordoned: str, waits: int) -> None:
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    tasks = [each for play in plays for task in play.get("tasks", ()) for each in task.get("block", ())]
    (wait,) = (each for each in tasks if "ansible.builtin.wait_for" in each)
    wait["ansible.builtin.wait_for"] = {"timeout": 0}
    skipped = {"changed": False, "skipped": True}
    answers = {name: {"changed": True} if name in cordoned else skipped for name in "abc"}
    hosts = {name: {"accelerator_cordon": answer} for name, answer in answers.items()}
    output = play_tasks(tmp_path, [wait], hosts).output
    assert len(re.findall(r"^ok: ", output, re.MULTILINE)) == waits, output


@pytest.mark.parametrize(
    ("devices", "units", "vendors"),
    [
        (["nvidia"], [], ["nvidia"]),
        ([], [], ["nvidia"]),
        # The node was installed with accelerator_vendors: [nvidia, ascend].
        (["nvidia", "ascend"], ["dra-accelerators-layout-ascend.service"], ["nvidia", "ascend"]),
        (["ascend"], ["dra-accelerators-layout-ascend.service"], ["nvidia", "ascend"]),
        ([], ["dra-accelerators-layout.service"], ["nvidia"]),
    ],
)
def test_remove_counts_vendors_whose_units_the_node_has(
    tmp_path: Path, devices: list[str], units: list[str], vendors: list[str]
) -> None:
    assert vendors_of_removed_node(tmp_path, devices, units) == vendors


def test_remove_counts_nvidia_if_the_node_has_the_unit_of_the_settings(tmp_path: Path) -> None:
    settings = ["dra-accelerators-settings.service"]
    assert vendors_of_removed_node(tmp_path, ["ascend"], settings, ["ascend"]) == ["ascend", "nvidia"]


def vendors_of_removed_node(
    directory: Path, devices: list[str], units: list[str], fleet: list[str] | None = None
) -> list[str]:
    """Return the vendors whose components are removed from a node with these devices and units, sorted with those of the fleet first."""
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    (take,) = (each for each in plays if each["name"] == "Remove the driver")
    named = ["dra-accelerators-layout.service", "dra-accelerators-layout-ascend.service"]
    named.append("dra-accelerators-settings.service")
    node = {"devices": {each: ["0000:18:00.0"] for each in devices}}
    node["units"] = {each: {"ours": each in units} for each in named}
    tell = {
        "ansible.builtin.debug": {"msg": "{{ accelerator_vendors_of_node | to_json | b64encode }}"},
        "vars": {
            name: each for name, each in take["vars"].items() if name.startswith(("accelerator_v", "accelerator_own"))
        },
    }
    variables: Json = {"accelerator_node": node, **({} if fleet is None else {"accelerator_vendors": fleet})}
    found: list[str] = play_tasks(directory, [tell], {"a": variables}).told["a"]
    return sorted(found, key=lambda each: (each not in (fleet or ["nvidia"]), each))


@pytest.mark.prove
def test_remove_deletes_the_classes_of_a_migration_in_each_cluster_also_if_the_leader_has_failed(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    (take,) = (each for each in plays if each["name"] == "Remove the DeviceClasses with the last driver")
    take["tasks"] = [task for task in take["tasks"] if task["name"] != "Remove the standard DeviceClasses"]
    facts = {
        "__dra_driver_was_last": True,
        "__dra_driver_leaders": {"a1": "a1", "a2": "a1", "b1": "b1", "b2": "b1"},
        "accelerator_api": {"kubeconfig": "{{ accelerator_kubeconfig }}", "context": ""},
    }
    before = {
        "hosts": "accelerator_nodes",
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.set_fact": facts},
            {"ansible.builtin.fail": {"msg": "fails"}, "when": "inventory_hostname == 'a1'"},
        ],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([before, take], sort_keys=False), encoding="utf-8")
    run_playbook(tmp_path, tmp_path / "play.yml", two_clusters(tmp_path, clusters))
    for server in clusters:
        assert "/apis/resource.k8s.io/v1/deviceclasses" in server.paths, server.paths


def stopped(output: str) -> set[str]:
    return set(re.findall(r'"msg": "stops (\w+)"', output))


def failures(output: str) -> dict[str, str]:
    return dict(re.findall(r"^fatal: \[(\w+)[^\]]*\]: FAILED! => (.*)$", output, re.MULTILINE))


@pytest.mark.prove
def test_remove_refuses_a_node_whose_pod_uses_a_claim_of_the_second_cluster(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    clusters[1].use("b2")
    done = run_playbook(tmp_path, removal(tmp_path), two_clusters(tmp_path, clusters))
    assert stopped(done.stdout) == {"a1", "a2", "b1"}, done.stdout
    assert failures(done.stdout).keys() == {"b2"} and "default/pod-on-b2 with claim claim-on-b2" in done.stdout
    # Each cluster is queried once for its own nodes before the removal, and once for claims.
    for server, own in zip(clusters, ("a", "b")):
        requested = [path for path in server.paths if path.startswith("/api/v1/nodes/")]
        assert sorted(requested) == sorted([f"/api/v1/nodes/{own}{number}" for number in (1, 2)] * 2)
        assert server.paths.count("/apis/resource.k8s.io/v1/resourceclaims") == 1


def test_remove_reads_held_claims_by_name_while_it_waits(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    server = clusters[0]
    server.use("a1")
    server.reads_before_deletion = 2
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    (take,) = (each for each in plays if each["name"] == "Remove the driver")
    tasks = [each for task in take["tasks"] for each in task.get("block", ())]
    (wait,) = (each for each in tasks if each.get("register") == "accelerator_claims_left")
    variables = {
        "accelerator_name": "a1",
        "accelerator_has_driver": True,
        "accelerator_held": [{"namespace": "default", "name": "claim-on-a1", "pods": ["pod-on-a1"]}],
        "accelerator_driver_names": ["gpu.nvidia.com"],
        "accelerator_api": {"kubeconfig": server.kubeconfig(tmp_path / "kubeconfig"), "context": ""},
    }
    document = {"hosts": "all", "gather_facts": False, "module_defaults": take["module_defaults"], "vars": variables}
    document["tasks"] = [{**wait, "delay": 0}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([document], sort_keys=False), encoding="utf-8")
    done = run_playbook(tmp_path, tmp_path / "play.yml", {"accelerator_nodes": group(["a1"])})
    assert done.returncode == 0, done.stdout + done.stderr
    read = [path.rpartition("/")[2] for path in server.paths if "resourceclaims" in path]
    assert read == ["claim-on-a1"] * 3 + ["resourceclaims"]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("variables", "driver"),
    [
        ({"accelerator_vendors": ["ascend"]}, "npu.huawei.com"),
        ({"dra_driver_names": ["gpu.example.com"]}, "gpu.example.com"),
    ],
)
def test_remove_refuses_a_node_whose_pod_uses_a_claim_of_another_driver_than_the_first_host(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer], variables: Json, driver: str
) -> None:
    clusters[0].use("a2", driver)
    groups = two_clusters(tmp_path, clusters)
    groups["accelerator_nodes"]["children"]["first"]["hosts"]["a2"] = variables
    done = run_playbook(tmp_path, removal(tmp_path), groups)
    assert stopped(done.stdout) == {"a1", "b1", "b2"}, done.stdout
    assert failures(done.stdout).keys() == {"a2"} and "default/pod-on-a2 with claim claim-on-a2" in done.stdout


def slice_of(driver: str, *, ours: bool = True) -> Json:
    """Return a ResourceSlice, which the server lists for each node."""
    manager = "dra-accelerators-driver" if ours else "example"
    pool = {"name": "b2", "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": driver, "managedFields": [{"manager": manager}]},
        "spec": {"driver": driver, "pool": pool, "devices": []},
    }


@pytest.mark.parametrize(
    ("driver", "slices", "is_refused"),
    [
        ("npu.huawei.com", [], True),
        ("npu.huawei.com", [slice_of("npu.huawei.com")], True),
        ("npu.example.com", [slice_of("npu.example.com")], True),
        # A driver of another project serves these.
        ("npu.huawei.com", [slice_of("npu.huawei.com", ours=False)], False),
        ("npu.example.com", [slice_of("npu.example.com", ours=False)], False),
    ],
)
def test_remove_refuses_a_node_with_claims_of_a_driver_that_the_variables_do_not_name(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer], driver: str, slices: list[Json], is_refused: bool
) -> None:
    """The operator has left out the file with accelerator_vendors: the devices of the node and its slices name the driver."""
    clusters[1].use("b2", driver)
    clusters[1].lists["resourceslices"] = slices
    groups = two_clusters(tmp_path, clusters)
    groups["accelerator_nodes"]["children"]["second"]["hosts"]["b2"] = {"devices_of_host": {"ascend": ["0000:c1:00.0"]}}
    done = run_playbook(tmp_path, removal(tmp_path), groups, "--limit", "b2")
    assert stopped(done.stdout) == (set() if is_refused else {"b2"}), done.stdout
    assert ("default/pod-on-b2 with claim claim-on-b2" in done.stdout) is is_refused


@pytest.mark.prove
def test_remove_ignores_claims_of_drivers_that_another_node_has(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    """The first host queries the claims of all drivers of its cluster. A driver of another project serves this claim on a1."""
    clusters[0].use("a1", "npu.huawei.com")
    groups = two_clusters(tmp_path, clusters)
    groups["accelerator_nodes"]["children"]["first"]["hosts"]["a2"] = {"accelerator_vendors": ["ascend"]}
    done = run_playbook(tmp_path, removal(tmp_path), groups)
    assert stopped(done.stdout) == {"a1", "a2", "b1", "b2"}, done.stdout


def test_remove_refuses_a_driver_whose_node_is_missing(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    """A driver whose Node is missing is refused, also on the first host of its cluster, which queries for the others."""
    clusters[1].nodes.remove("b1")
    clusters[1].use("b2")
    done = run_playbook(tmp_path, removal(tmp_path), two_clusters(tmp_path, clusters))
    assert stopped(done.stdout) == {"a1", "a2"}, done.stdout
    assert failures(done.stdout).keys() == {"b1", "b2"}
    assert "no Node b1" in failures(done.stdout)["b1"] and "accelerator_kubeconfig" in failures(done.stdout)["b1"]
    assert "claim-on-b2" in failures(done.stdout)["b2"]


def test_remove_continues_with_the_other_hosts_after_a_host_failed(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    """The first host of a cluster, which queries the claims of all its hosts, has failed before: the other hosts continue."""
    done = run_playbook(tmp_path, removal(tmp_path, fails="a1"), two_clusters(tmp_path, clusters))
    assert failures(done.stdout).keys() == {"a1"}, done.stdout
    assert stopped(done.stdout) == {"a2", "b1", "b2"} and "uncordons a1" in done.stdout


@pytest.mark.prove
def test_remove_of_a_host_without_driver_and_node_succeeds(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    clusters[1].nodes.remove("b1")
    done = run_playbook(tmp_path, removal(tmp_path, ours=False), two_clusters(tmp_path, clusters))
    assert stopped(done.stdout) == {"a1", "a2", "b1", "b2"} and done.returncode == 0, done.stdout


@pytest.mark.prove
def test_remove_continues_in_one_cluster_if_another_does_not_answer(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    groups = two_clusters(tmp_path, clusters)
    away = yaml.safe_load((tmp_path / "kubeconfig-b").read_text("utf-8"))
    away["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "kubeconfig-b").write_text(yaml.safe_dump(away), encoding="utf-8")
    done = run_playbook(tmp_path, removal(tmp_path), groups)
    assert stopped(done.stdout) == {"a1", "a2"}, done.stdout
    assert failures(done.stdout).keys() == {"b1", "b2"}
    assert all("127.0.0.1" in text and "Nothing was removed" in text for text in failures(done.stdout).values())


# ---- the inventory

#: The message of each playbook for an inventory without hosts for it.
NODES = "The group accelerator_nodes of the inventory has no hosts"
EMPTY = {
    **dict.fromkeys(("site", "remove", "repartition", "upgrade", "report", "plan", "device_plugin_migration"), NODES),
    "driver_form": NODES,
    "bundle": "The groups accelerator_nodes and accelerator_controllers of the inventory have no hosts",
    "controller": "The group accelerator_controllers of the inventory has no hosts, and dra_controller_form is service",
    "monitoring": "The group accelerator_monitoring of the inventory has no hosts",
}


@pytest.mark.parametrize("playbook", list(EMPTY))
def test_empty_group_fails(tmp_path: Path, playbook: str) -> None:
    done = run_playbook(tmp_path, ROOT / f"playbooks/{playbook}.yml", {"acelerator_nodes": group(["a1"])})
    assert done.returncode != 0, done.stdout
    assert EMPTY[playbook] in done.stdout and "acelerator_nodes" in done.stdout, done.stdout


@pytest.mark.parametrize("playbook", list(EMPTY))
def test_limit_without_hosts_of_the_group_fails(tmp_path: Path, playbook: str) -> None:
    groups = {
        name: group(["a1"]) for name in ("accelerator_nodes", "accelerator_controllers", "accelerator_monitoring")
    }
    groups["web"] = group(["w1"])
    done = run_playbook(tmp_path, ROOT / f"playbooks/{playbook}.yml", groups, "--limit", "w1")
    assert done.returncode != 0 and "The limit w1 contains no host of the group" in done.stdout, done.stdout


def test_bundle_is_not_written_without_the_needs_of_each_host(tmp_path: Path) -> None:
    """A host without platform data stops the run: the first host that has not failed would write an incomplete bundle."""
    hosts = group(["a1", "a2"])
    hosts["hosts"]["a2"] = {"accelerator_platform": {"distribution": "debian", "release": "13", "machine": "x86_64"}}
    variables = {"accelerator_bundle_dest": str(tmp_path / "fleet.bundle")}
    playbook = ROOT / "playbooks/bundle.yml"
    done = run_playbook(tmp_path, playbook, {"accelerator_nodes": hosts}, "--check", "-e", json.dumps(variables))
    assert done.returncode != 0 and "a1 has no accelerator_platform" in done.stdout, done.stdout
    assert "Determine the needs of each host" not in done.stdout, done.stdout


def test_each_playbook_checks_its_groups() -> None:
    others = {"check_inventory": "is the check", "why": "runs on localhost"}
    assert {path.stem for path in (ROOT / "playbooks").glob("*.yml")} == EMPTY.keys() | others.keys()


@pytest.mark.parametrize("is_extra", [True, False])
def test_controller_as_a_deployment_needs_no_group(tmp_path: Path, is_extra: bool) -> None:
    """The form can be in the fleet file (-e), or be a variable of all hosts: the run needs no group."""
    plays = yaml.safe_load((ROOT / "playbooks/controller.yml").read_text("utf-8"))
    plays[0]["ansible.builtin.import_playbook"] = str(ROOT / "playbooks/check_inventory.yml")
    names = [each["name"] for each in plays[-1]["tasks"]]
    checked = plays[-1]["tasks"][: names.index("Use the offline bundle")]
    plays[-1]["tasks"] = [*checked, {"ansible.builtin.debug": {"msg": "runs on {{ inventory_hostname }}"}}]
    (tmp_path / "tasks").symlink_to(ROOT / "playbooks/tasks")
    (tmp_path / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False), encoding="utf-8")
    (tmp_path / "group_vars").mkdir()
    form = {} if is_extra else {"dra_controller_form": "deployment"}
    (tmp_path / "group_vars/all.yml").write_text(yaml.safe_dump(form), encoding="utf-8")
    words = ("-e", "dra_controller_form=deployment") if is_extra else ()
    done = run_playbook(tmp_path, tmp_path / "play.yml", {"web": group(["a1"])}, *words)
    assert done.returncode == 0 and "runs on localhost" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("limit", [(), ("--limit", "b1")])
def test_same_node_name_in_one_cluster_fails(tmp_path: Path, limit: tuple[str, ...]) -> None:
    """Two hosts with the same Node fail, also if the run is limited to one of them."""
    hosts = group(["a1", "b1", "c1"], accelerator_kubeconfig=str(tmp_path / "kubeconfig"))
    hosts["hosts"] = {name: {"accelerator_node_name": "gpu-1"} for name in ("a1", "b1")} | {"c1": {}}
    done = run_playbook(tmp_path, ROOT / "playbooks/site.yml", {"accelerator_nodes": hosts}, *limit)
    assert done.returncode != 0 and "Prepare the nodes" not in done.stdout, done.stdout
    assert f"Hosts a1, b1 have the same Node gpu-1 of the cluster {tmp_path}/kubeconfig." in done.stdout


def test_same_node_name_in_an_option_of_a_role_is_a_conflict() -> None:
    """Covers each role with an option for the host's Node name. The name of a controller belongs to another group."""
    options = {
        name: path.parents[1].name
        for path in ROOT.glob("roles/*/defaults/main.yml")
        for name in yaml.safe_load(path.read_text("utf-8"))
        if name.endswith("_node_name") and not name.startswith("dra_controller")
    }
    assert set(options.values()) == set(ROLES)
    for option, role in options.items():
        hosts: Json = {"a": {option: "gpu-1"}, "b": {option: "gpu-1"}, "c": {}}
        (sentence,) = node_name_conflicts(list(hosts), hosts)
        assert sentence.startswith("Hosts a, b have the same Node gpu-1 of the cluster "), role
        assert node_name_conflicts(["a", "c"], {**hosts, "c": {"accelerator_node_name": "gpu-1"}}), role
        # A different cluster, and different names for the role of hosts with one name for the playbooks.
        hosts["b"][f"{role}_context"] = "other"
        assert not node_name_conflicts(list(hosts), hosts), role
        named: Json = {name: {"accelerator_node_name": "gpu-1", option: f"gpu-{name}"} for name in "ab"}
        assert len(node_name_conflicts(list(named), named)) == 1, role


def test_node_name_that_is_an_integer_in_the_inventory_is_text(tmp_path: Path) -> None:
    """In an INI inventory, ``accelerator_node_name=12`` is an integer. Each expression of the collection converts it to a string."""
    own = re.compile(r"[\w']*accelerator_node_name[\w'\])]* \|.*")
    expressions = {}
    for path in (*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/[dtv]*/*.yml")):
        for line in path.read_text("utf-8").splitlines():
            if own.search(line) and not line.lstrip().startswith("#") and '"{{' in line:
                expressions[f"{path.relative_to(ROOT)}: {line.strip()}"] = line.partition('"')[2].rstrip('"')
    assert len(expressions) >= 13, expressions
    reported = {place: "{{ (" + each.strip("{} ") + ") is string }}" for place, each in expressions.items()}
    tell = {"ansible.builtin.debug": {"msg": "{{ told | to_json | b64encode }}"}}
    play_vars = {"told": reported, "__dra_controller_peer": "a"}
    played = play_tasks(tmp_path, [{**tell, "vars": play_vars}], {"a": {"accelerator_node_name": 12}})
    assert {place for place, is_text in played.told["a"].items() if not is_text} == set(), played.output


@pytest.mark.parametrize("variable", ["accelerator_node_name", "accelerator_kubeconfig_context"])
def test_hosts_whose_name_or_cluster_is_unknown_are_no_conflict(tmp_path: Path, variable: str) -> None:
    """Unknown names or clusters are no conflict, such as templates with facts of hosts outside of the limit. Other hosts are compared."""
    hosts = group(["a1", "b1", "c1", "d1"], accelerator_kubeconfig="/k", accelerator_node_name="gpu-1")
    hosts["vars"][variable] = "{{ known }}"
    passes = run_playbook(tmp_path, ROOT / "playbooks/check_inventory.yml", {"accelerator_nodes": hosts})
    assert passes.returncode == 0, passes.stdout + passes.stderr
    hosts["hosts"] |= {name: {"known": "gpu-1"} for name in ("a1", "b1")}
    fails = run_playbook(tmp_path, ROOT / "playbooks/check_inventory.yml", {"accelerator_nodes": hosts})
    assert fails.returncode != 0 and "Hosts a1, b1 have the same Node gpu-1" in fails.stdout, fails.stdout


def test_union_leaves_out_hosts_whose_value_or_cluster_is_unknown(tmp_path: Path) -> None:
    hosts = {
        "a": {"accelerator_vendors": ["ascend"]},
        "b": {"accelerator_vendors": "{{ nowhere }}"},
        "c": {"accelerator_vendors": ["one", "{{ nowhere }}"]},
        "d": {"accelerator_vendors": ["other"], "accelerator_kubeconfig": "{{ nowhere }}"},
        "e": {},
    }
    words = "dra.accelerators.cluster_union(hostvars, groups['accelerator_nodes'], api, ['accelerator_vendors'], ['nvidia'])"
    show = {"ansible.builtin.debug": {"msg": f"{{{{ [] | {words} | to_json | b64encode }}}}"}}
    api = {"kubeconfig": os.environ.get("KUBECONFIG", ""), "context": ""}
    played = play_tasks(tmp_path, [{**show, "vars": {"api": api}, "run_once": True}], hosts)
    assert played.told == {"a": ["ascend", "nvidia"]}, played.output


def test_templates_that_older_versions_return_are_unknown() -> None:
    """ansible-core 2.18 returns a template that it cannot evaluate: its value counts as unknown."""
    hostvars = {name: {"accelerator_node_name": "{{ nowhere }}"} for name in "ab"} | {"c": {}}
    assert not node_name_conflicts(list(hostvars), hostvars)
    api = {"kubeconfig": os.environ.get("KUBECONFIG", ""), "context": ""}
    vendors = {"a": {"vendors": ["one", "{{ nowhere }}"]}, "b": {"vendors": "{{ nowhere }}"}, "c": {"vendors": ["x"]}}
    assert cluster_union([], vendors, list(vendors), api, ["vendors"]) == ["x"]


def test_same_node_name_in_two_clusters_passes(tmp_path: Path) -> None:
    hosts = group(
        ["a1", "b1", "c1"], accelerator_kubeconfig=str(tmp_path / "kubeconfig"), accelerator_node_name="gpu-1"
    )
    hosts["hosts"]["b1"] = {"accelerator_kubeconfig": str(tmp_path / "other")}
    hosts["hosts"]["c1"] = {"accelerator_kubeconfig_context": "second"}
    done = run_playbook(tmp_path, ROOT / "playbooks/check_inventory.yml", {"accelerator_nodes": hosts})
    assert done.returncode == 0, done.stdout


# ---- upgrade


def test_plan_of_the_upgrade_lists_the_claims_of_each_cluster_once(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    for node, server in zip(("a1", "a2", "b2"), (clusters[0], clusters[0], clusters[1])):
        server.use(node)
    (tmp_path / "library").mkdir()
    (tmp_path / "library/answer.py").write_text(MODULE, encoding="utf-8")
    plays = yaml.safe_load((ROOT / "playbooks/upgrade.yml").read_text("utf-8"))
    (plan,) = (each for each in plays if each["name"] == "Plan the upgrade")
    names = [task["name"] for task in plan["tasks"]]
    first = names.index("Find each node's name and its cluster")
    last = names.index("Find the pods to evict")
    ask = plan["tasks"][last]
    held = {"answer": {"answer": {"held": "{{ given.held_claims }}", "driver": "{{ given.drivers }}"}}}
    show = {**held, "vars": {**ask["vars"], "given": ask["dra.accelerators.device_drain"]}, "register": "shown"}
    show |= {"loop": ["nvidia_driver"], "loop_control": ask["loop_control"]}
    tell = {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} {{ shown.results[0].held | join(',') }}."}}
    document = {**plan, "tasks": [*plan["tasks"][first:last], show, tell]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([document], sort_keys=False), encoding="utf-8")
    done = run_playbook(tmp_path, tmp_path / "play.yml", two_clusters(tmp_path, clusters))
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r'"msg": "(\S+ \S*)\."', done.stdout)) == {
        "a1 default/claim-on-a1",
        "a2 default/claim-on-a2",
        "b1 ",
        "b2 default/claim-on-b2",
    }
    for server in clusters:
        assert server.paths.count("/apis/resource.k8s.io/v1/resourceclaims") == 1


# ---- repartition


def test_repartition_with_an_unreachable_node_changes_no_node(tmp_path: Path) -> None:
    """A node is unreachable: no node is changed, because the plan would not know which of its devices pods use."""
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n", encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    hosts = group(["a1", "a2"], accelerator_kubeconfig=str(tmp_path / "kubeconfig"))
    hosts["hosts"]["a2"] = {"ansible_connection": "ssh", "ansible_ssh_executable": str(tmp_path / "ssh")}
    done = run_playbook(tmp_path, ROOT / "playbooks/repartition.yml", {"accelerator_nodes": hosts})
    assert done.returncode != 0 and "Find each node's name" not in done.stdout, done.stdout
    assert "Cannot connect to a2, so no node was changed." in failures(done.stdout)["a1"], done.stdout
    assert "--limit 'accelerator_nodes,!a2'" in failures(done.stdout)["a1"], done.stdout


# ---- the answer of another host


def test_host_answer_names_the_failed_host_and_its_error(tmp_path: Path) -> None:
    fail = {"ansible.builtin.fail": {"msg": "no way"}, "register": "asked", "when": "inventory_hostname == 'a1'"}
    take = {"dra.accelerators.host_answer": {"host": "a1", "name": "asked"}}
    play = {"hosts": "all", "gather_facts": False, "tasks": [fail, take]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    done = run_playbook(tmp_path, tmp_path / "play.yml", {"accelerator_nodes": group(["a1", "a2"])})
    assert "Host a1 has no usable result asked: no way" in failures(done.stdout)["a2"]


def test_host_answer_returns_only_the_own_part_of_a_plan() -> None:
    """Each host gets only its part of a plan. With the whole plan, the memory would grow with the square of the number of hosts."""
    names = [f"a{number}" for number in range(50)]
    plan = {
        "nodes": {name: {"operations": []} for name in names},
        "evicted": [{"node": name, "name": f"pod-on-{name}"} for name in names],
        "idle": names,
        **dict.fromkeys(("staying", "table", "problems", "blocked", "strays"), names),
    }
    assert part_about({"plan": plan, "failed": False}, ["a1"]) == {
        "plan": {
            "nodes": {"a1": {"operations": []}},
            "evicted": [{"node": "a1", "name": "pod-on-a1"}],
            "idle": ["a1"],
        },
        "failed": False,
    }


# ---- deleted nodes


def gone_play(directory: Path, *clusters: ClusterServer) -> Path:
    """Write the play of remove for deleted nodes. It shows the objects instead of deleting them, and empties the lists of these clusters."""
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    (play,) = (each for each in plays if each["name"] == "Remove the objects of removed nodes")
    play["tasks"] = yaml.safe_load((ROOT / "playbooks/tasks/remove_gone.yml").read_text("utf-8"))
    (removal,) = (each for each in play["tasks"] if "kubernetes.core.k8s" in each)
    removal["ansible.builtin.debug"] = {"msg": removal.pop("kubernetes.core.k8s")["definition"]}
    deletions = [{"ansible.builtin.uri": {"url": each.url, "method": "DELETE"}} for each in clusters]
    position = play["tasks"].index(removal) + 1
    play["tasks"][position:position] = deletions
    check = {"ansible.builtin.import_playbook": str(ROOT / "playbooks/check_inventory.yml")}
    (directory / "play.yml").write_text(yaml.safe_dump([check, play], sort_keys=False), encoding="utf-8")
    return directory / "play.yml"


@pytest.mark.parametrize(("living", "removed_by_server"), [(False, True), (True, False), (False, False)])
def test_remove_gone_removes_the_objects_of_the_named_nodes_alone(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer], living: bool, removed_by_server: bool
) -> None:
    """Only objects of the named nodes are deleted. A remaining object is an error, also behind a load balancer that answers 404."""
    server = clusters[0]
    if living:
        server.nodes.append("gone")
    for path, prefix, suffixes in (
        ("serviceaccounts", "driver-", ("",)),
        ("clusterroles", "dra-accelerators-driver-", ("",)),
        ("clusterrolebindings", "dra-accelerators-driver-", ("", ":node")),
    ):
        server.lists[path] = [
            {"metadata": {"name": f"{prefix}{node}{suffix}"}}
            for node in ("gone", "a1", "gone-2", "gone-node")
            for suffix in suffixes
        ]
    server.lists["validatingadmissionpolicies"] = [{"metadata": {"name": "dra-accelerators-driver-slices"}}]
    variables = {
        "accelerator_kubeconfig": server.kubeconfig(tmp_path / "kubeconfig"),
        "accelerator_remove_gone": ["gone"],
        "ansible_python_interpreter": str(PYTHON),
    }
    play = gone_play(tmp_path, *((server,) if removed_by_server else ()))
    done = run_playbook(tmp_path, play, {"web": {}}, "-e", json.dumps(variables))
    removed = set(re.findall(r'"name": "((?:dra-accelerators-)?driver-[^"]*)"', done.stdout))
    if living:
        assert done.returncode != 0 and "still has the Nodes gone" in done.stdout and not removed, done.stdout
    else:
        left = "ServiceAccount driver-gone" in done.stdout and "after the deletion" in done.stdout
        assert (done.returncode == 0) is removed_by_server and left is not removed_by_server, done.stdout
        assert removed == {"driver-gone", "dra-accelerators-driver-gone", "dra-accelerators-driver-gone:node"}


@pytest.mark.parametrize("living", [False, True])
def test_remove_gone_asks_each_cluster_of_the_inventory(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer], living: bool
) -> None:
    """The node was in the second cluster: each cluster is queried. A name that no cluster knows was removed before."""
    if living:
        clusters[1].nodes.append("gone")
    clusters[1].lists["serviceaccounts"] = [{"metadata": {"name": "driver-gone"}}]
    groups = {**two_clusters(tmp_path, clusters), "local": group(["localhost"])}
    variables = {"accelerator_remove_gone": ["gone", "removed-before"]}
    words = ("--limit", "localhost", "-e", json.dumps(variables))
    done = run_playbook(tmp_path, gone_play(tmp_path, clusters[1]), groups, *words)
    assert (done.returncode == 0) is not living and ("still has the Nodes gone" in done.stdout) is living, done.stdout
    assert ('"name": "driver-gone"' in done.stdout) is not living, done.stdout
    if not living:
        assert "for removed-before. They were removed before" in done.stdout and "kubeconfig-b" in done.stdout
        clusters[1].lists.clear()
        done = run_playbook(tmp_path, gone_play(tmp_path), groups, *words)
        assert done.returncode == 0 and "for gone, removed-before. They were" in done.stdout, done.stdout
        assert "changed=0" in done.stdout


@pytest.mark.parametrize("controllers", [False, True])
@pytest.mark.parametrize(
    ("nodes", "gone", "words", "removes"),
    [
        (False, True, (), False),
        (True, True, ("--limit", "localhost"), False),
        # The node a2 still needs a Deployment.
        (True, True, ("--limit", "a1,localhost"), None),
        (True, True, (), True),
        (True, False, (), True),
    ],
)
def test_controller_stays_if_only_absent_nodes_are_removed(
    tmp_path: Path, nodes: bool, gone: bool, words: tuple[str, ...], removes: bool | None, controllers: bool
) -> None:
    """The controller stays, as a Deployment and with localhost in its group. The play shows the hosts instead of a removal.

    None means that only controllers on hosts are removed.
    """
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    first = [each for each in plays if each["name"] in ("Read the variables of the nodes", "Remove the controller")]
    for each in first:
        if each["name"] == "Remove the controller":
            each["tasks"] = [{"ansible.builtin.debug": {"msg": "removes the controller"}}]
    (tmp_path / "tasks").symlink_to(ROOT / "playbooks/tasks")
    (tmp_path / "play.yml").write_text(yaml.safe_dump(first, sort_keys=False), encoding="utf-8")
    groups = {"accelerator_controllers" if controllers else "web": group(["localhost"])}
    if nodes:
        groups["accelerator_nodes"] = group(["a1", "a2"])
    variables = {"dra_controller_form": "deployment", **({"accelerator_remove_gone": ["gone"]} if gone else {})}
    done = run_playbook(tmp_path, tmp_path / "play.yml", groups, "-e", json.dumps(variables), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("removes the controller" in done.stdout) is (controllers if removes is None else removes), done.stdout


def test_removal_finds_a_deployment_that_is_a_variable_of_all_hosts(tmp_path: Path) -> None:
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    first = [each for each in plays if each["name"] in ("Read the variables of the nodes", "Remove the controller")]
    first[1]["tasks"] = [{"ansible.builtin.debug": {"msg": "removes the controller on {{ inventory_hostname }}"}}]
    (tmp_path / "tasks").symlink_to(ROOT / "playbooks/tasks")
    (tmp_path / "play.yml").write_text(yaml.safe_dump(first, sort_keys=False), encoding="utf-8")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text("dra_controller_form: deployment\n", encoding="utf-8")
    done = run_playbook(tmp_path, tmp_path / "play.yml", {"accelerator_nodes": group(["a1", "a2"])})
    assert done.returncode == 0 and "removes the controller on a1" in done.stdout, done.stdout + done.stderr


def test_report_of_two_clusters_is_refused(tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]) -> None:
    file = {"accelerator_report_file": str(tmp_path / "out.md")}
    groups = two_clusters(tmp_path, clusters)
    done = run_playbook(tmp_path, ROOT / "playbooks/report.yml", groups, "-e", json.dumps(file))
    assert done.returncode != 0 and "belong to 2 clusters" in done.stdout and "--limit" in done.stdout, done.stdout
    assert not (tmp_path / "out.md").exists()


def test_plan_of_two_clusters_is_refused(tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]) -> None:
    groups = two_clusters(tmp_path, clusters)
    done = run_playbook(tmp_path, ROOT / "playbooks/plan.yml", groups)
    assert done.returncode != 0 and "belong to 2 clusters" in done.stdout and "--limit" in done.stdout, done.stdout
