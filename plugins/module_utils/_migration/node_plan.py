# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan the migration of a node between a device plugin and claims: its current state, the remaining steps, and the problems.

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
from .migration_inventory import AFFINITY, LABEL, NO_METHOD, Json, Plugin, PodUse, Problem, Service, controller
from .resource_names import DRIVERS, MANAGER_LABELS, REPLICA_LABELS, SWITCHES, meaning

FORWARD, BACK = "forward", "back"
OWN, FOREIGN, UNKNOWN, NONE, AUTO = "own", "foreign", "unknown", "none", "auto"
TAINT, EFFECT = "dra.accelerators/migration", "NoSchedule"
#: The Node label that keeps device plugins of others away from the node, by their affinity.
KEPT_OFF, OFF = "dra.accelerators/device-plugin", "off"
#: The Node annotation with the values that a migration back needs: the DaemonSets, and the previous labels.
RECORD = "dra.accelerators/device-plugin-migration"
#: The label that the role dra_driver sets on a node whose driver offers its devices as extended resources.
INTERFACE, BY_PLUGIN = "dra.accelerators/kubelet-interface", "device-plugin"
MANAGED_BY, OURS = "app.kubernetes.io/managed-by", "dra-accelerators"
FOLDER = "device-plugins"
#: The annotation of claims that the scheduler creates for extended resources.
EXTENDED_CLAIM = "resource.kubernetes.io/extended-resource-claim"
#: The steps of ``drain`` and of ``return_to_service``. Between them the node's driver is changed.
DRAIN_STEPS, SERVICE_STEPS = frozenset({"taint", "evict", "withdraw"}), frozenset({"restore", "untaint"})


@dataclass(frozen=True)
class HoldingPod:
    """A pod that must end before the migration of the node. ``written`` is true if a user created one of its claims."""

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
class NodeState:
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
    by_plugin: tuple[HoldingPod, ...] = ()
    by_claims: tuple[HoldingPod, ...] = ()

    @property
    def kind(self) -> str:
        """Return which device plugin the node has, or had before the migration."""
        if self.labels.get(INTERFACE) == BY_PLUGIN:
            return OWN
        if self.plugins or self.record.get("plugins") or self.labels.get(KEPT_OFF) == OFF:
            return FOREIGN
        return UNKNOWN if self.offered else NONE


@dataclass(frozen=True)
class MigrationOptions:
    """The user's options: the DaemonSets that may be kept off nodes, the consent to evictions, and the accepted problems."""

    plugins: tuple[str, ...] = ()
    evict: bool = False
    evict_unmanaged: bool = False
    accept: frozenset[str] = frozenset()
    back_to: str = AUTO

    def evicts(self, holder: HoldingPod) -> bool:
        """Return whether a pod may be evicted. Other pods must end without an eviction."""
        return self.evict and (holder.controlled or self.evict_unmanaged)


@dataclass(frozen=True)
class Step:
    """One step. ``pods`` are the pods that must end, ``plugins`` the affected DaemonSets."""

    verb: str
    text: str
    pods: tuple[HoldingPod, ...] = ()
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The steps of one node in order. They are empty if the node is already migrated."""

    node: str
    direction: str
    kind: str
    steps: tuple[Step, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def blocks(self) -> tuple[Problem, ...]:
        """Return the problems that prevent the migration."""
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
    """Return the taint of a node during its migration."""
    return {"key": TAINT, "value": direction, "effect": EFFECT}


def find_plugins(
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
        owner = controller(metadata)
        operator = f"{owner.get('kind')}/{owner.get('name')}" if owner else ""
        ours = (metadata.get("labels") or {}).get(MANAGED_BY) == OURS
        key = f"{metadata['namespace']}/{metadata['name']}"
        found.append(
            Plugin(
                namespace=metadata["namespace"],
                name=metadata["name"],
                ours=ours,
                way=LABEL if switch else NO_METHOD if operator or ours else AFFINITY,
                label=switch,
                owner=operator,
                nodes=frozenset(nodes.get(key, ())),
                excludes=excludes(template),
            )
        )
    return tuple(sorted(found, key=lambda each: each.key)), strays


def _mounts(spec: Json, folder: str) -> bool:
    paths = [str((each.get("hostPath") or {}).get("path") or "") for each in spec.get("volumes") or ()]
    return any(path and posixpath.normpath(path) == folder for path in paths)


#: The requirement in a DaemonSet's node affinity that keeps its pods off nodes with the label KEPT_OFF.
_REQUIREMENT = {"key": KEPT_OFF, "operator": "NotIn", "values": [OFF]}
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def excludes(spec: Json) -> bool:
    """Return whether a pod template excludes nodes with the label KEPT_OFF."""
    terms = _terms(spec)
    return bool(terms) and all(_REQUIREMENT in (each.get("matchExpressions") or ()) for each in terms)


def _terms(spec: Json) -> list[Json]:
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(_REQUIRED)
    return list((required or {}).get("nodeSelectorTerms") or ())


def affinity_with(spec: Json) -> dict[str, Any]:
    """Return a pod template's affinity with the requirement that excludes nodes with the label KEPT_OFF."""
    terms = [
        {**each, "matchExpressions": [*(each.get("matchExpressions") or ()), _REQUIREMENT]}
        if _REQUIREMENT not in (each.get("matchExpressions") or ())
        else dict(each)
        for each in _terms(spec)
    ] or [{"matchExpressions": [_REQUIREMENT]}]
    return _affinity(spec, terms) or {}


def affinity_without(spec: Json) -> dict[str, Any] | None:
    """Return a pod template's affinity without this requirement, or None if the affinity is then empty."""
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
    node_affinity = {
        key: value for key, value in (affinity.pop("nodeAffinity", None) or {}).items() if key != _REQUIRED
    }
    if terms:
        node_affinity[_REQUIRED] = {"nodeSelectorTerms": list(terms)}
    if node_affinity:
        affinity["nodeAffinity"] = node_affinity
    return affinity or None


def node_state(
    item: Json,
    *,
    plugins: Sequence[Plugin],
    strays: Mapping[str, Sequence[str]],
    slices: Iterable[Json],
    uses: Iterable[PodUse],
    claims: Iterable[Json],
    pods: Mapping[tuple[str, str], Json],
) -> NodeState:
    """Return the known state of a node. ``pods`` are all pods of the cluster, by namespace and name."""
    metadata, status = item["metadata"], item.get("status") or {}
    name = str(metadata["name"])
    slice_specs = [each["spec"] for each in slices if (each.get("spec") or {}).get("nodeName") == name]
    allocatable = {
        key: value for key, value in (status.get("allocatable") or {}).items() if meaning(str(key)) is not None
    }
    capacity = [str(key) for key in status.get("capacity") or {} if meaning(str(key)) is not None]
    taints = [each for each in (item.get("spec") or {}).get("taints") or () if each.get("key") == TAINT]
    return NodeState(
        name,
        offered={key: int(parse(value)) for key, value in sorted(allocatable.items()) if parse(value) > 0},
        listed=frozenset([*allocatable, *capacity]),
        labels=metadata.get("labels") or {},
        taint=str(taints[0].get("value") or "") if taints else None,
        record=record_of(metadata),
        plugins=tuple(each for each in plugins if name in each.nodes and not each.ours),
        strays=tuple(strays.get(name, ())),
        published=frozenset(_drivers_with_complete_pool(slice_specs)),
        by_plugin=tuple(_pod_of_use(each) for each in uses if each.node == name and each.by_plugin),
        by_claims=_pods_with_claims(slice_specs, claims, pods, name),
    )


def record_of(metadata: Json) -> dict[str, Any]:
    """Return the values recorded on a Node; empty if they cannot be read."""
    try:
        found = loads((metadata.get("annotations") or {}).get(RECORD) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _pod_of_use(use: PodUse) -> HoldingPod:
    return HoldingPod(
        use.namespace, use.name, use.uid, deleting=use.deleting, controlled=bool(use.owner), problems=use.problems
    )


def _drivers_with_complete_pool(specs: Sequence[Json]) -> Iterable[str]:
    """Yield this collection's drivers with a pool that has a device and all of its slices."""
    pools: dict[tuple[str, str, int], list[Json]] = {}
    for each in specs:
        pool = each["pool"]
        if each["driver"] in DRIVERS:
            pools.setdefault((each["driver"], pool["name"], pool.get("generation", 0)), []).append(each)
    for (driver, _pool, _generation), found in pools.items():
        if len(found) >= found[0]["pool"]["resourceSliceCount"] and any(each.get("devices") for each in found):
            yield str(driver)


def _pods_with_claims(
    specs: Sequence[Json], claims: Iterable[Json], pods: Mapping[tuple[str, str], Json], node: str
) -> tuple[HoldingPod, ...]:
    """Return the running pods with claims for devices of this collection's drivers on a node. ``specs`` are those of its slices."""
    pools = {each["pool"]["name"] for each in specs if each["driver"] in DRIVERS} | {node}
    found: dict[str, HoldingPod] = {}
    for claim in claims:
        status = claim.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
        if not any(each.get("driver") in DRIVERS and each.get("pool") in pools for each in results):
            continue
        metadata = claim["metadata"]
        by_scheduler = (metadata.get("annotations") or {}).get(EXTENDED_CLAIM) == "true"
        for each in status.get("reservedFor") or ():
            pod = pods.get((metadata["namespace"], str(each.get("name", ""))))
            if each.get("resource") != "pods" or pod is None or pod["metadata"].get("uid") != each.get("uid"):
                continue
            if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
                continue
            pod_metadata = pod["metadata"]
            uid = pod_metadata["uid"]
            found[uid] = HoldingPod(
                metadata["namespace"],
                pod_metadata["name"],
                uid,
                deleting=bool(pod_metadata.get("deletionTimestamp")),
                controlled=controller(pod_metadata) is not None,
                written=not by_scheduler or (uid in found and found[uid].written),
            )
    return tuple(sorted(found.values(), key=lambda each: each.key))


def plan(
    node: NodeState,
    direction: str,
    options: MigrationOptions,
    services: Mapping[str, Service],
    known: Collection[str] = (),
) -> Plan:
    """Return the remaining steps of a node. ``known`` are the existing DaemonSets."""
    if not node.exists:
        missing = Problem(
            "no-node", f"The Node {node.name} does not exist.", "Check accelerator_node_name.", blocks=True
        )
        return Plan(node.name, direction, NONE, problems=(missing,))
    found = _forward(node, options, services) if direction == FORWARD else _back(node, options, frozenset(known))
    problems = [each for each in found.problems if each.code not in options.accept]
    return Plan(found.node, found.direction, found.kind, found.steps, tuple(problems) if found.steps else ())


def _forward(node: NodeState, options: MigrationOptions, services: Mapping[str, Service]) -> Plan:
    steps: list[Step] = []
    foreign = [each for each in node.plugins if each.key not in node.record.get("plugins", ())]
    if node.kind == NONE and node.taint is None and not node.by_plugin:
        return Plan(node.name, FORWARD, NONE)
    is_withdrawn = node.kind == FOREIGN and not node.plugins and not node.offered and not node.by_plugin
    if is_withdrawn and node.taint is None and node.published:
        return Plan(node.name, FORWARD, node.kind)
    if node.taint != FORWARD:
        steps.append(_taint_step(FORWARD))
    if node.by_plugin:
        steps.append(Step("evict", _describe_end_of_pods(node.by_plugin, options), pods=node.by_plugin))
    if node.plugins or (node.kind == FOREIGN and node.offered):
        names = tuple(each.key for each in node.plugins)
        steps.append(Step("withdraw", f"keep {', '.join(names) or 'the device plugin'} off this node", plugins=names))
    steps.append(Step("driver", "the node driver publishes its devices for claims"))
    steps.append(Step("untaint", "remove the taint when the devices are published"))
    return Plan(node.name, FORWARD, node.kind, tuple(steps), tuple(_forward_problems(node, foreign, options, services)))


def _forward_problems(
    node: NodeState, foreign: Sequence[Plugin], options: MigrationOptions, services: Mapping[str, Service]
) -> Iterable[Problem]:
    for each in foreign:
        if each.way == NO_METHOD:
            yield Problem(
                "plugin-is-operated",
                f"The DaemonSet {each.key} belongs to {each.owner}, which would revert every change of it.",
                "Exclude this node in the configuration of its owner (gpu-operator, Helm), and run this again.",
                blocks=True,
            )
        elif each.key not in options.plugins and "*" not in options.plugins:
            yield Problem(
                "plugin-not-named",
                f"The DaemonSet {each.key} serves device plugins on this node, and the option plugins does not contain it.",
                f"Add it to plugins, if it offers {', '.join(node.offered) or 'the devices'}.",
                blocks=True,
            )
    for name in node.strays:
        yield Problem(
            "plugin-is-a-pod",
            f"The pod {name} serves device plugins on this node, and does not belong to a DaemonSet.",
            "Delete the pod, and run this again.",
            blocks=True,
        )
    if node.kind == UNKNOWN and not node.strays:
        yield Problem(
            "plugin-unknown",
            f"The Node offers {', '.join(node.offered)}, and no pod on it serves device plugins.",
            "Find the program on the node that serves them, and stop it.",
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
                f"According to the label {label}, the device plugin offers each device {node.labels[label]} times. With claims, each pod has a whole "
                "device, so fewer pods can run at the same time.",
                "Share devices in the layout (shares) and claim shares in the pods, or accept the problem.",
                blocks=True,
            )
    for name in node.offered:
        service = services.get(name)
        if service is not None and service.problem:
            yield Problem("shared-resource", f"{name} is {service.problem}.", "", blocks=True)
    # Without a foreign plugin the node offers no resources, so controllers cannot create pods with devices on it.
    ignored = {"comes-back"} if node.kind == FOREIGN else set()
    yield from _pod_problems(node.by_plugin, options, ignored)


def _back(node: NodeState, options: MigrationOptions, known: Collection[str]) -> Plan:
    target = target_plugin(node, options)
    recorded = tuple(str(each) for each in node.record.get("plugins") or ())
    kept_off = node.labels.get(KEPT_OFF) == OFF or bool(node.record)
    if node.taint is None:
        has_plugin = node.kind == OWN if target == OWN else bool(node.plugins) and not kept_off
        has_claims = node.published or node.by_claims or kept_off
        if (has_plugin and node.offered) or (not has_plugin and not has_claims and node.kind in (NONE, UNKNOWN)):
            return Plan(node.name, BACK, node.kind)
    steps: list[Step] = []
    problems: list[Problem] = []
    if node.taint != BACK:
        steps.append(_taint_step(BACK))
    if node.by_claims:
        steps.append(Step("evict", _describe_end_of_pods(node.by_claims, options), pods=node.by_claims))
    if target == OWN:
        steps.append(Step("driver", "the node driver offers its devices through the kubelet's device-plugin API"))
    else:
        steps.append(Step("driver", "the node driver is removed"))
        steps.append(
            Step("restore", f"allow {', '.join(recorded) or 'the device plugin'} on this node", plugins=recorded)
        )
        missing = sorted(set(recorded) - set(known))
        if missing or not (recorded or node.plugins or node.labels.get(KEPT_OFF) == OFF):
            problems.append(
                Problem(
                    "plugin-is-gone",
                    f"The DaemonSet {', '.join(missing)} does not exist any more."
                    if missing
                    else "The previous device plugin of this node is not known.",
                    "Install it first. Its pods run on this node after the migration.",
                    blocks=True,
                )
            )
    steps.append(Step("untaint", "remove the taint when the node offers its resources"))
    with_user_claims = [each.key for each in node.by_claims if each.written]
    if with_user_claims:
        problems.append(
            Problem(
                "claims-of-users",
                f"Users created the claims of these pods: {', '.join(with_user_claims)}. Device plugins do not serve claims.",
                "Change the pods to request a resource. Or accept the problem, if other nodes publish devices for these claims.",
                blocks=True,
            )
        )
    return Plan(node.name, BACK, target, tuple(steps), (*problems, *_pod_problems(node.by_claims, options, set())))


def target_plugin(node: NodeState, options: MigrationOptions) -> str:
    """Return the device plugin that the node has after a migration back: OWN or FOREIGN."""
    if options.back_to != AUTO:
        return options.back_to
    return FOREIGN if node.kind == FOREIGN else OWN


def _taint_step(direction: str) -> Step:
    return Step("taint", f"add the taint {TAINT}={direction}:{EFFECT}, which keeps new pods off the node")


def _pod_problems(
    holders: Sequence[HoldingPod], options: MigrationOptions, ignored: Collection[str]
) -> Iterable[Problem]:
    """Yield the problems of the pods that must end, except those with the codes in ``ignored``."""
    for each in holders:
        for problem in each.problems:
            if problem.code in ignored or problem.code == "no-controller":
                continue
            yield Problem(problem.code, f"{each.key}: {problem.text}", problem.remedy, problem.blocks)
    alone = [each.key for each in holders if not each.controlled and not each.deleting]
    if alone and not options.evict_unmanaged:
        yield Problem(
            "no-controller",
            f"These pods have no controller that creates a replacement: {', '.join(alone)}.",
            "Delete the pods that are not needed, or allow their eviction (evict_unmanaged) and keep their manifests.",
            blocks=True,
        )
    if holders and not options.evict:
        yield Problem(
            "no-consent",
            f"The option evict does not allow the eviction of these pods: {', '.join(each.key for each in holders)}.",
            "Set evict, or wait until they have ended.",
            blocks=True,
        )


def _describe_end_of_pods(holders: Sequence[HoldingPod], options: MigrationOptions) -> str:
    """Return how the pods end: by eviction, or without one while the run waits.

    If the options do not decide, the text says that they are evicted, and the problem no-consent prevents the migration.
    """
    is_decided = options.evict or "no-consent" in options.accept
    waited = [each.key for each in holders if is_decided and not options.evicts(each)]
    evicted = [each.key for each in holders if each.key not in waited]
    parts = [f"these pods are evicted: {', '.join(evicted)}"] if evicted else []
    parts += [f"this run waits for these pods: {', '.join(waited)}"] if waited else []
    return "; ".join(parts)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
