# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the usual nox sessions of Ansible collections: `nox --list`, `nox -s lint`, `nox -s unit -- -k NAME`.

Each session runs the target of the Makefile with the same purpose. The environments are in the cache of the project, with pinned tools.
nox creates no environments.
"""

from __future__ import annotations

import subprocess

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "unit"]

#: Target of the Makefile and test directory of each test session. With arguments, a session only runs pytest on the directory.
TESTS = {
    "unit": ("test-unit", "tests/unit"),
    "simulator": ("test-simulator", "tests/simulator"),
    "cluster": ("test-cluster", "tests/cluster"),
}


def make(session: nox.Session, target: str) -> None:
    """Run a target of the Makefile, which installs its requirements."""
    session.run("make", target, external=True)


def tests(session: nox.Session) -> None:
    """Run all tests of a session, or a part of them with arguments for pytest."""
    target, directory = TESTS[session.name]
    if not session.posargs:
        make(session, target)
        return
    make(session, "tree")
    environment = subprocess.run(["tests/tools/venv", "dev"], check=True, capture_output=True, text=True).stdout.strip()
    session.run(f"{environment}/bin/python", "-m", "pytest", directory, *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Run every gate that needs no cluster, including ansible-test's sanity tests."""
    make(session, "lint")


@nox.session
def unit(session: nox.Session) -> None:
    """Test the core, parts of the daemons, and the modules."""
    tests(session)


@nox.session
def simulator(session: nox.Session) -> None:
    """Test the simulated libraries and the programs that use them. Needs root and a C compiler."""
    tests(session)


@nox.session
def cluster(session: nox.Session) -> None:
    """Test a real cluster. Needs root."""
    tests(session)


@nox.session
def molecule(session: nox.Session) -> None:
    """Run the molecule scenarios. Needs root."""
    make(session, "test-molecule")


@nox.session
def prove(session: nox.Session) -> None:
    """Run all tests, including the long ones. Needs root."""
    make(session, "prove")
