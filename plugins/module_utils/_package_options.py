# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The options that modules share which install a vendor's packages: where they come from, and what files have to be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from . import _openpgp
from ._driver_install import verified_copy
from ._package_port import PackageProblem, Places, Source
from .core.system import System

_VERIFIED = "/var/lib/dra-accelerators/packages-verified"


def source_spec() -> dict[str, dict[str, Any]]:
    """Return the options of a package source."""
    names: dict[str, Any] = {"type": "list", "elements": "str"}
    return {
        "uris": {**names, "default": []},
        "suites": {**names, "default": ["/"]},
        "components": {**names, "default": []},
        "key": {"type": "str", "default": "", "no_log": False},
        "fingerprints": {**names, "default": []},
        "packages_signed": {"type": "bool", "default": True},
    }


def package_spec() -> dict[str, dict[str, Any]]:
    """Return the options of modules that bring a group of packages to one version."""
    return {
        "state": {"type": "str", "choices": ["present", "previous", "absent"], "default": "present"},
        "source": {"type": "dict", "options": source_spec()},
        "files": {"type": "list", "elements": "path", "default": []},
        "checksums": {"type": "dict", "default": {}},
        "hold": {"type": "bool", "default": True},
        "keep": {"type": "bool", "default": True},
        "foreign": {"type": "bool", "default": False},
        "timeout": {"type": "int", "default": 1200},
    }


def read_source(given: Mapping[str, Any] | None, places: Places) -> tuple[Source | None, str]:
    """Return the requested source, and the text of its key file. Raises KeyProblem for a key that is not pinned or malformed."""
    if not given:
        return None, ""
    key = str(given["key"])
    if key:
        key = _openpgp.checked_key(key, given["fingerprints"], ", ".join(given["uris"]))
    uris, suites, components = (tuple(given[name]) for name in ("uris", "suites", "components"))
    return Source(uris, suites, components, places.key if key else "", places.source, given["packages_signed"]), key


@contextlib.contextmanager
def verified_files(system: System, params: Mapping[str, Any], *, is_check: bool) -> Iterator[dict[str, Any]]:
    """Yield the module's options with ``files`` replaced by verified copies that only root can write. In check mode they stay as they are.

    The copies are deleted at the end. Raises PackageProblem for a missing file, ChecksumMismatch for one with another digest.
    """
    with contextlib.ExitStack() as stack:
        copies = []
        for number, path in enumerate([] if is_check else params["files"]):
            if not system.path(path).is_file():
                raise PackageProblem(
                    f"{path} is not on the node", hint="Copy it there; the role does.", code="package-missing"
                )
            checksum = params["checksums"].get(path.rpartition("/")[2], "")
            copies.append(stack.enter_context(verified_copy(system, path, checksum, f"{_VERIFIED}/{number}")))
        yield {**params, "files": copies or params["files"]}
