# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the requests of containers from pods at the API server, if the driver may read pods."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Collection, Mapping

from ..api.client import ApiError
from ..api.resources import ResourceApi
from ..core.errors import AcceleratorError
from ..kubelet.attribution import PodRequests, requests_of_pod

# The timeout, in seconds, of one read of all missing pods.
READ_SECONDS = 2.0
# Seconds for which requests are cached. The kubelet's list has no pod UIDs, and a new pod of a StatefulSet has the name of the previous
# one and can share its claim.
CACHE_SECONDS = 60.0
# Seconds without requests after a failed read.
RETRY_SECONDS = 60.0
Pod = tuple[str, str]


async def read_requests(
    api: ResourceApi, pods: Collection[Pod], found: dict[Pod, PodRequests] | None = None
) -> dict[Pod, PodRequests]:
    """Return the requests of pods by namespace and name, without pods that do not exist.

    Each result is added to ``found`` at once, so that a caller has a part of the results after a timeout. Raises
    ApiError or ApiUnreachable.
    """
    found = {} if found is None else found
    for namespace, name in sorted(pods):
        try:
            found[namespace, name] = requests_of_pod(await api.pod(namespace, name))
        except ApiError as error:
            if not error.is_not_found:
                raise
    return found


class PodReader:
    """Cache the requests of pods for 60 s. The API client runs on ``loop``; the methods run on another thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, api: ResourceApi, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._api = api
        self._clock = clock
        #: By pod: the UIDs of its claims, the time of the read, and the requests.
        self._cache: dict[Pod, tuple[frozenset[str], float, PodRequests]] = {}
        self._failure: AcceleratorError | None = None
        self._retry_at = float("-inf")

    def refresh(self, claims: Mapping[Pod, Collection[str]]) -> None:
        """Read these pods unless they are cached, and remove all other pods from the cache.

        ``claims`` maps pods to the UIDs of their claims. Raises AcceleratorError; pods read before the error are
        cached. After an error without a result, the API server is not queried for RETRY_SECONDS, or for the time that
        it requests, because every node is scraped every few seconds.
        """
        now = self._clock()
        self._cache = {
            pod: kept
            for pod, kept in self._cache.items()
            if kept[0] == frozenset(claims.get(pod, ())) and now - kept[1] < CACHE_SECONDS
        }
        missing = set(claims) - set(self._cache)
        if not missing:
            return
        if self._failure is not None and now < self._retry_at:
            raise self._failure
        self._failure = None
        found: dict[Pod, PodRequests] = {}
        reading = asyncio.run_coroutine_threadsafe(read_requests(self._api, missing, found), self._loop)
        try:
            reading.result(READ_SECONDS)
        except concurrent.futures.TimeoutError:
            reading.cancel()
            raise self._remember_failure(
                AcceleratorError(
                    f"The API server returned {len(found)} of {len(missing)} pods within {READ_SECONDS:g} s",
                    code="no-answer",
                ),
                found,
            ) from None
        except AcceleratorError as error:
            raise self._remember_failure(error, found) from None
        finally:
            self._cache.update({pod: (frozenset(claims[pod]), now, kept) for pod, kept in dict(found).items()})

    def _remember_failure(self, error: AcceleratorError, found: Collection[Pod]) -> AcceleratorError:
        asked = (error.retry_after or 0.0) if isinstance(error, ApiError) else 0.0
        if asked or not found:
            self._failure, self._retry_at = error, self._clock() + max(asked, RETRY_SECONDS)
        return error

    def known(self, pods: Collection[Pod]) -> dict[Pod, PodRequests]:
        """Return the cached requests of these pods."""
        return {pod: self._cache[pod][2] for pod in pods if pod in self._cache}
