# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Makes packages that behave as those of Ascend's driver, firmware and container runtime do, and hold nothing of the vendor's.

    python make.py FOLDER KIND VERSION [NAME=VALUE ...]

KIND is driver, firmware or runtime. A package is a shell archive: what is in this folder for its kind, below a head that unpacks and
starts it. Below FAKE_ROOT, where that is set, packages take a folder for the machine. FAKE_STOP has an installation be killed half-way.
Names and values become variables of the package: CHIP (310p), MACHINE (this machine's), FITS (kernels that it has modules for, as a
pattern; all), EFFECT (what it says at the end), FILES (a folder of the node where the driver's own files are, as they are to lie below /; a
package has none, and what it installs is then all that tells of it).
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
# A stand-in for a package of Ascend's, made by the tests of dra.accelerators. Holds nothing of the vendor's.
set -u
payload=$(sed '1,/^{mark}$/d' "$0")
if [ "$(printf '%s' "$payload" | sha256sum | cut -d' ' -f1)" != {digest} ]; then
    echo "The package is damaged."
    exit 1
fi
[ "${{1:-}}" != --check ] || {{ echo "The package is whole."; exit 0; }}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
printf '%s' "$payload" | base64 -d | tar -xz -C "$folder"
cd "$folder"
{variables}
export FAKE_ROOT="${{FAKE_ROOT:-}}"
bash ./{kind}.sh "$@"
exit $?
{mark}
"""


def name_of(kind: str, version: str, chip: str, machine: str) -> str:
    """The name that such a package has at the vendor's."""
    if kind == "runtime":
        return f"Ascend-docker-runtime_{version}_linux-{machine}.run"
    spelled = machine.replace("_", "-")
    return f"Ascend-hdk-{chip}-npu-{kind}_{version}" + (f"_linux-{spelled}.run" if kind == "driver" else ".run")


def make(folder: Path, kind: str, version: str, **values: str) -> Path:
    """Make one package and return where it is. The same words make the same bytes."""
    told = {
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
        variables="\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(told.items())),
    )
    path = folder / name_of(kind, version, told["CHIP"], told["MACHINE"])
    path.write_text(head + payload + "\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def main() -> int:
    """Make a package as the command line asks; prints where it is."""
    folder, kind, version, *rest = sys.argv[1:]
    if kind not in KINDS:
        sys.exit(f"{kind} is none of {', '.join(KINDS)}")
    sys.stdout.write(f"{make(Path(folder), kind, version, **dict(word.split('=', 1) for word in rest))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
