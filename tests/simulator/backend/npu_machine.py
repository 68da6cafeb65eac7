# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A machine of simulated NPUs below a folder: the library and its program where the vendor has them, PCI devices, device nodes.

Whoever uses it does so in a process of its own: a library is loaded by its soname once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_simulator.npu_description import NpuSettings, load_npu_machine, npus, render_npus

REPOSITORY = Path(__file__).resolve().parents[3]
DATA = REPOSITORY / "roles" / "simulator" / "files"
LIBRARIES = "usr/local/Ascend/driver/lib64/driver"
DRIVER = "sys/bus/pci/drivers/devdrv_device_driver"
VERSION = "25.2.0"

_CONTROL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
reply = ctypes.create_string_buffer(1 << 20)
code = library.gpuSimulatorControl(sys.argv[2].encode(), reply, len(reply))
print(reply.value.decode())
raise SystemExit(code != 0)
"""


class NpuMachine:
    """One machine profile below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def library(self) -> Path:
        return self.root / LIBRARIES / "libdcmi.so"

    def power_on(self, profile: str, build: Path, **library: Any) -> None:
        """Lay out the machine, and load it."""
        for folder in (LIBRARIES, "usr/local/bin", "dev", "etc", DRIVER):
            (self.root / folder).mkdir(parents=True)
        shutil.copy2(build / "libdcmi.so", self.library)
        shutil.copy2(build / "npu-smi", self.root / "usr/local/bin/npu-smi")
        (self.root / "usr/local/Ascend/driver/version.info").write_text(f"Version={VERSION}\n")
        (self.root / "etc/ascend_install.info").write_text(
            "UserName=HwHiAiUser\nDriver_Install_Path_Param=/usr/local/Ascend\nDriver_Install_Status=complete\n"
        )
        machine = load_npu_machine(DATA, profile)
        for entry, path, numa in npus(machine):
            self._put_on_the_bus(machine["boards"][entry["board"]]["pci"], path, numa)
        description = self.root / "machine.txt"
        description.write_text(
            render_npus(
                machine,
                NpuSettings(
                    identity="test",
                    driver_version=VERSION,
                    dev_root=str(self.root / "dev"),
                    sys_root=str(self.root / "sys"),
                    etc_root=str(self.root / "etc"),
                    library={key.replace("_", "-"): value for key, value in library.items()},
                ),
            )
        )
        self.control("load", str(description))
        names = [f"davinci{npu['physical']}" for npu in self.control("show")["npus"]]
        for name in ("davinci_manager", "devmm_svm", "hisi_hdc", *names):
            (self.root / "dev" / name).touch()

    def _put_on_the_bus(self, pci: dict[str, str], path: tuple[str, ...], numa: int) -> None:
        folder = self.root / "sys/devices" / Path(*path)
        folder.mkdir(parents=True)
        facts = {"vendor": pci["vendor"], "device": pci["device"], "class": pci["class"], "numa_node": str(numa)}
        for name, text in facts.items():
            (folder / name).write_text(f"{text}\n")
        (folder / "driver").symlink_to(os.path.relpath(self.root / DRIVER, folder))
        listed = self.root / "sys/bus/pci/devices"
        listed.mkdir(exist_ok=True)
        (listed / path[-1]).symlink_to(os.path.relpath(folder, listed))

    def control(self, *words: str) -> Any:
        """Have the simulator itself do something, in a process of its own; its answer."""
        done = subprocess.run(
            [sys.executable, "-c", _CONTROL, str(self.library), " ".join(words)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        answer = json.loads(done.stdout)
        assert answer.get("ok", True), f"{words}: {answer}"
        return answer

    def smi(self, *words: str) -> str:
        """What npu-smi prints, to an administrator."""
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.library.parent)}
        program = [str(self.root / "usr/local/bin/npu-smi"), *words]
        return subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout

    def run(self, scenario: str) -> None:
        """Run a function of ascend_scenarios in a process of its own."""
        program = str(Path(__file__).with_name("ascend_scenarios.py"))
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(REPOSITORY), str(DATA)])
        done = subprocess.run(
            [sys.executable, program, scenario, str(self.root)],
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{scenario} failed:\n{done.stdout}{done.stderr}"
