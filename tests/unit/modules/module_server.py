# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run modules, each in its own process that is forked from this one, so that Python starts only once.

Each input line is one JSON object: ``module``, ``arguments``, ``library`` (a directory, or null for a node without a
driver). Each output line is the module's output as a JSON string.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.testing import patch_module_args

MODULES = "ansible_collections.dra.accelerators.plugins.modules"


def run(request: dict[str, Any]) -> None:
    """Run the module in the forked process."""
    if request["library"]:
        # The binding loads the library by its soname, and gets the loaded one.
        ctypes.CDLL(str(Path(request["library"]) / "libnvidia-ml.so.1"), ctypes.RTLD_GLOBAL)
        os.environ["LD_LIBRARY_PATH"] = request["library"]  # for the programs that the module runs
        os.environ["PATH"] = f"{request['library']}:{os.environ['PATH']}"
    with patch_module_args(request["arguments"]):
        importlib.import_module(f"{MODULES}.{request['module']}").main()


def serve() -> None:
    """Answer requests until the input ends."""
    importlib.import_module("pynvml")  # modules that are loaded before the fork need no load after it
    for name in ("accelerator_info", "nvidia_gpu", "nvidia_mig", "nvidia_mig_info"):
        importlib.import_module(f"{MODULES}.{name}")
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                try:
                    run(json.loads(line))
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(0)
            os.waitpid(child, 0)
            output.seek(0)
            sys.stdout.write(json.dumps(output.read().decode()) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    serve()
