# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module ascend_vnpu on simulated NPUs: layouts, refusals, mode changes, and requirements of a generation."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_store import claim

from tests.simulator.backend.npu_machine import DATA, NULL, NpuMachine
from tests.simulator.nvml_builds import build

# The program of a module's process on a node whose "/" is another directory. The file "waiting" there exists once the
# module waits for restored vNPUs.
PROGRAM = """
import functools, importlib, json, pathlib, sys, time
from ansible.module_utils.testing import patch_module_args
module = importlib.import_module("ansible_collections.dra.accelerators.plugins.modules." + sys.argv[1])
module.System = functools.partial(module.System, sys.argv[2])

def wait(seconds):
    pathlib.Path(sys.argv[2], "waiting").touch()
    time.sleep(seconds)

if sys.argv[1].startswith("ascend_vnpu"):
    options = importlib.import_module("ansible_collections.dra.accelerators.plugins.module_utils._layout.ascend_layout")
    options.wait_for_restored = functools.partial(options.wait_for_restored, sleep=wait)
    options.RESTORE_SECONDS = float(sys.argv[3])
with patch_module_args(json.load(sys.stdin)):
    module.main()
"""
COMPLETE = {"vir02": 3, "vir02_1c": 1}


class Node:
    """A host with NPUs, on which modules run."""

    def __init__(self, machine: NpuMachine, directory: Path) -> None:
        self.machine = machine
        self.state = directory / "state.db"

    def run(
        self, name: str = "ascend_vnpu", *, check: bool = False, wait: float = 60.0, **options: Any
    ) -> dict[str, Any]:
        if name.startswith("ascend_vnpu"):
            options["state_path"] = str(self.state)
        arguments = {**options, "_ansible_check_mode": check, "_ansible_diff": True}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, name, str(self.machine.root), str(wait)],
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            input=json.dumps(arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"{name} did not answer: {done.stdout}{done.stderr}") from None
        return answer

    def slices(self, index: int) -> list[str]:
        """Return the templates of a chip's vNPUs, as the vendor's own program lists them."""
        rows = self.machine.smi("info", "-t", "info-vnpu", "-i", str(index), "-c", "0")
        return sorted(re.findall(r"\bvir\w+", rows))


@contextlib.contextmanager
def container(machine: NpuMachine, node: str, *, instead_of: str) -> Iterator[None]:
    """Run a process without administrator capabilities that has one device node, as in a pod."""
    program = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).dcmi_init(), flush=True); sys.stdin.read()"
    command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", program]
    of_host, inside = machine.root / "dev" / instead_of, machine.root / "dev" / node
    away = of_host.rename(machine.root / instead_of)
    os.mknod(inside, stat.S_IFCHR | 0o666, NULL)
    with subprocess.Popen(
        [*command, str(machine.library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdin is not None and one.stdout is not None
        assert one.stdout.readline() == "0\n"
        inside.unlink()
        away.rename(of_host)
        yield
        one.stdin.close()


@pytest.fixture(scope="session")
def library() -> Path:
    return build(sources=DATA / "dcmi").folder


@pytest.fixture
def power_on(library: Path, tmp_path: Path) -> Callable[..., Node]:
    def on(profile: str, **settings: Any) -> Node:
        machine = NpuMachine(tmp_path / "root")
        machine.power_on(profile, library, **settings)
        return Node(machine, tmp_path)

    return on


def static(partitions: Any, **match: Any) -> list[dict[str, Any]]:
    return [{"match": match, "mode": "static", "partitions": partitions}]


def test_layout_is_created_once_and_changed_with_fewest_steps(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    layout = static(COMPLETE, index=0)
    answer = node.run(layout=layout, check=True)
    assert answer["changed"] and len(answer["steps"]) == 4 and node.slices(0) == []
    done = node.run(layout=layout)
    assert done["changed"] and {step["step"] for step in done["steps"]} == {"create_partition"}
    assert node.slices(0) == ["vir02", "vir02", "vir02", "vir02_1c"] and node.slices(1) == []
    assert done["before"][0]["partitions"] == [] and "enabled" not in done["before"][0]
    assert all(each["uuid"] for each in done["after"][0]["partitions"])
    (entry,) = done["diff"]
    assert entry["before_header"].startswith("NPU 0 (NPU-") and "MIG" not in entry["after"]
    assert entry["before"] == "no partitions\n" and "vir02_1c at" in entry["after"]
    again = node.run(layout=layout)
    assert not again["changed"] and again["steps"] == [] and again["diff"] == []
    other = node.run(layout=static({"vir02": 2, "vir02_1c": 1, "vir01": 2}, index=0))
    assert sorted(step["step"] for step in other["steps"]) == ["create_partition"] * 2 + ["destroy_partition"]
    assert node.slices(0) == ["vir01", "vir01", "vir02", "vir02", "vir02_1c"]
    kept = next(each for each in other["devices"] if each["index"] == 0)["kept"]
    assert kept == 3
    whole = node.run(layout=[{"match": {}, "mode": "whole"}])
    assert len(whole["steps"]) == 5 and node.slices(0) == []


@pytest.mark.parametrize("restored", [True, False])
def test_layout_after_boot_waits_for_restored_slices(power_on: Callable[..., Node], restored: bool) -> None:
    """A run right after a boot keeps the slices that the vendor's script creates during the run, instead of creating additional ones."""
    node = power_on("8x310P-Pro")
    layout = static({"vir02": 2}, index=0)
    assert node.run(layout=layout)["waited_for"] == []
    uptime = node.machine.root / "proc/uptime"
    uptime.parent.mkdir(exist_ok=True)
    uptime.write_text("12.5 30.0\n")
    node.machine.control("power-cycle", "late")
    assert node.slices(0) == []

    def restore() -> None:
        deadline = time.monotonic() + 90
        while not (node.machine.root / "waiting").exists():
            assert time.monotonic() < deadline, "the module does not wait"
            time.sleep(0.1)
        node.machine.control("recover")

    script = threading.Thread(target=restore)
    if restored:
        script.start()
    done = node.run(layout=layout, wait=60.0 if restored else 0.0)
    if restored:
        script.join()
        assert not done["changed"] and "of NPU 0" in done["waited_for"][0] and "warnings" not in done
    else:
        assert done["changed"] and done["waited_for"] == [] and "of NPU 0" in str(done["warnings"])
    assert node.slices(0) == ["vir02", "vir02"]


def test_layout_impossible_or_unknown_changes_nothing(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    failed = node.run(layout=[*static({"vir01": 1}, index=0), *static({"vir01": 8}, index=1)])
    assert failed["failed"] and failed["error_code"] == "does-not-fit" and node.slices(0) == []
    failed = node.run(layout=static({"1g.10gb": 1}))
    assert failed["failed"] and "vir02" in failed["msg"]
    failed = node.run(layout=[{"match": {}, "mode": "sliced"}])
    assert failed["failed"] and "Layout rule 1" in failed["msg"]
    warned = node.run(layout=[{"match": {"vendor": "nvidia"}, "mode": "dynamic"}])
    assert not warned["changed"] and "8 NPUs of this node" in str(warned["warnings"])


def test_layout_slice_of_a_claim_is_kept(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    made = node.run(layout=static({"vir02": 1}, index=0))
    (held,) = made["after"][0]["partitions"]
    claim(node.state, made["after"][0]["uuid"], held)
    failed = node.run(layout=[{"match": {}, "mode": "whole"}])
    assert failed["failed"] and failed["error_code"] == "in-use" and failed["claims"] == ["team-a/training"]
    assert node.slices(0) == ["vir02"]


def test_recover_switch_is_changed_only_if_requested(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")

    def recovers() -> bool:
        return "Enable" in node.machine.smi("info", "-t", "vnpu-cfg-recover")

    whole = [{"match": {"index": [0, 1]}, "mode": "whole"}]
    assert recovers() and not node.run(layout=whole)["changed"] and recovers()
    answer = node.run(layout=whole, recover=False, check=True)
    assert answer["changed"] and [step["step"] for step in answer["steps"]] == ["set_recover"] and recovers()
    done = node.run(layout=[*whole, *static({"vir01": 1}, index=2)], recover=False, device_share=True)
    assert [(step["step"], step["indices"]) for step in done["steps"]] == [
        ("set_recover", []),
        ("set_device_share", [0]),
        ("set_device_share", [1]),
        ("create_partition", [2]),
    ]
    assert not recovers()
    assert not node.run(layout=[*whole, *static({"vir01": 1}, index=2)], recover=False, device_share=True)["changed"]
    assert not node.run(layout=whole)["changed"] and not recovers()


def test_device_share_off_warns_and_is_enabled_on_request(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    layout = [{"match": {"index": 0}, "mode": "whole", "shares": 4}, {"match": {}, "mode": "whole"}]
    answer = node.run(layout=layout)
    assert not answer["changed"] and "Set device_share." in str(answer["warnings"]) and len(answer["warnings"]) == 1
    done = node.run(layout=layout, device_share=True)
    assert done["changed"] and not done.get("warnings")
    again = node.run(layout=layout)
    assert not again["changed"] and not again.get("warnings")


def test_vm_mode_is_rejected(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    node.machine.smi("set", "-t", "vnpu-mode", "-d", "1")
    failed = node.run(layout=static({"vir01": 1}))
    assert failed["failed"] and failed["error_code"] == "vm-mode" and "vnpu-mode -d 0" in failed["msg"]
    assert not node.run(layout=[{"match": {}, "mode": "dynamic"}]).get("failed")


def test_smp_mode_is_rejected(power_on: Callable[..., Node]) -> None:
    """In SMP mode the change is refused before any vNPU is destroyed, also in check mode."""
    node = power_on("8x910A")
    node.run(layout=static({"vir02": 1}, index=0))
    node.machine.control("work-mode", "smp")
    for check in (True, False):
        failed = node.run(layout=static({"vir16": 2}, index=0), check=check)
        assert failed["failed"] and failed["error_code"] == "smp-mode", failed
        assert "npuworkmode -v 0" in failed["msg"] and node.slices(0) == ["vir02"]
    assert node.run(layout=[{"match": {}, "mode": "whole"}])["changed"] and node.slices(0) == []


def test_union_die_policy_is_rejected(power_on: Callable[..., Node]) -> None:
    node = power_on("8xA3", multi_die_policy="union")
    for check in (True, False):
        failed = node.run(layout=static({"vir06_1c_16g": 1}, index=[0, 1]), check=check)
        assert failed["failed"] and failed["error_code"] == "multi-die-policy", failed
        assert "multi-die-policy -d 1" in failed["msg"] and "Nothing was changed" in failed["msg"]
    assert not node.run(layout=[{"match": {}, "mode": "dynamic"}]).get("failed")
    assert "OK" in node.machine.smi("set", "-t", "multi-die-policy", "-d", "1")
    assert node.run(layout=static({"vir06_1c_16g": 1}, index=[0, 1]))["changed"]
    assert node.slices(0) == ["vir06_1c_16g"]


def test_older_driver_rejection_names_required_version(power_on: Callable[..., Node]) -> None:
    """The tool of a driver before 26.0.RC1 knows no templates of these chips: the refusal names the required version."""
    node = power_on("8xA3")
    program = node.machine.root / "usr/local/bin/npu-smi"
    program.rename(program.with_name("npu-smi.real"))
    says = "echo This device does not support querying template-info."
    program.write_text(f'#!/bin/sh\ncase "$*" in *template-info*) {says};; *) exec "$0.real" "$@";; esac\n')
    program.chmod(0o755)
    failed = node.run(layout=static({"vir06_1c_16g": 1}, index=0), check=True)
    assert failed["failed"] and "26.0.RC1" in failed["msg"], failed


def test_layout_slice_used_by_process_is_kept(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    node.run(layout=static({"vir02": 1}, index=0))
    node.machine.control("fault", "0", "process", str(os.getpid()), "100")
    for check in (True, False):
        failed = node.run(layout=[{"match": {}, "mode": "whole"}], check=check)
        assert failed["failed"] and failed["error_code"] == "in-use" and failed["pids"] == [os.getpid()], failed
    assert node.slices(0) == ["vir02"]


def test_layout_slice_used_by_container_is_kept(power_on: Callable[..., Node]) -> None:
    """The chip reports that a container has the vNPU: it stays, also without a known process or claim."""
    node = power_on("8x310P-Pro")
    (made,) = node.run(layout=static({"vir02": 1}, index=0))["after"][0]["partitions"]
    number = made["uuid"].rpartition("-")[2]
    with container(node.machine, f"davinci{number}", instead_of="davinci0"):
        for check in (True, False):
            failed = node.run(layout=[{"match": {}, "mode": "whole"}], check=check)
            assert failed["failed"] and failed["error_code"] == "in-use" and "container" in failed["msg"], failed
        assert node.slices(0) == ["vir02"]
    assert node.run(layout=[{"match": {}, "mode": "whole"}])["changed"] and node.slices(0) == []


def test_chips_of_one_card_need_the_same_mode(power_on: Callable[..., Node]) -> None:
    node = power_on("4x300I-Duo")
    failed = node.run(layout=[*static({"vir02": 1}, index=0), {"match": {}, "mode": "whole"}])
    assert failed["failed"] and failed["error_code"] == "card-mixed"
    assert node.run(layout=[*static({"vir02": 1}, index=[0, 1]), {"match": {}, "mode": "whole"}])["changed"]


def test_generation_without_vnpu_is_rejected(power_on: Callable[..., Node]) -> None:
    node = power_on("1x950")
    failed = node.run(layout=static({"vir01": 1}))
    assert failed["failed"] and "950 do not support vNPUs" in failed["msg"]
    assert not node.run(layout=[{"match": {}, "mode": "dynamic"}]).get("failed")


def test_chips_without_placements_use_numbers(power_on: Callable[..., Node]) -> None:
    node = power_on("8x910A")
    done = node.run(layout=static({"vir04": 2, "vir08": 1}, index=0))
    assert node.slices(0) == ["vir04", "vir04", "vir08"]
    assert {each["placement"]["size"] for each in done["after"][0]["partitions"]} == {0}
    assert not node.run(layout=static({"vir04": 2, "vir08": 1}, index=0))["changed"]


def test_accelerator_info_reports_npus_in_the_same_format(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    node.run(layout=static({"vir02": 1}, index=0))
    answer = node.run("accelerator_info", vendor=["ascend"], match={"index": 0}, offers=True, dynamic=True)
    (device,) = answer["devices"]
    assert device["vendor"] == "ascend" and device["uuid"].startswith("NPU-")
    assert {each["name"] for each in device["profiles"]} >= {"vir01", "vir02", "vir04_4c_dvpp"}
    assert [each["profile"] for each in device["partitions"]] == ["vir02"]
    assert device["capacities"]["aiCores"] == 8
    (driver,) = answer["drivers"]
    assert driver["driver_name"] == "npu.huawei.com" and driver["available"]
    assert {each["kind"] for each in device["offers"]} == {"partition"}
    json.dumps(answer)


def test_layout_is_saved_and_restored(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    node.run(layout=[*static(COMPLETE, index=0), {"match": {}, "mode": "whole"}])
    made = node.run(state="checkpointed", checkpoint_file="/kept.json")
    assert made["changed"] and not node.run(state="checkpointed", checkpoint_file="/kept.json")["changed"]
    assert {each["owner"] for each in made["checkpoint"][0]["partitions"]} == {"administrator"}
    node.run(layout=[{"match": {}, "mode": "whole"}])
    back = node.run(state="restored", checkpoint_file="/kept.json")
    assert back["changed"] and "reset_required" not in back
    assert node.slices(0) == ["vir02", "vir02", "vir02", "vir02_1c"] and node.slices(1) == []
    assert not node.run(state="restored", checkpoint_file="/kept.json")["changed"]


def test_conflicting_options_are_rejected(power_on: Callable[..., Node]) -> None:
    node = power_on("8x310P-Pro")
    assert "missing required arguments: layout" in node.run()["msg"]
    kept = {"state": "restored", "checkpoint_file": "/kept.json"}
    assert "does not support the option layout" in node.run(**kept, layout=static(COMPLETE))["msg"]
    assert "does not support the option recover" in node.run(**kept, recover=True)["msg"]
