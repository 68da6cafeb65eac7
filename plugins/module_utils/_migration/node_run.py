# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Migrate one node between a device plugin and claims: read its state, plan, write, and verify.

Every write is idempotent. Another call of the same method resumes an interrupted run.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from .._kubernetes.client import SETTLE_SECONDS, Api, ApiError, was_just_written
from .._kubernetes.eviction import Evictions
from .._kubernetes.managed_classes import Classes, is_ours
from ..core.dra.extended_resources import class_of
from ..core.errors import AcceleratorError
from ..core.texts import join_problems
from ..core.times import now_text
from . import node_plan as nodes
from .migration_inventory import AFFINITY, Json, Plugin, Problem, Service
from .node_plan import BACK, FORWARD, KEPT_OFF, OFF, RECORD, TAINT, HoldingPod, MigrationOptions, NodeState, Plan
from .queries import SETS, NodeReading, read_node
from .resource_names import FACTS, meaning

MANAGER = "dra-accelerators-migration"
POLL_SECONDS = 2.0
#: A check can list all claims of the cluster. The pause after a check is its duration times POLL_FACTOR, at least
#: POLL_SECONDS.
POLL_FACTOR = 5
#: A kubelet can report a resource with amount 0 again for this time, in seconds, after its removal from the status.
QUIET_SECONDS = 25.0
ATTEMPTS = 5
#: From this minor version of Kubernetes on, a request for a resource with amount 0 is served by claims. Before, the
#: scheduler assumed a device plugin.
ZERO_MEANS_CLAIMS_MINOR = 37
_MERGE = "application/merge-patch+json"


class Blocked(AcceleratorError):
    """Problems prevent the migration, and nothing was changed."""

    default_code = "blocked"

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        listed = join_problems(
            (f"({number}) {each.text.rstrip('.')}. {each.remedy}".strip() for number, each in enumerate(problems, 1)),
            " ",
        )
        super().__init__(f"{name} cannot be migrated yet, and nothing was changed. {listed}")
        self.problems = tuple(problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the problems."""
        return {**super().to_dict(), "problems": [each.document() for each in self.problems]}


class TimeIsUp(AcceleratorError):
    """The expected state was not reached before the timeout. ``pods`` are the pods that prevent it."""

    default_code = "time-is-up"

    def __init__(self, message: str, *, hint: str, pods: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.pods = tuple(pods)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the pods."""
        return {**super().to_dict(), "pods": list(self.pods)}


@dataclass
class MigrationResult:
    """The result of a migration. ``steps`` has one line for each write, in check mode for each predicted write.

    ``blocked_by`` are the pods that had to end. ``up_to_date`` is true if there was nothing to change and nothing to wait
    for.
    """

    steps: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    blocked_by: list[str] = field(default_factory=list)
    up_to_date: bool = True
    plan: Plan | None = None


class NodeMigration:
    """Migrate one node. ``timeout`` is the maximum wait for each state, in seconds."""

    def __init__(
        self,
        api: Api,
        name: str,
        direction: str,
        options: MigrationOptions,
        *,
        kubelet_root: str,
        timeout: float,
        dry: bool,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] | None = None,
        now: Callable[[], str] = now_text,
    ) -> None:
        self._api = api
        self._name = name
        self._direction = direction
        self._options = options
        self._root = kubelet_root
        self._timeout = timeout
        self._dry = dry
        self._clock = clock or time.monotonic
        self._sleep = sleep or time.sleep
        self._now = now
        self._path = f"/api/v1/nodes/{quote(name, safe='')}"
        self._pause = POLL_SECONDS
        self._read_at = 0.0
        self._known: NodeReading | None = None
        self.done = MigrationResult()

    def drain(self) -> MigrationResult:
        """Evict the pods that use devices in the previous way, and prevent new ones.

        Raises Blocked, TimeIsUp, ApiError.
        """
        node, plan, sets = self._read_all()
        self.done.plan = plan
        if not plan.steps:
            return self.done
        if plan.blocks:
            raise Blocked(self._name, plan.blocks)
        steps = plan.of(nodes.DRAIN_STEPS)
        holders = [one for each in steps for one in each.pods]
        self.done.blocked_by += [each.key for each in holders]
        # An interrupted run can have written the taint recently. Then the scheduler can still bind pods.
        item = self._known.item if self._known and node.taint == self._direction else None
        is_new = item is not None and was_just_written(item, MANAGER, self._now())
        self.done.up_to_date = not steps and not is_new
        if self._dry:
            self.done.steps += [each.text for each in steps]
            self.done.evicted += [each.key for each in holders if not each.deleting and self._options.evicts(each)]
            return self.done
        self._add_taint(node)
        self._end_pods(is_new=is_new)
        if self._direction == FORWARD and node.kind == nodes.FOREIGN:
            self._withdraw(sets)
            # Pods that tolerate all taints can have restarted. After the devices are withdrawn they cannot.
            self._end_pods()
        return self.done

    def return_to_service(self) -> MigrationResult:
        """Wait until the node offers its devices in the new way, and allow pods. Raises TimeIsUp, ApiError."""
        node, plan, sets = self._read_all()
        self.done.plan = plan
        if not plan.steps or node.taint is None:
            return self.done
        steps = plan.of(nodes.SERVICE_STEPS)
        self.done.up_to_date = not steps
        if self._dry:
            self.done.steps += [each.text for each in steps]
            return self.done
        if self._direction == FORWARD:
            self._wait(
                "its devices are published for claims", lambda found: bool(found.published) and not found.offered
            )
            self._remove_empty_resources(node)
        else:
            is_foreign = nodes.target_plugin(node, self._options) == nodes.FOREIGN
            if is_foreign:
                self._restore_labels(node)
            # While the taint keeps the plugin's pods away, their template changes without a pod restart on this node.
            self.done.steps += remove_affinities(self._api, sets, dry=False)
            if is_foreign:
                # The plugin's pods do not tolerate the taint. The node publishes and offers nothing until they serve.
                self._remove_taint(remove_record=False)
            self._wait("it offers its resources", lambda found: bool(found.offered))
        # Remove the record last: while it exists, the next run resumes an interrupted run.
        self._remove_taint(remove_record=self._direction == BACK)
        return self.done

    def _read_all(self) -> tuple[NodeState, Plan, tuple[Json, ...]]:
        """Read all objects, and return the node, its plan, and the DaemonSets."""
        found = self._known = self._read(None)
        known = [f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in found.sets]
        plan = nodes.plan(found.node, self._direction, self._options, found.services, known)
        return found.node, plan, found.sets

    def _refresh_node(self) -> NodeState:
        """Read the node, its pods, its slices, and its claims from the last complete read."""
        return self._read(self._known).node

    def _read(self, known: NodeReading | None) -> NodeReading:
        self._read_at = self._clock()
        found = read_node(self._api, self._name, direction=self._direction, kubelet_root=self._root, known=known)
        self._pause = max(POLL_SECONDS, POLL_FACTOR * (self._clock() - self._read_at))
        return found

    # Writes to the Node

    def _patch_node(self, change: Callable[[Json], dict[str, Any] | None], what: str) -> None:
        """Change the Node by a merge patch for the version that was read. No write if ``change`` returns None."""
        for attempt in range(1, ATTEMPTS + 1):
            item = self._api.request("GET", self._path)
            body = change(item)
            if body is None:
                return
            version = {"resourceVersion": item["metadata"]["resourceVersion"]}
            body = {**body, "metadata": {**body.get("metadata", {}), **version}}
            try:
                self._api.request("PATCH", self._path, query={"fieldManager": MANAGER}, body=body, content_type=_MERGE)
            except ApiError as error:
                if error.status == 409 and attempt < ATTEMPTS:
                    continue
                raise
            self.done.steps.append(what)
            return

    def _add_taint(self, node: NodeState) -> None:
        record = dict(node.record)
        if self._direction == FORWARD and node.plugins:
            names = {*record.get("plugins", ()), *(each.key for each in node.plugins)}
            switches = {each.label: node.labels.get(each.label) for each in node.plugins if each.label}
            record = {"plugins": sorted(names), "labels": {**switches, **record.get("labels", {})}}

        def change(item: Json) -> dict[str, Any] | None:
            taints = (item.get("spec") or {}).get("taints") or []
            wanted = [each for each in taints if each.get("key") != TAINT] + [nodes.taint_of(self._direction)]
            same = any(each.get("key") == TAINT and each.get("value") == self._direction for each in taints)
            annotations = {RECORD: json.dumps(record, sort_keys=True)} if record else {}
            if same and nodes.record_of(item["metadata"]) == record:
                return None
            return {"metadata": {"annotations": annotations} if annotations else {}, "spec": {"taints": wanted}}

        self._patch_node(change, f"added the taint {TAINT}={self._direction} to Node {self._name}")

    def _remove_taint(self, *, remove_record: bool) -> None:
        def change(item: Json) -> dict[str, Any] | None:
            taints = (item.get("spec") or {}).get("taints") or []
            other_taints = [each for each in taints if each.get("key") != TAINT]
            has_record = remove_record and RECORD in (item["metadata"].get("annotations") or {})
            if len(other_taints) == len(taints) and not has_record:
                return None
            metadata = {"annotations": {RECORD: None}} if has_record else {}
            return {"metadata": metadata, "spec": {"taints": other_taints or None}}

        self._patch_node(change, f"removed the taint {TAINT} from Node {self._name}")

    def _label(self, labels: Mapping[str, str | None]) -> None:
        def change(item: Json) -> dict[str, Any] | None:
            current = item["metadata"].get("labels") or {}
            if all(current.get(key) == value for key, value in labels.items()):
                return None
            return {"metadata": {"labels": dict(labels)}}

        if labels:
            listed = ", ".join(
                f"{key}={value}" if value is not None else f"{key} (removed)" for key, value in labels.items()
            )
            self._patch_node(change, f"set labels of Node {self._name}: {listed}")

    def _remove_empty_resources(self, before: NodeState) -> None:
        """Remove resources with amount 0 from the Node's status, if the scheduler would assume a device plugin for them."""
        if not before.listed or minor_version(self._api) >= ZERO_MEANS_CLAIMS_MINOR:
            return
        deadline, quiet = self._clock() + self._timeout, self._clock()
        while True:
            node = self._refresh_node()
            if node.listed:
                removed = dict.fromkeys(sorted(node.listed))
                body = {"status": {"capacity": removed, "allocatable": removed}}
                self._api.request(
                    "PATCH", f"{self._path}/status", query={"fieldManager": MANAGER}, body=body, content_type=_MERGE
                )
                line = f"removed {', '.join(removed)} from the status of Node {self._name}"
                self.done.steps += [line] if line not in self.done.steps else []
                quiet = self._clock()
            elif self._read_at - quiet >= QUIET_SECONDS:
                return
            if self._clock() >= deadline:
                raise TimeIsUp(
                    f"After {self._timeout:g} s the kubelet of {self._name} still reports {', '.join(sorted(node.listed))} with the amount 0",
                    hint="This version of Kubernetes then assumes a device plugin. The kubelet removes the resources of a stopped plugin after five "
                    "minutes. Run this again.",
                )
            self._sleep(self._pause)

    # Pods

    def _end_pods(self, *, is_new: bool = False) -> None:
        """Evict the pods that use devices in the previous way, and wait until none is left.

        ``is_new`` is true if the taint is new. The method waits for the known claims by name. When no pod uses these claims,
        it lists all claims again, to find new ones.
        """
        begin = self._clock()
        deadline = begin + self._timeout
        settled = begin + (SETTLE_SECONDS if self.done.steps or is_new else 0.0)
        asked: set[str] = set()
        evictions = Evictions(self._api)
        refusals = evictions.refusals
        complete = False
        while True:
            node = self._read_all()[0] if complete else self._refresh_node()
            holders = node.by_plugin if self._direction == FORWARD else node.by_claims
            if not holders and self._read_at >= settled and (complete or self._direction == FORWARD):
                return
            for each in holders:
                if not each.deleting and self._options.evicts(each):
                    self._evict(each, asked, evictions)
            evictions.check()
            if holders and self._clock() >= deadline:
                raise TimeIsUp(
                    f"After {self._timeout:g} s these pods on {self._name} still use its devices: "
                    + "; ".join(
                        each.key + (f" ({refusals[each.uid]})" if each.uid in refusals else "") for each in holders
                    ),
                    hint="The taint stays and keeps new pods off the node. Find out why these pods do not end, and run this again. Or migrate back.",
                    pods=[each.key for each in holders],
                )
            complete = not holders and self._direction == BACK
            self._sleep(self._pause if holders else max(0.0, settled - self._clock()))

    def _evict(self, holder: HoldingPod, asked: set[str], evictions: Evictions) -> None:
        if evictions.request(holder.namespace, holder.name, holder.uid) and holder.uid not in asked:
            asked.add(holder.uid)
            self.done.evicted.append(holder.key)
            self.done.steps.append(f"evicted {holder.key}")

    # Device plugins of other vendors or users

    def _withdraw(self, sets: Sequence[Json]) -> None:
        node = self._refresh_node()
        labels: dict[str, str | None] = {}
        for plugin in node.plugins:
            if plugin.way == AFFINITY:
                self._exclude_node(plugin, sets)
                labels[KEPT_OFF] = OFF
            elif plugin.label:
                labels[plugin.label] = "false"
        self._label(labels)
        self._wait(
            "no device plugin runs on the node, and the node offers none of its resources",
            lambda found: not found.plugins and not found.offered,
        )

    def _exclude_node(self, plugin: Plugin, sets: Sequence[Json]) -> None:
        for item in sets:
            metadata = item["metadata"]
            is_it = f"{metadata['namespace']}/{metadata['name']}" == plugin.key
            if is_it and not plugin.excludes and change_affinity(self._api, item, nodes.affinity_with):
                self.done.steps.append(f"excluded nodes with {KEPT_OFF}={OFF} from DaemonSet {plugin.key}")

    def _restore_labels(self, node: NodeState) -> None:
        previous = node.record.get("labels") or {}
        labels: dict[str, str | None] = {str(key): value for key, value in previous.items()}
        if KEPT_OFF in node.labels:
            labels[KEPT_OFF] = None
        self._label(labels)

    def _wait(self, expected: str, is_reached: Callable[[NodeState], bool]) -> None:
        """Wait until the node has a state. ``expected`` describes the state. Raises TimeIsUp."""
        deadline = self._clock() + self._timeout
        while True:
            node = self._refresh_node()
            if is_reached(node):
                return
            if self._clock() >= deadline:
                offered = (
                    ", ".join(f"{name}: {number}" for name, number in node.offered.items())
                    or "no resource of a device plugin"
                )
                raise TimeIsUp(
                    f"After {self._timeout:g} s the expected state of {self._name} is not reached: {expected}. It offers {offered}. Drivers that publish "
                    f"devices: {', '.join(sorted(node.published)) or 'none'}. Device plugins: {', '.join(each.key for each in node.plugins) or 'none'}",
                    hint="The taint stays. Correct this problem and run this again to resume. Or migrate back.",
                )
            self._sleep(self._pause)


def minor_version(api: Api) -> int:
    """Return the minor version of the API server; 0 if unknown. Raises ApiError."""
    text = str(api.request("GET", "/version").get("minor", ""))
    digits = "".join(letter for letter in text if letter.isdecimal())
    return int(digits) if digits else 0


def change_affinity(api: Api, item: Json, change: Callable[[Json], dict[str, Any] | None]) -> bool:
    """Change the affinity of a DaemonSet's template. Returns whether this was a change. Raises ApiError."""
    metadata = item["metadata"]
    path = f"/apis/apps/v1/namespaces/{quote(metadata['namespace'])}/daemonsets/{quote(metadata['name'])}"
    for attempt in range(1, ATTEMPTS + 1):
        body = copy.deepcopy(api.request("GET", path))
        spec = body["spec"]["template"]["spec"]
        affinity = change(spec)
        if affinity == (spec.get("affinity") or None):
            return False
        spec["affinity"] = affinity
        try:
            api.request("PUT", path, query={"fieldManager": MANAGER}, body=body)
        except ApiError as error:
            if error.status == 409 and attempt < ATTEMPTS:
                continue
            raise
        break
    return True


def remove_affinities(api: Api, sets: Sequence[Json], *, dry: bool) -> list[str]:
    """Remove this collection's affinity from DaemonSets if no node has the label KEPT_OFF. Returns the changes as text. Raises ApiError."""
    if api.list_all("/api/v1/nodes", {"labelSelector": f"{KEPT_OFF}={OFF}"}):
        return []
    lines = []
    for item in sets:
        template = item["spec"]["template"]["spec"]
        if nodes.excludes(template) and (dry or change_affinity(api, item, nodes.affinity_without)):
            metadata = item["metadata"]
            lines.append(
                f"removed the affinity for {KEPT_OFF} from DaemonSet {metadata['namespace']}/{metadata['name']}"
            )
    return lines


def prepare(api: Api, services: Mapping[str, Service], *, dry: bool) -> list[str]:
    """Create the DeviceClass of each resource that supports one.

    Returns the changes as text. Raises AcceleratorError, ApiError. A managed class without the resource name keeps its
    other fields. A class that this collection does not manage is rejected.
    """
    missing = [each for each in services.values() if not each.exists and not each.problem]
    if not missing:
        return []
    classes = Classes(api)
    present = classes.find()
    wanted = []
    for each in missing:
        existing = present.get(each.device_class)
        known = meaning(each.resource)
        selectors = [known.selector] if known else []
        config: list[Any] = []
        if existing is not None and is_ours(existing):
            spec = existing.get("spec") or {}
            selectors = [one["cel"]["expression"] for one in spec.get("selectors") or () if one.get("cel")]
            config = list(spec.get("config") or ())
        wanted.append(
            {"name": each.device_class, "selectors": selectors, "config": config, "extended_resource": each.resource}
        )
    done = classes.apply(wanted, absent=False, unmanaged="refuse", dry=dry)
    if done.dropped:
        raise AcceleratorError(
            f"The API server does not keep {', '.join(done.dropped)}",
            hint="Unchanged pods need the feature gate DRAExtendedResource on the API server, the scheduler, the controller manager, and the "
            "kubelets. It is on by default since Kubernetes 1.36.",
            code="gate-off",
        )
    verbs = {"create": "created", "update": "updated"}
    return [f"{verbs.get(step['verb'], step['verb'])} DeviceClass {step['name']}" for step in done.steps]


def is_created_by_prepare(item: Json) -> bool:
    """Return whether a DeviceClass was created by ``prepare`` and not by the role device_classes."""
    resource = str((item.get("spec") or {}).get("extendedResourceName") or "")
    if not is_ours(item) or not resource:
        return False
    of_role: Collection[str] = {name for each in FACTS for name in each.extended_resources.values()}
    return resource not in of_role and item["metadata"]["name"] in (class_of(resource), f"whole-{class_of(resource)}")


def remove_shared_objects(api: Api, *, dry: bool) -> list[str]:
    """Remove the cluster-wide objects of a migration if no node publishes devices for claims or is marked.

    Raises ApiError. Returns the changes as text.
    """
    sets = api.list_all(SETS, {})
    lines = remove_affinities(api, sets, dry=dry)
    try:
        classes = Classes(api)
    except ApiError as error:
        if error.code == "api-version":
            return lines
        raise
    drivers = {each.driver_name for each in FACTS}

    def driver(item: Json) -> str | None:
        name = str(item["spec"]["driver"])
        return name if name in drivers else None

    if api.list_all(f"/apis/resource.k8s.io/{classes.version}/resourceslices", {}, driver):
        return lines
    names = sorted(name for name, item in classes.find().items() if is_created_by_prepare(item))
    if names:
        done = classes.apply([{"name": name} for name in names], absent=True, unmanaged="leave", dry=dry)
        lines += [f"removed DeviceClass {step['name']}" for step in done.steps]
    return lines
