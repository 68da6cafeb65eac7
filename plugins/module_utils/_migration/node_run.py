# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Move one node between a device plugin and claims: read its state, plan, write, and verify.

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
from .node_plan import BACK, FORWARD, KEPT_OFF, OFF, RECORD, TAINT, Holder, Node, Plan, Wishes
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
NONE_IS_NONE = 37
_MERGE = "application/merge-patch+json"


class Blocked(AcceleratorError):
    """Report that problems prevent the move and that nothing was changed."""

    default_code = "blocked"

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        listed = join_problems(
            (f"({number}) {each.text.rstrip('.')}. {each.remedy}".strip() for number, each in enumerate(problems, 1)),
            " ",
        )
        super().__init__(f"{name} cannot be moved yet, and nothing was changed. {listed}")
        self.problems = tuple(problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the problems."""
        return {**super().to_dict(), "problems": [each.document() for each in self.problems]}


class TimeIsUp(AcceleratorError):
    """Report that an awaited state was not reached in time. ``pods`` are the pods that prevent it."""

    default_code = "time-is-up"

    def __init__(self, message: str, *, hint: str, pods: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.pods = tuple(pods)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the pods."""
        return {**super().to_dict(), "pods": list(self.pods)}


@dataclass
class Done:
    """The writes, in check mode the predicted writes, one line each.

    ``blocked_by`` are the pods that had to end. ``up_to_date`` says that there was nothing to change and nothing to wait
    for.
    """

    steps: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    blocked_by: list[str] = field(default_factory=list)
    up_to_date: bool = True
    plan: Plan | None = None


class Mover:
    """Move one node. ``timeout`` is the maximum wait for each state, in seconds."""

    def __init__(
        self,
        api: Api,
        name: str,
        direction: str,
        wishes: Wishes,
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
        self._wishes = wishes
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
        self.done = Done()

    def drain(self) -> Done:
        """Evict the pods that use devices in the previous way, and prevent new ones.

        Raises Blocked, TimeIsUp, ApiError.
        """
        node, plan, sets = self._read_all()
        self.done.plan = plan
        if not plan.steps:
            return self.done
        if plan.blocks:
            raise Blocked(self._name, plan.blocks)
        left = plan.of(nodes.DRAIN_STEPS)
        holders = [one for each in left for one in each.pods]
        self.done.blocked_by += [each.key for each in holders]
        # An interrupted run can have written the taint recently. Then the scheduler can still bind pods.
        item = self._known.item if self._known and node.taint == self._direction else None
        is_new = item is not None and was_just_written(item, MANAGER, self._now())
        self.done.up_to_date = not left and not is_new
        if self._dry:
            self.done.steps += [each.text for each in left]
            self.done.evicted += [each.key for each in holders if not each.deleting and self._wishes.evicts(each)]
            return self.done
        self._mark(node)
        self._clear(is_new=is_new)
        if self._direction == FORWARD and node.kind == nodes.FOREIGN:
            self._withdraw(sets)
            # Pods that tolerate all taints can have restarted. After the devices are withdrawn they cannot.
            self._clear()
        return self.done

    def return_to_service(self) -> Done:
        """Wait until the node offers its devices in the new way, and allow pods. Raises TimeIsUp, ApiError."""
        node, plan, sets = self._read_all()
        self.done.plan = plan
        if not plan.steps or node.taint is None:
            return self.done
        left = plan.of(nodes.SERVICE_STEPS)
        self.done.up_to_date = not left
        if self._dry:
            self.done.steps += [each.text for each in left]
            return self.done
        if self._direction == FORWARD:
            self._wait(
                "its devices are published for claims", lambda found: bool(found.published) and not found.offered
            )
            self._forget_none(node)
        else:
            foreign = self._back_to(node) == nodes.FOREIGN
            if foreign:
                self._restore(node)
            # While the taint keeps the plugin's pods away, their template changes without a pod restart on this node.
            self.done.steps += strip(self._api, sets, dry=False)
            if foreign:
                # They do not tolerate the taint. The node publishes and offers nothing until they serve.
                self._unmark(forget=False)
            self._wait("it offers its resources", lambda found: bool(found.offered))
        # Remove the record last: while it exists, the next run resumes an interrupted run.
        self._unmark(forget=self._direction == BACK)
        return self.done

    def _back_to(self, node: Node) -> str:
        if self._wishes.back_to != nodes.AUTO:
            return self._wishes.back_to
        return nodes.FOREIGN if node.kind == nodes.FOREIGN else nodes.OWN

    def _read_all(self) -> tuple[Node, Plan, tuple[Json, ...]]:
        """Read all objects, and return the node, its plan, and the DaemonSets."""
        found = self._known = self._read(None)
        known = [f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in found.sets]
        plan = nodes.plan(found.node, self._direction, self._wishes, found.services, known)
        return found.node, plan, found.sets

    def _refresh_node(self) -> Node:
        """Read the node, its pods, its slices, and its claims from the last complete read."""
        return self._read(self._known).node

    def _read(self, known: NodeReading | None) -> NodeReading:
        self._read_at = self._clock()
        found = read_node(self._api, self._name, direction=self._direction, kubelet_root=self._root, known=known)
        self._pause = max(POLL_SECONDS, POLL_FACTOR * (self._clock() - self._read_at))
        return found

    # Writes to the Node

    def _write_node(self, change: Callable[[Json], dict[str, Any] | None], what: str) -> None:
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

    def _mark(self, node: Node) -> None:
        record = dict(node.record)
        if self._direction == FORWARD and node.plugins:
            names = {*record.get("plugins", ()), *(each.key for each in node.plugins)}
            switches = {each.label: node.labels.get(each.label) for each in node.plugins if each.label}
            record = {"plugins": sorted(names), "labels": {**switches, **record.get("labels", {})}}

        def change(item: Json) -> dict[str, Any] | None:
            taints = (item.get("spec") or {}).get("taints") or []
            wanted = [each for each in taints if each.get("key") != TAINT] + [nodes.taint_of(self._direction)]
            same = any(each.get("key") == TAINT and each.get("value") == self._direction for each in taints)
            noted = {RECORD: json.dumps(record, sort_keys=True)} if record else {}
            if same and nodes.record_of(item["metadata"]) == record:
                return None
            return {"metadata": {"annotations": noted} if noted else {}, "spec": {"taints": wanted}}

        self._write_node(change, f"gave Node {self._name} the taint {TAINT}={self._direction}")

    def _unmark(self, *, forget: bool) -> None:
        def change(item: Json) -> dict[str, Any] | None:
            taints = (item.get("spec") or {}).get("taints") or []
            rest = [each for each in taints if each.get("key") != TAINT]
            noted = forget and RECORD in (item["metadata"].get("annotations") or {})
            if len(rest) == len(taints) and not noted:
                return None
            gone = {"annotations": {RECORD: None}} if noted else {}
            return {"metadata": gone, "spec": {"taints": rest or None}}

        self._write_node(change, f"opened Node {self._name}")

    def _label(self, labels: Mapping[str, str | None]) -> None:
        def change(item: Json) -> dict[str, Any] | None:
            there = item["metadata"].get("labels") or {}
            if all(there.get(key) == value for key, value in labels.items()):
                return None
            return {"metadata": {"labels": dict(labels)}}

        if labels:
            said = ", ".join(
                f"{key}={value}" if value is not None else f"{key} (removed)" for key, value in labels.items()
            )
            self._write_node(change, f"set labels of Node {self._name}: {said}")

    def _forget_none(self, before: Node) -> None:
        """Remove resources with amount 0 from the Node's status, if the scheduler would assume a device plugin for them."""
        if not before.listed or minor_of(self._api) >= NONE_IS_NONE:
            return
        deadline, quiet = self._clock() + self._timeout, self._clock()
        while True:
            node = self._refresh_node()
            if node.listed:
                gone = dict.fromkeys(sorted(node.listed))
                body = {"status": {"capacity": gone, "allocatable": gone}}
                self._api.request(
                    "PATCH", f"{self._path}/status", query={"fieldManager": MANAGER}, body=body, content_type=_MERGE
                )
                line = f"took {', '.join(gone)} from the status of Node {self._name}"
                self.done.steps += [line] if line not in self.done.steps else []
                quiet = self._clock()
            elif self._read_at - quiet >= QUIET_SECONDS:
                return
            if self._clock() >= deadline:
                raise TimeIsUp(
                    f"After {self._timeout:g} s the kubelet of {self._name} still names {', '.join(sorted(node.listed))}, of which it has none",
                    hint="This Kubernetes takes that for a device plugin. The kubelet forgets a plugin five minutes after it has gone: run again.",
                )
            self._sleep(self._pause)

    # Pods

    def _clear(self, *, is_new: bool = False) -> None:
        """Evict the pods that use devices in the previous way, and wait until none is left.

        ``is_new`` says that the taint is new. The method waits for the known claims by name. When no pod uses these, it
        lists all claims again, to find new claims.
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
                if not each.deleting and self._wishes.evicts(each):
                    self._evict(each, asked, evictions)
            evictions.check()
            if holders and self._clock() >= deadline:
                raise TimeIsUp(
                    f"After {self._timeout:g} s there are still pods on {self._name} that have its devices: "
                    + "; ".join(
                        each.key + (f" ({refusals[each.uid]})" if each.uid in refusals else "") for each in holders
                    ),
                    hint="The taint stays and keeps new pods off. Find out why these do not end, and run this again; or migrate back.",
                    pods=[each.key for each in holders],
                )
            complete = not holders and self._direction == BACK
            self._sleep(self._pause if holders else max(0.0, settled - self._clock()))

    def _evict(self, holder: Holder, asked: set[str], evictions: Evictions) -> None:
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
                self._keep_off(plugin, sets)
                labels[KEPT_OFF] = OFF
            elif plugin.label:
                labels[plugin.label] = "false"
        self._label(labels)
        self._wait(
            "no device plugin runs there and none of its resources is offered",
            lambda found: not found.plugins and not found.offered,
        )

    def _keep_off(self, plugin: Plugin, sets: Sequence[Json]) -> None:
        for item in sets:
            metadata = item["metadata"]
            is_it = f"{metadata['namespace']}/{metadata['name']}" == plugin.key
            if is_it and not plugin.excludes and change_affinity(self._api, item, nodes.affinity_with):
                self.done.steps.append(f"had DaemonSet {plugin.key} stay off nodes with {KEPT_OFF}={OFF}")

    def _restore(self, node: Node) -> None:
        former = node.record.get("labels") or {}
        labels: dict[str, str | None] = {str(key): value for key, value in former.items()}
        if KEPT_OFF in node.labels:
            labels[KEPT_OFF] = None
        self._label(labels)

    def _wait(self, what: str, good: Callable[[Node], bool]) -> None:
        deadline = self._clock() + self._timeout
        while True:
            node = self._refresh_node()
            if good(node):
                return
            if self._clock() >= deadline:
                said = (
                    ", ".join(f"{name}: {number}" for name, number in node.offered.items())
                    or "no resource of a device plugin"
                )
                raise TimeIsUp(
                    f"After {self._timeout:g} s the expected state of {self._name} is not reached: {what}. It offers {said}; drivers that publish devices: "
                    f"{', '.join(sorted(node.published)) or 'none'}; device plugins: {', '.join(each.key for each in node.plugins) or 'none'}",
                    hint="The taint stays. Correct this problem and run this again to resume; or migrate back.",
                )
            self._sleep(self._pause)


def minor_of(api: Api) -> int:
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


def strip(api: Api, sets: Sequence[Json], *, dry: bool) -> list[str]:
    """Remove the affinity from DaemonSets if no marked node is left. Returns the changes as text. Raises ApiError."""
    if api.list_all("/api/v1/nodes", {"labelSelector": f"{KEPT_OFF}={OFF}"}):
        return []
    lines = []
    for item in sets:
        template = item["spec"]["template"]["spec"]
        if nodes.excludes(template) and (dry or change_affinity(api, item, nodes.affinity_without)):
            metadata = item["metadata"]
            lines.append(f"took the affinity by {KEPT_OFF} from DaemonSet {metadata['namespace']}/{metadata['name']}")
    return lines


def prepare(api: Api, services: Mapping[str, Service], *, dry: bool) -> list[str]:
    """Create the DeviceClass of each resource that supports one.

    Returns the changes as text. Raises AcceleratorError, ApiError. A managed class without the resource name keeps its
    other fields. A class that this collection does not manage is rejected.
    """
    missing = [each for each in services.values() if not each.exists and not each.why_not]
    if not missing:
        return []
    classes = Classes(api)
    present = classes.find()
    wanted = []
    for each in missing:
        there = present.get(each.device_class)
        known = meaning(each.resource)
        selectors = [known.selector] if known else []
        config: list[Any] = []
        if there is not None and is_ours(there):
            spec = there.get("spec") or {}
            selectors = [one["cel"]["expression"] for one in spec.get("selectors") or () if one.get("cel")]
            config = list(spec.get("config") or ())
        wanted.append(
            {"name": each.device_class, "selectors": selectors, "config": config, "extended_resource": each.resource}
        )
    done = classes.bring_about(wanted, absent=False, unmanaged="refuse", dry=dry)
    if done.dropped:
        raise AcceleratorError(
            f"The API server does not keep {', '.join(done.dropped)}",
            hint="Unchanged pods need the feature gate DRAExtendedResource on API server, scheduler, controller manager and kubelets; from "
            "Kubernetes 1.36 on it is on by default.",
            code="gate-off",
        )
    words = {"create": "wrote", "update": "changed"}
    return [f"{words.get(step['verb'], step['verb'])} DeviceClass {step['name']}" for step in done.steps]


def made_here(item: Json) -> bool:
    """Return whether a DeviceClass was created by ``prepare`` and not by the role device_classes."""
    resource = str((item.get("spec") or {}).get("extendedResourceName") or "")
    if not is_ours(item) or not resource:
        return False
    usual: Collection[str] = {name for each in FACTS for name in each.extended_resources.values()}
    return resource not in usual and item["metadata"]["name"] in (class_of(resource), f"whole-{class_of(resource)}")


def forget(api: Api, *, dry: bool) -> list[str]:
    """Remove the cluster-wide objects of a migration if no node publishes devices for claims or is marked.

    Raises ApiError. Returns the changes as text.
    """
    sets = api.list_all(SETS, {})
    lines = strip(api, sets, dry=dry)
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
    names = sorted(name for name, item in classes.find().items() if made_here(item))
    if names:
        done = classes.bring_about([{"name": name} for name in names], absent=True, unmanaged="leave", dry=dry)
        lines += [f"removed DeviceClass {step['name']}" for step in done.steps]
    return lines
