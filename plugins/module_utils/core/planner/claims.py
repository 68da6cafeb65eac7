# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Convert the claims of a cluster or of manifests to demands, and read the existing allocations. No side effects.

Each selector is evaluated for one device of each kind, as it would be published. Attributes that distinguish devices of
one kind (UUID, PCI address), and the constraints of claims, do not depend on a layout and are left to the scheduler.
The possible nodes of a pod follow from its node selector, its node affinity, and the nodes' taints, as far as the nodes
are known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..allocation.capacity import lacking, taken
from ..allocation.nodes import why_not_asked
from ..allocation.objects import (
    Device,
    Judge,
    NotJudged,
    Request,
    SelectorFailed,
    WantedClaim,
    missing_classes,
    namespaced_name,
    wanted_claim,
)
from ..dra.extended_claims import claim_for, claim_name, requests_of
from .demands import ANY, Demand, Kind, Part

Json = Mapping[str, Any]
#: The workloads that create pods, and the field with their number of pods, 1 if it is missing.
REPLICAS = {
    "Deployment": "replicas",
    "ReplicaSet": "replicas",
    "StatefulSet": "replicas",
    "ReplicationController": "replicas",
    "Job": "parallelism",
}


@dataclass(frozen=True)
class Wish:
    """A number of pods, or claims without pods, with the same requests: one pod's claims as API objects, and its spec."""

    name: str
    claims: tuple[Json, ...]
    count: int = 1
    priority: int = 0
    spec: Json = field(default_factory=dict)


@dataclass
class Read:
    """The demands of all wishes.

    ``refused`` are wishes for which no layout can be planned, with the reason. ``remarks`` are requirements that were
    ignored.
    """

    demands: list[Demand] = field(default_factory=list)
    refused: list[tuple[Wish, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def published_kinds(nodes: Mapping[str, Any]) -> dict[Kind, Device]:
    """Return how a device of each kind, and a partition of each profile, would be published, from the nodes' answers.

    Existing partitions of a layout are published differently from partitions on demand: claims distinguish them by
    their UUID.
    """
    found: dict[Kind, Device] = {}
    for answer in nodes.values():
        kinds = (answer or {}).get("kinds") or {}
        for facts in (answer or {}).get("devices") or ():
            published_kind = (kinds.get(facts.get("kind")) or {}).get("published") or {}
            same = (str(facts["vendor"]), str(facts["product"]), int(facts["memory_bytes"]))
            for word in ("devices", "made"):
                for key, content in (published_kind.get(word) or {}).items():
                    kind = (*same, None, False) if key == "whole" else (*same, int(key), word == "devices")
                    found.setdefault(
                        kind,
                        Device(
                            str(published_kind["driver"]), "planned", {**content, "name": f"{facts['product']} {key}"}
                        ),
                    )
    return found


def demands_of(
    wishes: Iterable[Wish],
    classes: Iterable[Json],
    kinds: Mapping[Kind, Device],
    judge: Judge,
    nodes: Sequence[Json] = (),
) -> Read:
    """Return the demands on the fleet. Wishes with the same requests, priority, and nodes become one demand.

    ``nodes`` are the fleet's Node objects. Raises Malformed for an invalid claim.
    """
    by_name = {str(each["metadata"]["name"]): each for each in classes}
    read = Read()
    known: dict[tuple[int, frozenset[str], str], int] = {}
    names: list[list[str]] = []
    for wish in wishes:
        barred = {
            str(one["metadata"]["name"]): text for one in nodes if (text := why_not_asked({"spec": wish.spec}, one))
        }
        where = _where(wish, barred, nodes)
        if barred and len(barred) == len(nodes):
            read.refused.append((wish, where))
            continue
        if where:
            read.remarks.append(f"{wish.name}: {where}")
        elsewhere = frozenset(barred)
        key = (
            wish.priority,
            elsewhere,
            json.dumps([each.get("spec") or {} for each in wish.claims], sort_keys=True, default=str),
        )
        if key in known:
            at = known[key]
            read.demands[at] = replace(read.demands[at], count=read.demands[at].count + wish.count)
            names[at].append(wish.name)
            continue
        parts, reason = _parts(wish, by_name, kinds, judge, read.remarks)
        if reason:
            read.refused.append((wish, reason))
        elif parts:
            known[key] = len(read.demands)
            read.demands.append(Demand(wish.name, wish.count, parts, wish.priority, elsewhere))
            names.append([wish.name])
    for at, those in enumerate(names):
        if len(those) > 1:
            read.demands[at] = replace(read.demands[at], name=f"{those[0]} and {len(those) - 1} more")
    read.remarks[:] = list(dict.fromkeys(read.remarks))
    return read


def _where(wish: Wish, barred: Mapping[str, str], nodes: Sequence[Json]) -> str:
    """Return a text about the excluded nodes of a pod; empty if it can run on all nodes."""
    if barred and len(barred) == len(nodes):
        return f"Its pod may go to no node of the fleet: {_reasons(barred)}"
    if barred:
        return f"planned without {len(barred)} of {len(nodes)} nodes: {_reasons(barred)}"
    chosen = [
        word
        for word, wanted in (
            ("nodeName", wish.spec.get("nodeName")),
            ("nodeSelector", wish.spec.get("nodeSelector")),
            ("node affinity", (wish.spec.get("affinity") or {}).get("nodeAffinity")),
        )
        if wanted
    ]
    if chosen and not nodes:
        return f"its pod's {' and '.join(chosen)} is left to the scheduler, since no node of the cluster is known here"
    return ""


def _reasons(barred: Mapping[str, str]) -> str:
    """Return why nodes are excluded, each reason once with its nodes."""
    by_reason: dict[str, list[str]] = {}
    for node, reason in sorted(barred.items()):
        by_reason.setdefault(reason, []).append(node)
    return "; ".join(
        f"{reason} ({', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''})"
        for reason, names in by_reason.items()
    )


def _parts(
    wish: Wish, classes: Mapping[str, Json], kinds: Mapping[Kind, Device], judge: Judge, remarks: list[str]
) -> tuple[tuple[Part, ...], str]:
    """Return the parts of a wish's claims, or the reason why no layout can be planned for them."""
    claims = [wanted_claim(document, classes) for document in wish.claims]
    for claim in claims:
        for missing, name in missing_classes(claim, classes):
            return (), f"Request {missing} names the DeviceClass {name}, which does not exist"
    return parts_of(wish.name, claims, kinds, judge, remarks)


def parts_of(
    who: str, claims: Iterable[WantedClaim], kinds: Mapping[Kind, Device], judge: Judge, remarks: list[str]
) -> tuple[tuple[Part, ...], str]:
    """Return the parts of all claims, or the reason why no layout can be planned for them.

    Ignored requirements are added to ``remarks``.
    """
    parts: list[Part] = []
    for claim in claims:
        if claim.constraints:
            which = ", ".join(dict.fromkeys(each.attribute for each in claim.constraints))
            remarks.append(f"{who}: the constraints on {which} are left to the scheduler")
        for alternatives in claim.requests:
            if alternatives[0].admin:
                continue  # admin access allocates nothing exclusively
            if any(each.every for each in alternatives):
                return (), f"Request {alternatives[0].name} wants all devices of a node, however many these are"
            found = [(each, _matching_kinds(who, each, kinds, judge, remarks)) for each in alternatives]
            # As in the scheduler: the first alternative that is possible.
            request, items = next((one for one in found if one[1]), found[0])
            parts.append(Part(request.count, ANY, items=items, text=_request_text(request)))
    return tuple(parts), ""


def _matching_kinds(
    who: str, request: Request, kinds: Mapping[Kind, Device], judge: Judge, remarks: list[str]
) -> frozenset[Kind]:
    found = set()
    for kind, device in kinds.items():
        try:
            if all(judge.matches(expression, device) for _where, expression in request.selectors):
                amounts = taken(request.capacity, device)
                if amounts is not None and lacking(amounts, device, {}) is None:
                    found.add(kind)
        except SelectorFailed as error:
            remarks.append(f"{who}, request {request.full_name}: a selector has an error, {error.reason}")
        except NotJudged as error:
            remarks.append(f"{who}, request {request.full_name}: {error.message}")
    return frozenset(found)


def _request_text(request: Request) -> str:
    own = [text for where, text in request.selectors if where.startswith("request ")]
    own += [f"{name} {amount}" for name, amount in request.capacity.items()]
    return f"device of class {request.device_class}" + (f" with {' and '.join(own)}" if own else "")


# ---- wishes


def wishes_of(
    documents: Sequence[Json],
    *,
    claims: Iterable[Json] = (),
    templates: Iterable[Json] = (),
    classes: Iterable[Json] = (),
    alone: bool = True,
) -> tuple[list[Wish], list[str]]:
    """Return the requests of pods, workloads, and with ``alone`` of other claims, and the problems as sentences.

    ``claims`` and ``templates`` are those of the cluster, in addition to those of the documents. For a claim that several pods share, only the first
    pod counts. Claims with devices do not count. A template that no pod names counts for one claim. By ``classes``, the cluster's
    DeviceClasses and those of the documents, extended resources in a pod's limits are devices.
    """
    by_kind: dict[str, list[Json]] = {}
    for each in documents:
        by_kind.setdefault(str(each.get("kind")), []).append(each)
    known = {namespaced_name(each): each for each in (*claims, *by_kind.get("ResourceClaim", ()))}
    made = {namespaced_name(each): each for each in (*templates, *by_kind.get("ResourceClaimTemplate", ()))}
    device_classes = (*classes, *by_kind.get("DeviceClass", ()))
    priorities = {
        str(each["metadata"]["name"]): int(each.get("value") or 0) for each in by_kind.get("PriorityClass", ())
    }
    used: set[tuple[str, str]] = set()
    problems: list[str] = []
    wishes: list[Wish] = []
    pods = [(each, each.get("spec") or {}, 1) for each in by_kind.get("Pod", ())]
    for kind, key in REPLICAS.items():
        for each in by_kind.get(kind, ()):
            spec = each.get("spec") or {}
            count = spec.get(key)
            pods.append((each, (spec.get("template") or {}).get("spec") or {}, 1 if count is None else int(count)))
    for each, spec, count in pods:
        name = f"{each.get('kind')} {'/'.join(namespaced_name(each))}"
        priority = int(spec.get("priority") or priorities.get(str(spec.get("priorityClassName")), 0))
        own: list[Json] = []
        shared: list[Json] = []
        status = (each.get("status") or {}).get("resourceClaimStatuses") or ()
        generated = {str(one["name"]): one.get("resourceClaimName") for one in status}
        for entry in spec.get("resourceClaims") or ():
            word, template = str(entry["name"]), entry.get("resourceClaimTemplateName")
            place = (namespaced_name(each)[0], str(entry.get("resourceClaimName") or generated.get(word) or ""))
            found = known.get(place) if place[1] else None
            if found is not None:
                # A generated claim belongs to one pod; a named claim can be shared by several pods.
                if place not in used and not _has_devices(found):
                    (own if template else shared).append(found)
                used.add(place)
            elif template and (namespaced_name(each)[0], str(template)) in made:
                used.add((namespaced_name(each)[0], f"template {template}"))
                own.append(_of_template(made[namespaced_name(each)[0], str(template)], word))
            elif not (word in generated and generated[word] is None):
                what = f"ResourceClaimTemplate {template}" if template else f"ResourceClaim {place[1]}"
                problems.append(f"{name}: {what} does not exist in namespace {place[0]}")
        place = (namespaced_name(each)[0], claim_name(each))
        extended = known.get(place) or claim_for(*namespaced_name(each), spec, device_classes)
        if extended is not None:
            used.add(namespaced_name(extended))
            if not _has_devices(extended):
                own.append(extended)
        if shared and count > 0:
            wishes.append(Wish(name, (*shared, *own), 1, priority, spec))
            count -= 1
        if own and count > 0:
            wishes.append(Wish(name, tuple(own), count, priority, spec))
    if alone:
        wishes += [
            Wish(f"ResourceClaim {'/'.join(namespaced_name(each))}", (each,))
            for each in by_kind.get("ResourceClaim", ())
            if namespaced_name(each) not in used and not _has_devices(each)
        ]
        if not wishes:
            wishes += [
                Wish(
                    f"ResourceClaimTemplate {'/'.join(namespaced_name(each))}",
                    (_of_template(each, namespaced_name(each)[1]),),
                )
                for each in by_kind.get("ResourceClaimTemplate", ())
            ]
    return wishes, problems


def waiting_since(pod: Json, classes: Iterable[Json] = ()) -> str:
    """Return the time since which a pod with devices is pending, in the format of the API; empty for other pods.

    By ``classes``, the cluster's DeviceClasses, extended resources in its limits are devices. A pod with scheduling gates
    is not pending.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    if spec.get("nodeName") or spec.get("schedulingGates"):
        return ""
    if not spec.get("resourceClaims") and not claim_name(pod) and not requests_of(spec, classes):
        return ""
    if status.get("phase", "Pending") != "Pending" or pod["metadata"].get("deletionTimestamp"):
        return ""
    return str(pod["metadata"].get("creationTimestamp") or "")


# ---- existing allocations


def holdings(claims: Iterable[Json], slices: Iterable[Json], drivers: Iterable[str]) -> list[dict[str, Any]]:
    """Return the claims with devices of some drivers for ``read_fleet``, with each device's node, UUID, and parent UUID."""
    mine = set(drivers)
    published = {
        (each["spec"]["driver"], each["spec"]["pool"]["name"], content["name"]): (each["spec"], content)
        for each in slices
        if each["spec"]["driver"] in mine
        for content in each["spec"].get("devices") or ()
    }
    found = []
    for claim in claims:
        results = (((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}).get("results") or ()
        devices = []
        for result in results:
            if result["driver"] not in mine:
                continue
            spec, content = published.get((result["driver"], result["pool"], result["device"]), ({}, {"name": ""}))
            device = Device(result["driver"], result["pool"], content)
            node = content.get("nodeName") or spec.get("nodeName") or result["pool"]
            devices.append(
                {
                    "node": str(node),
                    "uuid": _text(device, "uuid"),
                    "parent_uuid": _text(device, "parentUUID"),
                    "admin_access": bool(result.get("adminAccess")),
                }
            )
        if devices:
            namespace, name = namespaced_name(claim)
            found.append({"namespace": namespace, "name": name, "devices": devices})
    return found


def users_of(claims: Iterable[Json]) -> dict[str, list[str]]:
    """Return the pods for which claims are reserved, by claim, as namespace and name."""
    return {
        "/".join(namespaced_name(claim)): [
            f"{namespaced_name(claim)[0]}/{each['name']}"
            for each in (claim.get("status") or {}).get("reservedFor") or ()
            if each.get("resource") == "pods"
        ]
        for claim in claims
    }


def _text(device: Device, name: str) -> str:
    return str((device.attribute(f"{device.driver}/{name}") or {}).get("string") or "")


def _of_template(template: Json, word: str) -> Json:
    metadata = {"namespace": namespaced_name(template)[0], "name": word}
    return {"metadata": metadata, "spec": (template.get("spec") or {}).get("spec") or {}}


def _has_devices(claim: Json) -> bool:
    return bool((claim.get("status") or {}).get("allocation"))
