# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keys that rpm accepts for packages of any repository: dnf imports one only if the packages of its repository are signed."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._packages.dnf import Dnf
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import Source
from ansible_collections.dra.accelerators.plugins.module_utils._packages.zypper import Zypper
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed, System
from test_openpgp import GOOD, GOOD_PRINT

from tests.unit.crash_steps import kill_before

NAME = f"gpg-pubkey-{GOOD_PRINT[-8:].lower()}-6553f100"


class Node(System):
    """A node with an rpm model that only knows keys."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        root.mkdir(parents=True, exist_ok=True)
        if not self.exists("/rpmdb"):
            self.keys = set()

    @property
    def keys(self) -> set[str]:
        return {*self.read_text("/rpmdb").split()}

    @keys.setter
    def keys(self, keys: set[str]) -> None:
        self.path("/rpmdb").write_text("\n".join(keys))

    def run(
        self,
        argv: Sequence[str],
        timeout: float,
        input: str | None = None,  # noqa: A002
        environment: Any = None,
        longest: int = 0,
    ) -> Completed:
        if argv[1] == "--import":
            self.keys |= {NAME}
        elif argv[1] == "-e":
            self.keys -= {*argv}
        return Completed(0, "".join(f"{key}\n" for key in self.keys), "")


@pytest.mark.parametrize(
    ("tool", "signed", "imported"), [(Dnf, True, True), (Dnf, False, False), (Zypper, False, True)]
)
def test_key_is_imported_only_for_signed_packages(tool: Any, tmp_path: Path, *, signed: bool, imported: bool) -> None:
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
        # A key that an earlier release imported is removed. A key that the administrator imported stays.
        write(packages_signed=True)
        assert NAME in node.keys
        write(packages_signed=False)
        assert not node.keys
        node.keys |= {NAME}
        write(packages_signed=False)
        assert node.keys == {NAME}


ADMINISTRATOR = "gpg-pubkey-0badcafe-6553f100"


def prepared(tool: Any, root: Path) -> Any:
    """Return a package manager on a node whose repository's key file exists and whose administrator imported another key."""
    node = Node(root)
    node.keys |= {ADMINISTRATOR}
    manager = tool(node, timeout=1)
    places = manager.places("x")
    node.write_atomic(places.key, GOOD.encode())
    node.write_atomic(places.source, manager.source_text(Source(("https://vendor",), signed_by=places.key)).encode())
    return manager


def interrupted(tool: Any, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """Yield package managers of nodes on which an import was killed before each of its steps, or on which each of its writes failed."""
    for number in itertools.count():
        manager = prepared(tool, tmp_path / str(number))
        places, system = manager.places("x"), manager.system
        if how == "killed":
            step = kill_before(number, lambda manager=manager, places=places: manager.trust(places), Path(system.root))
        else:
            write, done, step = system.write_atomic, [], ""

            def full(
                path: str, *words: Any, number: int = number, done: Any = done, write: Any = write, **more: Any
            ) -> None:
                done.append(path)
                if len(done) > number:
                    raise OSError(errno.ENOSPC, "No space left on device", path)
                write(path, *words, **more)

            with monkeypatch.context() as patch:
                patch.setattr(system, "write_atomic", full)
                try:
                    manager.trust(places)
                except OSError as error:
                    step = str(error.filename)
        if not step:
            assert number > 1
            return
        yield step, manager


@pytest.mark.parametrize("tool", [Dnf, Zypper])
@pytest.mark.parametrize("how", ["killed", "disk full"])
@pytest.mark.parametrize("again", [False, True])
def test_key_of_an_interrupted_import_is_removed_with_its_file(
    tool: Any, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    """The key is removed directly, or after another run has used it. The administrator's key stays."""
    imported = set()
    for step, manager in interrupted(tool, tmp_path, how, monkeypatch):
        system, places = manager.system, manager.places("x")
        imported |= system.keys
        if again:
            manager.trust(places)
            assert system.keys == {ADMINISTRATOR, NAME}, step
        system.remove(places.key)
        manager.distrust(places)
        assert system.keys == {ADMINISTRATOR}, step
        assert not system.exists("/var/lib/dra-accelerators/rpm-keys"), step
    assert NAME in imported
