# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keys that rpm accepts for packages of every repository: dnf imports one only if the packages of its repository are signed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._dnf_tool import Dnf
from ansible_collections.dra.accelerators.plugins.module_utils._package_port import Source
from ansible_collections.dra.accelerators.plugins.module_utils._zypper_tool import Zypper
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import Completed, System
from test_openpgp import GOOD, GOOD_PRINT

NAME = f"gpg-pubkey-{GOOD_PRINT[-8:].lower()}-6553f100"


class Node(System):
    """A node with an rpm that only knows keys."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.keys: set[str] = set()

    def run(
        self,
        argv: Sequence[str],
        timeout: float,
        input: str | None = None,  # noqa: A002
        environment: Any = None,
        longest: int = 0,
    ) -> Completed:
        if argv[1] == "--import":
            self.keys.add(NAME)
        elif argv[1] == "-e":
            self.keys -= {*argv}
        return Completed(0, "".join(f"{key}\n" for key in self.keys), "")


@pytest.mark.parametrize(
    ("tool", "signed", "imported"), [(Dnf, True, True), (Dnf, False, False), (Zypper, False, True)]
)
def test_key_is_imported_into_rpm_only_for_signed_packages(
    tool: Any, tmp_path: Path, *, signed: bool, imported: bool
) -> None:
    node = Node(tmp_path)
    manager = tool(node, timeout=1)
    places = manager.places("x")

    def write(*, packages_signed: bool) -> None:
        source = Source(("https://vendor",), signed_by=places.key, path=places.source, packages_signed=packages_signed)
        node.write_atomic(places.key, GOOD.encode())
        node.write_atomic(places.source, manager.source_text(source).encode())
        manager.trust(places)

    write(packages_signed=signed)
    assert (NAME in node.keys) is imported
    if tool is Dnf:
        # What an earlier release imported goes, and a key that the administrator imported stays.
        write(packages_signed=True)
        assert NAME in node.keys
        write(packages_signed=False)
        assert not node.keys
        node.keys.add(NAME)
        write(packages_signed=False)
        assert node.keys == {NAME}
