# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a job over several nodes of one super-pod asks for: a claim for each of its pods, and where the pods may be. Pure.

Links between the servers of a super-pod need no daemon and no device of their own, so this is all that there is to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..domains import Span
from . import preference
from .names import DRIVER_NAME
from .vendor import SERVER, SUPER_POD

_ATTRIBUTES = f"device.attributes['{DRIVER_NAME}']"


def selector(pod: int) -> str:
    """Return the CEL expression that is true of the chips of one super-pod, and false of those that are in none."""
    return f"'superPodID' in {_ATTRIBUTES} && {_ATTRIBUTES}.superPodID == {pod}"


def claim_spec(span: Span, device_class: str = DRIVER_NAME, *, prefer: Sequence[str] = ()) -> dict[str, Any]:
    """Return the spec of the claim that each pod of a job has: so many chips of its super-pod, the nearest first."""
    wanted = tuple(prefer) or preference.NEAREST_FIRST
    return preference.claim_spec(span.devices, device_class, prefer=wanted, selectors=(selector(int(span.domain)),))


def node_affinity(span: Span) -> dict[str, Any]:
    """Return the affinity by which the scheduler takes the nodes that were chosen, and no others.

    The labels are on it as well, so that a node which has left the super-pod meanwhile is not taken.
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
