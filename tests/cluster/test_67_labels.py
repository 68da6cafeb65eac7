# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test Node labels on the real API server: written, not overwritten if others own them, removed, and passed to Node
Feature Discovery if it runs.

Node Feature Discovery is simulated: the test creates its API, a DaemonSet of its name with pods, and its object for
the node.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster, execute
from tests.cluster.hostile_node import hostile_answers

pytestmark = pytest.mark.prove

Play = Callable[..., str]
COUNT, PRODUCT = "nvidia.com/gpu.count", "nvidia.com/gpu.product"
FILE = "/etc/kubernetes/node-feature-discovery/features.d/dra-accelerators"
BUS = "feature.node.kubernetes.io/pci-0302_10de.present"
MANAGER = "dra-accelerators-node-features"
GROUP = "nfd.k8s-sigs.io"


@pytest.fixture(scope="module")
def play(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Return a function that runs the role on the first node with variables and returns the output including warnings."""
    folder = tmp_path_factory.mktemp("labels")
    (folder / "hosts.yml").write_text(cluster.world("inventory"), encoding="utf-8")
    node = cluster.nodes()[0]
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.node_features"}}]
    document = [{"hosts": node, "gather_facts": False, "become": True, "tasks": tasks}]
    (folder / "play.yml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")

    def run(*arguments: str, **variables: Any) -> str:
        words = ["ansible-playbook", "--inventory", folder / "hosts.yml", "--diff", *arguments]
        words += ["--extra-vars", json.dumps({"node_features_node_name": node, **variables}), folder / "play.yml"]
        done = execute(words, env={**os.environ, "ANSIBLE_PIPELINING": "true"})
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def node(cluster: Cluster, play: Play) -> Iterator[str]:
    name = cluster.nodes()[0]
    before = labels(cluster, name)
    yield name
    play(node_features_state="absent")
    assert labels(cluster, name) == before


@pytest.fixture
def discovery(cluster: Cluster, node: str) -> Iterator[None]:
    """Create the objects of Node Feature Discovery that the role reads."""
    any_object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"nodefeatures.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {"kind": "NodeFeature", "plural": "nodefeatures", "singular": "nodefeature"},
            "scope": "Namespaced",
            "versions": [
                {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": any_object}}
            ],
        },
    }
    pods = {
        "metadata": {"labels": {"app": "nfd-worker"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "worker",
                    "image": "debian:12",
                    "imagePullPolicy": "Never",
                    "command": ["sleep", "infinity"],
                }
            ],
        },
    }
    daemon = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "nfd-worker", "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": "nfd-worker"}}, "template": pods},
    }
    feature = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "NodeFeature",
        "metadata": {
            "name": node,
            "namespace": "default",
            "labels": {"nfd.node.kubernetes.io/node-name": node},
        },
        "spec": {},
    }
    cluster.apply(definition)
    cluster.kubectl("wait", "--for=condition=Established", f"crd/nodefeatures.{GROUP}", "--timeout=60s")
    cluster.apply(daemon)
    cluster.apply(feature)
    cluster.wait(
        "the DaemonSet has pods",
        lambda: cluster.get("daemonset", "nfd-worker")["status"].get("currentNumberScheduled", 0) > 0,
    )
    yield
    cluster.kubectl("delete", "daemonset", "nfd-worker", "-n", "default", "--wait=true")
    cluster.kubectl("delete", "crd", f"nodefeatures.{GROUP}", "--wait=true")


def labels(cluster: Cluster, node: str) -> dict[str, str]:
    found: dict[str, str] = cluster.get("node", node)["metadata"]["labels"]
    return found


def annotations(cluster: Cluster, node: str) -> set[str]:
    return {
        name for name in cluster.get("node", node)["metadata"]["annotations"] if name.startswith("dra-accelerators/")
    }


def our_verbs(cluster: Cluster, node: str) -> list[str]:
    """Return the operations of our field manager on the Node."""
    found = json.loads(cluster.kubectl("get", "node", node, "-o", "json", "--show-managed-fields"))["metadata"]
    return [each["operation"] for each in found["managedFields"] if each["manager"] == MANAGER]


def test_labels_are_applied_through_the_api_and_removed(cluster: Cluster, node: str, play: Play) -> None:
    before, noted = labels(cluster, node), annotations(cluster, node)
    rehearsed = play("--check", node_features_pci_label_fields=["class", "vendor"])
    assert "changed=1" in rehearsed and COUNT in rehearsed and labels(cluster, node) == before
    assert "changed=1" in play(node_features_pci_label_fields=["class", "vendor"])
    found = labels(cluster, node)
    assert found[COUNT] == "8" and found[BUS] == "true" and found["nvidia.com/gpu.mode"] == "compute"
    assert our_verbs(cluster, node) == ["Apply"]
    assert "changed=0" in play(node_features_pci_label_fields=["class", "vendor"])
    # A fact that disappears removes its label.
    assert "changed=1" in play()
    assert BUS not in labels(cluster, node)
    assert "changed=1" in play(node_features_state="absent")
    assert labels(cluster, node) == before and annotations(cluster, node) == noted and not our_verbs(cluster, node)
    assert "changed=0" in play(node_features_state="absent")


def test_labels_of_other_managers_are_kept_and_named(cluster: Cluster, node: str, play: Play) -> None:
    cluster.kubectl("label", "node", node, f"{PRODUCT}=foreign-value")
    try:
        printed = play()
        assert f"{PRODUCT} of {node} was not changed: kubectl" in " ".join(printed.split())
        assert labels(cluster, node)[PRODUCT] == "foreign-value" and labels(cluster, node)[COUNT] == "8"
        assert "changed=0" in play()
        play(node_features_state="absent")
        assert labels(cluster, node)[PRODUCT] == "foreign-value" and COUNT not in labels(cluster, node)
    finally:
        cluster.kubectl("label", "node", node, f"{PRODUCT}-")


def test_labels_of_earlier_versions_are_adopted(cluster: Cluster, node: str, play: Play) -> None:
    before = labels(cluster, node)
    cluster.kubectl("label", "node", node, f"{COUNT}=8", f"{PRODUCT}=gone")
    cluster.kubectl("annotate", "node", node, f"dra-accelerators/labels={COUNT},{PRODUCT}")
    play()
    assert labels(cluster, node)[PRODUCT] == "NVIDIA-H100-80GB-HBM3"
    play(node_features_state="absent")
    assert labels(cluster, node) == before and "dra-accelerators/labels" not in annotations(cluster, node)


@pytest.mark.usefixtures("discovery")
def test_labels_use_a_feature_file_with_node_feature_discovery(cluster: Cluster, node: str, play: Play) -> None:
    before = labels(cluster, node)
    assert FILE in play("--check")
    assert cluster.shell(node, f"test -e {FILE} && echo there || echo none").strip() == "none"
    play(node_features_pci_label_fields=["class", "vendor"])
    said = dict(line.split("=", 1) for line in cluster.run(node, "cat", FILE).splitlines())
    assert said[COUNT] == "8" and said["nvidia.com/gpu.family"] == "hopper" and BUS not in said
    assert labels(cluster, node) == before and "dra-accelerators/feature-file" in annotations(cluster, node)
    assert "changed=0" in play(node_features_pci_label_fields=["class", "vendor"])
    # Change to the API and back.
    play(node_features_way="api")
    assert labels(cluster, node)[COUNT] == "8" and "dra-accelerators/feature-file" not in annotations(cluster, node)
    assert cluster.shell(node, f"test -e {FILE} && echo there || echo none").strip() == "none"
    play()
    assert cluster.run(node, "cat", FILE) and labels(cluster, node) == before
    play(node_features_state="absent")
    assert cluster.shell(node, f"test -e {FILE} && echo there || echo none").strip() == "none"
    assert not annotations(cluster, node) & {"dra-accelerators/labels", "dra-accelerators/feature-file"}


def test_labels_that_a_compromised_node_reports_are_rejected(
    cluster: Cluster, node: str, play: Play, tmp_path: Path
) -> None:
    before = labels(cluster, node)
    hostile = {"node-restriction.kubernetes.io/x": "trusted", "node-role.kubernetes.io/control-plane": ""}
    with hostile_answers(cluster, node, {"drivers": {"labels": hostile}}, tmp_path) as inventory:
        printed = play("--inventory", str(inventory))
        found = labels(cluster, node)
        assert found[COUNT] == "8" and not hostile.keys() & found.keys()
        for name in hostile:
            assert f"The label '{name}' is not written on {node}" in " ".join(printed.split())
        assert "changed=0" in play("--inventory", str(inventory))
    # A kubelet can write annotations of its Node: a label of another owner stays, whatever the annotation contains.
    cluster.kubectl("label", "node", node, "node-restriction.kubernetes.io/x=kept")
    noted = f"{COUNT},node-restriction.kubernetes.io/x"
    cluster.kubectl("annotate", "node", node, "--overwrite", f"dra-accelerators/labels={noted}")
    play(node_features_state="absent")
    assert labels(cluster, node) == {**before, "node-restriction.kubernetes.io/x": "kept"}
    cluster.kubectl("label", "node", node, "node-restriction.kubernetes.io/x-")
