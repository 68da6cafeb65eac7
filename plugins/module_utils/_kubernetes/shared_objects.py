# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The needs of node drivers for the objects that all nodes of a cluster share. No function queries the cluster.

The role dra_driver records the needs of each node in a ConfigMap ``driver-<node>``. Nodes without a record were set up by an earlier release.
For these nodes the needs are derived from the rights in the existing objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

Needs = dict[str, Any]
#: Each need with its type. Two values are merged by union (lists), by "or" (booleans), or to the larger value (integers).
FIELDS: dict[str, type] = {
    "names": list,
    "read_pods": bool,
    "metrics_authorization": bool,
    # Drivers of earlier releases watch all claims.
    "pod_lists_claims": bool,
    "prepared_before_binding": bool,
    "flow_control": bool,
    "token_lifetime": int,
    "token_audiences": list,
}
PREFIX = "driver-"
ROLE, POD_ROLE, TOKEN_POLICY = (
    "dra-accelerators-driver",
    "dra-accelerators-driver:pods",
    "dra-accelerators-driver-tokens",
)
#: The name of the POD_ROLE in earlier releases. A node with the name "pods" has a ClusterRole of this name.
EARLIER_POD_ROLE = "dra-accelerators-driver-pods"
#: A FlowSchema. ClusterRoles of the drivers do not have this name.
FLOW_SCHEMA = "dra-accelerators-driver-claims"


def parse_record(text: str) -> Needs | None:
    """Return the needs in a record, or None if the string is not a record."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    needs = {name: found[name] for name in FIELDS if name in found}
    return needs if all(isinstance(value, FIELDS[name]) for name, value in needs.items()) else None


def merge_needs(all_needs: Iterable[Needs]) -> Needs:
    """Return needs that include all of these."""
    merged: Needs = {}
    for needs in all_needs:
        for name, value in needs.items():
            if name not in merged:
                merged[name] = value
            elif FIELDS[name] is list:
                merged[name] = sorted({*merged[name], *value})
            else:
                merged[name] = max(merged[name], value)
    return merged


def needs_of_objects(objects: Mapping[str, Mapping[str, Any]]) -> Needs:
    """Return the needs that existing objects serve, by their names (``ROLE``, ``POD_ROLE``, ...)."""
    needs: Needs = {"flow_control": True} if objects.get(FLOW_SCHEMA) else {}
    for rule in objects.get(ROLE, {}).get("rules") or []:
        resources = rule.get("resources") or []
        if "resourceclaims/driver" in resources:
            needs["names"] = sorted(rule.get("resourceNames") or [])
        needs |= {"read_pods": True} if "pods" in resources else {}
        needs |= {"metrics_authorization": True} if "tokenreviews" in resources else {}
    for rule in (objects.get(POD_ROLE) or objects.get(EARLIER_POD_ROLE) or {}).get("rules") or []:
        needs |= {"pod_lists_claims": True} if "resourceclaims" in (rule.get("resources") or []) else {}
    for each in (objects.get(TOKEN_POLICY, {}).get("spec") or {}).get("validations") or []:
        expression = each.get("expression") or ""
        seconds = re.search(r"expirationSeconds <= (\d+)", expression)
        audiences = re.search(r"each in \[([^]]*)\]", expression)
        needs |= {"token_lifetime": int(seconds[1])} if seconds else {}
        needs |= {"token_audiences": re.findall(r"'([^']*)'", audiences[1])} if audiences else {}
    return needs


def others_needs(
    nodes: Iterable[str], records: Mapping[str, str], drivers: Iterable[str], objects: Mapping[str, Mapping[str, Any]]
) -> Needs:
    """Return the merged needs of all nodes with a driver, without ``nodes``. ``records`` are strings by node name.

    Needs that the record of a node does not have, because an earlier release wrote it, are derived from the existing objects.
    """
    own = set(nodes)
    known = {node: parse_record(text) or {} for node, text in records.items() if node not in own}
    unknown = {name for node in drivers if node not in own for name in FIELDS.keys() - known.get(node, {}).keys()}
    derived = {name: value for name, value in needs_of_objects(objects).items() if name in unknown}
    return merge_needs([*known.values(), derived])


def policy_namespaces(policy: Mapping[str, Any]) -> tuple[str, str]:
    """Return the namespaces of the drivers that are services and of those that are pods, by the token policy; empty if it names none."""
    conditions = (policy.get("spec") or {}).get("matchConditions") or []
    text = " ".join(each.get("expression") or "" for each in conditions)
    found = [re.search(rf"system:serviceaccount:([^:]+):driver{end}[\"']", text) for end in ("-", "")]
    services, pods = (match[1] if match else "" for match in found)
    return services, pods
