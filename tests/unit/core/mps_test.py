# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The MPS daemons of a claim and their settings. tests/unit/roles/mps_settings_test.py checks that daemons apply them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from dra_driver.core.dra.opaque_config import ConfigRefused
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.host.companions import SharedDevice, claim_of
from dra_driver.core.host.system import System
from dra_driver.core.vendors.nvidia import mps
from hypothesis import given
from hypothesis import strategies as st

UID = "11111111-2222-3333-4444-555555555555"
GIBIBYTE = 1024**3


def device(name: str, *, request: str = "r", partition: bool = False, **sharing: Any) -> SharedDevice:
    kind = "MIG" if partition else "GPU"
    return SharedDevice(f"{UID}-{name}", name, request, f"{kind}-{name}", partition, {"strategy": "MPS", **sharing})


def test_companions_same_settings_share_daemon_with_own_limits() -> None:
    limits = {"defaultPinnedDeviceMemoryLimit": 4 * GIBIBYTE, "defaultPerDevicePinnedMemoryLimit": {"GPU-b": GIBIBYTE}}
    shared = [device("a", **limits), device("b", request="s", **limits), device("c", defaultActiveThreadPercentage=25)]
    first, second = mps.companions(UID, shared)
    assert first.name == f"{UID}.0" and claim_of(first.name) == UID
    assert first.environment == {
        "CUDA_MPS_PIPE_DIRECTORY": f"/run/dra-accelerators/companions/{UID}.0/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"/run/dra-accelerators/companions/{UID}.0/log",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
    }
    assert first.commands_text == (
        "set_default_device_pinned_mem_limit 0 4096M\n"
        "set_default_device_pinned_mem_limit 1 1024M\n"
        "get_default_active_thread_percentage\n"
    )
    assert (second.devices, second.commands[0]) == ((f"{UID}-c",), "set_default_active_thread_percentage 25")


def test_companions_limits_by_uuid_are_split_between_daemons() -> None:
    """A configuration with UUIDs of several daemons: each daemon gets its own settings. A UUID outside of the claim is refused."""
    limits = {"GPU-a": GIBIBYTE, "GPU-b": 2 * GIBIBYTE}
    shared = [
        device("a", request="a", defaultPerDevicePinnedMemoryLimit=limits),
        device("b", request="b", defaultPerDevicePinnedMemoryLimit=limits, defaultActiveThreadPercentage=50),
    ]
    limit_commands = [[each for each in daemon.commands if "pinned" in each] for daemon in mps.companions(UID, shared)]
    assert limit_commands == [
        ["set_default_device_pinned_mem_limit 0 1024M"],
        ["set_default_device_pinned_mem_limit 0 2048M"],
    ]
    with pytest.raises(ConfigRefused, match="names GPU-b"):
        mps.companions(UID, shared[:1])


def test_companions_multi_user_has_one_server() -> None:
    shared = [
        device("a"),
        device("b", multiUser=False),
        device("c", multiUser=True),
        device("d", partition=True, multiUser=True),
    ]
    found = [
        (each.devices, each.environment.get("DRA_ACCELERATORS_MPS_OPTIONS")) for each in mps.companions(UID, shared)
    ]
    assert [(devices, options) for devices, options in found if options] == [
        ((f"{UID}-c",), "-M"),
        ((f"{UID}-d",), "-M"),
    ]


def test_companions_partition_has_daemon_with_client_limit() -> None:
    limit = {"defaultPinnedDeviceMemoryLimit": 3 * GIBIBYTE + 5}
    shared = [
        device("a", partition=True, **limit),
        device("b", request="s", partition=True, **limit),
        device("c", **limit),
    ]
    found = mps.companions(UID, shared)
    assert [each.devices for each in found] == [(f"{UID}-{name}",) for name in "abc"]
    of_partition, of_gpu = mps.edits(found[0]).to_dict(), mps.edits(found[2]).to_dict()
    assert of_partition["env"] == [
        "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=3072M",
    ]
    assert of_gpu["env"] == of_partition["env"][:1]
    assert [(mount["hostPath"].rpartition("/")[2], mount["containerPath"]) for mount in of_gpu["mounts"]] == [
        ("pipe", "/tmp/nvidia-mps"),
        ("shm", "/dev/shm"),
    ]


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        (
            [device("a", partition=True), device("b", partition=True)],
            "request r has a and b, and a container reaches the MPS daemon of one MIG device",
        ),
        (
            [device("a", defaultPerDevicePinnedMemoryLimit={"1": GIBIBYTE})],
            "defaultPerDevicePinnedMemoryLimit names 1; expected 0 or GPU-a",
        ),
    ],
)
def test_companions_impossible_settings_are_rejected(shared: list[SharedDevice], message: str) -> None:
    with pytest.raises(ConfigRefused, match=message):
        mps.companions(UID, shared)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from((25, 50, None))), max_size=8))
def test_companions_each_device_has_one_daemon(kinds: list[tuple[bool, int | None]]) -> None:
    shared = [
        device(
            f"d{number}",
            request=f"r{number}",
            partition=partition,
            **({} if percentage is None else {"defaultActiveThreadPercentage": percentage}),
        )
        for number, (partition, percentage) in enumerate(kinds)
    ]
    found = mps.companions(UID, shared)
    assert sorted(itertools.chain(*(each.devices for each in found))) == [each.cdi_name for each in shared]
    assert len({each.name for each in found}) == len(found)
    percentages = {each.cdi_name: each.sharing.get("defaultActiveThreadPercentage") for each in shared}
    for each in found:
        (percentage,) = {percentages[name] for name in each.devices}
        assert (f"set_default_active_thread_percentage {percentage}" in each.commands) == (percentage is not None)


def test_companions_without_mps_names_package() -> None:
    class Bare(System):
        def finds(self, program: str) -> bool:
            return program != mps.TOOL

    with pytest.raises(AcceleratorError, match=r"nvidia-cuda-mps-control is not on this node. Install it: Debian's"):
        mps.refuse_without_tool(Bare())
