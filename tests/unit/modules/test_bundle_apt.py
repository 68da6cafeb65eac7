# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A bundle with the real apt: from a signed package source into an archive, and from there with a node's settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_bundle import DEBIAN, PLACE

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages"))

import nvidia

pytestmark = pytest.mark.prove

ROOT = Path(__file__).resolve().parents[3]
VERSION = "580.95.05"
CATALOG = yaml.safe_load((ROOT / "roles/nvidia_driver/vars/debian.yml").read_text("utf-8"))["__nvidia_driver_catalogs"]
KINDS = ("nvidia-kernel-open-dkms", "nvidia-kernel-dkms")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a signed source like the vendor's."""
    directory = tmp_path_factory.mktemp("vendor") / "debian13"
    directory.mkdir()
    for version in (VERSION, "570.1.2"):
        nvidia.driver(directory, version)
    nvidia.index(directory)
    return directory


@pytest.fixture
def gather(run_here: Callable[..., Any], tmp_path: Path, repository: Path) -> Callable[..., Any]:
    """Return a function that gathers this source's driver of branch 580. ``source`` overrides values of the source."""

    def run(**source: Any) -> Any:
        need = {
            "kind": "driver",
            "of": "nvidia_driver",
            "platform": DEBIAN,
            "wanted": {"version": "580"},
            "catalog": CATALOG["nvidia"],
            "source": {
                "uris": [f"file:{repository}"],
                "suites": ["/"],
                "key": (repository / "3bf863cc.pub").read_text(),
                "fingerprints": [(repository / "FINGERPRINT").read_text()],
                **source,
            },
        }
        return run_here(
            "bundle_create",
            {
                "archive": str(tmp_path / "x.bundle"),
                "cache_path": str(tmp_path / "parts"),
                "needs": [need],
                "mirrors": {"debian_13": []},
            },
        )

    return run


def packages(result: dict[str, Any]) -> set[str]:
    return {path.rpartition("/")[2].partition("_")[0] for path in result["added"] if path.endswith(".deb")}


def test_driver_is_bundled_from_signed_source_and_installed(
    gather: Callable[..., Any], run_here: Callable[..., Any], repository: Path, tmp_path: Path
) -> None:
    made = gather()
    assert made["changed"] is True, made
    assert packages(made) == {
        "nvidia-driver-cuda",
        *KINDS,
        "nvidia-kernel-support",
        "libcuda1",
        "libnvidia-ml1",
        "nvidia-persistenced",
    }
    assert not any("570" in path for path in made["added"])
    taken = run_here(
        "bundle_extract",
        {"archive": made["archive"], "dest": str(tmp_path / "taken"), "checksum": made["manifest_checksum"]},
    )
    manifest = yaml.safe_load((tmp_path / "taken/manifest.json").read_text())
    signed = {key for item in manifest["items"] if item["kind"] == "package" for key in item["signed_by"]}
    fingerprint = (repository / "FINGERPRINT").read_text()
    assert len(signed) == 1 and fingerprint.endswith(signed.pop())
    assert gather()["changed"] is False

    # The files of the role on a node, in another directory, and on an empty node.
    node = tmp_path / "node"
    own = yaml.safe_load((ROOT / "roles/offline/vars/main.yml").read_text("utf-8"))
    for name, key in (("apt.conf", "__offline_settings"), ("sources.list", "__offline_source")):
        (tmp_path / name).write_text(own[key].replace("{{ __offline_directory }}", str(node)))
    (node / "packages").mkdir(parents=True)
    (node / "lists/partial").mkdir(parents=True)
    found = taken["packages"][PLACE]
    shutil.copy(Path(found["path"], "Packages"), node / "packages")
    for name in ("apt.conf", "sources.list"):
        shutil.move(tmp_path / name, node / name)
    (node / "status").write_text("")
    environment = {**os.environ, "APT_CONFIG": str(node / "apt.conf"), "LC_ALL": "C"}

    def apt(*words: str, check: bool = True) -> str:
        argv = ["apt-get", f"-o=Dir::State::status={node}/status", *words]
        done = subprocess.run(argv, env=environment, cwd=node, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == check, done.stdout + done.stderr
        return done.stdout + done.stderr

    apt("-q", "-o=APT::Update::Error-Mode=any", "update")
    foreseen = re.findall(own["__offline_installs"], apt("-s", "install", "nvidia-driver-cuda", KINDS[0]))
    words = ["=".join(each) for each in foreseen]
    assert {name for name, _version in foreseen} == packages(made) - {KINDS[1], "nvidia-persistenced"}
    # Before the packages are copied they are missing, and a different file is refused.
    apt("download", words[0], check=False)
    for word in words:
        shutil.copy(Path(found["path"], found["files"][word]), node / "packages")
    apt("download", *words)
    (node / "packages" / found["files"][words[0]]).write_bytes(b"another")
    (node / found["files"][words[0]]).unlink()
    # One version of apt reports an unexpected size, another one different checksums.
    assert "Hashes of expected file" in apt("download", words[0], check=False)


def test_source_signed_with_another_key_is_rejected(
    gather: Callable[..., Any], tmp_path: Path, repository: Path
) -> None:
    """The source is signed with a different key than the pinned one: it is refused."""
    other = tmp_path / "other" / "debian13"
    other.mkdir(parents=True)
    nvidia.driver(other, VERSION)
    nvidia.index(other)
    refused = gather(key=(other / "3bf863cc.pub").read_text(), fingerprints=[(other / "FINGERPRINT").read_text()])
    assert refused["failed"] is True and "A package source cannot be used" in refused["msg"], refused
    refused = gather(fingerprints=[(other / "FINGERPRINT").read_text()])
    assert refused["error_code"] == "repository-key", refused


def test_package_replaced_after_index_is_rejected(gather: Callable[..., Any], tmp_path: Path, repository: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy)
    name = f"libcuda1_{VERSION}-1_amd64.deb"
    (copy / name).write_bytes((copy / name).read_bytes()[:-4] + b"evil")
    refused = gather(uris=[f"file:{copy}"])
    assert refused["failed"] is True, refused
    assert not (tmp_path / "x.bundle").exists()
