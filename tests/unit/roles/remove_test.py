# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook remove in inventories with several clusters: each node's claims are read from its own cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import SETTLE_SECONDS
from cluster_playbooks import ANSWER_MODULE, ROOT, ClusterServer, Json, failures, group, run_playbook, two_clusters
from playing import play as play_tasks

UNIT = "dra-accelerators-driver.service"


def removal(directory: Path, *, ours: bool = True, fails: str = "") -> Path:
    """Write the playbook remove up to the task that stops a node's driver. Nodes report this collection's driver.

    ``fails`` is a host that cannot be cordoned.
    """
    (directory / "library").mkdir()
    (directory / "library/answer.py").write_text(ANSWER_MODULE, encoding="utf-8")
    (directory / "tasks").symlink_to(ROOT / "playbooks/tasks")
    node = {
        "driver": {"configuration": []},
        "units": {UNIT: {"managed": ours}, "dra-accelerators-settings.service": {"managed": False}},
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
    node["units"] = {each: {"managed": each in units} for each in named}
    tell = {
        "ansible.builtin.debug": {"msg": "{{ accelerator_vendors_of_node | to_json | b64encode }}"},
        "vars": {
            name: each for name, each in take["vars"].items() if name.startswith(("accelerator_v", "accelerator_own"))
        },
    }
    variables: Json = {"accelerator_node": node, **({} if fleet is None else {"accelerator_vendors": fleet})}
    found: list[str] = play_tasks(directory, [tell], {"a": variables}).messages["a"]
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
