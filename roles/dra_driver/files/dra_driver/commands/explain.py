# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``explain``: explain why a claim is or is not prepared on this node, from all facts known on the node.

Facts that could not be read are reported as not known. This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..claims.store.records import ClaimRecord
from ..core.quantity import parse
from ..core.times import text_of
from .claims import device_of

NOT_EVALUATED = "not evaluated on the node; run the why playbook: ansible-playbook dra.accelerators.why"
DELETION_TIME = "deletionTimestamp"


@dataclass(frozen=True)
class Facts:
    """The facts about a claim of one driver.

    ``claim`` is the API server's object, or None with ``api_problem`` as the reason. ``published`` are this node's
    devices in the API server. ``faults`` maps device UUIDs to faults. ``others`` are the records of the driver's other
    claims. ``log_lines`` are the driver's last log lines about this claim.
    """

    name: str
    driver: str
    pool: str
    boot_id: str
    claim: Mapping[str, Any] | None = None
    api_problem: str = ""
    record: ClaimRecord | None = None
    store_problem: str = ""
    others: Sequence[ClaimRecord] = ()
    published: Sequence[Mapping[str, Any]] | None = None
    counters: Sequence[Mapping[str, Any]] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[str] = ()
    runs: bool = True
    cdi_path: str = ""
    cdi: Mapping[str, Any] | None = None
    companions: Sequence[Mapping[str, str]] = ()
    containers: Sequence[str] = ()
    log_lines: Sequence[str] = ()


def explain(facts: Facts) -> dict[str, Any]:
    """Return the explanation as a mapping."""
    claim = facts.claim or {}
    status = claim.get("status") or {}
    allocation = (status.get("allocation") or {}).get("devices") or {}
    results = [each for each in allocation.get("results") or () if each.get("driver") == facts.driver]
    node_results = [each for each in results if each.get("pool") == facts.pool]
    answer: dict[str, Any] = {
        "claim": facts.name,
        "uid": (claim.get("metadata") or {}).get("uid") or (facts.record.uid if facts.record else ""),
        "verdict": _verdict(facts, results, node_results),
        "driver": facts.driver if facts.runs else f"{facts.driver} (no process answers)",
        "in the way": list(facts.problems),
        "not known": [each for each in (facts.api_problem, facts.store_problem) if each],
    }
    published = {str(each.get("name")): each for each in facts.published or ()}
    if results:
        answer["allocation"] = [_result(each, facts, published) for each in results]
        answer["configurations"] = [
            _configuration(each, facts.driver, results) for each in allocation.get("config") or ()
        ]
    if facts.record is not None:
        answer["record"] = _record(facts.record, facts.boot_id)
        answer["the kubelet gets"] = [device.cdi_id for device in facts.record.devices if device.cdi_id]
        answer["CDI file"] = {
            "path": facts.cdi_path,
            "there": facts.cdi is not None,
            "devices": [str(each.get("name")) for each in (facts.cdi or {}).get("devices") or ()],
        }
    answer["companions"] = [f"{each['unit']} ({each['state']})" for each in facts.companions]
    answer["pods"] = [f"{each.get('resource')} {each.get('name')}" for each in status.get("reservedFor") or ()]
    answer["containers"] = list(facts.containers)
    if facts.claim is not None and not allocation:
        answer["why no device of this node"] = _unallocated(facts)
    answer["the driver said"] = list(facts.log_lines)
    return answer


def _verdict(facts: Facts, results: Sequence[Mapping[str, Any]], node_results: Sequence[Mapping[str, Any]]) -> str:
    record, claim = facts.record, facts.claim
    uid = ((claim or {}).get("metadata") or {}).get("uid")
    if record is not None and record.prepared:
        if claim is not None and uid != record.uid:
            return "prepared for a claim of this name that was deleted; it is undone when its pods have ended"
        if claim is not None and not _has_same_devices(record, node_results):
            return "prepared with devices that differ from its allocation; they are unprepared when nothing uses them, then it is prepared again"
        return "prepared"
    if record is not None:
        return "half prepared: an operation is running, or failed and could not be rolled back"
    if claim is None:
        return f"not prepared here; the claim could not be read: {facts.api_problem or 'it does not exist'}"
    if (claim.get("metadata") or {}).get(DELETION_TIME):
        return "not prepared: the claim is being deleted"
    if not (claim.get("status") or {}).get("allocation"):
        return "not prepared: the scheduler has not allocated it"
    if not results:
        return "not prepared here: it has no device of this driver"
    if not node_results:
        return f"not prepared here: its devices are in the pool {results[0].get('pool')}, this node's is {facts.pool}"
    if not facts.runs:
        return "not prepared: no driver answers on this node"
    if facts.problems:
        return f"not prepared: the driver is not ready: {facts.problems[0]}"
    if not (claim.get("status") or {}).get("reservedFor"):
        return "not prepared: no pod has reserved it"
    return "not prepared: the kubelet has not asked for it, or it was refused; what the driver said is below"


def _has_same_devices(record: ClaimRecord, node_results: Iterable[Mapping[str, Any]]) -> bool:
    def key(request: Any, device: Any, share: Any) -> tuple[str, str, str]:
        return (str(request), str(device), str(share or ""))

    held = sorted(key(each.request, each.name, each.share_id) for each in record.devices)
    return held == sorted(key(each.get("request"), each.get("device"), each.get("shareID")) for each in node_results)


def _result(result: Mapping[str, Any], facts: Facts, published: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    name = str(result.get("device"))
    here = result.get("pool") == facts.pool
    device = published.get(name) if here else None
    uuid = _text(device, "uuid") or _text(device, "parentUUID")
    held = [each for each in (facts.record.devices if facts.record else ()) if each.name == name]
    uuids = {uuid, *(each for device in held for each in device.device_uuids)}
    return {
        "request": result.get("request"),
        "device": name,
        "pool": result.get("pool"),
        "share": result.get("shareID"),
        "administrator's access": bool(result.get("adminAccess")) or None,
        "published": None if not here or facts.published is None else device is not None,
        "what it is": _attributes(device),
        "taints": [f"{each.get('key')}:{each.get('effect')}" for each in (device or {}).get("taints") or ()],
        "fault": "; ".join(facts.faults[each] for each in sorted(filter(None, uuids)) if facts.faults.get(each)),
    }


def _attributes(device: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        str(name).rpartition("/")[2]: next(iter(value.values()), None)
        for name, value in ((device or {}).get("attributes") or {}).items()
    }


def _text(device: Mapping[str, Any] | None, name: str) -> str:
    return str(_attributes(device).get(name) or "")


def _configuration(entry: Mapping[str, Any], driver: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    opaque = entry.get("opaque") or {}
    parameters = opaque.get("parameters") or {}
    named = [str(each) for each in entry.get("requests") or ()]
    requests = sorted({str(each.get("request")) for each in results})
    holds = [each for each in requests if not named or each in named or each.partition("/")[0] in named]
    return {
        "kind": parameters.get("kind"),
        "from": {"FromClass": "the DeviceClass", "FromClaim": "the claim"}.get(
            str(entry.get("source")), entry.get("source")
        ),
        "for requests": holds,
        "for another driver": opaque.get("driver") if opaque.get("driver") != driver else None,
        "holds": {key: value for key, value in parameters.items() if key not in ("apiVersion", "kind")},
    }


def _record(record: ClaimRecord, boot_id: str) -> dict[str, Any]:
    return {
        "state": record.state,
        "since": text_of(record.created_at),
        "of this boot": record.boot_id == boot_id,
        "devices": [device_of(device) for device in record.devices],
    }


def _unallocated(facts: Facts) -> dict[str, Any]:
    """Return for each request the node's devices that are excluded by taints, claims, or lack of capacity."""
    if facts.published is None:
        return {"not known": "the API server was not asked what this node publishes"}
    requests = ((facts.claim or {}).get("spec") or {}).get("devices", {}).get("requests") or ()
    left = remaining_counters(facts.counters, facts.published, facts.others)
    answer: dict[str, Any] = {}
    for request in requests:
        alternatives = [request["exactly"]] if request.get("exactly") else list(request.get("firstAvailable") or ())
        for alternative in alternatives:
            name = str(request.get("name")) + (f"/{alternative['name']}" if alternative.get("name") else "")
            answer[name] = _explain_alternative(alternative, facts, left)
    answer["beyond this"] = (
        "selectors, taint rules, constraints between requests, allocations that no pod of this node has begun with, and other nodes "
        "are the scheduler's: see the pod's Events"
    )
    return answer


def _explain_alternative(
    alternative: Mapping[str, Any], facts: Facts, left: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Return which devices are excluded for one alternative of a request. ``left`` is the result of ``remaining_counters``."""
    excluded: dict[str, list[str]] = {}
    free: list[str] = []
    for device in facts.published or ():
        name = str(device.get("name"))
        reason = (
            _untolerated_taint(device, alternative)
            or _user_of(device, facts.others)
            or _exhausted_counter(device, left)
        )
        if reason:
            excluded.setdefault(reason, []).append(name)
        else:
            free.append(name)
    return {
        "class": str(alternative.get("deviceClassName") or ""),
        "wants": _requested_number(alternative),
        "ruled out": {reason: f"{len(names)}: {_first_names(names)}" for reason, names in excluded.items()},
        "nothing here rules out": f"{len(free)}: {_first_names(free)}" if free else "none",
        "selectors of the request and its class": NOT_EVALUATED,
    }


def _requested_number(alternative: Mapping[str, Any]) -> str:
    if alternative.get("allocationMode") == "All":
        return (
            "all devices that fit, with administrator's access"
            if alternative.get("adminAccess")
            else "all devices that fit"
        )
    return str(alternative.get("count") or 1)


def _untolerated_taint(device: Mapping[str, Any], alternative: Mapping[str, Any]) -> str:
    for taint in device.get("taints") or ():
        if taint.get("effect") not in ("NoSchedule", "NoExecute"):
            continue
        if not any(_tolerates(each, taint) for each in alternative.get("tolerations") or ()):
            return f"taint {taint.get('key')}:{taint.get('effect')}"
    return ""


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("operator") == "Exists":
        return not toleration.get("key") or toleration["key"] == taint.get("key")
    return toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")


def _user_of(device: Mapping[str, Any], records: Iterable[ClaimRecord]) -> str:
    if device.get("allowMultipleAllocations"):
        return ""
    for record in records:
        if any(each.name == device.get("name") and not each.admin for each in record.devices):
            return f"claim {record.describe()} has it"
    return ""


def remaining_counters(
    counters: Iterable[Mapping[str, Any]], published: Iterable[Mapping[str, Any]], records: Iterable[ClaimRecord]
) -> dict[str, dict[str, int]]:
    """Return the remaining value of each counter after the recorded claims, by counter set and counter."""
    left = {
        str(each.get("name")): {
            str(name): int(parse(str(entry["value"]))) for name, entry in (each.get("counters") or {}).items()
        }
        for each in counters
    }
    held = {device.name for record in records for device in record.devices if not device.admin}
    for device in published:
        if device.get("name") in held:
            for each in device.get("consumesCounters") or ():
                counters_left = left.setdefault(str(each.get("counterSet")), {})
                for name, entry in (each.get("counters") or {}).items():
                    counters_left[str(name)] = counters_left.get(str(name), 0) - int(parse(str(entry["value"])))
    return left


def _exhausted_counter(device: Mapping[str, Any], left: Mapping[str, Mapping[str, int]]) -> str:
    for each in device.get("consumesCounters") or ():
        counters_left = left.get(str(each.get("counterSet")), {})
        for name, entry in (each.get("counters") or {}).items():
            if int(parse(str(entry["value"]))) > counters_left.get(str(name), 0):
                return f"insufficient capacity: claims use {name} of {each.get('counterSet')}"
    return ""


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
