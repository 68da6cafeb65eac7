# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A copied disk does not act as the node that it was copied from, and an administrator can accept or reset its state."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER
from dra_driver import cli, vendor
from dra_driver.commands import machine as command
from dra_driver.core.health import repair_marks
from dra_driver.core.host.system import System
from dra_driver.machine import (
    FILE,
    MACHINE_ID,
    PRODUCT_UUID,
    TRANSIENT,
    ForeignState,
    Machine,
    check_machine,
    current_machine,
    delete_state,
    remaining_problem,
    store_machine,
    stored_machine,
)
from vendor_scene import Scene

ONE, OTHER = "4c4c4544-0042-3510-8052-b4c04f4d3533", "4c4c4544-0043-3510-8052-b4c04f4d3533"


def machine_files(root: Path, product: str, machine_id: str) -> System:
    """Write the values of the firmware and the operating system of a machine. "" writes no file."""
    for path, text in ((PRODUCT_UUID, product), (MACHINE_ID, machine_id)):
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        if text:
            file.write_text(f"{text}\n")
    return System(str(root))


@pytest.mark.parametrize(
    ("stored", "now", "is_other"),
    [
        ((ONE, "a"), (ONE, "a"), False),
        ((ONE, "a"), (ONE, "b"), False),  # reinstalled, or a restarted container-based node
        ((ONE, "a"), (OTHER, "a"), True),  # an exact copy, or a new mainboard
        ((ONE, "a"), (OTHER, "b"), True),  # a copy with a new machine ID
        (
            ("", "a"),
            ("", "b"),
            True,
        ),  # no SMBIOS: a copy with a new machine ID, or a reinstallation that kept the state
        (("", "a"), ("", "a"), False),
        (("", "a"), ("", ""), False),
        (("", ""), ("", "b"), False),
        (("", "a"), (ONE, "b"), False),
        ((ONE, "a"), ("", "b"), False),
        ((ONE.upper(), "a"), (ONE, "a"), False),
        # A firmware update to SMBIOS 2.6: the same UUID, with three fields in the other byte order.
        (("4c4c4544-0042-3510-8052-b4c04f4d3632", "a"), ("44454c4c-4200-1035-8052-b4c04f4d3632", "a"), False),
        (("4c4c4544-0042-3510-8052-b4c04f4d3632", "a"), ("44454c4c-4200-1035-8052-b4c04f4d3633", "a"), True),
        (("00000000-0000-0000-0000-000000000000", "a"), (ONE, "a"), False),
        (("FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF", "a"), (ONE, "a"), False),
        (("03000200-0400-0500-0006-000700080009", "a"), (ONE, "a"), False),
        (("00020003-0004-0005-0006-000700080009", "a"), (ONE, "a"), False),
        (("FEFEFEFE-FEFE-FEFE-FEFE-FEFEFEFEFEFE", "a"), (ONE, "a"), False),
        (("4C4C4544-0000-2010-8020-80C04F202020", "a"), (ONE, "a"), False),
        (("Not Settable", "a"), (ONE, "a"), False),
    ],
)
def test_other_product_uuid_is_another_machine(
    tmp_path: Path, stored: tuple[str, str], now: tuple[str, str], *, is_other: bool
) -> None:
    before = current_machine(machine_files(tmp_path, *stored))
    assert current_machine(machine_files(tmp_path, *now)).is_other(before) is is_other


def test_identifier_that_cannot_be_read_now_stays_stored() -> None:
    assert Machine("", "b").merged(Machine(ONE, "a")) == Machine(ONE, "b")


@pytest.mark.parametrize("path", TRANSIENT)
def test_machine_id_that_can_change_at_each_start_is_unknown(tmp_path: Path, path: str) -> None:
    system = machine_files(tmp_path, "", "a")
    file = tmp_path / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    assert current_machine(system) == Machine("", "")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\udcff", None])
def test_damaged_identity_is_unknown_and_stays(tmp_path: Path, content: str | None) -> None:
    """A damaged identity is unknown, and its file stays. None stands for a file that cannot be read."""
    system, file = machine_files(tmp_path / "root", ONE, "a"), tmp_path / FILE
    if content is None:
        file.mkdir()
    else:
        file.write_text(content, errors="surrogateescape")
    with pytest.raises(ForeignState, match="dra-driver machine accept") as caught:
        check_machine(system, str(tmp_path))
    assert caught.value.code == "machine-unknown"
    assert "machine accept" in remaining_problem(system, str(tmp_path))
    assert content is None or file.read_text(errors="surrogateescape") == content


def test_read_error_of_the_firmware_is_neither_this_nor_another_machine(tmp_path: Path) -> None:
    system = machine_files(tmp_path / "root", ONE, "a")
    check_machine(system, str(tmp_path))
    firmware = tmp_path / "root" / PRODUCT_UUID.lstrip("/")
    firmware.unlink()
    firmware.symlink_to(firmware.name)
    with pytest.raises(ForeignState, match="symbolic links") as caught:
        check_machine(system, str(tmp_path))
    assert caught.value.code == "machine-unknown"
    assert "symbolic links" in remaining_problem(system, str(tmp_path))
    machine_files(tmp_path / "root", OTHER, "a")
    assert "machine reset" in remaining_problem(system, str(tmp_path))
    machine_files(tmp_path / "root", ONE, "a")
    assert remaining_problem(system, str(tmp_path)) == ""


@pytest.mark.parametrize("path", [MACHINE_ID, TRANSIENT[0]])
def test_read_error_without_product_uuid_is_neither_this_nor_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    system = machine_files(tmp_path / "root", "", "a")
    check_machine(system, str(tmp_path))
    machine_files(tmp_path / "root", "", "b")
    failing = str(tmp_path / "root" / path.lstrip("/"))
    stat_file, read = os.stat, System.read_bytes

    def stat(file: str, **more: Any) -> os.stat_result:
        if str(file) == failing:
            raise OSError(errno.EIO, "Input/output error")
        return stat_file(file, **more)

    def read_bytes(self: System, file: str) -> bytes:
        if file == path:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        patch.setattr(System, "read_bytes", read_bytes)
        with pytest.raises(ForeignState, match="Input/output error") as caught:
            check_machine(system, str(tmp_path))
        assert caught.value.code == "machine-unknown"
        assert "Input/output error" in remaining_problem(system, str(tmp_path))
    assert "machine reset" in remaining_problem(system, str(tmp_path))


def test_identity_of_a_later_version_is_read(tmp_path: Path) -> None:
    store_machine(str(tmp_path), Machine(ONE, "a"))
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**content, "version": 2, "more": 1}))
    assert stored_machine(str(tmp_path)) == Machine(ONE, "a")


def run(folder: Path, scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene(folder)
        try:
            await scenario(scene)
        finally:
            await scene.api.stop()

    asyncio.run(main())


def test_copied_disk_publishes_nothing_and_serves_nothing(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "MACHINE_SECONDS", 0.02)

    async def scenario(scene: Scene) -> None:
        machine_files(short / "root", ONE, "a")
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        assert await scene.prepare("a", "gpu-0") == ""
        await scene.stop()
        machine_files(short / "root", OTHER, "a")
        writes, files = len(scene.api.slice_writes()), scene.cdi()
        await scene.start()
        reported = await scene.status()
        (problem,) = (each for each in reported["problems"] if each.startswith("machine: "))
        assert ONE in problem and OTHER in problem and "dra-driver machine reset" in problem
        assert not reported["ready"]
        assert not Path(scene.paths.registration).exists() and not Path(scene.paths.service).exists()
        assert len(scene.api.slice_writes()) == writes and scene.cdi() == files
        directory = str(short / "kubelet/plugins" / DRIVER)
        store_machine(directory, current_machine(System(str(short / "root"))))
        await scene.until(lambda: Path(scene.paths.registration).exists())
        assert await scene.eventually(lambda: scene.prepare("a")) == ""
        await scene.stop()

    run(short, scenario)


def test_damaged_identity_publishes_nothing_until_the_machine_is_accepted(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state can belong to another machine: nothing is published until the machine is accepted."""
    monkeypatch.setattr(vendor, "MACHINE_SECONDS", 0.02)

    async def scenario(scene: Scene) -> None:
        machine_files(short / "root", ONE, "a")
        file = short / "kubelet/plugins" / DRIVER / FILE
        file.parent.mkdir(parents=True)
        file.write_text("{")
        await scene.api.start()
        await scene.start()
        (problem,) = (each for each in (await scene.status())["problems"] if each.startswith("machine: "))
        assert str(file) in problem and "dra-driver machine accept" in problem
        assert not Path(scene.paths.registration).exists() and not scene.api.slice_writes()
        store_machine(str(file.parent), Machine(OTHER, "a"))

        async def problems() -> str:
            return "" if OTHER in str((await scene.status())["problems"]) else "not yet"

        assert await scene.eventually(problems) == ""
        store_machine(str(file.parent), Machine(ONE, "a"))
        await scene.until(lambda: Path(scene.paths.registration).exists())
        await scene.stop()

    run(short, scenario)


def test_process_with_the_configuration_of_the_other_node_ends_after_a_reset(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "MACHINE_SECONDS", 0.02)

    async def scenario(scene: Scene) -> None:
        machine_files(short / "root", OTHER, "a")
        directory = str(short / "kubelet/plugins" / DRIVER)
        store_machine(directory, Machine(ONE, "a"))
        await scene.api.start()
        await scene.start()
        delete_state(directory)
        with pytest.raises(ForeignState, match="ends") as caught:
            await asyncio.wait_for(scene.task, 30)
        assert caught.value.code == "machine-reset"
        assert not Path(scene.paths.registration).exists() and not scene.api.slice_writes()
        await scene.stop()

    run(short, scenario)


class Node:
    """The files of a node with the driver as a service. The firmware belongs to a different machine than the state."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, kubeconfig: bool = True) -> None:
        self.state = folder / "kubelet/plugins" / DRIVER
        self.state.mkdir(parents=True)
        self.system = machine_files(folder / "root", OTHER, "a")
        self.kubeconfig, self.config = folder / "kubeconfig", folder / "driver.yaml"
        document = {"node_name": "node-1", "kubelet_root": str(folder / "kubelet"), "backends": ["nvidia"]}
        if kubeconfig:
            self.kubeconfig.write_text("{}")
            document["kubeconfig"] = str(self.kubeconfig)
        self.config.write_text(json.dumps(document))
        store_machine(str(self.state), Machine(ONE, "a"))
        for name in ("state.db", "state.db-wal", "repartition.json", "health.json", "driver.lock", "vendor.txt"):
            (self.state / name).write_text("")
        (self.state / "metadata/claim").mkdir(parents=True)
        repair_marks.mark(str(self.state), ["GPU-1"], repair_marks.REPAIRED)
        monkeypatch.setattr(command, "System", lambda: self.system)

    def run(self, action: str) -> int:
        return cli.main(["machine", action, "--config", str(self.config)])

    def names(self) -> set[str]:
        return {entry.name for entry in self.state.iterdir()}


def test_reset_deletes_copied_state_and_identity_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, monkeypatch)
    assert node.run("show") == 0 and "ANOTHER machine" in capsys.readouterr().out
    assert node.run("reset") == 0
    assert "dra.accelerators.site" in capsys.readouterr().out
    assert node.names() == {"driver.lock", "vendor.txt"}
    assert not node.kubeconfig.exists() and not node.config.exists()


@pytest.mark.parametrize("last", ["kubeconfig", "driver.yaml", "health.json", "metadata", "state.db-wal"])
def test_reset_killed_at_each_step_leaves_no_state_without_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """The process is killed before it deletes this path. The next reset, after the role wrote a configuration, completes it."""
    node = Node(tmp_path, monkeypatch)
    config, unlink, rmtree = node.config.read_text(), Path.unlink, shutil.rmtree

    def killed(delete: Callable[..., None], path: Path, **more: bool) -> None:
        if path.name == last:
            raise KeyboardInterrupt
        delete(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, **more: killed(unlink, path, **more))
        patch.setattr(shutil, "rmtree", lambda path: killed(rmtree, path))
        assert node.run("reset") == 130
    assert stored_machine(str(node.state)) == Machine(ONE, "a")
    assert not node.kubeconfig.exists() or node.names() > {"state.db", "health.json"}
    node.config.write_text(config)
    assert node.run("reset") == 0
    assert node.names() == {"driver.lock", "vendor.txt"}


def test_reset_syncs_each_group_of_deletions_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure, the other node's credentials and state exist only with its identity."""
    node = Node(tmp_path, monkeypatch)
    fsync, synced = os.fsync, []
    state = node.names()

    def record(descriptor: int) -> None:
        credentials = node.kubeconfig.exists(), node.config.exists()
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), credentials, node.names()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    assert node.run("reset") == 0
    removed, kept = (False, False), {"driver.lock", "vendor.txt"}
    credentials, config, rest, identity = synced
    assert credentials == (str(tmp_path), (False, True), state)
    assert config == (str(tmp_path), removed, state)
    assert rest == (str(node.state), removed, {*kept, FILE})
    assert identity == (str(node.state), removed, kept)


def test_reset_of_a_driver_in_a_pod_lets_it_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, kubeconfig=False)
    assert node.run("reset") == 0
    assert node.names() == {"driver.lock", "vendor.txt", FILE} and node.config.exists()
    assert stored_machine(str(node.state)) == Machine(OTHER, "a")


@pytest.mark.parametrize("action", ["accept", "reset"])
def test_damaged_identity_is_shown_and_can_be_accepted_or_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    node = Node(tmp_path, monkeypatch)
    (node.state / FILE).write_text("{")
    assert node.run("show") == 0 and "an UNKNOWN machine" in capsys.readouterr().out
    assert node.run(action) == 0
    if action == "accept":
        assert stored_machine(str(node.state)) == Machine(OTHER, "a") and node.kubeconfig.exists()
    else:
        assert node.names() == {"driver.lock", "vendor.txt"} and not node.kubeconfig.exists()


def test_reset_on_the_own_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, monkeypatch)
    assert node.run("accept") == 0
    before = node.names()
    assert node.run("reset") == 1 and "nothing is reset" in capsys.readouterr().err
    assert node.names() == before and node.kubeconfig.exists()
    assert node.run("show") == 0 and "ANOTHER" not in capsys.readouterr().out
