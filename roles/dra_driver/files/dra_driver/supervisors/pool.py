# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Hands what the hardware offers to the publisher."""

from __future__ import annotations

from ..publish.publisher import Content, Publisher
from .shared import Shared, Snapshot


class PoolKeeper:
    """Follows the hardware; the pool holds what it offers, and nothing while the hardware is given up."""

    def __init__(self, publisher: Publisher, snapshots: Shared[Snapshot]) -> None:
        self._publisher = publisher
        self._snapshots = snapshots

    async def run(self) -> None:
        """Keep the pool's content up to date, until cancelled."""
        async for snapshot in self._snapshots.follow():
            content = content_of(snapshot)
            if content is not None:
                self._publisher.set_content(content)


def content_of(snapshot: Snapshot) -> Content | None:
    """Return what the pool is to hold; None before the first look has ended, when the pool is left as it is."""
    if snapshot.survey is not None:
        return Content(snapshot.survey.offers, snapshot.survey.counter_sets)
    return Content() if snapshot.given_up else None
