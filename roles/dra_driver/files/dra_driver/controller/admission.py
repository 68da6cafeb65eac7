# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the webhook answers about a claim, a template or a class: what the drivers would refuse, said before it is stored. Pure.

Facts: k8s.io/api/admission/v1/types.go. Nothing is ever changed, and what cannot be read is refused by nobody but its own server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.backend import BACKENDS, create
from ..core.configuration import ConfigKind
from ..core.device_classes import DeviceTypes, kinds_of_classes
from ..core.errors import AcceleratorError
from ..core.manifests import Checked, ManifestProblem, check_manifest

API_VERSION, KIND = "admission.k8s.io/v1", "AdmissionReview"
#: So many problems and doubts are told of one object, and so many characters of each.
MOST_TOLD, MOST_CHARACTERS = 20, 300
#: The API server cuts warnings at 256 characters of its own accord.
WARNING_CHARACTERS = 250


class NoReview(AcceleratorError):
    """What came is no AdmissionReview."""

    default_code = "no-admission-review"


@dataclass(frozen=True)
class Rules:
    """What configurations are checked against: the kinds that each driver knows, and what the devices of classes are.

    ``standard`` are the vendors' classes and ``told`` those that the site has told of; between them is what the cluster's classes say
    themselves by ``device_types``.
    """

    config_kinds: Mapping[str, Sequence[ConfigKind]]
    standard: Mapping[str, str]
    told: Mapping[str, str]
    device_types: DeviceTypes


def rules_for(drivers: Sequence[str], device_classes: Mapping[str, str]) -> Rules:
    """The rules of all vendors whose drivers the controller acts for; ``device_classes`` are the site's own."""
    backends = [create(vendor) for vendor in BACKENDS]
    known = {backend.driver_name: backend.config_kinds for backend in backends if backend.driver_name in drivers}
    standard = {name: kind for backend in backends for name, kind in backend.device_classes.items()}
    return Rules(known, standard, device_classes, {backend.driver_name: backend.device_types for backend in backends})


def answer(review: Any, rules: Rules, classes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Answer an AdmissionReview; ``classes`` are what the cluster's classes say of their devices, by name. Raises NoReview."""
    request = review.get("request") if isinstance(review, Mapping) else None
    if not isinstance(request, Mapping) or review.get("apiVersion") != API_VERSION or not request.get("uid"):
        raise NoReview(f"What came is no {KIND} of {API_VERSION} with a request")
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    if _is_new(request):
        document = request.get("object")
        own = kinds_of_classes([document], rules.device_types)
        kinds = {**rules.standard, **(classes or {}), **own, **rules.told}
        checked = check_manifest(document, rules.config_kinds, kinds)
        if checked.problems:
            response.update(allowed=False, status=_refusal(checked))
        if checked.doubts:
            response["warnings"] = [
                _cut(f"{doubt.path}: {doubt.message}", WARNING_CHARACTERS) for doubt in checked.doubts[:MOST_TOLD]
            ]
    return {"apiVersion": API_VERSION, "kind": KIND, "response": response}


def _is_new(request: Mapping[str, Any]) -> bool:
    """Whether an object is made, or its spec is another one: whoever takes a finalizer off is not told what is wrong with the rest."""
    specs = [
        each.get("spec") if isinstance(each, Mapping) else None for each in map(request.get, ("object", "oldObject"))
    ]
    return request.get("operation") == "CREATE" or (request.get("operation") == "UPDATE" and specs[0] != specs[1])


def _refusal(checked: Checked) -> dict[str, Any]:
    told = checked.problems[:MOST_TOLD]
    lines = [_cut(f"{problem.path}: {problem.message}", MOST_CHARACTERS) for problem in told]
    if len(checked.problems) > len(told):
        lines.append(f"and {len(checked.problems) - len(told)} more")
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": "; ".join(lines),
        "reason": "Invalid",
        "code": 422,
        "details": {"causes": [_cause(problem) for problem in told]},
    }


def _cause(problem: ManifestProblem) -> dict[str, str]:
    message = _cut(problem.message, MOST_CHARACTERS)
    return {"reason": "FieldValueInvalid", "field": problem.path, "message": message}


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
