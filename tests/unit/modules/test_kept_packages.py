# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packages kept on a node: an interrupted copy or download never counts as a kept package."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._packages import kept_packages
from ansible_collections.dra.accelerators.plugins.module_utils._packages.apt import Apt
from ansible_collections.dra.accelerators.plugins.module_utils._packages.dnf import Dnf
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import PackageProblem
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed, System

OWN, OTHER = "/var/lib/dra-accelerators/nvidia/packages", "/var/lib/dra-accelerators/toolkit/packages"
NAME = "libcuda1_580.95.05-1_amd64.deb"
PACKAGES = {"libcuda1": "580.95.05-1"}


class Source(Apt):
    """An apt model whose source has one package. It sends ``sent`` bytes of the package before ``end`` is raised."""

    def __init__(self, root: Path, content: bytes) -> None:
        super().__init__(System(str(root)), timeout=60)
        self.content = content
        self.sent = len(content)
        self.end: BaseException | None = None

    def download(self, words: Sequence[str], folder: str) -> None:
        assert words == ["libcuda1=580.95.05-1"]
        (Path(folder) / NAME).write_bytes(self.content[: self.sent])
        if self.end is not None:
            raise self.end


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a package that dpkg-deb has built."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "tree/DEBIAN").mkdir(parents=True)
    control = "Package: libcuda1\nVersion: 580.95.05-1\nArchitecture: amd64\nMaintainer: a <a@b.c>\nDescription: x\n"
    (folder / "tree/DEBIAN/control").write_text(control)
    (folder / "tree/data").write_bytes(bytes(range(256)) * 8)
    subprocess.run(["dpkg-deb", "--build", str(folder / "tree"), str(folder / NAME)], check=True, capture_output=True)
    return (folder / NAME).read_bytes()


@pytest.fixture
def source(tmp_path: Path, package: bytes) -> Source:
    return Source(tmp_path, package)


def store_of(source: Source) -> kept_packages.PackageStore:
    return kept_packages.PackageStore(source.system, source, OWN, keep=True, title="the driver", hint="")


def names_in(source: Source, folder: str = OWN) -> list[str]:
    return [name for name in source.system.list_directory(folder) if name.endswith(".deb")]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), PackageProblem("The connection was closed.")])
@pytest.mark.parametrize("sent", [0, 100, -1])
def test_interrupted_download_keeps_nothing_and_the_next_one_completes_it(
    source: Source, end: BaseException, sent: int
) -> None:
    store = store_of(source)
    source.sent, source.end = sent if sent >= 0 else len(source.content) - 1, end
    with contextlib.suppress(KeyboardInterrupt):
        store.fetch(PACKAGES)
    assert names_in(source) == [] and not store.files_of(PACKAGES)["libcuda1"]["path"]
    source.sent, source.end = len(source.content), None
    store.fetch(PACKAGES)
    path = store.files_of(PACKAGES)["libcuda1"]["path"]
    assert source.system.read_bytes(path) == source.content
    assert sorted(source.system.list_directory(OWN)) == [NAME, "partial"]


def test_partial_package_is_downloaded_again(source: Source) -> None:
    """apt renames a package without a sync: after a power cut it can be empty or truncated, and is downloaded again."""
    store = store_of(source)
    store.ready()
    path = source.system.path(f"{OWN}/{NAME}")
    for length in (0, 7, 8, 70, len(source.content) - 1):
        path.write_bytes(source.content[:length])
        assert not store.files_of(PACKAGES)["libcuda1"]["path"], length
        store.fetch(PACKAGES)
        assert path.read_bytes() == source.content, length


@pytest.mark.parametrize("what", ["take", "fetch"])
def test_killed_copy_keeps_nothing(source: Source, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = source.system.path(OTHER)
    other.mkdir(parents=True)
    (other / NAME).write_bytes(source.content)
    store = store_of(source)
    store.ready()

    def copy() -> None:
        if what == "take":
            store.take({"libcuda1": f"{OTHER}/{NAME}"})
        else:
            store.fetch(PACKAGES)

    def killed(source_path: Path, target: Path) -> None:
        Path(target).write_bytes(Path(source_path).read_bytes()[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", killed)
        with pytest.raises(KeyboardInterrupt):
            copy()
    assert names_in(source) == []
    source.end = AssertionError("it is not downloaded")
    copy()
    assert source.system.read_bytes(f"{OWN}/{NAME}") == source.content
    store.forget([])
    assert source.system.list_directory(OWN) == ("partial",)


class RpmNode(System):
    """A node with an rpm model that knows the files with valid digests."""

    whole: tuple[str, ...] = ()

    def run(
        self,
        argv: Sequence[str],
        timeout: float,
        input: str | None = None,  # noqa: A002
        environment: Any = None,
        longest: int = 0,
    ) -> Completed:
        is_whole = Path(argv[-1]).name in self.whole
        if argv[1] == "-K":
            return Completed(0 if is_whole else 1, "", "")
        assert argv[1] == "-qp"
        return Completed(0, "kmod-nvidia\t3:580.95.05-1.el9\tx86_64\n", "")


def test_rpm_without_its_digests_is_not_kept(tmp_path: Path) -> None:
    node = RpmNode(str(tmp_path))
    name = "kmod-nvidia-580.95.05-1.el9.x86_64.rpm"
    node.write_atomic(f"{OWN}/{name}", b"part")
    tool = Dnf(node, timeout=1)
    assert tool.kept_in(OWN) == {}
    node.whole = (name,)
    assert list(tool.kept_in(OWN).values()) == [f"{OWN}/{name}"]
