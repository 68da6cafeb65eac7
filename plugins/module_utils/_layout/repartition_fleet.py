# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Combine the nodes' plans for a new layout with the cluster's state: claims, pods, problems, and nodes per batch.

The module has no side effects.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._drain import drain_plan as drain
from .._drain.drain_plan import Consent, HeldClaim, HoldingPod, Target
from .._migration.migration_inventory import Problem
from ..core.cluster.inventory import BLOCKING, key_of, results
from ..core.dra.device_lookup import attribute_of, selects
from ..core.errors import AcceleratorError
from ..core.repartition.record import LONGEST_SECONDS
from ..core.vendors.registry import BACKENDS, create

Json = dict[str, Any]
#: The operation name of this play's drains on every node. A later run finds the rules of an interrupted run by it.
OPERATION = "repartition"
#: The values in the plan of a node that the plan of all nodes needs.
_VALUES = {**dict.fromkeys(("operations", "before", "untouched", "unfinished", "unread"), list), "rules_differ": bool}
_OPERATION_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True)
class Cluster:
    """The cluster's state: the published devices from ``core.cluster.inventory.devices``, and claims and pods as API objects.

    ``rules`` are the rules of this collection's drains, ``all_rules`` are all DeviceTaintRules.
    """

    devices: Sequence[Json]
    claims: Sequence[Json]
    pods: Sequence[Json]
    rules: Sequence[Json]
    all_rules: Sequence[Json] = ()


def check_plans(nodes: Mapping[str, Json]) -> None:
    """Validate the values and the names in plans that nodes report. Raises AcceleratorError that names the node.

    The names become part of DeviceTaintRules, which the operator's rights write: only drivers of this collection, and operation names in the
    form of this collection, are accepted. Devices are searched in the published devices of the same node (``targets_of``).
    """
    known = sorted(create(each).driver_name for each in BACKENDS)
    for node, plan in nodes.items():
        read = plan if isinstance(plan, Mapping) else {}
        invalid = [key for key, kind in _VALUES.items() if not isinstance(read.get(key), kind)]
        if invalid:
            raise AcceleratorError(
                f"The plan of node {node} has no valid {invalid[0]}, expected the result of device_repartition with state planned",
                hint="Nothing was changed. Run device_repartition on the node again.",
                code="invalid-answer",
            )
        for one in plan["operations"]:
            driver, operation = one.get("driver"), one.get("operation")
            if driver not in known:
                found, expected = f"the driver {driver!r}", f"one of {', '.join(known)}"
            elif not isinstance(operation, str) or not _OPERATION_NAME.fullmatch(operation):
                found, expected = f"the operation {str(operation)[:80]!r}", "lower-case letters, digits, and dashes"
            else:
                continue
            raise AcceleratorError(
                f"The plan that node {node} reports has {found}, expected {expected}",
                hint="Nothing was changed. Examine the node.",
                code="invalid-answer",
            )


def targets_of(operation: Json, node: str, devices: Iterable[Json]) -> list[Target]:
    """Return the published devices that must not be allocated during an operation."""
    names = set(operation["names"])
    return [
        Target(one["driver"], one["pool"], one["name"])
        for one in devices
        if one["node"] == node and one["driver"] == operation["driver"] and one["name"] in names
    ]


def fleet_plan(
    nodes: Mapping[str, Json],
    cluster: Cluster,
    consent: Consent,
    limit: str,
    most: int,
    *,
    now: str = "",
    left_after: float = LONGEST_SECONDS,
) -> Json:
    """Return the plan of the whole fleet as data.

    ``limit`` is how many devices of each kind may be unavailable, ``most`` the maximum number of nodes at a time. Drain
    rules on other nodes are abandoned if no run has used them for ``left_after`` seconds before ``now``. No operation takes
    longer than the default.
    """
    problems: list[Problem] = []
    joined: dict[str, Json] = {}
    evicted: dict[str, Json] = {}
    claims_on_nodes = _claims_on_nodes(cluster)
    for node, plan in nodes.items():
        request = drain.DrainRequest(node=node, operation=OPERATION)
        operations = []
        for one in plan["operations"]:
            targets = targets_of(one, node, cluster.devices)
            held = drain.held_by(targets, cluster.claims, request)
            holders = drain.holders_of(held, cluster.pods)
            problems += drain.problems_of(request, held, holders, consent)
            operations.append(_with_users(one, cluster, targets, held, holders))
            evicted.update({each.key: {**each.document(), "node": node} for each in holders if not each.deleting})
        changed = {claim for each in operations for claim in each["claims"]}
        joined[node] = {
            **plan,
            "operations": operations,
            "leftover_rules": [facts for facts, _rule in _own_rules(cluster) if facts["node"] == node],
            "stays": _untouched(plan, claims_on_nodes.get(node, set()) - changed),
        }
    strays = [
        facts
        for facts, rule in _own_rules(cluster)
        if facts["node"] not in nodes and drain.is_abandoned(rule, now, left_after)
    ]
    allowed, refused = _nodes_at_a_time(joined, cluster, limit)
    problems += refused
    staying = sorted(_pods_with_devices(cluster) - set(evicted))
    return {
        "nodes": joined,
        "evicted": [evicted[key] for key in sorted(evicted)],
        "staying": staying,
        "problems": [each.document() for each in problems],
        "blocked": [f"{each.text.rstrip('.')}. {each.remedy}".strip() for each in problems if each.blocks],
        "at_a_time": max(1, min(most, allowed)),
        "idle": [node for node, plan in joined.items() if _is_idle(plan)],
        "partitions_destroyed": sum(len(one["going"]) for plan in joined.values() for one in plan["operations"]),
        "devices_touched": sum(len(one["devices"]) for plan in joined.values() for one in plan["operations"]),
        "strays": strays,
        "table": [*table(joined, staying, consent), *_stray_lines(strays)],
    }


def _own_rules(cluster: Cluster) -> list[tuple[dict[str, str], Json]]:
    """Return the facts of each rule of this play's drains, and the rule."""
    found = [(drain.rule_facts(rule), rule) for rule in cluster.rules]
    return [(facts, rule) for facts, rule in found if facts["operation"] == OPERATION]


def _with_users(
    operation: Json,
    cluster: Cluster,
    targets: Sequence[Target],
    held: Sequence[HeldClaim],
    holders: Sequence[HoldingPod],
) -> Json:
    """Return an operation with its published devices, its claims and pods, and the physical devices that it makes unavailable."""
    devices = _physical_devices_by_kind(_devices_of(cluster.devices, targets))
    return {
        **operation,
        "published": [each.device for each in targets],
        # The prepared claims of the node and the cluster's claims can differ while claims start and end.
        "claims": sorted({*operation["claims"], *(each.key for each in held)}),
        "pods": [each.document() for each in holders],
        "closes": {kind: sorted(names) for kind, names in devices.items()},
    }


def _claims_on_nodes(cluster: Cluster) -> dict[str, set[str]]:
    """Return, by node, the claims (namespace/name) with a device that is published there."""
    node_of_device = {(each["driver"], each["pool"], each["name"]): each["node"] for each in cluster.devices}
    found: dict[str, set[str]] = {}
    for claim in cluster.claims:
        for one in results(claim):
            node = node_of_device.get(key_of(one))
            if node:
                found.setdefault(node, set()).add(f"{claim['metadata']['namespace']}/{claim['metadata']['name']}")
    return found


def _untouched(plan: Json, claims: Iterable[str]) -> Json:
    """Return the unchanged part of a node: the numbers of devices and partitions, and the claims."""
    uuids = {each["uuid"] for each in plan["untouched"]}
    on_unchanged_devices = sum(len(each["partitions"]) for each in plan["before"] if each["uuid"] in uuids)
    kept = sum(len(one["kept"]) for one in plan["operations"])
    return {"devices": len(uuids), "partitions": on_unchanged_devices + kept, "claims": sorted(claims)}


def _is_idle(plan: Json) -> bool:
    """Return whether a node needs no work: no operation, unfinished run, or leftover rule, and no rule missing in its driver."""
    return not (plan["operations"] or plan["unfinished"] or plan["leftover_rules"] or plan["rules_differ"])


def _devices_of(devices: Iterable[Json], targets: Iterable[Target]) -> list[Json]:
    wanted = set(targets)
    return [each for each in devices if Target(each["driver"], each["pool"], each["name"]) in wanted]


def _kind(device: Json) -> str:
    """Return the properties by which this collection's DeviceClasses distinguish devices: driver and type."""
    return f"{device['driver']}/{device['type']}"


def _physical_device(device: Json) -> str:
    """Return the physical device that a published device is or belongs to."""
    parent = attribute_of(device.get("attributes") or {}, device["driver"], "parentUUID")
    return f"{device['pool']}/{parent or device.get('uuid') or device['name']}"


def _physical_devices_by_kind(devices: Iterable[Json]) -> dict[str, set[str]]:
    """Return the physical devices by kind. A device with several unavailable partitions counts once."""
    found: dict[str, set[str]] = {}
    for each in devices:
        found.setdefault(_kind(each), set()).add(_physical_device(each))
    return found


def _unavailable_devices(cluster: Cluster) -> list[Json]:
    """Return the published devices that cannot be allocated, because of a driver's taint or any DeviceTaintRule."""
    rules = [
        rule for rule in cluster.all_rules if ((rule.get("spec") or {}).get("taint") or {}).get("effect") in BLOCKING
    ]
    return [
        each
        for each in cluster.devices
        if any(taint["effect"] in BLOCKING for taint in each.get("taints") or ())
        or any(selects(rule, driver=each["driver"], pool=each["pool"], device=each["name"]) for rule in rules)
    ]


def _pods_with_devices(cluster: Cluster) -> set[str]:
    """Return all pods that have devices through a claim and have not ended."""
    published = [Target(one["driver"], one["pool"], one["name"]) for one in cluster.devices]
    held = drain.held_by(
        list(dict.fromkeys(published)), cluster.claims, drain.DrainRequest(node="", operation=OPERATION)
    )
    return {each.key for each in drain.holders_of(held, cluster.pods) if not each.deleting}


def _nodes_at_a_time(nodes: Mapping[str, Json], cluster: Cluster, limit: str) -> tuple[int, list[Problem]]:
    """Return how many nodes can change at a time within ``limit``, and the operations that exceed it alone.

    The limit applies to physical devices, including those that are already unavailable. Each node runs one operation at
    a time. The calculation assumes the worst case: the operations that affect the most devices run at the same time.
    """
    closed = _physical_devices_by_kind(_unavailable_devices(cluster))
    at_most = len([node for node, plan in nodes.items() if plan["operations"]]) or 1
    problems: list[Problem] = []
    for kind, boards in sorted(_physical_devices_by_kind(cluster.devices).items()):
        gone = closed.get(kind, set())
        room = _limit_of(limit, len(boards)) - len(gone)
        worst = sorted(
            (
                max((len(set(one["closes"].get(kind, ())) - gone) for one in plan["operations"]), default=0)
                for plan in nodes.values()
            ),
            reverse=True,
        )
        if worst and worst[0] > max(room, 0):
            problems.append(_limit_problem(kind, worst[0], boards, gone, limit))
        taken = 0
        for number, each in enumerate(worst):
            taken += each
            if taken > room and each:
                at_most = min(at_most, number)
                break
    return max(at_most, 1), problems


def _limit_problem(kind: str, takes: int, boards: set[str], gone: set[str], limit: str) -> Problem:
    already = f", {len(gone)} are unavailable already ({', '.join(sorted(gone))})" if gone else ""
    return Problem(
        "too-much-unavailable",
        f"One operation makes {takes} of {len(boards)} devices of {kind} unavailable{already}. The limit is {_limit_of(limit, len(boards))} ({limit})",
        "Allow more (max_unavailable), repair or reopen unavailable devices, or change fewer devices that are reset together.",
        blocks=True,
    )


def _limit_of(limit: str, total: int) -> int:
    """Return how many of ``total`` may be unavailable. ``limit`` is a number, or a percentage, which is rounded up."""
    text = str(limit).strip()
    if text.endswith("%"):
        return math.ceil(total * float(text[:-1]) / 100)
    return int(text)


def is_limit(text: str) -> bool:
    """Return whether a string is a number from 1 on, or a percentage above 0 up to 100."""
    try:
        number = float(text[:-1]) if text.endswith("%") else int(text)
    except ValueError:
        return False
    return 0 < number <= 100 if text.endswith("%") else number >= 1


# ---- the plan as text


def table(nodes: Mapping[str, Json], staying: Sequence[str], consent: Consent) -> list[str]:
    """Return the plan as lines of text: operations, deleted partitions, affected claims with pods, and unchanged parts."""
    rows: list[tuple[str, ...]] = [("node", "device", "goes", "comes", "stays", "claims and pods")]
    rows += [row for node, plan in nodes.items() for one in plan["operations"] for row in _rows(node, one)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join([*(text.ljust(width) for text, width in zip(row, widths)), row[5]]) for row in rows]
    if len(rows) == 1:
        lines = ["All devices have the desired layout: nothing to do."]
    leaving = len(
        {
            (each["namespace"], each["name"])
            for plan in nodes.values()
            for one in plan["operations"]
            for each in one["pods"]
        }
    )
    if leaving:
        word = {
            True: "are evicted",
            False: "must end before the changes",
            None: "must be evicted, and the evict option does not allow it",
        }
        lines.append(f"{leaving} pods {word[consent.evict]}; {len(staying)} other pods with devices are not affected.")
    changing = [node for node, plan in nodes.items() if plan["operations"]]
    for node in changing:
        stays = nodes[node]["stays"]
        counts = [(stays["devices"], "device"), (stays["partitions"], "partition"), (len(stays["claims"]), "claim")]
        lines.append(f"{node}: {', '.join(_number(*each) for each in counts)} untouched.")
    if 0 < len(changing) < len(nodes):
        lines.append(f"Nothing is to do on {_number(len(nodes) - len(changing), 'other node')}.")
    for node, plan in nodes.items():
        for each in plan["unfinished"]:
            lines.append(
                f"{node}: an earlier run did not complete {each['operation']} ({each['step']}); this run resumes it."
            )
        if plan["leftover_rules"]:
            lines.append(
                f"{node}: {len(plan['leftover_rules'])} taint rules of an earlier run are removed at the end of this run."
            )
        lines += [f"{node}: keeps its layout, because it cannot be read: {each}" for each in plan["unread"]]
    return [line.rstrip() for line in lines]


def _stray_lines(strays: Sequence[Json]) -> list[str]:
    by_node = Counter(each["node"] for each in strays)
    return [
        f"{node}, which is not in this run: {number} taint rules of an earlier run are removed."
        for node, number in by_node.items()
    ]


def _number(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _rows(node: str, one: Json) -> list[tuple[str, ...]]:
    """Return the table rows of an operation: one for each affected claim, the first with all other columns."""
    claims = [f"{claim} ({_pods(claim, one['pods'])})" for claim in one["claims"]] or ["nobody"]
    row = (
        node,
        "+".join(str(each["index"]) for each in one["devices"]) + (" (reset)" if one["resets"] else ""),
        _listed(each["profile"] for each in one["going"]) or "-",
        ", ".join(
            [
                _listed(step["profile"] for step in one["steps"] if step["step"] == "create_partition") or _mode(one),
                *(f"{step['setting']} {step['to']}".lower() for step in one["steps"] if step["step"] == "set"),
            ]
        ),
        _listed(each["profile"] for each in one["kept"]) or "-",
    )
    return [(*row, claims[0]), *((*("" for _cell in row), claim) for claim in claims[1:])]


def _pods(claim: str, pods: Sequence[Json]) -> str:
    namespace, _slash, name = claim.partition("/")
    return (
        ", ".join(each["name"] for each in pods if each["namespace"] == namespace and name in each["claims"])
        or "no pod"
    )


def _listed(profiles: Iterable[str]) -> str:
    return ", ".join(f"{number} x {profile}" for profile, number in Counter(profiles).items())


def _mode(operation: Json) -> str:
    modes = dict.fromkeys(str(each["mode"]) for each in operation["wanted"])
    return ", ".join(modes) or "-"
