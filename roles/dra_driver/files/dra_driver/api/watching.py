# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A list of the API server's objects that is kept up to date: paged, followed by a watch, and of each object only what is needed."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from ..core.errors import AcceleratorError
from ..logs import StateLog, fields
from .client import ApiClient, ApiError, Json

LOG = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_FIRST, RETRY_LIMIT = 1.0, 60.0
# Only an accepted watch that was open for longer resets the wait before the next attempt.
LASTING_SECONDS = 5.0


class Attempts:
    """Counts consecutive attempts at a watch that failed or ended soon. Only an accepted watch that lasted resets the count."""

    def __init__(self) -> None:
        self._number = 0
        self._opened_at: float | None = None

    def opened(self) -> None:
        """Record that the server has accepted the watch."""
        self._opened_at = time.monotonic()

    def ended(self) -> int:
        """Return the number of consecutive short or failed attempts, including the one that ended now; 0 if it lasted."""
        opened_at, self._opened_at = self._opened_at, None
        has_lasted = opened_at is not None and time.monotonic() - opened_at > LASTING_SECONDS
        self._number = 0 if has_lasted else self._number + 1
        return self._number


class Watched(Generic[T]):
    """All objects at one path.

    ``path`` is asked for before each list (the cluster may have been upgraded); None says that the server has no such
    objects. ``keep`` makes of an object what is remembered of it; None leaves it out. ``changed`` is called after every change.
    An object for which ``keep`` fails is left out with a warning, and an exception of ``changed`` is logged: neither ends the watch.
    """

    def __init__(
        self,
        client: ApiClient,
        name: str,
        path: Callable[[], Awaitable[str | None]],
        keep: Callable[[Json], T | None],
        *,
        params: Mapping[str, str] | None = None,
        page: int = 500,
        changed: Callable[[], None] = lambda: None,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = name
        self._client = client
        self._path = path
        self._keep = keep
        self._params = dict(params or {})
        self._page = page
        self._changed = changed
        self._wait = wait
        self._items: dict[str, T] = {}
        self._state = StateLog(LOG)
        self.current = False
        self.synced = asyncio.Event()

    @property
    def items(self) -> Mapping[str, T]:
        """What is remembered, by "namespace/name" ("/name" for what has no namespace). Old while ``current`` is false."""
        return self._items

    async def run(self) -> None:
        """List and watch, again and again, until cancelled; never faster than the server answers sensibly."""
        attempts = Attempts()
        while True:
            told = 0.0
            try:
                path = await self._path()
                if path is None:
                    self._replace({})
                    self._state.report(f"the API server has no {self.name}")
                    await self._wait(RETRY_LIMIT)
                    continue
                version = await self._list(path)
                self._state.report(f"the API server shows the {self.name}", number=len(self._items))
                await self._watch(path, version, attempts)
            except AcceleratorError as error:
                told = (error.retry_after or 0.0) if isinstance(error, ApiError) else 0.0
                self.current = False
                self._state.report(
                    f"the {self.name} cannot be watched: {error}", level=logging.WARNING, code=error.code
                )
            except Exception as error:
                # A defect must neither end the watch nor leave old objects that count as current.
                self.current = False
                text = f"the {self.name} cannot be watched: {type(error).__name__}"
                if self._state.report(text, level=logging.ERROR):
                    LOG.exception("unexpected exception in a watch", extra=fields(watch=self.name))
            await self._wait(max(told, _backoff(attempts.ended())))

    async def list_once(self) -> None:
        """List, and no more. Raises ApiError, ApiUnreachable."""
        path = await self._path()
        if path is None:
            self._replace({})
        else:
            await self._list(path)

    async def _list(self, path: str) -> str:
        found: dict[str, T] = {}
        params = {**self._params, "limit": str(self._page)}
        while True:
            answer = await self._client.get(path, params=params)
            for item in answer.get("items") or ():
                kept = self._kept(item)
                if kept is not None:
                    found[_key(item)] = kept
            metadata = answer.get("metadata") or {}
            if not metadata.get("continue"):
                self._replace(found)
                return str(metadata.get("resourceVersion", ""))
            params["continue"] = str(metadata["continue"])

    def _replace(self, found: dict[str, T]) -> None:
        self._items = found
        self.current = True
        self.synced.set()
        self._notify()

    def _kept(self, item: Json) -> T | None:
        try:
            return self._keep(item)
        except Exception as error:  # noqa: BLE001  one object must not hide all others
            LOG.warning(
                "object skipped, it cannot be read: %s",
                _key(item),
                extra=fields(watch=self.name, error=f"{type(error).__name__}: {error}"[:300]),
            )
            return None

    def _notify(self) -> None:
        try:
            self._changed()
        except Exception:
            LOG.exception("an observer of a watch failed", extra=fields(watch=self.name))

    async def _watch(self, path: str, version: str, attempts: Attempts) -> None:
        """Watch from a version on; returns when that is too old."""
        while True:
            try:
                async for event in self._client.watch(
                    path, resource_version=version, params=self._params, opened=attempts.opened
                ):
                    self.current = True
                    version = str((event.object.get("metadata") or {}).get("resourceVersion") or version)
                    if event.type != "BOOKMARK":
                        self._observe(event.type, event.object)
            except ApiError as error:
                if error.status == 410:
                    return
                raise
            number = attempts.ended()
            if number:
                await self._wait(_backoff(number))

    def _observe(self, kind: str, item: Json) -> None:
        key = _key(item)
        kept = self._kept(item) if kind != "DELETED" else None
        if kept == self._items.get(key):
            return
        if kept is None:
            del self._items[key]
        else:
            self._items[key] = kept
        self._notify()


def _key(item: Json) -> str:
    found = item.get("metadata")
    metadata = found if isinstance(found, dict) else {}
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"


def _backoff(number: int) -> float:
    spread = random.uniform(0.8, 1.2)  # noqa: S311  no secret is made of it
    return float(spread * min(RETRY_FIRST * 2.0 ** min(max(number - 1, 0), 30), RETRY_LIMIT))
