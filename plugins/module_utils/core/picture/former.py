# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What was last told of devices whose node, or whose driver, does not answer: read from a former picture. Pure.

A picture that was drawn by such memories hands them on: each device bears since when it is known, however often nobody has answered since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..times import seconds_of

Json = dict[str, Any]


@dataclass(frozen=True)
class Remembered:
    """A device of a former picture, its model, and since when (RFC 3339; seconds) nothing more is known of it."""

    device: Json
    model: Json
    at: str
    seconds: int

    def as_of(self) -> Json:
        """Return when it was told, and how long ago that is, as the picture has it."""
        return {"at": self.at, "seconds": self.seconds}

    def health(self) -> list[Json]:
        """Return what was wrong with it."""
        return [dict(each) for each in self.device["health"]]

    def facts(self, *, claims: bool) -> Json:
        """Return its facts as its node would tell them. Without ``claims`` nobody has it: who has, the cluster knows better."""
        device, model = self.device, self.model
        kept = [{**each, "claims": list(each["claims"]) if claims else []} for each in device["partitions"]]
        return {
            "vendor": model["vendor"],
            "product": model["product"],
            "memory_bytes": model["memory_bytes"],
            "memory_slices": model["slices"],
            "index": device["index"],
            "uuid": device["uuid"],
            "pci_address": device["pci"],
            "pcie_root": device["root"] or None,
            "numa_node": device["numa"],
            "groups": device["groups"],
            "partitioned": device["partitioned"],
            "pending": device["partitioned"] != device["reset_awaited"],
            # What was about to be made for a claim has never been seen.
            "partitions": [each for each in kept if each["uuid"] or each["owner"] == "foreign" or claims],
            "claims": list(device["claims"]) if claims else [],
            "processes": 0,
            "health": self.health(),
        }


def remember(former: Mapping[str, Any] | None, generated: str) -> dict[str, dict[str, Remembered]]:
    """Return by node and UUID what a former picture knew of devices from their nodes themselves. ``generated`` is when it is now."""
    now = seconds_of(generated)
    found: dict[str, dict[str, Remembered]] = {}
    for node in (former or {}).get("nodes", ()):
        for device in node["devices"]:
            at = (device.get("as_of") or {}).get("at", "") or (former or {})["generated"]
            then = seconds_of(at)
            if (node["source"] != "node" and "as_of" not in device) or then is None or now is None:
                continue
            model = (former or {})["models"][device["model"]]
            one = Remembered(device, model, at, max(int(now - then), 0))
            found.setdefault(node["name"], {})[device["uuid"]] = one
    return found
