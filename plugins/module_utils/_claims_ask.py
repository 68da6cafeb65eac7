# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Asks a cluster for claims, for what drivers publish, and for the pods that claims are reserved for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from ._kubernetes import Api, served_version
from .core.cluster.claims import facts_by, pods_of
from .core.cluster.inventory import devices, key_of, results

GROUP = "resource.k8s.io"
#: Best first.
VERSIONS = ("v1", "v1beta2", "v1beta1")
Json = dict[str, Any]


def list_claims(
    api: Api, drivers: Iterable[str] = (), *, namespace: str | None = None, selectors: Mapping[str, str] | None = None
) -> tuple[list[Json], list[Json]]:
    """Return the claims, and the slices of the drivers that they have devices of and of those that are named. Raises ApiError."""
    base = f"/apis/{GROUP}/{served_version(api, GROUP, VERSIONS)}"
    place = f"{base}/namespaces/{quote(namespace)}" if namespace else base
    found = api.list_all(f"{place}/resourceclaims", selectors or {})
    named = sorted({*drivers, *(key_of(one)[0] for claim in found for one in results(claim))})
    slices = [
        each
        for driver in named
        for each in api.list_all(f"{base}/resourceslices", {"fieldSelector": f"spec.driver={driver}"})
    ]
    return found, slices


def pods_by_name(api: Api, found: Iterable[Json]) -> dict[tuple[str, str], Json]:
    """Ask for the pods that claims are reserved for, one list for each namespace. Raises ApiError."""
    namespaces = {one["metadata"]["namespace"] for one in found if pods_of(one)}
    return {
        (namespace, pod["metadata"]["name"]): pod
        for namespace in sorted(namespaces)
        for pod in api.list_all(f"/api/v1/namespaces/{quote(namespace)}/pods", {})
    }


def pending_pods(api: Api) -> list[Json]:
    """Ask for the pods that are Pending, of all namespaces. Raises ApiError."""
    return api.list_all("/api/v1/pods", {"fieldSelector": "status.phase=Pending"})


def facts_of(found: Iterable[Json], slices: Iterable[Json], pods: Mapping[tuple[str, str], Json]) -> list[Json]:
    """Return what is told of claims; pure."""
    return facts_by(found, devices(slices), pods)
