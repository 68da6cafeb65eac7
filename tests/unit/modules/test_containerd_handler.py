# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The runtime handler of containerd: the module writes it, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.config import (
    Change,
    File,
    Settings,
    read_dump,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.daemon import (
    ContainerdError,
    Daemon,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.handler import (
    base_specification,
    candidates,
    handlers,
    text_before,
    wanted_handler,
    without_block,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.plan import changes_diff
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.toml_edit import parse
from ansible_collections.dra.accelerators.plugins.module_utils._host.systemd_unit import Unit
from ansible_collections.dra.accelerators.plugins.module_utils._host.vendor_detection import device_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed, DeviceNumber, System
from ansible_collections.dra.accelerators.plugins.modules.containerd_handler import (
    LOADED,
    apply_changes,
    diff_of,
    digest,
    is_outdated,
    loaded_files,
    record_loaded,
    remove_loaded_record,
    text_of,
)

NAME, SPECIFICATION = "dra-accelerators-driver", "/etc/containerd/dra-accelerators-driver.json"
DUMP = """
version = {version}
[plugins.'{plugin}']
  enable_cdi = true
  cdi_spec_dirs = ['/etc/cdi']
[plugins.'{plugin}'.containerd]
  default_runtime_name = 'runc'
[plugins.'{plugin}'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
  pod_annotations = ['a', "b'"]
[plugins.'{plugin}'.containerd.runtimes.runc.options]
  SystemdCgroup = true
"""
PLUGINS = [(3, "io.containerd.cri.v1.runtime"), (2, "io.containerd.grpc.v1.cri")]


def runtimes(text: str, plugin: str) -> Any:
    return parse(text, "test")["plugins"][plugin]["containerd"]["runtimes"]


@pytest.mark.parametrize(("version", "plugin"), PLUGINS)
def test_handler_equals_default_except_for_specification(version: int, plugin: str) -> None:
    text = DUMP.format(version=version, plugin=plugin)
    settings = read_dump(text)
    wanted = wanted_handler(settings, SPECIFICATION)
    assert {**handlers(settings)["runc"], "base_runtime_spec": SPECIFICATION} == wanted
    drop_in, main = candidates(settings, NAME, wanted, File("/c.toml", text), "/c.toml", "/conf.d")
    assert drop_in.path == "/conf.d/61-dra-accelerators-driver.toml" and drop_in.after is not None
    assert runtimes(drop_in.after, plugin) == {NAME: wanted}
    assert main.after is not None and main.after.startswith(text)
    assert runtimes(main.after, plugin) == {"runc": handlers(settings)["runc"], NAME: wanted}
    assert without_block(main.after, NAME) == text, "the way back is byte for byte"
    (again,) = candidates(settings, NAME, wanted, File("/c.toml", main.after), "/c.toml", None)
    assert again.after == main.after


def test_handler_with_other_program_keeps_default_options() -> None:
    text = DUMP.format(version=2, plugin=PLUGINS[1][1])
    settings = read_dump(text)
    wanted = wanted_handler(settings, options={"BinaryName": "/opt/bin/other"})
    assert "base_runtime_spec" not in wanted and "BinaryName" not in handlers(settings)["runc"]["options"]
    assert wanted["options"] == {"SystemdCgroup": True, "BinaryName": "/opt/bin/other"}
    (drop_in, _main) = candidates(settings, "other", wanted, File("/c.toml", text), "/c.toml", "/conf.d")
    assert drop_in.path == "/conf.d/61-other.toml" and drop_in.after is not None
    assert runtimes(drop_in.after, PLUGINS[1][1]) == {"other": wanted}


def test_candidates_include_hidden_handlers() -> None:
    plugin = PLUGINS[1][1]
    settings = read_dump(DUMP.format(version=2, plugin=plugin))
    wanted, site = wanted_handler(settings, SPECIFICATION), File("/c.toml", "# words\nversion = 2\n")
    (main,) = candidates(settings, NAME, wanted, site, "/c.toml", None, others=handlers(settings))
    assert main.after is not None and runtimes(main.after, plugin) == {"runc": handlers(settings)["runc"], NAME: wanted}
    assert text_before(main.after, NAME) == site.text


def test_candidates_without_main_file_create_one() -> None:
    text = DUMP.format(version=3, plugin=PLUGINS[0][1])
    settings = read_dump(text)
    (made,) = candidates(settings, NAME, wanted_handler(settings, SPECIFICATION), None, "/c.toml", None)
    assert made.before is None and made.after is not None and parse(made.after, "test")["version"] == 3
    assert text_before(made.after, NAME) is None, "a file that was made for it goes with it"
    assert text_before("version = 3\n", NAME) == "version = 3\n"
    with pytest.raises(AcceleratorError, match="no runtime handler crun"):
        wanted_handler(read_dump(text.replace("default_runtime_name = 'runc'", "default_runtime_name = 'crun'")), "/s")


RULES = [
    {"allow": True, "type": "c", "major": 195, "access": "rwm"},
    {"allow": True, "type": "c", "major": 10, "minor": 77, "access": "rwm"},
]


def test_base_specification_allows_only_given_devices() -> None:
    described = {
        "process": {"rlimits": [1], "noNewPrivileges": True, "capabilities": {"bounding": []}},
        "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}, "maskedPaths": ["/proc/kcore"]},
    }
    found = json.loads(base_specification(json.dumps(described), RULES))
    assert found["linux"]["resources"]["devices"] == [{"allow": False, "access": "rwm"}, *RULES]
    assert found["process"] == {"noNewPrivileges": True, "capabilities": {"bounding": []}}
    assert found["linux"]["maskedPaths"] == ["/proc/kcore"]
    for wrong in ("no JSON", "{}", "[]"):
        with pytest.raises(AcceleratorError, match="not an OCI specification"):
            base_specification(wrong, RULES)


class Host(System):
    """A host with these lines in /proc/devices and these device nodes."""

    def __init__(self, devices: str, nodes: dict[str, tuple[str, int, int]]) -> None:
        super().__init__("/nonexistent")
        self.devices, self.nodes = devices, nodes

    def read_text(self, path: str) -> str:
        if path != "/proc/devices" or not self.devices:
            raise FileNotFoundError(path)
        return self.devices

    def list_directory(self, path: str) -> tuple[str, ...]:
        return tuple(posixpath.basename(node) for node in self.nodes if posixpath.dirname(node) == path)

    def device_number(self, path: str) -> DeviceNumber | None:
        return DeviceNumber(*self.nodes[path]) if path in self.nodes else None


PROC_DEVICES = """Character devices:
  1 mem
 10 misc
 21 sg
195 nvidia-frontend
234 nvidia-caps
239 devdrv-cdev
240 vdevdrv-cdev
241 vfio
246 watchdog
510 nvidia-uvm

Block devices:
  8 nvidia-not-a-character-device
"""


def majors(rules: list[dict[str, Any]]) -> list[tuple[int, int | None]]:
    assert all(rule["allow"] and rule["type"] == "c" for rule in rules)
    return [(rule["major"], rule.get("minor")) for rule in rules]


def test_device_rules_match_vendor_devices() -> None:
    nodes = {
        "/dev/nvidia0": ("c", 195, 0),
        "/dev/nvidiactl": ("c", 195, 255),
        "/dev/davinci_manager": ("c", 10, 77),
        "/dev/sg0": ("c", 21, 0),
    }
    host = Host(PROC_DEVICES, nodes)
    assert majors(device_rules(host, ["nvidia"])) == [(195, None), (234, None), (510, None)]
    assert majors(device_rules(host, ["ascend"])) == [(239, None), (240, None), (10, 77)]
    assert majors(device_rules(host, ["nvidia", "ascend"])) == [
        (195, None),
        (234, None),
        (239, None),
        (240, None),
        (510, None),
        (10, 77),
    ]
    assert device_rules(host, []) == []


def test_device_rules_without_driver_allow_nothing() -> None:
    assert device_rules(Host("", {}), ["nvidia", "ascend"]) == []
    assert device_rules(Host("Character devices:\n  1 mem\n", {}), ["nvidia", "ascend"]) == []


@pytest.mark.parametrize("made_by", ["containerd_handler", "runtime_cdi"])
def test_diff_has_no_registry_password(made_by: str) -> None:
    registry = (
        "[plugins.'io.containerd.grpc.v1.cri'.registry.configs.'registry.example.com'.auth]\n"
        '  username = "puller"\n  password = "s3cr3t-value-1"\n  auth = "cHVsbGVyOnMzY3IzdC12YWx1ZS0x"\n'
        "[plugins.'io.containerd.grpc.v1.cri'.registry.headers]\n  X-Key = ['k3y-of-the-mirror']\n"
    )
    before = f"version = 2\n{registry}"
    changes = [
        Change("/c.toml", before, f"{before}[plugins.'io.containerd.grpc.v1.cri']\n  enable_cdi = true\n"),
        Change("/d.toml", None, "enable_cdi = true\n"),
        Change("/e.toml", 'password = "s3cr3t-value-1"\n', None),
    ]
    diff = json.dumps(diff_of(changes) if made_by == "containerd_handler" else changes_diff(changes))
    assert "+  enable_cdi = true" in diff and "/d.toml" in diff and "/e.toml" in diff
    for secret in ("s3cr3t-value-1", "cHVsbGVyOnMzY3IzdC12YWx1ZS0x", "k3y-of-the-mirror"):
        assert secret not in diff


class RestartedDaemon(Daemon):
    """A containerd that starts, or fails to start with the change."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self.system = System()

    def restart(self, settings: Settings) -> str:
        return self.problems.pop(0)


@pytest.mark.parametrize("problems", [[""], ["refused", ""]])
def test_changed_configuration_keeps_owner_mode_and_attributes(tmp_path: Path, problems: list[str]) -> None:
    config = tmp_path / "config.toml"
    config.write_text("version = 2\n")
    os.chown(config, 1234, 1235)
    config.chmod(0o640)
    os.setxattr(config, "user.site", b"kept")
    change = Change(str(config), "version = 2\n", "version = 2\nchanged = true\n")
    fails = bool(problems[0])
    with pytest.raises(ContainerdError) if fails else contextlib.nullcontext():
        apply_changes(
            System(), RestartedDaemon(problems), read_dump(DUMP.format(version=2, plugin=PLUGINS[1][1])), [change]
        )
    status = config.stat()
    assert config.read_text() == (change.before if fails else change.after)
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (1234, 1235, 0o640)
    assert os.getxattr(config, "user.site") == b"kept"


def test_failed_write_restores_earlier_files(tmp_path: Path) -> None:
    """A change fails, as on a full disk: the files are restored, because containerd would read a partial change at its next start."""
    first, second, third = (tmp_path / name for name in ("a.json", "config.toml", "b/c.toml"))
    second.write_text("version = 2\n")
    third.parent.write_text("no directory")
    changes = [
        Change(str(first), None, "{}\n"),
        Change(str(second), "version = 2\n", "version = 2\nchanged = true\n"),
        Change(str(third), None, "version = 2\n"),
    ]
    with pytest.raises(
        ContainerdError, match=r"c.toml cannot be written: Not a directory. The previous files were restored"
    ):
        apply_changes(System(), RestartedDaemon([]), read_dump(DUMP.format(version=2, plugin=PLUGINS[1][1])), changes)
    assert not first.exists() and second.read_text() == "version = 2\n"


@pytest.mark.parametrize("restarts", [True, False])
def test_failed_restore_is_reported_after_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """A file cannot be restored: the other files are restored, and containerd is restarted again if it was restarted."""
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    changes = [Change(str(path), "version = 2\n", "version = 3\n") for path in (first, second)]
    if not restarts:
        (tmp_path / "file").write_text("no directory")
        changes.append(Change(str(tmp_path / "file/c.toml"), None, "version = 2\n"))
    for path in (first, second):
        path.write_text("version = 2\n")
    replace_text = System.replace_text

    def replace(system: System, path: str, text: str | None, **options: Any) -> None:
        if (path, text) == (str(second), "version = 2\n"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_text(system, path, text, **options)

    monkeypatch.setattr(System, "replace_text", replace)
    problems = ["refused", "refused again"]
    with pytest.raises(ContainerdError) as caught:
        apply_changes(
            System(), RestartedDaemon(problems), read_dump(DUMP.format(version=2, plugin=PLUGINS[1][1])), changes
        )
    message = caught.value.message
    cause = "refused" if restarts else "Not a directory"
    assert message.index(cause) < message.index(f"could not be restored: {second} (No space left on device)")
    assert first.read_text() == "version = 2\n"
    assert problems == ([] if restarts else ["refused", "refused again"])


class RunningDaemon(Daemon):
    """A containerd whose main process is this test. ``started`` is its start by the clock, which can be set."""

    def __init__(self, root: Path, started: float) -> None:
        super().__init__(
            System(str(root)), command="containerd", config="/config.toml", service="containerd.service", timeout=1
        )
        self.began = started
        self.started = "boot-1 1 100"

    @property
    def config(self) -> str:
        return "/config.toml"

    def process(self) -> tuple[bool, float]:
        return True, self.began

    def identity(self) -> str:
        return self.started


@pytest.fixture
def running(tmp_path: Path) -> RunningDaemon:
    (tmp_path / "config.toml").write_text("version = 2\n")
    (tmp_path / "spec.json").write_text("{}\n")
    return RunningDaemon(tmp_path, (tmp_path / "spec.json").stat().st_mtime + 60)


def load(daemon: RunningDaemon) -> None:
    """Note the files of a containerd that has just been restarted."""
    paths = ("/config.toml", "/spec.json")
    record_loaded(daemon.system, daemon, {path: digest(text_of(daemon, path)) for path in paths})


def outdated(daemon: RunningDaemon, **options: bool) -> bool:
    return is_outdated(daemon, daemon.system, "/spec.json", loaded_files(daemon.system, daemon), **options)


@pytest.mark.parametrize("step", [-7200.0, 0.0, 7200.0])
def test_changed_files_are_found_after_clock_step(running: RunningDaemon, tmp_path: Path, step: float) -> None:
    load(running)
    running.began += step
    assert not outdated(running)
    before = (tmp_path / "spec.json").stat()
    (tmp_path / "spec.json").write_text("{1}\n")
    os.utime(tmp_path / "spec.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert outdated(running) and outdated(running, by_times=False), "a handler that was removed and not unloaded"
    (tmp_path / "spec.json").unlink()
    assert outdated(running)


def test_restored_file_with_older_time_is_not_loaded(running: RunningDaemon, tmp_path: Path) -> None:
    """Without a note, as after a restart by another program, an older file counts as not loaded only by its time."""
    running.began -= 120
    os.utime(tmp_path / "spec.json", (1.0, 1.0))
    os.utime(tmp_path / "config.toml", (1.0, 1.0))
    assert outdated(running) and not outdated(running, by_times=False)
    running.began += 120
    assert not outdated(running)


@pytest.mark.parametrize("other", ["", "companions"])
def test_removal_of_the_handler_leaves_no_note_and_no_empty_directory(
    running: RunningDaemon, tmp_path: Path, other: str
) -> None:
    load(running)
    directory = (tmp_path / LOADED.lstrip("/")).parent
    (directory / other).mkdir(exist_ok=True)
    remove_loaded_record(running.system, running)
    assert [path.name for path in directory.parent.rglob("*")] == ([directory.name, other] if other else [])
    remove_loaded_record(running.system, running)


@pytest.mark.parametrize("change", ["another process", "damaged"])
def test_note_of_other_process_or_damaged_is_ignored(running: RunningDaemon, tmp_path: Path, change: str) -> None:
    load(running)
    note = tmp_path / LOADED.format(service=running.service).lstrip("/")
    assert note.stat().st_mode & 0o777 == 0o600
    if change == "damaged":
        note.write_text("{")
    else:
        running.started = "boot-1 2 900"
    assert loaded_files(running.system, running) == {}
    running.began += 7200
    assert not outdated(running)


def test_identity_of_a_process_is_boot_pid_and_start(tmp_path: Path) -> None:
    class Shown(System):
        def run(self, argv: Sequence[str], timeout: float, **options: Any) -> Completed:
            return Completed(0, "42\n", "")

    for path, text in {
        "proc/42/stat": "42 (a) b) S " + " ".join(map(str, range(4, 60))),
        "proc/sys/kernel/random/boot_id": "boot-1\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    unit = Unit(Shown(str(tmp_path)), service="containerd.service", timeout=1)
    assert unit.identity() == "boot-1 42 22"
    (tmp_path / "proc/42/stat").unlink()
    assert unit.identity() == ""
