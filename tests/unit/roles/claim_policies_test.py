# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The policies that limit the claims and fields that the controller and the node drivers can change."""

from __future__ import annotations

from typing import Any

import pytest
from policies import denials, matches
from token_policies_test import CONTROLLER, DRIVER, NODE, written

OWN, KEPT = "dra.accelerators/own", "example.com/kept"
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "1"}
RESERVED = [{"resource": "pods", "name": "pod", "uid": "2"}]
NVIDIA, OTHER = "gpu.nvidia.com", "other.example.com"
Objects = list[dict[str, Any]]


def status(*drivers: str) -> dict[str, Any]:
    """Return the status of a claim that has one device of each driver on node n1, and that a pod has reserved."""
    devices = [{"driver": driver, "pool": "n1", "device": "gpu-0"} for driver in drivers]
    return {
        "allocation": {"devices": {"results": devices}, "nodeSelector": selector()},
        "reservedFor": RESERVED,
        "devices": devices,
    }


def selector(**changes: Any) -> dict[str, Any]:
    """Return the node selector that the scheduler writes for a claim on node n1, with changes of its only term."""
    field = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    return {"nodeSelectorTerms": [{"matchFields": [field], **changes}]}


STATUS = status(NVIDIA)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """Return the policies that the roles of the controller and the driver write."""
    answer = {"audiences": ["api"]}
    read = {"read": {"__dra_driver_token_defaults": answer, "__dra_controller_token_defaults": answer}}
    roles = {"dra_controller": "__dra_controller_objects", "dra_driver": "__dra_driver_shared_objects"}
    objects = [
        each
        for role, expression in roles.items()
        for each in written(tmp_path_factory.mktemp(role), role, expression, read)["read"]
    ]
    return [each for each in objects if each["kind"] == "ValidatingAdmissionPolicy"]


def denied(
    policies: Objects,
    old: dict[str, Any],
    new: dict[str, Any],
    user: str = CONTROLLER,
    resource: str = "resourceclaims/status",
) -> list[str]:
    """Return the denial reasons for an update of a claim. ``old`` and ``new`` are its status and finalizers."""

    def claim(parts: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"name": "claim", **parts.get("metadata", {})}, "status": parts["status"]}

    asking = [each for each in policies if matches(each, "resource.k8s.io", resource, "UPDATE")]
    assert asking
    request = {"userInfo": {"username": user, "extra": {NODE: ["n1"]}}}
    return [text for each in asking for text in denials(each, request=request, object=claim(new), oldObject=claim(old))]


def stored(*drivers: str, finalizers: tuple[str, ...] = (KEPT, OWN)) -> dict[str, Any]:
    """Return a claim with devices of these drivers."""
    return {"metadata": {"finalizers": list(finalizers)}, "status": status(*drivers)}


@pytest.mark.parametrize("drivers", [(NVIDIA,), (OTHER, NVIDIA)])
def test_cleanup_patches_of_controller_are_allowed(policies: Objects, drivers: tuple[str, ...]) -> None:
    old = stored(*drivers)
    assert denied(policies, old, {**old, "metadata": {"finalizers": [KEPT]}}, resource="resourceclaims") == []
    assert denied(policies, old, old) == []
    for empty in ({}, {"reservedFor": [], "devices": []}):
        assert denied(policies, old, {**old, "status": empty}) == []
    only_own = stored(*drivers, finalizers=(OWN,))
    assert denied(policies, only_own, {"status": only_own["status"]}, resource="resourceclaims") == []


@pytest.mark.parametrize(
    ("metadata", "status", "reason"),
    [
        ({"ownerReferences": [OWNER]}, STATUS, "owners"),
        ({"labels": {"a": "b"}}, STATUS, "labels"),
        ({"annotations": {"a": "b"}}, STATUS, "annotations"),
        ({"finalizers": [KEPT, OWN, "example.com/added"]}, STATUS, "add no finalizer"),
        ({"finalizers": [OWN]}, STATUS, "begin with dra.accelerators/"),
        ({}, STATUS, "begin with dra.accelerators/"),
        ({"finalizers": []}, {}, "begin with dra.accelerators/"),
        ({"finalizers": [KEPT, OWN]}, status(NVIDIA, OTHER), "change the status otherwise"),
        (
            {"finalizers": [KEPT, OWN]},
            {**STATUS, "reservedFor": [*RESERVED, {"resource": "pods", "name": "other", "uid": "3"}]},
            "change the status otherwise",
        ),
        ({"finalizers": [KEPT, OWN]}, {**STATUS, "reservedFor": []}, "change the status otherwise"),
        ({"finalizers": [KEPT, OWN]}, {**STATUS, "devices": []}, "change the status otherwise"),
        ({"finalizers": [KEPT, OWN]}, {"reservedFor": RESERVED}, "change the status otherwise"),
        ({"finalizers": [KEPT, OWN]}, {"devices": STATUS["devices"]}, "change the status otherwise"),
    ],
)
def test_other_patches_of_controller_are_denied(
    policies: Objects, metadata: dict[str, Any], status: dict[str, Any], reason: str
) -> None:
    old, new = stored(NVIDIA), {"metadata": metadata, "status": status}
    assert any(reason in text for text in denied(policies, old, new))
    assert denied(policies, old, new, user="system:kube-scheduler") == []


@pytest.mark.parametrize("drivers", [(OTHER,), ()])
def test_controller_change_of_claim_without_own_device_is_denied(policies: Objects, drivers: tuple[str, ...]) -> None:
    reason = "have a device of the drivers"
    for old in (stored(*drivers), {**stored(), "status": {}}):
        released = {**old, "metadata": {"finalizers": [KEPT]}}
        assert any(reason in text for text in denied(policies, old, released, resource="resourceclaims"))
    deallocated = {**stored(*drivers), "status": {}}
    assert any(reason in text for text in denied(policies, stored(*drivers), deallocated))


SELECTORS: list[tuple[dict[str, Any], bool]] = [
    (selector(), True),
    (selector(matchExpressions=[]), True),
    (selector(matchFields=[{"key": "metadata.name", "operator": "In", "values": ["n2"]}]), False),
    (selector(matchFields=[{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]), False),
    (selector(matchFields=[{"key": "metadata.other", "operator": "In", "values": ["n1"]}]), False),
    (selector(matchFields=[{"key": "metadata.name", "operator": "Exists"}]), False),
    (selector(matchFields=[{"key": "metadata.name", "operator": "In", "values": ["n1", "n2"]}]), False),
    (selector(matchExpressions=[{"key": "zone", "operator": "In", "values": ["a"]}]), False),
    ({"nodeSelectorTerms": [{"matchExpressions": [{"key": "n1", "operator": "Exists"}]}]}, False),
    ({"nodeSelectorTerms": selector()["nodeSelectorTerms"] * 2}, False),
    ({"nodeSelectorTerms": []}, False),
]


@pytest.mark.parametrize(("nodes", "allowed"), SELECTORS)
def test_node_driver_writes_status_of_claims_of_own_node_only(
    policies: Objects, nodes: dict[str, Any], allowed: bool
) -> None:
    old = {"status": {**STATUS, "allocation": {**STATUS["allocation"], "nodeSelector": nodes}}}
    new = {"status": {**old["status"], "devices": []}}
    found = denied(policies, old, new, user=DRIVER)
    assert (found == []) if allowed else any("allocated on its own node only" in text for text in found)
