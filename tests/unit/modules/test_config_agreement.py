# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Module, webhook, and driver agree about each configuration: if one of them refuses it, all three do."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from dra_driver.claims.allocation import ClaimError, decode_allocation
from dra_driver.claims.plan import Inventory, plan_prepare
from dra_driver.claims.store.records import ClaimReference
from dra_driver.controller.admission import answer, rules_for
from dra_driver.core.model import DEVICE, PARTITION, PASSTHROUGH, Device, Offer
from dra_driver.core.vendors.nvidia.configs import CONFIG_KINDS, DEVICE_CLASSES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.core import board_model

DRIVER, POOL, BOARD = "gpu.nvidia.com", "node-1", "h100-80"
VENDOR, OURS = "resource.nvidia.com/v1beta1", "dra.accelerators/v1alpha1"
RULES = rules_for([DRIVER], {})
NAMES = ("a", "b", "c")
Request = tuple[str, bool]  # the device class, and whether the request has administrator access

SHARING = st.one_of(
    st.sampled_from(
        [
            None,
            {},
            1,
            {"strategy": "TimeSlicing"},
            {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}},
            {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Longer"}},
            {"strategy": "TimeSlicing", "mpsConfig": {}},
            {"strategy": "MPS"},
            {"strategy": "Quick"},
        ]
    ),
    st.fixed_dictionaries(
        {
            "strategy": st.just("MPS"),
            "mpsConfig": st.fixed_dictionaries(
                {},
                optional={
                    "defaultActiveThreadPercentage": st.integers(-1, 102),
                    "defaultPinnedDeviceMemoryLimit": st.sampled_from(["1Gi", "512Ki", "-1", "many", 2**30]),
                    "defaultPerDevicePinnedMemoryLimit": st.sampled_from(
                        [{"0": "1Gi"}, {"zero": "1Gi"}, {"0": "1"}, []]
                    ),
                    "multiUser": st.sampled_from([True, False, "yes"]),
                },
            ),
        }
    ),
)
CONTENT = st.fixed_dictionaries(
    {},
    optional={
        "sharing": SHARING,
        "iommu": st.sampled_from([{"backendPolicy": "LegacyOnly"}, {"backendPolicy": "Any"}, {}]),
        "computeMode": st.sampled_from(["Default", "ExclusiveProcess", "Prohibited", "Shared"]),
        "powerLimitWatts": st.sampled_from([300, 0, "300"]),
        "other": st.just(1),
    },
)
PARAMETERS = st.builds(
    lambda identity, content: {"apiVersion": identity[0], "kind": identity[1], **content},
    st.sampled_from(
        [
            (VENDOR, "GpuConfig"),
            (VENDOR, "MigDeviceConfig"),
            (VENDOR, "VfioDeviceConfig"),
            (OURS, "DeviceSettings"),
            (VENDOR, "Unknown"),
            ("resource.nvidia.com/v9", "GpuConfig"),
        ]
    ),
    CONTENT | st.just({}),
)
CONFIG = st.tuples(st.lists(st.sampled_from(NAMES), unique=True, max_size=2), PARAMETERS)
# A device for a virtual machine has no administrator access, whatever the configuration.
REQUEST = st.tuples(st.sampled_from(sorted(DEVICE_CLASSES)), st.booleans()).map(
    lambda found: (found[0], found[1] and DEVICE_CLASSES[found[0]] != PASSTHROUGH)
)


def document(requests: Mapping[str, Request], configs: Sequence[tuple[list[str], Any]]) -> dict[str, Any]:
    """Return a claim as its author writes it."""
    asked = [
        {"name": name, "exactly": {"deviceClassName": found, **({"adminAccess": True} if admin else {})}}
        for name, (found, admin) in requests.items()
    ]
    holders = [
        {"requests": names, "opaque": {"driver": DRIVER, "parameters": parameters}} for names, parameters in configs
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "claim", "namespace": "team", "uid": "u"},
        "spec": {"devices": {"requests": asked, "config": holders}},
    }


def is_meant(names: Sequence[str], request: str) -> bool:
    return not names or request in names or request.partition("/")[0] in names


def allocated(
    claim: Mapping[str, Any],
    requests: Mapping[str, Request],
    *,
    drops_names: bool = True,
    of_classes: Sequence[tuple[list[str], Any]] = (),
) -> dict[str, Any]:
    """Return the same claim with an allocation, in which each request has its own board.

    ``requests`` are by their names in the allocation: ``request``, or ``request/subrequest`` for the selected
    alternative. ``drops_names`` selects the behavior of schedulers from 1.37 on for a configuration that names all
    requests. ``of_classes`` are configurations of classes, each with the requests that got devices of that class.
    """
    results = [
        {"request": name, "driver": DRIVER, "pool": POOL, "device": f"dev-{name[0]}", "adminAccess": admin}
        for name, (_found, admin) in requests.items()
    ]
    theirs = [
        {"source": "FromClass", "requests": names, "opaque": {"driver": DRIVER, "parameters": parameters}}
        for names, parameters in of_classes
    ]
    own = [
        {"source": "FromClaim", **each}
        for each in claim["spec"]["devices"]["config"]
        if any(is_meant(each["requests"], name) for name in requests)
    ]
    configs = [
        {**each, "requests": []} if drops_names and all(is_meant(each["requests"], name) for name in requests) else each
        for each in theirs + own
    ]
    return {**claim, "status": {"allocation": {"devices": {"results": results, "config": configs}}}}


def board_of(name: str, kind: str) -> tuple[Offer, Device]:
    """Return a board and its offer: the whole board, an existing partition, or the board for a virtual machine."""
    small = board_model.profiles(BOARD)[0]
    places = ((small.profile_id, 0),) if kind == PARTITION else ()
    device = board_model.device(BOARD, NAMES.index(name[0]), places=places)
    (there,) = device.partitions or (None,)
    return Offer(
        name=f"dev-{name[0]}",
        kind=kind,
        device_uuid=device.uuid,
        dynamic=False,
        profile=there.profile if there else None,
        profile_id=there.profile_id if there else None,
        placement=there.placement if there else None,
        partition_uuid=there.uuid if there else None,
        attributes={},
        capacities={},
    ), device


def driver_allows(claim: Mapping[str, Any], requests: Mapping[str, Request]) -> bool:
    return prepares(allocated(claim, requests), requests)


def prepares(allocated_claim: Mapping[str, Any], requests: Mapping[str, Request]) -> bool:
    """Return whether the driver prepares an allocated claim."""
    boards = [board_of(name, DEVICE_CLASSES[found]) for name, (found, _admin) in requests.items()]
    reference = ClaimReference("team", "claim", "u")
    try:
        plan_prepare(
            decode_allocation(allocated_claim, reference, DRIVER),
            Inventory(POOL, {offer.name: offer for offer, _device in boards}, frozenset()),
            {device.uuid: device for _offer, device in boards},
            {},
            config_kinds=CONFIG_KINDS,
            cdi_kind="k8s.gpu.nvidia.com/claim",
            boot_id="boot",
            now=1.0,
        )
    except ClaimError as error:
        assert error.code == "config-refused" and error.hint, error
        return False
    return True


def module_allows(claim: Mapping[str, Any]) -> bool:
    module = importlib.import_module("ansible_collections.dra.accelerators.plugins.modules.claim_config_info")
    output = io.StringIO()
    arguments = {"definition": [claim], "fail_if_invalid": False}
    with patch_module_args(arguments), contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        module.main()
    return bool(json.loads(output.getvalue())["valid"])


def webhook_allows(claim: Mapping[str, Any]) -> bool:
    request = {"uid": "42", "operation": "CREATE", "object": claim}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    return bool(answer(review, RULES)["response"]["allowed"])


MIG = {"apiVersion": VENDOR, "kind": "MigDeviceConfig"}
GPU = {"apiVersion": VENDOR, "kind": "GpuConfig"}


@settings(max_examples=150, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=3), st.lists(CONFIG, max_size=3))
@example([("gpu.nvidia.com", False)], [([], MIG)])
@example([("gpu.nvidia.com", False), ("mig.nvidia.com", False)], [([], MIG), ([], GPU)])
@example([("gpu.nvidia.com", False), ("mig.nvidia.com", False)], [(["a", "b"], MIG)])
def test_module_webhook_and_driver_agree(asked: list[Request], configs: list[tuple[list[str], Any]]) -> None:
    requests = dict(zip(NAMES, asked))
    # The API server rejects names of unknown requests before the webhook is called.
    configs = [each for each in configs if set(each[0]) <= requests.keys()]
    claim = document(requests, configs)
    verdicts = module_allows(claim), webhook_allows(claim), driver_allows(claim, requests)
    assert len(set(verdicts)) == 1, dict(zip(("module", "webhook", "driver"), verdicts))


ALTERNATIVES = st.lists(REQUEST.map(lambda found: (found[0], False)), min_size=1, max_size=2)
NAMED = st.sampled_from([*NAMES, *(f"{name}/{place}" for name in NAMES for place in range(2))])
MEANT = st.tuples(st.lists(NAMED, unique=True, max_size=3), PARAMETERS)


@given(st.data())
def test_alternatives_selected_configuration_applies_with_any_scheduler(data: Any) -> None:
    """Names that a scheduler drops do not change the result. The driver accepts each alternative of a claim that the webhook accepts."""
    asked = dict(zip(NAMES, data.draw(st.lists(ALTERNATIVES, min_size=1, max_size=3))))
    every = {f"{name}/{place}": each for name, found in asked.items() for place, each in enumerate(found)}
    configs = [each for each in data.draw(st.lists(MEANT, max_size=3)) if {*each[0]} <= {*asked, *every}]
    claim = document({}, configs)
    claim["spec"]["devices"]["requests"] = [
        {
            "name": name,
            "firstAvailable": [
                {"name": str(place), "deviceClassName": each} for place, (each, _admin) in enumerate(found)
            ],
        }
        for name, found in asked.items()
    ]
    chosen = [f"{name}/{data.draw(st.integers(0, len(found) - 1))}" for name, found in asked.items()]
    requests = {name: every[name] for name in chosen}
    of_classes = [
        (sorted(set(chosen) & set(data.draw(st.lists(st.sampled_from(chosen), min_size=1)))), parameters)
        for parameters in data.draw(st.lists(PARAMETERS, max_size=1))
    ]
    kept, dropped = (
        prepares(allocated(claim, requests, drops_names=drops, of_classes=of_classes), requests)
        for drops in (False, True)
    )
    assert kept == dropped
    if not of_classes and module_allows(claim):
        assert kept and webhook_allows(claim)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    ("names", "chosen", "allowed"),
    [
        ([], "a/part", True),  # it can be for the alternative that was not selected
        (["a"], "a/whole", True),
        (["a"], "a/part", False),
        (["a/whole"], "a/part", True),
        (["a/part"], "a/part", False),
    ],
)
def test_alternatives_configuration_must_fit_the_selected_one(
    drops: bool, names: list[str], chosen: str, allowed: bool
) -> None:
    """A configuration that names an alternative is for that one only. One that names the request is for each of its alternatives."""
    claim = document({}, [(names, GPU)])
    requests = {chosen: ("gpu.nvidia.com" if chosen == "a/whole" else "mig.nvidia.com", False)}
    assert prepares(allocated(claim, requests, drops_names=drops), requests) is allowed


def test_alternatives_configuration_of_unselected_one_is_accepted() -> None:
    """The driver sees only the selected alternative. The webhook has verified that the configuration fits one of the alternatives."""
    claim = document({"a": ("gpu.nvidia.com", False)}, [([], MIG), ([], GPU)])
    allocated_claim = allocated(claim, {"a": ("gpu.nvidia.com", False)})
    assert not driver_allows(claim, {"a": ("gpu.nvidia.com", False)})
    offer, device = board_of("a", DEVICE)
    allocated_claim["status"]["allocation"]["devices"]["results"][0]["request"] = "a/whole"
    plan = plan_prepare(
        decode_allocation(allocated_claim, ClaimReference("team", "claim", "u"), DRIVER),
        Inventory(POOL, {offer.name: offer}, frozenset()),
        {device.uuid: device},
        {},
        config_kinds=CONFIG_KINDS,
        cdi_kind="k8s.gpu.nvidia.com/claim",
        boot_id="boot",
        now=1.0,
    )
    assert len(plan.record.devices) == 1
