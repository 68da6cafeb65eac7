# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find differences between nodes, their drivers, and their published slices, and track how long each one lasts.

No side effects.

``findings`` returns the differences at one moment. ``track`` combines moments and finds those that last. Facts: the
scheduler uses only the slices of a pool's newest generation, and ignores a pool with fewer slices than its
resourceSliceCount (k8s.io/dynamic-resource-allocation, structured/pools.go). It does not allocate a device with a taint
of effect NoSchedule or NoExecute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .cleanup.cleanup_plan import ClusterView
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


class EventKey(NamedTuple):
    """The identity of one Event: findings of one kind at one node or pool. Unused parts are "".

    For DRAIN_LEFT, ``pool`` is the operation that drains the devices.
    """

    kind: str
    node: str
    driver: str
    pool: str


class FindingKey(NamedTuple):
    """The identity of a finding, which stays the same while the finding lasts. ``device`` is "" for a whole node or pool."""

    event: EventKey
    device: str


@dataclass(frozen=True)
class Finding:
    """A difference between the desired and the current state.

    ``since`` is the start of the difference, None if only the time of the first observation is known.
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
    def key(self) -> FindingKey:
        """Return the identity of the finding."""
        return FindingKey(EventKey(self.kind, self.node, self.driver, self.pool), self.device)


@dataclass(frozen=True)
class Drift:
    """A finding, the time of its start, and whether it has lasted long enough to be reported."""

    finding: Finding
    since: float
    lasting: bool


@dataclass(frozen=True)
class Report:
    """The message of one Event: that findings have lasted long enough, or have ended.

    The Event is on the Node, or for a pool without a node on its first slice, by name and UID.
    """

    node: str
    slice_name: str
    slice_uid: str
    message: str


def findings(
    view: ClusterView,
    drivers: Collection[str],
    *,
    absent_since: Mapping[str, float] | None = None,
    changed_at: float | None = None,
) -> list[Finding]:
    """Return the findings at this moment.

    ``absent_since`` has the start of the absence of Node objects. ``changed_at`` is the time of the last change of a node's release, None
    if it is not known.
    """
    managed = [one for one in view.slices if one.is_managed and one.driver in drivers]
    with_slices = {one.node for one in managed if one.node}
    found: list[Finding] = []
    for node in sorted(with_slices | {name for name, each in view.nodes.items() if each.release}):
        facts = view.nodes.get(node)
        if facts is None:
            found.append(Finding(NODE_ABSENT, node, since=(absent_since or {}).get(node)))
        elif not facts.ready:
            found.append(Finding(NODE_NOT_READY, node))
        elif node not in with_slices and not facts.uses_device_plugin:
            found.append(Finding(NO_SLICES, node, detail=facts.release))
    found += _pool_findings(managed)
    # Each drain removes its rules at its end. Here ``pool`` is the operation, so that each drain has a separate finding.
    found += [
        Finding(DRAIN_LEFT, rule.node, pool=rule.operation, device=rule.name)
        for rule in sorted(view.rules)
        if rule.operation
    ]
    if changed_at is not None:
        found += _outdated_releases(view, changed_at)
    return found


def _pool_findings(managed: Iterable[SliceFacts]) -> Iterable[Finding]:
    pools: dict[tuple[str, str, str], list[SliceFacts]] = {}
    for one in managed:
        pools.setdefault((one.node, one.driver, one.pool), []).append(one)
    for (node, driver, pool), slices in sorted(pools.items()):
        newest = max(one.generation for one in slices)
        current = [one for one in slices if one.generation == newest]
        expected_count = max(one.slice_count for one in current)
        first = min(slices, key=lambda one: one.name)
        event_slice: dict[str, Any] = {"slice_name": first.name, "slice_uid": first.uid} if not node else {}
        if len(current) < expected_count:
            detail = f"{len(current)} of {expected_count} slices of generation {newest} are there"
            yield Finding(POOL_INCOMPLETE, node, driver, pool, detail=detail, **event_slice)
        elif len(slices) > len(current):
            old = sorted(one.name for one in slices if one.generation != newest)
            detail = f"{', '.join(old[:MOST_NAMED])}{' and others' if len(old) > MOST_NAMED else ''}"
            yield Finding(POOL_MIXED, node, driver, pool, detail=detail, **event_slice)
        for device in sorted({device for one in current for device in one.tainted}):
            yield Finding(DEVICE_TAINTED, node, driver, pool, device, **event_slice)
        for device, how in (each for one in current for each in one.differing):
            yield Finding(LAYOUT_DIFFERS, node, driver, pool, device, detail=how, **event_slice)


def _outdated_releases(view: ClusterView, changed_at: float) -> Iterable[Finding]:
    """Yield the nodes whose release is not the most common one.

    If two releases are equally common, the later name wins.
    """
    counts = Counter(releases(view).values())
    if len(counts) < 2:
        return
    most_common = max(counts, key=lambda release: (counts[release], release))
    for node, release in sorted(releases(view).items()):
        if release != most_common:
            detail = f"its driver is of release {release}, and {counts[most_common]} nodes are at {most_common}"
            yield Finding(RELEASE_BEHIND, node, detail=detail, since=changed_at)


def track(
    former: Mapping[FindingKey, Drift], found: Iterable[Finding], *, now: float, lasting: float
) -> dict[FindingKey, Drift]:
    """Return the current findings, with the time since when each exists and whether that is at least ``lasting`` seconds.

    A finding that was absent in between starts again.
    """
    result: dict[FindingKey, Drift] = {}
    for finding in found:
        known = former.get(finding.key)
        since = finding.since if finding.since is not None else known.since if known is not None else now
        result[finding.key] = Drift(finding, since, now - since >= lasting)
    return result


def lasting_of(drifts: Mapping[FindingKey, Drift]) -> Counter[str]:
    """Return how many findings of each kind have lasted."""
    return Counter(drift.finding.kind for drift in drifts.values() if drift.lasting)


def findings_by_event(drifts: Mapping[FindingKey, Drift]) -> dict[EventKey, list[Finding]]:
    """Return the lasting findings by the key of their Event."""
    result: dict[EventKey, list[Finding]] = {}
    for key, drift in drifts.items():
        if drift.lasting:
            result.setdefault(key.event, []).append(drift.finding)
    return result


def reports(
    reported: Mapping[EventKey, Report], drifts: Mapping[FindingKey, Drift], lasting: float
) -> tuple[dict[EventKey, Report], dict[EventKey, Report]]:
    """Return the new reports of lasting findings, and the previous reports (``reported``) that have ended."""
    current = findings_by_event(drifts)
    begun = {
        key: Report(key.node, found[0].slice_name, found[0].slice_uid, begun_message(key, found, lasting))
        for key, found in current.items()
        if key not in reported
    }
    ended = {key: replace(report, message=ended_message(key)) for key, report in reported.items() if key not in current}
    return begun, ended


def report_all(found: Iterable[Finding]) -> dict[EventKey, Report]:
    """Return reports of all current findings, including new ones."""
    return reports({}, track({}, found, now=0.0, lasting=0.0), 0.0)[0]


def begun_message(key: EventKey, found: Sequence[Finding], lasting: float) -> str:
    """Return a message with the findings, their minimum duration, and the remedy."""
    kind, node, driver, pool = key
    long, detail = f"for at least {lasting:.0f} s" if lasting else "at this moment", found[0].detail
    named = ", ".join(one.device for one in found[:MOST_NAMED])
    how = " | ".join(f"{one.device}: {one.detail}" for one in found[:MOST_NAMED])
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
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


def ended_message(key: EventKey) -> str:
    """Return a message that a reported finding has ended."""
    kind, node, driver, pool = key
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
