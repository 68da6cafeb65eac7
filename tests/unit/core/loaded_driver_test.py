# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The identity of a loaded NVIDIA driver differs after a reload of the same version."""

from __future__ import annotations

import shutil
from pathlib import Path

from dra_driver.core.host.system import System
from dra_driver.core.vendors.nvidia.sysfs import driver_instance

#: The view of processes without CAP_SYSLOG.
MODULES = "nvidia_uvm 4096 {uses} - Live 0x0000000000000000 (OE)\nnvidia 8192 {uses} nvidia_uvm, Live 0x0000000000000000 (OE)\n"


def test_loaded_driver_without_addresses_differs_after_reload(tmp_path: Path) -> None:
    module = tmp_path / "sys/module/nvidia"
    version = tmp_path / "proc/driver/nvidia/version"
    for directory in (module, version.parent):
        directory.mkdir(parents=True)
    version.write_text("NVRM version: 580.95.05\n")
    (tmp_path / "proc/modules").write_text(MODULES.format(uses=1))
    before = driver_instance(System(str(tmp_path)))
    (tmp_path / "proc/modules").write_text(MODULES.format(uses=2))
    assert driver_instance(System(str(tmp_path))) == before
    again = module.with_name("again")
    again.mkdir()
    shutil.rmtree(module)
    again.rename(module)
    assert driver_instance(System(str(tmp_path))) != before
    version.unlink()
    assert driver_instance(System(str(tmp_path))) == ()
