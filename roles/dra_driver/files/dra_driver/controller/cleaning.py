# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Takes the planned actions: each one is planned again from what the API server says at that moment, and bound to what it says."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Callable

from ..api.client import ApiClient, ApiError, ApiUnreachable, Json
from ..api.events import EventRecorder, Subject
from ..api.resources import GROUP, ResourceApi
from ..core.errors import AcceleratorError
from ..logs import fields
from . import plan as planning
from .facts import OUR_FINALIZERS, NodeFacts, claim_facts, node_facts, rule_facts, slice_facts
from .measurements import Measurements
from .plan import Action, PodKey, View

LOG = logging.getLogger(__name__)

DONE, FAILED, NOT_NEEDED = "done", "failed", "not-needed"
#: The largest number of actions in one pass. The next pass runs the remaining actions.
MOST_ACTIONS = 500
#: What a node's Event names of what was deleted.
DELETED_KINDS = {planning.DELETE_SLICE: "ResourceSlice", planning.DELETE_RULE: "DeviceTaintRule"}


class Stopped(AcceleratorError):
    """This controller may not act any more."""

    default_code = "not-leading"


class Cleaner:
    """Acts for the drivers with these names. ``may_act`` is asked before every write."""

    def __init__(
        self,
        client: ApiClient,
        resources: ResourceApi,
        *,
        drivers: Collection[str],
        events: EventRecorder,
        measurements: Measurements,
        may_act: Callable[[], bool],
        rules_path: Callable[[], str | None],
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
        #: The number of attempts by verb and UID, for the actions of the last call of ``clean``.
        self._attempts: dict[tuple[str, str], int] = {}

    async def pods(self, asked: Collection[PodKey]) -> dict[PodKey, str]:
        """Return the state of each pod, without pods that the server cannot return. Raises ApiError, ApiUnreachable."""
        found: dict[PodKey, str] = {}
        for key in sorted(asked):
            try:
                found[key] = await self._pod(key)
            except ApiError as error:
                if error.retry_after or error.status < 500:  # the other pods cannot be read either
                    raise
                LOG.warning("the pod %s/%s cannot be read and counts as alive: %s", key[0], key[1], error)
        return found

    async def _pod(self, key: PodKey) -> str:
        namespace, name, uid = key
        found = await self._get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        if found is None or str((found.get("metadata") or {}).get("uid")) != uid:
            return planning.POD_GONE
        finished = (found.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        return planning.POD_FINISHED if finished else planning.POD_ALIVE

    async def clean(self, actions: Sequence[Action], gone: Mapping[str, str], pods: Mapping[PodKey, str]) -> int:
        """Run up to MOST_ACTIONS actions in sequence. Return the number of remaining actions without an attempt.

        Actions with fewer attempts are first, so that failing actions do not delay the others. A failed action is logged, counted, and
        planned again in the next pass. Raises ApiUnreachable, and ApiError if the server asks for a pause (Retry-After).
        """
        self._attempts = {_key(action): self._attempts.get(_key(action), 0) for action in actions}
        ordered = sorted(actions, key=lambda action: self._attempts[_key(action)])  # otherwise in the given order
        # A claim without an allocation no longer names the node, so the finalizer has to be removed first.
        unreleased = {action.uid for action in actions if action.verb == planning.RELEASE}
        nodes: dict[str, NodeFacts | None] = {}
        deleted: dict[tuple[str, str], Counter[str]] = {}
        try:
            for action in ordered[:MOST_ACTIONS]:
                if not self._may_act():
                    return 0
                self._attempts[_key(action)] += 1
                if action.verb == planning.DEALLOCATE and action.uid in unreleased:
                    continue
                try:
                    if action.node not in nodes:
                        node = await self._get(f"/api/v1/nodes/{action.node}")
                        nodes[action.node] = node_facts(node) if node is not None else None
                    outcome = await self._act(action, nodes[action.node], gone, pods)
                except Stopped:
                    return 0
                except AcceleratorError as error:
                    self._measurements.action(action.verb, FAILED)
                    LOG.warning("%s failed: %s", action, error, extra=fields(code=error.code))
                    if isinstance(error, ApiUnreachable) or (isinstance(error, ApiError) and error.retry_after):
                        raise  # the next request would fail as well
                    continue
                if action.verb == planning.RELEASE:
                    unreleased.discard(action.uid)
                if outcome == DONE and action.verb in DELETED_KINDS:
                    deleted.setdefault((action.node, action.why), Counter())[DELETED_KINDS[action.verb]] += 1
                self._measurements.action(action.verb, "dry-run" if self._dry_run and outcome == DONE else outcome)
        finally:
            self._tell_deleted(deleted)
        return sum(not self._attempts[_key(action)] for action in ordered)

    async def _act(
        self, action: Action, node: NodeFacts | None, gone: Mapping[str, str], pods: Mapping[PodKey, str]
    ) -> str:
        item = await self._get(await self._path(action))
        if item is None or not self._still_planned(action, item, node, gone, pods):
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
                return NOT_NEEDED  # somebody was faster; the next pass sees what became of it
            raise
        LOG.info("%s", action, extra=fields(node=action.node))
        if action.verb == planning.LIFT_RULE:
            self._tell_lifted(action)
        elif action.verb not in DELETED_KINDS:
            self._tell_given_back(action)
        return DONE

    def _still_planned(
        self,
        action: Action,
        item: Json,
        node: NodeFacts | None,
        gone: Mapping[str, str],
        pods: Mapping[PodKey, str],
    ) -> bool:
        """Whether the same would be done about what the API server says now."""
        if action.verb == planning.LIFT_RULE:
            found = rule_facts(item)
            # A run may have gone on with it since, and the watch has not told yet.
            sought = (action.uid, action.renewed)
            return found is not None and bool(found.operation) and (found.uid, found.renewed) == sought
        present = {} if node is None else {node.name: node}
        still_gone = planning.gone_nodes(View(present), {action.node: 0.0}, now=1.0, grace=1.0)
        if gone.get(action.node) != still_gone.get(action.node):
            return False
        rule = rule_facts(item) if action.verb == planning.DELETE_RULE else None
        view = View(
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
        bound = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        if action.verb in (planning.DELETE_SLICE, planning.DELETE_RULE, planning.LIFT_RULE):
            body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": bound}
            await self._client.request("DELETE", path, body=body)
            return
        patch: Json = {"metadata": dict(bound)}
        if action.verb == planning.DEALLOCATE:
            # The server removes the devices' statuses with the allocation. A patch with these statuses would need the rights of all drivers.
            patch["status"] = {"allocation": None, "reservedFor": None}
            path = f"{path}/status"
        else:
            patch["metadata"]["finalizers"] = [
                name for name in metadata.get("finalizers") or () if not name.startswith(OUR_FINALIZERS)
            ]
        await self._client.request("PATCH", path, body=patch, content_type="application/merge-patch+json")

    def _tell_given_back(self, action: Action) -> None:
        subject = Subject("ResourceClaim", f"{GROUP}/v1", action.name, action.uid, action.namespace)
        text = f"Node {action.node} is gone ({action.why}); the claim's devices there were given back."
        self._events.normal(subject, "DevicesGivenBack", text, action="CleanUp")

    def _tell_lifted(self, action: Action) -> None:
        text = f"The DeviceTaintRule {action.name} was lifted: {action.why}. What it kept away may come again."
        self._events.normal(Subject("Node", "v1", action.node, action.node), "DrainLifted", text, action="CleanUp")

    def _tell_deleted(self, deleted: Mapping[tuple[str, str], Counter[str]]) -> None:
        """One Event for each node, however much of it there was."""
        if self._dry_run:
            return
        for (node, why), numbers in deleted.items():
            what = " and ".join(f"{number} {kind}{'s' if number > 1 else ''}" for kind, number in numbers.items())
            # An Event about a Node bears the node's name as its UID, as the kubelet's do; kubectl finds it by that.
            text = f"Node {node} is gone ({why}); {what} of it were deleted."
            self._events.normal(Subject("Node", "v1", node, node), "NodeCleanedUp", text, action="CleanUp")

    async def _get(self, path: str) -> Json | None:
        try:
            return await self._client.get(path)
        except ApiError as error:
            if not error.is_not_found:
                raise
            return None


def _key(action: Action) -> tuple[str, str]:
    return action.verb, action.uid
