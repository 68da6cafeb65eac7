# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan a drain of devices: which devices of a node, which taint rules, which holders, and which problems.

No side effects. The only state is in the cluster: each rule contains its operation. A new run reads the cluster and
resumes an interrupted run.

Source: k8s.io/api/resource (ResourceClaim reservedFor, DeviceTaintRule). The kubelet reports that a pod has ended, and
releases its claims, only after the driver has unprepared them (pkg/kubelet SyncTerminatingPod).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from .._kubernetes.client import was_just_written
from .._kubernetes.taint_rules import LONGEST_LABEL, NODE_LABEL, DesiredRule
from .._migration.migration_inventory import Problem, controller
from ..core.cluster import inventory
from ..core.cluster.claims import tolerates
from ..core.cluster.inventory import Json
from ..core.dra.device_lookup import attribute_of
from ..core.errors import AcceleratorError

MANAGER = "dra.accelerators.device-drain"
#: The label with the operation of a drain's rule, and the annotations with its start time and its node.
OPERATION_LABEL = "dra.accelerators/drain"
SINCE, FOR_NODE = "dra.accelerators/drain-since", "dra.accelerators/drain-node"
#: The annotation with the time when a later run resumed the drain. The age of a rule counts from the last such time.
RENEWED = "dra.accelerators/drain-renewed"
#: The time is updated if it is older than this, in seconds.
RENEW_SECONDS = 600.0
TAINT_KEY, EFFECT = "dra.accelerators/drain", "NoSchedule"
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_ENDED = ("Succeeded", "Failed")


class DrainError(AcceleratorError):
    """A requested drain is not possible."""

    default_code = "drain"


@dataclass(frozen=True)
class DrainRequest:
    """The requested drain.

    Without ``devices`` and ``claims``, it applies to all devices of the node. ``claims`` are namespaces and names. With
    ``overlapping``, it also applies to devices that use the same counters as ``devices``.
    """

    node: str
    operation: str = "maintenance"
    drivers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    overlapping: bool = False
    claims: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Consent:
    """The consent to evictions. If ``evict`` is true, pods are evicted. If it is false, the drain waits until they end.

    If ``evict`` is None, a drain of devices with pods is rejected.
    """

    evict: bool | None = None
    evict_unmanaged: bool = False


@dataclass(frozen=True)
class Target:
    """A device, or with an empty name all devices of a pool."""

    driver: str
    pool: str
    device: str = ""

    def has(self, result: Json) -> bool:
        """Return whether an allocation result belongs to the target."""
        return (result.get("driver"), result.get("pool")) == (self.driver, self.pool) and self.device in (
            "",
            result.get("device"),
        )

    def __str__(self) -> str:
        return f"{self.driver}/{self.pool}/{self.device or '*'}"


@dataclass(frozen=True)
class HeldClaim:
    """A claim with drained devices.

    ``pods`` are names and UIDs, ``groups`` are names of pod groups, and ``others`` are all other consumers.
    """

    namespace: str
    name: str
    devices: tuple[str, ...]
    pods: tuple[tuple[str, str], ...] = ()
    groups: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    tolerates: bool = False

    @property
    def key(self) -> str:
        """Return namespace and name."""
        return f"{self.namespace}/{self.name}"

    def document(self) -> dict[str, Any]:
        """Return the claim as module data."""
        return {
            "namespace": self.namespace,
            "name": self.name,
            "devices": list(self.devices),
            "pods": [name for name, _uid in self.pods],
            "tolerates": self.tolerates,
        }


@dataclass(frozen=True)
class HoldingPod:
    """A pod that has not ended, and for which a claim with drained devices is reserved.

    ``owner`` is the controller that creates a replacement, or empty.
    """

    namespace: str
    name: str
    uid: str
    claims: tuple[str, ...]
    owner: str = ""
    deleting: bool = False

    @property
    def key(self) -> str:
        """Return namespace and name."""
        return f"{self.namespace}/{self.name}"

    def document(self) -> dict[str, Any]:
        """Return the pod as module data."""
        return {
            "namespace": self.namespace,
            "name": self.name,
            "uid": self.uid,
            "claims": list(self.claims),
            "owner": self.owner,
            "deleting": self.deleting,
        }


@dataclass(frozen=True)
class Plan:
    """The desired state: these rules exist, and ``pods`` have ended.

    ``stale`` are the operation's rules for other devices. With ``is_new``, a rule was written so recently that the
    scheduler can still allocate the devices.
    """

    targets: tuple[Target, ...]
    rules: tuple[DesiredRule, ...] = ()
    stale: tuple[str, ...] = ()
    claims: tuple[HeldClaim, ...] = ()
    pods: tuple[HoldingPod, ...] = ()
    problems: tuple[Problem, ...] = field(default_factory=tuple)
    is_new: bool = False


def check_operation(request: DrainRequest) -> None:
    """Validate the operation's name. Raises DrainError with code invalid-operation."""
    if not _LABEL_VALUE.fullmatch(request.operation):
        raise DrainError(
            f"The operation {request.operation!r} is not the value of a label. Expected at most {LONGEST_LABEL} letters, digits, dashes, underscores, "
            "and dots, with a letter or digit at the beginning and the end",
            code="invalid-operation",
        )


def targets_of(
    request: DrainRequest, slices: Sequence[Json], claims: Iterable[Json], rules: Iterable[Json]
) -> list[Target]:
    """Return the targets of the drain.

    Raises DrainError with code no-device for a device that is not published, not allocated, and not drained already.
    """
    published = _published_on(request, slices)
    allocated = [
        (inventory.name_of(claim), inventory.key_of(one)) for claim in claims for one in inventory.results(claim)
    ]
    known = [_target_of(each) for each in rules]
    pools = _pools_on(published, slices, known)
    # A driver without published devices uses the node's name as its pool.
    pools |= {(driver, pool) for _claim, (driver, pool, _name) in allocated if pool == request.node}
    if request.drivers:
        pools = {each for each in pools if each[0] in request.drivers} | {
            (each, request.node) for each in request.drivers
        }
    if request.claims and not request.devices:
        # Devices stay drained after these claims have released them.
        chosen = {key for claim, key in allocated if claim in request.claims and key[:2] in pools}
        chosen |= {(each.driver, each.pool, each.device) for each in known if each and each.device}
        return [Target(*key) for key in sorted(chosen)]
    if not request.devices:
        return [Target(*each) for each in sorted(pools)]
    available = {key for key in published if key[:2] in pools} | {key for _claim, key in allocated if key[:2] in pools}
    available |= {(each.driver, each.pool, each.device) for each in known if each and each.device}
    missing = [name for name in request.devices if name not in {key[2] for key in available}]
    if missing:
        raise DrainError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not published on {request.node}",
            hint="Nothing was changed. Use the device names in ResourceSlices, which the module accelerator_info returns.",
            code="no-device",
        )
    chosen = {key for key in available if key[2] in request.devices}
    if request.overlapping:
        chosen |= overlapping(slices, chosen)
    return [Target(*key) for key in sorted(chosen)]


def claims_on(
    request: DrainRequest, slices: Sequence[Json], rules: Iterable[Json]
) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Return a function that returns a claim if it holds a device of the node, and None for other claims."""
    pools = _pools_on(_published_on(request, slices), slices, [_target_of(each) for each in rules])

    def keep(claim: dict[str, Any]) -> dict[str, Any] | None:
        keys = (inventory.key_of(one) for one in inventory.results(claim))
        return claim if any(pool == request.node or (driver, pool) in pools for driver, pool, _name in keys) else None

    return keep


def _published_on(request: DrainRequest, slices: Sequence[Json]) -> list[inventory.Key]:
    return [
        (str(one["driver"]), str(one["pool"]), str(one["name"]))
        for one in inventory.devices(slices)
        if one["node"] in ("", request.node)
    ]


def _pools_on(
    complete_pools: Iterable[inventory.Key], slices: Iterable[Json], known: Iterable[Target | None]
) -> set[tuple[str, str]]:
    """Return the pools of the node, as driver and name: published pools, and pools in the operation's rules."""
    pools = {(driver, pool) for driver, pool, _name in complete_pools}
    pools |= {(str(each["spec"]["driver"]), str(each["spec"]["pool"]["name"])) for each in slices}
    return pools | {(each.driver, each.pool) for each in known if each}


def overlapping(slices: Iterable[Json], chosen: Iterable[inventory.Key]) -> set[inventory.Key]:
    """Return the devices that cannot be allocated together with one of these, because they use the same counters."""
    found = {(one["driver"], one["pool"], one["name"]): one for one in inventory.devices(slices)}
    chosen_devices = [found[key] for key in chosen if key in found]
    return {key for key, one in found.items() if any(_excludes(one, each) for each in chosen_devices)}


def _excludes(one: Json, other: Json) -> bool:
    """Return whether a counter does not suffice for both devices. ``takes`` is a device's use of a counter, and ``left`` the rest."""
    if (one["driver"], one["pool"]) != (other["driver"], other["pool"]):
        return False
    return any(
        amount["takes"] + other["draws"].get(name, {}).get(counter, {"takes": 0})["takes"] > amount["left"]
        for name, counters in one["draws"].items()
        for counter, amount in counters.items()
        if counter in other["draws"].get(name, {})
    )


def complete_pools(slices: Sequence[Json], request: DrainRequest) -> tuple[Target, ...]:
    """Return the node's pools that have a device, belong to a requested driver, and have all their slices."""
    pools: dict[tuple[str, str], list[Json]] = {}
    for each in slices:
        pools.setdefault((str(each["spec"]["driver"]), str(each["spec"]["pool"]["name"])), []).append(each["spec"])
    found = []
    for key, specs in sorted(pools.items()):
        newest = max(int(each["pool"].get("generation", 0)) for each in specs)
        current = [each for each in specs if int(each["pool"].get("generation", 0)) == newest]
        complete = len(current) >= int(current[0]["pool"].get("resourceSliceCount", 1))
        if (
            complete
            and any(each.get("devices") for each in current)
            and (not request.drivers or key[0] in request.drivers)
        ):
            found.append(Target(*key))
    return tuple(found)


def attribute_differences(
    slices: Sequence[Json], request: DrainRequest, pools: Iterable[Target], attributes: Mapping[str, str]
) -> list[str]:
    """Return a message for each pool that is not published, or whose devices have other values of these attributes.

    Devices without the attribute are ignored if another device of the pool has it. Leading zeros in versions are ignored.
    """
    published = set(complete_pools(slices, request))
    problems = [f"{each} is not published" for each in pools if each not in published]
    for target in sorted(published & set(pools), key=str):
        devices = [
            each for each in inventory.devices(slices) if (each["driver"], each["pool"]) == (target.driver, target.pool)
        ]
        for name, value in attributes.items():
            values = {
                str(found)
                for one in devices
                if (found := attribute_of(one["attributes"], target.driver, name)) is not None
            }
            if not values:
                problems.append(f"{target} has no attribute {name}, expected {value}")
            elif {_plain_version(each) for each in values} != {_plain_version(value)}:
                problems.append(f"{target} has {name} {', '.join(sorted(values))}, expected {value}")
    return problems


def _plain_version(text: str) -> str:
    """Return a version as a semantic version: ``24.1.rc2`` is ``24.1.0-rc.2``, ``580.95.05`` is ``580.95.5``."""
    numbers, dash, rest = re.sub(r"^([0-9.]+)\.rc", r"\1-rc.", text.lower()).partition("-")
    parts = [str(int(part)) if part.isdecimal() else part for part in numbers.split(".")]
    if all(part.isdecimal() for part in parts):
        parts += ["0"] * (3 - len(parts))
    return ".".join(parts) + dash + rest


def rule_name(request: DrainRequest, target: Target) -> str:
    """Return the name of the rule for a target. It is the same in each run of the operation."""
    identity = "\n".join((request.operation, request.node, target.driver, target.pool, target.device))
    return f"dra-accelerators-drain-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def wanted_rules(request: DrainRequest, targets: Iterable[Target], now: str) -> tuple[DesiredRule, ...]:
    """Return the rules that prevent new allocations of the targets."""
    return tuple(
        DesiredRule(
            name=rule_name(request, each),
            selector={
                key: value
                for key, value in (("driver", each.driver), ("pool", each.pool), ("device", each.device))
                if value
            },
            taint={"key": TAINT_KEY, "value": request.operation, "effect": EFFECT},
            reason=request.reason,
            node=request.node,
            labels={OPERATION_LABEL: request.operation},
            initial_annotations={SINCE: now, FOR_NODE: request.node},
        )
        for each in targets
    )


def rule_facts(rule: Json) -> dict[str, str]:
    """Return the facts of a drain's rule as module data."""
    metadata, selector = rule["metadata"], (rule.get("spec") or {}).get("deviceSelector") or {}
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    return {
        "name": metadata["name"],
        "operation": labels.get(OPERATION_LABEL, ""),
        "node": notes.get(FOR_NODE) or labels.get(NODE_LABEL, ""),
        "driver": selector.get("driver", ""),
        "pool": selector.get("pool", ""),
        "device": selector.get("device", ""),
        "since": notes.get(SINCE, ""),
        "renewed": notes.get(RENEWED, ""),
    }


def rule_age(rule: Json, now: str) -> float | None:
    """Return the seconds since a run last used a rule, according to the rule; None if it has no timestamps.

    The timestamps are the API server's creation time and the times when runs started or resumed the drain.
    """
    metadata = rule["metadata"]
    notes = metadata.get("annotations") or {}
    times = (_parse_time(each) for each in (metadata.get("creationTimestamp"), notes.get(SINCE), notes.get(RENEWED)))
    known = [each for each in times if each is not None]
    current = _parse_time(now)
    return (current - max(known)).total_seconds() if known and current is not None else None


def is_abandoned(rule: Json, now: str, older_than: float) -> bool:
    """Return whether a rule is at least ``older_than`` seconds old. With 0, every rule is abandoned. A rule without timestamps is not."""
    found = rule_age(rule, now)
    return older_than <= 0 or (found is not None and found >= older_than)


def _parse_time(text: Any) -> datetime | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return None


def _target_of(rule: Json) -> Target | None:
    facts = rule_facts(rule)
    return Target(facts["driver"], facts["pool"], facts["device"]) if facts["driver"] and facts["pool"] else None


def held_by(targets: Sequence[Target], claims: Iterable[Json], request: DrainRequest) -> tuple[HeldClaim, ...]:
    """Return the claims with allocations from the targets.

    This includes claims with admin access, which only monitor devices.
    """
    taint = {"key": TAINT_KEY, "value": request.operation, "effect": EFFECT}
    found = []
    for claim in claims:
        drained = [one for one in inventory.results(claim) if any(each.has(one) for each in targets)]
        if not drained or (request.claims and inventory.name_of(claim) not in request.claims):
            continue
        users = list((claim.get("status") or {}).get("reservedFor") or ())
        found.append(
            HeldClaim(
                namespace=str(claim["metadata"]["namespace"]),
                name=str(claim["metadata"]["name"]),
                devices=tuple("/".join(inventory.key_of(one)) for one in drained),
                pods=tuple((str(one["name"]), str(one["uid"])) for one in users if one.get("resource") == "pods"),
                groups=tuple(str(one["name"]) for one in users if one.get("resource") == "podgroups"),
                others=tuple(
                    f"{one.get('resource')} {one.get('name')}"
                    for one in users
                    if one.get("resource") not in ("pods", "podgroups")
                ),
                tolerates=all(any(tolerates(each, taint) for each in one.get("tolerations") or ()) for one in drained),
            )
        )
    return tuple(sorted(found, key=lambda each: each.key))


def holders_of(claims: Iterable[HeldClaim], pods: Iterable[Json]) -> tuple[HoldingPod, ...]:
    """Return the pods that have not ended and that claims are reserved for, directly or through their pod group."""
    by_name = {(str(each["metadata"]["namespace"]), str(each["metadata"]["name"])): each for each in pods}
    users: dict[tuple[str, str], list[str]] = {}
    for claim in claims:
        for name, uid in claim.pods:
            pod = by_name.get((claim.namespace, name))
            if pod is not None and pod["metadata"].get("uid") == uid:
                users.setdefault((claim.namespace, name), []).append(claim.name)
        for key, pod in by_name.items():
            group = ((pod.get("spec") or {}).get("schedulingGroup") or {}).get("podGroupName")
            if key[0] == claim.namespace and group and group in claim.groups:
                users.setdefault(key, []).append(claim.name)
    found = []
    for key, names in sorted(users.items()):
        pod = by_name[key]
        if (pod.get("status") or {}).get("phase") in _ENDED:
            continue
        owner = controller(pod["metadata"])
        found.append(
            HoldingPod(
                *key,
                uid=str(pod["metadata"]["uid"]),
                claims=tuple(dict.fromkeys(names)),
                owner=f"{owner.get('kind')}/{owner.get('name')}" if owner else "",
                deleting=bool(pod["metadata"].get("deletionTimestamp")),
            )
        )
    return tuple(found)


def problems_of(
    request: DrainRequest, claims: Iterable[HeldClaim], pods: Sequence[HoldingPod], consent: Consent
) -> tuple[Problem, ...]:
    """Return the problems that prevent a drain, before anything changes."""
    found = [
        Problem(
            "unknown-consumer",
            f"Claim {each.key} is reserved for {', '.join(each.others)}. This module can only evict pods and pod groups",
            "Delete this consumer.",
            blocks=True,
        )
        for each in claims
        if each.others
    ]
    staying = [each for each in pods if not each.deleting]
    if consent.evict is None and staying:
        found.append(
            Problem(
                "no-consent",
                f"These pods use devices of {request.node}: {describe_pods(staying)}",
                "Set evict to true to evict them, or to false to wait until they have ended.",
                blocks=True,
            )
        )
    alone = [each for each in staying if not each.owner]
    if consent.evict and alone and not consent.evict_unmanaged:
        found.append(
            Problem(
                "no-controller",
                f"These pods have no controller that creates a replacement: {', '.join(each.key for each in alone)}",
                "Delete the pods that are not needed, or allow their eviction (evict_unmanaged) and keep their manifests.",
                blocks=True,
            )
        )
    return tuple(found)


def describe_pods(pods: Iterable[HoldingPod]) -> str:
    """Return the names of pods with their claims, for messages."""
    return ", ".join(
        f"{each.key} (claim{'s' if len(each.claims) > 1 else ''} {', '.join(each.claims)})" for each in pods
    )


def plan(
    request: DrainRequest,
    consent: Consent,
    *,
    slices: Sequence[Json],
    claims: Sequence[Json],
    pods: Sequence[Json],
    rules: Sequence[Json],
    now: str,
) -> Plan:
    """Return the plan of a drain. Raises DrainError.

    ``rules`` are the operation's rules for this node. All objects were read at ``now`` or later.
    """
    targets = tuple(targets_of(request, slices, claims, rules))
    wanted = wanted_rules(request, targets, now)
    names = {each.name for each in wanted}
    stale = tuple(sorted(str(each["metadata"]["name"]) for each in rules if each["metadata"]["name"] not in names))
    held = held_by(targets, claims, request)
    holders = holders_of(held, pods)
    return Plan(
        targets=targets,
        rules=wanted,
        stale=stale,
        claims=held,
        pods=holders,
        problems=problems_of(request, held, holders, consent),
        is_new=any(was_just_written(each, MANAGER, now) for each in rules),
    )


def blockers(
    claims: Sequence[HeldClaim], pods: Sequence[HoldingPod], refusals: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the remaining holders with the reason, if known: each pod, and each claim without a pod."""
    tolerant = {each.key for each in claims if each.tolerates}
    found = []
    for each in pods:
        if each.uid in refusals:
            reason = refusals[each.uid]
        elif each.deleting:
            reason = "it is terminating"
        elif any(f"{each.namespace}/{name}" in tolerant for name in each.claims):
            reason = f"its claim tolerates the taint {TAINT_KEY}, so it can be scheduled here again"
        else:
            reason = "it is running"
        found.append({"pod": each.key, "claims": list(each.claims), "reason": reason})
    with_pods = {f"{each.namespace}/{name}" for each in pods for name in each.claims}
    return found + [
        {"pod": "", "claims": [each.key], "reason": "it is allocated, and no running pod uses it"}
        for each in claims
        if each.key not in with_pods
    ]
