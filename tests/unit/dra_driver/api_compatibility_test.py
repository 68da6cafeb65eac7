# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Devices that an API server with disabled feature gates, or of an older version, can publish."""

from __future__ import annotations

from dataclasses import replace

import board_model
from dra_driver.core.dra.consumable_capacity import shared
from dra_driver.core.model import Taint
from dra_driver.core.vendors.nvidia import offers
from dra_driver.publish import publish_plan
from dra_driver.publish.api_compatibility import COUNTERS, SHARES, TAINTS, Content, fit_to_server
from publish_plan_test import CONTENTS, content


def test_fit_server_drops_shares_shared_devices_are_exclusive() -> None:
    plain = content("l4")
    wanted = Content(tuple(shared(offer, 4, dict(offer.capacities)) for offer in plain.offers))
    kept, (reported,) = fit_to_server(wanted, {SHARES})
    assert [(offer.name, dict(offer.policies), "shares" in offer.capacities) for offer in kept.offers] == [
        (offer.name, {}, False) for offer in plain.offers
    ]
    assert (
        "are allocated to one claim at a time" in reported.describe() and "DRAConsumableCapacity" in reported.describe()
    )
    assert fit_to_server(wanted, set()) == (wanted, ())


def test_fit_withheld_devices_are_named_with_the_gate() -> None:
    kept, withheld = fit_to_server(content("h100-80", "l4", faulty=1), {TAINTS, COUNTERS})
    assert [offer.name for offer in kept.offers] == ["gpu-0"]
    assert not kept.counter_sets
    assert not kept.offers[0].consumes
    taints, counters = withheld
    assert "DRADeviceTaints" in taints.describe()
    assert "gpu-1" in taints.describe()
    assert "DRAPartitionableDevices" in counters.describe()
    assert "4 devices are withheld" in counters.describe()


def test_fit_server_drops_counters_existing_partitions_stay() -> None:
    """Next to an administrator's partition no whole GPU is offered. Dynamic offers stay if they do not overlap."""
    device = board_model.device("h100-80", 0, places=((9, 4),))
    wanted = Content(offers.offers(device, True), (offers.counter_set(device, ()),))
    assert not any(offer.kind == "device" for offer in wanted.offers)
    kept, _withheld = fit_to_server(wanted, {COUNTERS})
    placements = [offer.placement for offer in kept.offers if offer.placement is not None]
    assert [offer.name for offer in kept.offers if offer.partition_uuid]
    assert sum(placement.size for placement in placements) > 4
    assert not any(one.overlaps(other) for one in placements for other in placements if one is not other)


def test_fit_server_drops_taints_informative_taint_is_removed() -> None:
    faulty = replace(CONTENTS[1].offers[0], taints=(Taint("gpu.nvidia.com/degraded", "None"),))
    kept, withheld = fit_to_server(Content((faulty,)), {TAINTS})
    assert kept.offers[0].taints == ()
    assert not withheld


def test_fit_before_kubernetes_1_35_taints_without_an_effect_are_removed() -> None:
    taints = (Taint("gpu.nvidia.com/error", "None"), Taint("gpu.nvidia.com/degraded", "NoSchedule"))
    faulty = replace(CONTENTS[1].offers[0], taints=taints)
    for version, kept_taints in {(1, 34): taints[1:], (1, 35): taints}.items():
        kept, withheld = fit_to_server(Content((faulty,)), frozenset(), publish_plan.layout_of(version))
        assert kept.offers[0].taints == kept_taints and not withheld
