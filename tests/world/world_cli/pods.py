# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the pod images of the world from files of the bootstrapped root file system, without a registry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from .archive import Entry, Image, write_images
from .commands import execute
from .errors import WorldError
from .pins import BUSYBOX_IMAGE, PAUSE_IMAGE, PROBE_IMAGE, PYTHON_IMAGE, WORLD_FOLDER

PAUSE_SOURCE = WORLD_FOLDER / "pods" / "pause.c"
IMAGES_ARCHIVE = "images.tar"
#: Names of the images. The archive contains them, so they are part of its cache key.
IMAGE_NAMES = (PAUSE_IMAGE, BUSYBOX_IMAGE, PROBE_IMAGE, PYTHON_IMAGE)
_EXCLUDED = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/lintian/", "/usr/share/info/")


def read_status(text: str) -> dict[str, dict[str, str]]:
    """Return the packages of a dpkg status file by name: the first line of each field, by its name in lower case."""
    packages: dict[str, dict[str, str]] = {}
    for stanza in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", stanza, re.MULTILINE))
        if "Package" in fields:
            packages[fields["Package"]] = {name.lower(): value for name, value in fields.items()}
    return packages


def with_dependencies(packages: Mapping[str, Mapping[str, str]], wanted: Iterable[str]) -> list[str]:
    """Return the names of the wanted packages and of their installed dependencies, sorted.

    Installed alternatives count as dependencies. A virtual package is replaced by its installed providers. Raises
    WorldError for a wanted package that is not installed.
    """
    providers: dict[str, list[str]] = {}
    for name, fields in packages.items():
        for provided in fields.get("provides", "").split(","):
            if provided.strip():
                providers.setdefault(re.split(r"[ (:]", provided.strip())[0], []).append(name)
    found: set[str] = set()
    waiting = list(wanted)
    for name in waiting:
        if name not in packages:
            raise WorldError(
                f"the bootstrap lacks the package {name}, which a pod image needs: add it to NODE_PACKAGES."
            )
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        depends = ", ".join(packages[name].get(kind, "") for kind in ("depends", "pre-depends"))
        for alternative in re.split(r"[,|]", depends):
            needed = re.split(r"[ (:]", alternative.strip())[0]
            waiting += [needed] if needed in packages else providers.get(needed, [])
    return sorted(found)


def package_files(root: Path, package: str) -> list[str]:
    """Return the absolute paths of a package's files from dpkg's lists. Raises WorldError for an unknown package."""
    information = root / "var/lib/dpkg/info"
    lists = [information / f"{package}.list", *sorted(information.glob(f"{package}:*.list"))]
    for path in lists:
        if path.is_file():
            return path.read_text().splitlines()
    raise WorldError(f"dpkg's file list of {package} was not found under {information}.")


def collect(root: Path, packages: Iterable[str]) -> list[Entry]:
    """Return archive entries for all files of the packages, and the usual links of a merged /usr."""
    entries: dict[str, Entry] = {}
    for name in ("bin", "lib", "lib64", "sbin"):
        entries[name] = Entry(name, link=f"usr/{name}")
    for package in packages:
        for name in package_files(root, package):
            if any((name + "/").startswith(prefix) for prefix in _EXCLUDED) or name in ("/.", ""):
                continue
            # A package can list /lib/x for the file /usr/lib/x: resolve the directory, but keep a link at the end of the path.
            path = (root / name.lstrip("/")).parent.resolve() / PurePosixPath(name).name
            relative = str(path.relative_to(root.resolve()))
            if relative in entries:
                continue
            if path.is_symlink():
                entries[relative] = Entry(relative, link=str(path.readlink()))
            elif path.is_dir():
                entries[relative] = Entry(relative, mode=0o755, directory=True)
            elif path.is_file():
                entries[relative] = Entry(relative, path.read_bytes(), path.stat().st_mode & 0o7777)
    return [entries[name] for name in sorted(entries)]


def shell_entries(root: Path) -> list[Entry]:
    """Return a static busybox with a link for each of its programs, and the account files that programs read."""
    busybox = root / "bin/busybox"
    programs = execute([str(busybox), "--list"]).stdout.split()
    base = [
        Entry("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"),
        Entry("etc/group", b"root:x:0:\nnogroup:x:65534:\n"),
        Entry("root", mode=0o700, directory=True),
        Entry("tmp", mode=0o1777, directory=True),
        Entry("usr/bin/busybox", busybox.read_bytes(), 0o755),
    ]
    return base + [Entry(f"usr/bin/{name}", link="busybox") for name in programs if name != "busybox"]


def merge(*groups: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries of all groups. For each path, the first entry has priority."""
    merged: dict[str, Entry] = {}
    for group in groups:
        for entry in group:
            merged.setdefault(entry.path, entry)
    return tuple(merged.values())


def make_images(root: Path, target: Path) -> None:
    """Write ``images.tar`` into ``target``, with all pod images from the files of the root file system at ``root``."""
    pause = target / "pause"
    execute(["gcc", "-static", "-Os", "-s", "-Wall", "-Wextra", "-Werror", "-o", str(pause), str(PAUSE_SOURCE)])
    installed = read_status((root / "var/lib/dpkg/status").read_text())
    links = [Entry(name, link=f"usr/{name}") for name in ("bin", "lib", "lib64", "sbin")]
    shell = shell_entries(root)
    # ldconfig of libc-bin updates the loader's cache, through which programs find the libraries that CDI mounts.
    library = collect(root, with_dependencies(installed, ["libc6", "libc-bin"]))
    python = collect(root, with_dependencies(installed, ["python3", "libc-bin"]))
    sleeping = ("/bin/sh", "-c", "trap : TERM INT; sleep 2147483647 & wait")
    images = (
        Image(PAUSE_IMAGE, (Entry("pause", pause.read_bytes(), 0o755),), ("/pause",)),
        Image(BUSYBOX_IMAGE, merge(links, shell), sleeping),
        Image(PROBE_IMAGE, merge(links, library, shell), sleeping),
        Image(PYTHON_IMAGE, merge(links, python, shell), sleeping, {"PYTHONUNBUFFERED": "1"}),
    )
    (target / IMAGES_ARCHIVE).write_bytes(write_images(images))
