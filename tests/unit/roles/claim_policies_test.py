# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The policy that limits which fields of claims the controller can patch."""

from __future__ import annotations

from typing import Any

import pytest
from policies import denials, matches
from token_policies_test import CONTROLLER, written

OWN = "dra.accelerators/own"
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "1"}
RESERVED = [{"resource": "pods", "name": "pod", "uid": "2"}]
STATUS = {"allocation": {"devices": {"results": []}}, "reservedFor": RESERVED}
STORED = {"metadata": {"name": "claim", "finalizers": [OWN]}, "status": STATUS}
Objects = list[dict[str, Any]]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """The policies that the controller's role writes."""
    read = {"read": {"__dra_controller_token_defaults": {"audiences": ["api"]}}}
    objects = written(tmp_path_factory.mktemp("controller"), "dra_controller", "__dra_controller_objects", read)["read"]
    return [each for each in objects if each["kind"] == "ValidatingAdmissionPolicy"]


def denied(policies: Objects, metadata: dict[str, Any], status: dict[str, Any], user: str = CONTROLLER) -> list[str]:
    """Return the reasons for which a patch of the stored claim is denied."""
    changed = {"metadata": {"name": "claim", **metadata}, "status": status}
    asking = [
        each
        for each in policies
        if all(matches(each, "resource.k8s.io", one, "UPDATE") for one in ("resourceclaims", "resourceclaims/status"))
    ]
    request = {"userInfo": {"username": user}}
    return [text for each in asking for text in denials(each, request=request, object=changed, oldObject=STORED)]


def test_cleanup_patches_of_controller_are_allowed(policies: Objects) -> None:
    assert denied(policies, {"finalizers": []}, STATUS) == []
    assert denied(policies, {}, STATUS) == []
    assert denied(policies, {"finalizers": [OWN]}, {}) == []


@pytest.mark.parametrize(
    ("metadata", "status", "reason"),
    [
        ({"ownerReferences": [OWNER]}, STATUS, "owners"),
        ({"labels": {"a": "b"}}, STATUS, "labels"),
        ({"annotations": {"a": "b"}}, STATUS, "annotations"),
        ({"finalizers": [OWN, "example.com/kept"]}, STATUS, "finalizer"),
        ({}, {**STATUS, "allocation": {"devices": {"results": [{"device": "gpu-9"}]}}}, "allocation"),
        ({}, {**STATUS, "reservedFor": [*RESERVED, {"resource": "pods", "name": "other", "uid": "3"}]}, "reserve"),
    ],
)
def test_other_patches_of_controller_are_denied(
    policies: Objects, metadata: dict[str, Any], status: dict[str, Any], reason: str
) -> None:
    assert any(reason in text for text in denied(policies, metadata, status))
    assert denied(policies, metadata, status, user="system:kube-scheduler") == []
