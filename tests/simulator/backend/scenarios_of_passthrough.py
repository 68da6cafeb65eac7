# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test a GPU that is bound to vfio-pci and returned: the GPUs that NVML lists, and the devices that the backend
publishes.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from dra_driver.core.errors import AcceleratorError, BackendUnavailable, InUse, NotFound, Unsupported
from dra_driver.core.host import device_users, passthrough, pci
from dra_driver.core.host.passthrough import Handover
from dra_driver.core.host.system import DeviceNumber, System
from dra_driver.core.model import Device, Offer, devices_of
from dra_driver.core.settings.settings_record import record_path, recorded_values
from dra_driver.core.store.device_facts import device_of, document_of
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.vendors.nvidia.container import driver_files

from tests.simulator.backend.gpu_machine import SIMULATOR
from tests.simulator.backend.stage import Stage, assert_refused, on


class PlainNodes(System):
    """A system whose device nodes are ordinary files below a directory, which need no privilege."""

    def device_number(self, path: str) -> DeviceNumber | None:
        return DeviceNumber("c", 233, sum(path.encode())) if self.path(path).is_file() else None


@contextlib.contextmanager
def bus(stage: Stage) -> Iterator[System]:
    """Run the kernel's part of the PCI bus of the machine; yield the system with its device nodes."""
    program = "import sys; from accelerator_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(SIMULATOR)}
    kernel = subprocess.Popen([sys.executable, "-c", program, "--root", str(stage.root), "bus"], env=environment)
    system = PlainNodes(str(stage.root))
    stage.backend.close()
    stage.backend = NvidiaBackend(system)
    stage.backend.open()
    try:
        yield system
    finally:
        kernel.terminate()
        kernel.wait()


def listed() -> int:
    """Return how many GPUs another program finds."""
    return len(subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout.splitlines())


def published(backend: NvidiaBackend) -> list[tuple[Offer, ...]]:
    return [backend.offers(gpu, True, (), True) for gpu in devices_of(backend.discover())]


def handed_over(system: System, gpu: Device, interface: str = passthrough.LEGACY) -> Handover:
    return Handover(gpu.pci_address, pci.driver_of(system, gpu.pci_address), interface)


@on("8xH100")
def gpu_is_passed_to_a_virtual_machine_and_returned(stage: Stage) -> None:
    with bus(stage) as system:
        before = published(stage.backend)
        first, second = stage.gpus()[:2]
        assert listed() == 8 and [offers[-1].name for offers in before] == [f"gpu-vfio-{number}" for number in range(8)]
        passthrough.require_passthrough(system, first.pci_address)
        handover = handed_over(system, first)
        assert handover.former == "nvidia"
        stage.backend.detach(first.uuid, partial(passthrough.bind_to_vfio, system, handover))
        assert listed() == 7 and pci.driver_of(system, first.pci_address) == "vfio-pci"
        assert published(stage.backend) == before, "the published devices do not depend on the user of a GPU"
        assert [gpu.index for gpu in stage.gpus(full=True)] == list(range(8))
        assert stage.backend.device(second.uuid) == second and stage.backend.device(first.uuid) == first
        group = pci.iommu_group(system, first.pci_address)
        assert [node.path for node in passthrough.container_edits(system, handover).device_nodes] == [
            f"/dev/vfio/{group}",
            "/dev/vfio/vfio",
        ]
        assert not system.exists(f"/proc/driver/nvidia/gpus/{first.pci_address}")
        stage.backend.attach(first.uuid, partial(passthrough.restore_driver, system, handover))
        assert listed() == 8 and published(stage.backend) == before
        assert pci.override_of(system, first.pci_address) == "" and not system.exists(f"/dev/vfio/{group}")
        assert system.exists(f"/proc/driver/nvidia/gpus/{first.pci_address}/information")


@contextlib.contextmanager
def persistence_daemon(stage: Stage) -> Iterator[System]:
    """Run the persistence daemon: the machine has its socket, its process, and the first GPU's device node."""
    path = stage.root / "dev/nvidia0"
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(195, 0))
    program = "import sys; from accelerator_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(SIMULATOR)}
    words = [sys.executable, "-c", program, "--root", str(stage.root), "persistence-daemon"]
    daemon = subprocess.Popen(words, env=environment)
    (stage.root / f"proc/{daemon.pid}").symlink_to(f"/proc/{daemon.pid}")
    socket = stage.root / driver_files.PERSISTENCE_SOCKET[1:]
    try:
        settled(socket.is_socket)
        yield System(str(stage.root))
    finally:
        daemon.terminate()
        daemon.wait()
    assert not socket.exists()


@on("8xH100")
def persistence_daemon_closes_and_reopens_a_gpu(stage: Stage) -> None:
    gpu, daemon = stage.first_gpu(), stage.backend.facts.persistence_daemon
    nodes = stage.backend.device_nodes(gpu)
    with persistence_daemon(stage) as system:
        settled(lambda: bool(device_users.find_device_users(system, [DeviceNumber("c", 195, 0)])))
        error = assert_refused(InUse, device_users.require_unused, system, nodes, "GPU 0")
        assert daemon in str(error)
        device_users.require_unused(system, nodes, "GPU 0", ignored_name=daemon)
        stage.backend.set_knobs(gpu.uuid, {"persistence": False})
        device_users.require_unused(system, nodes, "GPU 0", seconds=20)
        assert "Disabled" in persistence_modes()[0] and "Enabled" in persistence_modes()[1]
        stage.backend.set_knobs(gpu.uuid, {"persistence": True})
        settled(lambda: bool(device_users.find_device_users(system, [DeviceNumber("c", 195, 0)])))
        # The mode is set only through the daemon.
        tool = stage.root / "usr/bin/nvidia-smi"
        tool.rename(tool.with_name("away"))
        tool.write_text("#!/bin/sh\necho no\n")
        tool.chmod(0o755)
        error = assert_refused(AcceleratorError, stage.backend.set_knobs, gpu.uuid, {"persistence": False})
        assert error.code == "persistence-failed" and "nvidia-persistenced" in str(error)
        tool.with_name("away").replace(tool)


@contextlib.contextmanager
def client_of(stage: Stage, index: int, node: str) -> Iterator[int]:
    """Run a service that has a GPU open without a use that NVML reports; yield its process ID."""
    lines = [
        "import os, sys, time; from pathlib import Path; from accelerator_simulator import persistence_daemon as daemon",
        "held = os.open(sys.argv[1], os.O_PATH)",
        "daemon.hold(daemon.open_state(Path(sys.argv[2])), int(sys.argv[3]), True)",
        "print('open', flush=True); time.sleep(600)",
    ]
    environment = {**os.environ, "PYTHONPATH": str(SIMULATOR)}
    library = str(stage.root / "usr/lib/x86_64-linux-gnu")
    words = [sys.executable, "-c", "\n".join(lines), str(stage.root) + node, library, str(index)]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None and service.stdout.readline()
        folder = stage.root / f"proc/{service.pid}"
        folder.mkdir()
        (folder / "fd").symlink_to(f"/proc/{service.pid}/fd")
        (folder / "comm").write_text("nv-hostengine\n")
        (folder / "cgroup").write_text("0::/system.slice/nvidia-dcgm.service\n")
        try:
            yield service.pid
        finally:
            service.kill()


@on("8xH100")
def processes_with_an_open_gpu_are_named_and_the_persistence_daemon_closes_it(stage: Stage) -> None:
    gpu = stage.first_gpu()
    (node,) = stage.backend.device_nodes(gpu)
    with persistence_daemon(stage) as system:
        settled(lambda: bool(device_users.find_device_users(system, [DeviceNumber("c", 195, 0)])))
        stage.backend.set_partitioning(gpu.uuid, True)
        assert stage.backend.device(gpu.uuid).partitioning.enabled and "Enabled" in persistence_modes()[0]
        settled(lambda: bool(device_users.find_device_users(system, [DeviceNumber("c", 195, 0)])))
        stage.backend.reset([gpu.uuid])
        assert "Enabled" in persistence_modes()[0]
        with client_of(stage, 0, node) as pid:
            who = f"{pid} (nv-hostengine, unit nvidia-dcgm.service)"
            error = assert_refused(InUse, stage.backend.set_partitioning, gpu.uuid, False)
            assert who in str(error) and pid in error.pids
            error = assert_refused(InUse, stage.backend.reset, [gpu.uuid])
            assert who in str(error) and pid in error.pids
            assert "Enabled" in persistence_modes()[0]
            # The same processes as in the error, without a reset.
            assert [each.pid for each in stage.backend.reset_holders([gpu.uuid], STORE)] == list(error.pids)
            add_node_driver(stage, node)
            holders = stage.backend.reset_holders([gpu.uuid], STORE)
            assert [each.pid for each in holders] == list(error.pids) and who in map(str, holders)
        settled(lambda: stage.backend.reset_holders([gpu.uuid], STORE) == ())


STORE = "/var/lib/kubelet/plugins/gpu.nvidia.com/state.db"


def add_node_driver(stage: Stage, node: str) -> None:
    """Add the process of a node driver, which has its store and a GPU open."""
    store = Path(str(stage.root) + STORE)
    store.parent.mkdir(parents=True, exist_ok=True)
    store.touch()
    folder = stage.root / "proc/77777"
    (folder / "fd").mkdir(parents=True)
    (folder / "comm").write_text("python\n")
    (folder / "fd/3").symlink_to(store)
    (folder / "fd/4").symlink_to(str(stage.root) + node)


@on("8xH100")
def acceptance_program_finds_that_the_daemon_blocks_changes(stage: Stage) -> None:
    from tests.silicon import acceptance

    with persistence_daemon(stage) as system:
        settled(lambda: bool(device_users.find_device_users(system, [DeviceNumber("c", 195, 0)])))
        said = acceptance.find_blocked_by_daemon(stage.backend)
        assert said == "MIG mode in use, reset in use", said


#: Does something to a GPU, and is killed as soon as persistence mode is off.
KILLED = """
import os, sys
from dra_driver.core.vendors.nvidia import gpu_reset
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.host.system import System
gpu_reset.await_closed = lambda *_arguments: os._exit(9)
root, uuid, what = sys.argv[1:]
backend = NvidiaBackend(System(root))
backend.open()
backend.discover()
backend.set_partitioning(uuid, True) if what == "mode" else backend.reset([uuid])
"""


@on("8xH100")
def persistence_mode_is_restored_after_a_kill(stage: Stage) -> None:
    gpu, record = stage.first_gpu(), stage.root / record_path("nvidia")[1:]
    boot = stage.root / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True, exist_ok=True)
    boot.write_text("this boot\n")
    with persistence_daemon(stage) as system:
        for what in ("mode", "reset"):
            settled(lambda: bool(device_users.find_device_users(system, [DeviceNumber("c", 195, 0)])))
            killed = subprocess.run([sys.executable, "-c", KILLED, str(stage.root), gpu.uuid, what], check=False)
            assert killed.returncode == 9 and "Disabled" in persistence_modes()[0], what
            assert recorded_values(system, record_path("nvidia"), gpu.uuid) == {"persistence": True}
            driver = NvidiaBackend(system)
            driver.use_number_file("/driver", writes=True)
            driver.open()
            assert "Enabled" in persistence_modes()[0], what
            driver.close()
            record.unlink()
        settled(lambda: bool(device_users.find_device_users(system, [DeviceNumber("c", 195, 0)])))
        stage.backend.set_partitioning(gpu.uuid, True)
        stage.backend.reset([gpu.uuid])
        assert "Enabled" in persistence_modes()[0] and not record.exists()


def persistence_modes() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@on("4xGB200")
def persistence_mode_cannot_be_disabled_with_coherent_memory(stage: Stage) -> None:
    gpu = stage.first_gpu()
    knob = stage.backend.knobs(gpu.uuid, ["persistence"])["persistence"]
    assert knob.value is True and knob.blocked
    assert (
        assert_refused(Unsupported, stage.backend.set_knobs, gpu.uuid, {"persistence": False}).code == "coherent-memory"
    )
    stage.backend.set_knobs(gpu.uuid, {"persistence": True})
    assert "Enabled" in persistence_modes()[0]


@on("8xH100")
def restarted_driver_knows_a_gpu_in_a_virtual_machine(stage: Stage) -> None:
    with bus(stage) as system:
        before = published(stage.backend)
        gpu = stage.gpus()[3]
        facts = json.loads(json.dumps(document_of(gpu)))
        handover = handed_over(system, gpu, passthrough.IOMMUFD)
        stage.backend.detach(gpu.uuid, partial(passthrough.bind_to_vfio, system, handover))
        assert next(node.path for node in passthrough.container_edits(system, handover).device_nodes).startswith(
            "/dev/vfio/devices/vfio"
        )
        stranger = NvidiaBackend(system)
        stranger.open()
        assert len(published(stranger)) == 7
        assert_refused(NotFound, stranger.device, gpu.uuid)
        stranger.close()
        stage.backend.close()
        stage.backend = NvidiaBackend(system)
        stage.backend.add_detached([device_of(facts)])
        stage.backend.open()
        assert published(stage.backend) == before
        stage.backend.attach(gpu.uuid, partial(passthrough.restore_driver, system, handover))
        assert listed() == 8 and published(stage.backend) == before


@on("8xH100")
def calls_for_other_gpus_succeed_while_a_gpu_changes_its_driver(stage: Stage) -> None:
    """Calls about other GPUs wait until NVML is open again. None of them fails."""
    with bus(stage) as system:
        first, *others = stage.gpus()
        handover = handed_over(system, first)
        done, failed = threading.Event(), []

        def ask() -> None:
            while not done.is_set():
                try:
                    for gpu in others:
                        stage.backend.device(gpu.uuid)
                    assert len(stage.backend.discover()) == 8
                except AcceleratorError as error:
                    failed.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for _time in range(3):
                stage.backend.detach(first.uuid, partial(passthrough.bind_to_vfio, system, handover))
                stage.backend.attach(first.uuid, partial(passthrough.restore_driver, system, handover))
        finally:
            done.set()
            asking.join()
        assert failed == []


@on("8xH100")
def failed_change_of_driver_keeps_the_gpu_on_its_driver(stage: Stage) -> None:
    with bus(stage) as system:
        gpu = stage.first_gpu()
        handover = handed_over(system, gpu)

        def fail() -> None:
            passthrough.bind_to_vfio(system, handover)
            passthrough.restore_driver(system, handover)
            raise InUse("another program uses the GPU")

        assert_refused(InUse, stage.backend.detach, gpu.uuid, fail)
        assert listed() == 8 and stage.backend.device(gpu.uuid).uuid == gpu.uuid


@on("8xH100")
def gpu_is_returned_while_the_driver_is_unloaded(stage: Stage) -> None:
    with bus(stage) as system:
        gpu = stage.first_gpu()
        handover = handed_over(system, gpu)
        stage.backend.detach(gpu.uuid, partial(passthrough.bind_to_vfio, system, handover))
        version = stage.root / "proc/driver/nvidia/version"
        text = version.read_text()
        stage.control("fault", "all", "call", "nvmlInitWithFlags", "fail", "9")
        take_back = partial(passthrough.restore_driver, system, handover)
        assert_refused(BackendUnavailable, stage.backend.attach, gpu.uuid, take_back)
        stage.control("clear")
        stage.backend.open()
        stage.backend.detach(gpu.uuid, partial(passthrough.bind_to_vfio, system, handover))
        stage.control("fault", "all", "call", "nvmlInitWithFlags", "fail", "9")
        version.unlink()
        stage.backend.attach(gpu.uuid, take_back)
        assert pci.driver_of(system, gpu.pci_address) == "nvidia"
        assert_refused(BackendUnavailable, stage.backend.device, gpu.uuid)
        version.write_text(text)
        stage.control("clear")
        stage.backend.open()
        assert len(stage.gpus()) == 8


@on("2xRTX-PRO-6000")
def other_device_in_the_iommu_group_is_named(stage: Stage) -> None:
    with bus(stage) as system:
        gpu = stage.first_gpu()
        error = assert_refused(InUse, passthrough.require_passthrough, system, gpu.pci_address)
        assert "0000:19:00.1 (snd_hda_intel)" in str(error)
        audio = Handover("0000:19:00.1", "snd_hda_intel")
        passthrough.bind_to_vfio(system, audio)
        passthrough.require_passthrough(system, gpu.pci_address)
        passthrough.restore_driver(system, audio)
        assert pci.driver_of(system, audio.address) == "snd_hda_intel"


@on("8xH100")
def gpu_returned_by_an_administrator_is_found_when_nvml_is_reopened(stage: Stage) -> None:
    """The kernel's list of GPUs shows a returned GPU. A change by the backend itself does not count."""
    with bus(stage) as system:
        gpu, other = stage.gpus()[:2]
        whole = stage.backend.surroundings()
        assert gpu.pci_address in whole.devices and whole.driver
        mine = handed_over(system, other)
        stage.backend.detach(other.uuid, partial(passthrough.bind_to_vfio, system, mine))
        assert stage.backend.surroundings() == whole
        stage.backend.attach(other.uuid, partial(passthrough.restore_driver, system, mine))
        handover = handed_over(system, gpu)
        stage.backend.close()
        passthrough.bind_to_vfio(system, handover)  # by an administrator, after its processes were stopped
        stage.backend.open()
        fewer = stage.backend.surroundings()
        assert fewer.devices == whole.devices - {gpu.pci_address} and fewer.driver == whole.driver
        passthrough.restore_driver(system, handover)
        settled(lambda: stage.backend.surroundings() == whole)
        stage.backend.reopen()
        assert [each.uuid for each in stage.gpus(full=True)].count(gpu.uuid) == 1 and listed() == 8
        assert stage.backend.device(other.uuid).uuid == other.uuid


@on("8xH100")
def gpu_returned_by_an_administrator_during_passthrough_is_queried(stage: Stage) -> None:
    """NVML was opened without the GPU, and the bus shows the same GPUs as during the passthrough."""
    with bus(stage) as system:
        gpu = stage.gpus()[2]
        whole = stage.backend.surroundings()
        handover = handed_over(system, gpu)
        stage.backend.detach(gpu.uuid, partial(passthrough.bind_to_vfio, system, handover))
        assert stage.backend.surroundings() == whole and stage.backend.device(gpu.uuid).uuid == gpu.uuid
        passthrough.restore_driver(system, handover)  # by an administrator
        settled(lambda: stage.backend.surroundings() != whole)
        assert stage.backend.surroundings().devices == whole.devices
        stage.backend.reopen()
        settled(lambda: gpu.uuid in [each.uuid for each in stage.gpus(full=True)])
        after = stage.backend.surroundings()
        stage.backend.attach(gpu.uuid, partial(passthrough.restore_driver, system, handover))
        assert stage.backend.surroundings() == after and len(stage.gpus()) == 8


def settled(condition: Callable[[], bool]) -> None:
    """Wait for a condition that follows a change of driver with a short delay."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@on("8xH100")
def numbers_stay_when_a_gpu_below_is_unplugged(stage: Stage) -> None:
    """A virtual machine uses GPU 6, and GPU 2 is unplugged: all GPU numbers stay unique, in this process and the next."""
    with bus(stage) as system:
        before = {gpu.uuid: offers[-1].name for gpu, offers in zip(stage.gpus(), published(stage.backend))}
        gpus = stage.gpus()
        away, unplugged = gpus[6], gpus[2]
        facts = json.loads(json.dumps(document_of(away)))
        handover = handed_over(system, away)
        stage.backend.detach(away.uuid, partial(passthrough.bind_to_vfio, system, handover))
        stage.control("unplug", unplugged.pci_address)
        stage.backend.reopen()
        left = {offers[-1].device_uuid: offers[-1].name for offers in published(stage.backend)}
        assert left == {uuid: name for uuid, name in before.items() if uuid != unplugged.uuid}
        stage.backend.close()
        stage.backend = NvidiaBackend(system)
        stage.backend.add_detached([device_of(facts)])
        stage.backend.open()
        again = {offers[-1].device_uuid: offers[-1].name for offers in published(stage.backend)}
        assert again[away.uuid] == "gpu-vfio-6" and len(set(again.values())) == 7
        stage.control("plug", unplugged.pci_address)
        stage.backend.reopen()
        back = {offers[-1].device_uuid: offers[-1].name for offers in published(stage.backend)}
        assert again.items() <= back.items() and len(set(back.values())) == 8
        stage.backend.attach(away.uuid, partial(passthrough.restore_driver, system, handover))


def by_index(backend: NvidiaBackend) -> dict[str, int]:
    """Return the index of each GPU by its PCI address."""
    return {gpu.pci_address: gpu.index for gpu in devices_of(backend.discover())}


@on("8xH100")
def indices_stay_when_a_gpu_is_unplugged(stage: Stage) -> None:
    """GPU 2 is unplugged: the others keep their indexes in the driver, in its next process, and in a module."""
    with bus(stage) as system:
        stage.backend.close()

        def driver(is_referred: bool = True) -> NvidiaBackend:
            backend = NvidiaBackend(system)
            backend.use_number_file("/driver", writes=True, is_referred=is_referred)
            backend.open()
            return backend

        stage.backend = driver()
        before = by_index(stage.backend)
        assert sorted(before.values()) == list(range(8))
        unplugged = next(address for address, index in before.items() if index == 2)
        left = {address: index for address, index in before.items() if address != unplugged}
        stage.control("unplug", unplugged)
        stage.backend.reopen()
        assert by_index(stage.backend) == left
        assert by_index(stage.backend) == left  # the next scan finds each GPU
        stage.backend.close()
        stage.backend = driver()
        assert by_index(stage.backend) == left
        numbers = {offers[-1].device_uuid: offers[-1].name for offers in published(stage.backend)}
        assert {"gpu-vfio-0", "gpu-vfio-1", "gpu-vfio-3", "gpu-vfio-7"} <= set(numbers.values())
        module = NvidiaBackend(system)
        module.use_number_file("/driver")
        module.open()
        assert by_index(module) == left
        module.close()
        stage.control("plug", unplugged)
        stage.backend.reopen()
        assert by_index(stage.backend) == before
        # An unreadable file counts as empty. Without a reference the GPUs get new numbers.
        stage.control("unplug", unplugged)
        stage.backend.close()
        stage.backend = driver(is_referred=False)
        assert sorted(by_index(stage.backend).values()) == list(range(7))
        stage.backend.close()
        record = stage.root / "driver/numbers.json"
        assert record.exists()
        record.write_text("{}")
        stage.backend = driver()
        assert sorted(by_index(stage.backend).values()) == list(range(7))


@on("8xH100")
def names_stay_when_the_kernel_exchanges_minors(stage: Stage) -> None:
    """Two GPUs are returned from virtual machines in the opposite order, so each gets the minor of the other."""
    with bus(stage) as system:
        stage.backend.close()

        def program(writes: bool) -> NvidiaBackend:
            backend = NvidiaBackend(system)
            backend.use_number_file("/driver", writes=writes, is_referred=not writes)
            backend.open()
            return backend

        def names(backend: NvidiaBackend) -> dict[str, list[str]]:
            return {offers[0].device_uuid: [offer.name for offer in offers] for offers in published(backend)}

        stage.backend = program(writes=True)
        before = names(stage.backend)
        gpus = stage.gpus()
        first, last = gpus[0], gpus[3]
        assert (first.minor, last.minor) == (0, 3) and before[first.uuid][-2:] == ["gpu-0", "gpu-vfio-0"]
        handovers = {gpu.uuid: handed_over(system, gpu) for gpu in (first, last)}
        for gpu in (first, last):
            stage.backend.detach(gpu.uuid, partial(passthrough.bind_to_vfio, system, handovers[gpu.uuid]))
        stage.backend.attach(last.uuid, partial(passthrough.restore_driver, system, handovers[last.uuid]))
        assert stage.backend.device(last.uuid).minor == 0 and names(stage.backend) == before
        stage.backend.attach(first.uuid, partial(passthrough.restore_driver, system, handovers[first.uuid]))
        assert [stage.gpus()[index].minor for index in (0, 3)] == [3, 0] and names(stage.backend) == before
        assert stage.backend.device_nodes(first) == ("/dev/nvidia3",), "the facts are from before the exchange"
        assert stage.backend.device_edits(first, None).device_nodes[0].path == "/dev/nvidia3"
        stage.backend.close()
        module = program(writes=False)
        assert names(module) == before
        module.close()
        stage.backend = program(writes=True)
        assert names(stage.backend) == before, "no claim and no rule refers to a GPU, and names are published"
