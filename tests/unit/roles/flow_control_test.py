# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The FlowSchemas and priority levels that the roles write for the requests of the drivers and of the controller."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.cluster_facts import KINDS
from token_policies_test import written

Objects = list[dict[str, Any]]
DRIVER, POD, CONTROLLER = (
    ("driver-n1", "dra-accelerators"),
    ("driver", "dra-accelerators-driver"),
    ("controller", "dra-accelerators-controller"),
)
EXPRESSIONS = {"dra_driver": "__dra_driver_shared_objects", "dra_controller": "__dra_controller_objects"}
SERVICE_ACCOUNTS_PRECEDENCE = 9000


def objects_of(tmp_path_factory: pytest.TempPathFactory, **variables: Any) -> Objects:
    answer = {"audiences": ["api"]}
    read = {"read": {"__dra_driver_token_defaults": answer, "__dra_controller_token_defaults": answer, **variables}}
    objects = [
        each
        for role, expression in EXPRESSIONS.items()
        for each in written(tmp_path_factory.mktemp(role), role, expression, read)["read"]
    ]
    return [each for each in objects if each["apiVersion"].startswith("flowcontrol.")]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return objects_of(tmp_path_factory)


def schemas(objects: Objects) -> Objects:
    found = [each for each in objects if each["kind"] == "FlowSchema"]
    return sorted(found, key=lambda each: int(each["spec"]["matchingPrecedence"]))


def level(objects: Objects, account: tuple[str, str], verb: str, group: str, resource: str, namespace: str = "") -> str:
    """Return the priority level of a request, or "" if no FlowSchema of the roles matches it."""

    def matches(rule: dict[str, Any]) -> bool:
        subjects = [each["serviceAccount"] for each in rule["subjects"]]
        return any(each["name"] in ("*", account[0]) and each["namespace"] == account[1] for each in subjects) and any(
            {group, "*"} & set(each["apiGroups"])
            and {resource, "*"} & set(each["resources"])
            and {verb, "*"} & set(each["verbs"])
            and ({namespace, "*"} & set(each["namespaces"]) if namespace else each.get("clusterScope"))
            for each in rule["resourceRules"]
        )

    for schema in schemas(objects):
        if any(matches(rule) for rule in schema["spec"]["rules"]):
            return str(schema["spec"]["priorityLevelConfiguration"]["name"])
    return ""


@pytest.mark.parametrize("account", [DRIVER, POD])
def test_flow_schemas_rank_reads_of_claims_before_lists(objects: Objects, account: tuple[str, str]) -> None:
    claims, rest = "dra-accelerators-driver-claims", "dra-accelerators-driver"
    group = "resource.k8s.io"
    assert level(objects, account, "get", group, "resourceclaims", "ns") == claims
    assert level(objects, account, "get", "", "pods", "ns") == claims
    assert level(objects, account, "list", group, "resourceclaims") == rest
    assert level(objects, account, "list", group, "resourceslices") == rest
    assert level(objects, account, "create", "", "events", "ns") == rest


def test_flow_schemas_rank_the_lease_of_the_controller_only(objects: Objects) -> None:
    lease = ("coordination.k8s.io", "leases")
    assert level(objects, CONTROLLER, "update", *lease, CONTROLLER[1]) == "leader-election"
    assert level(objects, CONTROLLER, "update", *lease, "kube-system") == ""
    assert level(objects, CONTROLLER, "list", "resource.k8s.io", "resourceclaims") == ""


def test_flow_schemas_match_no_other_account(objects: Objects) -> None:
    for account in (("driver", "default"), ("other", POD[1]), ("other", CONTROLLER[1])):
        assert level(objects, account, "get", "resource.k8s.io", "resourceclaims", "ns") == ""
    for schema in schemas(objects):
        assert all(each["kind"] == "ServiceAccount" for rule in schema["spec"]["rules"] for each in rule["subjects"])


def test_flow_schemas_have_distinct_precedences_and_own_levels(objects: Objects) -> None:
    precedences = [each["spec"]["matchingPrecedence"] for each in schemas(objects)]
    assert len(set(precedences)) == len(precedences) and max(precedences) < SERVICE_ACCOUNTS_PRECEDENCE
    levels = {each["metadata"]["name"]: each["spec"] for each in objects if "Priority" in each["kind"]}
    named = {each["spec"]["priorityLevelConfiguration"]["name"] for each in schemas(objects)}
    # Kubernetes has these two levels.
    assert named == {*levels, "leader-election", "workload-high"}
    for spec in levels.values():
        queuing = spec["limited"]["limitResponse"]["queuing"]
        assert queuing["handSize"] * queuing["queueLengthLimit"] >= 5000, "all nodes can be one user"


def test_flow_control_off_writes_no_flow_schema(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not objects_of(tmp_path_factory, dra_driver_flow_control=False, dra_controller_flow_control=False)


def test_removal_knows_each_kind_and_deletes_schemas_before_levels(objects: Objects) -> None:
    kinds = [(version, kind) for version, kind, _path in KINDS]
    assert {(each["apiVersion"], each["kind"]) for each in objects} <= set(kinds)
    version = "flowcontrol.apiserver.k8s.io/v1"
    assert kinds.index((version, "FlowSchema")) < kinds.index((version, "PriorityLevelConfiguration"))
    for each in objects:
        assert each["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "dra-accelerators"
