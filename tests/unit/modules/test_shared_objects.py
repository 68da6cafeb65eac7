# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Objects that all nodes share serve each of them: hosts of the inventory, nodes of other runs, and nodes of an earlier release."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.filter.cluster_leaders import cluster_leaders
from ansible_collections.dra.accelerators.plugins.filter.cluster_union import cluster_union
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.shared_objects import (
    EARLIER_POD_ROLE,
    FIELDS,
    FLOW_SCHEMA,
    POD_ROLE,
    ROLE,
    TOKEN_POLICY,
    needs_of_objects,
    others_needs,
    parse_record,
    policy_namespaces,
)

NONE = dict.fromkeys(("metrics_authorization", "pod_lists_claims", "prepared_before_binding", "flow_control"), False)
NVIDIA = {**NONE, "names": ["gpu.nvidia.com"], "read_pods": True, "token_lifetime": 3600, "token_audiences": ["api"]}
ASCEND = {**NONE, "names": ["npu.huawei.com"], "read_pods": False, "token_lifetime": 7200, "token_audiences": ["k3s"]}
BOTH = {
    **NONE,
    "names": ["gpu.nvidia.com", "npu.huawei.com"],
    "read_pods": True,
    "token_lifetime": 7200,
    "token_audiences": ["api", "k3s"],
}
OBJECTS: dict[str, Any] = {
    ROLE: {
        "rules": [
            {"resources": ["resourceslices"]},
            {"resources": ["resourceclaims/driver"], "resourceNames": ["dra.example.com"]},
            {"resources": ["tokenreviews"]},
        ]
    },
    POD_ROLE: {"rules": [{"resources": ["nodes"]}, {"resources": ["resourceclaims"]}]},
    TOKEN_POLICY: {
        "spec": {
            "validations": [
                {"expression": "object.spec.expirationSeconds <= 9000"},
                {"expression": "object.spec.audiences.all(each, each in ['api', 'x'])"},
            ]
        }
    },
    FLOW_SCHEMA: {"spec": {}},
}


def test_needs_of_other_nodes_are_merged() -> None:
    records = {"a": json.dumps(NVIDIA), "b": json.dumps(ASCEND), "own": json.dumps({"names": ["former"]})}
    assert others_needs(["own"], records, ["a", "b", "own"], OBJECTS) == BOTH
    assert others_needs(["own"], records, ["own"], {}) == BOTH, "a record counts before the node has an account"


def test_node_without_record_keeps_permissions_of_objects() -> None:
    found = others_needs(["own"], {"a": json.dumps(NVIDIA)}, ["a", "earlier", "own"], OBJECTS)
    assert found["names"] == ["dra.example.com", "gpu.nvidia.com"]
    assert found["read_pods"] and found["metrics_authorization"] and found["pod_lists_claims"]
    assert found["token_lifetime"] == 9000 and found["token_audiences"] == ["api", "x"]
    assert others_needs(["own"], {}, ["own"], OBJECTS) == {}


def test_role_of_earlier_release_counts_before_first_run() -> None:
    earlier = {EARLIER_POD_ROLE: OBJECTS[POD_ROLE]}
    assert needs_of_objects(earlier) == {"pod_lists_claims": True}
    assert needs_of_objects({**earlier, POD_ROLE: {"rules": [{"resources": ["nodes"]}]}}) == {}


def test_unrecorded_need_of_earlier_release_comes_from_objects() -> None:
    record = {name: value for name, value in NVIDIA.items() if name != "flow_control"}
    found = others_needs([], {"a": json.dumps(record)}, ["a"], OBJECTS)
    assert found == {**NVIDIA, "flow_control": True}
    assert "flow_control" not in others_needs([], {"a": json.dumps(record)}, ["a"], {})
    assert set(NVIDIA) == set(FIELDS)


def test_missing_objects_need_nothing() -> None:
    assert needs_of_objects({}) == {} == needs_of_objects({ROLE: {"rules": None}, TOKEN_POLICY: {}})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"names": "gpu.nvidia.com"}', '{"read_pods": "yes"}'])
def test_invalid_record_counts_as_unknown(text: str) -> None:
    assert parse_record(text) is None
    assert others_needs([], {"a": text}, ["a"], OBJECTS)["names"] == ["dra.example.com"]


# ---- hosts of the inventory


def test_union_for_a_vendor_has_hosts_with_its_devices() -> None:
    hosts: dict[str, dict[str, Any]] = {
        "gpus": {"kinds": ["a"]},
        "gpus-by-name": {"accelerator_vendors": ["nvidia"], "kinds": ["b"]},
        "npus": {"accelerator_vendors": ["ascend"], "kinds": ["c"]},
        "classes-of-npus": {"accelerator_vendors": ["nvidia"], "device_classes_vendors": ["ascend"]},
        "unknown": {"accelerator_vendors": "{{ nowhere }}", "kinds": ["d"]},
    }
    for each in hosts.values():
        each["accelerator_kubeconfig"] = "/one"

    def of(vendor: str) -> Any:
        return cluster_union([], hosts, list(hosts), API, ["kinds"], ["default"], vendor)

    assert of("ascend") == ["c", "default"] and of("nvidia") == ["a", "b"]


API = {"kubeconfig": "/one", "context": ""}
HOSTS: dict[str, dict[str, Any]] = {
    "a": {"accelerator_kubeconfig": "/one", "vendors": ["nvidia"], "old": ["x"], "number": 5, "flag": "yes"},
    "b": {"accelerator_kubeconfig": "/one", "vendors": ["ascend"], "number": "7", "flag": False},
    "other-cluster": {"accelerator_kubeconfig": "/two", "vendors": ["z"], "number": 9, "flag": True},
    "other-context": {"accelerator_kubeconfig": "/one", "accelerator_kubeconfig_context": "x", "vendors": ["z"]},
    "without": {"accelerator_kubeconfig": "/one"},
    "hostile": {
        "accelerator_kubeconfig": "/one",
        "vendors": ["evil"],
        "ansible_facts": {"accelerator_vendors": ["evil"]},
    },
}


def union(own: Any, *names: str, default: Any = None) -> Any:
    return cluster_union(own, HOSTS, list(HOSTS), API, names, default)


def test_union_has_hosts_of_own_cluster() -> None:
    assert union(["own"], "vendors") == ["own", "nvidia", "ascend"]
    assert union([], "old", "vendors", default=["default"]) == ["x", "ascend", "default"]
    assert union(3, "number") == 7
    assert union(False, "flag") is True


def test_union_rejects_values_of_other_types() -> None:
    for own, name in (("text", "vendors"), ([], "flag"), (1, "vendors"), (False, "vendors")):
        with pytest.raises(AnsibleFilterError):
            union(own, name)


def test_leaders_are_hosts_of_the_same_step() -> None:
    hosts = {
        "a": {"api": {**API, "step": "1"}},
        "b": {"api": {**API, "step": "2"}},
        "c": {"api": {**API, "step": "2"}},
        "d": {"api": {"kubeconfig": "/two", "context": "", "step": "2"}},
        "e": {},
    }
    assert cluster_leaders(list(hosts), hosts, "api", "2") == {"b": "b", "c": "b", "d": "d"}
    assert cluster_leaders(list(hosts), hosts, "api") == {"a": "a", "b": "a", "c": "a", "d": "d"}


def test_policy_namespaces_are_read_from_conditions() -> None:
    account = "system:serviceaccount:"
    expression = f'u.startsWith("{account}one:driver-") || u == "{account}two:driver"'
    assert policy_namespaces({"spec": {"matchConditions": [{"expression": expression}]}}) == ("one", "two")
    assert policy_namespaces({}) == ("", "")
