# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Hands what the hardware offers to the publisher."""

from __future__ import annotations

from ..publish.publisher import Content, Publisher
from .health import Picture
from .shared import Shared, Snapshot


class PoolKeeper:
    """Follows the hardware and its health; the pool holds what it offers, and nothing while the hardware is given up."""

    def __init__(self, publisher: Publisher, pictures: Shared[Picture]) -> None:
        self._publisher = publisher
        self._pictures = pictures

    async def run(self) -> None:
        """Keep the pool's content up to date, until cancelled."""
        async for picture in self._pictures.follow():
            content = content_of(picture.snapshot)
            if content is not None:
                self._publisher.set_content(content)


def content_of(snapshot: Snapshot) -> Content | None:
    """Return what the pool is to hold; None before the first look has ended, when the pool is left as it is."""
    if snapshot.survey is not None:
        return Content(snapshot.survey.offers, snapshot.survey.counter_sets)
    return Content() if snapshot.given_up else None
