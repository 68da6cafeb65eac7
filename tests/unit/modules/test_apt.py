# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parse the output of apt, and plan package sources in addition to existing ones."""

from __future__ import annotations

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._packages.apt_output import (
    errors_of,
    name_of_file,
    parse_available,
    parse_foreseen,
    parse_status,
    pins,
    plan_source,
    read_sources,
    unneeded_lists,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import (
    Change,
    PackageProblem,
    Source,
    takes,
    upstream,
)

FORESEEN = """Reading package lists...
The following packages will be REMOVED:
  nvidia-kernel-dkms
Remv nvidia-kernel-dkms [535.261.03-1]
Inst libcuda1:i386 (535.261.03-1 Debian:12.15/oldstable [i386])
Inst dkms [3.0.10-8] (3.0.10-8+deb12u1 Debian:12.15/oldstable [all]) []
Conf dkms (3.0.10-8+deb12u1 Debian:12.15/oldstable [all])
Purg gcc [4:12.2.0-3]
"""


def test_parse_foreseen_returns_changes_in_order() -> None:
    assert parse_foreseen(FORESEEN) == (
        Change("remove", "nvidia-kernel-dkms", "535.261.03-1"),
        Change("install", "libcuda1:i386", "", "535.261.03-1"),
        Change("install", "dkms", "3.0.10-8", "3.0.10-8+deb12u1"),
        Change("purge", "gcc", "4:12.2.0-3"),
    )


def test_parse_status_separates_installed_and_incomplete() -> None:
    text = "bash\tamd64\t5.2\tinstalled\nlibcuda1\ti386\t1\tinstalled\nx\tall\t1\thalf-configured\ny\tamd64\t1\tconfig-files\n"
    assert parse_status(text, "amd64") == ({"bash": "5.2", "libcuda1:i386": "1"}, ["x"])


def test_versions_of_several_sources_are_listed_once() -> None:
    text = (
        " nvidia-smi | 580.1-1 | http://a ./ Packages\n"
        " nvidia-smi | 580.1-1 | http://b ./ Packages\n"
        " nvidia-smi | 535.1-1 | http://a stable/main amd64 Packages\n"
    )
    assert parse_available(text) == {"nvidia-smi": ("580.1-1", "535.1-1")}


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("580.95.05-1", "580.95.05"),
        ("1:580.95.05-0ubuntu1", "580.95.05"),
        ("535.171.04-1~deb12u1", "535.171.04"),
        ("12", "12"),
    ],
)
def test_upstream_returns_upstream_version(version: str, expected: str) -> None:
    assert upstream(version) == expected


def test_name_of_file_returns_package_and_version() -> None:
    assert name_of_file("/x/libcuda1_1%3a580.95.05-1_amd64.deb") == ("libcuda1", "1:580.95.05-1")
    assert name_of_file("/x/readme.txt") is None


def test_pins_match_exact_versions() -> None:
    text = pins("nvidia", ["580.95.05"])
    assert "Pin: version /^([0-9]+:)?580\\.95\\.05(-|$)/" in text and "Pin-Priority: 1001" in text


def test_errors_of_returns_reasons_of_apt() -> None:
    text = "x\n nvidia-open : Depends: libcuda1 (= 2) but 1 is to be installed\nE: Unable to correct problems, you have held broken packages.\n"
    assert "libcuda1 (= 2)" in errors_of(text) and "held broken" in errors_of(text) and errors_of("") == "no output"


ONE_LINE = """# deb http://off/ x y
deb [arch=amd64 signed-by=/usr/share/keyrings/a.gpg] http://mirror/debian bookworm main contrib # why
deb-src http://mirror/debian bookworm main
"""
STANZAS = """Types: deb deb-src
URIs: http://mirror/debian/
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/a.gpg

Enabled: no
Types: deb
URIs: http://off
Suites: x
"""


def test_read_sources_reads_both_formats() -> None:
    (line,) = read_sources("/etc/apt/sources.list", ONE_LINE)
    assert line == Source(
        ("http://mirror/debian",),
        ("bookworm",),
        ("main", "contrib"),
        "/usr/share/keyrings/a.gpg",
        "/etc/apt/sources.list",
    )
    (stanza,) = read_sources("/x.sources", STANZAS)
    assert stanza.suites == ("bookworm", "bookworm-updates") and stanza.signed_by == line.signed_by
    assert read_sources("/x.sources", stanza.stanza())[0].uris == stanza.uris


def test_plan_source_additional_component_uses_mirror_and_keys_of_distribution() -> None:
    present = read_sources("/x.sources", STANZAS)
    wanted = Source((), ("bookworm",), ("contrib", "non-free"), path="/ours.sources")
    found = plan_source(wanted, present)
    assert (
        found is not None
        and found.uris == ("http://mirror/debian/",)
        and found.signed_by == "/usr/share/keyrings/a.gpg"
    )
    assert plan_source(Source((), ("bookworm",), ("main",), path="/ours.sources"), present) is None, (
        "it is there already"
    )
    again = [*present, Source(found.uris, found.suites, found.components, found.signed_by, "/ours.sources")]
    assert plan_source(wanted, again) == found, "a source of this collection is not foreign"
    with pytest.raises(PackageProblem) as caught:
        plan_source(Source((), ("trixie",), ("contrib",)), present)
    assert caught.value.code == "no-mirror"


def test_plan_source_with_other_keys_is_named() -> None:
    present = [
        Source(
            ("https://vendor/debian12/",),
            ("/",),
            (),
            "/usr/share/keyrings/cuda.gpg",
            "/etc/apt/sources.list.d/cuda.list",
        )
    ]
    with pytest.raises(PackageProblem) as caught:
        plan_source(Source(("https://vendor/debian12",), ("/",), (), "/ours.asc", "/ours.sources"), present)
    assert caught.value.code == "source-twice" and "cuda.list" in str(caught.value)


def test_plan_source_of_other_role_is_reused() -> None:
    ours = "/etc/apt/sources.list.d/dra-accelerators-nvidia.sources"
    present = [Source(("https://vendor/debian12/",), ("/",), (), "/etc/apt/keyrings/dra-accelerators-nvidia.asc", ours)]
    wanted = Source(
        ("https://vendor/debian12",), ("/",), (), "/ours.asc", "/etc/apt/sources.list.d/dra-accelerators-other.sources"
    )
    assert plan_source(wanted, present) is None
    assert plan_source(wanted, []) == wanted


@pytest.mark.parametrize(
    ("wanted", "version", "expected"),
    [
        ("", "1.18.1-1", True),
        ("1.18", "1.18.1-1", True),
        ("1.1", "1.18.1-1", False),
        ("1.18.1", "1:1.18.1-1", True),
        ("1.18.1-1", "1.18.1-1", True),
        ("1.18.1-2", "1.18.1-1", False),
        ("1.18", "1.18~rc.1-1", False),
    ],
)
def test_takes_full_version_or_prefix(wanted: str, version: str, expected: bool) -> None:
    assert takes(wanted, version) == expected


def test_unused_lists_are_deleted_and_shared_ones_stay() -> None:
    main = {"/l/m_dists_b_main_binary-amd64_Packages": "main/binary-amd64/Packages"}
    before = {
        **main,
        "/l/m_dists_b_contrib_binary-amd64_Packages": "contrib/binary-amd64/Packages",
        "/l/v_Packages": "Packages",
    }
    assert unneeded_lists(before, main) == [
        "/l/m_dists_b_contrib_binary-amd64_Packages",
        "/l/v_Packages",
        "/l/v_InRelease",
        "/l/v_Release",
        "/l/v_Release.gpg",
    ]
