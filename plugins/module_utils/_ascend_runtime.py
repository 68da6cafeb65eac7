# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""ascend-docker-runtime's package: what its name says, what it is run with, what it leaves, and which containers run by it.

Facts: the package asks for the licence on its standard input and has no word against that; it writes the configuration of an engine,
so that it is given one that nobody reads; and it restarts nothing.
"""

from __future__ import annotations

import posixpath
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import _record
from ._ascend_packages import PackageError
from .core.system import System

NAME = "Ascend-Docker-Runtime"
PROGRAM = "ascend-docker-runtime"
INFO = "ascend_docker_runtime_install.info"
DEFAULT_FOLDER = "/usr/local/Ascend"
#: Where the engines' shims keep what each running container was made with.
_BUNDLES = (
    "/run/containerd/io.containerd.runtime.v2.task",
    "/run/docker/containerd/daemon/io.containerd.runtime.v2.task",
)
_SAID_IN = ("options.json", "runtime")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PACKAGE = re.compile(r"(?i)ascend-docker-runtime_(?P<version>[^_/]+)_linux-(?P<machine>[a-z0-9_-]+)\.run")


@dataclass(frozen=True)
class Package:
    """The package, by its path on the node."""

    path: str
    version: str
    machine: str
    checksum: str = ""


def read_package(path: str, checksum: str = "") -> Package:
    """Read what a package's name says of it. Raises PackageError."""
    found = _PACKAGE.fullmatch(posixpath.basename(path))
    if found is None:
        raise PackageError(
            f"{path} is not called as the package is",
            hint="Expected Ascend-docker-runtime_VERSION_linux-MACHINE.run, its name at the vendor's.",
            code="package-name",
        )
    return Package(path, found["version"], found["machine"].replace("x86-64", "x86_64"), checksum.lower())


def target_of(folder: str) -> str:
    """Return where the runtime lies."""
    return f"{folder.rstrip('/')}/{NAME}"


def unfit(system: System, folder: str) -> str:
    """Return why the package would not take a folder, or what is in it for the runtime; empty where it would, and where nothing is there.

    What it expects of folders further up it alone says.
    """
    owner = system.path("/").stat().st_uid
    for path in (folder.rstrip("/"), target_of(folder)):
        try:
            found = system.path(path).lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode):
            return f"{path} is a link"
        if found.st_uid != owner:
            return f"{path} belongs to the user {found.st_uid}"
        if found.st_mode & _OTHERS_WRITE:
            return f"{path} can be written by others than its owner (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def installed(system: System, target: str) -> str:
    """Return the version that is installed; empty for none, and for one that was cut short."""
    try:
        lines = system.read_text(f"{target}/{INFO}").splitlines()
    except OSError:
        return ""
    said: Mapping[str, str] = {key: value for key, _equals, value in (line.partition("=") for line in lines)}
    whole = system.exists(f"{target}/{PROGRAM}")
    return said.get("version", "").removeprefix("v") if whole else ""


def words(package: Package, folder: str, *, replaces: bool, scratch: str, mode: str, type: str) -> list[str]:  # noqa: A002
    """Return what the package is run with. ``scratch`` takes what it would write into an engine's configuration."""
    said = ["bash", package.path, "--upgrade" if replaces else "--install"]
    said += [] if folder == DEFAULT_FOLDER else [f"--install-path={folder}"]
    if replaces:
        return said
    said += ["--install-scene=docker", f"--config-file-path={scratch}", f"--injection-mode={mode}"]
    return [*said, *([f"--install-type={type}"] if type else [])]


def containers(system: System, program: str) -> list[str]:
    """Return the containers that were started by a program and still run, by their engine's ids."""
    bundles = [
        f"{top}/{space}/{container}"
        for top in _BUNDLES
        for space in system.list_directory(top)
        for container in system.list_directory(f"{top}/{space}")
    ]
    return [
        posixpath.basename(bundle)
        for bundle in bundles
        if any(_says(system, f"{bundle}/{name}", program) for name in _SAID_IN)
    ]


def _says(system: System, path: str, word: str) -> bool:
    try:
        return word in system.read_text(path)
    except OSError:
        return False


@dataclass(frozen=True)
class Record:
    """Which folders were made for the runtime, the outermost first."""

    made: tuple[str, ...]

    def to_text(self) -> str:
        """Return the record as it is written."""
        return _record.to_text({"made": list(self.made)})


def read_record(text: str | None, path: str) -> Record | None:
    """Read a record. Raises AcceleratorError."""
    if text is None:
        return None
    hint = "Remove the runtime by hand if it is to go, and the record."
    return _record.read(text, path, _record_of, of="installed", hint=hint)


def _record_of(content: Any) -> Record:
    return Record(tuple(str(each) for each in content["made"]))
