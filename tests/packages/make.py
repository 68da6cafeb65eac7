# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build replacements for the packages of Ascend's driver, firmware, and container runtime. They contain no files of the vendor.

    python make.py DIRECTORY KIND VERSION [NAME=VALUE ...]

KIND is driver, firmware, or runtime. A package is a shell script with an archive of the files for its kind from this directory. The
script unpacks the archive and starts the installer in it. A package reads these environment variables:

FAKE_ROOT: the root directory of the installation, instead of /.
FAKE_STOP: the point of the installation at which the installer kills itself.

NAME=VALUE sets a variable of the package:

CHIP: the chip in the file name (310p).
MACHINE: the architecture (that of this machine).
FITS: a pattern of the kernel releases for which the package has modules (all).
EFFECT: the sentence about a required reboot at the end of the output.
FILES: a directory of the node with the files of a simulated driver, with their paths below /. Without it, the package installs only
its own records.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import platform
import shlex
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
KINDS = ("driver", "firmware", "runtime")
MARK = "__PAYLOAD__"
HEAD = """#!/bin/bash
# A replacement for a package of Ascend, built by the tests of dra.accelerators. It contains no files of the vendor.
set -u
payload=$(sed '1,/^{mark}$/d' "$0")
if [ "$(printf '%s' "$payload" | sha256sum | cut -d' ' -f1)" != {digest} ]; then
    echo "The package is damaged."
    exit 1
fi
[ "${{1:-}}" != --check ] || {{ echo "The package is whole."; exit 0; }}
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
printf '%s' "$payload" | base64 -d | tar -xz -C "$directory"
cd "$directory"
{variables}
export FAKE_ROOT="${{FAKE_ROOT:-}}"
bash ./{kind}.sh "$@"
exit $?
{mark}
"""


def name_of(kind: str, version: str, chip: str, machine: str) -> str:
    """Return the vendor's file name of such a package."""
    if kind == "runtime":
        return f"Ascend-docker-runtime_{version}_linux-{machine}.run"
    architecture = machine.replace("_", "-")
    return f"Ascend-hdk-{chip}-npu-{kind}_{version}" + (f"_linux-{architecture}.run" if kind == "driver" else ".run")


def make(directory: Path, kind: str, version: str, **values: str) -> Path:
    """Build one package in ``directory`` and return its path. The same arguments give the same bytes."""
    variables = {
        "CHIP": "310p",
        "MACHINE": platform.machine(),
        "FITS": "*",
        "EFFECT": "",
        "FILES": "",
        **values,
        "VERSION": version,
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(HERE.glob("*.sh")) + sorted((HERE / kind).glob("*")):
            entry = tarfile.TarInfo(path.name)
            content = path.read_bytes()
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    payload = base64.encodebytes(gzip.compress(buffer.getvalue(), mtime=0)).decode().rstrip("\n")
    head = HEAD.format(
        mark=MARK,
        kind=kind,
        digest=hashlib.sha256(payload.encode()).hexdigest(),
        variables="\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
    )
    path = directory / name_of(kind, version, variables["CHIP"], variables["MACHINE"])
    path.write_text(head + payload + "\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def main() -> int:
    """Build the package of the command line and print its path."""
    directory, kind, version, *rest = sys.argv[1:]
    if kind not in KINDS:
        sys.exit(f"{kind} is not one of {', '.join(KINDS)}")
    sys.stdout.write(f"{make(Path(directory), kind, version, **dict(word.split('=', 1) for word in rest))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
