# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run a module of this release: ``python -I .../dra_driver/run.py dra_driver.cli status``.

``python -m`` imports modules from the working directory first, so a planted ``argparse.py`` would run as root. With
``-I`` Python ignores the working directory and PYTHONPATH, and this file adds the directories of the release.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

#: A vendor's helper under the names of earlier releases, and its present name. A unit of an earlier release starts this
#: release from when the link ``current`` is changed until the role writes the new unit.
MOVED = (
    re.compile(r"dra_driver\.core\.(?:vendors\.)?(\w+)\.helper_server"),
    r"dra_driver.core.vendors.\1.dcmi.helper_server",
)


def main() -> None:
    """Run the module that the first argument names as ``__main__``, with the other arguments."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -I run.py MODULE [ARGUMENT ...]")
    # The link ``current`` is resolved, because it can change to another release while this process imports modules.
    release = Path(__file__).absolute().parent.parent.resolve()
    # A container image has its packages next to the release. On a node they are in the virtual environment.
    sys.path[:0] = [str(each) for each in (release, release.parent / "packages") if each.is_dir()]
    del sys.argv[0]
    earlier, present = MOVED
    runpy.run_module(earlier.sub(present, sys.argv[0]), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
