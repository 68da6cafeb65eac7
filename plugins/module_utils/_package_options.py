# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The options that modules share which install a vendor's packages: where they come from, and what files have to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _openpgp
from ._driver_install import digest_of
from ._package_port import PackageProblem, Places, Source
from .core.system import System


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


def verify_files(system: System, params: Mapping[str, Any]) -> None:
    """See that packages that were brought are what they should be. Raises PackageProblem."""
    for path in params["files"]:
        expected = params["checksums"].get(path.rpartition("/")[2], "")
        if not system.exists(path):
            raise PackageProblem(
                f"{path} is not on the node", hint="Copy it there; the role does.", code="package-missing"
            )
        if expected and digest_of(system, path) != expected.lower():
            raise PackageProblem(
                f"{path} has another SHA-256 digest than the one that was given",
                hint="Nothing was changed.",
                code="checksum",
            )
