# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the fabric manager in shared-NVSwitch mode: the backend, libnvfm.so.1, and the simulated fabric manager
together.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dra_driver.core.errors import BackendUnavailable, FabricRejected, InUse
from dra_driver.core.host.system import System
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.vendors.nvidia.fabric.fabric_manager import NoFabricPartition

from tests.simulator.backend.gpu_machine import SIMULATOR
from tests.simulator.backend.stage import Stage, assert_refused, on


def configure(stage: Stage, mode: int, *more: str) -> Path:
    """Write fabricmanager.cfg with a socket in the machine's directory; return the socket."""
    path = stage.root / "fm.socket"
    configuration = stage.root / "usr/share/nvidia/nvswitch/fabricmanager.cfg"
    configuration.parent.mkdir(parents=True, exist_ok=True)
    configuration.write_text(
        f"# comment\nFABRIC_MODE={mode}\nFM_CMD_UNIX_SOCKET_PATH={path}\n" + "".join(f"{each}\n" for each in more)
    )
    return path


@contextlib.contextmanager
def fabric_manager(stage: Stage, mode: int = 1, *more: str) -> Iterator[None]:
    """Run a fabric manager during the context."""
    path = configure(stage, mode, *more)
    program = "import sys; from accelerator_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", program, "--root", str(stage.root), "fabric-manager"]
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(SIMULATOR)})
    try:
        until = time.monotonic() + 30
        while not path.is_socket():
            assert process.poll() is None and time.monotonic() < until, "the fabric manager does not listen"
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(30)
        path.unlink(missing_ok=True)


@on("8xH100")
def gpus_for_virtual_machines_are_tainted_in_the_mode_for_bare_metal(stage: Stage) -> None:
    def taints() -> list[tuple[str, tuple[str, ...]]]:
        found = stage.backend.offers(stage.first_gpu(), dynamic=False, passthrough=True)
        return [(offer.kind, tuple(each.key for each in offer.taints)) for offer in found]

    without = [("device", ()), ("passthrough", ())]
    assert taints() == without
    configure(stage, 0)
    assert taints() == [("device", ()), ("passthrough", ("gpu.nvidia.com/fabric-mode",))]
    configure(stage, 2)
    assert taints() == without


@on("8xH100")
def fabric_partitions_are_published_and_activated(stage: Stage) -> None:
    backend = stage.backend
    backend.open()
    assert not backend.fabric_partitions.is_used and dict(stage.first_gpu().whole_device_attributes) == {}
    with fabric_manager(stage):
        gpus = stage.gpus()
        assert backend.fabric_partitions.is_used
        assert [gpu.module for gpu in gpus] == [1, 2, 3, 4, 5, 6, 7, 8]
        reported = {"gpuModuleID": 2, "partition1": 9, "partition2": 4, "partition4": 2, "partition8": 1}
        assert dict(gpus[1].whole_device_attributes) == reported
        (whole,) = backend.offers(gpus[1], dynamic=False)
        assert reported.items() <= whole.attributes.items()
        assert reported.items() <= backend.device_attributes(backend.device(gpus[1].uuid), None).items()
        assert backend.fabric_partitions.find(gpus[:2]) == (4, False)
        backend.fabric_partitions.activate(4)
        backend.fabric_partitions.activate(4)
        assert backend.fabric_partitions.find(gpus[:2]) == (4, True)
        assert "partition 4, which is active" in str(assert_refused(InUse, backend.fabric_partitions.activate, 2))
        assert "4 has modules 1, 2" in str(assert_refused(NoFabricPartition, backend.fabric_partitions.find, gpus[1:3]))
        assert "no partition 99" in str(assert_refused(NoFabricPartition, backend.fabric_partitions.activate, 99))
        backend.fabric_partitions.deactivate(4)
        backend.fabric_partitions.deactivate(4)
        assert backend.fabric_partitions.find(gpus[:2]) == (4, False)


@on("8xH100")
def fabric_manager_that_stops_is_an_error_and_its_return_is_noticed(stage: Stage) -> None:
    backend = stage.backend
    with fabric_manager(stage):
        backend.open()
        gpus = stage.gpus()
        backend.fabric_partitions.activate(4)
        stage.gpus()
        assert backend.fabric_partitions.active == {4}
    assert "cannot be reached" in str(assert_refused(BackendUnavailable, backend.fabric_partitions.find, gpus[:2]))
    assert dict(stage.first_gpu().whole_device_attributes), (
        "the partitions depend on the baseboard: they stay published for a while"
    )
    assert backend.fabric_partitions.active is None
    with fabric_manager(stage):
        stage.gpus()
        assert backend.fabric_partitions.active == frozenset()
        assert backend.fabric_partitions.find(gpus[:2]) == (4, False), "a restart forgets which partitions are active"
        backend.fabric_partitions.activate(4)
    backend.close()


def ask(stage: Stage, request: str) -> list[str]:
    """Send a request to the fabric manager without the client library; return the lines of the answer."""
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("r") as answer:
        connection.connect(str(stage.root / "fm.socket"))
        connection.sendall(f"{request}\n".encode())
        connection.shutdown(socket.SHUT_WR)
        return answer.read().splitlines()


@on("8xH100")
def restarted_fabric_manager_gets_the_list_of_active_partitions(stage: Stage) -> None:
    more = ("FABRIC_MODE_RESTART=1", f"STATE_FILE_NAME={stage.root}/fm.state")
    backend = stage.backend
    with fabric_manager(stage, 1, *more):
        backend.open()
        gpus = stage.gpus()
        backend.fabric_partitions.set_claimed(lambda: {5})
        ask(stage, "activate 3")  # an administrator's partition, without a claim
        backend.fabric_partitions.activate(4)
    with fabric_manager(stage, 1, *more):
        assert ask(stage, "list") == ["-8"]
        stage.gpus()
        assert backend.fabric_partitions.active == {3, 4}
        backend.fabric_partitions.deactivate(3)
    with fabric_manager(stage, 1, *more):
        backend.fabric_partitions.deactivate(4)
        stage.gpus()
        assert backend.fabric_partitions.active == frozenset()
        backend.fabric_partitions.activate(6)
    backend.close()
    backend.open()
    with fabric_manager(stage, 1, *more):
        stage.gpus()
        assert backend.fabric_partitions.active == {5}, "a process that has read no list sends the partitions of claims"
    module = NvidiaBackend(System(str(stage.root)))
    module.open()
    with fabric_manager(stage, 1, *more):
        assert "still starting" in str(assert_refused(BackendUnavailable, module.fabric_partitions.find, gpus[:2]))
        assert ask(stage, "list") == ["-8"], "a program without claims sends no list"
    module.close()


@on("8xH100")
def rejected_change_differs_from_missing_answer(stage: Stage) -> None:
    with fabric_manager(stage):
        backend = stage.backend
        backend.open()
        gpus = stage.gpus()
        for value in (-1, -2, -5, -10):
            ask(stage, f"fail activate {value}")
            assert f"(error {value})" in str(assert_refused(FabricRejected, backend.fabric_partitions.activate, 4))
        ask(stage, "fail activate 0")
        backend.fabric_partitions.activate(4)
        for value in (-1, -2, -5, -7, -10):
            ask(stage, f"fail deactivate {value}")
            assert f"(error {value})" in str(assert_refused(FabricRejected, backend.fabric_partitions.deactivate, 4))
        for value in (-6, -8, -9):
            ask(stage, f"fail deactivate {value}")
            assert_refused(BackendUnavailable, backend.fabric_partitions.deactivate, 4)
        ask(stage, "fail deactivate 0")
        ask(stage, "fail list -2")
        assert_refused(BackendUnavailable, backend.fabric_partitions.deactivate, 4)
        ask(stage, "fail list 0")
        backend.fabric_partitions.deactivate(4)
        assert backend.fabric_partitions.find(gpus[:2]) == (4, False)


@on("8xH100")
def other_modes_of_the_fabric_manager_have_no_partitions(stage: Stage) -> None:
    with fabric_manager(stage, mode=0):
        stage.backend.open()
        assert dict(stage.first_gpu().whole_device_attributes) == {} and not stage.backend.fabric_partitions.is_used


@on("8xA100-40")
def fabric_partitions_are_found_by_identity_if_available(stage: Stage) -> None:
    with fabric_manager(stage):
        stage.backend.open()
        gpus = stage.gpus()
        assert all(gpu.whole_device_attributes["partition8"] == 1 for gpu in gpus)
        number, is_active = stage.backend.fabric_partitions.find(gpus)
        assert (number, is_active) == (1, False)


@on("8xH100")
def fabric_partition_is_deactivated_by_the_running_fabric_manager_regardless_of_the_file(stage: Stage) -> None:
    with fabric_manager(stage):
        stage.backend.open()
        gpus = stage.gpus()
        stage.backend.fabric_partitions.activate(4)
        configure(stage, 0)
        stage.backend.fabric_partitions.deactivate(4)
        configure(stage, 1)
        assert stage.backend.fabric_partitions.find(gpus[:2]) == (4, False)
    configure(stage, 0)
    stage.backend.fabric_partitions.deactivate(4)
