# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of ascend-docker-runtime: the license, the engines' settings, and the files that a removal deletes."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_host.docker_runtime import read_package
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_host.driver_packages import PackageError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.modules import ascend_runtime

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages"))

from make import make

TARGET = "usr/local/Ascend/Ascend-Docker-Runtime"
BUNDLE = "run/containerd/io.containerd.runtime.v2.task/k8s.io/c0ffee"


class Node:
    """A node in a directory, on which the package runs."""

    def __init__(
        self, directory: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.root = directory / "root"
        (self.root / "packages").mkdir(parents=True)
        (self.root / "etc/docker").mkdir(parents=True)
        for path in ("usr/local", "var/lib"):
            (self.root / path).mkdir(parents=True)
        (self.root / "etc/docker/daemon.json").write_text('{"debug": true}')
        self._run = run_here
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(ascend_runtime, "System", lambda: System(str(self.root)))
        monkeypatch.setattr(System, "sync_all", lambda _system: None)
        monkeypatch.setenv("FAKE_ROOT", str(self.root))

    def package(self, version: str) -> str:
        return f"/packages/{make(self.root / 'packages', 'runtime', version).name}"

    def run(self, version: str = "", *, check: bool = False, **options: Any) -> dict[str, Any]:
        named = {"package": self.package(version)} if version else {"state": "absent"}
        return self._run("ascend_runtime", {**named, "accept_eula": True, **options}, check=check, diff=True)

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.root)): path.read_text() if path.is_file() else "folder"
            for path in self.root.rglob("*")
            if not str(path.relative_to(self.root)).startswith(("packages", "var/log"))
        }


@pytest.fixture
def node(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, run_here, monkeypatch)


def test_package_replaced_after_verification_is_not_run(node: Node) -> None:
    """A user who can write the package replaces it right before its run: the verified copy runs."""
    path = node.root / node.package("6.0.0").lstrip("/")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    run = System.run

    def replaced(system: System, argv: Sequence[str], *words: Any, **options: Any) -> Any:
        path.write_text("exit 7\n")
        assert argv[0] != "bash" or stat.S_IMODE(Path(argv[1]).parent.stat().st_mode) == 0o700
        return run(system, argv, *words, **options)

    node.monkeypatch.setattr(System, "run", replaced)
    given = {"package": f"/packages/{path.name}", "checksum": digest, "accept_eula": True}
    done = node._run("ascend_runtime", given, check=False, diff=True)
    assert done.get("changed") and done["after"] == "6.0.0", done
    assert not (node.root / "var/lib/dra-accelerators/ascend-runtime-verified").exists()


def test_install_upgrade_and_removal_keep_engine_settings(node: Node) -> None:
    (node.root / "usr/local/Ascend/driver").mkdir(parents=True)
    before = node.files()
    dry_run = node.run("6.0.0", check=True)
    assert dry_run["changed"] and dry_run["after"] == "6.0.0" and node.files() == before
    done = node.run("6.0.0")
    assert {**done, "diff": 0} == {**dry_run, "diff": 0} and (node.root / TARGET / "ascend-docker-runtime").exists()
    assert done["program"] == f"/{TARGET}/ascend-docker-runtime" and done["managed"]
    assert json.loads((node.root / "etc/docker/daemon.json").read_text()) == {"debug": True}
    assert not [name for name in node.files() if "ascend-runtime-" in name], "the scratch file goes"
    assert not node.run("6.0.0")["changed"]
    newer = node.run("7.0.0")
    assert (newer["before"], newer["after"]) == ("6.0.0", "7.0.0") and "7.0.0" in node.files()[
        f"{TARGET}/ascend-docker-runtime"
    ]
    assert node.run("6.0.0")["changed"], "an older one takes its place as well"

    gone = node.run(check=True)
    assert gone["changed"] and (node.root / TARGET).exists()
    assert node.run()["after"] == "" and not node.run()["changed"]
    assert {name for name in node.files() if not name.startswith("var")} == {
        name for name in before if not name.startswith("var")
    }
    assert (node.root / "usr/local/Ascend/driver").exists(), "the package's own removal would have taken it along"


def test_removal_without_other_files_deletes_all_directories(node: Node) -> None:
    node.run("6.0.0")
    node.run()
    assert not (node.root / "usr/local/Ascend").exists()


def test_containers_using_the_runtime_block_removal(node: Node) -> None:
    node.run("6.0.0")
    (node.root / BUNDLE).mkdir(parents=True)
    (node.root / BUNDLE / "options.json").write_text(json.dumps({"binary_name": f"/{TARGET}/ascend-docker-runtime"}))
    for check in (True, False):
        refused = node.run(check=check)
        assert refused["error_code"] == "in-use" and "c0ffee" in refused["msg"]
    (node.root / BUNDLE / "options.json").write_text(json.dumps({"binary_name": "runc"}))
    assert node.run()["changed"]


def test_foreign_installation_is_not_removed(node: Node) -> None:
    node.run("6.0.0")
    (node.root / "var/lib/dra-accelerators/ascend-runtime.json").unlink()
    assert not node.run()["changed"] and (node.root / TARGET).exists()
    newer = node.run("7.0.0")
    assert newer["changed"] and not newer["managed"] and not node.run()["changed"]


def test_installation_interrupted_by_power_failure_is_repeated(node: Node) -> None:
    """After a power failure the files can be empty although they name the version: the record is completed only after a sync."""

    def fail(_system: System) -> None:
        raise OSError(5, "I/O error")

    node.monkeypatch.setattr(System, "sync_all", fail)
    assert node.run("6.0.0")["failed"]
    node.monkeypatch.setattr(System, "sync_all", lambda _system: None)
    (node.root / TARGET / "ascend-docker-runtime").write_text("")
    planned = node.run("6.0.0", check=True)
    # The role runs the package if the two versions differ.
    assert planned["changed"] and (planned["before"], planned["after"]) == ("", "6.0.0")
    assert node.run("6.0.0")["changed"] and (node.root / TARGET / "ascend-docker-runtime").read_text()
    assert not node.run("6.0.0")["changed"]


def test_killed_run_is_resumed_or_removed(node: Node) -> None:
    before = {name for name in node.files() if not name.startswith("var")}
    node.monkeypatch.setenv("FAKE_STOP", "runtime")
    assert node.run("6.0.0")["failed"]
    node.monkeypatch.delenv("FAKE_STOP")
    assert not node.run("6.0.0").get("failed")
    node.run()
    assert {name for name in node.files() if not name.startswith("var")} == before


def test_impossible_installation_is_rejected_before_any_change(node: Node) -> None:
    path = node.package("6.0.0")
    digest = hashlib.sha256((node.root / path.lstrip("/")).read_bytes()).hexdigest()
    before = node.files()
    for options, code in (
        ({"accept_eula": False}, "licence"),
        ({"checksum": "0" * 64}, "checksum"),
        ({"package": path.replace("linux-", "linux-other")}, "not-for-this-node"),
        ({"package": "/packages/runtime.run"}, "package-name"),
    ):
        for check in (True, False):
            assert node.run("6.0.0", check=check, **options)["error_code"] == code
    assert node.run("6.0.0", package=path.replace("6.0.0", "6.0.1"))["error_code"] == "package-missing"
    assert node.files() == before
    assert node.run("6.0.0", checksum=digest.upper())["changed"]


def elsewhere(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))
    directory.symlink_to("elsewhere")


def writable_by_all(directory: Path) -> None:
    directory.chmod(0o777)


def owned_by_other_user(directory: Path) -> None:
    os.chown(directory, 4711, 4711)


@pytest.mark.parametrize("spoil", [elsewhere, writable_by_all, owned_by_other_user])
@pytest.mark.parametrize("version", ["", "6.0.0"])
def test_directory_rejected_by_the_package_is_rejected_before_it_runs(
    node: Node, spoil: Callable[[Path], None], version: str
) -> None:
    directory = node.root / "usr/local/Ascend"
    if version:
        node.run(version)
    directory.mkdir(exist_ok=True)
    spoil(directory)
    before = node.files()
    for check in (True, False):
        refused = node.run("7.0.0", check=check)
        assert refused["error_code"] == "directory" and "/usr/local/Ascend" in refused["msg"] and refused["hint"]
    assert node.files() == before


def test_package_error_about_its_path_is_reported(node: Node) -> None:
    # Above this directory only the package knows which paths it uses.
    (node.root / "usr/local").rename(node.root / "usr/elsewhere")
    (node.root / "usr/local").symlink_to("elsewhere")
    refused = node.run("6.0.0")
    assert refused["error_code"] == "not-proved" and "has a link in it" in refused["msg"]
    assert not (node.root / "usr/elsewhere/Ascend").exists()
    (node.root / "usr/local").unlink()
    (node.root / "usr/elsewhere").rename(node.root / "usr/local")
    assert node.run("6.0.0")["changed"]


def test_package_name_is_parsed() -> None:
    found = read_package("/root/Ascend-docker-runtime_7.1.RC1_linux-aarch64.run")
    assert (found.version, found.machine) == ("7.1.RC1", "aarch64")
    with pytest.raises(PackageError):
        read_package("/root/Ascend-hdk-310p-npu-driver_1_linux-aarch64.run")
