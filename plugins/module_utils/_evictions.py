# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Asks the API server to evict a pod, which keeps to PodDisruptionBudgets (policy/v1 Eviction)."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from ._kubernetes import DISRUPTION_BUDGET, Api, ApiError


def evict(api: Api, namespace: str, name: str, uid: str, grace_period: int | None = None) -> str | None:
    """Request the eviction of one pod. ``grace_period`` is in seconds; None uses the grace period of the pod.

    Returns None if the API server accepts the request, and an empty string if the pod no longer exists or a different pod has its name. If
    the same request can succeed later, returns the reason of the failure: a PodDisruptionBudget does not allow the eviction, or the API
    server fails or cannot be reached. Raises ApiError for every other answer.
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
        api.request(
            "POST", f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(name)}/eviction", body=body, repeat=False
        )
    except ApiError as error:
        if error.is_not_found or error.status == 409:
            return ""
        # The server does not support several budgets for one pod, and answers 500 without a reason (registry/core/pod/storage/eviction.go).
        if DISRUPTION_BUDGET in error.causes or (error.status == 500 and "PodDisruptionBudget" in str(error)):
            return f"A PodDisruptionBudget does not allow the eviction: {error}"
        # A 404 that is not of the API server is an answer of a load balancer.
        if error.status in (0, 404, 429) or error.status >= 500:
            return f"The request for the eviction failed: {error}"
        raise
    return None
