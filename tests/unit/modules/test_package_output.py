# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A package manager with much output is not killed during an installation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._packages.apt import Apt
from ansible_collections.dra.accelerators.plugins.module_utils._packages.dnf import Dnf
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

#: Writes 2 MiB, as dpkg does with a warning for each missing file of a list, and then does its work.
PROGRAM = "#!/bin/sh\nhead -c 2097152 /dev/zero | tr '\\0' 'w'\necho done > {mark}\n"


@pytest.mark.parametrize("program", ["dpkg", "rpm"])
def test_installer_with_much_output_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / program).write_text(PROGRAM.format(mark=mark), encoding="utf-8")
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if program == "dpkg":
        done = Apt(System(), timeout=30)._act(["dpkg", "--configure", "-a"])
    else:
        done = Dnf(System(), timeout=30).run(["rpm", "-e", "package"])
    assert done.returncode == 0 and len(done.stdout) == 2 * 1024**2
    assert mark.read_text("utf-8") == "done\n"
