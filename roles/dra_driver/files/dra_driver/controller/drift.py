# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find differences between nodes, their drivers, and their published slices, and track how long each one lasts.

No side effects.

``findings`` returns the differences at one moment. ``follow`` combines moments and finds those that last. Facts: the
scheduler uses only the slices of a pool's newest generation, and ignores a pool with fewer slices than its
resourceSliceCount (k8s.io/dynamic-resource-allocation, structured/pools.go). It does not allocate a device with a taint
of effect NoSchedule or NoExecute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .cleanup.cleanup_plan import View
from .facts import SliceFacts
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
#: The maximum number of devices in one message.
MOST_NAMED = 5

#: The identity of a finding: kind, node, driver, pool, device. Unused parts are "".
Key = tuple[str, str, str, str, str]
#: The subject of one Event: a key without the device.
Place = tuple[str, str, str, str]


@dataclass(frozen=True)
class Finding:
    """A difference between desired and current state.

    ``since`` is set if the start is known better than by the first observation.
    """

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
        """Return the identity, which stays the same while the finding lasts."""
        return (self.kind, self.node, self.driver, self.pool, self.device)


@dataclass(frozen=True)
class Drift:
    """A finding, the time since it exists, and whether it has lasted long enough to report."""

    finding: Finding
    since: float
    lasting: bool


@dataclass(frozen=True)
class Report:
    """One message to publish: findings at one place began to last, or ended.

    For a pool without a node, the Event is on its first slice.
    """

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
    """Return the findings at this moment.

    ``changed_at`` is the time at which a node last changed its release. None means that it is not known.
    """
    ours = [one for one in view.slices if one.is_managed and one.driver in drivers]
    with_slices = {one.node for one in ours if one.node}
    found: list[Finding] = []
    for node in sorted(with_slices | {name for name, each in view.nodes.items() if each.release}):
        facts = view.nodes.get(node)
        if facts is None:
            found.append(Finding(NODE_ABSENT, node, since=(absent_since or {}).get(node)))
        elif not facts.ready:
            found.append(Finding(NODE_NOT_READY, node))
        elif node not in with_slices and not facts.uses_device_plugin:
            found.append(Finding(NO_SLICES, node, detail=facts.release))
    found += _of_pools(ours)
    # Each drain removes its rules at its end. Here ``pool`` is the operation, so that each drain has a separate finding.
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
    """Yield the nodes whose release is not the most common one.

    If two releases are equally common, the later name wins.
    """
    counts = Counter(releases(view).values())
    if len(counts) < 2:
        return
    leading = max(counts, key=lambda release: (counts[release], release))
    for node, release in sorted(releases(view).items()):
        if release != leading:
            detail = f"its driver is of release {release}, and {counts[leading]} nodes are at {leading}"
            yield Finding(RELEASE_BEHIND, node, detail=detail, since=changed_at)


def follow(former: Mapping[Key, Drift], found: Iterable[Finding], *, now: float, lasting: float) -> dict[Key, Drift]:
    """Return the current findings, with the time since when each exists and whether that is at least ``lasting`` seconds.

    A finding that was absent in between starts again.
    """
    result: dict[Key, Drift] = {}
    for finding in found:
        known = former.get(finding.key)
        since = finding.since if finding.since is not None else known.since if known is not None else now
        result[finding.key] = Drift(finding, since, now - since >= lasting)
    return result


def lasting_of(drifts: Mapping[Key, Drift]) -> Counter[str]:
    """Return how many findings of each kind have lasted."""
    return Counter(drift.finding.kind for drift in drifts.values() if drift.lasting)


def places(drifts: Mapping[Key, Drift]) -> dict[Place, list[Finding]]:
    """Return the findings that have lasted, by the subject of their Event."""
    result: dict[Place, list[Finding]] = {}
    for key, drift in drifts.items():
        if drift.lasting:
            result.setdefault(key[:4], []).append(drift.finding)
    return result


def reports(
    reported: Mapping[Place, Report], drifts: Mapping[Key, Drift], lasting: float
) -> tuple[dict[Place, Report], dict[Place, Report]]:
    """Return the new reports of lasting findings, and the previous reports (``reported``) that have ended."""
    now_so = places(drifts)
    begun = {
        at: Report(at[1], those[0].slice_name, those[0].slice_uid, begun_message(at, those, lasting))
        for at, those in now_so.items()
        if at not in reported
    }
    ended = {at: replace(report, message=ended_message(at)) for at, report in reported.items() if at not in now_so}
    return begun, ended


def begun(found: Iterable[Finding]) -> dict[Place, Report]:
    """Return reports of all current findings, however short they exist."""
    return reports({}, follow({}, found, now=0.0, lasting=0.0), 0.0)[0]


def begun_message(at: Place, those: Sequence[Finding], lasting: float) -> str:
    """Return a message with the finding, its minimum duration, and the remedy."""
    kind, node, driver, pool = at
    long, detail = f"for at least {lasting:.0f} s" if lasting else "at this moment", those[0].detail
    named = ", ".join(one.device for one in those[:MOST_NAMED])
    how = " | ".join(f"{one.device}: {one.detail}" for one in those[:MOST_NAMED])
    more = f" and {len(those) - MOST_NAMED} more" if len(those) > MOST_NAMED else ""
    return {
        NODE_ABSENT: f"Node {node} has ResourceSlices but no Node object {long}. If the node was removed, the controller "
        "deletes them (not in a dry run). Otherwise let its kubelet register it.",
        NODE_NOT_READY: f"Node {node} has not been ready {long}; its devices stay published and its claims allocated. Repair it. "
        "To release its claims, add the taint node.kubernetes.io/out-of-service or delete the Node object.",
        NO_SLICES: f"Node {node} has the node driver (release {detail}) but no ResourceSlice {long}. On the node: "
        "run dra-driver status and read the driver's log.",
        POOL_INCOMPLETE: f"Pool {pool} of {driver} has been incomplete {long}: {detail}. The scheduler allocates none of its devices. "
        "On the node: dra-driver status shows why the pool is not published.",
        POOL_MIXED: f"Pool {pool} of {driver} has had slices of an older generation in addition to the newest one {long}: {detail}. The "
        "scheduler ignores them. The driver deletes its slices; delete the others: kubectl delete resourceslice NAME.",
        DEVICE_TAINTED: f"Devices of pool {pool} of {driver} have been tainted {long}, and are not allocated: {named}{more}. "
        "On the node: dra-driver devices shows the fault and the remedy of each.",
        DRAIN_LEFT: f"Devices of node {node} have been drained by the operation {pool} {long} and are not allocated. Its rules: "
        f"{named}{more}. If the operation is not running, run it again, or return the devices to service with the module device_drain.",
        LAYOUT_DIFFERS: f"Devices of pool {pool} of {driver} have differed from their node's layout {long}, according to its driver: "
        f"{how}{more}. Apply the layout: ansible-playbook dra.accelerators.repartition --limit {node}; or correct it.",
        RELEASE_BEHIND: f"No node has changed its release {long}, and releases differ: {detail}. Finish the rollout: "
        f"ansible-playbook dra.accelerators.site --limit {node}",
    }[kind]


def ended_message(at: Place) -> str:
    """Return a message that a reported finding has ended."""
    kind, node, driver, pool = at
    return {
        NODE_ABSENT: f"Node {node} has a Node object again, or no ResourceSlices.",
        NODE_NOT_READY: f"Node {node} is ready again, or was removed.",
        NO_SLICES: f"Node {node} has ResourceSlices again, or no longer has the node driver.",
        POOL_INCOMPLETE: f"Pool {pool} of {driver} is complete again, or was removed.",
        POOL_MIXED: f"Pool {pool} of {driver} has slices of one generation again.",
        DEVICE_TAINTED: f"Pool {pool} of {driver} has no lasting device taints any more.",
        DRAIN_LEFT: f"No device of node {node} is drained by the operation {pool} any more.",
        LAYOUT_DIFFERS: f"No device of pool {pool} of {driver} is reported to differ from its node's layout any more.",
        RELEASE_BEHIND: f"Node {node} has the most common release, or releases change again.",
    }[kind]
