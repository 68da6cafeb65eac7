# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Takes one node out of its way of giving devices, and lets it into the other one. Looks, plans, writes, and looks again.

Every write can be made twice. A run that was cut short is gone on with by the same call.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from . import _migration_nodes as nodes
from ._device_classes import Classes, is_ours
from ._evictions import evict
from ._kubernetes import Api, ApiError
from ._migration_ask import SETS, look
from ._migration_inventory import AFFINITY, Json, Plugin, Problem, Service
from ._migration_nodes import BACK, FORWARD, KEPT_OFF, OFF, RECORD, TAINT, Holder, Node, Plan, Wishes
from ._resource_meanings import FACTS, meaning
from .core.errors import AcceleratorError
from .core.extended_resources import class_of
from .core.texts import join_problems

MANAGER = "dra-accelerators-migration"
LOOK_SECONDS = 2.0
#: A check lists all claims of the cluster. The pause after a check is its duration times LOOK_SHARE, at least LOOK_SECONDS.
LOOK_SHARE = 5
#: A resource that a kubelet names with none of it may be named again for so long after it was taken away.
QUIET_SECONDS = 25.0
ATTEMPTS = 5
#: From this minor version of Kubernetes on a resource of which a Node has none is asked of claims; before, it was a device plugin's.
NONE_IS_NONE = 37
_MERGE = "application/merge-patch+json"


class Blocked(AcceleratorError):
    """Something is in the way, and nothing was touched."""

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
    """What was waited for has not come. ``pods`` are those in the way."""

    default_code = "time-is-up"

    def __init__(self, message: str, *, hint: str, pods: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.pods = tuple(pods)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the pods."""
        return {**super().to_dict(), "pods": list(self.pods)}


@dataclass
class Done:
    """What was done, or in check mode would be: a line for each write.

    ``in_the_way`` are the pods that had to go, and ``settled`` says that there was nothing to do, nor to wait for.
    """

    steps: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    in_the_way: list[str] = field(default_factory=list)
    settled: bool = True
    plan: Plan | None = None


class Mover:
    """One node on its way. ``timeout`` is how many seconds it is waited for each thing."""

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
        self._path = f"/api/v1/nodes/{quote(name, safe='')}"
        self._pause = LOOK_SECONDS
        self.done = Done()

    def close(self) -> Done:
        """Have nobody on the node who has devices in the former way, and nobody come. Raises Blocked, TimeIsUp, ApiError."""
        node, plan, sets = self._look()
        self.done.plan = plan
        if not plan.steps:
            return self.done
        if plan.blocks:
            raise Blocked(self._name, plan.blocks)
        left = plan.of(nodes.CLOSING)
        holders = [one for each in left for one in each.pods]
        self.done.in_the_way += [each.key for each in holders]
        self.done.settled = not left
        if self._dry:
            self.done.steps += [each.text for each in left]
            self.done.evicted += [each.key for each in holders if not each.deleting and self._wishes.evicts(each)]
            return self.done
        self._mark(node)
        self._clear()
        if self._direction == FORWARD and node.kind == nodes.FOREIGN:
            self._withdraw(sets)
            # Pods that tolerate everything have come back meanwhile; now that nothing is offered they cannot.
            self._clear()
        return self.done

    def open(self) -> Done:
        """See that the node gives its devices away in the new way, and let pods come. Raises TimeIsUp, ApiError."""
        node, plan, sets = self._look()
        self.done.plan = plan
        if not plan.steps or node.taint is None:
            return self.done
        left = plan.of(nodes.OPENING)
        self.done.settled = not left
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
            # While the taint keeps the plugin's pods away, their template changes without a pod that would have to start again here.
            self.done.steps += strip(self._api, sets, dry=False)
            if foreign:
                # They do not tolerate the taint. Nothing is published of the node, nor offered before they serve.
                self._unmark(forget=False)
            self._wait("it offers its resources", lambda found: bool(found.offered))
        # What is noted goes last: as long as it is there, a run that was cut short is gone on with.
        self._unmark(forget=self._direction == BACK)
        return self.done

    def _back_to(self, node: Node) -> str:
        if self._wishes.back_to != nodes.AUTO:
            return self._wishes.back_to
        return nodes.FOREIGN if node.kind == nodes.FOREIGN else nodes.OWN

    def _look(self) -> tuple[Node, Plan, tuple[Json, ...]]:
        begin = self._clock()
        node, services, sets = look(self._api, self._name, direction=self._direction, kubelet_root=self._root)
        self._pause = max(LOOK_SECONDS, LOOK_SHARE * (self._clock() - begin))
        known = [f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in sets]
        return node, nodes.plan(node, self._direction, self._wishes, services, known), sets

    # Writes of the Node

    def _write_node(self, change: Callable[[Json], dict[str, Any] | None], what: str) -> None:
        """Change the Node by a merge patch that holds for the version that was read; nothing where ``change`` returns None."""
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
        """Take resources of which the Node has none off its status, where the scheduler would take them for a device plugin's."""
        if not before.listed or minor_of(self._api) >= NONE_IS_NONE:
            return
        deadline, quiet = self._clock() + self._timeout, self._clock()
        while True:
            node, _plan, _sets = self._look()
            if node.listed:
                gone = dict.fromkeys(sorted(node.listed))
                body = {"status": {"capacity": gone, "allocatable": gone}}
                self._api.request(
                    "PATCH", f"{self._path}/status", query={"fieldManager": MANAGER}, body=body, content_type=_MERGE
                )
                line = f"took {', '.join(gone)} from the status of Node {self._name}"
                self.done.steps += [line] if line not in self.done.steps else []
                quiet = self._clock()
            elif self._clock() - quiet >= QUIET_SECONDS:
                return
            if self._clock() >= deadline:
                raise TimeIsUp(
                    f"After {self._timeout:g} s the kubelet of {self._name} still names {', '.join(sorted(node.listed))}, of which it has none",
                    hint="This Kubernetes takes that for a device plugin. The kubelet forgets a plugin five minutes after it has gone: run again.",
                )
            self._sleep(self._pause)

    # Pods

    def _clear(self) -> None:
        """Evict who has devices in the former way, and wait until nobody has any."""
        deadline = self._clock() + self._timeout
        asked: set[str] = set()
        refusals: dict[str, str] = {}
        while True:
            node, _plan, _sets = self._look()
            holders = node.by_plugin if self._direction == FORWARD else node.by_claims
            if not holders:
                return
            for each in holders:
                if not each.deleting and self._wishes.evicts(each):
                    self._evict(each, asked, refusals)
            if self._clock() >= deadline:
                raise TimeIsUp(
                    f"After {self._timeout:g} s there are still pods on {self._name} that have its devices: "
                    + "; ".join(
                        each.key + (f" ({refusals[each.uid]})" if each.uid in refusals else "") for each in holders
                    ),
                    hint="The taint stays, so that no new ones come. See why these do not end, and run again; or go back.",
                    pods=[each.key for each in holders],
                )
            self._sleep(self._pause)

    def _evict(self, holder: Holder, asked: set[str], refusals: dict[str, str]) -> None:
        refused = evict(self._api, holder.namespace, holder.name, holder.uid)
        if refused is not None:
            if refused:
                refusals[holder.uid] = refused
            return
        refusals.pop(holder.uid, None)
        if holder.uid not in asked:
            asked.add(holder.uid)
            self.done.evicted.append(holder.key)
            self.done.steps.append(f"evicted {holder.key}")

    # Device plugins of others

    def _withdraw(self, sets: Sequence[Json]) -> None:
        node, _plan, _sets = self._look()
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
            node, _plan, _sets = self._look()
            if good(node):
                return
            if self._clock() >= deadline:
                said = (
                    ", ".join(f"{name}: {number}" for name, number in node.offered.items())
                    or "no resource of a device plugin"
                )
                raise TimeIsUp(
                    f"After {self._timeout:g} s it is not so on {self._name} that {what}. It offers {said}; published by "
                    f"{', '.join(sorted(node.published)) or 'nobody'}; device plugins: {', '.join(each.key for each in node.plugins) or 'none'}",
                    hint="The taint stays. Mend what is said above and run again, which goes on from here; or go back.",
                )
            self._sleep(self._pause)


def minor_of(api: Api) -> int:
    """Return the minor version of the API server; 0 where it does not say. Raises ApiError."""
    text = str(api.request("GET", "/version").get("minor", ""))
    digits = "".join(letter for letter in text if letter.isdigit())
    return int(digits) if digits else 0


def change_affinity(api: Api, item: Json, change: Callable[[Json], dict[str, Any] | None]) -> bool:
    """Give the template of a DaemonSet another affinity. Returns whether that was a change. Raises ApiError."""
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
    """Have DaemonSets run everywhere again where no node is marked any more; returns what was done. Raises ApiError."""
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
    """Have a DeviceClass for each resource that can have one; returns what was done. Raises AcceleratorError, ApiError.

    A class that is there without the resource's name keeps all else that it says; one that somebody else made is refused.
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
    done = classes.bring_about(wanted, absent=False, foreign="refuse", dry=dry)
    if done.dropped:
        raise AcceleratorError(
            f"The API server does not keep {', '.join(done.dropped)}",
            hint="Unchanged pods need the feature gate DRAExtendedResource on API server, scheduler, controller manager and kubelets; from "
            "Kubernetes 1.36 on it is on by itself.",
            code="gate-off",
        )
    words = {"create": "wrote", "update": "changed"}
    return [f"{words.get(step['verb'], step['verb'])} DeviceClass {step['name']}" for step in done.steps]


def made_here(item: Json) -> bool:
    """Whether a DeviceClass is one that ``prepare`` makes, and the role device_classes does not."""
    resource = str((item.get("spec") or {}).get("extendedResourceName") or "")
    if not is_ours(item) or not resource:
        return False
    usual: Collection[str] = {name for each in FACTS for name in each.extended_resources.values()}
    return resource not in usual and item["metadata"]["name"] in (class_of(resource), f"whole-{class_of(resource)}")


def forget(api: Api, *, dry: bool) -> list[str]:
    """Take away what a migration has left for all nodes, where none is on claims or marked any more. Raises ApiError.

    Returns what was done.
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
    slices = api.list_all(f"/apis/resource.k8s.io/{classes.version}/resourceslices", {})
    if any(each["spec"]["driver"] in drivers for each in slices):
        return lines
    names = sorted(name for name, item in classes.find().items() if made_here(item))
    if names:
        done = classes.bring_about([{"name": name} for name in names], absent=True, foreign="leave", dry=dry)
        lines += [f"removed DeviceClass {step['name']}" for step in done.steps]
    return lines
