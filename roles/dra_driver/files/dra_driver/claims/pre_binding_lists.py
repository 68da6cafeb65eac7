# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Lists of the claims that nodes prepare before the pods are bound.

The active controller writes them, and each driver reads its node's list. A list is a ConfigMap in the namespace of the
drivers, with one claim in a line: namespace and name, UID, and a digest of the allocation. Another ConfigMap, the sign,
is renewed while the controller writes lists. The module has no side effects.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

#: The sign of the controller. The list of a node has this name, a hyphen, and the name of the node.
SIGN = "waiting-claims"
PREFIX = f"{SIGN}-"
#: The keys in the data of a list and of the sign.
CLAIMS, RENEWED = "claims", "renewed"
#: The controller renews the sign in this interval, in seconds.
RENEW_SECONDS = 60.0
#: The maximum number of claims in a list. A line has at most 364 bytes, and an object at most 1 MiB.
MOST_CLAIMS = 1000
# Names are used in paths of requests, so a driver validates those in the list.
_LINE = re.compile(r"([a-z0-9][a-z0-9-]{0,62})/([a-z0-9][a-z0-9.-]{0,252}) ([A-Za-z0-9-]{1,64}) ([0-9a-f]{8})")


class ListedClaim(NamedTuple):
    """A claim in the list of a node. ``allocation`` differs between two allocations of the claim."""

    namespace: str
    name: str
    uid: str
    allocation: str


def awaited_allocation(status: Mapping[str, Any], drivers: Collection[str]) -> tuple[str, str]:
    """Return the pool and a digest of an allocation whose devices have binding conditions; ("", "") for another one.

    The pool of the drivers of this collection has the name of the node.
    """
    allocation = status.get("allocation") or {}
    awaited = sorted(
        f"{each['driver']} {each['pool']} {each['device']} {each.get('shareID') or ''}"
        for each in (allocation.get("devices") or {}).get("results") or ()
        if each.get("driver") in drivers and each.get("bindingConditions")
    )
    if not awaited:
        return "", ""
    text = "\n".join((str(allocation.get("allocationTimestamp") or ""), *awaited))
    return awaited[0].split(" ")[1], f"{zlib.crc32(text.encode()):08x}"


def write_list(claims: Iterable[ListedClaim]) -> str:
    """Return the text of a list."""
    return "".join(f"{each.namespace}/{each.name} {each.uid} {each.allocation}\n" for each in claims)


def read_list(item: Mapping[str, Any]) -> tuple[ListedClaim, ...]:
    """Return the claims in a ConfigMap. Invalid lines are skipped."""
    text = str((item.get("data") or {}).get(CLAIMS) or "")
    found = (_LINE.fullmatch(line) for line in text.split("\n", MOST_CLAIMS)[:MOST_CLAIMS])
    return tuple(ListedClaim(*match.groups()) for match in found if match is not None)
