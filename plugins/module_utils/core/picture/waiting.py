# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Who waits for devices, since when, and why: claims without an allocation, by the pods that want them. Pure.

Facts: k8s.io/api/core/v1/types.go (PodScheduled, schedulingGates, resourceClaims, resourceClaimStatuses).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Json = dict[str, Any]
#: Who says why a claim waits: whoever asked for the report, the scheduler, or nobody.
GIVEN, SCHEDULER, NOBODY = "given", "scheduler", "nobody"


def waiting(claims: Iterable[Json], pending: Sequence[Json] | None, reasons: Mapping[str, Json]) -> list[Json]:
    """Return what waits, the longest first.

    ``claims`` are facts of claims, ``pending`` pods that are Pending, None where nobody asked for them. A claim that no pod wants
    waits for nobody. A pod whose claim has not been made of its template yet waits too, for no claim: its ``claim`` is "".
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
                "reason": _reason(name, pods, reasons, asked=pending is not None),
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
                "reason": _reason(name, [pod], reasons, asked=True),
            }
        )
    return sorted(found, key=lambda each: (str(each["since"]), str(each["claim"]), each["pods"]))


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


def _reason(name: str, pods: Sequence[Json], reasons: Mapping[str, Json], *, asked: bool) -> Json:
    given = reasons.get(name)
    if given:
        return {
            "source": GIVEN,
            "code": str(given.get("code") or ""),
            "message": str(given.get("message") or ""),
            "remedy": str(given.get("remedy") or ""),
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
