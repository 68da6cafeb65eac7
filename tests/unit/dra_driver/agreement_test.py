# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Of each configuration the module, the webhook and the driver say the same: what one refuses all three refuse."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import board_model
from ansible.module_utils.testing import patch_module_args
from dra_driver.claims.allocation import ClaimError, decode_allocation
from dra_driver.claims.plan import Inventory, plan_prepare
from dra_driver.claims.records import ClaimReference
from dra_driver.controller.admission import answer, rules_for
from dra_driver.core.model import DEVICE, PARTITION, PASSTHROUGH, Device, Offer
from dra_driver.core.nvidia.configs import CONFIG_KINDS, DEVICE_CLASSES
from hypothesis import example, given, settings
from hypothesis import strategies as st

DRIVER, POOL, BOARD = "gpu.nvidia.com", "node-1", "h100-80"
VENDOR, OURS = "resource.nvidia.com/v1beta1", "dra.accelerators/v1alpha1"
RULES = rules_for([DRIVER], {})
NAMES = ("a", "b", "c")
Request = tuple[str, bool]  # the class, and whether with administrator's access

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
# Nobody looks on at a device that is a virtual machine's, whatever a configuration says.
REQUEST = st.tuples(st.sampled_from(sorted(DEVICE_CLASSES)), st.booleans()).map(
    lambda found: (found[0], found[1] and DEVICE_CLASSES[found[0]] != PASSTHROUGH)
)


def document(requests: Mapping[str, Request], configs: Sequence[tuple[list[str], Any]]) -> dict[str, Any]:
    """A claim as its author writes it."""
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


def allocated(claim: Mapping[str, Any], requests: Mapping[str, Request]) -> dict[str, Any]:
    """The same claim as the scheduler leaves it, each request with a board of its own."""
    results = [
        {"request": name, "driver": DRIVER, "pool": POOL, "device": f"dev-{name}", "adminAccess": admin}
        for name, (_found, admin) in requests.items()
    ]
    configs = [{"source": "FromClaim", **each} for each in claim["spec"]["devices"]["config"]]
    return {**claim, "status": {"allocation": {"devices": {"results": results, "config": configs}}}}


def board_of(name: str, kind: str) -> tuple[Offer, Device]:
    """A board, and what of it is offered: as a whole, as a partition that is there, or to a virtual machine."""
    small = board_model.profiles(BOARD)[0]
    places = ((small.profile_id, 0),) if kind == PARTITION else ()
    device = board_model.device(BOARD, NAMES.index(name), places=places)
    (there,) = device.partitions or (None,)
    return Offer(
        name=f"dev-{name}",
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
    boards = [board_of(name, DEVICE_CLASSES[found]) for name, (found, _admin) in requests.items()]
    reference = ClaimReference("team", "claim", "u")
    try:
        plan_prepare(
            decode_allocation(allocated(claim, requests), reference, DRIVER),
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
    said = io.StringIO()
    arguments = {"definition": [claim], "fail_if_invalid": False}
    with patch_module_args(arguments), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        module.main()
    return bool(json.loads(said.getvalue())["valid"])


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
    # The API server refuses names of requests that are not there before anybody else is asked.
    configs = [each for each in configs if set(each[0]) <= requests.keys()]
    claim = document(requests, configs)
    verdicts = module_allows(claim), webhook_allows(claim), driver_allows(claim, requests)
    assert len(set(verdicts)) == 1, dict(zip(("module", "webhook", "driver"), verdicts))


def test_alternatives_that_were_not_chosen_may_be_what_a_configuration_is_for() -> None:
    """The driver sees what was chosen; the webhook has seen that one of the alternatives fits."""
    claim = document({"a": ("gpu.nvidia.com", False)}, [([], MIG), ([], GPU)])
    told = allocated(claim, {"a": ("gpu.nvidia.com", False)})
    assert not driver_allows(claim, {"a": ("gpu.nvidia.com", False)})
    offer, device = board_of("a", DEVICE)
    told["status"]["allocation"]["devices"]["results"][0]["request"] = "a/whole"
    plan = plan_prepare(
        decode_allocation(told, ClaimReference("team", "claim", "u"), DRIVER),
        Inventory(POOL, {offer.name: offer}, frozenset()),
        {device.uuid: device},
        {},
        config_kinds=CONFIG_KINDS,
        cdi_kind="k8s.gpu.nvidia.com/claim",
        boot_id="boot",
        now=1.0,
    )
    assert len(plan.record.devices) == 1
