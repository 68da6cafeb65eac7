# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the last known data of devices whose node or driver does not answer from earlier report data. No side effects.

Report data with such devices contains them again. Each device keeps the time of its last report, over any number of
runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..times import seconds_of

Json = dict[str, Any]


@dataclass(frozen=True)
class FormerDevice:
    """A device of earlier report data, its model, and the time of its last report (RFC 3339, and the age in seconds)."""

    device: Json
    model: Json
    at: str
    seconds: int

    def as_of(self) -> Json:
        """Return the time of the last report and its age, as in the report data."""
        return {"at": self.at, "seconds": self.seconds}

    def health(self) -> list[Json]:
        """Return its last known faults."""
        return [dict(each) for each in self.device["health"]]

    def facts(self, *, claims: bool) -> Json:
        """Return its facts in the form of a node's report.

        Without ``claims`` they are omitted, because the cluster has newer data.
        """
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
            # Partitions that were about to be created for a claim never existed.
            "partitions": [each for each in kept if each["uuid"] or each["owner"] == "foreign" or claims],
            "claims": list(device["claims"]) if claims else [],
            "processes": 0,
            "health": self.health(),
        }


def read_former_devices(former: Mapping[str, Any] | None, generated: str) -> dict[str, dict[str, FormerDevice]]:
    """Return the devices that nodes reported themselves in earlier report data, by node and UUID.

    ``generated`` is the current time.
    """
    now = seconds_of(generated)
    found: dict[str, dict[str, FormerDevice]] = {}
    for node in (former or {}).get("nodes", ()):
        for device in node["devices"]:
            at = (device.get("as_of") or {}).get("at", "") or (former or {})["generated"]
            then = seconds_of(at)
            if (node["source"] != "node" and "as_of" not in device) or then is None or now is None:
                continue
            model = (former or {})["models"][device["model"]]
            one = FormerDevice(device, model, at, max(int(now - then), 0))
            found.setdefault(node["name"], {})[device["uuid"]] = one
    return found
