# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A module without root permissions reports this when the operating system denies an action."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOBODY = 65534


def test_user_without_root_gets_an_error_about_become(run_here: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("")
    path.chmod(0o600)
    options = {"files": [{"path": str(path), "content": "a"}]}
    as_root = run_here("file_set", {"files": [{"path": str(tmp_path), "content": "a"}]})
    assert "become" not in as_root["msg"]
    os.seteuid(NOBODY)
    try:
        denied = run_here("file_set", options)
    finally:
        os.seteuid(0)
    assert denied["failed"] and "become: true" in denied["msg"], denied
