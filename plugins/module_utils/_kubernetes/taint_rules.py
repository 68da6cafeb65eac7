# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan and write DeviceTaintRules for maintenance, and determine which rules this collection manages.

Source: k8s.io/api/resource DeviceTaintRule in v1 (1.37), v1beta2 (1.36), and v1alpha3 (1.33). The used fields are equal
in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ..core.errors import AcceleratorError
from .client import Api, ApiError, first_serving
from .cluster_facts import found_or_none

GROUP = "resource.k8s.io"
#: The preferred version first.
VERSIONS = ("v1", "v1beta2", "v1alpha3")
PLURAL = "devicetaintrules"
MANAGER = "dra.accelerators.device-taint"
MANAGED_BY, OURS = "app.kubernetes.io/managed-by", "dra-accelerators"
#: The controller deletes a rule with this label when its Node is deleted.
NODE_LABEL = "dra.accelerators/node"
REASON = "dra.accelerators/reason"
LONGEST_LABEL = 63
ATTEMPTS = 3
_SELECTOR = ("driver", "pool", "device")
_TAINT = ("key", "value", "effect")


@dataclass(frozen=True)
class DesiredRule:
    """The desired state of a rule.

    ``node`` is the Node with which the rule is deleted. ``initial_annotations`` are set only if the rule does not have them.
    ``updated_annotations`` are set by each run.
    """

    name: str
    selector: Mapping[str, str]
    taint: Mapping[str, str]
    reason: str = ""
    node: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    initial_annotations: Mapping[str, str] = field(default_factory=dict)
    updated_annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Write:
    """One API request. ``verb`` is create, update, or delete, or empty if there is no difference."""

    verb: str
    body: Mapping[str, Any] | None = None


def selector_of(match: Mapping[str, Any]) -> dict[str, str]:
    """Return the API's selector for a user's match. Raises AcceleratorError with code invalid-match."""
    selector = {
        key: str(value)
        for key, value in (
            ("driver", match.get("driver")),
            ("pool", match.get("pool") or match.get("node")),
            ("device", match.get("device")),
        )
        if value
    }
    if bool(selector) == bool(match.get("all")):
        raise AcceleratorError(
            "match has no key" if not selector else "match has all=true and other keys",
            hint="Set node or pool, driver, or device, or several of them. Or set only all=true, for every device of the cluster.",
            code="invalid-match",
        )
    return selector


def plan(wanted: DesiredRule, existing: Mapping[str, Any] | None, version: str) -> Write:
    """Return the request that brings a rule to its desired state.

    Other labels and annotations are kept. No side effects.
    """
    if existing is None:
        return Write("create", _body(wanted, {"name": wanted.name}, version, {}))
    body = _body(wanted, existing["metadata"], version, (existing.get("spec") or {}).get("taint") or {})
    same = summary(existing) == summary(body) and (existing["metadata"].get("labels") or {}) == body["metadata"].get(
        "labels", {}
    )
    annotations = existing["metadata"].get("annotations") or {}
    same = same and all(annotations.get(key) == value for key, value in wanted.updated_annotations.items())
    return Write("") if same else Write("update", body)


def plan_removal(existing: Mapping[str, Any] | None) -> Write:
    """Return the request that removes a rule. No side effects."""
    if existing is None:
        return Write("")
    metadata = existing["metadata"]
    preconditions = {key: metadata[key] for key in ("uid", "resourceVersion") if metadata.get(key)}
    return Write("delete", {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions})


def _body(wanted: DesiredRule, metadata: Mapping[str, Any], version: str, present: Mapping[str, Any]) -> dict[str, Any]:
    labels = {**(metadata.get("labels") or {}), MANAGED_BY: OURS, **wanted.labels}
    labels.pop(NODE_LABEL, None)
    # A node name can exceed the length of a label value. Such a rule is not deleted with the Node.
    if wanted.node and len(wanted.node) <= LONGEST_LABEL:
        labels[NODE_LABEL] = wanted.node
    annotations = {**wanted.initial_annotations, **(metadata.get("annotations") or {}), **wanted.updated_annotations}
    annotations.pop(REASON, None)
    if wanted.reason:
        annotations[REASON] = wanted.reason
    taint = {key: value for key, value in wanted.taint.items() if value}
    # Keep the start time of the same taint, because pods with tolerationSeconds count from it.
    if present.get("timeAdded") and _taint(present) == _taint(taint):
        taint["timeAdded"] = present["timeAdded"]
    kept = {key: value for key, value in metadata.items() if key in ("name", "uid", "resourceVersion", "finalizers")}
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": "DeviceTaintRule",
        "metadata": {**kept, "labels": labels, **({"annotations": annotations} if annotations else {})},
        "spec": {"deviceSelector": dict(wanted.selector), "taint": taint},
    }


def _taint(taint: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(taint.get(key) or "") for key in _TAINT}


def summary(rule: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the compared fields of a rule, without fields that the API server changes; empty without a rule.

    ``match`` is null for a rule without a selector. To the scheduler such a rule applies to every device, as with an
    empty selector.
    """
    if rule is None:
        return {}
    metadata, spec = rule["metadata"], rule.get("spec") or {}
    selector = spec.get("deviceSelector")
    return {
        "name": metadata["name"],
        "match": None if selector is None else {key: selector[key] for key in _SELECTOR if selector.get(key)},
        "taint": _taint(spec.get("taint") or {}),
        "reason": (metadata.get("annotations") or {}).get(REASON, ""),
        "node": (metadata.get("labels") or {}).get(NODE_LABEL, ""),
    }


def is_ours(rule: Mapping[str, Any], manager: str = MANAGER) -> bool:
    """Return whether a module wrote a rule: it has the collection's label, and one of its field managers is the module's."""
    metadata = rule["metadata"]
    managers = [str(one.get("manager", "")) for one in metadata.get("managedFields") or ()]
    return (metadata.get("labels") or {}).get(MANAGED_BY) == OURS and manager in managers


def refuse_foreign(rule: Mapping[str, Any] | None, manager: str = MANAGER) -> None:
    """Raise AcceleratorError with code foreign-rule if this module did not write the rule."""
    if rule is None or is_ours(rule, manager):
        return
    managers = [str(one.get("manager", "")) for one in rule["metadata"].get("managedFields") or ()]
    raise AcceleratorError(
        f"The DeviceTaintRule {rule['metadata']['name']} was written by "
        f"{', '.join(dict.fromkeys(each for each in managers if each)) or 'an unknown field manager'}, and not by this module",
        hint="Choose another name, or set force to take over the rule.",
        code="foreign-rule",
    )


def served_rules(api: Api) -> str:
    """Return the preferred served version of DeviceTaintRules. Raises ApiError with code api-version."""
    version = first_serving(api, GROUP, VERSIONS, PLURAL)
    if version:
        return version
    raise ApiError(
        "The API server serves no DeviceTaintRules",
        status=404,
        hint="Kubernetes 1.37 serves them by default. Earlier versions need the feature gates DRADeviceTaints and, since 1.35, "
        "DRADeviceTaintRules, and the API version resource.k8s.io/v1beta2 (1.36) or v1alpha3 (1.33 to 1.35).",
        code="api-version",
    )


@dataclass(frozen=True)
class RuleResult:
    """The result for a rule, in check mode the predicted result."""

    verb: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    rule: Mapping[str, Any] | None


class Rules:
    """The DeviceTaintRules of one API server, written with one field manager."""

    def __init__(self, api: Api, version: str, manager: str = MANAGER) -> None:
        self._api = api
        self._manager = manager
        self.version = version
        self._path = f"/apis/{GROUP}/{version}/{PLURAL}"

    def find(self, name: str) -> dict[str, Any] | None:
        """Return a rule, or None. Raises ApiError."""
        return found_or_none(self._api, f"{self._path}/{quote(name, safe='')}")

    def labelled(self, selector: str) -> list[dict[str, Any]]:
        """Return the rules that match a label selector. Raises ApiError."""
        return self._api.list_all(self._path, {"labelSelector": selector})

    def apply(self, name: str, wanted: DesiredRule | None, *, force: bool, dry: bool) -> RuleResult:
        """Create, update, or delete a rule to reach the desired state.

        Raises ApiError, AcceleratorError (foreign-rule).
        """
        first = existing = self.find(name)
        for attempt in range(1, ATTEMPTS + 1):
            if not force:
                refuse_foreign(existing, self._manager)
            write = plan_removal(existing) if wanted is None else plan(wanted, existing, self.version)
            try:
                answer = self._send(name, write, dry=dry)
            except ApiError as error:
                # The rule changed since it was read: plan again from its current state.
                if error.status == 409 and attempt < ATTEMPTS:
                    existing = self.find(name)
                    continue
                raise
            break
        after = answer if write.verb in ("create", "update") else None if write.verb == "delete" else existing
        return RuleResult(write.verb, summary(first), summary(after), after)

    def _send(self, name: str, write: Write, *, dry: bool) -> dict[str, Any] | None:
        query = {"dryRun": "All"} if dry else {}
        if not write.verb:
            return None
        if write.verb == "delete":
            # If the request has a body, the API server ignores delete options in the query.
            body = {**(write.body or {}), **({"dryRun": ["All"]} if dry else {})}
            try:
                self._api.request("DELETE", f"{self._path}/{quote(name, safe='')}", body=body)
            except ApiError as error:
                if not error.is_not_found:
                    raise
            return None
        query = {**query, "fieldManager": self._manager, "fieldValidation": "Strict"}
        if write.verb == "create":
            return self._api.request("POST", self._path, query=query, body=write.body)
        return self._api.request("PUT", f"{self._path}/{quote(name, safe='')}", query=query, body=write.body)
