# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the claim and the node affinity for a job on several nodes of one super-pod.

The links between the servers of a super-pod need no daemon and no separate device. This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...domains import Span
from . import preference
from .names import DRIVER_NAME
from .vendor import SERVER, SUPER_POD

_ATTRIBUTES = f"device.attributes['{DRIVER_NAME}']"


def selector(pod: int) -> str:
    """Return the CEL expression that selects the chips of one super-pod. It is false for chips in no super-pod."""
    return f"'superPodID' in {_ATTRIBUTES} && {_ATTRIBUTES}.superPodID == {pod}"


def claim_spec(span: Span, device_class: str = DRIVER_NAME, *, prefer: Sequence[str] = ()) -> dict[str, Any]:
    """Return the spec of the claim for each pod of a job: this number of chips of the super-pod, with the closest preferred."""
    wanted = tuple(prefer) or preference.NEAREST_FIRST
    return preference.claim_spec(span.devices, device_class, prefer=wanted, selectors=(selector(int(span.domain)),))


def node_affinity(span: Span) -> dict[str, Any]:
    """Return the node affinity for the chosen nodes only.

    It includes the super-pod's labels, so that a node that has left the super-pod since then is not used.
    """
    expressions: list[dict[str, Any]] = [
        {"key": SUPER_POD, "operator": "In", "values": [str(span.domain)]},
    ]
    servers = [str(each.server) for each in span.members if each.server is not None]
    if len(servers) == len(span.members):
        expressions.append({"key": SERVER, "operator": "In", "values": servers})
    fields = [{"key": "metadata.name", "operator": "In", "values": [name]} for name in span.nodes]
    terms = [{"matchExpressions": expressions, "matchFields": [field]} for field in fields]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
