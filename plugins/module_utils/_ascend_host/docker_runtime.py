# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Describe the ascend-docker-runtime package: its file name, its arguments, its installed files, and its running containers.

Facts: the package asks for the license on its standard input, and no option suppresses that. It writes the
configuration of an engine, so the module passes a scratch file that no engine reads. It restarts no service.
"""

from __future__ import annotations

import posixpath
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._host import change_record
from ..core.host.system import System
from .driver_packages import PackageError

NAME = "Ascend-Docker-Runtime"
PROGRAM = "ascend-docker-runtime"
INFO = "ascend_docker_runtime_install.info"
DEFAULT_FOLDER = "/usr/local/Ascend"
#: Directories in which the engines' shims keep the options of each running container.
_BUNDLES = (
    "/run/containerd/io.containerd.runtime.v2.task",
    "/run/docker/containerd/daemon/io.containerd.runtime.v2.task",
)
_SAID_IN = ("options.json", "runtime")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PACKAGE = re.compile(r"(?i)ascend-docker-runtime_(?P<version>[^_/]+)_linux-(?P<machine>[a-z0-9_-]+)\.run")


@dataclass(frozen=True)
class Package:
    """A package file on the node."""

    path: str
    version: str
    machine: str
    checksum: str = ""


def read_package(path: str, checksum: str = "") -> Package:
    """Return the package for a file name. Raises PackageError if the name is not the vendor's."""
    found = _PACKAGE.fullmatch(posixpath.basename(path))
    if found is None:
        raise PackageError(
            f"The file name of {path} is not that of the package",
            hint="Expected the vendor's file name, Ascend-docker-runtime_VERSION_linux-MACHINE.run.",
            code="package-name",
        )
    return Package(path, found["version"], found["machine"].replace("x86-64", "x86_64"), checksum.lower())


def target_of(folder: str) -> str:
    """Return the directory of the runtime."""
    return f"{folder.rstrip('/')}/{NAME}"


def unfit(system: System, folder: str) -> str:
    """Return why the package would reject a directory or the runtime's directory in it, or an empty string.

    A missing directory is accepted. Only the package itself checks the parent directories.
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
    """Return the installed version; empty if the runtime is not installed or incomplete. Raises OSError."""
    try:
        lines = system.read_text(f"{target}/{INFO}").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    said: Mapping[str, str] = {key: value for key, _equals, value in (line.partition("=") for line in lines)}
    whole = system.exists(f"{target}/{PROGRAM}")
    return said.get("version", "").removeprefix("v") if whole else ""


def words(package: Package, folder: str, *, replaces: bool, scratch: str, mode: str, type: str) -> list[str]:  # noqa: A002
    """Return the command line of the package. It writes its engine configuration to ``scratch``."""
    said = ["bash", package.path, "--upgrade" if replaces else "--install"]
    said += [] if folder == DEFAULT_FOLDER else [f"--install-path={folder}"]
    if replaces:
        return said
    said += ["--install-scene=docker", f"--config-file-path={scratch}", f"--injection-mode={mode}"]
    return [*said, *([f"--install-type={type}"] if type else [])]


def containers(system: System, program: str) -> list[str]:
    """Return the IDs of the running containers that a program has started. Raises OSError."""
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
    except (FileNotFoundError, NotADirectoryError):
        return False


@dataclass(frozen=True)
class Record:
    """The created directories, outermost first, and whether the installation can be incomplete."""

    made: tuple[str, ...]
    unfinished: bool = False

    def to_text(self) -> str:
        """Return the text of the record."""
        return change_record.to_text({"made": list(self.made), "unfinished": self.unfinished})


def read_record(text: str | None, path: str) -> Record | None:
    """Read a record, or return None if there is no text. Raises AcceleratorError."""
    if text is None:
        return None
    hint = "To remove the runtime, delete it manually. Then delete the record."
    return change_record.read(text, path, _record_of, of="the installed runtime", hint=hint)


def _record_of(content: Any) -> Record:
    # Records of earlier releases do not have ``unfinished``.
    return Record(tuple(str(each) for each in content["made"]), bool(content.get("unfinished", False)))
