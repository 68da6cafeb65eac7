# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the rules by which the NPU driver identifies a process as a container, and the option to abort on several
threads.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.simulator.dcmi_support import BUSY, IN_CONTAINER, OCCUPIED, SUCCESS, NpuClient, NpuMachine

RULES = "mount-namespace"


def outside(npus: NpuMachine) -> NpuClient:
    """Return a process of user 0 with all capabilities, in its own mount namespace."""
    client = npus.client(initialize="")
    client.own("leave_mount_namespace")
    return client


def test_process_in_its_own_mount_namespace_reserves_every_npu(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro", administrator=RULES)
    host = npus.client()
    service = outside(npus)
    assert service.code("dcmi_init") == SUCCESS
    assert service.create(0, 0, "vir01")[0] == IN_CONTAINER
    assert outside(npus).code("dcmi_init") == OCCUPIED
    # The host is not rejected, and can use NPUs that no container uses.
    assert npus.client().get("dcmi_get_device_health", 0, 0, ["u32", 9]) == 0
    assert host.create(0, 0, "vir01")[0] == BUSY
    service.close()
    assert outside(npus).code("dcmi_init") == SUCCESS


def test_process_on_the_host_reserves_no_npu(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro", administrator=RULES)
    host = npus.client()
    assert outside(npus).code("dcmi_init") == SUCCESS
    assert npus.client().code("dcmi_init") == SUCCESS
    assert host.slice(0, 0, 100)["status"] == 0


def test_service_finds_no_npu_on_a_busy_node(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro", administrator=RULES)
    workload = outside(npus)
    (npus.dev / "davinci1").rename(npus.dev / "away")
    assert workload.code("dcmi_init") == SUCCESS
    (npus.dev / "away").rename(npus.dev / "davinci1")
    assert outside(npus).code("dcmi_init") == OCCUPIED


def test_container_without_administration_capability_is_on_the_host_by_its_mount_namespace(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro", administrator=RULES)
    host = npus.client(initialize="")
    host.own("give_administration_up")
    assert host.code("dcmi_init") == SUCCESS
    assert host.make(1, 0, "vir01") == 116


def test_without_the_rules_a_mount_namespace_does_not_matter(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    service = outside(npus)
    assert service.code("dcmi_init") == SUCCESS
    assert service.make(0, 0, "vir01") == 100


@pytest.mark.parametrize("single", [True, False])
def test_second_thread_in_the_library_aborts_the_process(npus: NpuMachine, single: bool) -> None:
    npus.load("8x310P-Pro", single_thread=single)
    npus.control("fault 3 call dcmi_get_device_health delay 2")
    client = npus.client()
    client.send("two_threads", 3, 0, 0)
    if single:
        assert client.process.wait() == -signal.SIGABRT
    else:
        assert client.receive() == [SUCCESS, SUCCESS]


def test_sequential_threads_are_served(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro", single_thread=True)
    client = npus.client()
    assert client.own("two_threads", 3, 0, 0) == [SUCCESS, SUCCESS]


def test_format_documents_the_source_of_the_rules() -> None:
    text = Path(__file__).parents[2].joinpath("roles/simulator/files/dcmi/MACHINE_FORMAT.md").read_text("utf-8")
    assert "`administrator capability\\|root\\|mount-namespace`" in text and "uda_access.c" in text
