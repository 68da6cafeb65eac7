# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens and Secrets that a stolen identity could get: server-side dry runs with the kubeconfig of that identity."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.cluster.cluster import Cluster

#: Runs kubectl as the identity, with a document on its standard input; returns its output.
As = Callable[..., str]


def identity(cluster: Cluster, node: str, path: str, folder: Any) -> As:
    """Return a function that runs kubectl with a kubeconfig of a node."""
    kubeconfig = folder / "stolen"
    kubeconfig.touch(mode=0o600)
    kubeconfig.write_text(cluster.run(node, "cat", path), encoding="utf-8")

    def call(*arguments: str, document: dict[str, Any]) -> str:
        text = json.dumps(document)
        return cluster.kubectl("--kubeconfig", kubeconfig, *arguments, text=text, check=False, merge=True)

    return call


def request_token(call: As, namespace: str, account: str, node: str | None, **spec: Any) -> str:
    """Request a token as a dry run; return the answer. The API server issues tokens in dry runs as well."""
    if node:
        spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Node", "name": node}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token?dryRun=All"
    document = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    return call("create", "--raw", path, "-f", "-", document=document)


def check_limits(call: As, namespace: str, account: str, node: str, other: str) -> None:
    """Check that an identity gets tokens of its own node, lifetime, and audience only."""
    answer = request_token(call, namespace, account, node, expirationSeconds=2592000)
    assert json.loads(answer)["status"]["token"].count(".") == 2, answer
    refused = {
        "bound to": [(None, {}), (other, {})],
        "2592000 s at most": [(node, {"expirationSeconds": 315360000})],
        "for the API server only": [(node, {"audiences": ["sts.example.com"]})],
    }
    for reason, requests in refused.items():
        for bound, spec in requests:
            answer = request_token(call, namespace, account, bound, **spec)
            assert "ValidatingAdmissionPolicy" in answer and reason in answer, answer
