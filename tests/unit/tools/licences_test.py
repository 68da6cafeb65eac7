# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Code that Ansible loads into its own process is GPL-3.0-or-later, because Ansible is. `reuse` does not check that."""

from __future__ import annotations

from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parents[3] / "plugins"
#: Directories that Ansible does not load into its process as plugins.
SHARED = {"module_utils"}
IDENTIFIER = "GPL-3.0-or-later"
LINE = (
    "GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)"
)
FILES = sorted(path for path in PLUGINS.rglob("*.py") if path.relative_to(PLUGINS).parts[0] not in SHARED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_plugin_has_the_license_of_ansible(path: Path) -> None:
    header = path.read_text(encoding="utf-8").splitlines()[:12]
    assert any("SPDX-License-Identifier" in line and line.endswith(IDENTIFIER) for line in header)
    assert any(line.endswith(LINE) for line in header)
