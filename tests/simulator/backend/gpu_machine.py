# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A machine of simulated boards below a directory, and programs that run on it in separate processes.

NVML is loaded by its soname and never unloaded, so each library needs another process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
SIMULATOR = REPOSITORY / "roles" / "simulator" / "files"
LIBRARY_FOLDER = "usr/lib/x86_64-linux-gnu"


class Machine:
    """One machine profile below ``root``."""

    def __init__(self, root: Path, profile: str, library: Path) -> None:
        self.root = root
        folder = root / LIBRARY_FOLDER
        folder.mkdir(parents=True)
        for file in library.iterdir():
            if file.name.startswith("lib"):
                shutil.copy2(file, folder / file.name, follow_symlinks=False)
        programs = root / "usr/bin"
        programs.mkdir()
        shutil.copy2(library / "nvidia-smi", programs / "nvidia-smi")
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(folder),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(REPOSITORY)]),
        }
        self.control("power-on", "--machine", profile, "--identity", "test")

    def control(self, *words: str) -> str:
        """Run the simulator's command."""
        program = "import sys; from accelerator_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))"
        arguments = ["--root", str(self.root), *words]
        environment = {**self.environment, "PYTHONPATH": str(SIMULATOR)}
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise AssertionError(f"accelerator-simulator {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def run(self, scenario: str) -> None:
        """Run a function of nvml_scenarios in a process that finds this machine's library."""
        program = str(Path(__file__).with_name("nvml_scenarios.py"))
        done = subprocess.run(
            [sys.executable, program, scenario, str(self.root)],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{scenario} failed:\n{done.stdout}{done.stderr}"
