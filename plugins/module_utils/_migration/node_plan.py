# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan the move of a node between a device plugin and claims: its current state, the remaining steps, and the problems.

The module has no side effects. The only state is in the cluster: a new run reads it and resumes an interrupted run. One
annotation of the Node stores values that later steps need.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.decoding import loads
from ..core.quantity import parse
from .migration_inventory import AFFINITY, LABEL, NOWAY, Json, Plugin, Problem, Service, Use, controller
from .resource_names import DRIVERS, MANAGER_LABELS, REPLICA_LABELS, SWITCHES, meaning

FORWARD, BACK = "forward", "back"
OWN, FOREIGN, UNKNOWN, NONE, AUTO = "own", "foreign", "unknown", "none", "auto"
TAINT, EFFECT = "dra.accelerators/migration", "NoSchedule"
#: The Node label that keeps device plugins of others away from the node, by their affinity.
KEPT_OFF, OFF = "dra.accelerators/device-plugin", "off"
#: The Node annotation with further values for the way back.
RECORD = "dra.accelerators/device-plugin-migration"
#: The label that the role dra_driver sets on a node whose driver offers its devices as extended resources.
INTERFACE, BY_PLUGIN = "dra.accelerators/kubelet-interface", "device-plugin"
MANAGED_BY, OURS = "app.kubernetes.io/managed-by", "dra-accelerators"
FOLDER = "device-plugins"
#: The steps of ``drain`` and of ``return_to_service``. Between them the node's driver is changed.
DRAIN_STEPS, SERVICE_STEPS = frozenset({"taint", "evict", "withdraw"}), frozenset({"restore", "untaint"})


@dataclass(frozen=True)
class Holder:
    """A pod that must end before the node can move. ``written`` says that a user created one of its claims."""

    namespace: str
    name: str
    uid: str
    deleting: bool = False
    controlled: bool = True
    written: bool = False
    problems: tuple[Problem, ...] = ()

    @property
    def key(self) -> str:
        """Return namespace and name."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Node:
    """The known state of a node.

    ``offered`` are known resources that a new pod can get, with amounts. ``listed`` are all known resources in the
    Node's status. ``plugins`` are the DaemonSets of others that serve the node. ``strays`` are device plugin pods
    without a DaemonSet. ``published`` are this collection's drivers with a complete pool on the node.
    """

    name: str
    exists: bool = True
    offered: Mapping[str, int] = field(default_factory=dict)
    listed: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)
    taint: str | None = None
    record: Json = field(default_factory=dict)
    plugins: tuple[Plugin, ...] = ()
    strays: tuple[str, ...] = ()
    published: frozenset[str] = frozenset()
    by_plugin: tuple[Holder, ...] = ()
    by_claims: tuple[Holder, ...] = ()

    @property
    def kind(self) -> str:
        """Return which device plugin the node has, or had before the move."""
        if self.labels.get(INTERFACE) == BY_PLUGIN:
            return OWN
        if self.plugins or self.record.get("plugins") or self.labels.get(KEPT_OFF) == OFF:
            return FOREIGN
        return UNKNOWN if self.offered else NONE


@dataclass(frozen=True)
class Wishes:
    """The user's choices: DaemonSets that may be kept away, consent to evictions, and accepted problems."""

    plugins: tuple[str, ...] = ()
    evict: bool = False
    evict_unmanaged: bool = False
    accept: frozenset[str] = frozenset()
    back_to: str = AUTO

    def evicts(self, holder: Holder) -> bool:
        """Return whether a pod may be evicted. Other pods must end without an eviction."""
        return self.evict and (holder.controlled or self.evict_unmanaged)


@dataclass(frozen=True)
class Step:
    """One step. ``pods`` are the pods that must end, ``plugins`` the affected DaemonSets."""

    verb: str
    text: str
    pods: tuple[Holder, ...] = ()
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The steps of one node in order; empty if the node has already moved."""

    node: str
    direction: str
    kind: str
    steps: tuple[Step, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def blocks(self) -> tuple[Problem, ...]:
        """Return the problems that prevent the move."""
        return tuple(each for each in self.problems if each.blocks)

    def of(self, verbs: Collection[str]) -> tuple[Step, ...]:
        """Return the remaining steps of these kinds."""
        return tuple(each for each in self.steps if each.verb in verbs)

    def document(self) -> dict[str, Any]:
        """Return the plan as module data."""
        return {
            "kind": self.kind,
            "done": not self.steps,
            "steps": [
                {"verb": each.verb, "text": each.text, "pods": [one.key for one in each.pods]} for each in self.steps
            ],
            "problems": [each.document() for each in self.problems],
        }


def taint_of(direction: str) -> dict[str, str]:
    """Return the taint of a node that is moving."""
    return {"key": TAINT, "value": direction, "effect": EFFECT}


def plugins_of(
    sets: Iterable[Json], pods: Iterable[Json], kubelet_root: str
) -> tuple[tuple[Plugin, ...], dict[str, list[str]]]:
    """Return the DaemonSets that mount the kubelet's device plugin directory, and by node such pods without a DaemonSet."""
    folder = posixpath.normpath(f"{kubelet_root}/{FOLDER}")
    nodes: dict[str, set[str]] = {}
    strays: dict[str, list[str]] = {}
    for pod in pods:
        metadata, spec = pod["metadata"], pod.get("spec") or {}
        node = str(spec.get("nodeName") or "")
        if not node or not _mounts(spec, folder) or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        owner = controller(metadata)
        if owner is not None and owner.get("kind") == "DaemonSet":
            nodes.setdefault(f"{metadata['namespace']}/{owner.get('name')}", set()).add(node)
        else:
            strays.setdefault(node, []).append(f"{metadata['namespace']}/{metadata['name']}")
    found = []
    for item in sets:
        template = ((item.get("spec") or {}).get("template") or {}).get("spec") or {}
        if not _mounts(template, folder):
            continue
        metadata = item["metadata"]
        switch = next((each for each in SWITCHES if each in (template.get("nodeSelector") or {})), "")
        above = controller(metadata)
        operator = f"{above.get('kind')}/{above.get('name')}" if above else ""
        ours = (metadata.get("labels") or {}).get(MANAGED_BY) == OURS
        key = f"{metadata['namespace']}/{metadata['name']}"
        way = LABEL if switch else NOWAY if operator or ours else AFFINITY
        there = frozenset(nodes.get(key, ()))
        found.append(
            Plugin(metadata["namespace"], metadata["name"], ours, way, switch, operator, there, excludes(template))
        )
    return tuple(sorted(found, key=lambda each: each.key)), strays


def _mounts(spec: Json, folder: str) -> bool:
    paths = [str((each.get("hostPath") or {}).get("path") or "") for each in spec.get("volumes") or ()]
    return any(path and posixpath.normpath(path) == folder for path in paths)


_REQUIREMENT = {"key": KEPT_OFF, "operator": "NotIn", "values": [OFF]}


def excludes(spec: Json) -> bool:
    """Return whether a template keeps its pods away from marked nodes."""
    terms = _terms(spec)
    return bool(terms) and all(_REQUIREMENT in (each.get("matchExpressions") or ()) for each in terms)


def _terms(spec: Json) -> list[Json]:
    node = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    return list((node or {}).get("nodeSelectorTerms") or ())


def affinity_with(spec: Json) -> dict[str, Any]:
    """Return a template's affinity with the rule that keeps its pods away from marked nodes."""
    terms = [
        {**each, "matchExpressions": [*(each.get("matchExpressions") or ()), _REQUIREMENT]}
        if _REQUIREMENT not in (each.get("matchExpressions") or ())
        else dict(each)
        for each in _terms(spec)
    ] or [{"matchExpressions": [_REQUIREMENT]}]
    return _affinity(spec, terms) or {}


def affinity_without(spec: Json) -> dict[str, Any] | None:
    """Return a template's affinity without this rule; None if it is then empty."""
    terms = []
    for each in _terms(spec):
        rest = [one for one in each.get("matchExpressions") or () if one != _REQUIREMENT]
        kept = {**each, "matchExpressions": rest}
        if not rest:
            del kept["matchExpressions"]
        if kept:
            terms.append(kept)
    return _affinity(spec, terms)


def _affinity(spec: Json, terms: Sequence[Json]) -> dict[str, Any] | None:
    affinity = dict(spec.get("affinity") or {})
    node = {
        key: value
        for key, value in (affinity.pop("nodeAffinity", None) or {}).items()
        if key != "requiredDuringSchedulingIgnoredDuringExecution"
    }
    if terms:
        node["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": list(terms)}
    if node:
        affinity["nodeAffinity"] = node
    return affinity or None


def node_of(
    item: Json,
    *,
    plugins: Sequence[Plugin],
    strays: Mapping[str, Sequence[str]],
    slices: Iterable[Json],
    uses: Iterable[Use],
    claims: Iterable[Json],
    pods: Mapping[tuple[str, str], Json],
) -> Node:
    """Return the known state of a node. ``pods`` are all pods of the cluster, by namespace and name."""
    metadata, status = item["metadata"], item.get("status") or {}
    name = str(metadata["name"])
    mine = [each["spec"] for each in slices if (each.get("spec") or {}).get("nodeName") == name]
    listed = {key: value for key, value in (status.get("allocatable") or {}).items() if meaning(str(key)) is not None}
    also = [str(key) for key in status.get("capacity") or {} if meaning(str(key)) is not None]
    taints = [each for each in (item.get("spec") or {}).get("taints") or () if each.get("key") == TAINT]
    return Node(
        name,
        offered={key: int(parse(value)) for key, value in sorted(listed.items()) if parse(value) > 0},
        listed=frozenset([*listed, *also]),
        labels=metadata.get("labels") or {},
        taint=str(taints[0].get("value") or "") if taints else None,
        record=record_of(metadata),
        plugins=tuple(each for each in plugins if name in each.nodes and not each.ours),
        strays=tuple(strays.get(name, ())),
        published=frozenset(_complete(mine)),
        by_plugin=tuple(_of_use(each) for each in uses if each.node == name and each.by_plugin),
        by_claims=_by_claims(mine, claims, pods, name),
    )


def record_of(metadata: Json) -> dict[str, Any]:
    """Return the values recorded on a Node; empty if they cannot be read."""
    try:
        found = loads((metadata.get("annotations") or {}).get(RECORD) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _of_use(use: Use) -> Holder:
    return Holder(use.namespace, use.name, use.uid, use.deleting, bool(use.owner), problems=use.problems)


def _complete(specs: Sequence[Json]) -> Iterable[str]:
    """Yield this collection's drivers with a pool that has a device and all of its slices."""
    pools: dict[tuple[str, str, int], list[Json]] = {}
    for each in specs:
        pool = each["pool"]
        if each["driver"] in DRIVERS:
            pools.setdefault((each["driver"], pool["name"], pool.get("generation", 0)), []).append(each)
    for (driver, _pool, _generation), found in pools.items():
        if len(found) >= found[0]["pool"]["resourceSliceCount"] and any(each.get("devices") for each in found):
            yield str(driver)


def _by_claims(
    specs: Sequence[Json], claims: Iterable[Json], pods: Mapping[tuple[str, str], Json], node: str
) -> tuple[Holder, ...]:
    pools = {each["pool"]["name"] for each in specs if each["driver"] in DRIVERS} | {node}
    found: dict[str, Holder] = {}
    for claim in claims:
        status = claim.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
        if not any(each.get("driver") in DRIVERS and each.get("pool") in pools for each in results):
            continue
        metadata = claim["metadata"]
        made = (metadata.get("annotations") or {}).get("resource.kubernetes.io/extended-resource-claim") == "true"
        for each in status.get("reservedFor") or ():
            pod = pods.get((metadata["namespace"], str(each.get("name", ""))))
            if each.get("resource") != "pods" or pod is None or pod["metadata"].get("uid") != each.get("uid"):
                continue
            if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
                continue
            one = pod["metadata"]
            before = found.get(one["uid"])
            found[one["uid"]] = Holder(
                metadata["namespace"],
                one["name"],
                one["uid"],
                bool(one.get("deletionTimestamp")),
                controller(one) is not None,
                written=not made or (before is not None and before.written),
            )
    return tuple(sorted(found.values(), key=lambda each: each.key))


def plan(
    node: Node, direction: str, wishes: Wishes, services: Mapping[str, Service], known: Collection[str] = ()
) -> Plan:
    """Return the remaining steps of a node; ``known`` are the existing DaemonSets."""
    if not node.exists:
        gone = Problem("no-node", f"There is no Node {node.name}.", "See accelerator_node_name.", blocks=True)
        return Plan(node.name, direction, NONE, problems=(gone,))
    found = _forward(node, wishes, services) if direction == FORWARD else _back(node, wishes, frozenset(known))
    problems = [each for each in found.problems if each.code not in wishes.accept]
    return Plan(found.node, found.direction, found.kind, found.steps, tuple(problems) if found.steps else ())


def _forward(node: Node, wishes: Wishes, services: Mapping[str, Service]) -> Plan:
    steps: list[Step] = []
    foreign = [each for each in node.plugins if each.key not in node.record.get("plugins", ())]
    if node.kind == NONE and node.taint is None and not node.by_plugin:
        return Plan(node.name, FORWARD, NONE)
    moved = node.kind == FOREIGN and not node.plugins and not node.offered and not node.by_plugin
    if moved and node.taint is None and node.published:
        return Plan(node.name, FORWARD, node.kind)
    if node.taint != FORWARD:
        steps.append(Step("taint", f"it gets the taint {TAINT}={FORWARD}:{EFFECT}: no new pod comes"))
    if node.by_plugin:
        steps.append(Step("evict", _goes(node.by_plugin, wishes), pods=node.by_plugin))
    if node.plugins or (node.kind == FOREIGN and node.offered):
        names = tuple(each.key for each in node.plugins)
        steps.append(
            Step(
                "withdraw", f"{', '.join(names) or 'the device plugin'} stays off this node from now on", plugins=names
            )
        )
    steps.append(Step("driver", "the node driver publishes its devices for claims"))
    steps.append(Step("untaint", "the taint goes when they are published"))
    return Plan(node.name, FORWARD, node.kind, tuple(steps), tuple(_forward_problems(node, foreign, wishes, services)))


def _forward_problems(
    node: Node, foreign: Sequence[Plugin], wishes: Wishes, services: Mapping[str, Service]
) -> Iterable[Problem]:
    for each in foreign:
        if each.way == NOWAY:
            yield Problem(
                "plugin-is-operated",
                f"The DaemonSet {each.key} belongs to {each.owner}, which would undo every change of it.",
                "Have its owner leave this node out (gpu-operator, Helm), then run again.",
                blocks=True,
            )
        elif each.key not in wishes.plugins and "*" not in wishes.plugins:
            yield Problem(
                "plugin-not-named",
                f"The DaemonSet {each.key} serves device plugins on this node, and it is not said that it may be kept off.",
                f"Name it in plugins, if it offers {', '.join(node.offered) or 'the devices'}.",
                blocks=True,
            )
    for name in node.strays:
        yield Problem(
            "plugin-is-a-pod",
            f"The pod {name} serves device plugins on this node, and is no DaemonSet's.",
            "Remove it the way it came, then run again.",
            blocks=True,
        )
    if node.kind == UNKNOWN and not node.strays:
        yield Problem(
            "plugin-unknown",
            f"The Node offers {', '.join(node.offered)}, and no pod on it serves device plugins.",
            "See which program on the machine does, and stop it there.",
            blocks=True,
        )
    for label in MANAGER_LABELS:
        if node.labels.get(label):
            yield Problem(
                "manager",
                f"The label {label}={node.labels[label]} makes another program partition this node's devices.",
                "Remove that program and the label from the node. The layout of this collection replaces it.",
                blocks=True,
            )
    for label in REPLICA_LABELS:
        if _number(node.labels.get(label, "")) > 1:
            yield Problem(
                "replicas",
                f"By the label {label} each device is offered {node.labels[label]} times. With claims each pod gets a whole device, so fewer pods fit.",
                "Share devices in the layout (shares) and claim shares in the pods, or accept that fewer pods run at a time.",
                blocks=True,
            )
    for name in node.offered:
        service = services.get(name)
        if service is not None and service.why_not:
            yield Problem("shared-resource", f"{name} becomes {service.why_not}.", "", blocks=True)
    # While a foreign plugin is withdrawn the node offers nothing, so that no pod comes back.
    spared = {"comes-back"} if node.kind == FOREIGN else set()
    yield from _of_holders(node.by_plugin, wishes, spared)


def _back(node: Node, wishes: Wishes, known: Collection[str]) -> Plan:
    to = wishes.back_to if wishes.back_to != AUTO else (FOREIGN if node.kind == FOREIGN else OWN)
    recorded = tuple(str(each) for each in node.record.get("plugins") or ())
    kept_off = node.labels.get(KEPT_OFF) == OFF or bool(node.record)
    if node.taint is None:
        there = node.kind == OWN if to == OWN else bool(node.plugins) and not kept_off
        by_claims = node.published or node.by_claims or kept_off
        if (there and node.offered) or (not there and not by_claims and node.kind in (NONE, UNKNOWN)):
            return Plan(node.name, BACK, node.kind)
    steps: list[Step] = []
    problems: list[Problem] = []
    if node.taint != BACK:
        steps.append(Step("taint", f"it gets the taint {TAINT}={BACK}:{EFFECT}: no new pod comes"))
    if node.by_claims:
        steps.append(Step("evict", _goes(node.by_claims, wishes), pods=node.by_claims))
    if to == OWN:
        steps.append(Step("driver", "the node driver offers its devices through the kubelet's device-plugin API"))
    else:
        steps.append(Step("driver", "the node driver goes"))
        steps.append(
            Step("restore", f"{', '.join(recorded) or 'the device plugin'} returns to this node", plugins=recorded)
        )
        lost = sorted(set(recorded) - set(known))
        if lost or not (recorded or node.plugins or node.labels.get(KEPT_OFF) == OFF):
            problems.append(
                Problem(
                    "plugin-is-gone",
                    f"{'There is no DaemonSet ' + ', '.join(lost) if lost else 'No device plugin is known that this node had'} any more.",
                    "Install it first; its pods stay off until this node is moved.",
                    blocks=True,
                )
            )
    steps.append(Step("untaint", "the taint goes when the node offers its resources"))
    written = [each.key for each in node.by_claims if each.written]
    if written:
        problems.append(
            Problem(
                "claims-of-users",
                f"{', '.join(written)} {'has' if len(written) == 1 else 'have'} claims that users wrote: no device plugin serves these.",
                "Other nodes that publish devices can take them; accept it, or rewrite the pods to ask for a resource.",
                blocks=True,
            )
        )
    return Plan(node.name, BACK, to, tuple(steps), (*problems, *_of_holders(node.by_claims, wishes, set())))


def _of_holders(holders: Sequence[Holder], wishes: Wishes, spared: Collection[str]) -> Iterable[Problem]:
    for each in holders:
        for problem in each.problems:
            if problem.code in spared or problem.code == "no-controller":
                continue
            yield Problem(problem.code, f"{each.key}: {problem.text}", problem.remedy, problem.blocks)
    alone = [each.key for each in holders if not each.controlled and not each.deleting]
    if alone and not wishes.evict_unmanaged:
        yield Problem(
            "no-controller",
            f"{', '.join(alone)}: no controller makes another pod when {'this one goes' if len(alone) == 1 else 'these go'}.",
            "Delete the pods that are not needed, or allow their eviction (evict_unmanaged) and keep their manifests.",
            blocks=True,
        )
    if holders and not wishes.evict:
        yield Problem(
            "no-consent",
            f"{_who(holders)}, and the option evict does not allow it.",
            "Set evict, or wait until they have ended.",
            blocks=True,
        )


def _who(holders: Sequence[Holder]) -> str:
    return f"these pods are evicted: {', '.join(each.key for each in holders)}"


def _goes(holders: Sequence[Holder], wishes: Wishes) -> str:
    """Return what happens to the pods that must end.

    Without a decision the text says that they are evicted, and a problem asks for it.
    """
    decided = wishes.evict or "no-consent" in wishes.accept
    waited = [each for each in holders if decided and not wishes.evicts(each)]
    evicted = [each for each in holders if each not in waited]
    said = [_who(evicted)] if evicted else []
    return "; ".join(
        [*said, f"this run waits for these pods: {', '.join(each.key for each in waited)}"] if waited else said
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
