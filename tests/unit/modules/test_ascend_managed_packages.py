# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ascend driver and firmware from deb and rpm packages, which the packages of the role do not overwrite."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed
from test_ascend_driver import BOTH, KEPT, NEWER, Node, node

__all__ = ["node"]

FIRMWARE = {"firmware": NEWER["firmware"]}
#: Answers as rpm does, from the files PACKAGES (name, version, and architecture) and FILES (path, name, and version) of a database.
RPM = """#!/bin/sh
root=""
[ "$1" = --root ] && { root=$2; shift 2; }
base=$root/var/lib/rpm
case $1 in
-qa) cat "$base/MESSAGES" >&2 2>/dev/null
     cat "$base/PACKAGES" ;;
-qf) found=$(sed -n "s|^$4 ||p" "$base/FILES"); [ -n "$found" ] || { echo "file $4 is not owned by any package"; exit 1; }
     echo "$found" ;;
esac
"""


def install_files(node: Node, versions: dict[str, str]) -> None:
    """Write the files of a vendor package, without ``ascend_install.info``."""
    for kind, version in versions.items():
        path = node.root / "usr/local/Ascend" / kind / "version.info"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Version={version}\n")


def add_deb(
    node: Node, name: str, version: str, files: tuple[str, ...] = (), state: str = "install ok installed"
) -> None:
    """Add a package to the database of dpkg."""
    info = node.root / "var/lib/dpkg/info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "format").write_text("1\n")
    (info / f"{name}.list").write_text("".join(f"{path}\n" for path in ("/.", *files)))
    with (node.root / "var/lib/dpkg/status").open("a") as status:
        status.write(
            f"Package: {name}\nStatus: {state}\nArchitecture: all\nMaintainer: test\nVersion: {version}\nDescription: test\n\n"
        )


def add_rpm(node: Node, directory: Path, packages: dict[str, str], files: dict[str, str]) -> None:
    """Write a database for the rpm model, and add the model to the search path."""
    base = node.root / "var/lib/rpm"
    base.mkdir(parents=True)
    (base / "PACKAGES").write_text("".join(f"{name}\t{version}\tnoarch\n" for name, version in packages.items()))
    (base / "FILES").write_text("".join(f"{path} {name}\t{packages[name]}\n" for path, name in files.items()))
    program = directory / "programs/rpm"
    program.parent.mkdir()
    program.write_text(RPM)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    node.monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def refuse(node: Node, versions: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    """Run in check mode and without it: both are refused alike, and nothing changes."""
    before = node.versions()
    results = [node.run(versions, check=check, **options) for check in (True, False)]
    assert all(result["failed"] and result["error_code"] == "package-managed" for result in results), results
    assert results[0]["msg"] == results[1]["msg"] and node.versions() == before
    assert not (node.root / KEPT).exists()
    return results[0]


@pytest.mark.parametrize("name", ["ascend-hdk-310p-npu-driver", "atlas-a3-hdk-npu-driver"])
def test_driver_of_a_deb_package_is_not_overwritten(node: Node, name: str) -> None:
    install_files(node, BOTH)
    add_deb(node, name, "24.1.rc1-1")
    refused = refuse(node, NEWER)
    assert f"{name} 24.1.rc1-1 (deb)" in refused["msg"] and "install the driver 24.1.rc2" in refused["msg"]
    assert f"apt-get remove {name}" in refused["hint"] and "package manager" in refused["hint"]
    removal = refuse(node, state="absent", remove_unmanaged=True)
    assert f"apt-get remove {name}" in removal["hint"] and "other version" not in removal["hint"]


def test_requested_version_of_a_deb_package_changes_nothing(node: Node) -> None:
    install_files(node, BOTH)
    add_deb(node, "ascend-hdk-310p-npu-driver", BOTH["driver"])
    for check in (True, False):
        done = node.run(BOTH, check=check)
        assert not done["changed"] and done["steps"] == [] and done["before"]["complete"], done
    # The firmware belongs to no package. Its own package requires the file of an installed driver.
    info = "Driver_Install_Path_Param=/usr/local/Ascend\nDriver_Install_Status=complete\n"
    (node.root / "etc/ascend_install.info").write_text(info)
    done = node.run({**BOTH, **FIRMWARE})
    assert done.get("steps") == ["install the firmware 7.5.0.1 in place of 7.3.0.1"] and done["after"]["complete"], done


def test_owner_of_the_file_is_found_by_any_name(node: Node) -> None:
    install_files(node, BOTH)
    add_deb(node, "site-npu", "7", ("/usr/local/Ascend/driver/version.info",))
    refused = refuse(node, NEWER)
    assert "the installed driver belongs to the package site-npu 7 (deb)" in refused["msg"]
    assert "installed firmware" not in refused["msg"]


def test_removed_deb_package_owns_nothing(node: Node) -> None:
    install_files(node, BOTH)
    add_deb(node, "ascend-hdk-310p-npu-driver", "24.1.rc1", state="deinstall ok config-files")
    add_deb(node, "ascend-docker-runtime", "6.0.0")
    assert node.run(NEWER)["changed"] and node.versions() == NEWER


def test_driver_of_a_half_installed_deb_package_is_not_overwritten(node: Node) -> None:
    install_files(node, BOTH)
    add_deb(node, "ascend-hdk-310p-npu-driver", "24.1.rc1-1", state="install reinstreq half-installed")
    refused = refuse(node, NEWER)
    assert "the installed driver belongs to the package ascend-hdk-310p-npu-driver (deb)" in refused["msg"]


def test_driver_and_firmware_of_rpm_packages_are_not_overwritten(node: Node, tmp_path: Path) -> None:
    install_files(node, BOTH)
    files = {"/usr/local/Ascend/firmware/version.info": "site-firmware"}
    add_rpm(node, tmp_path, {"Ascend-hdk-910b-npu-driver": "24.1.rc1-1", "site-firmware": "7.3.0.1-1"}, files)
    refused = refuse(node, NEWER)
    assert "the installed firmware belongs to the package site-firmware 7.3.0.1-1 (rpm)" in refused["msg"]
    assert "rpm -e Ascend-hdk-910b-npu-driver" in refused["hint"]
    assert not node.run(BOTH)["changed"]


def test_unreadable_package_database_is_an_error(node: Node) -> None:
    add_deb(node, "ascend-hdk-310p-npu-driver", "24.1.rc1")
    (node.root / "var/lib/dpkg/status").write_text("Package: broken\nthis is no field\n")
    refused = node.run(BOTH)
    assert refused["error_code"] == "packages-unreadable" and not node.versions()


def test_damaged_rpm_database_with_exit_code_0_is_an_error(node: Node, tmp_path: Path) -> None:
    install_files(node, BOTH)
    add_rpm(node, tmp_path, {}, {})
    (node.root / "var/lib/rpm/MESSAGES").write_text("error: cannot open Packages database in /var/lib/rpm\n")
    refused = node.run(NEWER)
    assert refused["error_code"] == "packages-unreadable" and "cannot open Packages database" in refused["msg"]
    assert node.versions() == BOTH


@pytest.mark.parametrize("verb", ["-W", "-S"])
def test_query_without_result_is_an_error_with_a_hint(node: Node, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A locked or damaged database does not prove that no package owns the driver: it is an error with a hint."""
    install_files(node, BOTH)
    add_deb(node, "site-npu", "7", ("/usr/local/Ascend/driver/version.info",))
    run = node.system.run

    def query(argv: Sequence[str], timeout: float, *rest: Any, **options: Any) -> Completed:
        if verb in argv:
            if verb == "-S":
                return Completed(2, "", "dpkg-query: error: files list file for package 'site-npu' is damaged")
            raise AcceleratorError(f"{' '.join(argv)} did not end within {timeout:g} s", code="command-timeout")
        return run(argv, timeout, *rest, **options)

    monkeypatch.setattr(node.system, "run", query)
    refused = node.run(NEWER)
    assert refused["error_code"] == "packages-unreadable" and "package manager" in refused["hint"]
    assert node.versions() == BOTH


def test_package_replacing_interrupted_installation_changes_nothing(node: Node) -> None:
    """An installation was interrupted, and the vendor's deb package has installed the same version since: nothing changes."""
    assert node.run({"driver": BOTH["driver"]})["changed"]
    path = node.root / KEPT / "record.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "doing": "driver"}))
    add_deb(node, "ascend-hdk-310p-npu-driver", BOTH["driver"])
    done = node.run({"driver": BOTH["driver"]})
    assert not done.get("failed") and done["steps"] == [], done
