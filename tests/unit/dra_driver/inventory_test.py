# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The offered devices, from findings and rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dra_driver.core.model import Finding
from dra_driver.core.partitioning.rules import parse_rules
from dra_driver.core.vendors.registry import create
from dra_driver.inventory import survey

from tests.unit.core import board_model


@pytest.mark.parametrize("mode", ["whole", "dynamic"])
def test_device_with_the_names_of_another_is_withheld_with_a_reason(mode: str) -> None:
    gpus = [board_model.device("h100-80", number) for number in range(3)]
    gpus[1] = replace(gpus[1], minor=0)
    findings = [Finding(each.index, each.describe(), each.uuid, each) for each in gpus]
    found = survey(create("nvidia"), findings, parse_rules([{"match": {}, "mode": mode}]), {})
    assert {offer.device_uuid for offer in found.offers} == {gpus[0].uuid, gpus[2].uuid}
    assert len({offer.name for offer in found.offers}) == len(found.offers)
    assert [each.fault is None for each in found.findings] == [True, False, True]
    reason = str(found.findings[1].fault)
    assert gpus[1].describe() in reason and f"names of {gpus[0].describe()}" in reason
    device = found.devices[gpus[1].uuid]
    assert not device.health.healthy and reason.startswith(device.health.signs[-1].message.rstrip("."))
