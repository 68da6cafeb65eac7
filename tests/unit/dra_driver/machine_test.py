# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A copied disk does not act as the node that it was copied from, and an administrator can accept or reset its state."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from backend_model import DRIVER
from dra_driver import cli, vendor
from dra_driver.commands import machine as command
from dra_driver.core.system import System
from dra_driver.machine import (
    FILE,
    MACHINE_ID,
    PRODUCT_UUID,
    ForeignState,
    Machine,
    current_machine,
    delete_state,
    store_machine,
    stored_machine,
)
from vendor_scene import Scene

ONE, OTHER = "4c4c4544-0042-3510-8052-b4c04f4d3533", "4c4c4544-0043-3510-8052-b4c04f4d3533"


def machine_files(root: Path, product: str, machine_id: str) -> System:
    """Write what the firmware and the operating system say of a machine; "" writes no file."""
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
        ((ONE, "a"), (ONE, "b"), False),  # reinstalled, or a container-based node that started again
        ((ONE, "a"), (OTHER, "a"), True),  # an exact copy, or a new mainboard
        ((ONE, "a"), (OTHER, "b"), True),  # a copy with a new machine ID
        (("", "a"), ("", "b"), False),  # no SMBIOS
        (("", "a"), (ONE, "b"), False),
        ((ONE, "a"), ("", "b"), False),
        ((ONE.upper(), "a"), (ONE, "a"), False),
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


def test_unreadable_identity_is_stored_again(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    assert stored_machine(str(tmp_path)) is None
    store_machine(str(tmp_path), Machine(ONE, "a"))
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
        told = await scene.status()
        (problem,) = (each for each in told["problems"] if each.startswith("machine: "))
        assert ONE in problem and OTHER in problem and "dra-driver machine reset" in problem
        assert not told["ready"]
        assert not Path(scene.paths.registration).exists() and not Path(scene.paths.service).exists()
        assert len(scene.api.slice_writes()) == writes and scene.cdi() == files
        directory = str(short / "kubelet/plugins" / DRIVER)
        store_machine(directory, current_machine(System(str(short / "root"))))
        await scene.until(lambda: Path(scene.paths.registration).exists())
        assert await scene.eventually(lambda: scene.prepare("a")) == ""
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
    """The files of a node whose driver is a service; the firmware is another machine's than that of the state."""

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


def test_reset_of_a_driver_in_a_pod_lets_it_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, kubeconfig=False)
    assert node.run("reset") == 0
    assert node.names() == {"driver.lock", "vendor.txt", FILE} and node.config.exists()
    assert stored_machine(str(node.state)) == Machine(OTHER, "a")


def test_reset_on_the_own_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, monkeypatch)
    assert node.run("accept") == 0
    before = node.names()
    assert node.run("reset") == 1 and "nothing is reset" in capsys.readouterr().err
    assert node.names() == before and node.kubeconfig.exists()
    assert node.run("show") == 0 and "ANOTHER" not in capsys.readouterr().out
