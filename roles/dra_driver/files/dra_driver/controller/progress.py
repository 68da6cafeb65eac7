# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compute which release each node's driver has, how far a rollout is, and which devices are drained. No side effects.

The site playbook writes the release to the Node's label ``dra.accelerators/release`` after it has verified that the
driver of that release works. A node that was rolled back keeps the previous value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from .cleanup.cleanup_plan import ClusterView

READY, NOT_READY, DRIFTING = "ready", "not-ready", "drifting"
STATES = (READY, NOT_READY, DRIFTING)
#: The maximum number of releases with their own metric label. Nodes with less frequent releases are counted together.
MOST_RELEASES, OTHER = 8, "other"


class Change(NamedTuple):
    """A node whose driver has a new release. ``former`` is the previous one, or ""."""

    node: str
    uid: str
    former: str
    release: str


def releases(view: ClusterView) -> dict[str, str]:
    """Return the release of each node that has one."""
    return {name: node.release for name, node in view.nodes.items() if node.release}


def release_changes(former: Mapping[str, str] | None, view: ClusterView) -> list[Change]:
    """Return the nodes that have changed since ``former``, an earlier result of ``releases``.

    None: there is no earlier result. A node without a Node object, or without a driver, has no change.
    """
    if former is None:
        return []
    return [
        Change(name, view.nodes[name].uid, former.get(name, ""), release)
        for name, release in sorted(releases(view).items())
        if former.get(name) != release
    ]


def release_message(change: Change, numbers: Mapping[str, int]) -> str:
    """Return the text of a change. ``numbers`` is how many nodes have each release."""
    before = f" (it was of {change.former})" if change.former else ""
    there, total = numbers.get(change.release, 0), sum(numbers.values())
    return f"The node driver is of release {change.release} and works{before}; so it is on {there} of {total} nodes."


def count_nodes(view: ClusterView, drifting: Collection[str]) -> dict[tuple[str, str], int]:
    """Return the number of nodes by release and state. ``drifting`` are the nodes with a lasting finding."""
    found = releases(view)
    frequent = Counter(found.values()).most_common()
    named = {release for release, _number in frequent[:MOST_RELEASES]}
    return Counter(
        (release if release in named else OTHER, _state(view.nodes[name].ready, name in drifting))
        for name, release in found.items()
    )


def _state(ready: bool, drifts: bool) -> str:
    if not ready:
        return NOT_READY
    return DRIFTING if drifts else READY


#: A node, and the operation that drains devices on it.
Drain = tuple[str, str]


def drains(view: ClusterView) -> dict[Drain, int]:
    """Return the number of rules by which each operation drains devices of a node."""
    return dict(Counter((rule.node, rule.operation) for rule in view.rules if rule.operation))


def drain_changes(former: Mapping[Drain, int] | None, found: Mapping[Drain, int]) -> tuple[list[Drain], list[Drain]]:
    """Return the drains that have begun and ended since the earlier result; none if there is no earlier one (None)."""
    if former is None:
        return [], []
    return sorted(set(found) - set(former)), sorted(set(former) - set(found))


def drained_nodes(found: Mapping[Drain, int]) -> int:
    """Return how many nodes have drained devices."""
    return len({node for node, _operation in found})


def drain_begun_message(drain: Drain, rules: int, nodes: int) -> str:
    """Return the text for a drain that has begun. ``rules`` is its number of DeviceTaintRules, ``nodes`` of nodes with drained devices."""
    node, operation = drain
    return (
        f"Devices of node {node} are drained by the operation {operation} ({rules} DeviceTaintRule{'' if rules == 1 else 's'}): "
        f"they are not allocated. Nodes with drained devices: {nodes}."
    )


def drain_ended_message(drain: Drain, nodes: int) -> str:
    """Return the text for a drain that has ended. ``nodes`` is how many nodes have drained devices."""
    node, operation = drain
    return f"The operation {operation} drains no device of node {node} any more. Nodes with drained devices: {nodes}."
