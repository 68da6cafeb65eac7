# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that a node's driver can write only that node's slices, and has no unused permission."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER, DRIVER_UNIT, Cluster
from tests.cluster.token_requests import check_limits, identity

KUBECONFIG = "/etc/dra-accelerators/kubeconfig"


@pytest.fixture()
def as_driver(cluster: Cluster, tmp_path: Path) -> Callable[..., str]:
    """Return a function that calls kubectl with the kubeconfig of a node's driver and returns the whole output."""

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


def test_driver_can_write_the_slice_of_its_node(cluster: Cluster, as_driver: Callable[..., str]) -> None:
    first = cluster.nodes()[0]
    answer = as_driver(first, "create", "--dry-run=server", "-f", "-", document=slice_document("own", node=first))
    assert "created" in answer, answer


@pytest.mark.parametrize("kind", ["another node", "every node", "another driver", "another pool"])
def test_driver_cannot_create_a_foreign_slice(cluster: Cluster, as_driver: Callable[..., str], kind: str) -> None:
    first, second = cluster.nodes()
    document = {
        "another node": slice_document("foreign", node=second),
        "every node": slice_document("foreign", node=None),
        "another driver": slice_document("foreign", node=first, driver="other.example.com"),
        "another pool": slice_document("foreign", node=first, pool="another-pool"),
    }[kind]
    answer = as_driver(first, "create", "-f", "-", document=document)
    assert "ValidatingAdmissionPolicy" in answer and "denied" in answer, answer


def test_driver_cannot_delete_a_slice_of_another_node(cluster: Cluster, as_driver: Callable[..., str]) -> None:
    first, second = cluster.nodes()
    victim = cluster.slices(second)[0]["metadata"]["name"]
    answer = as_driver(first, "delete", "resourceslice", victim)
    assert "denied" in answer, answer
    assert victim in {item["metadata"]["name"] for item in cluster.slices(second)}


@pytest.mark.parametrize("kind", ["the own node", "every node", "another driver"])
def test_driver_can_delete_a_slice_of_another_pool_of_its_node_and_driver(
    cluster: Cluster, as_driver: Callable[..., str], kind: str
) -> None:
    first = cluster.nodes()[0]
    document = {
        "the own node": slice_document("former", node=first, pool="former-pool"),
        "every node": slice_document("former", node=None, pool="former-pool"),
        "another driver": slice_document("former", node=first, pool="former-pool", driver="other.example.com"),
    }[kind]
    cluster.kubectl("create", "-f", "-", text=json.dumps(document))
    try:
        # The driver deletes the first slice too: either of the two is first, and both succeed.
        answer = as_driver(first, "delete", "resourceslice", "former", "--ignore-not-found")
        left = [item["metadata"]["name"] for item in cluster.slices() if item["metadata"]["name"] == "former"]
        if kind == "the own node":
            assert "denied" not in answer and left == [], answer
        else:
            assert "ValidatingAdmissionPolicy" in answer and "denied" in answer, answer
    finally:
        cluster.kubectl("delete", "resourceslice", "former", "--ignore-not-found")


def test_driver_cannot_update_a_slice_of_another_node(cluster: Cluster, as_driver: Callable[..., str]) -> None:
    """The API makes node and driver of a slice immutable. The policy protects its other contents."""
    first, second = cluster.nodes()
    victim = cluster.slices(second)[0]
    document = json.loads(json.dumps(victim))
    document["metadata"].setdefault("annotations", {})["example.com/stolen"] = "yes"
    answer = as_driver(first, "replace", "-f", "-", document=document)
    assert "ValidatingAdmissionPolicy" in answer and "denied" in answer, answer
    (now,) = (each for each in cluster.slices() if each["metadata"]["uid"] == victim["metadata"]["uid"])
    assert now["metadata"]["resourceVersion"] == victim["metadata"]["resourceVersion"]


def test_driver_can_replace_its_slice_without_changes(cluster: Cluster, as_driver: Callable[..., str]) -> None:
    first = cluster.nodes()[0]
    answer = as_driver(first, "replace", "--dry-run=server", "-f", "-", document=cluster.slices(first)[0])
    assert "replaced" in answer, answer


def account(cluster: Cluster, node: str) -> tuple[str, str]:
    """Return namespace and name of the service account of a node's driver."""
    found = [
        (item["metadata"]["namespace"], item["metadata"]["name"])
        for item in cluster.get("serviceaccounts", "-A", "-l", "app.kubernetes.io/component=node-driver")["items"]
        if item["metadata"]["name"].endswith(node)
    ]
    (only,) = found
    return only


def test_driver_can_request_only_a_token_bound_to_its_node(cluster: Cluster, as_driver: Callable[..., str]) -> None:
    first, second = cluster.nodes()
    namespace, own = account(cluster, first)
    _namespace, other = account(cluster, second)

    def ask(name: str, *binding: str) -> str:
        return as_driver(first, "create", "token", name, "-n", namespace, "--duration=10m", *binding)

    assert ask(own, "--bound-object-kind=Node", f"--bound-object-name={first}").count(".") == 2, (
        "a token has three parts"
    )
    for binding in ((), ("--bound-object-kind=Node", f"--bound-object-name={second}")):
        answer = ask(own, *binding)
        assert "ValidatingAdmissionPolicy" in answer and "bound to its own node only" in answer, answer
    answer = ask(other, "--bound-object-kind=Node", f"--bound-object-name={second}")
    assert "is forbidden" in answer and "cannot create resource" in answer, answer


def test_driver_token_request_beyond_limits_is_denied(cluster: Cluster, tmp_path: Path) -> None:
    """Binding, lifetime, and audience of a token that a stolen identity requests."""
    first, second = cluster.nodes()
    namespace, own = account(cluster, first)
    check_limits(identity(cluster, first, KUBECONFIG, tmp_path), namespace, own, first, second)


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
def test_driver_lacks_unused_rights(cluster: Cluster, as_driver: Callable[..., str], verb: str, resource: str) -> None:
    answer = as_driver(cluster.nodes()[0], "auth", "can-i", verb, resource, "--all-namespaces")
    assert answer.strip().splitlines()[-1] == "no", answer


def test_kubeconfig_is_readable_by_root_only(cluster: Cluster) -> None:
    assert cluster.run(cluster.nodes()[0], "stat", "-c", "%a %U", KUBECONFIG).strip() == "600 root"


RENEW = (
    "/opt/dra-accelerators/venv/bin/python -IB /opt/dra-accelerators/current/dra_driver/run.py dra_driver.renew_token "
    f"--kubeconfig {KUBECONFIG} --lifetime 2592000 --renew-below 1"
)
API_SERVER = "/etc/systemd/system/kube-apiserver.service"


def claims_of(cluster: Cluster, node: str) -> dict[str, Any]:
    """Return the claims in the token of a node's kubeconfig."""
    token = json.loads(cluster.run(node, "cat", KUBECONFIG))["users"][0]["user"]["token"]
    part = token.split(".")[1]
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return claims


@pytest.fixture()
def short_tokens(cluster: Cluster) -> Iterator[int]:
    """Run an API server that limits tokens to 1 h; yield the limit in seconds."""
    restart = "systemctl daemon-reload && systemctl restart kube-apiserver"

    def answers() -> bool:
        return cluster.kubectl("get", "--raw=/readyz", check=False).strip() == "ok"

    option = "--service-account-max-token-expiration=1h"
    change = f"sed -i 's#/usr/local/bin/kube-apiserver#& {option}#' {API_SERVER}"
    cluster.shell("control", f"cp {API_SERVER} /root/api-server.unit && {change} && {restart}")
    cluster.wait("the API server answers", answers, timeout=180)
    yield 3600
    cluster.shell("control", f"cp /root/api-server.unit {API_SERVER} && {restart}")
    cluster.wait("the API server answers", answers, timeout=180)


@pytest.mark.prove
def test_shorter_token_lifetime_is_accepted_and_logged(cluster: Cluster, short_tokens: int) -> None:
    node = cluster.nodes()[0]
    said = cluster.shell(node, f"{RENEW} 2>&1")
    assert f"for {short_tokens} seconds, but 2592000 seconds were requested" in said
    claims = claims_of(cluster, node)
    assert claims["exp"] - claims["iat"] == short_tokens
    cluster.wait(
        "the driver reads the kubeconfig again",
        lambda: cluster.said(node, "the kubeconfig has changed and was read again"),
    )


@pytest.mark.prove
def test_driver_renews_its_token(cluster: Cluster) -> None:
    """The driver, confined by its unit, renews a token with the minimum lifetime of 10 min in the last third of its
    life.
    """
    node = cluster.nodes()[0]
    old = claims_of(cluster, node)
    bound = ("--bound-object-kind=Node", f"--bound-object-name={node}", "--duration=600s")
    token = cluster.kubectl("create", "token", f"driver-{node}", "-n", "dra-accelerators", *bound).strip()
    document = json.loads(cluster.run(node, "cat", KUBECONFIG))
    document["users"][0]["user"]["token"] = token
    cluster.shell(node, f"cat > {KUBECONFIG} <<'END'\n{json.dumps(document)}\nEND")
    cluster.wait(
        "the driver has renewed it when two thirds of ten minutes are over",
        lambda: claims_of(cluster, node)["exp"] - claims_of(cluster, node)["iat"] > 600,
        timeout=600,
        interval=5,
    )
    new = claims_of(cluster, node)
    assert new["exp"] - new["iat"] == 2592000
    assert new["sub"] == old["sub"]


def test_kubelet_credentials_cannot_request_the_token_of_the_driver(cluster: Cluster, tmp_path: Path) -> None:
    """A node that was deleted and joined again needs the operator, because no identity on the node can request the
    token.
    """
    node = cluster.nodes()[0]
    kubeconfig = tmp_path / "kubelet.conf"
    kubeconfig.touch(mode=0o600)
    kubeconfig.write_text(cluster.run(node, "cat", "/etc/kubernetes/kubelet.conf"), encoding="utf-8")
    wanted = ("create", "token", f"driver-{node}", "-n", "dra-accelerators")
    bound = ("--bound-object-kind=Node", f"--bound-object-name={node}")
    answer = cluster.kubectl("--kubeconfig", kubeconfig, *wanted, *bound, check=False, merge=True)
    assert "forbidden" in answer.lower(), answer


@pytest.mark.prove
def test_error_of_a_rejoined_node_contains_the_command(cluster: Cluster, as_driver: Callable[..., str]) -> None:
    """No identity on the node can get a new driver token. The driver's log and its status report this in one line."""
    node = cluster.nodes()[1]
    cluster.kubectl("delete", "node", node)
    cluster.shell(node, "systemctl restart kubelet")
    cluster.wait("the node has joined again", lambda: node in cluster.nodes())
    command = f"ansible-playbook dra.accelerators.site --limit {node}"
    # The API server caches a valid token for some seconds. A driver that has just published sends its next request
    # minutes later.
    cluster.wait(
        "the token is good no more", lambda: "unauthorized" in as_driver(node, "get", "--raw", "/version").lower()
    )
    cluster.run(node, "systemctl", "restart", DRIVER_UNIT)
    cluster.wait("the log contains the command", lambda: cluster.said(node, "Node object", "deleted", command))
    status = cluster.status(node)
    assert not status["ready"] and any(command in problem for problem in status["problems"])
    recap = cluster.playbook("site.yml", "--limit", node)
    assert not recap.failed, recap.output
    cluster.wait("the devices are published again", lambda: len(cluster.devices(node)) == 8 * 26, timeout=120)
    cluster.wait("the driver is healthy again", lambda: cluster.status(node)["ready"], timeout=60)
