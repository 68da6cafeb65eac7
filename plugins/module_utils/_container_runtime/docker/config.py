# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read and edit the CDI settings in Docker Engine's configuration file, and read them from ``docker info``. This module has no side effects.

Source: Docker v28.0.4 (cmd/dockerd/daemon.go, daemon/info.go) and the release notes. CDI exists from 25.0 on if
``features.cdi`` is true, and is enabled by default from 28.2 on. ``cdi-spec-dirs`` lists the directories, by default
/etc/cdi and /var/run/cdi. An empty directory name disables CDI. Docker reads both settings only at its start. ``docker
info`` reports the directories, and none if CDI is disabled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .runtimes import DockerError, indentation, read

FEATURES, CDI, DIRECTORIES_KEY = "features", "cdi", "cdi-spec-dirs"
DEFAULT_FOLDERS = ("/etc/cdi", "/var/run/cdi")
#: The oldest release with CDI, and the first one that enables it by default.
OLDEST, BY_DEFAULT = (25, 0), (28, 2)


@dataclass(frozen=True)
class Info:
    """The state of a running Docker Engine."""

    version: tuple[int, ...]
    folders: tuple[str, ...]
    live_restore: bool
    containers: int

    def reads(self, wanted: Sequence[str]) -> bool:
        """Return whether CDI is enabled and all these directories are read."""
        return set(wanted) <= set(self.folders)


def version_in(text: str) -> tuple[int, ...]:
    """Return the version in the output of ``docker info`` or ``dockerd --version``, or an empty tuple."""
    found = re.search(r"(?<![\d.])(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def read_info(output: str) -> Info:
    """Read the JSON output of ``docker info``. Raises DockerError if it is not Docker Engine, or if the output does not contain the CDI directories."""
    try:
        document = json.loads(output)
        version = version_in(str(document["ServerVersion"]))
        folders = document.get("CDISpecDirs", () if version < OLDEST else None)
        if folders is None and "CDISpecDirs" not in document:
            raise DockerError(
                "The docker command is older than the daemon, and does not show the directories of CDI files",
                hint="Expected the command of Docker 25 or newer. Upgrade it, or set container_runtime_docker_command to another one.",
                code="no-proof",
            )
        return Info(
            version=version,
            folders=tuple(str(each) for each in folders or ()),
            live_restore=bool(document["LiveRestoreEnabled"]),
            containers=int(document["ContainersRunning"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DockerError(
            f"Cannot parse the output of `docker info`: {output.strip()[:200]!r}",
            hint="Expected Docker Engine. Podman with that command name is not supported.",
            code="no-proof",
        ) from error


def refuse_old(version: tuple[int, ...]) -> None:
    """Raise DockerError if Docker Engine does not support CDI."""
    if version < OLDEST:
        raise DockerError(
            f"Docker Engine is {'.'.join(map(str, version)) or 'of an unknown version'}, expected "
            f"{'.'.join(map(str, OLDEST))} or newer, because older versions do not support CDI",
            hint="Upgrade Docker Engine.",
            code="too-old",
        )


def document_of(text: str | None, path: str) -> dict[str, Any]:
    """Return the parsed file. Raises DockerError for an invalid file."""
    document = read(text, path)
    folders = document.get(DIRECTORIES_KEY, [])
    if not isinstance(document.get(FEATURES, {}), dict) or not isinstance(folders, list):
        raise DockerError(
            f"{path} has a value of another type for {FEATURES} (expected an object) or {DIRECTORIES_KEY} (expected a list)",
            hint="Fix the file. Nothing was changed.",
            code="invalid-json",
        )
    return document


def has_cdi(document: Mapping[str, Any], version: tuple[int, ...], wanted: Sequence[str]) -> bool:
    """Return whether Docker Engine of a version reads the directories with this file."""
    enabled = document.get(FEATURES, {}).get(CDI, version >= BY_DEFAULT)
    return enabled is True and set(wanted) <= set(_folders(document))


def excludes_cdi(document: Mapping[str, Any], wanted: Sequence[str]) -> bool:
    """Return whether the file disables CDI or lists other directories. Settings that it omits can come from command-line flags."""
    named = DIRECTORIES_KEY in document and not set(wanted) <= set(_folders(document))
    return named or document.get(FEATURES, {}).get(CDI, True) is not True


def _folders(document: Mapping[str, Any]) -> tuple[str, ...]:
    found = document.get(DIRECTORIES_KEY)
    return DEFAULT_FOLDERS if found is None else tuple(str(each) for each in found if each)


def text_with(text: str | None, path: str, version: tuple[int, ...], wanted: Sequence[str]) -> str | None:
    """Return the file's text with the CDI directories. The order of keys and the indentation stay. Raises DockerError."""
    document = document_of(text, path)
    if has_cdi(document, version, wanted):
        return text
    features = dict(document.get(FEATURES, {}))
    if features.get(CDI, version >= BY_DEFAULT) is not True:
        document[FEATURES] = {**features, CDI: True}
    present = _folders(document)
    missing = [each for each in wanted if each not in present]
    if missing:
        document[DIRECTORIES_KEY] = [*present, *missing]
    return _written(document, text)


def text_without(text: str, before: str | None, path: str) -> str | None:
    """Return an edited file with the previous values of this collection's keys, or None if nothing is left. Raises DockerError."""
    document, former = document_of(text, path), document_of(before, path)
    features = dict(document.get(FEATURES, {}))
    _set(features, CDI, former.get(FEATURES, {}).get(CDI))
    _set(document, FEATURES, features if features or FEATURES in former else None)
    _set(document, DIRECTORIES_KEY, former.get(DIRECTORIES_KEY))
    return None if not document and before is None else _written(document, text)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    if value is None:
        values.pop(key, None)
    else:
        values[key] = value


def _written(document: Mapping[str, Any], text: str | None) -> str:
    return json.dumps(document, indent=indentation(text), ensure_ascii=False) + "\n"


def only_cdi(before: str | None, after: str | None, path: str) -> tuple[str, str]:
    """Return the CDI settings of both texts. The rest of the file is omitted, because it can contain passwords."""
    shown = []
    for text in (before, after):
        document = document_of(text, path)
        part = {key: value for key, value in document.items() if key in (FEATURES, DIRECTORIES_KEY)}
        shown.append(json.dumps(part, indent=4) + "\n" if part else "")
    return shown[0], shown[1]
