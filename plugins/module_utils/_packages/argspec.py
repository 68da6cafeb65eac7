# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Define the common options of modules that install vendor packages: their sources and their local files."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from ansible.module_utils.basic import AnsibleModule

from .._host.driver_installation import verified_copy
from .._host.secret_masking import SHORTEST
from ..core.host.system import System
from . import openpgp
from .interface import Login, PackageProblem, Places, Source

#: Values that netrc and INI files can contain without quotes.
_LOGIN = re.compile(r"[^\s\x00-\x1f\x7f\"'\\]{1,1000}")
_ADDRESS_LOGIN = re.compile(r"://([^/\s:@\"]{0,200}:[^/\s@\"]{1,2000})@")
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
    """Return the options of modules that install a package group."""
    return {
        "state": {"type": "str", "choices": ["present", "previous", "absent"], "default": "present"},
        "source": {"type": "dict", "options": source_spec()},
        "files": {"type": "list", "elements": "path", "default": []},
        "checksums": {"type": "dict", "default": {}},
        "hold": {"type": "bool", "default": True},
        "keep": {"type": "bool", "default": True},
        "remove_unmanaged": {"type": "bool", "default": False},
        "timeout": {"type": "int", "default": 1200},
    }


def read_source(given: Mapping[str, Any] | None, places: Places) -> tuple[Source | None, str]:
    """Return the requested source and the text of its key file. Raises KeyProblem for an invalid key, or one without a pinned fingerprint."""
    if not given:
        return None, ""
    key = str(given["key"])
    if key:
        key = openpgp.checked_key(key, given["fingerprints"], ", ".join(given["uris"]))
    suites, components = (tuple(given[name]) for name in ("suites", "components"))
    uris, login = read_logins(given["uris"])
    signed_by = places.key if key else ""
    return Source(uris, suites, components, signed_by, places.source, given["packages_signed"], login), key


def read_logins(given: Sequence[str]) -> tuple[tuple[str, ...], Login | None]:
    """Return URIs without credentials, and their common login. Raises PackageProblem if the logins differ."""
    uris: list[str] = []
    logins: dict[Login | None, None] = {}
    for uri in given:
        parts = urlsplit(uri)
        words, host = parts.netloc.rpartition("@")[::2]
        username, _colon, password = words.partition(":")
        uris.append(parts._replace(netloc=host).geturl() if words else uri)
        logins[Login(unquote(username), unquote(password)) if words else None] = None
    if len(logins) > 1:
        raise PackageProblem(
            f"The addresses {', '.join(uris)} have different user names or passwords, expected one for all",
            hint="Write the same user name and password in each address of the source, or in none.",
            code="source",
        )
    login = next(iter(logins), None)
    if login is not None and not all(_LOGIN.fullmatch(each) for each in (login.username, login.password)):
        raise PackageProblem(
            f"The user name or password of {', '.join(uris)} is empty, or has blanks or control characters, which package managers cannot read",
            hint="Expected https://USER:PASSWORD@HOST/PATH, with other special characters percent-encoded.",
            code="source",
        )
    return tuple(uris), login


def hide_passwords(module: AnsibleModule) -> None:
    """Add the passwords in a module's URIs to the values that Ansible masks in the result and in the arguments."""
    texts = [json.dumps(module.params.get(name)) for name in ("source", "mirrors", "needs")]
    for login in (found for text in texts for found in _ADDRESS_LOGIN.findall(text)):
        password = login.partition(":")[2]
        hidden = {password, unquote(password)} if len(password) >= SHORTEST else {f"{login}@"}
        module.no_log_values.update(hidden - {""})


@contextlib.contextmanager
def verified_files(system: System, params: Mapping[str, Any], *, is_check: bool) -> Iterator[dict[str, Any]]:
    """Yield the module's options with ``files`` replaced by verified copies that only root can write. In check mode they are not copied.

    The copies are deleted at the end, and those of a killed run at the beginning. Raises PackageProblem for a missing
    file, and ChecksumMismatch for a file with a different digest.
    """
    if not is_check:
        system.remove_tree(_VERIFIED)
    with contextlib.ExitStack() as stack:
        copies = []
        for number, path in enumerate([] if is_check else params["files"]):
            if not system.path(path).is_file():
                raise PackageProblem(
                    f"{path} is not on the node",
                    hint="Copy the file to the node. The role of this software copies it.",
                    code="package-missing",
                )
            checksum = params["checksums"].get(path.rpartition("/")[2], "")
            copies.append(stack.enter_context(verified_copy(system, path, checksum, f"{_VERIFIED}/{number}")))
        yield {**params, "files": copies or params["files"]}
