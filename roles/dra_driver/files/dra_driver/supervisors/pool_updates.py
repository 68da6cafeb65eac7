# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pass the devices of the hardware scans to the publisher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..core.model import OfferArranger
from ..publish.publisher import Content, Publisher
from .driver_state import Shared, Snapshot
from .health import HardwareState

# Seconds between checks of the devices that claims use, if the published devices depend on them. All changes within this time are one
# write.
HELD_SECONDS = 0.5


class PoolUpdater:
    """Keep the pool's content equal to the devices of the last scan. The pool is empty after repeated failed scans.

    ``arrange`` returns the offers changed for the devices that claims use, whose UUIDs ``held_uuids`` returns.
    """

    def __init__(
        self,
        publisher: Publisher,
        hardware_states: Shared[HardwareState],
        arrange: OfferArranger | None = None,
        held_uuids: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._publisher = publisher
        self._hardware_states = hardware_states
        self._arrange = arrange
        self._held_uuids = held_uuids

    async def run(self) -> None:
        """Update the pool's content until canceled."""
        if self._arrange is None:
            async for hardware_state in self._hardware_states.follow():
                self._put(content_of(hardware_state.snapshot))
        else:
            await self._follow_claims(self._arrange)

    async def _follow_claims(self, arrange: OfferArranger) -> None:
        published: tuple[HardwareState, frozenset[str]] | None = None
        while True:
            hardware_state, held = self._hardware_states.value, self._held_uuids()
            if published is None or hardware_state is not published[0] or held != published[1]:
                published = hardware_state, held
                content, survey = content_of(hardware_state.snapshot), hardware_state.snapshot.survey
                if content is not None and survey is not None:
                    content = replace(content, offers=arrange(content.offers, survey.devices, held))
                self._put(content)
            await self._hardware_states.changed(HELD_SECONDS)

    def _put(self, content: Content | None) -> None:
        if content is not None:
            self._publisher.set_content(content)


def content_of(snapshot: Snapshot) -> Content | None:
    """Return the content of the pool; None before the end of the first scan, when the pool must not change."""
    if snapshot.survey is not None:
        return Content(snapshot.survey.offers, snapshot.survey.counter_sets)
    return Content() if snapshot.given_up else None
