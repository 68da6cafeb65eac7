# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA's precompiled kernel modules for one Red Hat kernel: package names contain the versions of driver and kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.requirements import driver_of
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.driver_catalog import (
    Choice,
    Offer,
    Wanted,
    kinds,
    outdated,
    read_offers,
    versions_of,
)

CATALOG = yaml.safe_load(
    (Path(__file__).resolve().parents[3] / "roles/nvidia_driver/vars/redhat.yml").read_text("utf-8")
)["__nvidia_driver_catalogs"]["nvidia"]
EL9 = "5.14.0-570.23.1.el9_6.x86_64"
READY = ("nvidia-driver-cuda", "kmod-nvidia-580.95.05-5.14.0-570.23.1")


def red_hats(kernel: str, *versions: str, branch: str = "580") -> list[tuple[str, ...]]:
    """Return the packages with modules in the role's own catalog."""
    offers = read_offers(CATALOG, branch=branch, kernel=kernel, versions=versions)
    return [each.packages for each in offers if (each.build, each.components) == ("precompiled", "compute")]


def test_package_names_fill_in_driver_and_kernel() -> None:
    assert red_hats(EL9, "580.95.05", "595.45.04") == [READY]
    assert red_hats("4.18.0-553.22.1.el8_10.x86_64", "580.95.05") == [
        (READY[0], "kmod-nvidia-580.95.05-4.18.0-553.22.1")
    ]
    assert [name for _cuda, name in red_hats(EL9, "580.95.05", "595.45.04", branch="")] == [
        READY[1],
        "kmod-nvidia-595.45.04-5.14.0-570.23.1",
    ]
    assert red_hats(EL9) == [], "which driver it is has to be known"
    known = kinds(CATALOG, EL9, ["580"], ["580.95.05"])
    assert known[READY[1]] == "proprietary" and READY[0] not in known
    for kernel in (
        "6.12.0-55.9.1.el10_0.x86_64",
        "5.14.0-570.23.1.el9_6.aarch64",
        "5.15.0-300.163.18.el9uek.x86_64",
        "6.1.0-13-amd64",
    ):
        assert red_hats(kernel, "580.95.05") == [], kernel


def test_versions_of_installed_and_requested_packages() -> None:
    installed = {"nvidia-driver-cuda": "3:580.95.05-1.el9", "nvidia-container-toolkit": "1.18.1-1", "dkms": "3.0.13-1"}
    assert versions_of(installed, Wanted("3:595.45.04-1.el9")) == ["595.45.04", "580.95.05"]
    assert versions_of(installed, Wanted("580")) == versions_of(installed, Wanted()) == ["580.95.05"]
    assert versions_of({}, Wanted("580")) == []


def test_packages_with_driver_version_in_name_are_replaced() -> None:
    offer = Offer("proprietary", "precompiled", "compute", READY)
    there = {
        READY[0]: "3:580.95.05-1.el9",
        READY[1]: "3:580.95.05-3.el9_6",
        "kmod-nvidia-580.95.05-5.14.0-1": "3:580.95.05-3.el9_6",
    }
    same = Choice(offer, "580.95.05", dict.fromkeys(READY, ""))
    assert outdated(there, same) == [], "installed packages for another kernel stay"
    other = Choice(offer, "595.45.04", {READY[0]: "", "kmod-nvidia-595.45.04-5.14.0-570.23.1": ""})
    assert outdated(there, other) == outdated(there, Choice(replace(offer, build="dkms"), "580.95.05", {READY[0]: ""}))
    assert outdated(there, other) == sorted(set(there) - {READY[0]})


def test_bundle_has_packages_for_described_kernel() -> None:
    wanted = {"version": "580.95.05", "build": "precompiled", "persistence": False}
    need = {"of": "nvidia_driver", "kernel": EL9, "wanted": wanted, "catalog": CATALOG}
    available = {READY[0]: ["3:595.45.04-1.el9", "3:580.95.05-1.el9"], READY[1]: ["3:580.95.05-3.el9_6"]}
    (choice,) = driver_of(need).choices(available)
    assert (choice.version, choice.offer.modules) == ("580.95.05", "proprietary")
    assert choice.packages == {READY[0]: "3:580.95.05-1.el9", READY[1]: "3:580.95.05-3.el9_6"}
    assert set(driver_of(need).names()) == set(READY)
    assert driver_of({**need, "kernel": EL9.replace("23.1", "24.1")}).choices(available) == ()
    assert driver_of({**need, "wanted": {**wanted, "version": "580"}}).choices(available) == ()
