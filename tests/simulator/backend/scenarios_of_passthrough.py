# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A GPU is bound to vfio-pci and comes back: what NVML lists meanwhile, and what the backend publishes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from dra_driver.core import passthrough, pci
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, InUse, NotFound
from dra_driver.core.facts import device_of, document_of
from dra_driver.core.model import Device, Offer, devices_of
from dra_driver.core.nvidia.backend import NvidiaBackend
from dra_driver.core.passthrough import Handover
from dra_driver.core.system import DeviceNumber, System

from tests.simulator.backend.gpu_machine import SIMULATOR
from tests.simulator.backend.stage import Stage, on, refused


class PlainNodes(System):
    """Below a folder device nodes are plain files, which nobody needs a privilege to make."""

    def device_number(self, path: str) -> DeviceNumber | None:
        return DeviceNumber("c", 233, sum(path.encode())) if self.path(path).is_file() else None


@contextlib.contextmanager
def bus(stage: Stage) -> Iterator[System]:
    """The machine with the kernel's part of its PCI bus; the backend sees its nodes."""
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
    """How many GPUs a program of its own finds."""
    return len(subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout.splitlines())


def published(backend: NvidiaBackend) -> list[tuple[Offer, ...]]:
    return [backend.offers(gpu, True, (), True) for gpu in devices_of(backend.discover())]


def handed_over(system: System, gpu: Device, interface: str = passthrough.LEGACY) -> Handover:
    return Handover(gpu.pci_address, pci.driver_of(system, gpu.pci_address), interface)


@on("8xH100")
def a_gpu_goes_to_a_virtual_machine_and_comes_back(stage: Stage) -> None:
    with bus(stage) as system:
        before = published(stage.backend)
        first, second = stage.gpus()[:2]
        assert listed() == 8 and [offers[-1].name for offers in before] == [f"gpu-vfio-{number}" for number in range(8)]
        passthrough.refuse(system, first.pci_address)
        handover = handed_over(system, first)
        assert handover.former == "nvidia"
        stage.backend.detach(first.uuid, partial(passthrough.give, system, handover))
        assert listed() == 7 and pci.driver_of(system, first.pci_address) == "vfio-pci"
        assert published(stage.backend) == before, "what is published does not depend on who has a GPU"
        assert [gpu.index for gpu in stage.gpus(full=True)] == list(range(8))
        assert stage.backend.device(second.uuid) == second and stage.backend.device(first.uuid) == first
        group = pci.iommu_group(system, first.pci_address)
        assert [node.path for node in passthrough.edits(system, handover).device_nodes] == [
            f"/dev/vfio/{group}",
            "/dev/vfio/vfio",
        ]
        assert not system.exists(f"/proc/driver/nvidia/gpus/{first.pci_address}")
        stage.backend.attach(first.uuid, partial(passthrough.take_back, system, handover))
        assert listed() == 8 and published(stage.backend) == before
        assert pci.override_of(system, first.pci_address) == "" and not system.exists(f"/dev/vfio/{group}")
        assert system.exists(f"/proc/driver/nvidia/gpus/{first.pci_address}/information")


@on("8xH100")
def a_driver_that_starts_anew_knows_a_gpu_that_is_away(stage: Stage) -> None:
    with bus(stage) as system:
        before = published(stage.backend)
        gpu = stage.gpus()[3]
        facts = json.loads(json.dumps(document_of(gpu)))
        handover = handed_over(system, gpu, passthrough.IOMMUFD)
        stage.backend.detach(gpu.uuid, partial(passthrough.give, system, handover))
        assert next(node.path for node in passthrough.edits(system, handover).device_nodes).startswith(
            "/dev/vfio/devices/vfio"
        )
        stranger = NvidiaBackend(system)
        stranger.open()
        assert len(published(stranger)) == 7
        refused(NotFound, stranger.device, gpu.uuid)
        stranger.close()
        stage.backend.close()
        stage.backend = NvidiaBackend(system)
        stage.backend.remember([device_of(facts)])
        stage.backend.open()
        assert published(stage.backend) == before
        stage.backend.attach(gpu.uuid, partial(passthrough.take_back, system, handover))
        assert listed() == 8 and published(stage.backend) == before


@on("8xH100")
def others_are_served_while_a_gpu_changes_its_driver(stage: Stage) -> None:
    """Calls about other GPUs wait until NVML is open again; none of them fails."""
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
                stage.backend.detach(first.uuid, partial(passthrough.give, system, handover))
                stage.backend.attach(first.uuid, partial(passthrough.take_back, system, handover))
        finally:
            done.set()
            asking.join()
        assert failed == []


@on("8xH100")
def a_failed_change_of_driver_leaves_the_gpu_where_it_was(stage: Stage) -> None:
    with bus(stage) as system:
        gpu = stage.first()
        handover = handed_over(system, gpu)

        def fail() -> None:
            passthrough.give(system, handover)
            passthrough.take_back(system, handover)
            raise InUse("somebody was faster")

        refused(InUse, stage.backend.detach, gpu.uuid, fail)
        assert listed() == 8 and stage.backend.device(gpu.uuid).uuid == gpu.uuid


@on("8xH100")
def gpu_is_taken_back_while_the_driver_is_unloaded(stage: Stage) -> None:
    with bus(stage) as system:
        gpu = stage.first()
        handover = handed_over(system, gpu)
        stage.backend.detach(gpu.uuid, partial(passthrough.give, system, handover))
        version = stage.root / "proc/driver/nvidia/version"
        text = version.read_text()
        stage.control("fault", "all", "call", "nvmlInitWithFlags", "fail", "9")
        take_back = partial(passthrough.take_back, system, handover)
        refused(BackendUnavailable, stage.backend.attach, gpu.uuid, take_back)
        stage.control("clear")
        stage.backend.open()
        stage.backend.detach(gpu.uuid, partial(passthrough.give, system, handover))
        stage.control("fault", "all", "call", "nvmlInitWithFlags", "fail", "9")
        version.unlink()
        stage.backend.attach(gpu.uuid, take_back)
        assert pci.driver_of(system, gpu.pci_address) == "nvidia"
        refused(BackendUnavailable, stage.backend.device, gpu.uuid)
        version.write_text(text)
        stage.control("clear")
        stage.backend.open()
        assert len(stage.gpus()) == 8


@on("2xRTX-PRO-6000")
def what_shares_the_iommu_group_is_named(stage: Stage) -> None:
    with bus(stage) as system:
        gpu = stage.first()
        error = refused(InUse, passthrough.refuse, system, gpu.pci_address)
        assert "0000:19:00.1 (snd_hda_intel)" in str(error)
        audio = Handover("0000:19:00.1", "snd_hda_intel")
        passthrough.give(system, audio)
        passthrough.refuse(system, gpu.pci_address)
        passthrough.take_back(system, audio)
        assert pci.driver_of(system, audio.address) == "snd_hda_intel"


@on("8xH100")
def a_gpu_that_comes_back_by_itself_is_known_when_nvml_is_opened_anew(stage: Stage) -> None:
    """What the kernel shows of GPUs tells that one has come; its own handing over does not."""
    with bus(stage) as system:
        gpu, other = stage.gpus()[:2]
        whole = stage.backend.surroundings()
        assert gpu.pci_address in whole.devices and whole.driver
        mine = handed_over(system, other)
        stage.backend.detach(other.uuid, partial(passthrough.give, system, mine))
        assert stage.backend.surroundings() == whole
        stage.backend.attach(other.uuid, partial(passthrough.take_back, system, mine))
        handover = handed_over(system, gpu)
        stage.backend.close()
        passthrough.give(system, handover)  # by an administrator, who has ended what used it
        stage.backend.open()
        fewer = stage.backend.surroundings()
        assert fewer.devices == whole.devices - {gpu.pci_address} and fewer.driver == whole.driver
        passthrough.take_back(system, handover)
        settled(lambda: stage.backend.surroundings() == whole)
        stage.backend.renew()
        assert [each.uuid for each in stage.gpus(full=True)].count(gpu.uuid) == 1 and listed() == 8
        assert stage.backend.device(other.uuid).uuid == other.uuid


@on("8xH100")
def a_gpu_that_somebody_takes_back_from_a_virtual_machine_is_asked_for_again(stage: Stage) -> None:
    """NVML was opened without it, and the bus shows the same GPUs as while it was passed through."""
    with bus(stage) as system:
        gpu = stage.gpus()[2]
        whole = stage.backend.surroundings()
        handover = handed_over(system, gpu)
        stage.backend.detach(gpu.uuid, partial(passthrough.give, system, handover))
        assert stage.backend.surroundings() == whole and stage.backend.device(gpu.uuid).uuid == gpu.uuid
        passthrough.take_back(system, handover)  # by an administrator
        settled(lambda: stage.backend.surroundings() != whole)
        assert stage.backend.surroundings().devices == whole.devices
        stage.backend.renew()
        settled(lambda: gpu.uuid in [each.uuid for each in stage.gpus(full=True)])
        after = stage.backend.surroundings()
        stage.backend.attach(gpu.uuid, partial(passthrough.take_back, system, handover))
        assert stage.backend.surroundings() == after and len(stage.gpus()) == 8


def settled(condition: Callable[[], bool]) -> None:
    """What shows a change of driver follows it by a moment."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@on("8xH100")
def numbers_stay_when_a_gpu_below_is_unplugged(stage: Stage) -> None:
    """A virtual machine has GPU 6, and GPU 2 is unplugged: no two GPUs have one number, in this process and in the next."""
    with bus(stage) as system:
        before = {gpu.uuid: offers[-1].name for gpu, offers in zip(stage.gpus(), published(stage.backend))}
        gpus = stage.gpus()
        away, unplugged = gpus[6], gpus[2]
        facts = json.loads(json.dumps(document_of(away)))
        handover = handed_over(system, away)
        stage.backend.detach(away.uuid, partial(passthrough.give, system, handover))
        stage.control("unplug", unplugged.pci_address)
        stage.backend.renew()
        left = {offers[-1].device_uuid: offers[-1].name for offers in published(stage.backend)}
        assert left == {uuid: name for uuid, name in before.items() if uuid != unplugged.uuid}
        stage.backend.close()
        stage.backend = NvidiaBackend(system)
        stage.backend.remember([device_of(facts)])
        stage.backend.open()
        again = {offers[-1].device_uuid: offers[-1].name for offers in published(stage.backend)}
        assert again[away.uuid] == "gpu-vfio-6" and len(set(again.values())) == 7
        stage.control("plug", unplugged.pci_address)
        stage.backend.renew()
        back = {offers[-1].device_uuid: offers[-1].name for offers in published(stage.backend)}
        assert again.items() <= back.items() and len(set(back.values())) == 8
        stage.backend.attach(away.uuid, partial(passthrough.take_back, system, handover))


def by_index(backend: NvidiaBackend) -> dict[str, int]:
    """The index of each GPU by its PCI address."""
    return {gpu.pci_address: gpu.index for gpu in devices_of(backend.discover())}


@on("8xH100")
def indices_stay_when_a_gpu_is_unplugged(stage: Stage) -> None:
    """GPU 2 is unplugged: the others keep their indices in the driver, in its next process, and in a module."""
    with bus(stage) as system:
        stage.backend.close()

        def driver(is_referred: bool = True) -> NvidiaBackend:
            backend = NvidiaBackend(system)
            backend.number_by("/driver", writes=True, is_referred=is_referred)
            backend.open()
            return backend

        stage.backend = driver()
        before = by_index(stage.backend)
        assert sorted(before.values()) == list(range(8))
        unplugged = next(address for address, index in before.items() if index == 2)
        left = {address: index for address, index in before.items() if address != unplugged}
        stage.control("unplug", unplugged)
        stage.backend.renew()
        assert by_index(stage.backend) == left
        assert by_index(stage.backend) == left  # the next scan knows where each GPU is
        stage.backend.close()
        stage.backend = driver()
        assert by_index(stage.backend) == left
        numbers = {offers[-1].device_uuid: offers[-1].name for offers in published(stage.backend)}
        assert {"gpu-vfio-0", "gpu-vfio-1", "gpu-vfio-3", "gpu-vfio-7"} <= set(numbers.values())
        module = NvidiaBackend(system)
        module.number_by("/driver")
        module.open()
        assert by_index(module) == left
        module.close()
        stage.control("plug", unplugged)
        stage.backend.renew()
        assert by_index(stage.backend) == before
        # An unreadable file counts as empty; without a reference the GPUs get new numbers.
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
