# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Which release of the node driver each node has and how far a roll-out is, and which devices are drained. Pure.

The site playbook says the release on the Node, in the label ``dra.accelerators/release``, once the driver of that release has been seen
to work there; a node that was put back keeps the former one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from .plan import View

READY, NOT_READY, DRIFTING = "ready", "not-ready", "drifting"
STATES = (READY, NOT_READY, DRIFTING)
#: So many releases have a name of their own in metrics; nodes of the others, the less frequent ones, are counted together.
MOST_RELEASES, OTHER = 8, "other"


class Change(NamedTuple):
    """A node whose driver is of another release than before. ``former`` is "" for one that had none."""

    node: str
    uid: str
    former: str
    release: str


def releases(view: View) -> dict[str, str]:
    """The release of each node that has one."""
    return {name: node.release for name, node in view.nodes.items() if node.release}


def changes(former: Mapping[str, str] | None, view: View) -> list[Change]:
    """The nodes that have changed since ``former``, what ``releases`` said before; None: nothing is known of before.

    A node that is gone or has no driver any more has not changed its release.
    """
    if former is None:
        return []
    return [
        Change(name, view.nodes[name].uid, former.get(name, ""), release)
        for name, release in sorted(releases(view).items())
        if former.get(name) != release
    ]


def message(change: Change, numbers: Mapping[str, int]) -> str:
    """Return the text of a change. ``numbers`` is how many nodes have each release."""
    before = f" (it was of {change.former})" if change.former else ""
    there, total = numbers.get(change.release, 0), sum(numbers.values())
    return f"The node driver is of release {change.release} and works{before}; so it is on {there} of {total} nodes."


def counts(view: View, drifting: Collection[str]) -> dict[tuple[str, str], int]:
    """How many nodes have each release and each state; ``drifting`` are the nodes with a finding that has lasted."""
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


#: A node, and the operation that drains devices of it.
Drain = tuple[str, str]


def drains(view: View) -> dict[Drain, int]:
    """By how many rules each operation keeps devices of a node from new claims at this moment."""
    return dict(Counter((rule.node, rule.operation) for rule in view.rules if rule.operation))


def drain_changes(former: Mapping[Drain, int] | None, found: Mapping[Drain, int]) -> tuple[list[Drain], list[Drain]]:
    """The drains that have begun since ``former``, and those that have ended; None: nothing is known of before, and so of neither."""
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
        f"nobody is given them. Nodes with drained devices: {nodes}."
    )


def drain_ended_message(drain: Drain, nodes: int) -> str:
    """Return the text for a drain that has ended. ``nodes`` is how many nodes have drained devices."""
    node, operation = drain
    return f"The operation {operation} drains no device of node {node} any more. Nodes with drained devices: {nodes}."
