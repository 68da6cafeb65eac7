# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Asks the API server to evict a pod, which keeps to PodDisruptionBudgets (policy/v1 Eviction)."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from ._kubernetes import Api, ApiError


def evict(api: Api, namespace: str, name: str, uid: str, grace_period: int | None = None) -> str | None:
    """Request the eviction of one pod. ``grace_period`` is in seconds; None uses the grace period of the pod.

    Returns None if the API server accepts the request, its message if a PodDisruptionBudget does not allow the eviction, and an empty
    text if the pod no longer exists or another pod has its name. Raises ApiError for every other answer.
    """
    options: dict[str, Any] = {
        "preconditions": {"uid": uid}
    }  # a pod of a StatefulSet has the name of the one before it
    if grace_period is not None:
        options["gracePeriodSeconds"] = grace_period
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"namespace": namespace, "name": name},
        "deleteOptions": options,
    }
    try:
        api.request("POST", f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(name)}/eviction", body=body)
    except ApiError as error:
        if error.is_not_found or error.status == 409:
            return ""
        # 429: a budget does not allow the eviction. 500: several budgets select the pod.
        if error.status in (429, 500):
            return str(error)
        raise
    return None
