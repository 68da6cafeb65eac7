# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Power cuts during each write of node state, on ext4 and XFS: afterwards there is the previous or the new state, and
after the writer has returned, the new one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.apply import CopiedFiles
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.config import Change
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.plan import (
    Record as ContainerdRecord,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.plan import read_record
from ansible_collections.dra.accelerators.plugins.module_utils._host import driver_installation, stopped_services
from ansible_collections.dra.accelerators.plugins.module_utils._layout import layout_module
from ansible_collections.dra.accelerators.plugins.module_utils._packages import (
    dnf,
    rpm_base,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages import (
    kept_packages as packages_kept_packages,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.health import repair_marks
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition import (
    progress as repartition_progress,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition import (
    record as repartition_record,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.settings.settings_record import (
    RecordedValues,
    SettingsRecord,
    write_record,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.numbering import Numbering
from ansible_collections.dra.accelerators.plugins.modules import ascend_runtime, cdi_spec, docker_runtime, file_set
from dra_driver import machine, renew_token
from dra_driver.claims.companion_services import ServiceManager
from dra_driver.core.health.conditions import Ends, Severity, Sign
from dra_driver.core.health.tracker import TrackedFault
from dra_driver.core.host.companions import Companion
from dra_driver.supervisors.health import HealthSupervisor
from dra_driver.supervisors.interface_change import InterfaceSwitch
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
    """Write files and links, and remove one, with the module that roles use."""
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
    """Write the record of a driver's installer."""
    path = "/var/lib/dra-accelerators/nvidia/record.json"
    driver_installation.keep_record(System(str(node)), path, TEXT.format(version), doing="install")


def write_stopped_services(node: Path, version: int) -> None:
    """Write the record of services to restart."""
    (node / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (node / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
    stopped_services._write_record(System(str(node)), stopped_services.record_path("nvidia"), [f"{version}.service"])


def write_containerd_files(node: Path, version: int) -> None:
    """Write containerd's configuration and its backup, and a file that a role adds, as for CRI-O and Docker Engine."""
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
    files.apply_changes(changes)


def write_administrator_file(node: Path, version: int) -> None:
    """Write a container runtime's configuration, as the modules containerd_handler and docker_runtime do."""
    System().replace_text(str(node / "config.toml"), TEXT.format(version))


def write_settings(node: Path, version: int) -> None:
    """Write the record of persistent settings."""
    noted = {f"GPU-{version}": RecordedValues({"power_limit": version}, {"power_limit": 0})}
    write_record(System(str(node)), "/var/lib/dra-accelerators/settings.json", SettingsRecord("boot-1", noted))


def write_repartition_steps(node: Path, version: int) -> None:
    """Write the steps of repartitions."""
    taken = repartition_progress.StartedStep(float(version), "op", ("GPU-1",), repartition_record.APPLYING)
    repartition_progress.add(System(str(node)), "/var/lib/kubelet/plugins/gpu.nvidia.com", taken)


def write_repartition_record(node: Path, version: int) -> None:
    """Write the record of a repartition, which holds devices."""
    record = repartition_record.Record(f"op-{version}", ("GPU-1",), repartition_record.APPLYING, 1.0, (), ())
    repartition_record.write(System(str(node)), "/var/lib/kubelet/plugins/gpu.nvidia.com", record)


def write_gpu_numbers(node: Path, version: int) -> None:
    """Write the numbers of GPUs, which are in the names of devices."""
    numbers = Numbering(System(str(node)))
    numbers.use("/var/lib/kubelet/plugins/gpu.nvidia.com", writes=True)
    numbers.index(f"0000:0{version}:00.0", version)
    numbers.name(f"0000:0{version}:00.0", version)
    numbers.write()


def write_plugin_note(node: Path, version: int) -> None:
    """Write the resources that were allocated through the kubelet's device-plugin API."""
    unused: Any = None
    interface_switch = InterfaceSwitch(
        directory="/var/lib/kubelet/plugins/gpu.nvidia.com",
        system=System(str(node)),
        driver="gpu.nvidia.com",
        node_name="node-1",
        api=unused,
        pod_resources="",
        cdi_file="",
        conditions=unused,
    )
    interface_switch.record_resources([f"nvidia.com/{version}"])


def write_repair_mark(node: Path, version: int) -> None:
    """Write the mark with which another program reports a repaired device to the driver."""
    directory = node / "var/lib/kubelet/plugins/gpu.nvidia.com"
    directory.mkdir(parents=True, exist_ok=True)
    repair_marks.mark(str(directory), [f"GPU-{version}"], repair_marks.REPAIRED)


def write_machine(node: Path, version: int) -> None:
    """Write the identity of the state's machine, in an existing and in a new directory."""
    for directory in ("gpu.nvidia.com", f"gpu-{version}.nvidia.com"):
        machine.store_machine(str(node / "plugins" / directory), machine.Machine(f"product-{version}", "id"))


def write_health(node: Path, version: int) -> None:
    """Write the faults of devices. The mark of a repair is removed after its effect is on the disk."""
    directory = "/var/lib/kubelet/plugins/gpu.nvidia.com"
    unused: Any = None
    health = HealthSupervisor(
        driver="gpu.nvidia.com",
        directory=directory,
        system=System(str(node)),
        boot_id="boot-1",
        effects={},
        snapshots=unused,
        hardware_states=unused,
        scan_requested=unused,
        reporter=unused,
        claims=unused,
    )

    async def keep() -> None:
        health._load()
        sign = Sign("error", Severity.FAILED, f"Error {version}.", "Restart the machine.", Ends.RESTART, str(version))
        health._faults["GPU-1"] = (TrackedFault(sign, float(version), float(version)),)
        health._keep()
        assert health._writing is not None
        await health._writing

    asyncio.run(keep())


def token(version: int) -> str:
    """Return a token that is due for renewal."""
    claims = {
        "sub": "system:serviceaccount:dra-accelerators:driver",
        "iat": version,
        "exp": version + 3000,
        "kubernetes.io": {"node": {"name": "node-1", "uid": "u-1"}},
    }
    return ".".join(
        base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in ({}, claims, {})
    )


def write_token(node: Path, version: int) -> None:
    """Write the kubeconfig with a renewed token. A role writes the first one."""
    kubeconfig = node / "kubeconfig"
    if version == 1:
        clusters = [{"name": "a", "cluster": {"server": "https://127.0.0.1:1"}}]
        context = {"name": "a", "context": {"cluster": "a", "user": "a"}}
        users = [{"name": "a", "user": {"token": token(1)}}]
        content = {"current-context": "a", "contexts": [context], "clusters": clusters, "users": users}
        kubeconfig.write_text(json.dumps(content))
        return
    with mock.patch.object(renew_token, "request_token", lambda *_arguments, **_more: token(version)):
        assert renew_token.renew(str(kubeconfig), lifetime=3000, system=System()).renewed


def write_companion_files(node: Path, version: int) -> None:
    """Write the files of an MPS daemon, of an existing and of a new one."""
    for name in ("claim-1", f"claim-{version}"):
        companion = Companion("mps", name, ("nvidia.com/gpu=0",), {"VERSION": str(version)}, (f"set {version}",))
        companions = ServiceManager(System(str(node)))
        companions._write(companion, ".commands", companion.commands_text)
        companions._write(companion, ".environment", companion.environment_text)


def write_ascend_runtime_record(node: Path, version: int) -> None:
    """Write the record of the Ascend Docker runtime."""
    record = ascend_runtime.Record(("/usr/local/Ascend",), unfinished=version == 1)
    ascend_runtime.keep_record(System(str(node)), "/var/lib/dra-accelerators/ascend-runtime.json", record)


def write_docker_record(node: Path, version: int) -> None:
    """Write the record of a runtime in Docker's configuration, and that configuration."""
    (node / "docker").mkdir(exist_ok=True)
    options = {name: option.get("default") for name, option in docker_runtime.argument_spec().items()}
    docker = docker_runtime.Docker(
        {**options, "name": "ascend", "config": str(node / "docker/daemon.json"), "records": str(node / "lib")}
    )
    docker.keep(docker_runtime.Record(TEXT.format(0), str(version), str(version - 1)))
    docker.put(TEXT.format(version))


def write_package_files(node: Path, version: int) -> None:
    """Write package sources and keys, and the packages that are kept for a rollback."""
    system = System(str(node))
    changes = [
        packages_kept_packages.FileChange("/etc/apt/sources.list.d/x.sources", None, TEXT.format(version)),
        packages_kept_packages.FileChange("/etc/apt/preferences.d/x", None, "x\n" if version == 1 else None),
    ]
    packages_kept_packages.write_files(system, changes)
    unused: Any = None
    store = packages_kept_packages.PackageStore(
        system, unused, "/var/lib/dra-accelerators/x/packages", keep=True, title="", hint=""
    )
    store.ready()
    for name in ("/brought/same.deb", f"/brought/{version}.deb"):
        if not system.exists(name):
            system.write_atomic(name, TEXT.format(version).encode())
        store.take({"x": name})


def write_rpm_keys(node: Path, version: int) -> None:
    """Write the keys that rpm trusts for this collection, and a running import."""
    (node / "key.asc").write_text("key\n")

    class Tool(dnf.Dnf):
        """An rpm that imports a key."""

        imported: ClassVar = {"gpg-pubkey-00000000-0"}

        def _keys(self) -> set[str]:
            return set(self.imported)

        def _end_import(self) -> None:
            """Keep the record of the import, as in a run that is killed then."""

        def said(self, _argv: Any, **_more: Any) -> str:
            self.imported.add(f"gpg-pubkey-0000000{version}-0")
            return ""

    places = SimpleNamespace(key="/key.asc")
    with mock.patch.object(rpm_base.openpgp, "fingerprints", lambda _text: [f"0000000{version}"]):
        rpm_base.RpmTool.trust(Tool(System(str(node)), timeout=1.0), places)  # type: ignore[arg-type]


def write_cdi_file(node: Path, version: int) -> None:
    """Write a CDI file that survives claims and boots."""
    wanted = {
        "cdiVersion": "0.6.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": str(version), "containerEdits": {"env": [f"A={version}"]}}],
    }
    module: Any = SimpleNamespace(
        params={"kind": "nvidia.com/gpu", "directory": "/etc/cdi", "state": "present", "state_path": None},
        check_mode=False,
    )

    def backend(_system: System) -> Any:
        return SimpleNamespace(driver_name="gpu.nvidia.com", use_number_file=lambda _directory: None)

    with (
        mock.patch.object(cdi_spec, "content_of", lambda *_arguments: (wanted, [])),
        mock.patch.object(cdi_spec, "state_directory_of", lambda *_arguments: ""),
        mock.patch.dict(cdi_spec.BACKENDS, {"nvidia": backend}),
    ):
        assert cdi_spec.apply_state(module, System(str(node)), "nvidia")[0]["changed"]


def write_layout_checkpoint(node: Path, version: int) -> None:
    """Write the checkpoint from which a layout is restored."""
    module: Any = SimpleNamespace(
        params={"state_path": "", "checkpoint_file": "/root/layout.json"}, check_mode=False, warn=lambda _text: None
    )
    backend: Any = SimpleNamespace(vendor="nvidia")
    with (
        mock.patch.object(
            layout_module, "scan_node", lambda *_arguments: SimpleNamespace(devices=(), faulty=(), prepared=())
        ),
        mock.patch.object(layout_module, "to_text", lambda *_arguments: TEXT.format(version)),
    ):
        assert layout_module.checkpoint_devices(module, backend, System(str(node)))["changed"]


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
        write_administrator_file,
        write_settings,
        write_repartition_steps,
        write_repartition_record,
        write_gpu_numbers,
        write_plugin_note,
        write_repair_mark,
        write_machine,
        write_health,
        write_token,
        write_companion_files,
        write_ascend_runtime_record,
        write_docker_record,
        write_package_files,
        write_rpm_keys,
        write_cdi_file,
        write_layout_checkpoint,
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
    """Without a sync of its data a new file is empty after the cut: the test harness detects it."""
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
