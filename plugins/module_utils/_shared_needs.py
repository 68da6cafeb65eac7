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
    "pod_lists_claims": bool,
    "token_lifetime": int,
    "token_audiences": list,
}
PREFIX = "driver-"
ROLE, POD_ROLE, TOKEN_POLICY = (
    "dra-accelerators-driver",
    "dra-accelerators-driver-pods",
    "dra-accelerators-driver-tokens",
)


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
    """Return the needs that existing objects serve, by their names (``ROLE``, ``POD_ROLE``, ``TOKEN_POLICY``)."""
    needs: Needs = {}
    for rule in objects.get(ROLE, {}).get("rules") or []:
        resources = rule.get("resources") or []
        if "resourceclaims/driver" in resources:
            needs["names"] = sorted(rule.get("resourceNames") or [])
        needs |= {"read_pods": True} if "pods" in resources else {}
        needs |= {"metrics_authorization": True} if "tokenreviews" in resources else {}
    for rule in objects.get(POD_ROLE, {}).get("rules") or []:
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
    """Return the merged needs of all nodes with a driver, without ``nodes``. ``records`` are strings by node name."""
    own = set(nodes)
    parsed = {node: parse_record(text) for node, text in records.items() if node not in own}
    unknown = {node for node in drivers if node not in own and parsed.get(node) is None}
    known = [needs for needs in parsed.values() if needs is not None]
    return merge_needs([*known, needs_of_objects(objects)] if unknown else known)
