# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Decide the webhook's answer for a claim, template, or class: reject what the drivers would refuse, before it is stored.

No side effects. Facts: k8s.io/api/admission/v1/types.go. Objects are never changed. Objects that cannot be parsed are
left to the API server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.dra.class_kinds import DeviceTypes, kinds_of_classes
from ..core.dra.configuration_check import Checked, ManifestProblem, check_manifest
from ..core.dra.opaque_config import ConfigKind
from ..core.errors import AcceleratorError
from ..core.vendors.registry import BACKENDS, create

API_VERSION, KIND = "admission.k8s.io/v1", "AdmissionReview"
#: The maximum number of problems and warnings for one object, and of characters in each.
MOST_LISTED, MOST_CHARACTERS = 20, 300
#: The API server truncates warnings at 256 characters.
WARNING_CHARACTERS = 250


class NoReview(AcceleratorError):
    """The request is not an AdmissionReview."""

    default_code = "no-admission-review"


@dataclass(frozen=True)
class Rules:
    """The rules for configurations: the configuration kinds of each driver, and the kinds of devices of DeviceClasses.

    ``standard`` are the vendors' classes, and ``configured`` the configured ones, which take precedence. In between are the
    cluster's classes, by ``device_types``.
    """

    config_kinds: Mapping[str, Sequence[ConfigKind]]
    standard: Mapping[str, str]
    configured: Mapping[str, str]
    device_types: DeviceTypes


def rules_for(drivers: Sequence[str], device_classes: Mapping[str, str]) -> Rules:
    """Return the rules of all vendors with these drivers. ``device_classes`` are the configured classes."""
    backends = [create(vendor) for vendor in BACKENDS]
    known = {backend.driver_name: backend.config_kinds for backend in backends if backend.driver_name in drivers}
    standard = {name: kind for backend in backends for name, kind in backend.device_classes.items()}
    return Rules(known, standard, device_classes, {backend.driver_name: backend.device_types for backend in backends})


def answer(review: Any, rules: Rules, classes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the answer to an AdmissionReview.

    ``classes`` are the cluster's classes and their kinds of devices, by name. Raises NoReview.
    """
    request = review.get("request") if isinstance(review, Mapping) else None
    if not isinstance(request, Mapping) or review.get("apiVersion") != API_VERSION or not request.get("uid"):
        raise NoReview(f"The request body is not a {KIND} of {API_VERSION} with a request")
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    if _is_new(request):
        document = request.get("object")
        own = kinds_of_classes([document], rules.device_types)
        kinds = {**rules.standard, **(classes or {}), **own, **rules.configured}
        checked = check_manifest(document, rules.config_kinds, kinds)
        if checked.problems:
            response.update(allowed=False, status=_refusal(checked))
        if checked.doubts:
            response["warnings"] = [
                _cut(f"{doubt.path}: {doubt.message}", WARNING_CHARACTERS) for doubt in checked.doubts[:MOST_LISTED]
            ]
    return {"apiVersion": API_VERSION, "kind": KIND, "response": response}


def _is_new(request: Mapping[str, Any]) -> bool:
    """Return whether an object is created, or its spec changes: a request that removes a finalizer is not checked."""
    specs = [
        each.get("spec") if isinstance(each, Mapping) else None for each in map(request.get, ("object", "oldObject"))
    ]
    return request.get("operation") == "CREATE" or (request.get("operation") == "UPDATE" and specs[0] != specs[1])


def _refusal(checked: Checked) -> dict[str, Any]:
    listed = checked.problems[:MOST_LISTED]
    lines = [_cut(f"{problem.path}: {problem.message}", MOST_CHARACTERS) for problem in listed]
    if len(checked.problems) > len(listed):
        lines.append(f"and {len(checked.problems) - len(listed)} more")
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": "; ".join(lines),
        "reason": "Invalid",
        "code": 422,
        "details": {"causes": [_cause(problem) for problem in listed]},
    }


def _cause(problem: ManifestProblem) -> dict[str, str]:
    message = _cut(problem.message, MOST_CHARACTERS)
    return {"reason": "FieldValueInvalid", "field": problem.path, "message": message}


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
