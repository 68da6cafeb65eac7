# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Plan the cleanup after gone nodes: compute a list of actions from the observed state. No side effects.

A node counts as gone if its Node object has been absent for a grace period by this process's own clock, or if it has the taint
node.kubernetes.io/out-of-service and its kubelet does not report Ready. Kubernetes' own controllers use the same two
criteria. Their work is not repeated: they delete the pods of such nodes, remove deleted pods from a claim's
reservations, and delete objects with a deleted Node as owner. This plan contains the rest: slices without that owner or
of an out-of-service node, allocated claims without reservations, and this project's taint rules and finalizers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..facts import OUR_FINALIZERS, ClaimFacts, Consumer, NodeFacts, RuleFacts, SliceFacts

ABSENT, OUT_OF_SERVICE = "its Node object does not exist", "its Node object is tainted as out of service"
DELETE_SLICE, DELETE_RULE, DEALLOCATE, RELEASE = "delete-slice", "delete-rule", "deallocate-claim", "release-claim"
LIFT_RULE = "lift-rule"
VERBS = (DELETE_SLICE, DELETE_RULE, RELEASE, DEALLOCATE, LIFT_RULE)

POD_GONE, POD_FINISHED, POD_ALIVE = "gone", "finished", "alive"
#: A pod that a claim is reserved for: namespace, name, UID.
PodKey = tuple[str, str, str]


@dataclass(frozen=True)
class ClusterView:
    """The observed cluster state at one moment."""

    nodes: Mapping[str, NodeFacts]
    slices: Collection[SliceFacts] = ()
    claims: Collection[ClaimFacts] = ()
    rules: Collection[RuleFacts] = ()


@dataclass(frozen=True)
class Action:
    """One change to one object.

    The object must still have this UID, and a rule of a drain also this ``renewed`` value.
    """

    verb: str
    namespace: str
    name: str
    uid: str
    node: str
    why: str
    renewed: str = ""

    def __str__(self) -> str:
        place = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.verb} {place} of node {self.node}: {self.why}"


def named_nodes(view: ClusterView, drivers: Collection[str]) -> set[str]:
    """Return the nodes that this project's slices, claims, and rules refer to."""
    named = {one.node for one in view.slices if _is_our_slice(one, drivers)}
    named.update(claim.node for claim in view.claims if _is_ours(claim, drivers))
    named.update(rule.node for rule in view.rules)
    named.discard("")
    return named


def absences(former: Mapping[str, float], view: ClusterView, drivers: Collection[str], now: float) -> dict[str, float]:
    """Return the time since when each referenced node is absent. A node that was seen again starts again."""
    return {name: former.get(name, now) for name in named_nodes(view, drivers) if name not in view.nodes}


def gone_nodes(view: ClusterView, absent_since: Mapping[str, float], *, now: float, grace: float) -> dict[str, str]:
    """Return the gone nodes, each with the reason.

    A tainted node whose kubelet reports Ready is not gone: the taint contradicts the kubelet, and pods may run there.
    """
    gone = {name: ABSENT for name, since in absent_since.items() if name not in view.nodes and now - since >= grace}
    for node in view.nodes.values():
        if node.out_of_service and not node.ready:
            gone[node.name] = OUT_OF_SERVICE
    return gone


def next_gone(absent_since: Mapping[str, float], *, now: float, grace: float) -> float:
    """Return the seconds until the next absent node counts as gone; infinity without such a node.

    The result is never 0: nodes that already count as gone are ignored.
    """
    return min((left for since in absent_since.values() if (left := since + grace - now) > 0), default=math.inf)


class SeenDrain(NamedTuple):
    """The time since when a drain's rule is seen without a renewal, in seconds of this process's clock, and its last renewal."""

    since: float
    renewed: str


def observe_drains(former: Mapping[str, SeenDrain], view: ClusterView, now: float) -> dict[str, SeenDrain]:
    """Return the observation of each drain rule, by its UID.

    The time starts at the first observation here, because clocks of different machines are not compared. When a run
    continues a drain, it renews the rules, and the time starts again.
    """
    found = {}
    for rule in view.rules:
        if rule.operation:
            known = former.get(rule.uid)
            found[rule.uid] = known if known and known.renewed == rule.renewed else SeenDrain(now, rule.renewed)
    return found


def abandoned_drain_actions(
    view: ClusterView, seen: Mapping[str, SeenDrain], *, now: float, lasting: float
) -> list[Action]:
    """Return the actions that remove abandoned drain rules: those without a renewal for ``lasting`` seconds.

    With 0 the list is empty.
    """
    if not lasting:
        return []
    return sorted(
        (
            Action(
                LIFT_RULE,
                "",
                rule.name,
                rule.uid,
                rule.node,
                f"the drain {rule.operation} has kept its devices for at least {lasting:g} s without a sign of life",
                rule.renewed,
            )
            for rule in view.rules
            if rule.operation and rule.uid in seen and now - seen[rule.uid].since >= lasting
        ),
        key=lambda action: (action.node, action.name),
    )


def pods_to_read(view: ClusterView, gone: Collection[str], drivers: Collection[str]) -> set[PodKey]:
    """Return the pods that use claims of gone nodes, so that their state decides about the claims."""
    return {
        (claim.namespace, consumer.name, consumer.uid)
        for claim in view.claims
        if claim.node in gone and _is_ours(claim, drivers)
        for consumer in claim.consumers
        if consumer.resource == "pods"
    }


def plan(
    view: ClusterView,
    gone: Mapping[str, str],
    pods: Mapping[PodKey, str],
    drivers: Collection[str],
    *,
    unread: str = POD_ALIVE,
) -> list[Action]:
    """Return the actions in the order of execution: first stop new allocations, then release existing ones.

    ``pods`` contains the state of the pods from ``pods_to_read``. A missing pod counts as ``unread``.
    """
    found = [
        Action(DELETE_SLICE, "", one.name, one.uid, one.node, gone[one.node])
        for one in view.slices
        if _is_our_slice(one, drivers) and one.node in gone
    ]
    found += [
        Action(DELETE_RULE, "", rule.name, rule.uid, rule.node, gone[rule.node])
        # An out-of-service node can return, still with the device faults that the rule reports.
        for rule in view.rules
        if gone.get(rule.node) == ABSENT
    ]
    for claim in view.claims:
        found += _of_claim(claim, gone, pods, drivers, unread)
    return sorted(found, key=lambda action: (VERBS.index(action.verb), action.node, action.namespace, action.name))


def _of_claim(
    claim: ClaimFacts, gone: Mapping[str, str], pods: Mapping[PodKey, str], drivers: Collection[str], unread: str
) -> Iterable[Action]:
    if claim.node not in gone or not _is_ours(claim, drivers):
        return
    if any(_lives(claim, consumer, pods, unread) for consumer in claim.consumers):
        return
    why = gone[claim.node]
    at = (claim.namespace, claim.name, claim.uid, claim.node)
    whom = "no pod uses it" if not claim.consumers else "all pods that used it have ended"
    # Deallocate last: a claim without its allocation no longer shows its node.
    if any(name.startswith(OUR_FINALIZERS) for name in claim.finalizers):
        yield Action(RELEASE, *at, f"{why}, and {whom}")
    yield Action(DEALLOCATE, *at, f"{why}, and {whom}")


def _is_our_slice(one: SliceFacts, drivers: Collection[str]) -> bool:
    """Return whether this project's driver wrote a slice.

    Another publisher can use the same driver name, and owns its slices.
    """
    return one.is_managed and one.driver in drivers


def _is_ours(claim: ClaimFacts, drivers: Collection[str]) -> bool:
    return bool(claim.node) and any(driver in drivers for driver in claim.drivers)


def _lives(claim: ClaimFacts, consumer: Consumer, pods: Mapping[PodKey, str], unread: str) -> bool:
    """Return whether a consumer may still use the claim. A consumer that is not a pod counts as alive."""
    if consumer.resource != "pods":
        return True
    return pods.get((claim.namespace, consumer.name, consumer.uid), unread) == POD_ALIVE
