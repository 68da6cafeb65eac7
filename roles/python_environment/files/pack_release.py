# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pack the node programs of the collection into an archive that is the same, byte for byte, on every host.

The archive holds ``dra_driver/`` (the package of the daemons, including the core). The release is named
``<version>-<first 8 digits of the SHA-256 of the content>``. The name is printed as JSON: ``{"name": ..., "version":
..., "digest": ...}``. Without ``--output`` no archive is written. Runs on the Ansible controller. Uses the standard
library only.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import re
import sys
import tarfile
from pathlib import Path

PACKAGE = "dra_driver"
DAEMONS = Path("roles/dra_driver/files/dra_driver")
CORE = Path("plugins/module_utils/core")
LEFT_OUT = frozenset({"__pycache__"})


def collection_version(collection: Path) -> str:
    """Return the version of the collection: from MANIFEST.json if installed, from galaxy.yml in a checkout.

    Raises FileNotFoundError if there is no version.
    """
    manifest = collection / "MANIFEST.json"
    if manifest.is_file():
        return str(json.loads(manifest.read_text(encoding="utf-8"))["collection_info"]["version"])
    galaxy = collection / "galaxy.yml"
    if galaxy.is_file():
        found = re.search(r"(?m)^version:\s*[\"']?([0-9A-Za-z.+-]+)", galaxy.read_text(encoding="utf-8"))
        if found:
            return found.group(1)
    raise FileNotFoundError(
        f"{collection} has no version: neither MANIFEST.json nor a galaxy.yml with a version was found there; "
        "expected the root directory of the collection dra.accelerators"
    )


def members(collection: Path) -> dict[str, bytes]:
    """Return the content of every file of the node programs, by its path in the release, sorted by path."""
    found: dict[str, bytes] = {}
    for source, target in ((DAEMONS, Path(PACKAGE)), (CORE, Path(PACKAGE, "core"))):
        folder = collection / source
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not there; expected it in the collection dra.accelerators")
        for path in folder.rglob("*"):
            relative = path.relative_to(folder)
            if path.is_file() and not LEFT_OUT.intersection(relative.parts):
                found[(target / relative).as_posix()] = path.read_bytes()
    return dict(sorted(found.items()))


def digest(files: dict[str, bytes]) -> str:
    """Return the SHA-256 over names, lengths, and contents, as hexadecimal digits."""
    whole = hashlib.sha256()
    for name, content in files.items():
        whole.update(f"{name}\0{len(content)}\0".encode())
        whole.update(content)
    return whole.hexdigest()


def pack(files: dict[str, bytes], output: Path) -> None:
    """Write the archive. Owner, time, and mode of its members do not depend on the host."""
    # Three context managers in one statement need parentheses, which need Python 3.10.
    with output.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as zipped:  # noqa: SIM117
        with tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as archive:
            folders = sorted({str(parent) for name in files for parent in Path(name).parents if str(parent) != "."})
            for folder in folders:
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o644
                archive.addfile(entry, io.BytesIO(content))


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", type=Path, required=True, help="root directory of the collection")
    parser.add_argument("--output", type=Path, help="the archive to write (.tar.gz)")
    options = parser.parse_args(arguments)
    try:
        version = collection_version(options.collection)
        files = members(options.collection)
        if options.output:
            pack(files, options.output)
    except OSError as error:
        sys.stderr.write(f"pack_release: {error}\n")
        return 1
    whole = digest(files)
    sys.stdout.write(json.dumps({"name": f"{version}-{whole[:8]}", "version": version, "digest": whole}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
