# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read claims, ResourceSlices, and the pods that claims are reserved for from a cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from ..core.cluster.claims import facts_by, pods_of
from ..core.cluster.inventory import devices, key_of, results
from .client import Api, served_version, without_managed_fields

GROUP = "resource.k8s.io"
#: The supported versions of the API group, in order of preference.
VERSIONS = ("v1", "v1beta2", "v1beta1")
Json = dict[str, Any]


def list_claims(
    api: Api, drivers: Iterable[str] = (), *, namespace: str | None = None, selectors: Mapping[str, str] | None = None
) -> tuple[list[Json], list[Json]]:
    """Return the claims, and the slices of the named drivers and of the drivers of allocated devices. Raises ApiError."""
    base = f"/apis/{GROUP}/{served_version(api, GROUP, VERSIONS)}"
    prefix = f"{base}/namespaces/{quote(namespace)}" if namespace else base
    found = api.list_all(f"{prefix}/resourceclaims", selectors or {}, without_managed_fields)
    all_drivers = sorted({*drivers, *(key_of(one)[0] for claim in found for one in results(claim))})
    slices = [
        each
        for driver in all_drivers
        for each in api.list_all(
            f"{base}/resourceslices", {"fieldSelector": f"spec.driver={driver}"}, without_managed_fields
        )
    ]
    return found, slices


def pods_by_name(api: Api, found: Iterable[Json]) -> dict[tuple[str, str], Json]:
    """Return the pods that claims are reserved for, with one list request for each namespace. Raises ApiError."""
    names: dict[str, set[str]] = {}
    for one in found:
        if pods_of(one):
            names.setdefault(one["metadata"]["namespace"], set()).update(pods_of(one))
    return {
        (namespace, pod["metadata"]["name"]): pod
        for namespace, named in sorted(names.items())
        for pod in api.list_all(f"/api/v1/namespaces/{quote(namespace)}/pods", {}, partial(_named, named))
    }


def _named(names: Collection[str], item: Json) -> Json | None:
    return without_managed_fields(item) if item["metadata"]["name"] in names else None


def pending_pods(api: Api) -> list[Json]:
    """Return the pending pods of all namespaces. Raises ApiError."""
    return api.list_all("/api/v1/pods", {"fieldSelector": "status.phase=Pending"}, without_managed_fields)


def facts_of(found: Iterable[Json], slices: Iterable[Json], pods: Mapping[tuple[str, str], Json]) -> list[Json]:
    """Return the facts of claims for a module's result. No side effects."""
    return facts_by(found, devices(slices), pods)
