# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Settings of a GPU after NVML was closed: expected and lost ones."""

from __future__ import annotations

from typing import Any

import pytest
from dra_driver.core.schema import Truth, Whole
from dra_driver.core.settings.knobs import COMPUTE_MODE, GRAPHICS_CLOCKS, PERSISTENCE, POWER_LIMIT, Knob
from dra_driver.core.vendors.nvidia.knobs import Kept, expected, lost

CLOCKS = {"minimum": 345, "maximum": 1410}


@pytest.mark.parametrize(
    ("kept", "own", "noted", "wanted"),
    [
        pytest.param(None, {}, {POWER_LIMIT: 500}, {POWER_LIMIT: 500}, id="record of the node"),
        pytest.param(
            Kept({POWER_LIMIT: 300}, {POWER_LIMIT: 500}),
            {POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS},
            {POWER_LIMIT: 500},
            {POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS},
            id="claim in place of the node",
        ),
        pytest.param(Kept({POWER_LIMIT: 650}, {}), {}, {}, {POWER_LIMIT: 650}, id="another program"),
        pytest.param(
            Kept({POWER_LIMIT: 500}, {POWER_LIMIT: 500}),
            {},
            {POWER_LIMIT: 400},
            {POWER_LIMIT: 400},
            id="record changed",
        ),
        pytest.param(Kept({POWER_LIMIT: 500}, {POWER_LIMIT: 500}), {}, {}, {}, id="record removed"),
    ],
)
def test_expected_settings_include_recorded_values(
    kept: Kept | None, own: dict[str, Any], noted: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert expected(kept, own, noted) == wanted


def present(power: float = 700.0, *, persistence: bool = False, blocked: str = "") -> dict[str, Knob]:
    return {
        POWER_LIMIT: Knob(power, Whole(200, 700, "W")),
        COMPUTE_MODE: Knob("Default", Truth(), blocked=blocked),
        GRAPHICS_CLOCKS: Knob(None, Truth()),
        PERSISTENCE: Knob(persistence, Truth()),
    }


def test_lost_settings_have_initial_values() -> None:
    wanted = {POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS}
    assert lost(wanted, None, present(), set()) == wanted
    assert lost(wanted, None, present(650.0), {POWER_LIMIT}) == {GRAPHICS_CLOCKS: CLOCKS}


def test_lost_settings_exclude_values_kept_by_persistence_mode() -> None:
    kept = Kept({PERSISTENCE: True}, {})
    now = present(persistence=True)
    assert lost({GRAPHICS_CLOCKS: CLOCKS}, kept, now, {PERSISTENCE}) == {}
    assert lost({GRAPHICS_CLOCKS: CLOCKS}, None, now, {PERSISTENCE}) == {GRAPHICS_CLOCKS: CLOCKS}
    assert lost({PERSISTENCE: True}, kept, present(), set()) == {PERSISTENCE: True}


def test_lost_settings_exclude_unsupported_settings() -> None:
    assert lost({COMPUTE_MODE: "Prohibited"}, None, present(blocked="MIG is on"), set()) == {}
    assert lost({"timeSlice": "Long"}, None, present(), set()) == {}
