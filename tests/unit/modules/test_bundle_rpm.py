# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""RPM packages of a bundle: the signer of a repository, the output of dnf and rpm, and a host that uses the bundle only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._bundle import rpm_repository as rpm
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.bundle_manifest import (
    PACKAGE,
    BundleError,
    Item,
    Manifest,
)
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.requirements import missing, plan
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import (
    Change,
    PackageProblem,
    Packages,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.manager_detection import BUNDLE, tool_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed, System
from ansible_collections.dra.accelerators.plugins.modules import bundle_packages

ROCKY = {"distribution": "rocky", "release": "9", "machine": "x86_64"}
FINGERPRINT = "0123456789ABCDEF0123456789ABCDEF01234567"
NEED = {"kind": "packages", "of": "python_environment", "platform": ROCKY, "names": ["python3.12"]}
DRIVER = {
    "kind": "driver",
    "of": "nvidia_driver",
    "platform": ROCKY,
    "kernel": "5.14.0-570.el9.x86_64",
    "wanted": {"version": "580", "kernel_modules": "open"},
    "catalog": [
        {"modules": "open", "build": "dkms", "components": "compute", "packages": ["nvidia-driver-cuda", "kmod"]}
    ],
    "headers": ["kernel-devel={kernel_release}"],
    "source": {"uris": ["https://vendor.example/rhel9"], "suites": ["/"], "key": "k", "fingerprints": [FINGERPRINT]},
}
MIRROR = {"uris": ["https://mirror.example/base"], "key": "/keys/rocky.asc", "fingerprints": [FINGERPRINT]}


def platform_plan(*needs: Mapping[str, Any]) -> Any:
    (found,) = plan(needs).platforms
    return found


def test_check_mirrors_without_a_platform_reports_the_missing_entry() -> None:
    with pytest.raises(BundleError, match="accelerator_bundle_mirrors has no entry rocky_9") as raised:
        rpm.check_mirrors(plan([NEED, DRIVER]).platforms, {"debian_13": []})
    assert "nvidia_driver, python3.12" in str(raised.value) and "{rocky_9: [{uris: [...], key:" in str(raised.value)
    rpm.check_mirrors(plan([NEED]).platforms, {"rocky_9": []})


def test_repositories_include_mirrors_and_vendor() -> None:
    first, second = rpm.repositories(platform_plan(NEED, DRIVER), {"rocky_9": [{**MIRROR, "index_signed": False}]})
    assert (first.key_file, first.index_signed, first.packages_signed) == ("/keys/rocky.asc", False, True)
    assert "repo_gpgcheck=0" in first.text("/k") and "repo_gpgcheck=1" in second.text("/k")
    assert second.uris == ("https://vendor.example/rhel9",)
    assert rpm.repository_of("https://vendor.example/rhel9/x.rpm", (first, second)) is second
    assert rpm.repository_of("https://vendor.example/rhel90/x.rpm", (first, second)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"uris": []}, "expected uris, key"),
        ({"key": ""}, "expected uris, key"),
        ({"fingerprints": []}, "No fingerprint is pinned"),
        ({"packages_signed": False, "index_signed": False}, "neither its index nor its packages"),
    ],
)
def test_repositories_unsigned_mirror_is_rejected(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BundleError, match=words):
        rpm.repositories(platform_plan(NEED), {"rocky_9": [{**MIRROR, **change}]})


def test_plan_dpkg_status_is_rejected() -> None:
    with pytest.raises(BundleError, match="rpm has no such file"):
        plan([{**NEED, "status": "/x"}])


def test_missing_headers_match_kernel_of_host() -> None:
    items = [("nvidia-driver-cuda", "3:580.1-1.el9"), ("kmod", "3:580.1-1.el9"), ("kernel-devel", "5.14.0-503.el9")]

    def lacking(*more: tuple[str, str]) -> list[str]:
        there = [
            Item(f"packages/{name}-{version}", PACKAGE, name, version, 1, "0" * 64, ("rocky_9_x86_64",))
            for name, version in [*items, *more]
        ]
        return missing([DRIVER], Manifest(tuple(there)))

    assert lacking() == [
        "the package kernel-devel of the kernel 5.14.0-570.el9.x86_64 for rocky 9 (x86_64) (nvidia_driver)"
    ]
    assert lacking(("kernel-devel", "5.14.0-570.el9")) == []


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (
            "x.rpm:\n    Header V4 RSA/SHA512 Signature, key ID 01234567: OK\n    Header SHA256 digest: OK\n",
            (FINGERPRINT,),
        ),
        (
            "x.rpm:\n    Header V4 RSA/SHA512 Signature, key fingerprint: " + FINGERPRINT.lower() + ": OK\n",
            (FINGERPRINT,),
        ),
        ("x.rpm:\n    Header V4 RSA/SHA512 Signature, key ID 89abcdef: OK\n", ("89ABCDEF",)),
        ("x.rpm:\n    Header V4 RSA/SHA512 Signature, key ID 01234567: NOKEY\n", ()),
        ("x.rpm:\n    Header SHA256 digest: OK\n    MD5 digest: OK\n", ()),
    ],
)
def test_signers_of_valid_signatures_only(output: str, found: tuple[str, ...]) -> None:
    assert rpm.signers(output, [FINGERPRINT]) == found


def test_files_of_changes_match_file_names() -> None:
    changes = [Change("install", "a", "", "3:1-2"), Change("remove", "b", "1-1")]
    assert rpm.files_of(changes) == {("a", "1-2"): "3:1-2"}
    assert rpm.addresses("https://x.example/p/a-1-2.noarch.rpm\nnoise\n") == {
        "a-1-2.noarch.rpm": "https://x.example/p/a-1-2.noarch.rpm"
    }


class Recording(System):
    """A system that runs no commands, and records them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.commands: list[list[str]] = []

    def run(self, argv: Sequence[str], *arguments: Any, **options: Any) -> Completed:
        self.commands.append(list(argv))
        return Completed(0, "", "")


@pytest.mark.parametrize("name", ["rocky", "sles"])
def test_install_with_bundle_ignores_host_repositories(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text(f"ID={name}\n")
    machine = Recording(tmp_path)
    monkeypatch.setenv(BUNDLE, "/bundle")
    tool_of(machine, timeout=1).update()
    (command,) = machine.commands
    wanted = {
        "rocky": ["dnf", "--setopt=reposdir=/bundle/repositories", "--setopt=cachedir=/bundle/cache"],
        "sles": ["zypper", "--reposd-dir", "/bundle/repositories", "--cache-dir", "/bundle/cache"],
    }[name]
    assert command[: len(wanted)] == wanted
    monkeypatch.delenv(BUNDLE)
    tool_of(machine, timeout=1).update()
    assert "/bundle" not in " ".join(machine.commands[-1])


class Tool:
    """A package manager with the package "there" installed. Each installation also makes the changes in ``more``."""

    title = "dnf"

    def __init__(self, *more: Change) -> None:
        self.more = more
        self.did: list[Any] = []

    def update(self) -> None:
        self.did.append("update")

    def packages(self) -> Packages:
        return Packages({"there": "1-1"})

    def foresee_install(self, words: Sequence[str]) -> tuple[Change, ...]:
        return (*(Change("install", word, "", "2:1-1") for word in words), *self.more)

    def install(self, words: Sequence[str]) -> None:
        self.did.append(list(words))


def run_bundle_packages(
    tool: Tool, *, check: bool = False, refresh: bool = False, names: Sequence[str] = ()
) -> dict[str, Any]:
    module: Any = SimpleNamespace(params={"names": list(names), "refresh": refresh, "timeout": 1}, check_mode=check)
    return bundle_packages.work(module, tool)  # type: ignore[arg-type]


def test_install_adds_missing_packages_only() -> None:
    tool = Tool(Change("install", "needed", "", "1-1"))
    dry_run = run_bundle_packages(tool, check=True, names=["there", "new"])
    assert (dry_run["changed"], dry_run["installs"], tool.did) == (True, ["new=2:1-1", "needed=1-1"], [])
    assert run_bundle_packages(tool, names=["there", "new"])["steps"] == dry_run["steps"] and tool.did == [["new"]]
    assert run_bundle_packages(Tool(), names=["there"])["changed"] is False
    tool = Tool()
    assert run_bundle_packages(tool, refresh=True)["changed"] is False and tool.did == ["update"]


def test_install_that_removes_packages_is_rejected() -> None:
    with pytest.raises(PackageProblem, match="would remove old to install new"):
        run_bundle_packages(Tool(Change("remove", "old", "1-1")), names=["new"])
