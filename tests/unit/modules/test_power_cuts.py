# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Power cuts under each writer of node state, on ext4 and XFS: afterwards the previous state is there or the new one, and the new one once the
writer has returned."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dra.accelerators.plugins.module_utils import _driver_install, _stopped_services
from ansible_collections.dra.accelerators.plugins.module_utils._containerd import Change
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_plan import Record as ContainerdRecord
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_plan import read_record
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_switch import CopiedFiles
from ansible_collections.dra.accelerators.plugins.module_utils.core import repartition_record, repartition_steps
from ansible_collections.dra.accelerators.plugins.module_utils.core.nvidia.numbering import Numbering
from ansible_collections.dra.accelerators.plugins.module_utils.core.settings_record import (
    Noted,
    SettingsRecord,
    write_record,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System
from ansible_collections.dra.accelerators.plugins.modules import containerd_handler, docker_runtime, file_set
from dra_driver.supervisors.ways import Ways
from driver_node import NEWER, OLDER
from driver_node import Node as NvidiaNode
from test_ascend_driver import BOTH
from test_ascend_driver import NEWER as ASCEND_NEWER
from test_ascend_driver import Node as AscendNode

from tests.prove.power_cuts import KINDS, Disk

pytestmark = pytest.mark.prove

TEXT = "level = {0}\n" * 3


@pytest.fixture(params=sorted(KINDS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path, request.param)
    with made.mounted():
        yield made


def ansible_module(folder: Path) -> AnsibleModule:
    with patch_module_args({"_ansible_remote_tmp": str(folder / "remote"), "_ansible_keep_remote_files": False}):
        return AnsibleModule(argument_spec={})


def write_files(node: Path, version: int) -> None:
    """Files, links, and a removal, with the module that roles write them with."""
    etc = node / "etc/dra-accelerators"
    files: list[dict[str, Any]] = [
        {"path": str(etc / "driver.yaml"), "content": TEXT.format(version)},
        {"path": str(etc / "kubeconfig"), "secret_content": TEXT.format(version), "mode": "0600"},
        {"path": str(node / "opt/current"), "state": "link", "target": f"releases/{version}"},
        {"path": str(etc / "only-1"), "content": "x\n"}
        if version == 1
        else {"path": str(etc / "only-1"), "state": "absent"},
        {"path": str(etc / f"more/{version}"), "content": "x\n"},
    ]
    with patch_module_args({"files": files}), pytest.raises(SystemExit) as ended:
        file_set.main()
    assert ended.value.code == 0


def write_installer_record(node: Path, version: int) -> None:
    """The record of a driver's installer."""
    _driver_install.keep_record(System(str(node)), "/var/lib/dra-accelerators/nvidia/record.json", TEXT.format(version))


def write_stopped_services(node: Path, version: int) -> None:
    """The services that are to be started again."""
    (node / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (node / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
    _stopped_services._keep(System(str(node)), _stopped_services.record_of("nvidia"), [f"{version}.service"])


def write_containerd_files(node: Path, version: int) -> None:
    """containerd's configuration and its backup, and as CRI-O's and Docker Engine's files, one that a role adds."""
    (node / "etc/containerd").mkdir(parents=True, exist_ok=True)
    config = node / "etc/containerd/config.toml"
    files = CopiedFiles(ansible_module(node), System(), str(node / "record"), read_record)
    if version == 1:
        files.put(str(config), TEXT.format(1))
        return
    changes = [
        Change(str(config), TEXT.format(1), TEXT.format(2)),
        Change(str(config.with_name("added.toml")), None, TEXT.format(2)),
    ]
    files.copy(changes, ContainerdRecord())
    files.make(changes)


def write_handler_file(node: Path, version: int) -> None:
    """containerd's configuration, by the module containerd_handler."""
    containerd_handler.write(System(), str(node / "config.toml"), TEXT.format(version))


def write_settings(node: Path, version: int) -> None:
    """The record of persistent settings."""
    noted = {f"GPU-{version}": Noted({"power_limit": version}, {"power_limit": 0})}
    write_record(System(str(node)), "/var/lib/dra-accelerators/settings.json", SettingsRecord("boot-1", noted))


def write_repartition_steps(node: Path, version: int) -> None:
    """The steps of repartitions."""
    taken = repartition_steps.Taken(float(version), "op", ("GPU-1",), repartition_record.APPLYING)
    repartition_steps.add(System(str(node)), "/var/lib/kubelet/plugins/gpu.nvidia.com", taken)


def write_repartition_record(node: Path, version: int) -> None:
    """The record of a repartition, which holds devices."""
    record = repartition_record.Record(f"op-{version}", ("GPU-1",), repartition_record.APPLYING, 1.0, (), ())
    repartition_record.write(System(str(node)), "/var/lib/kubelet/plugins/gpu.nvidia.com", record)


def write_gpu_numbers(node: Path, version: int) -> None:
    """The numbers of GPUs, which names of devices contain."""
    numbers = Numbering(System(str(node)))
    numbers.use("/var/lib/kubelet/plugins/gpu.nvidia.com", writes=True)
    numbers.index(f"0000:0{version}:00.0", version)
    numbers.write()


def write_plugin_note(node: Path, version: int) -> None:
    """The resources that were given away through the kubelet's device-plugin API."""
    unused: Any = None
    ways = Ways(
        directory="/var/lib/kubelet/plugins/gpu.nvidia.com",
        system=System(str(node)),
        driver="gpu.nvidia.com",
        node_name="node-1",
        api=unused,
        pod_resources="",
        cdi_file="",
        conditions=unused,
    )
    ways.note([f"nvidia.com/{version}"])


def write_docker_file(node: Path, version: int) -> None:
    """Docker Engine's configuration."""
    docker: Any = SimpleNamespace(system=System())
    docker_runtime.Docker.write(docker, str(node / "daemon.json"), TEXT.format(version), 0o644)


def read_tree(node: Path) -> object:
    """Return the content of each file and link, without temporary files."""
    found = {}
    for path in sorted(node.rglob("*")):
        if path.name == ".journal" or path.name.endswith(".tmp"):
            continue
        if path.is_symlink():
            found[str(path.relative_to(node))] = str(path.readlink())
        elif path.is_file():
            found[str(path.relative_to(node))] = path.read_text()
    return found


WRITERS = {
    writer.__name__: writer
    for writer in (
        write_files,
        write_installer_record,
        write_stopped_services,
        write_containerd_files,
        write_handler_file,
        write_settings,
        write_repartition_steps,
        write_repartition_record,
        write_gpu_numbers,
        write_plugin_note,
        write_docker_file,
    )
}


def check_cuts(disk: Disk, write: Callable[[Path, int], None]) -> None:
    """Write a state and sync it, then write the next one and cut the power at each step."""
    write(disk.node, 1)
    disk.sync()
    before = read_tree(disk.node)
    cuts = list_cuts(disk, lambda: write(disk.node, 2))
    after = read_tree(disk.node)
    assert isinstance(before, dict) and isinstance(after, dict) and before != after
    for step, found in cuts:
        assert isinstance(found, dict)
        for path in set(before) | set(after) | set(found):
            assert found.get(path) in (before.get(path), after.get(path)), (step, path)
    assert [found for step, found in cuts if step == "end"] == [after, after]


def list_cuts(disk: Disk, work: Callable[[], object]) -> list[tuple[str, object]]:
    return [(step, read_tree(node)) for step, node in disk.cut_at_each_step(work)]


@pytest.mark.parametrize("name", WRITERS)
def test_power_cut_leaves_previous_or_new_state(disk: Disk, name: str) -> None:
    check_cuts(disk, WRITERS[name])


def test_missing_sync_is_found(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sync of its data a new file is empty after the cut: the harness sees it."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    with pytest.raises(AssertionError):
        check_cuts(disk, lambda node, version: System(str(node)).write_atomic(f"/{version}", b"x" * 100))


def kept_packages(node: Path, vendor: str) -> list[dict[str, str]]:
    """Return the packages that an installer's record names, each with its file's path and its digest."""
    path = node / f"var/lib/dra-accelerators/{vendor}/record.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    if vendor == "ascend":
        return [each for name in ("packages", "former") for each in content.get(name, {}).values()]
    return [each for name in ("now", "former") for each in content.get(name, {}).get("packages", {}).values()]


def check_kept_packages(node: Path, vendor: str) -> int:
    """Verify the digests of the packages that a record names. Return their number."""
    packages = kept_packages(node, vendor)
    for each in packages:
        digest = hashlib.sha256((node / each["path"].lstrip("/")).read_bytes()).hexdigest()
        assert digest == each["checksum"], each
    return len(packages)


def test_power_cut_in_nvidia_installation_leaves_packages_of_its_record(
    disk: Disk, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NvidiaNode(disk.node, run_here, monkeypatch)
    assert not node.run(OLDER).get("failed")
    disk.sync()
    counts = {}
    for step, after in disk.cut_at_each_step(lambda: node.run(NEWER), "var/lib/dra-accelerators"):
        counts[step] = check_kept_packages(after, "nvidia")
    assert counts["end"] > max(count for step, count in counts.items() if step != "end") / 2 > 0


def test_power_cut_in_ascend_installation_leaves_packages_of_its_record(
    disk: Disk, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = AscendNode(disk.node, run_here, monkeypatch)
    assert not node.run(BOTH).get("failed")
    disk.sync()
    root = disk.node / "root"
    for step, after in disk.cut_at_each_step(lambda: node.run(ASCEND_NEWER), "root/var/lib/dra-accelerators"):
        count = check_kept_packages(after / root.name, "ascend")
        assert count == 4 or step != "end"
