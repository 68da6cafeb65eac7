# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Execute planned actions.

Each one is planned again from the current object, and its write is preconditions to that version of the object.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Callable

from ...api.client import ApiClient, ApiError, ApiUnreachable, Json
from ...api.events import EventRecorder, Subject
from ...api.resources import GROUP, ResourceApi
from ...api.throttling import THROTTLED
from ...core.errors import AcceleratorError
from ...logs import fields
from ..controller_metrics import ControllerMetrics
from ..facts import OUR_FINALIZERS, NodeFacts, claim_facts, node_facts, rule_facts, slice_facts
from ..pods import PodReader
from . import cleanup_plan as planning
from .cleanup_plan import Action, ClusterView, PodKey

LOG = logging.getLogger(__name__)

DONE, FAILED, NOT_NEEDED = "done", "failed", "not-needed"
#: The outcome of an action for a claim that a pod still uses. It is not counted.
IN_USE = "in-use"
#: The largest number of actions in one pass. The next pass runs the remaining actions.
MAX_ACTIONS = 500
#: The kinds of deleted objects in a Node's Event.
DELETED_KINDS = {planning.DELETE_SLICE: "ResourceSlice", planning.DELETE_RULE: "DeviceTaintRule"}


class Stopped(AcceleratorError):
    """This controller is no longer active."""

    default_code = "not-leading"


class Cleaner:
    """Execute the cleanup for the drivers with these names.

    ``may_act`` returns, before every write, whether this controller is still the leader. ``rules_path`` returns the path of the
    DeviceTaintRules.
    """

    def __init__(
        self,
        client: ApiClient,
        resources: ResourceApi,
        *,
        drivers: Collection[str],
        events: EventRecorder,
        measurements: ControllerMetrics,
        may_act: Callable[[], bool],
        rules_path: Callable[[], str | None],
        pods: PodReader,
        dry_run: bool = False,
    ) -> None:
        self._client = client
        self._resources = resources
        self._drivers = drivers
        self._events = events
        self._measurements = measurements
        self._may_act = may_act
        self._rules_path = rules_path
        self._dry_run = dry_run
        self.pods = pods
        self._turn_count = 0
        #: When each action was last attempted, as a value of ``_turn_count``, by verb and UID.
        self._last_turns: dict[tuple[str, str], int] = {}

    async def clean(self, view: ClusterView, gone: Mapping[str, str], drain_actions: Sequence[Action]) -> int:
        """Execute up to MAX_ACTIONS actions, and return the number of actions that were never attempted.

        The actions are the cleanup after the nodes in ``gone`` (node name to reason) and ``drain_actions``. Actions that were never
        attempted are first, then those whose last attempt is the oldest, so that failing actions do not delay the others. A failed action
        is logged, counted, and planned again in the next pass. Raises the error that ends the pass, and the last error if all actions have
        failed.
        """
        ordered = await asyncio.to_thread(self._ordered, view, gone, drain_actions)
        # A claim without an allocation no longer names the node, so the finalizer has to be removed first.
        unreleased = {action.uid for action in ordered if action.verb == planning.RELEASE}
        nodes: dict[str, NodeFacts | AcceleratorError | None] = {}
        deleted: dict[tuple[str, str], Counter[str]] = {}
        last_error: AcceleratorError | None = None
        has_succeeded = False
        try:
            for action in ordered[:MAX_ACTIONS]:
                if not self._may_act():
                    return 0
                self._turn_count += 1
                self._last_turns[_key(action)] = self._turn_count
                is_blocked = action.verb == planning.DEALLOCATE and action.uid in unreleased
                if is_blocked or isinstance(nodes.get(action.node), AcceleratorError):
                    continue
                try:
                    outcome = await self._execute(action, await self._node(action.node, nodes), gone)
                except Stopped:
                    return 0
                except AcceleratorError as error:
                    self._measurements.action(action.verb, FAILED)
                    LOG.warning("%s failed: %s", action, error, extra=fields(code=error.code))
                    if _ends_pass(error):
                        raise
                    last_error = error
                    continue
                has_succeeded = True
                if outcome == IN_USE:
                    continue
                if action.verb == planning.RELEASE:
                    unreleased.discard(action.uid)
                if outcome == DONE and action.verb in DELETED_KINDS:
                    deleted.setdefault((action.node, action.why), Counter())[DELETED_KINDS[action.verb]] += 1
                self._measurements.action(action.verb, "dry-run" if self._dry_run and outcome == DONE else outcome)
        finally:
            self._report_deleted(deleted)
        if last_error is not None and not has_succeeded:
            raise last_error
        return sum(_key(action) not in self._last_turns for action in ordered)

    def _ordered(self, view: ClusterView, gone: Mapping[str, str], drain_actions: Sequence[Action]) -> list[Action]:
        """Return the actions, the longest-waiting ones first. Pods that were not read yet count as gone here."""
        cached = self.pods.cached(planning.pods_to_read(view, gone, self._drivers))
        actions = planning.plan(view, gone, cached, self._drivers, unread=planning.POD_GONE)
        deleted = {action.uid for action in actions}
        actions += [action for action in drain_actions if action.uid not in deleted]
        present = {each.uid for each in view.slices} | {each.uid for each in view.rules}
        present |= {each.uid for each in view.claims}
        self._last_turns = {key: turn for key, turn in self._last_turns.items() if key[1] in present}
        return sorted(actions, key=lambda action: self._last_turns.get(_key(action), 0))  # otherwise in the given order

    async def _node(self, name: str, nodes: dict[str, NodeFacts | AcceleratorError | None]) -> NodeFacts | None:
        """Return a node's current facts; None without a Node object. ``nodes`` caches the facts or the error of each node for one pass."""
        if name not in nodes:
            try:
                node = await self._client.find(f"/api/v1/nodes/{name}")
                nodes[name] = node_facts(node) if node is not None else None
            except AcceleratorError as error:
                nodes[name] = error
        found = nodes[name]
        if isinstance(found, AcceleratorError):
            raise found
        return found

    async def _execute(self, action: Action, node: NodeFacts | None, gone: Mapping[str, str]) -> str:
        item = await self._client.find(await self._path(action))
        if item is None:
            return NOT_NEEDED
        pods: dict[PodKey, str] = {}
        if action.verb in (planning.DEALLOCATE, planning.RELEASE):
            claim = claim_facts(item)
            has_finalizer = any(name.startswith(OUR_FINALIZERS) for name in claim.finalizers)
            if action.verb == planning.DEALLOCATE and has_finalizer and not self._dry_run:
                return NOT_NEEDED  # its removal was refused because the claim has changed; a later pass tries again
            for key in sorted(planning.pods_to_read(ClusterView({}, claims=[claim]), {claim.node}, self._drivers)):
                pods[key] = await self.pods.state(key)
                if pods[key] == planning.POD_ALIVE:
                    return IN_USE
        if not self._is_still_planned(action, item, node, gone, pods):
            return NOT_NEEDED
        if self._dry_run:
            LOG.info("would be done: %s", action, extra=fields(node=action.node))
            return DONE
        if not self._may_act():
            raise Stopped("The Lease was lost")
        try:
            await self._write(action, item)
        except ApiError as error:
            if error.is_not_found or error.status == 409:
                return NOT_NEEDED  # another program changed it; the next pass sees the result
            raise
        LOG.info("%s", action, extra=fields(node=action.node))
        if action.verb == planning.LIFT_RULE:
            self._report_lifted(action)
        elif action.verb not in DELETED_KINDS:
            self._report_released(action)
        return DONE

    def _is_still_planned(
        self,
        action: Action,
        item: Json,
        node: NodeFacts | None,
        gone: Mapping[str, str],
        pods: Mapping[PodKey, str],
    ) -> bool:
        """Return whether the action is still planned for the current object."""
        if action.verb == planning.LIFT_RULE:
            found = rule_facts(item)
            # A run may have renewed the rule, and the watch has not shown it yet.
            sought = (action.uid, action.renewed)
            return found is not None and bool(found.operation) and (found.uid, found.renewed) == sought
        present = {} if node is None else {node.name: node}
        still_gone = planning.gone_nodes(ClusterView(present), {action.node: 0.0}, now=1.0, grace=1.0)
        if gone.get(action.node) != still_gone.get(action.node):
            return False
        rule = rule_facts(item) if action.verb == planning.DELETE_RULE else None
        view = ClusterView(
            present,
            slices=[slice_facts(item)] if action.verb == planning.DELETE_SLICE else [],
            claims=[claim_facts(item)] if action.verb in (planning.DEALLOCATE, planning.RELEASE) else [],
            rules=[rule] if rule is not None else [],
        )
        again = planning.plan(view, still_gone, pods, self._drivers)
        return any((one.verb, one.uid) == (action.verb, action.uid) for one in again)

    async def _path(self, action: Action) -> str:
        version = await self._resources.version()
        if action.verb == planning.DELETE_SLICE:
            return f"/apis/{GROUP}/{version}/resourceslices/{action.name}"
        if action.verb in (planning.DELETE_RULE, planning.LIFT_RULE):
            return f"{self._rules_path()}/{action.name}"
        return f"/apis/{GROUP}/{version}/namespaces/{action.namespace}/resourceclaims/{action.name}"

    async def _write(self, action: Action, item: Json) -> None:
        path = await self._path(action)
        metadata = item["metadata"]
        preconditions = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        if action.verb in (planning.DELETE_SLICE, planning.DELETE_RULE, planning.LIFT_RULE):
            body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
            await self._client.request("DELETE", path, body=body)
            return
        patch: Json = {"metadata": dict(preconditions)}
        if action.verb == planning.DEALLOCATE:
            # The server removes the devices' statuses with the allocation. A patch with these statuses would need the rights of all drivers.
            patch["status"] = {"allocation": None, "reservedFor": None}
            path = f"{path}/status"
        else:
            patch["metadata"]["finalizers"] = [
                name for name in metadata.get("finalizers") or () if not name.startswith(OUR_FINALIZERS)
            ]
        await self._client.request("PATCH", path, body=patch, content_type="application/merge-patch+json")

    def _report_released(self, action: Action) -> None:
        subject = Subject.of_claim(action.namespace, action.name, action.uid)
        text = f"Node {action.node} is lost ({action.why}). The claim's devices on it were released."
        self._events.normal(subject, "DevicesGivenBack", text, action="CleanUp")

    def _report_lifted(self, action: Action) -> None:
        text = f"The DeviceTaintRule {action.name} was deleted: {action.why}. The devices that it drained can be allocated again."
        self._events.normal(Subject.of_node(action.node), "DrainLifted", text, action="CleanUp")

    def _report_deleted(self, deleted: Mapping[tuple[str, str], Counter[str]]) -> None:
        """Write one Event for each node, for all its deleted objects."""
        if self._dry_run:
            return
        for (node, why), numbers in deleted.items():
            what = " and ".join(f"{number} {kind}{'s' if number > 1 else ''}" for kind, number in numbers.items())
            text = f"Node {node} is lost ({why}). The controller deleted {what} of it."
            self._events.normal(Subject.of_node(node), "NodeCleanedUp", text, action="CleanUp")


def _ends_pass(error: AcceleratorError) -> bool:
    """Return whether the next request would fail too: the server requests a pause, does not respond, or rejects the identity."""
    if isinstance(error, ApiError):
        return bool(error.retry_after) or error.status in (401, *THROTTLED)
    return isinstance(error, ApiUnreachable)


def _key(action: Action) -> tuple[str, str]:
    return action.verb, action.uid
