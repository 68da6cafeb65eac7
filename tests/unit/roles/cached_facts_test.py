# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Roles read the distribution and the package manager from the node, not from Ansible's cached facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play

ROOT = Path(__file__).resolve().parents[3]
ROLE = "dra.accelerators.python_environment"
SHOW = "{{ {'cached': ansible_facts.os_family, 'packages': __python_environment_packages} | to_json | b64encode }}"
#: The content of /etc/os-release of each distribution, and the package for virtual environments.
NODES: dict[str, tuple[dict[str, str], str]] = {
    "debian": ({"id": "debian", "version_id": "13"}, "python3-venv"),
    "ubuntu": ({"id": "ubuntu", "id_like": "debian", "version_id": "24.04"}, "python3-venv"),
    "rocky": ({"id": "rocky", "id_like": "rhel centos fedora", "version_id": "9.6"}, "python3-pip"),
    "openeuler": ({"id": "openEuler", "version_id": "24.03"}, "python3-pip"),
    "sles": ({"id": "sles", "id_like": "suse", "version_id": "15.7"}, "python3-pip"),
    "other": ({"id": "gentoo"}, ""),
}


#: A module for each package manager, which only prints its name.
MANAGERS = ("apt", "dnf", "dnf5", "yum", "zypper", "pacman", "apk")
MODULE = """
from ansible.module_utils.basic import AnsibleModule
AnsibleModule({"name": {"type": "raw"}, "state": {}}).exit_json(msg="installed with MANAGER")
"""


def cache_facts(directory: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, dict[str, str]]) -> None:
    """Write facts of hosts to a cache with Ansible, which the next runs of the test read."""
    monkeypatch.setenv("ANSIBLE_CACHE_PLUGIN", "jsonfile")
    monkeypatch.setenv("ANSIBLE_CACHE_PLUGIN_CONNECTION", str(directory / "facts"))
    names = {f"ansible_{key}": f"{{{{ {key} }}}}" for key in next(iter(facts.values()))}
    written = play(directory, [{"ansible.builtin.set_fact": {**names, "cacheable": True}}], facts)
    assert written.status == 0, written.output


def test_packages_follow_the_installed_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node was reinstalled, so its cached facts are those of another distribution: the packages follow the installed one."""
    suse = {"os_family": "Suse", "distribution": "SLES", "distribution_major_version": "12"}
    debian = {"os_family": "Debian", "distribution": "Debian", "distribution_major_version": "12"}
    cache_facts(tmp_path, monkeypatch, {name: debian if name == "sles" else suse for name in NODES})
    hosts: dict[str, dict[str, Any]] = {
        name: {
            "python_environment_node_info": {"platform": {"os_release": release}},
            "python_environment_interpreter": "/usr/bin/python3",
        }
        for name, (release, _package) in NODES.items()
    }
    include = {"ansible.builtin.include_role": {"name": ROLE, "tasks_from": "platform", "public": True}}
    played = play(tmp_path, [include, {"ansible.builtin.debug": {"msg": SHOW}}], hosts)
    assert set(played.messages) == set(NODES), played.output
    for name, (_release, package) in NODES.items():
        assert played.messages[name]["cached"] == ("Debian" if name == "sles" else "Suse")
        packages = played.messages[name]["packages"]
        assert (package in packages) if package else packages == [], (name, packages)


@pytest.mark.parametrize(
    ("tasks", "name", "variables"),
    [
        ("python_environment/tasks/packages.yml", "Install the packages", {"__python_environment_packages": ["x"]}),
        (
            "ascend_driver/tasks/prepare.yml",
            "Install the packages that build a kernel module",
            {"ascend_driver_build": True, "ascend_driver_build_packages": ["x"]},
        ),
    ],
)
def test_package_manager_follows_the_installed_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str, name: str, variables: dict[str, Any]
) -> None:
    """The cache has the package manager of the previous distribution: the installed one is used."""
    (tmp_path / "library").mkdir()
    for manager in MANAGERS:
        (tmp_path / f"library/{manager}.py").write_text(MODULE.replace("MANAGER", manager), encoding="utf-8")
    monkeypatch.setenv("ANSIBLE_LIBRARY", str(tmp_path / "library"))
    cache_facts(tmp_path, monkeypatch, {"n": {"pkg_mgr": "pacman"}})
    document = yaml.safe_load((ROOT / "roles" / tasks).read_text("utf-8"))
    position = next(number for number, task in enumerate(document) if task["name"] == name)
    kept = [task for task in document[: position + 1] if task["name"] in (name, "Detect the package manager")]
    show = {"ansible.builtin.debug": {"msg": "{{ installed.msg }}"}}
    common = {
        "python_environment_proxy": {},
        "ascend_driver_proxy": {},
        "__ascend_driver_plan": {"packages": ["driver"]},
    }
    hosts = {"n": {**common, **variables}}
    played = play(tmp_path, [*kept[:-1], {**kept[-1], "register": "installed"}, show], hosts)
    assert "installed with " in played.output and "installed with pacman" not in played.output, played.output
