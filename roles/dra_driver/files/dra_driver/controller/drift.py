# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Where nodes, their drivers and what is published of them do not agree, and for how long. Pure.

``findings`` says what is so at one moment; ``follow`` turns moments into what has lasted. Facts: the scheduler takes the slices
of a pool's newest generation alone, and leaves a pool out whose resourceSliceCount they do not reach (k8s.io/dynamic-resource-
allocation, structured/pools.go); a device with a taint of the effect NoSchedule or NoExecute is not given out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .facts import SliceFacts
from .plan import View
from .progress import releases

NODE_ABSENT, NODE_NOT_READY, NO_SLICES = "node-absent", "node-not-ready", "no-slices"
POOL_INCOMPLETE, POOL_MIXED, DEVICE_TAINTED = "pool-incomplete", "pool-mixed", "device-tainted"
RELEASE_BEHIND, DRAIN_LEFT = "release-behind", "drain-left"
LAYOUT_DIFFERS = "layout-differs"
KINDS = (
    NODE_ABSENT,
    NODE_NOT_READY,
    NO_SLICES,
    POOL_INCOMPLETE,
    POOL_MIXED,
    DEVICE_TAINTED,
    RELEASE_BEHIND,
    DRAIN_LEFT,
    LAYOUT_DIFFERS,
)
#: So many devices are named in one message.
MOST_NAMED = 5

#: What a finding is about: kind, node, driver, pool, device; "" for what it has none of.
Key = tuple[str, str, str, str, str]
#: What one Event is about: a key without the device.
Place = tuple[str, str, str, str]


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be. ``since`` is given where more is known than when it was first seen."""

    kind: str
    node: str
    driver: str = ""
    pool: str = ""
    device: str = ""
    slice_name: str = ""
    slice_uid: str = ""
    detail: str = ""
    since: float | None = None

    @property
    def key(self) -> Key:
        """What it is about, the same as long as it lasts."""
        return (self.kind, self.node, self.driver, self.pool, self.device)


@dataclass(frozen=True)
class Drift:
    """A finding, since when it is so, and whether it has lasted."""

    finding: Finding
    since: float
    lasting: bool


@dataclass(frozen=True)
class Report:
    """What is said once: what began to last at one place, or has ended. A pool of no single node is spoken of at its first slice."""

    node: str
    slice_name: str
    slice_uid: str
    message: str


def findings(
    view: View,
    drivers: Collection[str],
    *,
    absent_since: Mapping[str, float] | None = None,
    changed_at: float | None = None,
) -> list[Finding]:
    """What is so at this moment. ``changed_at`` is when a node last changed its release; None: nothing is known of that."""
    ours = [one for one in view.slices if one.ours and one.driver in drivers]
    with_slices = {one.node for one in ours if one.node}
    found: list[Finding] = []
    for node in sorted(with_slices | {name for name, each in view.nodes.items() if each.release}):
        facts = view.nodes.get(node)
        if facts is None:
            found.append(Finding(NODE_ABSENT, node, since=(absent_since or {}).get(node)))
        elif not facts.ready:
            found.append(Finding(NODE_NOT_READY, node))
        elif node not in with_slices and not facts.is_plugin:
            found.append(Finding(NO_SLICES, node, detail=facts.release))
    found += _of_pools(ours)
    # Each run that drains lifts its rules at the end; ``pool`` is the operation here, so that each is told by itself.
    found += [
        Finding(DRAIN_LEFT, rule.node, pool=rule.operation, device=rule.name)
        for rule in sorted(view.rules)
        if rule.operation
    ]
    if changed_at is not None:
        found += _behind(view, changed_at)
    return found


def _of_pools(ours: Iterable[SliceFacts]) -> Iterable[Finding]:
    pools: dict[tuple[str, str, str], list[SliceFacts]] = {}
    for one in ours:
        pools.setdefault((one.node, one.driver, one.pool), []).append(one)
    for (node, driver, pool), slices in sorted(pools.items()):
        newest = max(one.generation for one in slices)
        current = [one for one in slices if one.generation == newest]
        wanted = max(one.slice_count for one in current)
        first = min(slices, key=lambda one: one.name)
        at: dict[str, Any] = {"slice_name": first.name, "slice_uid": first.uid} if not node else {}
        if len(current) < wanted:
            detail = f"{len(current)} of {wanted} slices of generation {newest} are there"
            yield Finding(POOL_INCOMPLETE, node, driver, pool, detail=detail, **at)
        elif len(slices) > len(current):
            old = sorted(one.name for one in slices if one.generation != newest)
            detail = f"{', '.join(old[:MOST_NAMED])}{' and others' if len(old) > MOST_NAMED else ''}"
            yield Finding(POOL_MIXED, node, driver, pool, detail=detail, **at)
        for device in sorted({device for one in current for device in one.tainted}):
            yield Finding(DEVICE_TAINTED, node, driver, pool, device, **at)
        for device, how in (each for one in current for each in one.differing):
            yield Finding(LAYOUT_DIFFERS, node, driver, pool, device, detail=how, **at)


def _behind(view: View, changed_at: float) -> Iterable[Finding]:
    """Nodes of releases that fewer nodes have than the one that most have; of two that as many have, the later name leads."""
    counts = Counter(releases(view).values())
    if len(counts) < 2:
        return
    leading = max(counts, key=lambda release: (counts[release], release))
    for node, release in sorted(releases(view).items()):
        if release != leading:
            detail = f"its driver is of release {release}, and {counts[leading]} nodes are at {leading}"
            yield Finding(RELEASE_BEHIND, node, detail=detail, since=changed_at)


def follow(former: Mapping[Key, Drift], found: Iterable[Finding], *, now: float, lasting: float) -> dict[Key, Drift]:
    """What is so, since when, and whether for at least ``lasting`` seconds. What was not so in between begins anew."""
    result: dict[Key, Drift] = {}
    for finding in found:
        known = former.get(finding.key)
        since = finding.since if finding.since is not None else known.since if known is not None else now
        result[finding.key] = Drift(finding, since, now - since >= lasting)
    return result


def lasting_of(drifts: Mapping[Key, Drift]) -> Counter[str]:
    """How many findings of each kind have lasted."""
    return Counter(drift.finding.kind for drift in drifts.values() if drift.lasting)


def places(drifts: Mapping[Key, Drift]) -> dict[Place, list[Finding]]:
    """What has lasted, by what one Event is about."""
    result: dict[Place, list[Finding]] = {}
    for key, drift in drifts.items():
        if drift.lasting:
            result.setdefault(key[:4], []).append(drift.finding)
    return result


def reports(
    told: Mapping[Place, Report], drifts: Mapping[Key, Drift], lasting: float
) -> tuple[dict[Place, Report], dict[Place, Report]]:
    """What has begun to last and is not among what was ``told``, and what was told and is over."""
    now_so = places(drifts)
    begun = {
        at: Report(at[1], those[0].slice_name, those[0].slice_uid, begun_message(at, those, lasting))
        for at, those in now_so.items()
        if at not in told
    }
    ended = {at: replace(report, message=ended_message(at)) for at, report in told.items() if at not in now_so}
    return begun, ended


def begun(found: Iterable[Finding]) -> dict[Place, Report]:
    """What is so at this moment, for however short a time, in words."""
    return reports({}, follow({}, found, now=0.0, lasting=0.0), 0.0)[0]


def begun_message(at: Place, those: Sequence[Finding], lasting: float) -> str:
    """What is so, for how long at least, and what to do."""
    kind, node, driver, pool = at
    long, detail = f"for at least {lasting:.0f} s" if lasting else "at this moment", those[0].detail
    named = ", ".join(one.device for one in those[:MOST_NAMED])
    how = " | ".join(f"{one.device}: {one.detail}" for one in those[:MOST_NAMED])
    more = f" and {len(those) - MOST_NAMED} more" if len(those) > MOST_NAMED else ""
    return {
        NODE_ABSENT: f"ResourceSlices of node {node} are there and no Node object {long}. If the node is gone, they are "
        "deleted by the controller (not in a dry run); else let its kubelet register it.",
        NODE_NOT_READY: f"Node {node} has not been ready {long}; its devices stay published and its claims allocated. Repair it, "
        "or give it the taint node.kubernetes.io/out-of-service, or delete the Node object, and its claims are given back.",
        NO_SLICES: f"Node {node} has the node driver (release {detail}) and no ResourceSlice {long}. On the node: "
        "dra-driver status, and the driver's own log.",
        POOL_INCOMPLETE: f"Pool {pool} of {driver} has been incomplete {long}: {detail}. The scheduler gives none of its devices out. "
        "On the node: dra-driver status says what keeps the pool from being published.",
        POOL_MIXED: f"Pool {pool} of {driver} has had slices of an older generation beside the newest one {long}: {detail}. The "
        "scheduler passes them over. The driver removes what is its own; remove the others: kubectl delete resourceslice NAME.",
        DEVICE_TAINTED: f"Devices of pool {pool} of {driver} have been tainted {long}, and are not given out: {named}{more}. "
        "On the node: dra-driver devices says what is wrong with each and what to do.",
        DRAIN_LEFT: f"Devices of node {node} have been drained by the operation {pool} {long} and are not given out, by the rules "
        f"{named}{more}. If no run of it is under way any more, run it again, or open them with the module device_drain.",
        LAYOUT_DIFFERS: f"Devices of pool {pool} of {driver} have not been as their node's layout wants {long}, as the driver there says: "
        f"{how}{more}. Apply the layout: ansible-playbook dra.accelerators.repartition --limit {node}; or correct it.",
        RELEASE_BEHIND: f"No node has changed its release {long}, and they differ: {detail}. Finish the roll-out: "
        f"ansible-playbook dra.accelerators.site --limit {node}",
    }[kind]


def ended_message(at: Place) -> str:
    """That something that was told is over."""
    kind, node, driver, pool = at
    return {
        NODE_ABSENT: f"Node {node} and its ResourceSlices agree again.",
        NODE_NOT_READY: f"Node {node} is ready again, or is gone.",
        NO_SLICES: f"Node {node} has ResourceSlices again, or is no longer said to have the node driver.",
        POOL_INCOMPLETE: f"Pool {pool} of {driver} is complete again, or gone.",
        POOL_MIXED: f"Pool {pool} of {driver} has slices of one generation again.",
        DEVICE_TAINTED: f"No device of pool {pool} of {driver} has been tainted for long any more.",
        DRAIN_LEFT: f"No device of node {node} is drained by the operation {pool} any more.",
        LAYOUT_DIFFERS: f"All devices of pool {pool} of {driver} are as their node's layout wants again, or nobody says otherwise.",
        RELEASE_BEHIND: f"Node {node} has the release of the others, or releases change again.",
    }[kind]
