# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Which devices of a node are drained, by which rules, who holds them, and what is in the way. Pure.

There is no state but the cluster's own: the rules bear the operation that they are of, and a run that was cut short is gone on with by looking
again.

Facts: k8s.io/api/resource (ResourceClaim reservedFor, DeviceTaintRule); the kubelet reports that a pod has ended, and lets its claims go, only
after the driver has unprepared them (pkg/kubelet SyncTerminatingPod).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ._migration_inventory import Problem, controller
from ._taint_rules import LONGEST_LABEL, NODE_LABEL, Wanted
from .core.cluster import inventory
from .core.cluster.claims import tolerates
from .core.cluster.inventory import Json
from .core.errors import AcceleratorError
from .core.published import attribute_of

MANAGER = "dra.accelerators.device-drain"
#: By these a rule of a drain is found again: the operation it is of, and for people since when and for which node.
OPERATION_LABEL = "dra.accelerators/drain"
SINCE, FOR_NODE = "dra.accelerators/drain-since", "dra.accelerators/drain-node"
#: When a later run has gone on with the drain: a rule is as old as its last sign of life.
RENEWED = "dra.accelerators/drain-renewed"
#: A sign of life is written again when the last one is older than that, in seconds.
RENEW_SECONDS = 600.0
TAINT_KEY, EFFECT = "dra.accelerators/drain", "NoSchedule"
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_ENDED = ("Succeeded", "Failed")


class DrainError(AcceleratorError):
    """What is asked for cannot be."""

    default_code = "drain"


@dataclass(frozen=True)
class Asked:
    """What is to be drained. Without ``devices`` and ``claims`` all devices of the node; ``claims`` are namespaces and names."""

    node: str
    operation: str = "maintenance"
    drivers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    overlapping: bool = False
    claims: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Consent:
    """Whether pods may be evicted: ``evict`` true does it, false waits until they have ended, None refuses where there are any."""

    evict: bool | None = None
    evict_unmanaged: bool = False


@dataclass(frozen=True)
class Target:
    """A device, or with an empty name all devices of a pool."""

    driver: str
    pool: str
    device: str = ""

    def has(self, result: Json) -> bool:
        """Whether what is allocated to a claim is of it."""
        return (result.get("driver"), result.get("pool")) == (self.driver, self.pool) and self.device in (
            "",
            result.get("device"),
        )

    def __str__(self) -> str:
        return f"{self.driver}/{self.pool}/{self.device or '*'}"


@dataclass(frozen=True)
class Held:
    """A claim that has devices which are drained. ``pods`` are names and UIDs, ``groups`` names of pod groups, ``others`` whatever else."""

    namespace: str
    name: str
    devices: tuple[str, ...]
    pods: tuple[tuple[str, str], ...] = ()
    groups: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    tolerates: bool = False

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"

    def document(self) -> dict[str, Any]:
        """Return it as a module does."""
        return {
            "namespace": self.namespace,
            "name": self.name,
            "devices": list(self.devices),
            "pods": [name for name, _uid in self.pods],
            "tolerates": self.tolerates,
        }


@dataclass(frozen=True)
class Holder:
    """A pod that a held claim is reserved for, and that has not ended. ``owner`` is who makes another one when it goes."""

    namespace: str
    name: str
    uid: str
    claims: tuple[str, ...]
    owner: str = ""
    deleting: bool = False

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"

    def document(self) -> dict[str, Any]:
        """Return it as a module does."""
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
    """What is to be so: the rules, and nobody of ``pods`` there any more. ``stale`` are rules of the operation for other devices."""

    targets: tuple[Target, ...]
    rules: tuple[Wanted, ...] = ()
    stale: tuple[str, ...] = ()
    claims: tuple[Held, ...] = ()
    pods: tuple[Holder, ...] = ()
    problems: tuple[Problem, ...] = field(default_factory=tuple)


def check(asked: Asked) -> None:
    """Refuse what is no name of an operation. Raises DrainError with code invalid-operation."""
    if not _LABEL_VALUE.fullmatch(asked.operation):
        raise DrainError(
            f"found {asked.operation!r} for the operation, expected a label's value: at most {LONGEST_LABEL} letters, digits, dashes, "
            "underscores and dots, a letter or digit first and last",
            code="invalid-operation",
        )


def targets_of(asked: Asked, slices: Sequence[Json], claims: Iterable[Json], rules: Iterable[Json]) -> list[Target]:
    """Return what is drained. Raises DrainError with code no-device for a device that is neither published nor held nor drained already."""
    published = [
        (str(one["driver"]), str(one["pool"]), str(one["name"]))
        for one in inventory.devices(slices)
        if one["node"] in ("", asked.node)
    ]
    allocated = [
        (inventory.name_of(claim), inventory.key_of(one)) for claim in claims for one in inventory.results(claim)
    ]
    pools = {(driver, pool) for driver, pool, _name in published}
    pools |= {(str(each["spec"]["driver"]), str(each["spec"]["pool"]["name"])) for each in slices}
    # A driver that publishes nothing at the moment has the node's name for its pool.
    pools |= {(driver, pool) for _claim, (driver, pool, _name) in allocated if pool == asked.node}
    known = [_target_of(each) for each in rules]
    pools |= {(each.driver, each.pool) for each in known if each}
    if asked.drivers:
        pools = {each for each in pools if each[0] in asked.drivers} | {(each, asked.node) for each in asked.drivers}
    if asked.claims and not asked.devices:
        # What they had stays drained once they have given it back.
        chosen = {key for claim, key in allocated if claim in asked.claims and key[:2] in pools}
        chosen |= {(each.driver, each.pool, each.device) for each in known if each and each.device}
        return [Target(*key) for key in sorted(chosen)]
    if not asked.devices:
        return [Target(*each) for each in sorted(pools)]
    there = {key for key in published if key[:2] in pools} | {key for _claim, key in allocated if key[:2] in pools}
    there |= {(each.driver, each.pool, each.device) for each in known if each and each.device}
    missing = [name for name in asked.devices if name not in {key[2] for key in there}]
    if missing:
        raise DrainError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} published by nobody on {asked.node}",
            hint="Nothing was changed. Names of devices are those in ResourceSlices; the module accelerator_info has them.",
            code="no-device",
        )
    chosen = {key for key in there if key[2] in asked.devices}
    if asked.overlapping:
        chosen |= overlapping(slices, chosen)
    return [Target(*key) for key in sorted(chosen)]


def overlapping(slices: Iterable[Json], chosen: Iterable[inventory.Key]) -> set[inventory.Key]:
    """Return the devices that cannot be had beside one of these, as they draw on the same counters."""
    found = {(one["driver"], one["pool"], one["name"]): one for one in inventory.devices(slices)}
    mine = [found[key] for key in chosen if key in found]
    return {key for key, one in found.items() if any(_excludes(one, each) for each in mine)}


def _excludes(one: Json, other: Json) -> bool:
    if (one["driver"], one["pool"]) != (other["driver"], other["pool"]):
        return False
    return any(
        amount["takes"] + other["draws"].get(name, {}).get(counter, {"takes": 0})["takes"] > amount["left"]
        for name, counters in one["draws"].items()
        for counter, amount in counters.items()
        if counter in other["draws"].get(name, {})
    )


def published(slices: Sequence[Json], asked: Asked) -> tuple[Target, ...]:
    """Return the pools of the node with a device, of the drivers that are asked for, of which all slices are there."""
    pools: dict[tuple[str, str], list[Json]] = {}
    for each in slices:
        pools.setdefault((str(each["spec"]["driver"]), str(each["spec"]["pool"]["name"])), []).append(each["spec"])
    found = []
    for key, specs in sorted(pools.items()):
        newest = max(int(each["pool"].get("generation", 0)) for each in specs)
        mine = [each for each in specs if int(each["pool"].get("generation", 0)) == newest]
        complete = len(mine) >= int(mine[0]["pool"].get("resourceSliceCount", 1))
        if complete and any(each.get("devices") for each in mine) and (not asked.drivers or key[0] in asked.drivers):
            found.append(Target(*key))
    return tuple(found)


def not_published_as(
    slices: Sequence[Json], asked: Asked, pools: Iterable[Target], attributes: Mapping[str, str]
) -> list[str]:
    """Return what the devices of these pools lack, in words: nothing where each has the attributes that it has at all with these values.

    Versions are compared number by number, so that one in which a vendor writes zeros in front is the same.
    """
    there = set(published(slices, asked))
    lacks = [f"{each} is not published" for each in pools if each not in there]
    for target in sorted(there & set(pools), key=str):
        mine = [
            each for each in inventory.devices(slices) if (each["driver"], each["pool"]) == (target.driver, target.pool)
        ]
        for name, value in attributes.items():
            seen = {
                str(found)
                for one in mine
                if (found := attribute_of(one["attributes"], target.driver, name)) is not None
            }
            if {_plain_version(each) for each in seen} != {_plain_version(value)}:
                lacks.append(f"{target} has {name} {', '.join(sorted(seen)) or 'not at all'}, expected {value}")
    return lacks


def _plain_version(text: str) -> str:
    """A version as a semantic one, as drivers publish it: ``24.1.rc2`` is ``24.1.0-rc.2``, and ``580.95.05`` is ``580.95.5``."""
    numbers, dash, rest = re.sub(r"^([0-9.]+)\.rc", r"\1-rc.", text.lower()).partition("-")
    parts = [str(int(part)) if part.isdigit() else part for part in numbers.split(".")]
    if all(part.isdigit() for part in parts):
        parts += ["0"] * (3 - len(parts))
    return ".".join(parts) + dash + rest


def rule_name(asked: Asked, target: Target) -> str:
    """Return the name of the rule for a target: the same at each run of the operation."""
    told = "\n".join((asked.operation, asked.node, target.driver, target.pool, target.device))
    return f"dra-accelerators-drain-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def rules_of(asked: Asked, targets: Iterable[Target], now: str) -> tuple[Wanted, ...]:
    """Return the rules that keep everybody new off the targets."""
    return tuple(
        Wanted(
            name=rule_name(asked, each),
            selector={
                key: value
                for key, value in (("driver", each.driver), ("pool", each.pool), ("device", each.device))
                if value
            },
            taint={"key": TAINT_KEY, "value": asked.operation, "effect": EFFECT},
            reason=asked.reason,
            node=asked.node,
            labels={OPERATION_LABEL: asked.operation},
            notes={SINCE: now, FOR_NODE: asked.node},
        )
        for each in targets
    )


def rule_facts(rule: Json) -> dict[str, str]:
    """Return what is told of a rule of a drain."""
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


def age(rule: Json, now: str) -> float | None:
    """Return for how many seconds a rule has shown no sign of life, by what it says itself; None where it says nothing.

    Signs are the API server's time of its making, and when runs began to drain by it or went on.
    """
    metadata = rule["metadata"]
    notes = metadata.get("annotations") or {}
    told = (_moment(each) for each in (metadata.get("creationTimestamp"), notes.get(SINCE), notes.get(RENEWED)))
    signs = [each for each in told if each is not None]
    at = _moment(now)
    return (at - max(signs)).total_seconds() if signs and at is not None else None


def is_left(rule: Json, now: str, older_than: float) -> bool:
    """Whether nobody is at work by a rule any more, as far as its age tells: one that does not tell its age is not left."""
    found = age(rule, now)
    return older_than <= 0 or (found is not None and found >= older_than)


def _moment(text: Any) -> datetime | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return None


def _target_of(rule: Json) -> Target | None:
    facts = rule_facts(rule)
    return Target(facts["driver"], facts["pool"], facts["device"]) if facts["driver"] and facts["pool"] else None


def held_by(targets: Sequence[Target], claims: Iterable[Json], asked: Asked) -> tuple[Held, ...]:
    """Return the claims that have something of the targets, as administrators who only watch have too."""
    taint = {"key": TAINT_KEY, "value": asked.operation, "effect": EFFECT}
    found = []
    for claim in claims:
        mine = [one for one in inventory.results(claim) if any(each.has(one) for each in targets)]
        if not mine or (asked.claims and inventory.name_of(claim) not in asked.claims):
            continue
        users = list((claim.get("status") or {}).get("reservedFor") or ())
        found.append(
            Held(
                namespace=str(claim["metadata"]["namespace"]),
                name=str(claim["metadata"]["name"]),
                devices=tuple("/".join(inventory.key_of(one)) for one in mine),
                pods=tuple((str(one["name"]), str(one["uid"])) for one in users if one.get("resource") == "pods"),
                groups=tuple(str(one["name"]) for one in users if one.get("resource") == "podgroups"),
                others=tuple(
                    f"{one.get('resource')} {one.get('name')}"
                    for one in users
                    if one.get("resource") not in ("pods", "podgroups")
                ),
                tolerates=all(any(tolerates(each, taint) for each in one.get("tolerations") or ()) for one in mine),
            )
        )
    return tuple(sorted(found, key=lambda each: each.key))


def holders_of(claims: Iterable[Held], pods: Iterable[Json]) -> tuple[Holder, ...]:
    """Return the pods that claims are reserved for, by themselves or by their group, and that have not ended."""
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
            Holder(
                *key,
                uid=str(pod["metadata"]["uid"]),
                claims=tuple(dict.fromkeys(names)),
                owner=f"{owner.get('kind')}/{owner.get('name')}" if owner else "",
                deleting=bool(pod["metadata"].get("deletionTimestamp")),
            )
        )
    return tuple(found)


def problems_of(asked: Asked, claims: Iterable[Held], pods: Sequence[Holder], consent: Consent) -> tuple[Problem, ...]:
    """Return what stands against a drain, before anything is done."""
    found = [
        Problem(
            "unknown-consumer",
            f"Claim {each.key} is reserved for {', '.join(each.others)}, of which no pods are known",
            "End it the way it was begun.",
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
                f"Of the devices on {asked.node} that are to be drained {who(staying)}",
                "Nobody has said whether they may be evicted: evict true does it, false waits until they have ended.",
                blocks=True,
            )
        )
    alone = [each for each in staying if not each.owner]
    if consent.evict and alone and not consent.evict_unmanaged:
        found.append(
            Problem(
                "no-controller",
                f"{', '.join(each.key for each in alone)}: no controller makes another pod when "
                f"{'this one goes' if len(alone) == 1 else 'these go'}",
                "Delete what is not needed, or allow it (evict_unmanaged); its manifest is yours to keep.",
                blocks=True,
            )
        )
    return tuple(found)


def who(pods: Iterable[Holder]) -> str:
    """Return pods with their claims, as a clause."""
    return ", ".join(
        f"pod {each.key} has some (claim{'s' if len(each.claims) > 1 else ''} {', '.join(each.claims)})"
        for each in pods
    )


def plan(
    asked: Asked,
    consent: Consent,
    *,
    slices: Sequence[Json],
    claims: Sequence[Json],
    pods: Sequence[Json],
    rules: Sequence[Json],
    now: str,
) -> Plan:
    """Return what is to be done. ``rules`` are those of the operation for this node. Raises DrainError."""
    targets = tuple(targets_of(asked, slices, claims, rules))
    wanted = rules_of(asked, targets, now)
    names = {each.name for each in wanted}
    stale = tuple(sorted(str(each["metadata"]["name"]) for each in rules if each["metadata"]["name"] not in names))
    held = held_by(targets, claims, asked)
    holders = holders_of(held, pods)
    return Plan(targets, wanted, stale, held, holders, problems_of(asked, held, holders, consent))


def in_the_way(claims: Sequence[Held], pods: Sequence[Holder], refusals: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return who still has devices, each pod and each claim without one, with why as far as that is known."""
    tolerant = {each.key for each in claims if each.tolerates}
    found = []
    for each in pods:
        if each.uid in refusals:
            reason = refusals[each.uid]
        elif each.deleting:
            reason = "it is ending"
        elif any(f"{each.namespace}/{name}" in tolerant for name in each.claims):
            reason = f"its claim tolerates the taint {TAINT_KEY}, so that it can come back"
        else:
            reason = "it runs"
        found.append({"pod": each.key, "claims": list(each.claims), "reason": reason})
    with_pods = {f"{each.namespace}/{name}" for each in pods for name in each.claims}
    return found + [
        {"pod": "", "claims": [each.key], "reason": "it is allocated, and no pod that runs has it"}
        for each in claims
        if each.key not in with_pods
    ]
