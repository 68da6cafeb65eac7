# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Installers on a full disk: each write fails once, or all writes from then on. The error names its cause and the state of the node."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_ascend_driver
import test_nvidia_container_toolkit
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import PackageProblem
from driver_node import NEWER, OLDER, UNLOADABLE
from test_nvidia_driver_crashes import SERVICES, Make, make  # noqa: F401  a fixture

from tests.unit.crash_steps import full_disk

FULL = "No space left on device"
ALWAYS = 1000
Result = dict[str, Any]


def ran(number: int, run: Callable[[], Result], root: str, times: int) -> tuple[str, Result]:
    """Run a module on a disk that is full at a step. Return the step and the module's result."""
    done: list[Result] = []
    step = full_disk(number, lambda: done.append(run()), Path(root), times=times)
    assert not step or (done[0].get("failed") and FULL in done[0]["msg"]), (step, done)
    return step, done[0]


@pytest.mark.parametrize("times", [1, ALWAYS])
def test_nvidia_driver_on_a_full_disk_is_rolled_back_or_reports_the_state(make: Make, times: int) -> None:  # noqa: F811
    states = set()
    for number in itertools.count():
        node = make()
        machine = node.machine
        step, done = ran(number, lambda node=node: node.run(NEWER, services=SERVICES), machine.root, times)
        if not step:
            break
        loaded, versions = machine.loaded(), node.versions()
        states.add((loaded, *versions))
        is_unchanged = loaded == OLDER and versions == {f"{OLDER}-1"}
        state_text = f"loaded the driver {loaded}" if loaded else "loaded no NVIDIA kernel module"
        assert is_unchanged or state_text in done["msg"], (step, done)
        assert times > 1 or loaded in (OLDER, NEWER), (step, done)
        assert machine.running == {*SERVICES}, (step, done)
        again = node.run(NEWER, services=SERVICES)
        assert not again.get("failed") and machine.loaded() == NEWER, (step, again)
    assert number > 8 and (OLDER, f"{OLDER}-1") in states


def no_space(*_words: Any, **_options: Any) -> None:
    raise OSError(28, FULL, "/var/lib/dpkg")


def damaged(*_words: Any, **_options: Any) -> None:
    raise PackageProblem("E: dpkg was interrupted", code="apt-failed")


@pytest.mark.parametrize("second", [no_space, damaged])
def test_failed_rollback_of_nvidia_driver_reports_first_error_too(
    make: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    second: Callable[..., None],
) -> None:
    node = make()
    install, calls = node.apt.install, []

    def install_once(words: Sequence[str], **options: Any) -> Any:
        calls.append(words)
        return (second if len(calls) == 2 else install)(words, **options)

    monkeypatch.setattr(node.apt, "install", install_once)
    failed = node.run(UNLOADABLE, services=SERVICES)
    assert failed["error_code"] == "not-loaded" and UNLOADABLE in failed["msg"], failed
    assert "Not undone: packages" in failed["msg"] and (
        "dpkg was interrupted" in failed["msg"] or FULL in failed["msg"]
    )
    assert "no NVIDIA kernel module" in failed["msg"] and node.machine.running == {*SERVICES}
    assert node.record()["doing"] == "install"
    assert not node.run(NEWER, services=SERVICES).get("failed") and node.machine.loaded() == NEWER


def test_package_manager_without_space_restores_the_nvidia_driver(
    make: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = make()
    act, calls = node.apt.act, []

    def act_once(verb: str, words: Sequence[str], options: Sequence[str] = ()) -> str:
        calls.append(words)
        return act(verb, words, options) if len(calls) > 1 else no_space() or ""

    monkeypatch.setattr(node.apt, "act", act_once)
    failed = node.run(NEWER, services=SERVICES)
    assert failed["error_code"] == "os-error" and f"has the driver {OLDER} again" in failed["msg"], failed
    assert node.machine.loaded() == OLDER and node.machine.running == {*SERVICES}


def test_kernel_modules_are_reloaded_after_unload_error(
    make: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = make()
    run = node.machine.run

    def broken(argv: Sequence[str], timeout: float, **options: Any) -> Any:
        return no_space() if argv == ["rmmod", "nvidia"] else run(argv, timeout, **options)

    monkeypatch.setattr(node.machine, "run", broken)
    failed = node.run(NEWER, services=SERVICES)
    assert FULL in failed["msg"] and node.machine.exists("/sys/module/nvidia_uvm"), failed
    assert node.record().get("doing", "") == "" and node.machine.running == {*SERVICES}


@pytest.mark.parametrize("times", [1, ALWAYS])
def test_package_group_on_a_full_disk_is_rolled_back_or_reports_the_state(
    tmp_path: Path, run_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    older = test_nvidia_container_toolkit.OLDER
    for number in itertools.count():
        node = test_nvidia_container_toolkit.Node(tmp_path / str(number), run_here, monkeypatch)
        assert not node.run(older).get("failed")
        step, done = ran(number, lambda node=node: node.run("1.18", latest=True), node.machine.root, times)
        if not step:
            break
        assert node.has(older) or "Installed: " in done["msg"], (step, done)
        assert times > 1 or node.has(older) or "has succeeded" in done["msg"], (step, done)
        again = node.run("1.18", latest=True)
        assert not again.get("failed") and node.has(test_nvidia_container_toolkit.NEWER), (step, again)
    assert number > 4


@pytest.mark.prove
def test_ascend_driver_on_a_full_disk_reports_the_state(
    tmp_path: Path, run_here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, newer = test_ascend_driver.BOTH, test_ascend_driver.NEWER
    for number in itertools.count():
        node = test_ascend_driver.Node(tmp_path / str(number), run_here, monkeypatch)
        assert not node.run(both).get("failed")
        step, done = ran(number, lambda node=node: node.run(newer), node.system.root, 1)
        if not step:
            break
        found = node.versions()
        state_text = f"Installed: driver {found['driver']}, firmware {found['firmware']}"
        assert found == both or state_text in done["msg"], (step, done)
        again = node.run(newer)
        assert not again.get("failed") and node.versions() == newer, (step, again)
    assert number > 4
