# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Components next to the NVIDIA driver: pods with GPUs, the node driver as a pod, the persistence daemon, and module signing."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._host import driver_installation, stopped_services
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.driver_catalog import (
    PERSISTENCE_FILE,
    Offer,
    Wanted,
    not_offered,
    persistence_text,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from driver_node import NEWER, OLDER, Node
from driver_store import claim

UNIT, FILE = "nvidia-persistenced.service", "/lib/systemd/system/nvidia-persistenced.service"
POD, OURS = "0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55", "1b7f6a1e-52ae-41de-9a3b-3f2f6c1f0e66"
KEYS = {"signing_key": "/keys/mok.key", "signing_certificate": "/keys/mok.der"}


@pytest.fixture
def node(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, run_here, monkeypatch)


def in_pod(node: Node, pid: int, uid: str, *files: str) -> None:
    """Create a process of a pod with these open files."""
    node.machine.put_file(f"/proc/{pid}/comm", "python3\n")
    node.machine.put_file(
        f"/proc/{pid}/cgroup", f"0::/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/x.scope\n"
    )
    directory = node.machine.path(f"/proc/{pid}/fd")
    directory.mkdir()
    for number, path in enumerate(files):
        (directory / str(number)).symlink_to(path)


# Pods


def test_pods_with_claims_or_processes_are_named(node: Node, tmp_path: Path) -> None:
    node.run(OLDER)
    store = tmp_path / "kubelet/plugins/gpu.nvidia.com/state.db"
    store.parent.mkdir(parents=True)
    claim(store, "GPU-1")
    state = {"ClaimUID": "uid-1", "PodUIDs": {POD: {}}}
    checkpoint = {"Data": json.dumps({"ClaimInfoStateList": [state]}), "Checksum": 0}
    node.machine.put_file(f"{tmp_path}/kubelet/dra_manager_state", json.dumps(checkpoint))
    node.machine.path(f"/var/log/pods/team-a_training-0_{POD}").mkdir(parents=True)
    node.machine.put_file("/dev/nvidia0", "")
    in_pod(node, 4711, POD, "/dev/null")
    in_pod(node, 4712, OURS, "/dev/null")
    dry_run = node.run(NEWER, check=True, state_path=str(store))
    assert dry_run["blocked_by"] == {
        "claims": ["team-a/training"],
        "processes": ["4711 (python3, pod team-a/training-0)", f"4712 (python3, pod {OURS})"],
        "pods": [OURS, "team-a/training-0"],
    }
    assert dry_run["unloads"]
    refused = node.run(NEWER, state_path=str(store))
    assert "team-a/training (pod team-a/training-0)" in refused["msg"] and "nvidia_driver_drain" in refused["msg"]
    # Without claims the message names the processes.
    refused = node.run(NEWER)
    assert "4711 (python3, pod team-a/training-0)" in refused["msg"] and node.machine.loaded() == OLDER


def test_node_driver_pod_does_not_block(node: Node, tmp_path: Path) -> None:
    node.run(OLDER)
    path = "/kubelet/plugins/gpu.nvidia.com/state.db"
    node.machine.put_file(path, "")
    node.machine.put_file("/dev/nvidia0", "")
    in_pod(node, 4711, POD, "/dev/null")
    in_pod(node, 4712, OURS, "/dev/null", str(node.machine.path(path)))
    in_pod(node, 4713, OURS, "/dev/null")  # a program that the pod runs
    found = driver_installation.find_users(node.machine, state_path=path, paths=["/dev/nvidia0"], services=[])
    assert [process.pid for process in found.processes] == [4711]
    assert node.run(OLDER, state_path=path)["blocked_by"]["processes"] == []


def test_claims_ending_during_wait_unblock_the_run(node: Node, tmp_path: Path) -> None:
    store = tmp_path / "state.db"
    claim(store, "GPU-1")
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 3:
            store.unlink(missing_ok=True)

    driver_installation.wait_for_claims(str(store), 60, clock=lambda: now[0], sleep=sleep)
    assert now == [3.0]
    claim(store, "GPU-1")
    driver_installation.wait_for_claims(
        str(store), 2, clock=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + 1)
    )
    assert now == [5.0], "no longer than so"
    driver_installation.wait_for_claims("", 60, clock=lambda: now[0], sleep=sleep)
    assert now == [5.0]


# The persistence daemon


def test_persistence_unit_without_persistence_gets_drop_in(node: Node) -> None:
    node.machine.put_file(
        FILE, "[Service]\nExecStart=/usr/bin/nvidia-persistenced --user nvpd --no-persistence-mode --verbose\n"
    )
    node.run(OLDER)
    text = node.machine.read_text(PERSISTENCE_FILE)
    assert text.endswith("[Service]\nExecStart=\nExecStart=/usr/bin/nvidia-persistenced --user nvpd --verbose\n")
    assert node.machine.log.index("daemon-reload") < node.machine.log.index(f"start {UNIT}")
    assert not node.run(OLDER)["changed"]
    # An administrator deletes the file: the module writes it again and restarts the daemon.
    node.machine.remove(PERSISTENCE_FILE)
    node.machine.log.clear()
    assert node.run(OLDER)["steps"] == [
        "configure the persistence daemon to keep GPUs initialized, now and after each start"
    ]
    assert node.machine.log == ["daemon-reload", f"restart {UNIT}"]
    node.run(state="absent")
    assert not node.machine.path(PERSISTENCE_FILE).parent.exists()


@pytest.mark.parametrize("unit", [None, "", "[Service]\nExecStart=/usr/bin/nvidia-persistenced --persistence-mode\n"])
def test_persistence_other_units_get_no_drop_in(unit: str | None) -> None:
    assert persistence_text(unit) == ""


def test_persistence_disabled_daemon_is_stopped_and_restored(node: Node) -> None:
    """The daemon was there before this module: a removal of the driver restores its previous state."""
    node.machine.enabled.add(UNIT)
    node.machine.running.add(UNIT)
    done = node.run(OLDER, persistence=False)
    assert "stop the persistence daemon, and start it no more" in done["steps"]
    assert UNIT not in node.machine.running and UNIT in node.machine.switched_off
    assert node.record()["daemon"] == "enabled active" and not node.run(OLDER, persistence=False)["changed"]
    node.run(state="absent", persistence=False)
    assert UNIT in node.machine.running and UNIT not in node.machine.switched_off and not node.record()


def test_persistence_disabled_daemon_is_enabled_again_on_request(node: Node) -> None:
    node.run(OLDER)
    node.run(OLDER, persistence=False)
    assert UNIT not in node.machine.running and node.record()["daemon"]
    node.run(OLDER)
    assert UNIT in node.machine.running and not node.record()["daemon"] and not node.run(OLDER)["changed"]


# Signatures


def test_signing_key_signs_after_build(node: Node) -> None:
    node.run(OLDER)
    node.machine.log.clear()
    done = node.run(OLDER, **KEYS)
    assert "sign the kernel modules again" in done["steps"]
    built = [line for line in node.machine.log if line.startswith("dkms")]
    assert [line.split()[1] for line in built] == ["build", "install"]
    assert all(f"--force -m nvidia -v {OLDER} -k " in line for line in built)
    assert f"stop {UNIT}" not in node.machine.log and node.machine.loaded() == OLDER, "no user is disturbed"
    assert not node.run(OLDER, **KEYS)["changed"]
    node.machine.log.clear()
    assert node.run(NEWER, **KEYS)["changed"] and not [line for line in node.machine.log if "dkms" in line], (
        "apt has it built"
    )


def test_signing_failure_changes_nothing_and_is_retried(node: Node) -> None:
    node.run(OLDER)
    node.machine.dkms_fails = True
    failed = node.run(OLDER, **KEYS)
    assert failed["error_code"] == "not-signed" and "the key cannot be read" in failed["msg"]
    assert (
        not node.machine.exists("/etc/dkms/framework.conf.d/dra-accelerators.conf") and node.machine.loaded() == OLDER
    )
    node.machine.dkms_fails = False
    assert "sign the kernel modules again" in node.run(OLDER, **KEYS)["steps"]


def test_signing_interrupted_is_repeated(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.run(OLDER)
    before = dict(node.apt.installed)

    def killed(words: list[str]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(node.machine, "_dkms", killed)
        with pytest.raises(KeyboardInterrupt):
            node.run(OLDER, **KEYS)
    assert node.record()["doing"] == "sign"
    assert node.run(OLDER, **KEYS)["steps"] == ["sign the kernel modules again"]
    assert node.apt.installed == before and not node.run(OLDER, **KEYS)["changed"]


# Precompiled modules


def test_precompiled_modules_missing_for_kernel_names_remedy() -> None:
    offers = [Offer("open", "precompiled", "compute", ("headless",), ("linux-modules-nvidia-580-6.8.0-45-generic",))]
    wanted = Wanted("580", build="precompiled", persistence=False)
    error = not_offered(offers, wanted, {"headless": ["580.95.05-1"]}, "6.8.0-45-generic")
    assert (
        error.code == "no-precompiled"
        and "6.8.0-45-generic" in str(error)
        and "nvidia_driver_build: dkms" in str(error)
    )
    assert not_offered(offers, wanted, {}, "6.8.0-45-generic").code == "not-offered"


# Units that restart with the kernel modules

LAYOUT, SETTINGS, DRIVER = (f"dra-accelerators-{name}.service" for name in ("layout", "settings", "driver"))


def test_layout_and_settings_are_applied_before_node_driver_starts(node: Node) -> None:
    node.run(OLDER)
    node.machine.enabled.add(DRIVER)
    node.machine.running |= {LAYOUT, SETTINGS, DRIVER}
    node.machine.log.clear()
    node.run(NEWER)
    order = [line for line in node.machine.log if line.split()[0] in ("load", "restart", "start")]
    assert order == [
        f"load nvidia {NEWER}",
        f"load nvidia_uvm {NEWER}",
        f"restart {LAYOUT}",
        f"start {UNIT}",
        f"restart {SETTINGS}",
        f"start {DRIVER}",
    ]
    node.machine.log.clear()
    node.run(NEWER)
    assert not [line for line in node.machine.log if LAYOUT in line], (
        "where nothing was unloaded, nothing is done again"
    )


def test_driver_that_fails_the_layout_is_rolled_back(node: Node) -> None:
    node.run(OLDER)
    node.machine.enabled.add(DRIVER)
    node.machine.running |= {LAYOUT, DRIVER}
    node.machine.broken_units = {LAYOUT}
    failed = node.run(NEWER)
    assert failed["error_code"] == "not-applied" and f"has the driver {OLDER} again" in failed["msg"]
    assert node.machine.loaded() == OLDER and DRIVER in node.machine.running


def test_failed_unit_does_not_prevent_others(node: Node) -> None:
    units = ("a.service", "b.service", "c.service")
    node.machine.enabled |= set(units)
    node.machine.running |= set(units)
    node.machine.broken_units = {"b.service"}
    with (
        pytest.raises(AcceleratorError, match=r"systemctl start b\.service"),
        stopped_services.stopped_services(node.machine, units, "nvidia"),
    ):
        assert not node.machine.running & set(units)
    assert node.machine.running & set(units) == {"a.service", "c.service"}


def recorded(node: Node, vendor: str) -> list[str]:
    path = stopped_services.record_path(vendor)
    return list(json.loads(node.machine.read_text(path))["services"]) if node.machine.exists(path) else []


def test_failed_service_is_added_to_error_and_started_by_next_run(node: Node) -> None:
    units = ("a.service", "b.service")
    node.machine.enabled |= set(units)
    node.machine.running |= set(units)
    node.machine.broken_units = {"b.service"}
    with (  # in the same order as in the module
        pytest.raises(
            AcceleratorError, match=r"The kernel module has another version\. systemctl start b\.service"
        ) as raised,
        stopped_services.resumed_services(node.machine, "nvidia"),
        stopped_services.stopped_services(node.machine, units, "nvidia"),
    ):
        raise AcceleratorError("The kernel module has another version.", code="not-proved")
    assert raised.value.code == "not-proved" and str(raised.value).count("b.service") == 1
    assert "a.service" in node.machine.running and recorded(node, "nvidia") == ["b.service"]
    node.machine.broken_units = set()
    with stopped_services.resumed_services(node.machine, "nvidia") as left:
        assert left == ("b.service",)
    assert "b.service" in node.machine.running and not recorded(node, "nvidia")


UNITS = ("a.service", "b.service", "c.service")


@pytest.mark.parametrize("error", [AcceleratorError("systemctl did not end"), OSError(errno.EIO, "I/O error")])
def test_unanswered_unit_query_does_not_prevent_others(
    node: Node, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The query of a unit fails, not only its start: the other units start, and this unit stays in the record."""
    node.machine.enabled |= {*UNITS}
    node.machine.running |= {*UNITS}
    run = node.machine.run

    def broken(argv: Sequence[str], *words: Any, **options: Any) -> Any:
        if argv[1] == "is-active" and argv[-1] == "b.service":
            raise error
        return run(argv, *words, **options)

    with (
        pytest.raises(AcceleratorError, match=re.escape(str(error))),
        stopped_services.stopped_services(node.machine, UNITS, "nvidia"),
    ):
        monkeypatch.setattr(node.machine, "run", broken)
    assert node.machine.running & {*UNITS} == {"a.service", "c.service"} and recorded(node, "nvidia") == ["b.service"]


@pytest.mark.parametrize("first", [None, AcceleratorError("The module has another version"), OSError("No buffer")])
def test_unwritable_record_does_not_hide_failed_start(
    node: Node, monkeypatch: pytest.MonkeyPatch, first: Exception | None
) -> None:
    node.machine.enabled |= {*UNITS}
    node.machine.running |= {*UNITS}
    node.machine.broken_units = {"a.service"}

    def full(*_words: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(AcceleratorError) as raised,
        stopped_services.stopped_services(node.machine, UNITS, "nvidia"),
    ):
        monkeypatch.setattr(node.machine, "write_atomic", full)
        if first:
            raise first
    dry_run = str(raised.value)
    assert (
        str(first or "") in dry_run and "systemctl start a.service" in dry_run and "No space left on device" in dry_run
    )
    assert node.machine.running & {*UNITS} == {"b.service", "c.service"}


def test_services_stopped_by_other_vendor_module_stay_recorded(node: Node) -> None:
    node.machine.enabled |= {"npu.service", "gpu.service"}
    node.machine.running |= {"npu.service", "gpu.service"}
    node.machine.broken_units = {"npu.service"}
    with (
        pytest.raises(AcceleratorError, match=r"systemctl start npu\.service"),
        stopped_services.stopped_services(node.machine, ["npu.service"], "ascend"),
    ):
        pass
    with (
        stopped_services.resumed_services(node.machine, "nvidia") as left,
        stopped_services.stopped_services(node.machine, ["gpu.service"], "nvidia"),
    ):
        assert left == () and recorded(node, "nvidia") == ["gpu.service"]
    assert recorded(node, "ascend") == ["npu.service"] and not recorded(node, "nvidia")
    assert "gpu.service" in node.machine.running
