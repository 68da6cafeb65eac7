# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two runs on one node: the second one changes nothing, not even in check mode, and the lock leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_ascend_driver
import test_ascend_runtime
from ansible_collections.dra.accelerators.plugins.module_utils._host import single_run
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from driver_node import CATALOG, NEWER
from test_nvidia_driver_crashes import SERVICES, Make, make  # noqa: F401  a fixture

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "/var/lib/dra-accelerators"
#: Modules with a record that do not use the lock, because they lock the devices themselves.
DEVICE_LOCKS = {"nvidia_gpu"}
#: Options that each module needs in addition to its defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "ascend_runtime": {"package": "/x.run"},
    "nvidia_driver": {"catalog": CATALOG},
    "docker_runtime": {"name": "x", "program": "/bin/x"},
}
Result = dict[str, Any]


def source(name: str) -> str:
    return (ROOT / f"plugins/modules/{name}.py").read_text("utf-8")


NAMES = [path.stem for path in sorted((ROOT / "plugins/modules").glob("*.py"))]
LOCKED = [name for name in NAMES if "run_alone(" in source(name)]


def test_each_module_with_a_record_on_the_node_takes_the_lock() -> None:
    """A module has a record if an option has a default in the directory, or if it imports an installer with a record."""
    option = re.compile(r'"records?": \{"type": "path"')
    installers = re.compile(r"_ascend_host\.package_installer|_nvidia_host\.driver_installer|_packages\.group_module")
    found = {name for name in NAMES if option.search(source(name)) or installers.search(source(name))}
    assert found - DEVICE_LOCKS == {*LOCKED}


@pytest.mark.parametrize("is_check", [True, False])
@pytest.mark.parametrize("name", LOCKED)
def test_module_changes_nothing_during_another_run(
    name: str, tmp_path: Path, run_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, *, is_check: bool
) -> None:
    module = importlib.import_module(f"ansible_collections.dra.accelerators.plugins.modules.{name}")
    monkeypatch.setattr(module, "System", lambda: System(str(tmp_path)))
    # The modules that read TOML look for the library first.
    monkeypatch.setattr(module, "reader", lambda: "tomllib", raising=False)
    with single_run.hold_lock(System(str(tmp_path)), FOLDER, is_check=False):
        before = sorted(tmp_path.rglob("*"))
        done = run_here(name, OPTIONS.get(name, {}), check=is_check)
        assert done["error_code"] == "other-run" and str(os.getpid()) in done["msg"], done
        assert sorted(tmp_path.rglob("*")) == before
    assert not (tmp_path / FOLDER.lstrip("/")).exists()


def test_second_run_does_not_disturb_live_nvidia_driver_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The second run repairs no record, and starts no service that the live run has stopped."""
    node = make()
    act = node.apt.act
    seen: list[Any] = []

    def act_meanwhile(*words: Any, **options: Any) -> str:
        if not seen:
            running, record = {*node.machine.running}, node.record()
            seen.append(None)
            seen.extend(node.run(NEWER, services=SERVICES, check=is_check) for is_check in (True, False))
            assert node.machine.running == running and node.record() == record and record["doing"] == "install"
        return act(*words, **options)

    monkeypatch.setattr(node.apt, "act", act_meanwhile)
    # The results of the inner runs are on the same output.
    monkeypatch.setattr(node, "_run", lambda name, options, **more: outputs(name, options, **more))
    first = node.run(NEWER, services=SERVICES)
    assert [each["error_code"] for each in seen[1:]] == ["other-run", "other-run"]
    assert not first.get("failed") and node.machine.loaded() == NEWER and node.machine.running == {*SERVICES}
    assert not node.machine.exists(f"{FOLDER}/lock")


def outputs(name: str, options: Result, *, check: bool = False, diff: bool = False) -> Result:
    """Run a module in this process, also inside another one, and return its result."""
    from ansible.module_utils.basic import AnsibleModule
    from ansible.module_utils.testing import patch_module_args

    module = importlib.import_module(f"ansible_collections.dra.accelerators.plugins.modules.{name}")
    found: list[Result] = []
    given = {**options, "_ansible_check_mode": check, "_ansible_diff": diff}
    with patch_module_args(given), pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(AnsibleModule, "_return_formatted", lambda _self, result: found.append(dict(result)))
        module.main()
    return {**found[-1]}


def test_check_mode_keeps_verified_packages_of_a_live_run(
    tmp_path: Path, run_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check mode leaves the packages, also if the live run began after the check."""
    node = test_ascend_driver.Node(tmp_path, run_here, monkeypatch)
    live = node.root / "var/lib/dra-accelerators/ascend-verified/driver/package.run"
    live.parent.mkdir(parents=True)
    live.write_text("exit 0\n")
    assert node.run(test_ascend_driver.BOTH, check=True)["changed"] and live.exists()
    assert [path.name for path in live.parents[2].iterdir()] == ["ascend-verified"]
    left = live.parents[2] / "ascend-verified-99999999/driver"
    left.mkdir(parents=True)
    assert not node.run(test_ascend_driver.BOTH).get("failed")
    assert not live.exists() and not left.parent.exists(), "copies of killed runs are deleted"


def test_lock_of_a_killed_run_is_taken_and_check_mode_creates_none(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    with single_run.hold_lock(system, FOLDER, is_check=True):
        assert not list(tmp_path.iterdir())
    program = (
        "import os, sys\n"
        "from ansible_collections.dra.accelerators.plugins.module_utils._host import single_run\n"
        "from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System\n"
        f"with single_run.hold_lock(System({str(tmp_path)!r}), {FOLDER!r}, is_check=False):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert system.exists(f"{FOLDER}/lock")
    with single_run.hold_lock(system, FOLDER, is_check=True):
        pass
    assert system.exists(f"{FOLDER}/lock")
    with single_run.hold_lock(system, FOLDER, is_check=False):
        assert system.read_text(f"{FOLDER}/lock") == f"{os.getpid()}\n"
    assert not system.exists(FOLDER)


def test_module_restarted_with_other_interpreter_keeps_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(str(tmp_path))
    monkeypatch.setattr(single_run, "has_respawned", lambda: True)
    with single_run.hold_lock(system, FOLDER, is_check=False):
        monkeypatch.setattr(os, "getppid", os.getpid)
        for is_check in (True, False):
            with single_run.hold_lock(system, FOLDER, is_check=is_check):
                pass
        assert system.exists(f"{FOLDER}/lock")
    assert not system.exists(FOLDER)


def test_container_runtime_record_directory_has_its_lock(node_of_runtime: test_ascend_runtime.Node) -> None:
    assert not node_of_runtime.run("6.0.0", record="/var/lib/other/runtime.json").get("failed")
    with single_run.hold_lock(System(str(node_of_runtime.root)), "/var/lib/other", is_check=False):
        assert node_of_runtime.run("7.0.0", record="/var/lib/other/runtime.json")["error_code"] == "other-run"


@pytest.fixture
def node_of_runtime(
    tmp_path: Path, run_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> test_ascend_runtime.Node:
    return test_ascend_runtime.Node(tmp_path, run_here, monkeypatch)
