# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that a real API server rejects writes of claims that RBAC allows to stolen tokens of the controller and of a
node driver.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dra_driver.api.client import ApiClient, ApiError

from tests.fleets import DRIVER
from tests.oracles.controller_process import NoNodes
from tests.oracles.controller_rights import ACCOUNT, DRIVER_NAMESPACE, NAMESPACE, driver_objects, objects

NODE, OTHER = "policy-node", "other.example.com"
OWN, KEPT = "dra.accelerators/own", "example.com/kept"
PODS = [{"resource": "pods", "name": "pod", "uid": "1"}]
STATUS = "/status"
DENIED = "ValidatingAdmissionPolicy"
#: Patches a claim as an identity in a dry run; returns the answer.
Patch = Callable[..., str]


def claim(cluster: NoNodes, name: str, *drivers: str, term: dict[str, Any] | None = None) -> None:
    """Create a claim with a device of each driver, reserved for a pod."""
    requests = [{"name": f"r{index}", "exactly": {"deviceClassName": "any"}} for index, _driver in enumerate(drivers)]
    metadata = {"name": name, "namespace": "default", "finalizers": [KEPT, OWN]}
    spec = {"devices": {"requests": requests}}
    cluster.apply({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": spec})
    devices = [{"driver": driver, "pool": NODE, "device": f"device-{index}"} for index, driver in enumerate(drivers)]
    own_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
    status = {
        "allocation": {
            "devices": {"results": [{"request": f"r{index}", **each} for index, each in enumerate(devices)]},
            "nodeSelector": {"nodeSelectorTerms": [term or own_node]},
        },
        "reservedFor": PODS,
        "devices": [{**each, "conditions": []} for each in devices],
    }
    patch = json.dumps({"status": status})
    place = ("resourceclaim", name, "-n", "default", "--subresource=status", "--type=merge")
    cluster.kubectl("patch", *place, "-p", patch)


def remove(cluster: NoNodes, name: str) -> None:
    """Delete a claim with finalizers."""
    place = ("resourceclaim", name, "-n", "default")
    cluster.kubectl("patch", *place, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    cluster.kubectl("delete", *place)


@pytest.fixture(scope="module")
def cluster(administrator: Path, kubectl: Path) -> Iterator[NoNodes]:
    """Yield an API server with the roles' objects, a Node, and the account of its driver."""
    made = NoNodes(kubectl, administrator)
    account = {"name": f"driver-{NODE}", "namespace": DRIVER_NAMESPACE}
    group = "rbac.authorization.k8s.io"
    # Kubernetes 1.36 and later reject a part of the writes themselves. With this permission only the policies do, as
    # with older ones.
    every_driver = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "statuses-of-every-driver"},
        "rules": [
            {
                "apiGroups": ["resource.k8s.io"],
                "resources": ["resourceclaims/driver"],
                "verbs": ["arbitrary-node:patch"],
            }
        ],
    }

    def binding(role: str, *accounts: dict[str, str]) -> dict[str, Any]:
        return {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"test-{role}"},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", **each} for each in accounts],
        }

    made.apply(
        *objects(),
        *driver_objects(),
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
        every_driver,
        binding("dra-accelerators-driver", account),
        binding("statuses-of-every-driver", account, {"name": ACCOUNT, "namespace": NAMESPACE}),
    )
    claim(made, "probe", OTHER)
    yield made
    remove(made, "probe")
    made.kubectl("delete", "node", NODE)


@pytest.fixture()
def claims(cluster: NoNodes) -> Iterator[Callable[..., None]]:
    """Yield a function that creates claims; delete them after the test."""
    names: list[str] = []

    def make(name: str, *drivers: str, term: dict[str, Any] | None = None) -> None:
        names.append(name)
        claim(cluster, name, *drivers, term=term)

    yield make
    for name in names:
        remove(cluster, name)


def identity(cluster: NoNodes, folder: Path, *account: str) -> Patch:
    """Return a function that patches a claim with a token of an account, after the policies are in force."""
    own = json.loads(cluster.kubeconfig.read_text(encoding="utf-8"))
    own["users"][0]["user"] = {"token": cluster.kubectl("create", "token", *account).strip()}
    kubeconfig = folder / "stolen"
    kubeconfig.write_text(json.dumps(own), encoding="utf-8")

    async def send(path: str, document: dict[str, Any]) -> str:
        # kubectl would first read the status, for which neither account has a permission.
        client = ApiClient(str(kubeconfig), user_agent="test")
        try:
            await client.request("PATCH", path, body=document, content_type="application/merge-patch+json")
        except ApiError as error:
            return str(error)
        finally:
            await client.close()
        return "patched"

    def patch(name: str, document: dict[str, Any], subresource: str = "") -> str:
        path = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{name}{subresource}?dryRun=All"
        return asyncio.run(send(path, document))

    cluster.wait(
        "the policies are in force", lambda: DENIED in patch("probe", {"status": {"devices": []}}, STATUS), timeout=20
    )
    return patch


@pytest.fixture(scope="module")
def as_controller(cluster: NoNodes, tmp_path_factory: pytest.TempPathFactory) -> Patch:
    """Return a function that patches as the controller."""
    return identity(cluster, tmp_path_factory.mktemp("controller"), ACCOUNT, "-n", NAMESPACE)


@pytest.fixture(scope="module")
def as_driver(cluster: NoNodes, tmp_path_factory: pytest.TempPathFactory) -> Patch:
    """Return a function that patches as the driver of the node, with a token that is bound to it."""
    bound = ("--bound-object-kind=Node", f"--bound-object-name={NODE}")
    return identity(cluster, tmp_path_factory.mktemp("driver"), f"driver-{NODE}", "-n", DRIVER_NAMESPACE, *bound)


DEALLOCATED = {"status": {"allocation": None, "reservedFor": None, "devices": None}}


def test_controller_cleanup_patches_are_accepted(as_controller: Patch, claims: Callable[..., None]) -> None:
    claims("own", DRIVER, OTHER)
    assert "patched" in as_controller("own", {"metadata": {"finalizers": [KEPT]}})
    assert "patched" in as_controller("own", DEALLOCATED, STATUS)


@pytest.mark.parametrize(
    ("name", "document", "subresource", "reason"),
    [
        ("other", DEALLOCATED, STATUS, "have a device of the drivers"),
        ("other", {"metadata": {"finalizers": [KEPT]}}, "", "have a device of the drivers"),
        ("own", {"metadata": {"finalizers": [OWN]}}, "", "begin with dra.accelerators/"),
        ("own", {"metadata": {"finalizers": None}}, "", "begin with dra.accelerators/"),
        ("own", {"metadata": {"finalizers": [KEPT, OWN, "example.com/new"]}}, "", "add no finalizer"),
        ("own", {"metadata": {"labels": {"a": "b"}}}, "", "labels"),
        ("own", {"metadata": {"annotations": {"a": "b"}}}, "", "annotations"),
        ("own", {"status": {"reservedFor": None}}, STATUS, "change the status otherwise"),
        ("own", {"status": {"reservedFor": [{**PODS[0], "uid": "2"}]}}, STATUS, "change the status otherwise"),
        ("own", {"status": {"devices": None}}, STATUS, "change the status otherwise"),
        ("own", {"status": {"allocation": {"nodeSelector": None}}}, STATUS, ""),
    ],
)
def test_controller_other_patches_are_denied(
    as_controller: Patch,
    claims: Callable[..., None],
    name: str,
    document: dict[str, Any],
    subresource: str,
    reason: str,
) -> None:
    claims(name, DRIVER if name == "own" else OTHER)
    answer = as_controller(name, document, subresource)
    assert "patched" not in answer and reason in answer, answer
    assert DENIED in answer or not reason, answer


def field(key: str = "metadata.name", operator: str = "In", values: tuple[str, ...] = (NODE,)) -> dict[str, Any]:
    """Return a requirement of a node selector."""
    return {"key": key, "operator": operator, "values": list(values)}


@pytest.mark.parametrize(
    ("term", "allowed"),
    [
        ({"matchFields": [field()]}, True),
        ({"matchFields": [field(operator="NotIn")]}, False),
        ({"matchFields": [field(values=("another",))]}, False),
        ({"matchFields": [field()], "matchExpressions": [field("zone", "NotIn", ("a",))]}, False),
        ({"matchExpressions": [field("metadata.name")]}, False),
        ({"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, False),
    ],
)
def test_driver_writes_status_of_claims_of_own_node_only(
    as_driver: Patch, claims: Callable[..., None], term: dict[str, Any], allowed: bool
) -> None:
    claims("own", DRIVER, term=term)
    conditions = [{"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastTransitionTime": None}]
    conditions[0]["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    device = {"driver": DRIVER, "pool": NODE, "device": "device-0", "conditions": conditions}
    answer = as_driver("own", {"status": {"devices": [device]}}, STATUS)
    if allowed:
        assert "patched" in answer, answer
    else:
        assert DENIED in answer and "allocated on its own node only" in answer, answer
