# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Hands what the hardware offers to the publisher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..core.model import Arranged
from ..publish.publisher import Content, Publisher
from .health import Picture
from .shared import Shared, Snapshot

# How often it is seen which devices claims hold, where what is published depends on that: claims that come together are one write.
HELD_SECONDS = 0.5


class PoolKeeper:
    """Follows the hardware and its health; the pool holds what it offers, and nothing while the hardware is given up.

    With ``arranged`` the offers are published as that says for the devices that claims hold, whose UUIDs ``held`` returns.
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
        """Keep the pool's content up to date, until cancelled."""
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
    """Return what the pool is to hold; None before the first look has ended, when the pool is left as it is."""
    if snapshot.survey is not None:
        return Content(snapshot.survey.offers, snapshot.survey.counter_sets)
    return Content() if snapshot.given_up else None
