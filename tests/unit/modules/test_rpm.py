# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parse the output of rpm, dnf, and zypper: versions in rpm's order, repositories next to existing ones, and the node's package manager."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.driver_catalog import (
    header_name,
    headers_of,
    superseded,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.apt import Apt
from ansible_collections.dra.accelerators.plugins.module_utils._packages.dnf import Dnf
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import (
    Change,
    PackageProblem,
    Source,
    upstream,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.manager_detection import tool_of
from ansible_collections.dra.accelerators.plugins.module_utils._packages.rpm_base import wanted
from ansible_collections.dra.accelerators.plugins.module_utils._packages.rpm_output import (
    Repository,
    compare,
    dnf_errors,
    lock_of,
    name_of_file,
    newest_first,
    os_names,
    parse_installed,
    parse_locks,
    parse_search,
    parse_summary,
    parse_transaction,
    parse_versions,
    parse_zypper_locks,
    plan_source,
    read_repositories,
    repository_of,
    repository_text,
    zypper_errors,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.zypper import Zypper
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from hypothesis import given
from hypothesis import strategies as st

REPO = "/etc/yum.repos.d/dra-accelerators-nvidia.repo"
#: Output of dnf 4.14, 80 columns wide. The second package's name is too long for its column.
TRANSACTION = """Last metadata expiration check: 0:00:08 ago on Tue Nov 24 04:19:58 2026.
================================================================================
 Package                      Arch        Version                 Repo     Size
================================================================================
Installing:
 kmod-nvidia-latest-dkms      noarch      3:595.45.04-1.el9       x       6.1 k
     replacing  nvidia-kmod-old.noarch 1-1
Upgrading:
 nvidia-driver-cuda           x86_64      3:595.45.04-1.el9       x       6.1 k
 a-package-whose-name-is-longer-than-the-column
                              noarch      2-1                     x       1.0 k
Installing dependencies:
 helper-lib                   x86_64      1-1                     x       6.0 k
Removing:
 kmod-nvidia-open-dkms        noarch      3:580.95.05-1.el9       @x       10
Removing unused dependencies:
 orphan                       noarch      7-1                     @x        2

Transaction Summary
================================================================================
Install  1 Package
 this is no package
"""
SUMMARY = """<?xml version='1.0'?>
<stream>
<install-summary download-size="12533" space-usage-diff="0" packages-to-change="3">
<to-upgrade>
<solvable type="package" name="nvidia-driver-cuda" edition="3:595.45.04-1" arch="x86_64" edition-old="3:580.95.05-1" summary="x &amp; y">
<description>x</description></solvable>
</to-upgrade>
<to-install>
<solvable type="package" name="new" edition="0:1-1" arch="noarch" summary="x"/>
<solvable type="patch" name="SUSE-2026" edition="1" arch="noarch"/>
</to-install>
<to-remove>
<solvable type="package" name="old" edition="3:580.95.05-1" arch="noarch" summary="x"></solvable>
</to-remove>
</install-summary>
</stream>
"""
VERSIONS = st.from_regex(r"([0-9]:)?[0-9a-c.~^_]{1,6}(-[0-9a-c.]{1,3})?", fullmatch=True)


def test_parse_transaction_reads_wrapped_lines() -> None:
    installed = {
        "nvidia-driver-cuda": "3:580.95.05-1.el9",
        "kmod-nvidia-open-dkms": "3:580.95.05-1.el9",
        "orphan": "7-1",
    }
    assert parse_transaction(TRANSACTION, installed) == (
        Change("install", "kmod-nvidia-latest-dkms", "", "3:595.45.04-1.el9"),
        Change("remove", "nvidia-kmod-old"),
        Change("install", "nvidia-driver-cuda", "3:580.95.05-1.el9", "3:595.45.04-1.el9"),
        Change("install", "a-package-whose-name-is-longer-than-the-column", "", "2-1"),
        Change("install", "helper-lib", "", "1-1"),
        Change("remove", "kmod-nvidia-open-dkms", "3:580.95.05-1.el9"),
        Change("remove", "orphan", "7-1"),
    )
    assert parse_transaction("Dependencies resolved.\nNothing to do.\nComplete!\n", {}) == ()


def test_parse_summary_and_search_of_zypper() -> None:
    assert parse_summary(SUMMARY) == (
        Change("install", "nvidia-driver-cuda", "3:580.95.05-1", "3:595.45.04-1"),
        Change("install", "new", "", "1-1"),
        Change("remove", "old", "3:580.95.05-1"),
    )
    found = """<solvable-list>
<solvable status="not-installed" name="a" kind="package" edition="1.9-1" arch="noarch" repository="x"/>
<solvable status="not-installed" name="a" kind="package" edition="1.10-1" arch="noarch" repository="x"/>
<solvable status="installed" name="a" kind="package" edition="3-1" arch="noarch" repository="(System Packages)"/>
</solvable-list>"""
    assert parse_search(found) == {"a": ("1.10-1", "1.9-1")}


def test_errors_of_dnf_and_aborted_transaction() -> None:
    assert dnf_errors("Transaction Summary\nOperation aborted.\n") == ""
    assert dnf_errors("Error: Operation aborted.\nNothing to do.\n") == ""
    errors = dnf_errors("No match for argument: x-1\nError: Unable to find a match: x-1\n")
    assert "x-1" in errors and "Unable to find" in errors
    assert "nothing provides" in dnf_errors(
        "Error: \n Problem: conflicting requests\n  - nothing provides /bin/sh needed by a\n"
    )
    zypper_text = zypper_errors(
        '<stream><message type="info">ok</message>\n<message type="error">No provider of &apos;a=1&apos; found.</message>'
    )
    assert zypper_text == "No provider of 'a=1' found."
    problem = '<prompt id="1"><description>Problem: nothing provides b\n Solution 1: do not</description></prompt>'
    assert "nothing provides b" in zypper_errors(problem)
    assert zypper_errors("") == "no output"


def test_parse_installed_skips_keys_and_lists_duplicates() -> None:
    text = "a\t1-1\tx86_64\na\t2-1\tx86_64\na\t2-1\ti686\ngpg-pubkey\tfee48b2f-6b051032\t(none)\nb\t3:4-1\tnoarch\nc\t(none):5-1\tx86_64\n"
    assert parse_installed(text, "x86_64") == ({"a": "2-1", "a.i686": "2-1", "b": "3:4-1", "c": "5-1"}, ["a"])
    assert parse_versions("a\t0:1-1\na\t1:0-1\nwords\n") == {"a": ("1:0-1", "1-1")}


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("1.9-1", "1.10-1"),
        ("1.0~rc1-1", "1.0-1"),
        ("1.0-1", "1.0^post-1"),
        ("1.0^post-1", "1.0.1-1"),
        ("580.95.05-1", "1:1-1"),
        ("1.a-1", "1.1-1"),
        ("1-1", "1-2"),
        ("1", "1.a"),
        ("580.95.05-1.el9", "595.45.04-1.el9"),
    ],
)
def test_compare_uses_rpm_order(older: str, newer: str) -> None:
    assert compare(older, newer) < 0 < compare(newer, older)


@given(st.lists(VERSIONS, max_size=4))
def test_compare_is_a_total_order(versions: list[str]) -> None:
    found = newest_first(versions)
    assert {*found} == {*versions}
    assert all(compare(one, other) >= 0 for one, other in zip(found, found[1:]))
    for one in versions:
        assert compare(one, one) == 0
        assert all(compare(one, each) == -compare(each, one) for each in versions)


def test_upstream_of_each_distribution() -> None:
    assert upstream("3:580.95.05-1.el9") == "580.95.05"
    assert upstream("580.95.05_k6.4.0_150600.21-150600.1.1") == "580.95.05"
    assert upstream("1:580.95.05-0ubuntu1") == "580.95.05"
    assert name_of_file("/x/kmod-nvidia-open-dkms-580.95.05-1.el9.noarch.rpm") == (
        "kmod-nvidia-open-dkms",
        "580.95.05-1.el9",
    )
    assert name_of_file("kmod_1_amd64.deb") is None


def test_parse_locks_keeps_foreign_lines() -> None:
    assert lock_of("nvidia-driver-cuda", "3:580.95.05-1.el9") == "nvidia-driver-cuda-3:580.95.05-1.el9.*"
    assert lock_of("dkms", "3-1") == "dkms-0:3-1.*"
    text = "\n# Added lock on Tue\nnvidia-driver-cuda-3:580.95.05-1.el9.*\n!kernel-0:5-1.*\ndkms-0:3-1.*\n"
    assert parse_locks(text) == {
        "nvidia-driver-cuda": "nvidia-driver-cuda-3:580.95.05-1.el9.*",
        "dkms": "dkms-0:3-1.*",
    }
    zypper = "\ntype: package\nmatch_type: glob\nsolvable_name: a\n\ntype: pattern\nsolvable_name: b\n"
    assert parse_zypper_locks(zypper) == {"a"}


def test_repository_text_requires_signatures_by_its_key() -> None:
    source = Source(("https://mirror/x",), signed_by="/etc/pki/x.asc", path=REPO)
    text = repository_text(source, more={"module_hotfixes": "1"})
    assert repository_of(REPO) == "dra-accelerators-nvidia"
    assert "[dra-accelerators-nvidia]\n" in text and "module_hotfixes=1\n" in text
    assert "gpgcheck=1\nrepo_gpgcheck=1\ngpgkey=file:///etc/pki/x.asc\n" in text
    index = repository_text(Source(("https://mirror/x",), signed_by="/k", path=REPO, packages_signed=False), more={})
    assert "\ngpgcheck=0\nrepo_gpgcheck=1\n" in index
    (read,) = read_repositories(REPO, text)
    assert read == Repository("dra-accelerators-nvidia", ("https://mirror/x",), REPO)
    assert read_repositories(REPO, text.replace("enabled=1", "enabled=0")) == []
    assert read_repositories(REPO, "no section") == []


def test_plan_source_reuses_existing_definition() -> None:
    wanted_one = Source(("https://mirror/x86_64/",), signed_by="/k", path=REPO)
    assert plan_source(wanted_one, [], "x86_64") == wanted_one
    own = Repository(
        "dra-accelerators-other", ("https://mirror/$basearch",), "/etc/yum.repos.d/dra-accelerators-other.repo"
    )
    assert plan_source(wanted_one, [own], "x86_64") is None
    theirs = Repository("cuda", ("https://mirror/x86_64",), "/etc/yum.repos.d/cuda.repo")
    with pytest.raises(PackageProblem) as caught:
        plan_source(wanted_one, [theirs], "x86_64")
    assert caught.value.code == "source-twice" and "cuda.repo" in str(caught.value)
    with pytest.raises(PackageProblem) as caught:
        plan_source(Source(()), [], "x86_64")
    assert caught.value.code == "no-mirror"
    with pytest.raises(PackageProblem) as caught:
        plan_source(Source(("https://mirror/x",)), [], "x86_64")
    assert caught.value.code == "repository-key"


def test_wanted_words_are_equal_for_all_managers() -> None:
    assert wanted(["a=3:1-1", "b", "/x/c-1-1.noarch.rpm", "d-"]) == (
        [("a", "3:1-1"), ("b", "")],
        ["/x/c-1-1.noarch.rpm"],
        ["d"],
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ID=debian\n", Apt),
        ("ID=ubuntu\nID_LIKE=debian\n", Apt),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', Dnf),
        ('ID="openEuler"\n', Dnf),
        ('ID="sles"\nID_LIKE="suse"\n', Zypper),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', Zypper),
        ('ID=mint\nID_LIKE="ubuntu debian"\n', Apt),
    ],
)
def test_tool_of_selects_package_manager_of_distribution(text: str, kind: type, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text(text)
    assert isinstance(tool_of(System(str(tmp_path)), timeout=1.0), kind)


def test_zypper_waits_for_other_package_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement program exits with 7 without the variable, as zypper does (zypp.conf(5), lock_timeout)."""
    program = tmp_path / "zypper"
    program.write_text('#!/bin/sh\n[ "${ZYPP_LOCK_TIMEOUT:-0}" -ge 300 ] || exit 7\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    zypper = Zypper(System(str(tmp_path)), timeout=60.0)
    zypper.update()
    zypper.install(["a=1-1"])
    assert zypper.foresee_install(["a=1-1"]) == ()


def test_tool_of_unknown_distribution_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text("ID=gentoo\n")
    with pytest.raises(PackageProblem) as caught:
        tool_of(System(str(tmp_path)), timeout=1.0)
    assert caught.value.code == "no-package-manager" and "gentoo" in str(caught.value)
    assert os_names('ID="opensuse-leap"\n') == ("opensuse-leap", "opensuse")


def test_headers_of_running_kernel() -> None:
    available = {
        "kernel-devel": ("5.14.0-600.el9", "5.14.0-570.el9"),
        "kernel-default-devel": ("6.4.0-150600.21.2", "6.4.0-150600.21.1"),
    }
    redhat, suse = "kernel-devel={kernel_release}", "kernel-{flavour}-devel={kernel_release}"
    assert headers_of(redhat, "5.14.0-570.el9.x86_64", {}, available) == ("kernel-devel", "5.14.0-570.el9")
    assert headers_of(redhat, "5.14.0-57.el9.x86_64", {}, available) is None
    assert headers_of(suse, "6.4.0-150600.21-default", {}, available) == ("kernel-default-devel", "6.4.0-150600.21.2")
    assert header_name(suse, "6.4.0-150600.21-default") == "kernel-default-devel"
    debian = "linux-headers-{kernel}"
    assert headers_of(debian, "6.1.0-9-amd64", {}, {"linux-headers-6.1.0-9-amd64": ("6.1-1",)}) == (
        "linux-headers-6.1.0-9-amd64",
        "",
    )
    assert headers_of(debian, "6.1.0-9-amd64", {}, {}) is None


def test_superseded_generation_is_replaced() -> None:
    there = ["nvidia-compute-G06", "nvidia-open-driver-G06-signed-cuda-kmp-default", "nvidia-persistenced"]
    assert superseded(there, ["nvidia-compute-utils-G07"]) == there[:2]
    assert superseded(there, ["nvidia-compute-utils-G06"]) == []
    assert superseded(there, ["nvidia-driver-cuda"]) == []
