# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The sessions that people who work on Ansible collections look for: `nox --list`, `nox -s lint`, `nox -s unit -- -k NAME`.

Each is the target of the Makefile with the same purpose. The environments are the project's own, in its cache, so that the gates
judge with the pinned tools however they are called; nox makes none.
"""

from __future__ import annotations

import subprocess

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "unit"]

#: Sessions that run tests, by the target that they are; with arguments, pytest alone runs over their folder.
TESTS = {
    "unit": ("test-unit", "tests/unit"),
    "simulator": ("test-simulator", "tests/simulator"),
    "cluster": ("test-cluster", "tests/cluster"),
}


def make(session: nox.Session, target: str) -> None:
    """Run a target of the Makefile, which installs what it needs."""
    session.run("make", target, external=True)


def tests(session: nox.Session) -> None:
    """Run the tests of a session whole, or with pytest's own arguments a part of them."""
    target, folder = TESTS[session.name]
    if not session.posargs:
        make(session, target)
        return
    make(session, "tree")
    environment = subprocess.run(["tests/tools/venv", "dev"], check=True, capture_output=True, text=True).stdout.strip()
    session.run(f"{environment}/bin/python", "-m", "pytest", folder, *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Every gate that needs no cluster, ansible-test's sanity tests among them."""
    make(session, "lint")


@nox.session
def unit(session: nox.Session) -> None:
    """The core, the daemons' parts and the modules."""
    tests(session)


@nox.session
def simulator(session: nox.Session) -> None:
    """The simulated library and what runs on it; needs root and a C compiler."""
    tests(session)


@nox.session
def cluster(session: nox.Session) -> None:
    """The real cluster; needs root."""
    tests(session)


@nox.session
def molecule(session: nox.Session) -> None:
    """The molecule scenarios; needs root."""
    make(session, "test-molecule")


@nox.session
def prove(session: nox.Session) -> None:
    """All of it, and what is long; needs root."""
    make(session, "prove")
