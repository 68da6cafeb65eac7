# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Find the waiting claims: unallocated claims with pods, since when they wait, and why. No side effects.

Source: k8s.io/api/core/v1/types.go (PodScheduled, schedulingGates, resourceClaims, resourceClaimStatuses).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Json = dict[str, Any]
#: The source of a reason: the caller of the report, an explanation from the cluster's state, the scheduler, or none.
GIVEN, EXPLAINED, SCHEDULER, NOBODY = "given", "explained", "scheduler", "nobody"
_NONE: Mapping[str, Json] = MappingProxyType({})


def waiting(
    claims: Iterable[Json],
    pending: Sequence[Json] | None,
    reasons: Mapping[str, Json],
    explained: Mapping[str, Json] = _NONE,
) -> list[Json]:
    """Return the waiting claims, the longest wait first.

    ``claims`` are facts of claims. ``pending`` are the pending pods, None if they were not queried. A claim without
    pods does not wait. A pod whose claim was not yet created from its template waits, too, with "" as ``claim``.
    ``reasons`` (by claim namespace/name) take precedence over ``explained`` (by pod namespace/name), and both over the
    scheduler's message.
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
    """Return the pods that wait for devices and have no reason yet, the longest wait first."""
    found = []
    for pod in pending:
        place, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        wanted = [] if pod["spec"].get("nodeName") else _claims_of(pod)
        if any(f"{place}/{each or name}" not in reasons for each in wanted):
            found.append(pod)
    return sorted(found, key=lambda pod: (_since(pod), str(pod["metadata"]["namespace"]), str(pod["metadata"]["name"])))


def _claims_of(pod: Json) -> list[str]:
    """Return the names of a pod's claims; "" for a claim that was not yet created from its template."""
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
        elif made[each["name"]]:  # a template can result in no claim
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
