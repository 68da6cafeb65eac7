# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims for several chips that lie near each other: on one card, else in one ring, else anywhere. Pure.

A constraint may name one alternative of a request, and holds only where that is chosen. So one claim says what is wanted
first, and what will do: the scheduler tries the alternatives in their order on each node, and prefers the node where an
earlier one fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .names import DRIVER_NAME

CARD, RING, ANY = "same-card", "same-ring", "any"
#: Which attribute the chips of an alternative share; None where they share nothing.
_SHARED = {CARD: f"{DRIVER_NAME}/cardID", RING: f"{DRIVER_NAME}/hccsRing", ANY: None}
NEAREST_FIRST = (CARD, RING, ANY)
REQUEST = "npus"
API_VERSION = "resource.k8s.io/v1"
#: A claim has no more results.
MOST_CHIPS = 32


def claim_spec(
    chips: int,
    device_class: str,
    *,
    prefer: Sequence[str] = NEAREST_FIRST,
    selectors: Sequence[str] = (),
    request: str = REQUEST,
) -> dict[str, Any]:
    """Return the spec of a claim for so many whole chips of a class, the nearest first.

    ``prefer`` are the alternatives in their order; without ``any`` the claim waits rather than take chips that lie apart.
    ``selectors`` are CEL expressions that all chips fulfil. One chip lies near nothing: it is asked for plainly. Raises
    ValueError.
    """
    if not 1 <= chips <= MOST_CHIPS:
        raise ValueError(f"A claim can have 1 to {MOST_CHIPS} chips, not {chips}")
    unknown = [each for each in prefer if each not in _SHARED]
    if unknown or not prefer or len(set(prefer)) < len(prefer):
        raise ValueError(
            f"Expected some of {', '.join(NEAREST_FIRST)}, each once, not {', '.join(prefer) or 'nothing'}"
        )
    wish = {
        "deviceClassName": device_class,
        "allocationMode": "ExactCount",
        "count": chips,
        **({"selectors": [{"cel": {"expression": each}} for each in selectors]} if selectors else {}),
    }
    if chips == 1:
        return {"devices": {"requests": [{"name": request, "exactly": wish}]}}
    spec: dict[str, Any] = {
        "requests": [{"name": request, "firstAvailable": [{"name": each, **wish} for each in prefer]}],
    }
    constraints = [
        {"requests": [f"{request}/{each}"], "matchAttribute": _SHARED[each]} for each in prefer if _SHARED[each]
    ]
    if constraints:
        spec["constraints"] = constraints
    return {"devices": spec}


def claim_template(name: str, namespace: str, chips: int, device_class: str, **options: Any) -> dict[str, Any]:
    """Return a ResourceClaimTemplate of such claims; ``options`` are those of ``claim_spec``."""
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"spec": claim_spec(chips, device_class, **options)},
    }
