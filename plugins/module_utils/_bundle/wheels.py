# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Build pip's arguments for another Python version, and read pip's report. This module has no side effects."""

from __future__ import annotations

import json
import posixpath
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .bundle_manifest import BundleError

#: Minor versions of glibc in the accepted manylinux tags: from 28 (RHEL 8, the oldest supported platform) down to 17
#: (manylinux2014).
_GLIBC = range(28, 16, -1)
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Wheel:
    """One wheel that pip would install: its URL, and its data from the index."""

    name: str
    version: str
    url: str
    sha256: str
    requires: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Return the name of the file."""
        return posixpath.basename(urllib.parse.unquote(urllib.parse.urlsplit(self.url).path))

    @property
    def source(self) -> str:
        """Return the URL without credentials."""
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def target_options(python: str, machine: str) -> list[str]:
    """Return pip's options for the Python and architecture of the wheels, such as 3.13 on x86_64."""
    abi = f"cp{python.replace('.', '')}"
    tags = [*(f"manylinux_2_{minor}_{machine}" for minor in _GLIBC), f"manylinux2014_{machine}", "any"]
    return [
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={python}",
        *(f"--abi={each}" for each in (abi, "abi3", "none")),
        *(f"--platform={each}" for each in tags),
    ]


def canonical(name: str) -> str:
    """Return the normalized name of a Python package, for comparisons."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_report(text: str) -> tuple[Wheel, ...]:
    """Read pip's installation report. Raises BundleError."""
    try:
        return tuple(_wheel(each) for each in json.loads(text)["install"])
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(
            f"pip's report cannot be read: {error!r}", hint="Expected pip 23 or newer.", code="pip"
        ) from error


def _wheel(content: Mapping[str, Any]) -> Wheel:
    metadata, download = content["metadata"], content["download_info"]
    archive = download.get("archive_info") or {}
    sha256 = (archive.get("hashes") or {}).get("sha256") or archive.get("hash", "").partition("sha256=")[2]
    if not str(download["url"]).partition("#")[0].endswith(".whl"):
        raise BundleError(f"pip would install {metadata['name']} from {download['url']}, which is no wheel", code="pip")
    return Wheel(
        metadata["name"], metadata["version"], download["url"], sha256, tuple(metadata.get("requires_dist") or ())
    )


def environment(python: str, machine: str) -> dict[str, str]:
    """Return the environment for evaluating requirement markers: this Python on this architecture, without extras."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "extra": "",
    }


def requirement_lines(text: str) -> list[str]:
    """Return the requirements of a list or a lock file, without comments and digests."""
    return [line for line, _digests in parse_lock_file(text)]


def parse_lock_file(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the requirements of a lock file, each with the SHA-256 digests of its wheels. A plain list has no digests."""
    joined = re.sub(r"\\[ \t]*\n", " ", text)
    lines = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines()]
    return [
        (re.sub(r"\s+--hash=\S+", "", line).strip(), tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", line)))
        for line in lines
        if line
    ]


def lock_for(text: str, marker_environment: Mapping[str, str]) -> str:
    """Return the lock file for one Python: the requirements that apply to it, without markers, with digests. Raises BundleError."""
    found = []
    for line, digests in parse_lock_file(text):
        found += [
            " ".join([each, *(f"--hash=sha256:{digest}" for digest in digests)])
            for each in select_requirements([line], marker_environment)
        ]
    return "".join(f"{line}\n" for line in found)


def check_digests(wheels: Iterable[Wheel], text: str) -> None:
    """Raise BundleError for a wheel without a SHA-256 digest, or with a digest that is not in the lock file."""
    known: dict[str, set[str]] = {}
    for line, digests in parse_lock_file(text):
        name = _NAME.match(line)
        if name and digests:
            known.setdefault(canonical(name[0]), set()).update(digests)
    for wheel in wheels:
        if not wheel.sha256:
            raise BundleError(
                f"Cannot verify {wheel.file}: the package index publishes no SHA-256 digest for it",
                hint="Use an index that publishes digests, such as PyPI or a mirror of it.",
                code="checksum",
            )
        if known and wheel.sha256 not in known.get(canonical(wheel.name), set()):
            raise BundleError(
                f"The SHA-256 digest of {wheel.file} is not in the lock file: {wheel.sha256}",
                hint="The package index has a different file than the one in the lock file. Find the cause before you use the file.",
                code="checksum",
            )


def select_requirements(requirements: Iterable[str], marker_environment: Mapping[str, str]) -> list[str]:
    """Return the requirements that apply to a Python, without markers, because pip evaluates markers for its own Python.

    Raises BundleError for an invalid requirement.
    """
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError as error:
        raise BundleError(
            "Cannot import the Python package packaging, a dependency of ansible-core",
            hint="Run the module with the Python that runs Ansible.",
            code="packaging",
        ) from error
    found = []
    for each in requirements:
        try:
            requirement = Requirement(each)
        except InvalidRequirement as error:
            raise BundleError(
                f"{each!r} is not a valid requirement of a Python package: {error}", code="requirement"
            ) from error
        if requirement.marker is None or requirement.marker.evaluate(dict(marker_environment)):
            extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            found.append(f"{requirement.name}{extras}{requirement.specifier}")
    return found


def find_missing_requirements(wheels: Sequence[Wheel], marker_environment: Mapping[str, str]) -> list[str]:
    """Return the requirements of wheels that apply to their Python, but that pip excluded because pip itself runs in another Python."""
    there = {canonical(wheel.name) for wheel in wheels}
    found: dict[str, None] = {}
    for wheel in wheels:
        for each in select_requirements(wheel.requires, marker_environment):
            name = _NAME.match(each)
            if name and canonical(name[0]) not in there:
                found[each] = None
    return sorted(found)
