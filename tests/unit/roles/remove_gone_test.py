# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook remove for nodes that are no longer in the inventory, and for the controller."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from cluster_playbooks import ROOT, ClusterServer, group, run_playbook, two_clusters

from tests.unit.ansible_process import PYTHON


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
    variables = {"dra_controller_deploy_as": "deployment", **({"accelerator_remove_gone": ["gone"]} if gone else {})}
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
    (tmp_path / "group_vars/all.yml").write_text("dra_controller_deploy_as: deployment\n", encoding="utf-8")
    done = run_playbook(tmp_path, tmp_path / "play.yml", {"accelerator_nodes": group(["a1", "a2"])})
    assert done.returncode == 0 and "removes the controller on a1" in done.stdout, done.stdout + done.stderr
