# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The role python_environment takes a node's distribution from node_info, not from facts that Ansible has cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playing import play

ROLE = "dra.accelerators.python_environment"
SHOW = "{{ {'packages': __python_environment_packages, 'family': __python_environment_family | default('')} | to_json | b64encode }}"
#: What /etc/os-release has of each, and the packages that make virtual environments there.
NODES: dict[str, tuple[dict[str, str], str]] = {
    "debian": ({"id": "debian", "version_id": "13"}, "python3-venv"),
    "ubuntu": ({"id": "ubuntu", "id_like": "debian", "version_id": "24.04"}, "python3-venv"),
    "rocky": ({"id": "rocky", "id_like": "rhel centos fedora", "version_id": "9.6"}, "python3-pip"),
    "openeuler": ({"id": "openEuler", "version_id": "24.03"}, "python3-pip"),
    "sles": ({"id": "sles", "id_like": "suse", "version_id": "15.7"}, "python3-pip"),
    "other": ({"id": "gentoo"}, ""),
}


def test_packages_follow_the_installed_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node was installed anew: its cached facts are those of another distribution."""
    cache = tmp_path / "facts"
    cache.mkdir()
    monkeypatch.setenv("ANSIBLE_CACHE_PLUGIN", "jsonfile")
    monkeypatch.setenv("ANSIBLE_CACHE_PLUGIN_CONNECTION", str(cache))
    hosts: dict[str, dict[str, Any]] = {}
    for name, (release, _package) in NODES.items():
        facts = {"os_family": "Suse", "distribution": "SLES", "distribution_major_version": "12", "pkg_mgr": "zypper"}
        if name == "sles":
            facts = {
                "os_family": "Debian",
                "distribution": "Debian",
                "distribution_major_version": "12",
                "pkg_mgr": "apt",
            }
        (cache / name).write_text(
            json.dumps({f"ansible_{key}": value for key, value in facts.items()}), encoding="utf-8"
        )
        hosts[name] = {
            "python_environment_node_info": {"platform": {"os_release": release}},
            "python_environment_interpreter": "/usr/bin/python3",
        }
    include = {"ansible.builtin.include_role": {"name": ROLE, "tasks_from": "platform", "public": True}}
    played = play(tmp_path, [include, {"ansible.builtin.debug": {"msg": SHOW}}], hosts)
    assert set(played.told) == set(NODES), played.output
    for name, (_release, package) in NODES.items():
        packages = played.told[name]["packages"]
        assert (package in packages) if package else packages == [], (name, packages)
