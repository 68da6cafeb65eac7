# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Authorization of readers of the report or metrics: the API server authenticates the token and authorizes its user.

Facts: k8s.io/api/authentication/v1 (TokenReview), k8s.io/api/authorization/v1 (SubjectAccessReview). A token must be
made for AUDIENCE, so a token that the controller receives gives no other access to the cluster. The needed right is
``get`` of the path, a non-resource URL.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..api.client import ApiClient
from ..core.errors import AcceleratorError

PATH = "/dra-accelerators/report"
AUDIENCE = "dra-accelerators-report"
METRICS_PATH = "/metrics"
METRICS_AUDIENCE = "dra-accelerators-metrics"
#: How long an authorization is cached, and how long it stays valid while the API server does not answer.
KEPT_SECONDS, OUTAGE_SECONDS = 60.0, 600.0
#: The same for metrics, as kubelets cache an authorization: each node sends two requests for each reader.
METRICS_KEPT_SECONDS = 300.0
#: How long a refusal is cached, as in kubelets. A scraper with a wrong token sends a request every few seconds.
REFUSED_SECONDS = 30.0
#: Every client that reaches the port can send tokens. These are the maximum numbers of parallel reviews, of tokens that
#: wait for a review, and of cached readers. The HTTP server limits headers to 8 KiB.
AT_ONCE, MOST_WAITING, MOST_READERS = 4, 16, 1024


class Verdict(NamedTuple):
    """The result for a request: an HTTP status (200: allowed), and the reason for any other status."""

    status: int
    why: str = ""


class ReaderAuthorizer:
    """Authorize tokens for one path. ``clock`` returns seconds of a monotonic clock.

    A token must be for ``audience``, and its user needs the right to get ``path``. ``right`` names the role with that
    right. After ``kept`` seconds, an accepted reader is checked again.
    """

    def __init__(
        self,
        client: ApiClient,
        clock: Callable[[], float] = time.monotonic,
        *,
        path: str = PATH,
        audience: str = AUDIENCE,
        right: str = "the ClusterRole dra-accelerators-report",
        kept: float = KEPT_SECONDS,
    ) -> None:
        self._client = client
        self._clock = clock
        self._path = path
        self._audience = audience
        self._right = right
        self._kept = kept
        #: Separate limits, so that the reviews of known readers do not wait behind those of unknown tokens.
        self._of_known, self._of_unknown = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        #: The time of each authorization, by the token's hash.
        self._allowed: dict[bytes, float] = {}
        #: The time and reason of each refusal, by the token's hash, oldest first.
        self._refused: dict[bytes, tuple[float, Verdict]] = {}

    async def judge(self, authorization: str) -> Verdict:
        """Return whether the sender of this header may read the path."""
        kind, _space, token = authorization.partition(" ")
        token = token.strip()
        if kind.lower() != "bearer" or not token:
            return Verdict(401, f"A bearer token is needed, made for the audience {self._audience}")
        known, now = hashlib.sha256(token.encode()).digest(), self._clock()
        self._allowed = {each: at for each, at in self._allowed.items() if now - at < OUTAGE_SECONDS}
        since = self._allowed.get(known)
        if since is not None and now - since < self._kept:
            return Verdict(200)
        refused = self._refused.get(known)
        if refused is not None and now - refused[0] < REFUSED_SECONDS:
            return refused[1]
        try:
            if since is not None:
                async with self._of_known:
                    found = await self._ask(token)
            elif self._waiting >= AT_ONCE + MOST_WAITING:
                return Verdict(429, "Too many unknown tokens wait for the API server")
            else:
                found = await self._ask_about_unknown(token)
        except AcceleratorError as error:
            # No answer about this reader, whatever the status: 429 and 401 concern the requests of this program.
            if since is not None:
                return Verdict(200)
            return Verdict(503, f"The API server cannot say who may read: {error}")
        self._allowed.pop(known, None)
        self._refused.pop(known, None)
        if found.status == 200 and len(self._allowed) < MOST_READERS:
            self._allowed[known] = now
        elif found.status != 200:
            self._refused[known] = now, found
            while len(self._refused) > MOST_READERS:
                del self._refused[next(iter(self._refused))]
        return found

    async def _ask_about_unknown(self, token: str) -> Verdict:
        self._waiting += 1
        try:
            async with self._of_unknown:
                return await self._ask(token)
        finally:
            self._waiting -= 1

    async def _ask(self, token: str) -> Verdict:
        review = await self._create(
            "authentication.k8s.io/v1", "TokenReview", {"token": token, "audiences": [self._audience]}
        )
        if review.get("authenticated") is not True or self._audience not in (review.get("audiences") or ()):
            return Verdict(
                401, f"The API server does not know this token, or it was not made for the audience {self._audience}"
            )
        user = review.get("user") or {}
        name = str(user.get("username") or "")
        asked = {
            **{key: user[key] for key in ("uid", "groups", "extra") if user.get(key)},
            "user": name,
            "nonResourceAttributes": {"path": self._path, "verb": "get"},
        }
        answer = await self._create("authorization.k8s.io/v1", "SubjectAccessReview", asked)
        if answer.get("allowed") is not True or answer.get("denied") is True:
            return Verdict(403, f"{name} may not get {self._path}; {self._right} gives that right")
        return Verdict(200)

    async def _create(self, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        body = {"apiVersion": version, "kind": kind, "metadata": {}, "spec": spec}
        answer = await self._client.request("POST", f"/apis/{version}/{kind.lower()}s", body=body)
        return dict(answer.get("status") or {})
