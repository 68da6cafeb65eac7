# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Request evictions of pods from the API server, which respects PodDisruptionBudgets (policy/v1 Eviction)."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from .client import DISRUPTION_BUDGET, Api, ApiError


class Evictions:
    """The evictions of one operation. ``grace_period`` is in seconds; None uses the grace period of each pod.

    ``refusals`` contains the reason why the last request for a pod failed, by the UID of the pod.
    """

    def __init__(self, api: Api, grace_period: int | None = None) -> None:
        self._api = api
        self._grace_period = grace_period
        self.refusals: dict[str, str] = {}
        self._forbidden: ApiError | None = None
        self._has_other_answer = False

    def request(self, namespace: str, name: str, uid: str) -> bool:
        """Request the eviction of one pod. Return whether the API server accepts it. Raises ApiError for status 401."""
        try:
            refused = evict(self._api, namespace, name, uid, self._grace_period)
            self._has_other_answer = True
        except ApiError as error:
            if error.status != 403:
                raise
            self._forbidden = error
            refused = f"The API server does not allow the eviction: {error}"
        if refused:
            self.refusals[uid] = refused
        else:
            self.refusals.pop(uid, None)
        return refused is None

    def check(self) -> None:
        """Raise ApiError if all answers so far have the status 403, because the caller then may not evict pods."""
        if self._forbidden is not None and not self._has_other_answer:
            raise self._forbidden


def evict(api: Api, namespace: str, name: str, uid: str, grace_period: int | None = None) -> str | None:
    """Request the eviction of one pod. ``grace_period`` is in seconds; None uses the grace period of the pod.

    Returns None if the API server accepts the request, and an empty string if the pod no longer exists or a different pod has its name. If
    the same request can succeed later, returns the reason of the failure: a PodDisruptionBudget does not allow the eviction, the namespace is
    being deleted, a policy or a webhook refuses this pod, or the API server fails or cannot be reached. Raises ApiError for status 401 and
    other causes of 403. ``kubectl drain`` also waits for a namespace that is being deleted.
    """
    options: dict[str, Any] = {
        "preconditions": {"uid": uid}
    }  # a StatefulSet gives a new pod the name of the previous one
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
        if error.status == 403 and "NamespaceTerminating" in error.causes:
            return f"The namespace is being deleted, and the pod is not deleted yet: {error}"
        if error.status in (401, 403):
            raise
        # A 404 without a Status of the API server is an answer of a load balancer. After the other answers, other pods can still be evicted.
        return f"The request for the eviction failed: {error}"
    return None
