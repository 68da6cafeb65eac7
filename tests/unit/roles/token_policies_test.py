# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The policies that limit token requests and Secrets of the driver and the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play
from policies import denials, matches

ROLES = Path(__file__).resolve().parents[3] / "roles"
SERVER = "https://kubernetes.default.svc.cluster.local"
NODE = "authentication.kubernetes.io/node-name"
DRIVER = "system:serviceaccount:dra-accelerators:driver-n1"
POD = "system:serviceaccount:dra-accelerators-driver:driver"
CONTROLLER = "system:serviceaccount:dra-accelerators-controller:controller"
Policies = dict[tuple[str, str], dict[str, Any]]


def written(directory: Path, role: str, expression: str, hosts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the objects that each host's run of a role writes for the cluster."""
    (directory / "templates").symlink_to(ROLES / role / "templates")
    defaults = yaml.safe_load((ROLES / role / "defaults/main.yml").read_text("utf-8"))
    tasks = [
        {"ansible.builtin.include_vars": str(ROLES / role / "vars/main.yml")},
        {"ansible.builtin.debug": {"msg": "{{ " + expression + " | to_json | b64encode }}"}},
    ]
    group = "accelerator_nodes" if role == "dra_driver" else "accelerator_controllers"
    played = play(directory, tasks, {name: {**defaults, **variables} for name, variables in hosts.items()}, group=group)
    assert set(played.messages) == set(hosts), played.output
    return played.messages


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """Return all policies of both roles, by the host that wrote them and by name."""
    answer = {"audiences": [SERVER]}
    read = {"__dra_driver_token_defaults": answer, "__dra_controller_token_defaults": answer}
    longer = {"dra_driver_token_lifetime": 5000000, "dra_driver_token_audiences": ["api", "k3s"]}
    groups: list[dict[str, dict[str, Any]]] = [{"read": read}, {"longer": longer, "beside": {}}]
    found: Policies = {}
    for role, expression in {
        "dra_driver": "__dra_driver_shared_objects",
        "dra_controller": "__dra_controller_objects",
    }.items():
        for hosts in groups:
            for host, objects in written(tmp_path_factory.mktemp(role), role, expression, hosts).items():
                bound = {each["spec"]["policyName"] for each in objects if each["kind"].endswith("PolicyBinding")}
                named = {each["metadata"]["name"]: each for each in objects if each["kind"].endswith("AdmissionPolicy")}
                assert bound == set(named), "each policy has a binding"
                found.update({(host, name): each for name, each in named.items()})
    return found


def token(node: str | None, *, seconds: int = 2592000, audiences: tuple[str, ...] = (SERVER,)) -> dict[str, Any]:
    """Return a TokenRequest with its defaults, as the API server's policies see it."""
    bound = {"boundObjectRef": {"apiVersion": "v1", "kind": "Node", "name": node}} if node else {}
    return {"spec": {"expirationSeconds": seconds, "audiences": list(audiences), **bound}}


def requested(
    policies: Policies, user: str, wanted: dict[str, Any], *, node: str = "n1", host: str = "read"
) -> list[str]:
    """Return the reasons of any policy for the denial of a token request."""
    request = {"userInfo": {"username": user, "extra": {NODE: [node]} if node else {}}}
    asking = [
        each
        for (of, _name), each in policies.items()
        if of == host and matches(each, "", "serviceaccounts/token", "CREATE")
    ]
    assert asking
    return [text for each in asking for text in denials(each, request=request, object=wanted)]


@pytest.mark.parametrize("user", [DRIVER, CONTROLLER])
def test_token_request_bound_to_own_node_is_allowed(policies: Policies, user: str) -> None:
    assert requested(policies, user, token("n1")) == []
    assert requested(policies, user, token("n1", seconds=600)) == []


@pytest.mark.parametrize("user", [DRIVER, POD, CONTROLLER])
@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (token(None), "bound"),
        (token("n2"), "bound"),
        (token("n1", seconds=2592001), "2592000 s at most"),
        (token("n1", seconds=315360000), "315360000 s"),
        (token("n1", audiences=("sts.example.com",)), "audiences"),
        (token("n1", audiences=(SERVER, "vault")), "audiences"),
    ],
)
def test_token_request_beyond_limits_is_denied(
    policies: Policies, user: str, wanted: dict[str, Any], reason: str
) -> None:
    assert any(reason in text for text in requested(policies, user, wanted))


def test_unbound_controller_token_cannot_be_renewed(policies: Policies) -> None:
    (text,) = requested(policies, CONTROLLER, token("n1"), node="")
    assert "bound to no node" in text


def test_pod_account_cannot_request_tokens(policies: Policies) -> None:
    assert requested(policies, POD, token("n1")) != []


def test_other_accounts_are_not_limited(policies: Policies) -> None:
    assert requested(policies, "system:node:n1", token(None, seconds=315360000, audiences=("vault",))) == []


def test_limits_follow_options(policies: Policies) -> None:
    """One policy is for all nodes: the longest lifetime of the group applies."""
    longest = token("n1", seconds=5000000, audiences=("api", "k3s"))
    assert requested(policies, DRIVER, longest, host="longer") == []
    assert requested(policies, DRIVER, token("n1"), host="longer") != []
    of_longer, of_beside = (policies[host, "dra-accelerators-driver-tokens"]["spec"] for host in ("longer", "beside"))
    assert of_longer["validations"][1] == of_beside["validations"][1]


def secret(kind: str, name: str = "dra-accelerators-controller-authority") -> dict[str, Any]:
    return {"metadata": {"name": name}, "type": kind}


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (secret("Opaque"), ""),
        (secret("kubernetes.io/tls"), ""),
        (secret("kubernetes.io/service-account-token"), "has type kubernetes.io/service-account-token"),
        (secret("bootstrap.kubernetes.io/token"), "types Opaque"),
        (secret("kubernetes.io/dockerconfigjson"), "types Opaque"),
        (secret("Opaque", "registry"), "names that begin"),
    ],
)
def test_controller_secret_types_are_limited(
    policies: Policies, wanted: dict[str, Any], reason: str, operation: str
) -> None:
    asking = [
        each for (host, _name), each in policies.items() if host == "read" and matches(each, "", "secrets", operation)
    ]
    request = {"userInfo": {"username": CONTROLLER, "extra": {}}}
    found = [text for each in asking for text in denials(each, request=request, object=wanted)]
    assert asking and bool(found) == bool(reason) and all(reason in text for text in found)
    request = {"userInfo": {"username": "somebody", "extra": {}}}
    assert not any(denials(each, request=request, object=wanted) for each in asking)
