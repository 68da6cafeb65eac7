# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read whether pods that claims are reserved for can still run, and cache the answers between passes of the cleanup."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping

from ..api.client import ApiClient, ApiError
from .cleanup.cleanup_plan import POD_ALIVE, POD_FINISHED, POD_GONE, PodKey

LOG = logging.getLogger(__name__)

#: Names of namespaces and pods. The API server accepts other names in the reservations of a claim, and no pod has them.
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


class PodReader:
    """Read pods one by one.

    The answer that a pod can run is cached for ``alive_seconds``, other answers as long as a claim is reserved for the
    pod.
    """

    def __init__(self, client: ApiClient, *, alive_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._alive_seconds = alive_seconds
        self._clock = clock
        self._ended: dict[PodKey, str] = {}
        self._alive_until: dict[PodKey, float] = {}

    def cached(self, asked: Collection[PodKey]) -> Mapping[PodKey, str]:
        """Return the cached states of these pods. Those of other pods are removed from the cache."""
        now = self._clock()
        self._ended = {key: state for key, state in self._ended.items() if key in asked}
        self._alive_until = {key: until for key, until in self._alive_until.items() if key in asked and until > now}
        return {**self._ended, **dict.fromkeys(self._alive_until, POD_ALIVE)}

    async def state(self, key: PodKey) -> str:
        """Return the state of a pod. A pod that cannot be read counts as alive.

        Raises ApiUnreachable, and ApiError if the other pods cannot be read either.
        """
        if key in self._ended:
            return self._ended[key]
        if self._alive_until.get(key, 0.0) > self._clock():
            return POD_ALIVE
        try:
            state = await self._read(key)
        except ApiError as error:
            if error.is_of_server and (error.retry_after or error.status == 503 or error.status < 500):
                raise
            LOG.warning("the pod %s/%s cannot be read and counts as alive: %s", key[0], key[1], error)
            state = POD_ALIVE
        if state == POD_ALIVE:
            self._alive_until[key] = self._clock() + self._alive_seconds
        else:
            self._ended[key] = state  # a pod with this UID never runs again
        return state

    async def _read(self, key: PodKey) -> str:
        namespace, name, uid = key
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        if not (_NAME.fullmatch(namespace) and _NAME.fullmatch(name)):
            raise ApiError(f"GET {path!r} is not sent: this is not the name of a pod", status=400, reason="BadRequest")
        found = await self._client.find(path)
        if found is None or str((found.get("metadata") or {}).get("uid")) != uid:
            return POD_GONE
        return POD_FINISHED if (found.get("status") or {}).get("phase") in ("Succeeded", "Failed") else POD_ALIVE
