# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run galaxy-importer, the check of Galaxy for an upload, on the tarball in a directory. An error or a warning fails it.

usage: importer.py VIRTUAL_ENVIRONMENT DIRECTORY
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from files import ROOT

FINDING = re.compile(r"^(ERROR|WARNING|CRITICAL)\b", re.MULTILINE)
#: Its message if ansible-lint exceeds the importer's fixed limit of 180 s (loaders/collection.py).
TOO_LATE = "Timeout on call to ansible-lint"


def link_dependencies(virtual_environment: Path) -> None:
    """Link the collections of galaxy.yml into the importer's environment, as in a user's installation."""
    (packages,) = virtual_environment.resolve().glob("lib/python3*/site-packages")
    for name in yaml.safe_load((ROOT / "galaxy.yml").read_text(encoding="utf-8"))["dependencies"]:
        relative = Path("ansible_collections", *name.split("."))
        source = next(folder / relative for folder in map(Path, sys.path) if (folder / relative).is_dir())
        target = packages / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(source)


def main(virtual_environment: Path, folder: Path) -> int:
    """Import the only tarball in a directory and return the exit status."""
    (tarball,) = folder.glob("*.tar.gz")
    link_dependencies(virtual_environment)
    programs = str(virtual_environment / "bin")
    environment = {**os.environ, "PATH": os.pathsep.join([programs, os.environ["PATH"]]), "PYTHONPATH": ""}
    environment.pop("ANSIBLE_COLLECTIONS_PATH", None)
    with tempfile.TemporaryDirectory(prefix="dra-accelerators-import-") as scratch:
        # The importer reads namespace, name, and version from the file name.
        copy = Path(scratch) / tarball.name
        shutil.copy(tarball, copy)
        run = subprocess.run(
            [Path(programs) / "python", "-m", "galaxy_importer.main", copy.name],
            cwd=scratch,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    print(run.stdout)
    findings = FINDING.findall(run.stdout)
    if "Importer processing completed successfully" not in run.stdout:
        print("the importer did not come to its end")
        return 1
    if TOO_LATE in run.stdout:
        print(
            "too slow or too busy for the limit that the importer sets its linters: make lint runs it without a cluster at the same time"
        )
    return 1 if run.returncode or findings else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
