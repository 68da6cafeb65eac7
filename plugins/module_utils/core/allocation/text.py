# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Convert explanations to text. No side effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .explanation import ALLOCATED, BLOCKED, Explanation
from .reasons import (
    CLAIM,
    COUNTER,
    ERROR,
    FITS,
    GROUPS,
    NO,
    NOT_ASKED,
    SHARE,
    UNKNOWN,
    NodeFinding,
    Obstacle,
    RequestFinding,
)

MOST_NODES = 3
MOST_NAMED = 4
_WORDS = {
    CLAIM: "held by claims",
    COUNTER: "for which claims leave too little of counters",
    GROUPS: "not compatible with what claims have",
    SHARE: "of which claims leave too little",
}
_SAID = {
    FITS: "there are devices for it now",
    NO: "no node has devices for it now",
    ERROR: "the scheduler fails with an error for it on every node",
    UNKNOWN: "it is unknown whether a node has devices for it",
    BLOCKED: "no node is checked for devices",
    ALLOCATED: "it has its devices",
}


def lines(found: Explanation, most_nodes: int = MOST_NODES) -> list[str]:
    """Return an explanation as lines: the nearest nodes, and a summary of all nodes."""
    said = [f"{found.kind} {found.namespace}/{found.name}: {_SAID[found.verdict]}."]
    said += [f"  {each}." for each in (*found.blockers, *found.remarks)]
    asked = [each for each in found.nodes if each.verdict != NOT_ASKED]
    not_asked = Counter(each.message for each in found.nodes if each.verdict == NOT_ASKED)
    said += [
        f"  {_number(count, 'node')} not asked: {message}." for message, count in not_asked.most_common(MOST_NAMED)
    ]
    if found.verdict == FITS:
        fitting = [each for each in asked if each.verdict == FITS]
        said += [line for each in fitting[:most_nodes] for line in _chosen(each)]
        said += _more(len(fitting), most_nodes, "have devices for it")
        return said
    if len(asked) > most_nodes:
        said += _sum(asked)
    without = [each for each in asked if _has_nothing(each)]
    near = _nearest([each for each in asked if each not in without], [each.node for each in found.changes])
    said += [line for each in near[:most_nodes] for line in _node(each)]
    said += _more(len(near), most_nodes, "have some of these devices")
    if without:
        names = _names([each.node for each in without])
        said.append(f"  {_number(len(without), 'node')} without any device of the classes: {names}.")
    if found.changes:
        said += ["  Nearest change:" if len(found.changes) == 1 else "  Nearest changes, any of them:"]
        said += [
            f"    - {each.text}{f' (node {each.node})' if each.node and each.node not in each.text else ''}."
            for each in found.changes
        ]
    return said


def text(found: Sequence[Explanation], most_nodes: int = MOST_NODES) -> str:
    """Return explanations as one text, separated by empty lines."""
    return "\n\n".join("\n".join(lines(each, most_nodes)) for each in found)


def sentences(found: Explanation) -> str:
    """Return the obstacles as short sentences, without the names of the claims if there is only one."""
    said = [_SAID[found.verdict], *found.blockers, *found.remarks]
    asked = [each for each in found.nodes if each.verdict != NOT_ASKED]
    if found.left_out:
        said.append(f"checked {len(asked)} of {len(asked) + found.left_out} possible nodes")
    said += [each.message for each in asked if each.verdict == ERROR][:1]
    for claim, request, free, devices, obstacles in _counted(asked):
        of = f" of {claim}" if len(found.claims) > 1 else ""
        rest = "".join(f", {count} {word}" for word, count in obstacles)
        said.append(f"request {request}{of}: {free} of {_number(devices, 'device')} left{rest}")
    said += [each.together for each in asked if each.together][:1]
    return " ".join(f"{each[:1].upper()}{each[1:].rstrip('.')}." for each in said if each)


def _chosen(each: NodeFinding) -> list[str]:
    return [f"  node {each.node}: {_devices(each) or 'nothing is wanted of it'}"]


def _devices(each: NodeFinding) -> str:
    return ", ".join(f"{one.request}: {one.device.label}" for one in each.chosen)


def _node(each: NodeFinding) -> list[str]:
    if each.verdict == FITS:
        return [f"  node {each.node} would have devices for it: {_devices(each)}."]
    said = [f"  node {each.node}:"]
    if each.message:
        said.append(f"    {each.message.rstrip('.')}.")
    said += [f"    {one}." for one in each.pools]
    for one in each.requests:
        said += _request(one)
    if each.together:
        said.append(f"    together: {each.together}.")
    return said


def _request(one: RequestFinding) -> list[str]:
    wanted = "wants all" if one.every else f"wants {one.wanted}"
    left = f"{one.free} of {_number(one.devices, 'device')} left"
    said = [f"    request {one.request} of {one.claim} (class {one.device_class}) {wanted}, {left}"]
    return said + [f"      {len(each.devices)} {each.detail}: {_names(each.devices)}" for each in _ordered(one)]


def _has_nothing(each: NodeFinding) -> bool:
    """Return whether a node has no device of the requested classes and no other findings."""
    obstacles = [one for request in each.requests for one in request.obstacles]
    return (
        each.verdict == NO
        and not (each.pools or each.together or any(one.free for one in each.requests))
        and all(one.detail.startswith("not of class ") for one in obstacles)
    )


def _ordered(one: RequestFinding) -> list[Obstacle]:
    """Return the obstacles, those with the most devices first.

    All devices that claims use are combined into one obstacle.
    """
    held = [each for each in one.obstacles if each.kind == CLAIM]
    rest = [each for each in one.obstacles if each.kind != CLAIM]
    if held:
        names = list(dict.fromkeys(name for each in held for name in each.claims))
        devices = tuple(name for each in held for name in each.devices)
        rest.append(Obstacle(CLAIM, f"held by {_names(names)}", devices))
    return sorted(rest, key=lambda each: -len(each.devices))


def _sum(asked: Sequence[NodeFinding]) -> list[str]:
    """Return the obstacles over all nodes, by request."""
    said = [f"  over {len(asked)} nodes:"]
    for claim, request, free, devices, obstacles in _counted(asked):
        said.append(f"    request {request} of {claim}: {free} of {_number(devices, 'device')} left")
        said += [f"      {count} {word}" for word, count in obstacles]
    return said


def _counted(asked: Sequence[NodeFinding]) -> Iterator[tuple[str, str, int, int, list[tuple[str, int]]]]:
    """Yield each request with its free devices, all devices, and the most frequent obstacles."""
    for name in dict.fromkeys((one.claim, one.request) for each in asked for one in each.requests):
        those = [one for each in asked for one in each.requests if (one.claim, one.request) == name]
        counts: Counter[str] = Counter()
        for one in those:
            for each in one.obstacles:
                counts[_WORDS.get(each.kind, each.detail)] += len(each.devices)
        free, devices = sum(one.free for one in those), sum(one.devices for one in those)
        yield *name, free, devices, counts.most_common(MOST_NAMED)


def _nearest(asked: Sequence[NodeFinding], first: Sequence[str]) -> list[NodeFinding]:
    def lack(each: NodeFinding) -> tuple[bool, bool, int]:
        return (each.verdict != ERROR, each.node not in first, -sum(min(one.free, one.wanted) for one in each.requests))

    return sorted(asked, key=lack)


def _more(count: int, most: int, what: str) -> list[str]:
    return [f"  {count - most} more nodes {what}."] if count > most else []


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _number(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
