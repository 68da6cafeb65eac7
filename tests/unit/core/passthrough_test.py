# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Switch a PCI device to a virtual machine and back: refusals, kernel behavior, and rollback."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from board_model import device
from dra_driver.core.errors import AcceleratorError, InUse, NotFound, NotPermitted, Unsupported
from dra_driver.core.host import device_users, passthrough, pci
from dra_driver.core.host.passthrough import DRIVER, IOMMUFD, LEGACY, Handover, parse_handover
from dra_driver.core.host.system import DeviceNumber, System
from dra_driver.core.host.vfio_drivers import best_driver
from dra_driver.core.model import Clique, Passthrough
from dra_driver.core.store.device_facts import device_of, document_of
from hypothesis import given
from hypothesis import strategies as st
from pci_model import PciSystem

ADDRESS = "0000:18:00.0"
HANDOVER = Handover(ADDRESS, "own")


@pytest.fixture()
def system(tmp_path: Path) -> PciSystem:
    made = PciSystem(str(tmp_path), own_driver="own")
    made.add(ADDRESS, "40", "own")
    return made


def override(system: System) -> str:
    return pci.override_of(system, ADDRESS)


def test_give_and_return_restores_driver(system: PciSystem) -> None:
    passthrough.require_passthrough(system, ADDRESS)
    passthrough.bind_to_vfio(system, HANDOVER)
    assert (system.driver(ADDRESS), override(system)) == (DRIVER, DRIVER)
    edits = passthrough.container_edits(system, HANDOVER)
    assert [(node.path, node.permissions) for node in edits.device_nodes] == [
        ("/dev/vfio/40", "rw"),
        ("/dev/vfio/vfio", "rw"),
    ]
    written = len(system.written)
    passthrough.bind_to_vfio(system, HANDOVER)
    assert len(system.written) == written, "completed steps are not repeated"
    passthrough.restore_driver(system, HANDOVER)
    assert (system.driver(ADDRESS), override(system)) == ("own", "")
    written = len(system.written)
    passthrough.restore_driver(system, HANDOVER)
    assert len(system.written) == written


GRACE = "nvgrace-gpu-vfio-pci"
ALIASES = ("vfio_pci:v000010DEd00002342sv*sd*bc*sc*i*", "vfio_pci:v000010DEd00002941sv*sd*bc*sc*i*")


def test_give_device_with_variant_driver_uses_it(system: PciSystem) -> None:
    system.add_variant(ADDRESS, GRACE, *ALIASES)
    assert best_driver(system, ADDRESS) == GRACE
    passthrough.require_passthrough(system, ADDRESS)
    handover = replace(HANDOVER, driver=GRACE)
    passthrough.bind_to_vfio(system, handover)
    assert (system.driver(ADDRESS), override(system)) == (GRACE, GRACE)
    assert passthrough.is_bound_to_vfio(system, handover) and not passthrough.is_bound_to_vfio(system, HANDOVER)
    assert [node.path for node in passthrough.container_edits(system, handover).device_nodes] == [
        "/dev/vfio/40",
        "/dev/vfio/vfio",
    ]
    passthrough.restore_driver(system, handover)
    assert (system.driver(ADDRESS), override(system)) == ("own", "")


@pytest.mark.parametrize("alias", ["vfio_pci:v000015B3d*sv*sd*bc*sc*i*", "pci:v000010DEd00002342sv*sd*bc*sc*i*"])
def test_variant_driver_of_other_devices_is_not_selected(system: PciSystem, alias: str) -> None:
    system.add_variant(ADDRESS, GRACE, alias)
    assert best_driver(system, ADDRESS) == DRIVER


def test_variant_driver_with_fewest_wildcards_is_selected(system: PciSystem) -> None:
    system.add_variant(ADDRESS, GRACE, "vfio_pci:v000010DEd*sv*sd*bc*sc*i*")
    path = system.path("/lib/modules/6.17.0/modules.alias")
    path.write_text(f"{path.read_text()}alias {ALIASES[0]} other_vfio_pci\n")
    assert best_driver(system, ADDRESS) == "other-vfio-pci"


def test_refuse_unloaded_variant_driver_is_named(system: PciSystem) -> None:
    system.add_variant(ADDRESS, GRACE, *ALIASES, loaded=False)
    with pytest.raises(
        Unsupported, match=f"the driver {GRACE}, which this device needs in place of vfio-pci, is not loaded"
    ):
        passthrough.require_passthrough(system, ADDRESS)


def test_variant_driver_without_visible_modules_is_found(system: PciSystem) -> None:
    system.add_variant(ADDRESS, GRACE, *ALIASES)
    seen = system.path("/proc/1/root/lib/modules/6.17.0")
    seen.parent.mkdir(parents=True)
    system.path("/lib/modules/6.17.0").rename(seen)
    assert best_driver(system, ADDRESS) == GRACE


def test_variant_driver_list_io_error_rejects_device(system: PciSystem) -> None:
    system.add_variant(ADDRESS, GRACE, *ALIASES)
    path = system.path("/lib/modules/6.17.0/modules.alias")
    path.unlink()
    path.mkdir()  # reading it fails, as with a disk error
    with pytest.raises(AcceleratorError, match="list of VFIO drivers cannot be read"):
        passthrough.require_passthrough(system, ADDRESS)


def test_variant_driver_list_unreadable_rejects_device(system: PciSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    system.add_variant(ADDRESS, GRACE, *ALIASES)
    real = system.read_bytes

    def read(path: str) -> bytes:
        if path.endswith("modules.alias"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(system, "read_bytes", read)
    with pytest.raises(NotPermitted, match="list of VFIO drivers cannot be read"):
        passthrough.require_passthrough(system, ADDRESS)


def test_devices_of_variant_drivers_in_the_group_are_harmless(system: PciSystem) -> None:
    system.add("0000:18:00.1", "40", GRACE)
    passthrough.require_passthrough(system, ADDRESS)


def test_handover_without_variant_has_previous_release_format() -> None:
    assert "driver" not in HANDOVER.to_dict() and parse_handover(HANDOVER.to_dict()) == HANDOVER
    variant = replace(HANDOVER, driver=GRACE)
    assert parse_handover(variant.to_dict()) == variant
    for wrong in ("nvidia", "../vfio-pci", 3):
        with pytest.raises(ValueError, match="cannot be read"):
            parse_handover({**HANDOVER.to_dict(), "driver": wrong})


@pytest.mark.parametrize("api_device", [False, True])
def test_iommufd_edits_have_its_nodes(system: PciSystem, api_device: bool) -> None:
    assert passthrough.choose_interface(system, True) == LEGACY, "the kernel has none"
    system.iommufd = True
    assert passthrough.choose_interface(system, True) == IOMMUFD
    assert passthrough.choose_interface(system, False) == LEGACY
    handover = replace(HANDOVER, interface=IOMMUFD, api_device=api_device)
    passthrough.bind_to_vfio(system, handover)
    paths = [node.path for node in passthrough.container_edits(system, handover).device_nodes]
    assert paths == ["/dev/vfio/devices/vfio0", "/dev/vfio/vfio", *(["/dev/iommu"] if api_device else [])]


def test_give_driver_that_does_not_bind_rolls_back(system: PciSystem) -> None:
    system.refuses = {DRIVER}
    with pytest.raises(AcceleratorError, match=r"0000:18:00\.0 cannot be written to .*vfio-pci/bind: No such device"):
        passthrough.bind_to_vfio(system, HANDOVER)
    assert (system.driver(ADDRESS), override(system)) == ("own", "")


def test_give_driver_that_does_not_unbind_times_out(system: PciSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passthrough, "SWITCH_SECONDS", 1.0)  # the writes return, but the driver does not change
    system.stuck = {ADDRESS}
    with pytest.raises(AcceleratorError, match="to leave own: it is still bound to own"):
        passthrough.bind_to_vfio(system, HANDOVER)
    assert (system.driver(ADDRESS), override(system)) == ("own", "")


def test_give_blocked_write_times_out(system: PciSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(passthrough, "SWITCH_SECONDS", 0.2)
    never = threading.Event()
    monkeypatch.setattr(system, "put", lambda path, text: never.wait(5))
    try:
        with pytest.raises(AcceleratorError, match=r"the kernel did not complete the write within 0\.2 s"):
            passthrough.bind_to_vfio(system, HANDOVER)
    finally:
        never.set()


@pytest.mark.parametrize("driver", ["", DRIVER])
def test_return_after_kill_at_any_write_restores_driver(system: PciSystem, driver: str) -> None:
    """The process was killed between two writes: the device has no driver or the new one, and the override is set. It returns to its driver."""
    passthrough.bind_to_vfio(system, HANDOVER)
    if not driver:
        system.put(f"{pci.DRIVERS}/{DRIVER}/unbind", ADDRESS)
    assert system.driver(ADDRESS) == driver
    passthrough.restore_driver(system, HANDOVER)
    assert (system.driver(ADDRESS), override(system)) == ("own", "")


def test_give_after_killed_return_sets_override_again(system: PciSystem) -> None:
    """The process was killed after it cleared the override and before it changed the driver: a new switch sets the override again."""
    passthrough.bind_to_vfio(system, HANDOVER)
    system.put(f"{pci.DEVICES}/{ADDRESS}/driver_override", "")
    assert (system.driver(ADDRESS), override(system)) == (DRIVER, "")
    passthrough.bind_to_vfio(system, HANDOVER)
    assert (system.driver(ADDRESS), override(system)) == (DRIVER, DRIVER)


def test_return_keeps_override_of_other_programs(system: PciSystem) -> None:
    system.path(f"{pci.DEVICES}/{ADDRESS}/driver_override").write_text("own\n")
    passthrough.restore_driver(system, HANDOVER)
    assert override(system) == "own"


def test_refuse_without_iommu(system: PciSystem) -> None:
    system.add("0000:19:00.0", None, "own")
    with pytest.raises(Unsupported, match="it is in no IOMMU group"):
        passthrough.require_passthrough(system, "0000:19:00.0")


def test_refuse_without_driver(system: PciSystem) -> None:
    system.path(f"{pci.DRIVERS}/{DRIVER}").rmdir()
    with pytest.raises(Unsupported, match="the driver vfio-pci is not loaded"):
        passthrough.require_passthrough(system, ADDRESS)


@pytest.mark.parametrize(
    ("driver", "kind", "refused"),
    [
        ("snd_hda_intel", "0x040300", True),
        ("", "0x040300", True),
        (DRIVER, "0x040300", False),
        ("pcieport", "0x060400", False),
        ("", "0x060400", False),
    ],
)
def test_refuse_names_other_devices_of_the_group(system: PciSystem, driver: str, kind: str, refused: bool) -> None:
    system.add("0000:18:00.1", "40", driver, kind)
    if not refused:
        passthrough.require_passthrough(system, ADDRESS)
        return
    with pytest.raises(InUse, match=rf"group 40 holds 0000:18:00\.1 \({driver or 'no driver'}\) as well"):
        passthrough.require_passthrough(system, ADDRESS)


def test_refuse_virtual_functions(system: PciSystem) -> None:
    system.path(f"{pci.DEVICES}/{ADDRESS}/sriov_numvfs").write_text("4\n")
    with pytest.raises(InUse, match="4 virtual functions"):
        passthrough.require_passthrough(system, ADDRESS)


def test_return_missing_device_raises_not_found(system: PciSystem) -> None:
    with pytest.raises(NotFound, match=r"PCI device 0000:99:00\.0 is not there"):
        passthrough.restore_driver(system, replace(HANDOVER, address="0000:99:00.0"))


def test_refuse_names_processes_with_open_device() -> None:
    """Processes with an open device are found in the real /proc, with a device that exists on each host."""
    machine, number = System(), DeviceNumber("c", 1, 5)  # /dev/zero
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        opened = os.open("/dev/zero", os.O_RDONLY)
        os.write(writer, b"x")
        os.read(opened, 0)
        os.pause() if hasattr(os, "pause") else __import__("signal").pause()
        os._exit(0)
    try:
        os.read(reader, 1)
        assert child in {process.pid for process in device_users.find_device_users(machine, [number])}
        with pytest.raises(InUse, match=rf"the zeros is in use: /dev/zero is open in .*{child} \(") as raised:
            device_users.require_unused(machine, ["/dev/zero"], "the zeros")
        assert child in raised.value.pids
        begun = time.monotonic()
        with pytest.raises(InUse, match="the zeros is in use"):
            device_users.require_unused(machine, ["/dev/zero"], "the zeros", seconds=0.6)
        assert time.monotonic() - begun >= 0.6
        own = os.open("/dev/zero", os.O_RDONLY)
        assert os.getpid() not in {process.pid for process in device_users.find_device_users(machine, [number])}
        os.close(own)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    device_users.require_unused(machine, ["/dev/no-such-node"], "nothing")


def test_users_exclude_own_process_in_pid_namespace(tmp_path: Path) -> None:
    """In a pod with its own PID namespace, a process has a different PID than in the node's /proc: the own process is excluded."""
    for name, target in (("4711", "/dev/zero"), ("4712", "/dev/zero")):
        directory = tmp_path / "proc" / name / "fd"
        directory.mkdir(parents=True)
        (directory / "3").symlink_to(target)
    (tmp_path / "proc/self").symlink_to("4711")
    found = device_users.find_device_users(System(str(tmp_path)), [DeviceNumber("c", 1, 5)])
    assert [process.pid for process in found] == [4712]


def process_of(root: Path, capabilities: int) -> System:
    """Return a system on which this process has these capabilities, and another process has a file open."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Name:\tdriver\nCapInh:\t{0:016x}\nCapEff:\t{capabilities:016x}\n")
    directory = root / "proc/4712/fd"
    directory.mkdir(parents=True)
    (directory / "3").symlink_to("/dev/zero")
    (root / "proc/4712/comm").write_text("qemu\n")
    return System(str(root))


@pytest.mark.parametrize(
    ("capabilities", "allowed"), [(1 << 19, True), (0, False), (~(1 << 19) & (1 << 41) - 1, False)]
)
def test_users_without_capability_are_unknown(tmp_path: Path, capabilities: int, allowed: bool) -> None:
    """Without the capability an empty result proves nothing, also where /proc hides other users' processes: the switch is refused."""
    system = process_of(tmp_path, capabilities)
    if allowed:
        device_users.require_visible_users(system, "GPU 0")
        return
    with pytest.raises(
        NotPermitted, match=r"GPU 0 is not passed through to a virtual machine.*has no CAP_SYS_PTRACE"
    ) as raised:
        device_users.require_visible_users(system, "GPU 0")
    assert "CAP_DAC_READ_SEARCH" in raised.value.hint and "dra_driver_pod_passthrough" in raised.value.hint


@pytest.mark.parametrize("call", ["listdir", "readlink"])
@pytest.mark.parametrize(
    ("error", "allowed"), [(PermissionError(13, "no"), False), (FileNotFoundError(2, "gone"), True), (None, True)]
)
def test_users_inaccessible_process_may_have_device_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: OSError | None, allowed: bool
) -> None:
    """The kernel or a security module denies access to a process despite the capability: refused. A process that has ended is ignored."""
    system = process_of(tmp_path, 1 << 19)
    real = getattr(os, call)

    def answer(path: object) -> object:
        if error is not None and "/proc/4712/" in str(path):
            raise error
        return real(path)

    monkeypatch.setattr(os, call, answer)
    if allowed:
        device_users.require_visible_users(system, "GPU 0")
        return
    with pytest.raises(NotPermitted, match=r"process 4712 \(qemu\) keeps its open files to itself"):
        device_users.require_visible_users(system, "GPU 0")


def test_memory_regions_are_counted_to_next_power_of_two(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    directory = tmp_path / "sys/bus/pci/devices" / ADDRESS
    directory.mkdir(parents=True)
    assert pci.memory_regions(system, ADDRESS) == 0
    lines = [
        "0x1000 0x1fff 0x200",
        "0x0 0x0 0x0",
        "0x100000000 0x1ffffffff 0x14220c",
        "0x10 0x1f 0x101",
        "",
        "",
        "0x0 0xffff 0x200",
    ]
    (directory / "resource").write_text("\n".join(lines))
    assert pci.memory_regions(system, ADDRESS) == 1 << 33


@given(st.sampled_from(["a100-40", "h100-80", "l4"]), st.integers(0, 7), st.booleans(), st.booleans())
def test_document_of_facts_round_trips(board: str, index: int, passable: bool, iommufd: bool) -> None:
    facts = replace(device(board, index), passthrough=Passthrough(index, 1 << 37, iommufd) if passable else None)
    assert device_of(json.loads(json.dumps(document_of(facts)))) == facts


def test_device_of_document_of_previous_releases() -> None:
    clique = Clique("7b968a6d-c8aa-45e1-9e07-e1e51be99c31", 1)
    facts = device("h100-80", driver_version="580.95.05", clique=clique, switched=True, resets_alone=True)
    document = json.loads(json.dumps(document_of(facts)))
    assert device_of(document) == facts
    del document["driver_version"], document["clique"], document["switched"], document["resets_alone"]
    assert device_of(document) == replace(facts, driver_version="", clique=None, switched=False, resets_alone=False)


@pytest.mark.parametrize("document", [{}, {"vendor": 1}, {**document_of(device("l4", 0)), "profiles": [{}]}])
def test_device_of_invalid_document_is_rejected(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        device_of(document)


@pytest.mark.parametrize(
    "values", [{}, {"address": "18:00.0", "former": "own"}, {"address": ADDRESS, "former": "own", "interface": "both"}]
)
def test_handover_invalid_document_is_rejected(values: dict[str, object]) -> None:
    assert parse_handover(HANDOVER.to_dict()) == HANDOVER
    with pytest.raises(ValueError, match="cannot be read"):
        parse_handover(values)


def test_driver_unbound_during_read_is_not_bound(system: PciSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel removes the driver link between any two reads: the device has no driver."""
    read = os.readlink

    def gone(path: os.PathLike[str]) -> str:
        if str(path).endswith("/driver"):
            system.path(f"{pci.DEVICES}/{ADDRESS}/driver").unlink(missing_ok=True)
        return read(path)

    assert pci.driver_of(system, ADDRESS) != ""
    monkeypatch.setattr(os, "readlink", gone)
    assert pci.driver_of(system, ADDRESS) == ""
