# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The nodes on which a pod can be scheduled."""

from __future__ import annotations

import pytest
from allocation_model import NODE, TAINT, Json
from dra_driver.core.allocation.nodes import selects, tolerates, why_not_asked


@pytest.mark.parametrize(
    ("spec", "node", "words"),
    [
        ({"nodeName": "m"}, {}, "the pod is for node m"),
        ({}, {"unschedulable": True}, "the node is cordoned"),
        (
            {"tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]},
            {"unschedulable": True},
            "",
        ),
        ({}, {"taints": [TAINT]}, "does not tolerate the node's taint worn=yes:NoSchedule"),
        ({}, {"taints": [{**TAINT, "effect": "PreferNoSchedule"}]}, ""),
        ({"nodeSelector": {"zone": "b"}}, {}, "the pod's nodeSelector wants zone=b"),
        ({"nodeSelector": {"zone": "a"}}, {}, ""),
    ],
)
def test_candidate_nodes_exclude_unschedulable_ones(spec: Json, node: Json, words: str) -> None:
    found = why_not_asked({"spec": spec}, {**NODE, "spec": node})
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize(
    ("requirement", "holds_good"),
    [
        ({"key": "zone", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "other", "operator": "NotIn", "values": ["a"]}, True),
        ({"key": "zone", "operator": "Exists"}, True),
        ({"key": "zone", "operator": "DoesNotExist"}, False),
        ({"key": "size", "operator": "Gt", "values": ["4"]}, True),
        ({"key": "size", "operator": "Lt", "values": ["4"]}, False),
        ({"key": "zone", "operator": "Gt", "values": ["4"]}, False),
    ],
)
def test_node_selector_terms_match(requirement: Json, holds_good: bool) -> None:
    node = {"metadata": {"name": "n", "labels": {"zone": "a", "size": "8"}}}
    selector = {"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}
    assert selects(selector, node) == holds_good
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}
    assert bool(why_not_asked({"spec": {"affinity": affinity}}, node)) != holds_good
    assert not selects({"nodeSelectorTerms": [{}]}, node)


@pytest.mark.parametrize(
    ("toleration", "does"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "worn", "operator": "Exists"}, True),
        ({"key": "worn", "value": "yes"}, True),
        ({"key": "worn", "value": "no"}, False),
        ({"key": "hot", "operator": "Exists"}, False),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "worn", "operator": "Other"}, False),
    ],
)
def test_tolerations_match_taints(toleration: Json, does: bool) -> None:
    assert tolerates(toleration, TAINT) == does
