# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Settings of a GPU after NVML was closed: expected and lost ones."""

from __future__ import annotations

from typing import Any

import pytest
from dra_driver.core.schema import Boolean, Integer
from dra_driver.core.settings.knobs import COMPUTE_MODE, GRAPHICS_CLOCKS, PERSISTENCE, POWER_LIMIT, Knob
from dra_driver.core.vendors.nvidia.settings.gpu_settings import SavedSettings, expected_settings, lost_settings

CLOCKS = {"minimum": 345, "maximum": 1410}


@pytest.mark.parametrize(
    ("kept", "own", "noted", "wanted"),
    [
        pytest.param(None, {}, {POWER_LIMIT: 500}, {POWER_LIMIT: 500}, id="record of the node"),
        pytest.param(
            SavedSettings({POWER_LIMIT: 300}, {POWER_LIMIT: 500}),
            {POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS},
            {POWER_LIMIT: 500},
            {POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS},
            id="claim in place of the node",
        ),
        pytest.param(SavedSettings({POWER_LIMIT: 650}, {}), {}, {}, {POWER_LIMIT: 650}, id="another program"),
        pytest.param(
            SavedSettings({POWER_LIMIT: 500}, {POWER_LIMIT: 500}),
            {},
            {POWER_LIMIT: 400},
            {POWER_LIMIT: 400},
            id="record changed",
        ),
        pytest.param(SavedSettings({POWER_LIMIT: 500}, {POWER_LIMIT: 500}), {}, {}, {}, id="record removed"),
    ],
)
def test_expected_settings_include_recorded_values(
    kept: SavedSettings | None, own: dict[str, Any], noted: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert expected_settings(kept, own, noted) == wanted


def present(power: float = 700.0, *, persistence: bool = False, blocked: str = "") -> dict[str, Knob]:
    return {
        POWER_LIMIT: Knob(power, Integer(200, 700, "W")),
        COMPUTE_MODE: Knob("Default", Boolean(), blocked=blocked),
        GRAPHICS_CLOCKS: Knob(None, Boolean()),
        PERSISTENCE: Knob(persistence, Boolean()),
    }


def test_lost_settings_have_initial_values() -> None:
    wanted = {POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS}
    assert lost_settings(wanted, None, present(), set()) == wanted
    assert lost_settings(wanted, None, present(650.0), {POWER_LIMIT}) == {GRAPHICS_CLOCKS: CLOCKS}


def test_lost_settings_exclude_values_kept_by_persistence_mode() -> None:
    kept = SavedSettings({PERSISTENCE: True}, {})
    now = present(persistence=True)
    assert lost_settings({GRAPHICS_CLOCKS: CLOCKS}, kept, now, {PERSISTENCE}) == {}
    assert lost_settings({GRAPHICS_CLOCKS: CLOCKS}, None, now, {PERSISTENCE}) == {GRAPHICS_CLOCKS: CLOCKS}
    assert lost_settings({PERSISTENCE: True}, kept, present(), set()) == {PERSISTENCE: True}


def test_lost_settings_exclude_unsupported_settings() -> None:
    assert lost_settings({COMPUTE_MODE: "Prohibited"}, None, present(blocked="MIG is on"), set()) == {}
    assert lost_settings({"timeSlice": "Long"}, None, present(), set()) == {}
