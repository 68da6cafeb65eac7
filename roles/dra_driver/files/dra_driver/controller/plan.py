# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What is to be cleaned up after nodes that are gone: from what is seen to a list of actions. Pure.

A node is gone when its Node object has been absent for a while, as seen by this process's own clock, or when somebody has
said so with the taint out-of-service and its kubelet does not contradict. Kubernetes' own controllers decide by the same two.
What they do themselves is left to them: they delete pods of such nodes, take pods that are gone out of a claim's reservations,
and delete objects whose owner, a Node, was deleted. What they leave is planned here: slices without that owner or of a node that is only
out of service, claims that nobody is reserved for and that keep their devices, rules and finalizers of ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .facts import OUR_FINALIZERS, ClaimFacts, Consumer, NodeFacts, RuleFacts, SliceFacts

ABSENT, OUT_OF_SERVICE = "its Node object is gone", "its Node object is tainted as out of service"
DELETE_SLICE, DELETE_RULE, DEALLOCATE, RELEASE = "delete-slice", "delete-rule", "deallocate-claim", "release-claim"
LIFT_RULE = "lift-rule"
VERBS = (DELETE_SLICE, DELETE_RULE, RELEASE, DEALLOCATE, LIFT_RULE)

POD_GONE, POD_FINISHED, POD_ALIVE = "gone", "finished", "alive"
#: A pod that a claim is reserved for: namespace, name, UID.
PodKey = tuple[str, str, str]


@dataclass(frozen=True)
class View:
    """What is seen of the cluster at one moment."""

    nodes: Mapping[str, NodeFacts]
    slices: Collection[SliceFacts] = ()
    claims: Collection[ClaimFacts] = ()
    rules: Collection[RuleFacts] = ()


@dataclass(frozen=True)
class Action:
    """One change to one object, which must still be the one with that UID, and of a drain's rule with that last sign of life."""

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


def named_nodes(view: View, drivers: Collection[str]) -> set[str]:
    """The nodes that something of ours belongs to."""
    named = {one.node for one in view.slices if _is_our_slice(one, drivers)}
    named.update(claim.node for claim in view.claims if _is_ours(claim, drivers))
    named.update(rule.node for rule in view.rules)
    named.discard("")
    return named


def absences(former: Mapping[str, float], view: View, drivers: Collection[str], now: float) -> dict[str, float]:
    """Since when each node that something belongs to is seen to be absent. One that was seen in between begins anew."""
    return {name: former.get(name, now) for name in named_nodes(view, drivers) if name not in view.nodes}


def gone_nodes(view: View, absent_since: Mapping[str, float], *, now: float, grace: float) -> dict[str, str]:
    """The nodes that are gone, and by what that is known.

    A node that is tainted and whose kubelet says that it is ready is not gone: somebody is wrong, and pods may run there.
    """
    gone = {name: ABSENT for name, since in absent_since.items() if name not in view.nodes and now - since >= grace}
    for node in view.nodes.values():
        if node.out_of_service and not node.ready:
            gone[node.name] = OUT_OF_SERVICE
    return gone


def next_gone(absent_since: Mapping[str, float], *, now: float, grace: float) -> float:
    """In how many seconds the next absent node is gone; infinity where none is to become so. Never 0: those that are gone are not waited for."""
    return min((left for since in absent_since.values() if (left := since + grace - now) > 0), default=math.inf)


class SeenDrain(NamedTuple):
    """Since when a rule of a drain is seen to stand without a new sign of life, in seconds of this process's clock, and the last sign."""

    since: float
    renewed: str


def drains(former: Mapping[str, SeenDrain], view: View, now: float) -> dict[str, SeenDrain]:
    """What is known of each rule of a drain, by its UID. No clock is compared with another machine's: it counts from here.

    A run that goes on with a drain gives its rules a new sign, and then it counts anew.
    """
    found = {}
    for rule in view.rules:
        if rule.operation:
            known = former.get(rule.uid)
            found[rule.uid] = known if known and known.renewed == rule.renewed else SeenDrain(now, rule.renewed)
    return found


def left_drains(view: View, seen: Mapping[str, SeenDrain], *, now: float, lasting: float) -> list[Action]:
    """What lifts the rules that drains have left behind: those without a sign of life for ``lasting`` seconds; 0: none ever."""
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


def pods_to_ask(view: View, gone: Collection[str], drivers: Collection[str]) -> set[PodKey]:
    """The pods that decide about claims of nodes that are gone."""
    return {
        (claim.namespace, consumer.name, consumer.uid)
        for claim in view.claims
        if claim.node in gone and _is_ours(claim, drivers)
        for consumer in claim.consumers
        if consumer.resource == "pods"
    }


def plan(view: View, gone: Mapping[str, str], pods: Mapping[PodKey, str], drivers: Collection[str]) -> list[Action]:
    """The actions, in the order in which they are taken: first nothing more is given out, then what was given is taken back.

    ``pods`` says what has become of those of ``pods_to_ask``; one that is not in it counts as alive.
    """
    found = [
        Action(DELETE_SLICE, "", one.name, one.uid, one.node, gone[one.node])
        for one in view.slices
        if _is_our_slice(one, drivers) and one.node in gone
    ]
    found += [
        Action(DELETE_RULE, "", rule.name, rule.uid, rule.node, gone[rule.node])
        # A node that is out of service comes back, and with it what its devices suffered from.
        for rule in view.rules
        if gone.get(rule.node) == ABSENT
    ]
    for claim in view.claims:
        found += _of_claim(claim, gone, pods, drivers)
    return sorted(found, key=lambda action: (VERBS.index(action.verb), action.node, action.namespace, action.name))


def _of_claim(
    claim: ClaimFacts, gone: Mapping[str, str], pods: Mapping[PodKey, str], drivers: Collection[str]
) -> Iterable[Action]:
    if claim.node not in gone or not _is_ours(claim, drivers):
        return
    if any(_lives(claim, consumer, pods) for consumer in claim.consumers):
        return
    why = gone[claim.node]
    at = (claim.namespace, claim.name, claim.uid, claim.node)
    whom = "nobody uses it" if not claim.consumers else "all pods that used it are gone"
    # A claim without its allocation no longer tells which node it was for: that goes last.
    if any(name.startswith(OUR_FINALIZERS) for name in claim.finalizers):
        yield Action(RELEASE, *at, f"{why}, and {whom}")
    yield Action(DEALLOCATE, *at, f"{why}, and {whom}")


def _is_our_slice(one: SliceFacts, drivers: Collection[str]) -> bool:
    """Another publisher may use the same driver name; what it wrote is its own."""
    return one.ours and one.driver in drivers


def _is_ours(claim: ClaimFacts, drivers: Collection[str]) -> bool:
    return bool(claim.node) and any(driver in drivers for driver in claim.drivers)


def _lives(claim: ClaimFacts, consumer: Consumer, pods: Mapping[PodKey, str]) -> bool:
    """Whether somebody may still use the claim. Of what is no pod nothing is known here."""
    if consumer.resource != "pods":
        return True
    return pods.get((claim.namespace, consumer.name, consumer.uid), POD_ALIVE) == POD_ALIVE
