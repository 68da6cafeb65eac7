# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pass the devices of the hardware scans to the publisher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..core.model import Arranged
from ..publish.publisher import Content, Publisher
from .driver_state import Shared, Snapshot
from .health import Picture

# Seconds between checks of the devices that claims hold, if the published devices depend on them. Claims within this
# time share one write.
HELD_SECONDS = 0.5


class PoolKeeper:
    """Keep the pool's content equal to the devices of the last scan. The pool is empty after repeated failed scans.

    ``arranged`` changes the offers depending on the devices that claims hold. ``held`` returns the UUIDs of these
    devices.
    """

    def __init__(
        self,
        publisher: Publisher,
        pictures: Shared[Picture],
        arranged: Arranged | None = None,
        held: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._publisher = publisher
        self._pictures = pictures
        self._arranged = arranged
        self._held = held

    async def run(self) -> None:
        """Update the pool's content until canceled."""
        if self._arranged is None:
            async for picture in self._pictures.follow():
                self._put(content_of(picture.snapshot))
        else:
            await self._follow_claims(self._arranged)

    async def _follow_claims(self, arranged: Arranged) -> None:
        told: tuple[Picture, frozenset[str]] | None = None
        while True:
            picture, held = self._pictures.value, self._held()
            if told is None or picture is not told[0] or held != told[1]:
                told = picture, held
                content, survey = content_of(picture.snapshot), picture.snapshot.survey
                if content is not None and survey is not None:
                    content = replace(content, offers=arranged(content.offers, survey.devices, held))
                self._put(content)
            await self._pictures.changed(HELD_SECONDS)

    def _put(self, content: Content | None) -> None:
        if content is not None:
            self._publisher.set_content(content)


def content_of(snapshot: Snapshot) -> Content | None:
    """Return the content of the pool; None before the end of the first scan, when the pool must not change."""
    if snapshot.survey is not None:
        return Content(snapshot.survey.offers, snapshot.survey.counter_sets)
    return Content() if snapshot.given_up else None
