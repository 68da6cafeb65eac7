# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Who waits for devices, since when, and why: claims without an allocation, by the pods that want them. Pure.

Facts: k8s.io/api/core/v1/types.go (PodScheduled, schedulingGates, resourceClaims, resourceClaimStatuses).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Json = dict[str, Any]
#: Who says why a claim waits: whoever asked for the report, an explanation made of all that the cluster has, the scheduler, or nobody.
GIVEN, EXPLAINED, SCHEDULER, NOBODY = "given", "explained", "scheduler", "nobody"
_NONE: Mapping[str, Json] = MappingProxyType({})


def waiting(
    claims: Iterable[Json],
    pending: Sequence[Json] | None,
    reasons: Mapping[str, Json],
    explained: Mapping[str, Json] = _NONE,
) -> list[Json]:
    """Return what waits, the longest first.

    ``claims`` are facts of claims, ``pending`` pods that are Pending, None where nobody asked for them. A claim that no pod wants
    waits for nobody. A pod whose claim has not been made of its template yet waits too, for no claim: its ``claim`` is "". ``reasons`` by
    namespace/name of claims go before those that are ``explained`` by namespace/name of pods, and both before what the scheduler says.
    """
    wanted: dict[str, list[Json]] = {}
    without: list[Json] = []
    for pod in pending or ():
        for name in _claims_of(pod):
            if name:
                wanted.setdefault(f"{pod['metadata']['namespace']}/{name}", []).append(pod)
            else:
                without.append(pod)
    found = []
    for each in claims:
        name = f"{each['namespace']}/{each['name']}"
        pods = wanted.get(name, [])
        if each["allocated"] or each["deleting"] or not (pods or each["pods"]):
            continue
        found.append(
            {
                "claim": name,
                "pods": sorted({*each["pods"], *(str(pod["metadata"]["name"]) for pod in pods)}),
                "classes": each["device_classes"],
                "since": min([_since(pod) for pod in pods], default=each["created"]),
                "reason": _reason(name, pods, reasons, explained, asked=pending is not None),
            }
        )
    for pod in without:
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        found.append(
            {
                "claim": "",
                "pods": [str(pod["metadata"]["name"])],
                "classes": [],
                "since": _since(pod),
                "reason": _reason(name, [pod], reasons, explained, asked=True),
            }
        )
    return sorted(found, key=lambda each: (str(each["since"]), str(each["claim"]), each["pods"]))


def unexplained(pending: Iterable[Json], reasons: Mapping[str, Json]) -> list[Json]:
    """Return the pods that wait for devices and of which nobody has said why, the longest first."""
    found = []
    for pod in pending:
        place, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        wanted = [] if pod["spec"].get("nodeName") else _claims_of(pod)
        if any(f"{place}/{each or name}" not in reasons for each in wanted):
            found.append(pod)
    return sorted(found, key=lambda pod: (_since(pod), str(pod["metadata"]["namespace"]), str(pod["metadata"]["name"])))


def _claims_of(pod: Json) -> list[str]:
    """The names of the claims that a pod wants; "" for one that is still to be made of a template."""
    made = {
        each["name"]: each.get("resourceClaimName")
        for each in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    }
    found = []
    for each in (pod.get("spec") or {}).get("resourceClaims") or ():
        if each.get("resourceClaimName"):
            found.append(str(each["resourceClaimName"]))
        elif each["name"] not in made:
            found.append("")
        elif made[each["name"]]:  # a template may say that no claim is needed
            found.append(str(made[each["name"]]))
    return list(dict.fromkeys(found))


def _scheduled(pod: Json) -> Json:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == "PodScheduled"), {})


def _since(pod: Json) -> str:
    return str(_scheduled(pod).get("lastTransitionTime") or pod["metadata"].get("creationTimestamp") or "")


def _reason(
    name: str, pods: Sequence[Json], reasons: Mapping[str, Json], explained: Mapping[str, Json], *, asked: bool
) -> Json:
    places = [f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in pods]
    worked_out = next((explained[each] for each in places if each in explained), None)
    given = reasons.get(name) or worked_out
    if given:
        return {
            "source": GIVEN if name in reasons else EXPLAINED,
            **{key: str(given.get(key) or "") for key in ("code", "message", "remedy")},
        }
    for pod in pods:
        condition = _scheduled(pod)
        if condition.get("status") == "False":
            return {
                "source": SCHEDULER,
                "code": str(condition.get("reason") or ""),
                "message": str(condition.get("message") or ""),
                "remedy": "",
            }
    message = "" if not asked else "The scheduler has said nothing of its pods yet." if pods else "No pod of it waits."
    return {"source": NOBODY, "code": "", "message": message, "remedy": ""}
