# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Asks the API server to evict a pod, which keeps to PodDisruptionBudgets (policy/v1 Eviction)."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from ._kubernetes import Api, ApiError


def evict(api: Api, namespace: str, name: str, uid: str, grace_period: int | None = None) -> str | None:
    """Have one pod evicted. ``grace_period`` in seconds; None is the pod's own.

    Returns None where it is on its way, the server's sentence where a budget allows none for now, and an empty text where it has gone or
    another one has its name. Raises ApiError for everything else.
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
        # A budget that allows none for now, or several budgets for one pod.
        if error.status in (429, 500):
            return str(error)
        raise
    return None
