# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Determine the nodes that a pod can run on, and the nodes with access to a slice. No side effects.

Source: k8s.io/component-helpers/scheduling/corev1/nodeaffinity and the scheduler's plugins NodeName, NodeUnschedulable,
TaintToleration, and NodeAffinity, which all run before the device allocation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
EXISTS, EQUAL = "Exists", "Equal"
#: Effects of node and device taints that require a toleration.
BLOCKING = ("NoSchedule", "NoExecute")
UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


def tolerates(toleration: Json, taint: Json) -> bool:
    """Return whether a toleration matches a taint, as in the scheduler, which ignores tolerationSeconds."""
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    operator = toleration.get("operator") or EQUAL
    if operator == EXISTS:
        return True
    return bool(operator == EQUAL and (toleration.get("value") or "") == (taint.get("value") or ""))


def blocking_taints(taints: Sequence[Json], tolerations: Sequence[Json]) -> list[Json]:
    """Return the taints that these tolerations do not tolerate and that prevent scheduling."""
    return [
        taint
        for taint in taints
        if taint.get("effect") in BLOCKING and not any(tolerates(each, taint) for each in tolerations)
    ]


def selects(selector: Json, node: Json) -> bool:
    """Return whether a NodeSelector selects a node by one of its terms. An empty term selects nothing."""
    return any(_term_selects(term, node) for term in selector.get("nodeSelectorTerms") or ())


def reaches(node: Json, *, node_name: str, all_nodes: bool, selector: Json | None) -> bool:
    """Return whether a node has access to devices of a node name, of all nodes, or of the nodes that a selector selects."""
    if node_name:
        return bool(node["metadata"]["name"] == node_name)
    return all_nodes or (selector is not None and selects(selector, node))


def why_not_asked(pod: Json, node: Json) -> str:
    """Return why the scheduler excludes a node before the device allocation; empty if it does not.

    Resources such as CPU and memory, and pod affinity, are not checked.
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
    """Return a taint in the format of ``kubectl taint``."""
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
