# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Facts about the host below the world, and the facts that its nodes use."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from world_cli import host
from world_cli.host import Host
from world_cli.pins import HOST_PROGRAMS


def machine(root: Path, *, unified: bool, capabilities: str, last: int = 40) -> Path:
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/sys/kernel/cap_last_cap").write_text(f"{last}\n")
    if unified:
        (root / "sys/fs/cgroup/cgroup.controllers").write_text("cpu memory\n")
    (root / "proc/self/status").write_text(f"Name:\tx\nCapEff:\t0000000000000000\nCapBnd:\t{capabilities}\n")
    return root


@pytest.mark.parametrize(
    ("unified", "capabilities", "expected"),
    [
        (False, "000001fffeffffff", Host(1, ("SYS_RESOURCE",))),
        (True, "000001ffffffffff", Host(2)),
        (True, "000001fffefeffff", Host(2, ("SYS_MODULE", "SYS_RESOURCE"))),
    ],
)
def test_inspect_host_returns_the_capabilities(
    tmp_path: Path, unified: bool, capabilities: str, expected: Host
) -> None:
    assert host.inspect_host(machine(tmp_path, unified=unified, capabilities=capabilities)) == expected


def test_capabilities_unknown_to_an_older_kernel_are_not_missing(tmp_path: Path) -> None:
    root = machine(tmp_path, unified=True, capabilities="0000003fffffffff", last=37)
    assert host.inspect_host(root).missing_capabilities == ()


def test_missing_packages_are_listed_once() -> None:
    present = dict.fromkeys(HOST_PROGRAMS, True)
    assert host.missing_packages(present) == []
    assert host.missing_packages({**present, "docker": False, "dockerd": False, "gcc": False}) == [
        "docker.io",
        "gcc",
        "libc6-dev",
    ]


def test_sources_in_stanzas() -> None:
    text = """# comment
Types: deb deb-src
URIs: http://a/debian http://b/debian
Suites: bookworm bookworm-updates
Components: main contrib

Enabled: no
Types: deb
URIs: http://c/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://d/debian
Suites: bookworm
Components: main
"""
    assert host.deb822_to_lines(text).splitlines() == [
        "deb http://a/debian bookworm main contrib",
        "deb http://a/debian bookworm-updates main contrib",
        "deb http://b/debian bookworm main contrib",
        "deb http://b/debian bookworm-updates main contrib",
    ]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ("", None),
        ("deb http://s/debian-security bookworm-security main\ndeb http://m/debian bookworm main\n", "http://m/debian"),
        ("deb [signed-by=/k arch=amd64] http://m/debian bookworm main\n", "http://m/debian"),
        ("# deb http://m/debian bookworm main\n", None),
    ],
)
def test_the_bootstrap_uses_the_mirror_of_the_machine(sources: str, expected: str | None) -> None:
    assert host.mirror(sources) == expected


def pip(listed: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(host.pip_settings(listed))
    return dict(parser["global"])


def test_pip_gets_the_nodes_certificates_in_any_case() -> None:
    assert pip("") == {"cert": "/etc/ssl/certs/ca-certificates.crt"}
    assert pip("global.cert='/opt/site/ca.pem'") == {"cert": "/etc/ssl/certs/ca-certificates.crt"}


def test_pip_takes_over_indexes_and_no_paths_of_the_machine() -> None:
    listed = """:env:.find-links='/opt/wheels'
:env:.index-url='https://user:pa%40ss@index.example/simple'
global.index-url='https://other.example/simple'
global.extra-index-url='https://extra.example/simple'
:env:.default-timeout='180'
global.cache-dir='/var/cache/pip'
install.trusted-host='index.example'
"""
    assert pip(listed) == {
        "cert": "/etc/ssl/certs/ca-certificates.crt",
        "index-url": "https://user:pa%40ss@index.example/simple",
        "extra-index-url": "https://extra.example/simple",
        "timeout": "180",
        "trusted-host": "index.example",
    }


def test_pip_takes_over_links_that_are_addresses() -> None:
    assert pip("global.find-links='https://wheels.example/'")["find-links"] == "https://wheels.example/"


def test_pods_do_not_use_servers_of_the_machine_only() -> None:
    text = "search x\nnameserver 127.0.0.53\nnameserver 10.0.0.1\nnameserver ::1\nnameserver fd00::1\nnameserver\n"
    assert host.resolver_settings(text) == "nameserver 10.0.0.1\nnameserver fd00::1\n"


def test_proxies_are_not_used_for_the_world() -> None:
    assert host.proxy_variables({"PATH": "/bin", "NO_PROXY": "x"}, "10.215.0.0/16") == {}
    chosen = host.proxy_variables({"HTTPS_PROXY": "http://p:1", "no_proxy": "site"}, "10.215.0.0/16")
    assert chosen["HTTPS_PROXY"] == "http://p:1"
    assert chosen["NO_PROXY"] == chosen["no_proxy"] == "site,localhost,127.0.0.1,10.215.0.0/16"
