# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pass the devices of the hardware scans to the publisher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..core.model import Arranged
from ..publish.publisher import Content, Publisher
from .driver_state import Shared, Snapshot
from .health import HardwareState

# Seconds between checks of the devices that claims hold, if the published devices depend on them. Claims within this
# time share one write.
HELD_SECONDS = 0.5


class PoolUpdater:
    """Keep the pool's content equal to the devices of the last scan. The pool is empty after repeated failed scans.

    ``arranged`` changes the offers depending on the devices that claims hold. ``held`` returns the UUIDs of these
    devices.
    """

    def __init__(
        self,
        publisher: Publisher,
        hardware_states: Shared[HardwareState],
        arranged: Arranged | None = None,
        held: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._publisher = publisher
        self._hardware_states = hardware_states
        self._arranged = arranged
        self._held = held

    async def run(self) -> None:
        """Update the pool's content until canceled."""
        if self._arranged is None:
            async for hardware_state in self._hardware_states.follow():
                self._put(content_of(hardware_state.snapshot))
        else:
            await self._follow_claims(self._arranged)

    async def _follow_claims(self, arranged: Arranged) -> None:
        published: tuple[HardwareState, frozenset[str]] | None = None
        while True:
            hardware_state, held = self._hardware_states.value, self._held()
            if published is None or hardware_state is not published[0] or held != published[1]:
                published = hardware_state, held
                content, survey = content_of(hardware_state.snapshot), hardware_state.snapshot.survey
                if content is not None and survey is not None:
                    content = replace(content, offers=arranged(content.offers, survey.devices, held))
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
