# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A node's driver can touch that node's slices only, and holds no right that it does not use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER, Cluster

KUBECONFIG = "/etc/dra-accelerators/kubeconfig"


@pytest.fixture()
def as_driver(cluster: Cluster, tmp_path: Path) -> Callable[..., str]:
    """Calls kubectl with the kubeconfig of a node's driver; returns all that it printed."""

    def call(node: str, *arguments: str, document: dict[str, Any] | None = None) -> str:
        kubeconfig = tmp_path / node
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_text(cluster.run(node, "cat", KUBECONFIG), encoding="utf-8")
        text = json.dumps(document) if document else None
        return cluster.kubectl("--kubeconfig", kubeconfig, *arguments, text=text, check=False, merge=True)

    return call


def slice_document(name: str, *, node: str | None, driver: str = DRIVER, pool: str | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "driver": driver,
        "pool": {"name": pool or node or "everywhere", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "stolen"}],
    }
    if node:
        spec["nodeName"] = node
    else:
        spec["allNodes"] = True
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}


def test_the_own_nodes_slice_may_be_written(cluster: Cluster, as_driver: Callable[..., str]) -> None:
    first = cluster.nodes()[0]
    answer = as_driver(first, "create", "--dry-run=server", "-f", "-", document=slice_document("own", node=first))
    assert "created" in answer, answer


@pytest.mark.parametrize("kind", ["another node", "every node", "another driver"])
def test_a_foreign_slice_is_refused(cluster: Cluster, as_driver: Callable[..., str], kind: str) -> None:
    first, second = cluster.nodes()
    document = {
        "another node": slice_document("foreign", node=second),
        "every node": slice_document("foreign", node=None),
        "another driver": slice_document("foreign", node=first, driver="other.example.com"),
    }[kind]
    answer = as_driver(first, "create", "-f", "-", document=document)
    assert "ValidatingAdmissionPolicy" in answer and "denied" in answer, answer


def test_another_nodes_slice_cannot_be_deleted(cluster: Cluster, as_driver: Callable[..., str]) -> None:
    first, second = cluster.nodes()
    victim = cluster.slices(second)[0]["metadata"]["name"]
    answer = as_driver(first, "delete", "resourceslice", victim)
    assert "denied" in answer, answer
    assert victim in {item["metadata"]["name"] for item in cluster.slices(second)}


@pytest.mark.parametrize(
    "verb, resource",
    [
        ("get", "secrets"),
        ("list", "pods"),
        ("patch", "nodes"),
        ("create", "pods"),
        ("create", "deviceclasses.resource.k8s.io"),
        ("delete", "resourceclaims.resource.k8s.io"),
    ],
)
def test_rights_that_are_not_used_are_not_held(
    cluster: Cluster, as_driver: Callable[..., str], verb: str, resource: str
) -> None:
    answer = as_driver(cluster.nodes()[0], "auth", "can-i", verb, resource, "--all-namespaces")
    assert answer.strip().splitlines()[-1] == "no", answer


def test_the_kubeconfig_is_for_root_alone(cluster: Cluster) -> None:
    assert cluster.run(cluster.nodes()[0], "stat", "-c", "%a %U", KUBECONFIG).strip() == "600 root"
