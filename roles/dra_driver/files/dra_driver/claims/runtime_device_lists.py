# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Support devices that are listed in environment variables for a vendor's container runtime. No side effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..core.host.cdi import ContainerEdits
from ..core.model import PARTITION
from .allocation import ClaimError
from .records import ClaimRecord


def refuse_unlistable(record: ClaimRecord, common: ContainerEdits) -> None:
    """Refuse a claim whose containers would see fewer devices than they have, if variables list them.

    Raises ClaimError. A variable has one value in a container, but the kubelet may add the devices of any of the
    requests.
    """
    if not common.lists:
        return
    names = " and ".join(name for name, _values in common.lists)
    requests = sorted({held.base_request for held in record.devices})
    if len(requests) > 1:
        raise ClaimError(
            f"Claim {record.describe()} has devices by {len(requests)} requests ({', '.join(requests)}), but the vendor's container "
            f"runtime reads the devices from {names}, which has one value in a container",
            hint="Request all of them in one request, or in claims of different containers; or remove the vendor from the "
            "driver's vendor_runtimes.",
            code="one-request",
        )
    if len({held.kind == PARTITION for held in record.devices}) > 1:
        raise ClaimError(
            f"Claim {record.describe()} has whole devices and partitions, and the vendor's container runtime takes one kind at a time",
            hint="Ask for one kind; or leave the vendor out of the driver's vendor_runtimes.",
            code="one-kind",
        )


def with_lists_joined(edits: Mapping[str, ContainerEdits]) -> Mapping[str, ContainerEdits]:
    """Return the edits of one request's devices, so that each edit lists all of them if variables list devices."""
    if not any(each.lists for each in edits.values()):
        return edits
    joined = ContainerEdits.merge(*(ContainerEdits(lists=each.lists) for each in edits.values()))
    return {name: replace(each, lists=joined.lists) for name, each in edits.items()}
