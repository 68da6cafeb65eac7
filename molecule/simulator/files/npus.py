# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test a simulated node with NPUs through the vendor's programs and files. A difference ends the program with a message."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

SLICE = 148  # the first vNPU of the chip with the physical ID 3


def expect(what, found, wanted):
    """End the program if ``found`` is not ``wanted``."""
    if found != wanted:
        sys.exit(f"{what}: found {found!r}, expected {wanted!r}")


def run(*command):
    """Run a program and return its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def slices():
    """Return the chip, the number, and the template of each vNPU."""
    shown = json.loads(run("accelerator-simulator", "show", "--json"))["npus"]
    return [(npu["physical"], each["vid"], each["template"]) for npu in shown for each in npu["slices"]]


def check_node(slice_expected):
    """Check the device nodes and their owner, the chips in sysfs, and that no files of another vendor remain."""
    owner = pwd.getpwnam("HwHiAiUser").pw_uid
    for number in range(8):
        state = Path(f"/dev/davinci{number}").stat()
        expect(f"davinci{number}", (stat.S_ISCHR(state.st_mode), state.st_uid), (True, owner))
    path = Path(f"/dev/vdavinci{SLICE}")
    expect("the node of the slice", path.exists() and stat.S_ISCHR(path.stat().st_mode), slice_expected)
    chips = Path("/sys/bus/pci/drivers/devdrv_device_driver").glob("0000:*")
    expect("the driver's devices", sorted(os.path.realpath(each)[:16] for each in chips), ["/sys/devices/pci"] * 8)
    expect("chips in npu-smi", run("npu-smi", "info", "-m").count("Ascend 310P3"), 8)
    expect("a warning of npu-smi", run("npu-smi", "info").startswith("+--"), True)
    expect("nvidia-smi", shutil.which("nvidia-smi"), None)


def running():
    """Test a machine that had GPUs before."""
    check_node(slice_expected=False)
    run("npu-smi", "set", "-t", "create-vnpu", "-i", "3", "-c", "0", "-f", "vir02")
    check_node(slice_expected=True)
    (address,) = json.loads(run("accelerator-simulator", "unplug", "5"))["unplug"]
    expect("the node of a chip that is out", Path("/dev/davinci5").exists(), False)
    expect("the chip in sysfs", Path("/sys/bus/pci/devices", address).exists(), False)
    run("accelerator-simulator", "plug", "5")


def rebooted():
    """Check that the driver restored the vNPUs of /etc/vnpu.cfg after a reboot."""
    expect("slices after a reboot", slices(), [(3, SLICE, "vir02")])
    check_node(slice_expected=True)


if __name__ == "__main__":
    {"running": running, "rebooted": rebooted}[sys.argv[1]]()
