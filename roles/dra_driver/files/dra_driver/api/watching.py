# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keep a list of API objects up to date: a paged list, then a watch, storing only the needed part of each object."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from ..core.errors import AcceleratorError
from ..logs import StateLog, fields
from .client import ApiClient, ApiUnreachable, Json, WatchEvent
from .throttling import backoff, is_of_server, requested_pause

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# The wait before an attempt is random between 0 and a limit, which doubles from the first value to the last: nodes that lost
# their watches at the same moment return at different times.
RETRY_FIRST, RETRY_LIMIT = 5.0, 60.0
# The numbers of consecutive failed attempts after which the objects are listed again: for rejected watches, and for
# accepted watches that broke early.
REFUSED_LIMIT, BROKEN_LIMIT = 8, 2
# Seconds. Only an accepted watch that was open for longer resets the wait before the next attempt. If its connection
# then breaks or becomes silent, the watch counts as ended normally, because load balancers close idle connections, some
# after 20 s.
LASTING_SECONDS = 5.0


async def list_and_watch(
    read: Callable[[], Awaitable[str | None]],
    watch: Callable[[str, Callable[[], None]], AsyncIterator[WatchEvent]],
    observe: Callable[[str, Json], None],
    *,
    opened: Callable[[], None],
    ended: Callable[[Exception | None], None],
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """List objects once and watch them until cancelled.

    A watch that ends or breaks is resumed from the last resource version.

    ``read`` lists the objects and returns their resource version; None means that the server has no such objects.
    ``watch`` gets a version and the function to call once the server has accepted the watch. ``observe`` gets each
    event except bookmarks. ``opened`` is called for each accepted watch. ``ended`` is called with the exception of each
    failed attempt, and with None for a watch that the server ended normally, or whose connection broke after
    LASTING_SECONDS.

    The objects are listed again after status 410, after errors other than those of the server or the connection, and
    after several consecutive failed attempts, because an unreadable event would break each resumed watch.
    """
    version: str | None = None
    failures = 0
    opened_at: list[float] = []

    def accept() -> None:
        opened_at.append(time.monotonic())
        opened()

    while True:
        failure = None
        opened_at.clear()
        try:
            if version is None:
                version = await read()
            if version is None:
                await wait(RETRY_LIMIT)
                continue
            async with contextlib.aclosing(watch(version, accept)) as events:  # type: ignore[type-var]
                async for event in events:
                    if event.type != "BOOKMARK":
                        observe(event.type, event.object)
                    version = str((event.object.get("metadata") or {}).get("resourceVersion") or version)
        except Exception as error:  # noqa: BLE001  a defect must not end the watch
            failure = error
        # Only an accepted watch that lasted resets the wait.
        has_lasted = bool(opened_at) and time.monotonic() - opened_at[0] > LASTING_SECONDS
        failures = 0 if has_lasted else failures + 1
        if has_lasted and isinstance(failure, ApiUnreachable):
            failure = None
        if failure is not None:
            limit = BROKEN_LIMIT if opened_at else REFUSED_LIMIT
            if not is_of_server(failure) or (failures and failures % limit == 0):
                version = None
        ended(failure)
        requested = requested_pause(failure) if failure is not None else 0.0
        await wait(requested + random.uniform(0.0, backoff(failures, RETRY_FIRST, RETRY_LIMIT)))  # noqa: S311  no secret


class Watched(Generic[T]):
    """All objects at one path, kept up to date.

    ``path`` is called before each list, because the cluster may have been upgraded. It returns None if the server has
    no such objects. ``keep`` returns the value to store for an object, or None to leave the object out. ``changed`` is
    called after every list and after each change for which ``matters`` returns true; ``matters`` gets the previous and
    the new value, None for no object. ``storage`` creates the mapping for the stored values.

    ``current`` is true after a list, and after each accepted watch. It becomes false with the first failed attempt.
    This is at most two minutes after the server became silent: up to 90 s of silence, 5 s until the next attempt, and
    30 s for its response.

    An object for which ``keep`` fails is left out with a warning. An exception of ``changed`` is logged. Neither ends
    the watch.
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
        matters: Callable[[T | None, T | None], bool] = lambda _former, _new: True,
        storage: Callable[[], dict[str, T]] = dict,
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
        self._matters = matters
        self._storage = storage
        self._items = storage()
        self._state = StateLog(LOG)
        self._watched_path: str | None = None
        self.current = False
        self.synced = asyncio.Event()

    @property
    def items(self) -> Mapping[str, T]:
        """The stored values by "namespace/name", or "/name" for a cluster-scoped object.

        They are outdated while ``current`` is false.
        """
        return self._items

    async def run(self) -> None:
        """List and watch until cancelled."""
        await list_and_watch(
            self._read, self._watch, self._observe, opened=self._opened, ended=self._ended, wait=self._wait
        )

    async def _read(self) -> str | None:
        self._watched_path = await self._path()
        if self._watched_path is None:
            self._replace(self._storage())
            self._state.report(f"the API server has no {self.name}")
            return None
        return await self._list(self._watched_path)

    def _watch(self, version: str, opened: Callable[[], None]) -> AsyncIterator[WatchEvent]:
        path = self._watched_path or ""
        return self._client.watch(path, resource_version=version, params=self._params, opened=opened)

    def _opened(self) -> None:
        self._state.report(f"the API server shows the {self.name}", number=len(self._items))
        if not self.current:
            self.current = True
            self._notify()

    def _ended(self, error: Exception | None) -> None:
        if error is None:
            return
        self.current = False
        if isinstance(error, AcceleratorError):
            self._state.report(f"the {self.name} cannot be watched: {error}", level=logging.WARNING, code=error.code)
        elif self._state.report(f"the {self.name} cannot be watched: {type(error).__name__}", level=logging.ERROR):
            LOG.error("unexpected exception in a watch", exc_info=error, extra=fields(watch=self.name))

    async def list_once(self) -> None:
        """List the objects once. Raises ApiError or ApiUnreachable."""
        await self._read()

    async def _list(self, path: str) -> str:
        found = self._storage()
        version = ""
        async for answer, is_first in self._client.pages(path, self._params, page=self._page):
            if is_first:
                found.clear()
            for item in answer["items"] or ():
                kept = self._kept(item)
                if kept is not None:
                    found[_key(item)] = kept
            version = str((answer.get("metadata") or {}).get("resourceVersion", ""))
        self._replace(found)
        return version

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

    def _observe(self, kind: str, item: Json) -> None:
        key = _key(item)
        kept = self._kept(item) if kind != "DELETED" else None
        former = self._items.get(key)
        if kept == former:
            return
        if kept is None:
            del self._items[key]
        else:
            self._items[key] = kept
        if self._matters(former, kept):
            self._notify()


def _key(item: Json) -> str:
    found = item.get("metadata")
    metadata = found if isinstance(found, dict) else {}
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
