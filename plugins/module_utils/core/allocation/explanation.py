# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Explain why pods and claims have no devices: a verdict, the obstacles on each node, and the nearest change.

No side effects. Source: the scheduler's plugin DynamicResources (PreFilter, Filter), 1.37. Of the other plugins, only
those are considered that select nodes by name, label, and taint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..dra.extended_claims import claim_for, claim_name, requests_of
from .changes import Change, nearest
from .cutting import Cutter
from .moves import Holder
from .nodes import selects, why_not_asked
from .objects import Json, Judge, Pool, WantedClaim, held_by, missing_classes, name_of, namespaced_name, wanted_claim
from .pools import Inventory
from .reasons import ERROR, FITS, NO, NOT_ASKED, UNKNOWN, NodeFinding, evaluate_node, outcome
from .search import NodeSearch

ALLOCATED, BLOCKED = "allocated", "blocked"
MOST_RESERVED = 256
_EVERYWHERE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Cluster:
    """A cluster's objects, each list as returned by the API server."""

    slices: Sequence[Json] = ()
    claims: Sequence[Json] = ()
    classes: Sequence[Json] = ()
    rules: Sequence[Json] = ()
    nodes: Sequence[Json] = ()
    pods: Sequence[Json] = ()
    templates: Sequence[Json] = ()


@dataclass(frozen=True)
class Explanation:
    """The explanation for a pod, or for a claim without a known pod.

    ``verdict`` is fits, no, error, unknown, blocked (a prerequisite is missing before any node is checked), or
    allocated. ``blockers`` are sentences. ``left_out`` is the number of suitable nodes that were not checked, because
    there are many.
    """

    kind: str
    namespace: str
    name: str
    verdict: str
    claims: tuple[str, ...] = ()
    blockers: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    nodes: tuple[NodeFinding, ...] = ()
    changes: tuple[Change, ...] = ()
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as data."""
        return {
            "kind": self.kind,
            "namespace": self.namespace,
            "name": self.name,
            "verdict": self.verdict,
            "claims": list(self.claims),
            "blockers": list(self.blockers),
            "remarks": list(self.remarks),
            "nodes": [each.to_dict() for each in self.nodes],
            "changes": [each.to_dict() for each in self.changes],
        }


@dataclass
class _Subject:
    """The subject of an explanation: a pod, or ``_EVERYWHERE`` for a claim alone, with the existing claims."""

    kind: str
    namespace: str
    name: str
    pod: Json
    claims: list[Json] = field(default_factory=list)
    blockers: list[str] = field(default_factory=list)


class Explainer:
    """Explain the pods and claims of one cluster. Common results are computed once.

    Of the suitable nodes with devices, at most ``most_nodes`` are checked, spread over all of them.
    """

    def __init__(
        self, cluster: Cluster, judge: Judge, cutter: Cutter | None = None, *, most_nodes: int | None = None
    ) -> None:
        self._cluster, self._judge, self._cutter, self._most_nodes = cluster, judge, cutter, most_nodes
        self._inventory = Inventory(cluster.slices, cluster.rules)
        self._classes = {str(each["metadata"]["name"]): each for each in cluster.classes}
        self._claims = {namespaced_name(each): each for each in cluster.claims}
        self._templates = {namespaced_name(each): each for each in cluster.templates}
        self._pods = {namespaced_name(each): each for each in cluster.pods}
        self._held = held_by(cluster.claims)
        self._pools: dict[str, list[Pool]] = {}

    def waiting(self) -> list[Explanation]:
        """Explain every pending pod with claims, and every claim without devices and without a known pod."""
        pods = [
            each
            for each in self._cluster.pods
            if self._wants(each)
            and not each["spec"].get("nodeName")
            and (each.get("status") or {}).get("phase", "Pending") == "Pending"
        ]
        subjects = [self._pod_subject(each) for each in pods]
        used = {namespaced_name(claim) for subject in subjects for claim in subject.claims}
        alone = [each for each in self._cluster.claims if not _allocation(each) and namespaced_name(each) not in used]
        return [self._explain(each) for each in (*subjects, *map(self._claim_subject, alone))]

    def pod(self, pod: Json) -> Explanation:
        """Explain a pod with all its claims."""
        return self._explain(self._pod_subject(pod))

    def claim(self, claim: Json) -> Explanation:
        """Explain a claim: with its pending pod if there is one, else as if a pod without node requirements used it."""
        for each in self._cluster.pods:
            waits = self._wants(each) and not each["spec"].get("nodeName")
            subject = (
                self._pod_subject(each) if waits and namespaced_name(each)[0] == namespaced_name(claim)[0] else None
            )
            if subject is not None and any(name_of(one) == name_of(claim) for one in subject.claims):
                return self._explain(subject)
        return self._explain(self._claim_subject(claim))

    def _wants(self, pod: Json) -> bool:
        spec = pod.get("spec") or {}
        return bool(spec.get("resourceClaims") or claim_name(pod) or requests_of(spec, self._cluster.classes))

    # ------------------------------------------------------------------ subjects

    def _claim_subject(self, claim: Json) -> _Subject:
        return _Subject("ResourceClaim", *namespaced_name(claim), _EVERYWHERE, [claim])

    def _pod_subject(self, pod: Json) -> _Subject:
        subject = _Subject("Pod", *namespaced_name(pod), pod)
        made = {
            str(each["name"]): each.get("resourceClaimName")
            for each in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
        }
        for entry in pod["spec"].get("resourceClaims") or ():
            word, template = str(entry["name"]), entry.get("resourceClaimTemplateName")
            name = entry.get("resourceClaimName") or made.get(word)
            if name is None and word in made:
                continue  # no claim is needed
            found = self._claims.get((subject.namespace, str(name))) if name else None
            if found is None and template:
                found = self._from_template(subject, pod, word, str(template))
            elif found is None:
                subject.blockers.append(
                    f"ResourceClaim {subject.namespace}/{name} does not exist: make it, or correct the pod's resourceClaims"
                )
            if found is not None:
                subject.claims.append(found)
        extended = self._claims.get((subject.namespace, claim_name(pod))) or claim_for(
            subject.namespace, subject.name, pod["spec"], self._cluster.classes
        )
        if extended is not None:
            subject.claims.append(extended)
        gates = [str(each["name"]) for each in pod["spec"].get("schedulingGates") or ()]
        if gates:
            subject.blockers.append(
                f"the pod has the scheduling gates {', '.join(gates)}: who put them there has to take them away"
            )
        return subject

    def _from_template(self, subject: _Subject, pod: Json, word: str, template: str) -> Json | None:
        found = self._templates.get((subject.namespace, template))
        if found is None:
            subject.blockers.append(
                f"ResourceClaimTemplate {subject.namespace}/{template} does not exist: make it, or correct the pod's resourceClaims"
            )
            return None
        metadata = {"namespace": subject.namespace, "name": f"{name_of(pod)}-{word}"}
        return {"metadata": metadata, "spec": found["spec"].get("spec") or {}}

    # ------------------------------------------------------------------ explanations

    def _explain(self, subject: _Subject) -> Explanation:
        names = tuple("/".join(namespaced_name(each)) for each in subject.claims)
        wanted = [wanted_claim(each, self._classes) for each in subject.claims if not _allocation(each)]
        blockers = [
            *subject.blockers,
            *(text for each in subject.claims for text in self._claim_blockers(each, subject)),
        ]
        for claim in wanted:
            blockers += [
                f"request {request} of claim {claim.label} names the DeviceClass {device_class or 'without a name'}, which does not exist; "
                f"there are {_list(sorted(self._classes))}"
                for request, device_class in missing_classes(claim, self._classes)
            ]
        result = partial(Explanation, subject.kind, subject.namespace, subject.name, claims=names)
        if blockers:
            return result(verdict=BLOCKED, blockers=tuple(blockers))
        if not wanted and not subject.pod:
            text = _where(subject.claims[0]) if subject.claims else ""
            return result(verdict=ALLOCATED, remarks=(text,) if text else ())
        findings, searches, left_out = self._nodes(subject, wanted)
        verdict = _verdict(findings)
        changes: list[Change] = []
        if verdict in (NO, ERROR) and wanted:
            asked = [(at, one) for at, one in zip(searches, findings) if one.verdict != NOT_ASKED]
            if asked:
                changes = nearest(
                    *(asked, wanted, self._judge),
                    everywhere=searches,
                    cutter=self._cutter,
                    holder_of=self._holder,
                )
        remarks = self._remarks(subject, wanted, findings)
        return result(
            verdict=verdict, remarks=tuple(remarks), nodes=tuple(findings), changes=tuple(changes), left_out=left_out
        )

    def _claim_blockers(self, claim: Json, subject: _Subject) -> list[str]:
        metadata, status = claim["metadata"], claim.get("status") or {}
        name = "/".join(namespaced_name(claim))
        found = []
        if metadata.get("deletionTimestamp"):
            found.append(f"claim {name} is being deleted: make another one")
        users = status.get("reservedFor") or ()
        uid = (subject.pod.get("metadata") or {}).get("uid")
        if (
            subject.pod
            and _allocation(claim)
            and len(users) >= MOST_RESERVED
            and uid not in [each.get("uid") for each in users]
        ):
            found.append(f"claim {name} is used by {len(users)} pods, {MOST_RESERVED} are the most")
        return found

    def _nodes(
        self, subject: _Subject, wanted: Sequence[WantedClaim]
    ) -> tuple[list[NodeFinding], list[NodeSearch], int]:
        findings, searches = [], []
        bound = [
            (each, selector) for each in subject.claims if (selector := (_allocation(each) or {}).get("nodeSelector"))
        ]
        reasons = {
            name_of(node): why_not_asked(subject.pod, node) if subject.pod else "" for node in self._cluster.nodes
        }
        left_out = self._unchecked_nodes([node for node in self._cluster.nodes if not reasons[name_of(node)]])
        for node in self._cluster.nodes:
            if name_of(node) in left_out:
                continue
            at = NodeSearch(node, self._pools_of(node), self._held, self._judge)
            searches.append(at)
            reason = reasons[name_of(node)]
            elsewhere = [each for each, selector in bound if not selects(selector, node)]
            if reason:
                findings.append(NodeFinding(name_of(node), NOT_ASKED, reason))
            elif elsewhere and outcome(at, wanted)[0] != ERROR:
                findings.append(NodeFinding(name_of(node), NOT_ASKED, _where(elsewhere[0])))
            else:
                findings.append(evaluate_node(at, wanted))
        return findings, searches, len(left_out)

    def _unchecked_nodes(self, nodes: Sequence[Json]) -> set[str]:
        """Return the suitable nodes that are not checked."""
        rich = [name_of(node) for node in nodes if self._inventory.reaches(node)]
        most = len(rich) if self._most_nodes is None else self._most_nodes
        if len(rich) <= most:
            return set()
        return set(rich) - {rich[number * len(rich) // most] for number in range(most)}

    def _pools_of(self, node: Json) -> list[Pool]:
        name = name_of(node)
        if name not in self._pools:
            self._pools[name] = self._inventory.pools(node)
        return self._pools[name]

    def _holder(self, name: str) -> Holder | None:
        """Return a claim with devices; None if one of its consumers is unknown or its class does not exist."""
        namespace, _slash, own = name.partition("/")
        claim = self._claims.get((namespace, own))
        if claim is None:
            return None
        wanted = wanted_claim(claim, self._classes)
        users = [
            self._pods.get((namespace, str(each.get("name")))) if each.get("resource", "pods") == "pods" else None
            for each in (claim.get("status") or {}).get("reservedFor") or ()
        ]
        pods = [{**each, "spec": {**each["spec"], "nodeName": ""}} for each in users if each is not None]
        if len(pods) < len(users) or missing_classes(wanted, self._classes):
            return None
        bound = [
            selector
            for pod in pods
            for each in self._pod_subject(pod).claims
            if namespaced_name(each) != namespaced_name(claim)
            and (selector := (_allocation(each) or {}).get("nodeSelector"))
        ]

        def may_use(node: Json) -> bool:
            return not any(why_not_asked(pod, node) for pod in pods) and all(selects(each, node) for each in bound)

        return Holder(wanted, may_use)

    def _remarks(self, subject: _Subject, wanted: Sequence[WantedClaim], findings: Sequence[NodeFinding]) -> list[str]:
        found = []
        if not self._cluster.nodes:
            found.append("there are no nodes")
        if not self._cluster.slices:
            found.append(
                "no driver publishes any device: see that the node driver runs (dra-driver status on the node)"
            )
        if findings and all(each.verdict == NOT_ASKED for each in findings):
            found.append(
                "no node is checked for devices: the pod's node selection, its other claims, cordons, or taints exclude all nodes"
            )
        if _verdict(findings) == FITS and wanted and not subject.pod:
            found.append("no pod waits for it: the scheduler gives a claim devices only for a pod that uses it")
        elif _verdict(findings) == FITS and wanted:
            found.append(
                "what else keeps it waiting, such as processors, memory or other pods, stands in the pod's Events"
            )
        return found


def explain(
    cluster: Cluster, judge: Judge, *, pods: Iterable[Json] | None = None, claims: Iterable[Json] | None = None
) -> list[Explanation]:
    """Explain these pods and claims, or without both all that wait. Raises Malformed for an invalid claim."""
    explainer = Explainer(cluster, judge)
    if pods is None and claims is None:
        return explainer.waiting()
    return [*map(explainer.pod, pods or ()), *map(explainer.claim, claims or ())]


def _verdict(findings: Sequence[NodeFinding]) -> str:
    verdicts = {each.verdict for each in findings}
    return next((each for each in (ERROR, FITS, UNKNOWN) if each in verdicts), NO)


def _where(claim: Json) -> str:
    """Return a text with a claim's devices."""
    allocation = _allocation(claim) or {}
    results = (allocation.get("devices") or {}).get("results") or ()
    devices = [f"{each['pool']}/{each['device']}" for each in results]
    return f"claim {'/'.join(namespaced_name(claim))} has {_list(devices)}"


def _allocation(claim: Json) -> Json | None:
    found: Json | None = (claim.get("status") or {}).get("allocation")
    return found


def _list(names: Sequence[str], most: int = 8) -> str:
    return (", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")) or "none"
