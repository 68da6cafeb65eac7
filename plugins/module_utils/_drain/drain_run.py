# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Drain devices of a node, and return them to service: read, plan, write, and read again. Every write is idempotent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from .._kubernetes.claim_reader import VERSIONS
from .._kubernetes.client import SETTLE_SECONDS, Api, served_version
from .._kubernetes.cluster_facts import found_or_none
from .._kubernetes.eviction import Evictions
from .._kubernetes.taint_rules import GROUP, MANAGED_BY, OURS, DesiredRule, Rules, is_ours, served_rules
from .._migration.migration_inventory import Json, Problem
from ..core.errors import AcceleratorError
from ..core.texts import join_problems
from ..core.times import now_text
from . import drain_plan as drain
from .drain_plan import MANAGER, OPERATION_LABEL, Consent, DrainRequest, HeldClaim, HoldingPod, Plan

POLL_SECONDS = 2.0
#: The number of claims read per second while the drain waits. With more claims, the drain checks less often.
CLAIMS_PER_SECOND = 10


class Blocked(AcceleratorError):
    """Problems prevent the operation, and nothing was changed."""

    default_code = "blocked"

    def __init__(self, node: str, problems: Sequence[Problem]) -> None:
        listed = join_problems(
            (f"({number}) {each.text.rstrip('.')}. {each.remedy}" for number, each in enumerate(problems, 1)), " "
        )
        super().__init__(f"{node} cannot be drained yet, and nothing was changed. {listed}")
        self.problems = tuple(problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the problems."""
        return {**super().to_dict(), "problems": [each.document() for each in self.problems]}


class TimeIsUp(AcceleratorError):
    """Pods or claims still hold devices at the end of the timeout. ``blocked`` contains these holders with the reasons."""

    default_code = "time-is-up"

    def __init__(self, message: str, *, hint: str, blocked: Sequence[Json]) -> None:
        super().__init__(message, hint=hint)
        self.blocked = tuple(blocked)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the remaining pods and claims."""
        return {**super().to_dict(), "blocked": list(self.blocked)}


@dataclass
class DrainResult:
    """The result of a drain, in check mode the predicted result. ``steps`` has one line for each write.

    ``plan`` is the plan of the first read. ``rules`` are the rules of the operation, and ``others`` those of other operations.
    """

    steps: list[str] = field(default_factory=list)
    rules: list[dict[str, str]] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    plan: Plan | None = None
    others: list[dict[str, str]] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    waited: float = 0.0


class Drainer:
    """Run one operation on one node. ``timeout`` is the maximum wait for the release of the devices, in seconds.

    ``held`` are the claims that hold devices of the node, as NAMESPACE/NAME, if the caller has listed all claims. The first
    read then reads only these claims.
    """

    def __init__(
        self,
        api: Api,
        request: DrainRequest,
        consent: Consent,
        *,
        timeout: float,
        grace_period: int | None = None,
        dry: bool = False,
        held: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], str] = now_text,
    ) -> None:
        drain.check_operation(request)
        self._api = api
        self._request = request
        self._consent = consent
        self._timeout = timeout
        self._evictions = Evictions(api, grace_period)
        self._dry = dry
        names = None if held is None else [each.partition("/") for each in held]
        self._held = None if names is None else [HeldClaim(namespace, name, ()) for namespace, _slash, name in names]
        self._clock = clock
        self._sleep = sleep
        self._now = now
        self._read_at = 0.0
        self._rules = Rules(api, served_rules(api), MANAGER)
        self._base = f"/apis/{GROUP}/{served_version(api, GROUP, VERSIONS)}"
        self.done = DrainResult()

    def drain(self) -> DrainResult:
        """Drain the devices, and keep new pods off them. Raises Blocked, TimeIsUp, DrainError, ApiError."""
        if found_or_none(self._api, f"/api/v1/nodes/{quote(self._request.node, safe='')}") is None:
            raise drain.DrainError(f"The Node {self._request.node} does not exist", code="no-node")
        plan = self._read_plan(self._held)
        self.done.plan = plan
        if plan.problems and not self._dry:
            raise Blocked(self._request.node, plan.problems)
        self._write_rules(plan)
        if self._dry:
            to_evict = [each.key for each in plan.pods if not each.deleting] if self._consent.evict else []
            self.done.evicted += to_evict
            self.done.steps += [f"evict {each}" for each in to_evict]
            return self.done
        self._end_pods(plan)
        return self.done

    def return_to_service(self, attributes: Mapping[str, str] | None = None, older_than: float = 0) -> DrainResult:
        """Remove the operation's rules. Raises TimeIsUp, DrainError, ApiError.

        With ``attributes``, first wait until the devices are published with these values. Rules that are younger than
        ``older_than`` seconds stay, because another run uses them.
        """
        if attributes and not self._request.node:
            raise drain.DrainError("The option published requires the option node", code="no-node")
        rules, self.done.others = self._find_rules()
        rules = [each for each in rules if drain.is_abandoned(each, self._now(), older_than)]
        if attributes and rules and not self._dry:
            self._await_published(attributes, [drain.rule_facts(each) for each in rules])
        for each in rules:
            self._remove_rule(str(each["metadata"]["name"]))
        return self.done

    def _await_published(self, attributes: Mapping[str, str], rules: Sequence[Mapping[str, str]]) -> None:
        begin = self._clock()
        pools = list(dict.fromkeys(drain.Target(each["driver"], each["pool"]) for each in rules))
        while True:
            problems = drain.attribute_differences(self._slices(), self._request, pools, attributes)
            if not problems:
                self.done.waited = self._clock() - begin
                return
            if self._clock() - begin >= self._timeout:
                raise TimeIsUp(
                    f"After {self._timeout:g} s the published devices of {self._request.node} differ from the expected ones: {'; '.join(problems)}",
                    hint="The taint stays. Check the driver's log on the node, and run the module again. Without the option published, the module "
                    "skips this check.",
                    blocked=(),
                )
            self._sleep(POLL_SECONDS)

    def _slices(self) -> list[dict[str, Any]]:
        query = {"fieldSelector": f"spec.nodeName={self._request.node}"}
        return self._api.list_all(f"{self._base}/resourceslices", query)

    def _find_rules(self) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
        """Return the rules of this operation, and the facts of the rules of other operations, on the node or on all nodes."""
        found = [
            each
            for each in self._rules.labelled(f"{MANAGED_BY}={OURS},{OPERATION_LABEL}")
            if is_ours(each, MANAGER) and self._request.node in ("", drain.rule_facts(each)["node"])
        ]
        rules = [each for each in found if drain.rule_facts(each)["operation"] == self._request.operation]
        return rules, [drain.rule_facts(each) for each in found if each not in rules]

    def _read_plan(self, held: Sequence[HeldClaim] | None = None) -> Plan:
        """Return the plan for the current state of the cluster.

        With ``held``, only these claims are read, by name, instead of all claims of the cluster. The drain uses this while it waits.
        """
        self._read_at, now = self._clock(), self._now()
        slices = self._slices()
        self.done.published = [f"{each.driver}/{each.pool}" for each in drain.complete_pools(slices, self._request)]
        rules, self.done.others = self._find_rules()
        if held is None:
            keep = drain.claims_on(self._request, slices, rules)
            claims = self._api.list_all(f"{self._base}/resourceclaims", {}, keep)
        else:
            claims = self._claims(held)
        targets = drain.targets_of(self._request, slices, claims, rules)
        pods = self._pods(drain.held_by(targets, claims, self._request))
        return drain.plan(self._request, self._consent, slices=slices, claims=claims, pods=pods, rules=rules, now=now)

    def _claims(self, held: Sequence[HeldClaim]) -> list[Json]:
        prefix = f"{self._base}/namespaces"
        read = (
            found_or_none(self._api, f"{prefix}/{quote(each.namespace)}/resourceclaims/{quote(each.name)}")
            for each in held
        )
        return [each for each in read if each is not None]

    def _pods(self, held: Sequence[HeldClaim]) -> list[Json]:
        found: dict[tuple[str, str], Json | None] = {}
        for each in held:
            path = f"/api/v1/namespaces/{quote(each.namespace)}/pods"
            for name, _uid in each.pods:
                if (each.namespace, name) not in found:
                    found[each.namespace, name] = found_or_none(self._api, f"{path}/{quote(name)}")
            if each.groups:
                listed = self._api.list_all(path, {"fieldSelector": f"spec.nodeName={self._request.node}"})
                found.update({(each.namespace, str(one["metadata"]["name"])): one for one in listed})
        return [each for each in found.values() if each is not None]

    # Rules

    def _write_rules(self, plan: Plan) -> None:
        """Write the rules. If the API server rejects one, delete the rules that this run has created."""
        written: list[str] = []
        try:
            for each in self._with_renewal_times(plan.rules):
                done = self._rules.apply(each.name, each, force=False, dry=self._dry)
                if done.verb:
                    text = str(
                        drain.Target(each.selector["driver"], each.selector["pool"], each.selector.get("device", ""))
                    )
                    self.done.steps.append(f"{'taint' if self._dry else 'tainted'} {text}")
                if done.verb == "create" and not self._dry:
                    written.append(each.name)
                self.done.rules.append(drain.rule_facts(done.rule or {"metadata": {"name": each.name}}))
        except AcceleratorError:
            for name in written:
                self._rules.apply(name, None, force=False, dry=False)
            self.done.steps.clear()
            self.done.rules.clear()
            raise
        for name in plan.stale:
            self._remove_rule(name)

    def _with_renewal_times(self, rules: Sequence[DesiredRule]) -> list[DesiredRule]:
        """Return the rules, with the current time as renewal time of rules that an earlier run wrote long ago."""
        existing, _others = self._find_rules()
        now = self._now()
        old = {each["metadata"]["name"] for each in existing if drain.is_abandoned(each, now, drain.RENEW_SECONDS)}
        return [replace(each, updated_annotations={drain.RENEWED: now}) if each.name in old else each for each in rules]

    def _remove_rule(self, name: str) -> None:
        rule = self._rules.find(name)
        done = self._rules.apply(name, None, force=False, dry=self._dry)
        if done.verb and rule is not None:
            facts = drain.rule_facts(rule)
            self.done.rules.append(facts)
            target = drain.Target(facts["driver"], facts["pool"], facts["device"])
            self.done.steps.append(f"{'remove' if self._dry else 'removed'} the taint of {target}")

    # Pods

    def _end_pods(self, plan: Plan) -> None:
        """Evict the pods that may be evicted, and wait until no claim holds any of the devices. Raises TimeIsUp, ApiError.

        The drain waits for the claims of the last complete list by name. When these claims no longer hold the devices, it lists
        all claims again, because a claim can be allocated after the first list and before the taint. If the scheduler knew
        the taint at the first list, one list is enough.
        """
        begin = self._clock()
        deadline = begin + self._timeout
        settled = begin + SETTLE_SECONDS if self.done.steps or plan.is_new else self._read_at
        is_complete = self._held is None
        while True:
            if is_complete and not plan.claims and self._read_at >= settled:
                self.done.waited = self._clock() - begin
                return
            for each in plan.pods:
                if not each.deleting and self._may_evict(each):
                    self._evict(each)
                    if self._clock() >= deadline:
                        break
            self._evictions.check()
            if plan.claims and self._clock() >= deadline:
                self._raise_time_is_up(plan)
            if is_complete or plan.claims:
                until_settled = 0.0 if plan.claims else settled - self._clock()
                self._sleep(max(POLL_SECONDS, len(plan.claims) / CLAIMS_PER_SECOND, until_settled))
            is_complete = not plan.claims
            plan = self._read_plan(plan.claims or None)

    def _may_evict(self, pod: HoldingPod) -> bool:
        return bool(self._consent.evict) and (bool(pod.owner) or self._consent.evict_unmanaged)

    def _evict(self, pod: HoldingPod) -> None:
        if self._evictions.request(pod.namespace, pod.name, pod.uid) and pod.key not in self.done.evicted:
            self.done.evicted.append(pod.key)
            self.done.steps.append(f"evicted {pod.key}")

    def _raise_time_is_up(self, plan: Plan) -> None:
        blocked = drain.blockers(plan.claims, plan.pods, self._evictions.refusals)
        raise TimeIsUp(
            f"After {self._timeout:g} s devices of {self._request.node} are still held: "
            + "; ".join(f"{each['pod'] or 'claim ' + each['claims'][0]} ({each['reason']})" for each in blocked),
            hint="The taint stays and keeps new pods off the devices. Find out why these pods do not end, and run this again to resume. Or "
            "return the devices to service (state in_service).",
            blocked=blocked,
        )
