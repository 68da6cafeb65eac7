# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the lists of waiting claims on a real API server, with the permissions that the roles grant to the controller
and a node's driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleets import DRIVER
from tests.oracles.controller_process import NoNodes, acting
from tests.oracles.controller_rights import (
    ACCOUNT,
    DRIVER_NAMESPACE,
    NAMESPACE,
    POD_NAMESPACE,
    driver_objects,
    node_objects,
    pod_objects,
)

NODE, OTHER, CLAIM = "list-node", "list-other", "waiting"
LIST = f"waiting-claims-{NODE}"
CONTROLLER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
NODE_DRIVER = f"system:serviceaccount:{DRIVER_NAMESPACE}:driver-{NODE}"


@pytest.fixture(scope="module")
def cluster(administrator: Path, kubectl: Path) -> Iterator[NoNodes]:
    """Yield an API server with the objects of the roles, two Nodes, and a claim that waits for a device of one."""
    made = NoNodes(kubectl, administrator)
    nodes = [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}} for name in (NODE, OTHER)]
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "any"}}]}}
    metadata = {"name": CLAIM, "namespace": "default"}
    claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": spec}
    made.apply(*nodes, *driver_objects(), *node_objects(NODE), claim)
    yield made
    made.kubectl("delete", "resourceclaim", CLAIM, "-n", "default")
    made.kubectl("delete", "node", NODE, OTHER)


def allocate(cluster: NoNodes, *, on: str) -> None:
    """Allocate the claim on a node, or nowhere ("")."""
    result = {"request": "gpu", "driver": DRIVER, "pool": on, "device": "gpu-0"}
    waits = {"bindingConditions": ["example.com/Prepared"], "bindingFailureConditions": ["example.com/Failed"]}
    field = {"key": "metadata.name", "operator": "In", "values": [on]}
    allocation = {
        "devices": {"results": [{**result, **waits}]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        "allocationTimestamp": "2026-01-01T00:00:00Z",
    }
    patch = json.dumps({"status": {"allocation": allocation if on else None}})
    words = ("resourceclaim", CLAIM, "-n", "default", "--subresource=status", "--type=merge", "-p", patch)
    cluster.kubectl("patch", *words)


def listed(cluster: NoNodes, name: str) -> str:
    found = cluster.kubectl(
        "get", "configmap", f"waiting-claims-{name}", "-n", DRIVER_NAMESPACE, "--ignore-not-found", "-o", "json"
    )
    return str(json.loads(found)["data"]["claims"]) if found else ""


def may(cluster: NoNodes, user: str, verb: str, *words: str) -> bool:
    return cluster.kubectl("auth", "can-i", verb, *words, f"--as={user}", check=False).strip() == "yes"


def test_controller_writes_lists_with_the_rights_of_its_role(cluster: NoNodes, tmp_path: Path) -> None:
    allocate(cluster, on=NODE)
    uid = cluster.get("resourceclaim", CLAIM, "-n", "default")["metadata"]["uid"]
    with acting(cluster, tmp_path, driver_namespace=DRIVER_NAMESPACE):
        cluster.wait("the list", lambda: f"default/{CLAIM} {uid} " in listed(cluster, NODE))
        (owner,) = cluster.get("configmap", LIST, "-n", DRIVER_NAMESPACE)["metadata"]["ownerReferences"]
        assert owner["uid"] == cluster.get("node", NODE)["metadata"]["uid"]
        cluster.wait(
            "the sign",
            lambda: cluster.kubectl("get", "configmap", "waiting-claims", "-n", DRIVER_NAMESPACE, "--ignore-not-found"),
        )
        allocate(cluster, on="")
        allocate(cluster, on=OTHER)
        cluster.wait("the other list", lambda: listed(cluster, OTHER) and not listed(cluster, NODE))
        allocate(cluster, on="")
        cluster.wait("no list", lambda: not listed(cluster, OTHER))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "owner", "problem"),
    [
        (f"driver-{NODE}", "", "names that begin with waiting-claims"),
        (LIST, OTHER, "must be its Node"),
        (LIST, NODE, ""),
        ("waiting-claims", "", ""),
    ],
)
def test_controller_writes_no_other_configmaps(
    cluster: NoNodes, tmp_path: Path, name: str, owner: str, problem: str
) -> None:
    with acting(cluster, tmp_path):
        pass  # creates the objects of the role
    owners = [{"apiVersion": "v1", "kind": "Node", "name": owner, "uid": "1"}] if owner else []
    metadata = {"name": name, "namespace": DRIVER_NAMESPACE, "ownerReferences": owners}
    body = json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"x": name}})
    words = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-", f"--as={CONTROLLER}")

    def answer() -> str:
        try:
            return cluster.kubectl(*words, text=body)
        except AssertionError as error:
            return str(error)

    if problem:
        cluster.wait("the policy rejects it", lambda: problem in answer())
    else:
        assert "serverside-applied" in answer()
    assert not may(cluster, CONTROLLER, "create", "configmaps", "-n", "default")


def test_driver_of_a_node_reads_its_own_list_only(cluster: NoNodes) -> None:
    inside = ("-n", DRIVER_NAMESPACE)
    for verb in ("list", "watch"):
        assert may(cluster, NODE_DRIVER, verb, f"configmaps/{LIST}", *inside)
        assert not may(cluster, NODE_DRIVER, verb, f"configmaps/waiting-claims-{OTHER}", *inside)
        assert not may(cluster, NODE_DRIVER, verb, "configmaps", *inside)
        assert not may(cluster, NODE_DRIVER, verb, "resourceclaims.resource.k8s.io", "--all-namespaces")
    assert may(cluster, NODE_DRIVER, "get", "configmaps/waiting-claims", *inside)
    for verb in ("create", "update", "patch", "delete"):
        assert not may(cluster, NODE_DRIVER, verb, f"configmaps/{LIST}", *inside)
    # The driver's watch selects the list by name.
    words = ("get", "configmaps", *inside, f"--as={NODE_DRIVER}", "--ignore-not-found", "--field-selector")
    cluster.kubectl(*words, f"metadata.name={LIST}")
    with pytest.raises(AssertionError, match="forbidden"):
        cluster.kubectl(*words, f"metadata.name=waiting-claims-{OTHER}")


def test_pods_of_drivers_read_lists_only_for_layouts_that_need_them(cluster: NoNodes) -> None:
    """All pods have one account, so each pod can read the lists of all nodes."""
    pods, inside = f"system:serviceaccount:{POD_NAMESPACE}:driver", ("-n", DRIVER_NAMESPACE)
    for needed in (False, True):
        cluster.apply(*pod_objects(waiting_claims=needed))
        cluster.wait("the right", lambda needed=needed: may(cluster, pods, "watch", "configmaps", *inside) == needed)
        assert may(cluster, pods, "get", "configmaps/waiting-claims", *inside)
        assert not may(cluster, pods, "get", f"configmaps/driver-{NODE}", *inside)
        assert not may(cluster, pods, "list", "resourceclaims.resource.k8s.io", "--all-namespaces")
