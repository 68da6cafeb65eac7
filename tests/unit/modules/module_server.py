# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs modules, each in a process of its own that is forked from this one, so that Python starts only once.

Reads one JSON object a line: ``module``, ``arguments``, ``library`` (a folder, or null for a machine without a driver).
Answers one line each: what the module wrote, as a JSON text.
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
    """Be the module's process."""
    if request["library"]:
        # The binding asks the loader for the library by its soname, and gets the one that is there already.
        ctypes.CDLL(str(Path(request["library"]) / "libnvidia-ml.so.1"), ctypes.RTLD_GLOBAL)
        os.environ["LD_LIBRARY_PATH"] = request["library"]  # for the programs that the module runs
        os.environ["PATH"] = f"{request['library']}:{os.environ['PATH']}"
    with patch_module_args(request["arguments"]):
        importlib.import_module(f"{MODULES}.{request['module']}").main()


def serve() -> None:
    """Answer requests until the input ends."""
    importlib.import_module("pynvml")  # what is loaded before the fork need not be loaded after it
    for name in ("accelerator_info", "nvidia_gpu", "nvidia_mig"):
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
