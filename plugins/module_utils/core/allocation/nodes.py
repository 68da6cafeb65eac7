# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Which nodes a pod may go to, and which nodes reach a slice. Pure.

Facts: k8s.io/component-helpers/scheduling/corev1/nodeaffinity and the scheduler's plugins NodeName, NodeUnschedulable, TaintToleration and
NodeAffinity, which all are asked before devices are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
EXISTS, EQUAL = "Exists", "Equal"
#: Taints with these effects keep away who does not tolerate them, of nodes as of devices.
BLOCKING = ("NoSchedule", "NoExecute")
UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


def tolerates(toleration: Json, taint: Json) -> bool:
    """Whether a toleration tolerates a taint, as the scheduler sees it: for how long does not matter to it."""
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    operator = toleration.get("operator") or EQUAL
    if operator == EXISTS:
        return True
    return bool(operator == EQUAL and (toleration.get("value") or "") == (taint.get("value") or ""))


def blocking_taints(taints: Sequence[Json], tolerations: Sequence[Json]) -> list[Json]:
    """Return the taints that nobody may come past with these tolerations."""
    return [
        taint
        for taint in taints
        if taint.get("effect") in BLOCKING and not any(tolerates(each, taint) for each in tolerations)
    ]


def selects(selector: Json, node: Json) -> bool:
    """Whether a NodeSelector selects a node: one of its terms does. A term that says nothing selects nothing."""
    return any(_term_selects(term, node) for term in selector.get("nodeSelectorTerms") or ())


def reaches(node: Json, *, node_name: str, all_nodes: bool, selector: Json | None) -> bool:
    """Whether a node reaches what is published for a node's name, for all nodes, or for those that a selector selects."""
    if node_name:
        return bool(node["metadata"]["name"] == node_name)
    return all_nodes or (selector is not None and selects(selector, node))


def why_not_asked(pod: Json, node: Json) -> str:
    """Return why the scheduler does not even ask a node for devices, as far as that is known here; empty where it asks.

    Resources such as processors and memory, and what lies between pods, are not looked at.
    """
    spec, name = pod.get("spec") or {}, node["metadata"]["name"]
    if spec.get("nodeName") and spec["nodeName"] != name:
        return f"the pod is for node {spec['nodeName']}"
    tolerations = spec.get("tolerations") or []
    if (node.get("spec") or {}).get("unschedulable") and not any(
        tolerates(each, UNSCHEDULABLE) for each in tolerations
    ):
        return "the node is cordoned"
    blocking = blocking_taints((node.get("spec") or {}).get("taints") or (), tolerations)
    if blocking:
        return f"the pod does not tolerate the node's taint {taint_text(blocking[0])}"
    labels = node["metadata"].get("labels") or {}
    for key, value in (spec.get("nodeSelector") or {}).items():
        if labels.get(key) != value:
            return f"the pod's nodeSelector wants {key}={value}"
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if required is not None and not selects(required, node):
        return "the pod's node affinity does not select it"
    return ""


def taint_text(taint: Json) -> str:
    """Return a taint as ``kubectl taint`` writes it."""
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint.get('key')}{value}:{taint.get('effect')}"


def _term_selects(term: Json, node: Json) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    labels = node["metadata"].get("labels") or {}
    own = {"metadata.name": node["metadata"]["name"]}
    return all(_holds(each, labels) for each in expressions) and all(_holds(each, own) for each in fields)


def _holds(requirement: Json, labels: Json) -> bool:
    key, operator = str(requirement.get("key")), requirement.get("operator")
    values: list[str] = list(requirement.get("values") or ())
    present = key in labels
    if operator == "In":
        return present and labels[key] in values
    if operator == "NotIn":
        return not present or labels[key] not in values
    if operator == EXISTS:
        return present
    if operator == "DoesNotExist":
        return not present
    if operator in ("Gt", "Lt") and present:
        try:
            number, bound = int(labels[key]), int(values[0])
        except (ValueError, IndexError):
            return False
        return number > bound if operator == "Gt" else number < bound
    return False
