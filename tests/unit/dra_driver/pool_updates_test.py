# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Publication of content that depends on held devices: one write for simultaneous changes, none without changes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from claim_steps import run
from dra_driver.core.model import Device, Offer
from dra_driver.publish.publisher import Content
from dra_driver.supervisors import pool_updates
from dra_driver.supervisors.driver_state import Shared, Snapshot
from dra_driver.supervisors.health import HardwareState
from dra_driver.supervisors.pool_updates import PoolUpdater
from machine_model import Claims, Node


class RecordingPublisher:
    """A publisher that only records content."""

    def __init__(self) -> None:
        self.contents: list[Content] = []

    def set_content(self, content: Content) -> None:
        self.contents.append(content)


def marked(offers: Sequence[Offer], devices: Mapping[str, Device], held: Collection[str]) -> tuple[Offer, ...]:
    """Add the number of held devices to each offer."""
    assert set(held) <= set(devices)
    return tuple(replace(offer, attributes={**offer.attributes, "held": len(held)}) for offer in offers)


def held_attributes(content: Content) -> set[object]:
    return {offer.attributes.get("held") for offer in content.offers}


def test_pool_follows_changes_of_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_updates, "HELD_SECONDS", 0.01)

    async def scenario(node: Node, _claims: Claims) -> None:
        assert node.survey is not None
        hardware_state = HardwareState(Snapshot(survey=node.survey))
        uuids = sorted(node.survey.devices)
        hardware_states, reported, held = Shared(HardwareState()), RecordingPublisher(), [frozenset[str]()]
        updater = PoolUpdater(reported, hardware_states, marked, lambda: held[0])  # type: ignore[arg-type]
        running = asyncio.ensure_future(updater.run())
        await asyncio.sleep(0.05)
        assert not reported.contents  # before the first scan the pool does not change
        hardware_states.put(hardware_state)
        await asyncio.sleep(0.05)
        assert [held_attributes(each) for each in reported.contents] == [{0}]
        held[0] = frozenset(uuids[:1])
        await asyncio.sleep(0.05)
        # Equal held devices cause no new content. Equal content is left to the publisher's comparison.
        held[0] = frozenset(uuids[:1])
        await asyncio.sleep(0.05)
        assert [held_attributes(each) for each in reported.contents] == [{0}, {1}]
        hardware_states.put(HardwareState(Snapshot(given_up="no driver")))
        await asyncio.sleep(0.05)
        assert reported.contents[2:] == [Content()]
        running.cancel()

    run(tmp_path, scenario)


def test_pool_independent_of_claims_does_not_read_them(tmp_path: Path) -> None:
    async def scenario(node: Node, _claims: Claims) -> None:
        def never() -> frozenset[str]:
            raise AssertionError("asked")

        reported = RecordingPublisher()
        updater = PoolUpdater(reported, Shared(HardwareState(Snapshot(survey=node.survey))), None, never)  # type: ignore[arg-type]
        running = asyncio.ensure_future(updater.run())
        await asyncio.sleep(0.02)
        assert node.survey is not None and [each.offers for each in reported.contents] == [node.survey.offers]
        running.cancel()

    run(tmp_path, scenario)
