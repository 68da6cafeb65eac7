# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test which tokens and Secrets a stolen identity could get: server-side dry runs with the kubeconfig of that
identity.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.cluster import Cluster

#: Runs kubectl as the identity with a document on its standard input; returns its output.
As = Callable[..., str]


def token_of(cluster: Cluster, node: str, path: str = "/etc/dra-accelerators/kubeconfig") -> str:
    """Return the token in a kubeconfig of a node."""
    return str(json.loads(cluster.run(node, "cat", path))["users"][0]["user"]["token"])


def identity(cluster: Cluster, node: str, path: str, folder: Path) -> As:
    """Return a function that runs kubectl with a kubeconfig of a node."""
    return with_kubeconfig(cluster, cluster.run(node, "cat", path), folder)


def pod_token(cluster: Cluster, namespace: str, name: str, container: str) -> str:
    """Return the token of the service account that a pod's container has."""
    program = "print(open('/var/run/secrets/kubernetes.io/serviceaccount/token').read())"
    return cluster.kubectl("exec", name, "-n", namespace, "-c", container, "--", "python3", "-c", program).strip()


def with_token(cluster: Cluster, token: str, folder: Path) -> As:
    """Return a function that runs kubectl with a token, for example that of a pod."""
    config = yaml.safe_load(Path(cluster.world("kubeconfig").strip()).read_text(encoding="utf-8"))
    for user in config["users"]:
        user["user"] = {"token": token}
    return with_kubeconfig(cluster, yaml.safe_dump(config), folder)


def with_kubeconfig(cluster: Cluster, text: str, folder: Path) -> As:
    """Return a function that runs kubectl with a kubeconfig of this text."""
    kubeconfig = folder / "stolen"
    kubeconfig.touch(mode=0o600)
    kubeconfig.write_text(text, encoding="utf-8")

    def call(*arguments: str, document: dict[str, Any]) -> str:
        text = json.dumps(document)
        return cluster.kubectl("--kubeconfig", kubeconfig, *arguments, text=text, check=False, merge=True)

    return call


def request_token(call: As, namespace: str, account: str, node: str | None, **spec: Any) -> str:
    """Request a token as a dry run; return the answer. The API server issues tokens in dry runs too."""
    if node:
        spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Node", "name": node}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token?dryRun=All"
    document = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    return call("create", "--raw", path, "-f", "-", document=document)


def check_limits(call: As, namespace: str, account: str, node: str, other: str) -> None:
    """Assert that an identity gets only tokens for its node, lifetime, and audience."""
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
