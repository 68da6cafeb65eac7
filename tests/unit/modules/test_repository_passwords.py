# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Passwords of package repositories: only root can read the files that have them, and no diff, result, or error shows them."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._packages.apt import Apt
from ansible_collections.dra.accelerators.plugins.module_utils._packages.argspec import read_logins, read_source
from ansible_collections.dra.accelerators.plugins.module_utils._packages.dnf import Dnf
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import (
    Login,
    PackageProblem,
    PackageTool,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.kept_packages import (
    file_changes,
    write_files,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.zypper import Zypper
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from test_nvidia_container_toolkit import NEWER, Node, node

__all__ = ["node"]

PASSWORD = "s3cr3t/W0rd"
ADDRESS = "https://me:s3cr3t%2FW0rd@mirror.example/repo/"
TOOLS = {"apt": Apt, "dnf": Dnf, "zypper": Zypper}
EXPECTED = {
    "apt": {
        "/etc/apt/auth.conf.d/dra-accelerators-x.conf": f"machine https://mirror.example/repo/ login me password {PASSWORD}\n",
        "/etc/apt/sources.list.d/dra-accelerators-x.sources": "URIs: https://mirror.example/repo/\n",
    },
    "dnf": {
        "/etc/yum.repos.d/dra-accelerators-x.repo": f"baseurl=https://mirror.example/repo/\nusername=me\npassword={PASSWORD}\n"
    },
    "zypper": {
        "/etc/zypp/credentials.d/dra-accelerators-x": f"username=me\npassword={PASSWORD}\n",
        "/etc/zypp/repos.d/dra-accelerators-x.repo": "baseurl=https://mirror.example/repo/?credentials=dra-accelerators-x\n",
    },
}


def written(title: str, system: System, uris: list[str]) -> dict[str, Any]:
    """Write a source as a module does. Return the texts of the diff."""
    tool: PackageTool = TOOLS[title](system, timeout=1)
    places = tool.places("x")
    given = {"uris": uris, "suites": ["/"], "components": [], "key": "", "fingerprints": [], "packages_signed": True}
    source, _key = read_source(given, places)
    assert source is not None and PASSWORD not in repr(source)
    texts = {**places.logins(tool.login_text(source)), places.source: tool.source_text(source)}
    before = {path: system.read_text(path) for path in texts if system.exists(path)}
    changes = file_changes(before, texts)
    write_files(system, changes)
    return {change.path: change.to_diff() for change in changes}


@pytest.mark.parametrize("title", TOOLS)
def test_password_is_in_root_only_files(title: str, tmp_path: Path) -> None:
    system = System(str(tmp_path))
    diff = written(title, system, [ADDRESS])
    assert diff.keys() == EXPECTED[title].keys()
    for path, lines in EXPECTED[title].items():
        text = system.read_text(path)
        assert all(line in text.splitlines() for line in lines.splitlines()), text
        mode = stat.S_IMODE(system.path(path).stat().st_mode)
        assert mode == (0o600 if PASSWORD in text else 0o644), path
    assert PASSWORD not in json.dumps(diff) and "s3cr3t" not in json.dumps(diff)
    assert "********" in json.dumps(diff)
    # Without a password, nothing of it remains.
    written(title, system, ["https://mirror.example/repo/"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "s3cr3t" in path.read_text()]


@pytest.mark.parametrize(
    "uris",
    [
        [ADDRESS, "https://mirror.example/other/"],
        [ADDRESS, "https://you:s3cr3t%2FW0rd@mirror.example/other/"],
        ["https://me:a%20b@mirror.example/"],
        ["https://me:a%0Ab@mirror.example/"],
        ["https://me:a%22b@mirror.example/"],
        ["https://me@mirror.example/"],
    ],
)
def test_logins_that_no_file_can_contain_are_rejected(uris: list[str]) -> None:
    with pytest.raises(PackageProblem) as raised:
        read_logins(uris)
    assert "s3cr3t" not in str(raised.value) and raised.value.hint


def test_addresses_without_login_are_unchanged() -> None:
    uris = ["file:/srv/x", "https://mirror.example/a@b/", "http://mirror.example:8080/x"]
    assert read_logins(uris) == (tuple(uris), None)
    assert read_logins([ADDRESS]) == (("https://mirror.example/repo/",), Login("me", PASSWORD))


def test_module_shows_no_password(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the result with diff and arguments nor an error with a tool's output has the password."""
    source = {"uris": [ADDRESS], "suites": ["/"]}
    for check in (True, False):
        done = node.run(NEWER, source=source, check=check)
        assert done["changed"] and "s3cr3t" not in json.dumps(done), done
    (login,) = node.machine.list_directory("/etc/apt/auth.conf.d")
    assert stat.S_IMODE(node.machine.path(f"/etc/apt/auth.conf.d/{login}").stat().st_mode) == 0o600
    (listed,) = (name for name in node.machine.list_directory("/etc/apt/sources.list.d") if name.endswith(".sources"))
    assert "s3cr3t" not in node.machine.read_text(f"/etc/apt/sources.list.d/{listed}")

    def fails(*_words: Any, **_options: Any) -> None:
        raise PackageProblem(f"E: Failed to fetch {ADDRESS}InRelease  401  Unauthorized")

    monkeypatch.setattr(node.apt, "view", fails)
    refused = node.run("1.0", source=source)
    assert "Failed to fetch https://me:********@mirror.example" in refused["msg"], refused
    assert "s3cr3t" not in json.dumps(refused)
