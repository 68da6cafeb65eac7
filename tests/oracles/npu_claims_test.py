# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that a real API server accepts the claims for near NPUs and the pods of a super-pod job: alternatives,
constraints, CEL.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from dra_driver.core.domains import Member, Span
from dra_driver.core.vendors.ascend import preference, super_pod

DRY = "?dryRun=All&fieldValidation=Strict"
CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims{DRY}"
PODS = f"/api/v1/namespaces/default/pods{DRY}"


class Server:
    """Client that posts objects as a dry run."""

    def __init__(self, kubeconfig: Path) -> None:
        document = json.loads(kubeconfig.read_text())
        self._url = document["clusters"][0]["cluster"]["server"]
        self._token = document["users"][0]["user"]["token"]
        self._context = ssl.create_default_context(cafile=document["clusters"][0]["cluster"]["certificate-authority"])

    def refusal(self, path: str, body: dict[str, Any]) -> str:
        """Return the server's reason to reject an object; empty if it accepts it."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._context):
                return ""
        except urllib.error.HTTPError as error:
            return str(json.loads(error.read())["message"])


@pytest.fixture(scope="module")
def server(administrator: Path) -> Server:
    return Server(administrator)


def claim(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "near", "namespace": "default"},
        "spec": spec,
    }


def test_invalid_claim_is_rejected(server: Server) -> None:
    spec = preference.claim_spec(2, "npu.huawei.com", selectors=["device.attributes['npu.huawei.com'].ringFree <"])
    assert "Syntax error" in server.refusal(CLAIMS, claim(spec))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("chips", [1, 2, 3, 4, 8, 16, 32])
def test_claims_for_near_npus_are_accepted(server: Server, chips: int, whole: bool) -> None:
    for prefer in (preference.NEAREST_FIRST, (preference.RING, preference.ANY), (preference.RING,), (preference.ANY,)):
        spec = preference.claim_spec(chips, "npu.huawei.com", prefer=prefer, whole=whole)
        assert server.refusal(CLAIMS, claim(spec)) == "", prefer


def test_pods_of_a_job_are_accepted(server: Server) -> None:
    span = Span(7, (Member("a", 7, 16, 3), Member("b", 7, 16, 4)), 16)
    assert server.refusal(CLAIMS, claim(super_pod.claim_spec(span))) == ""
    spec = {
        "affinity": {"nodeAffinity": super_pod.node_affinity(span)},
        "containers": [{"name": "npu", "image": "i"}],
        "automountServiceAccountToken": False,
    }
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "rank", "namespace": "default"}, "spec": spec}
    said = server.refusal(PODS, body)
    # The namespace can lack a service account here. An error of the pod itself would be reported first.
    assert said == "" or "serviceaccount" in said, said
