# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run a module of this release: ``python -I .../dra_driver/run.py dra_driver.cli status``.

``python -m`` imports modules from the working directory first, so that a planted ``argparse.py`` runs as root. With ``-I`` Python reads
neither the working directory nor PYTHONPATH, and this file adds the directories of the release.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the module that the first argument names as ``__main__``, with the other arguments."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -I run.py MODULE [ARGUMENT ...]")
    # Not the link ``current``: it can lead to another release while this process runs and imports modules.
    release = Path(__file__).absolute().parent.parent.resolve()
    # An image has its packages next to the release; on a node they are in the virtual environment.
    sys.path[:0] = [str(each) for each in (release, release.parent / "packages") if each.is_dir()]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
