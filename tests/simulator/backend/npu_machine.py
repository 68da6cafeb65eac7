# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A machine of simulated NPUs below a directory: the library and its program at the vendor's paths, PCI devices, and
device nodes.

Each user runs in its own process, because a library is loaded only once per soname.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
DATA = REPOSITORY / "roles" / "simulator" / "files"
LIBRARIES = "usr/local/Ascend/driver/lib64/driver"
NULL = os.makedev(1, 3)

_CONTROL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
reply = ctypes.create_string_buffer(1 << 20)
code = library.acceleratorSimulatorControl(sys.argv[2].encode(), reply, len(reply))
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
        """Create the machine's files and load the machine."""
        for folder in (LIBRARIES, "usr/local/bin", "etc/accelerator-simulator"):
            (self.root / folder).mkdir(parents=True)
        shutil.copy2(build / "libdcmi.so", self.library)
        shutil.copy2(build / "npu-smi", self.root / "usr/local/bin/npu-smi")
        tools = self.root / "usr/local/Ascend/driver/tools"
        tools.mkdir()
        shutil.copy2(build / "hccn_tool", tools / "hccn_tool")
        settings = {key.replace("_", "-"): value for key, value in library.items()}
        configuration = {"machine": profile, "identity": "test", "ascend_library": settings}
        (self.root / "etc/accelerator-simulator/machine.json").write_text(json.dumps(configuration))
        self.command("power-on")
        # Below a directory the simulator creates ordinary files instead of device nodes, which the backend does not
        # accept.
        for path in list((self.root / "dev").rglob("*")):
            if path.is_file():
                path.unlink()
                os.mknod(path, stat.S_IFCHR | 0o666, NULL)  # opening it succeeds

    def command(self, *words: str) -> None:
        """Run the simulator's command."""
        program = "import sys; from accelerator_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-c", program, "--root", str(self.root), *words],
            env={**os.environ, "PYTHONPATH": str(DATA)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"

    def control(self, *words: str) -> Any:
        """Send a control command to the library from a separate process; return its answer."""
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

    def show(self) -> Any:
        """Return the simulator's state of the machine."""
        return self.control("show")

    def smi(self, *words: str) -> str:
        """Return npu-smi's output for an administrator."""
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.library.parent)}
        program = [str(self.root / "usr/local/bin/npu-smi"), *words]
        return subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout

    def run(self, scenario: str) -> None:
        """Run a function of ascend_scenarios in a separate process."""
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
