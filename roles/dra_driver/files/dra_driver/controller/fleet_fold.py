# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Fold the objects of a cluster into the report, page by page.

Decoded slices of a large fleet need several GB. So slices and claims are kept compressed, and decompressed for one node at a time.
No side effects.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.cluster.claims import claim_facts
from ..core.cluster.inventory import devices, key_of, name_of, results
from ..core.decoding import loads
from ..core.partitioning.layout_differences import ANNOTATION, differences_in_slices
from ..core.picture.answers import duplicate_class_notes, fleet_report
from ..core.picture.fleet import picture_of_fleet, pictures_of_nodes

Json = dict[str, Any]
Pool = tuple[str, str]
#: The facts of a published device that are copied to the facts of its claims.
_OF_CLAIM = ("node", "type", "product", "profile", "uuid", "taints")


class FleetReportBuilder:
    """The objects of a cluster for the report, added page by page."""

    def __init__(self) -> None:
        #: Compressed pages by driver and node ("" for slices without a node).
        self._slices: dict[str, dict[str, list[bytes]]] = {}
        #: Slices without devices: one of the newest generation of each pool, and those with the differences of devices from their layout.
        self._newest: dict[Pool, Json] = {}
        self._noted: list[Json] = []
        self._claims: list[bytes] = []
        #: The allocation results of claims, by pool.
        self._holders: dict[Pool, list[Json]] = {}

    def begin_slices(self, driver: str) -> None:
        """Remove the ResourceSlices of a driver, when its list starts or restarts."""
        self._slices[driver] = {}
        self._newest = {pool: light for pool, light in self._newest.items() if pool[0] != driver}
        self._noted = [light for light in self._noted if light["spec"]["driver"] != driver]

    def begin_claims(self) -> None:
        """Remove the ResourceClaims, when their list starts or restarts."""
        self._claims, self._holders = [], {}

    def add_slices(self, driver: str, page: Iterable[Json]) -> None:
        """Add ResourceSlices of a driver in the form of v1."""
        by_node: dict[str, list[Json]] = {}
        for each in page:
            spec, metadata = each["spec"], each["metadata"]
            pool = _pool_of(each)
            node = str(spec.get("nodeName") or "")
            kept = {"name": metadata["name"]}
            by_node.setdefault(node, []).append({"metadata": kept, "spec": spec})
            notes = {ANNOTATION: text} if (text := (metadata.get("annotations") or {}).get(ANNOTATION)) else {}
            light: Json = {
                "metadata": {"annotations": notes},
                "spec": {"driver": driver, "pool": spec["pool"], "nodeName": node},
            }
            if _generation(light) > _generation(self._newest.get(pool)):
                self._newest[pool] = light
            if notes:
                self._noted.append(light)
        for node, those in by_node.items():
            self._slices[driver].setdefault(node, []).append(_packed(those))

    def add_claims(self, page: Sequence[Json]) -> None:
        """Add ResourceClaims."""
        for claim in page:
            by_pool: dict[Pool, list[Json]] = {}
            for result in results(claim):
                by_pool.setdefault(key_of(result)[:2], []).append(dict(result))
            namespace, _slash, name = name_of(claim).partition("/")
            for pool, those in by_pool.items():
                self._holders.setdefault(pool, []).append(
                    {
                        "metadata": {"namespace": namespace, "name": name},
                        "status": {"allocation": {"devices": {"results": those}}},
                    }
                )
        self._claims.append(_packed(list(page)))

    def report(self, pending: list[Json], rules: list[Json], classes: Iterable[Json], generated: str) -> Json:
        """Return the report. ``generated`` is the time of the requests, RFC 3339. Call it once: it releases the objects."""
        held: dict[tuple[str, str, str], Json] = {}
        elsewhere: dict[str, list[Json]] = {}

        def published(name: str) -> list[Json]:
            found = self._devices_of(name) + elsewhere.pop(name, [])
            for one in found:
                if one["claims"]:
                    held[(one["driver"], one["pool"], one["name"])] = {key: one[key] for key in _OF_CLAIM}
            return found

        # Each device of a slice without a node can have its own node.
        for one in self._devices_of(""):
            elsewhere.setdefault(one["node"], []).append(one)
        published("")
        differing = differences_in_slices([*self._newest.values(), *self._noted])
        names = {*elsewhere, *(name for by_node in self._slices.values() for name in by_node)} - {""}
        nodes, models = pictures_of_nodes(names, published, rules=rules, differing=differing)
        claims = [_short(claim_facts(claim, held, {})) for page in self._claims for claim in _unpacked(page)]
        report = fleet_report({}, [], claims)
        report["attention"] += duplicate_class_notes(classes)
        return picture_of_fleet(
            report, nodes, models, pending=pending, generated=generated, differing=differing, cluster=True
        )

    def _devices_of(self, node: str) -> list[Json]:
        slices = [
            each for by_node in self._slices.values() for page in by_node.pop(node, ()) for each in _unpacked(page)
        ]
        return devices(slices, [claim for pool in set(map(_pool_of, slices)) for claim in self._holders.get(pool, ())])


def _pool_of(one: Json) -> Pool:
    return str(one["spec"]["driver"]), str(one["spec"]["pool"]["name"])


def _generation(light: Mapping[str, Any] | None) -> int:
    return -1 if light is None else int(light["spec"]["pool"].get("generation", 0))


def _short(facts: Json) -> Json:
    """Return the facts of a claim that the report needs."""
    for name in ("uid", "reserved_for", "template"):
        del facts[name]
    facts["devices"] = [{"name": each["name"], "published": each["published"]} for each in facts["devices"]]
    return facts


def _packed(found: list[Json]) -> bytes:
    return zlib.compress(json.dumps(found, separators=(",", ":")).encode(), 1)


def _unpacked(page: bytes) -> list[Json]:
    found: list[Json] = loads(zlib.decompress(page).decode())
    return found
