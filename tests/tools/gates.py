# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The checks without a cluster: those of Ansible and Galaxy, linters, and the project's own checks."""

from __future__ import annotations

import sys
from pathlib import Path

from steps import ROOT, Step, cache, tree

CHECKS = {
    "links": "every link inside README and docs leads somewhere",
    "playbook_rules": "variables and ansible.cfg do not replace what playbooks pass, where tasks run, and their order; hidden tasks report errors",
    "role_arguments": "defaults, argument specs and README of each role name the same variables",
    "role_readmes": "the generated part of each role's README is what its argument specs say; `--write` makes it so",
    "security_rules": "no line has one of the classes of vulnerabilities that ruff's S rules do not find",
    "variables_page": "docs/variables.md is what the table of variables says; `--write` makes it so",
    "silicon": "nothing but the simulator knows that silicon can be simulated",
}

#: Directories of tests that no suite of `make test` imports.
ONLY_PROVE = ("bench", "prove")

# ansible-test creates ten small environments and downloads a bootstrap script for each from an Ansible server. The
# interpreter includes pip, so this file replaces the download and uses the package index only.
GET_PIP = """\
import subprocess
import sys

packages = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
subprocess.check_call([sys.executable, "-m", "ensurepip", "--upgrade"], stdout=subprocess.DEVNULL)
subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", *packages])
"""


def ansible_test_home(root: Path) -> Path:
    """Create a home directory for ansible-test with the bootstrap script and links to the user's settings."""
    home = root / "ansible-test-home"
    downloads = home / ".ansible/test/cache"
    downloads.mkdir(parents=True, exist_ok=True)
    for version in ("24_2", "25_2"):
        (downloads / f"get_pip_{version}.py").write_text(GET_PIP, encoding="utf-8")
    for name in (".config", ".gitconfig", ".netrc", ".pip"):
        if (Path.home() / name).exists() and not (home / name).exists():
            (home / name).symlink_to(Path.home() / name)
    return home


def sanity(usual: str, *arguments: str, expect: str) -> Step:
    """Return a step with Ansible's tests for ``arguments``. ``expect`` is the name of one of these tests."""
    collection = tree() / "ansible_collections/dra/accelerators"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return Step(
        "ansible-test sanity",
        usual,
        ["ansible-test", "sanity", "--local", "--python", version, "--color", "no", *arguments],
        cwd=collection,
        environment={
            "ANSIBLE_TEST_CONTENT_ROOT": str(collection),
            "HOME": str(ansible_test_home(cache())),
            "PYTHONPATH": "",
        },
        # Without files to check, ansible-test reports that and exits with 0.
        expect=("Running sanity test", expect),
        refuse=("All targets skipped",),
        remedy="mend what it names; ignore files stay empty.",
    )


def ansible_gates() -> list[Step]:
    """Return the checks of Ansible's own tools.

    ansible-lint and ansible-test take minutes: a change is checked without molecule scenarios and examples, and without
    pylint and what other steps check. ``release_gates`` replaces both steps with complete ones.
    """
    skipped = [word for name in ("changelog", "pep8", "pylint", "yamllint") for word in ("--skip-test", name)]
    return [
        sanity("2 min", *skipped, expect="validate-modules"),
        ansible_lint("3 min", "examples", "molecule"),
        Step("yamllint", "5 s", ["yamllint", "--strict", "."]),
        Step(
            "antsibull-docs",
            "20 s",
            ["antsibull-docs", "lint-collection-docs", "--plugin-docs", "--validate-collection-refs=dependent", "."],
        ),
        Step("antsibull-changelog", "1 s", ["antsibull-changelog", "lint"]),
    ]


def ansible_lint(usual: str, *excluded: str) -> Step:
    """Return a step with ansible-lint for everything except the excluded directories."""
    options = [word for directory in excluded for word in ("--exclude", directory)]
    return Step("ansible-lint", usual, ["ansible-lint", "--profile", "production", "--offline", "--strict", *options])


def python_gates(links: Path) -> list[Step]:
    """Return the checks of Python's tools."""
    configuration = ROOT / "pyproject.toml"
    return [
        Step("ruff check", "1 s", ["ruff", "check", "."], remedy="`ruff check --fix` mends most of it."),
        Step("ruff format", "1 s", ["ruff", "format", "--check", "--diff", "."], remedy="run `make format`."),
        Step(
            "mypy daemons and core",
            "60 s cold, 5 s warm",
            ["mypy", "--config-file", configuration, "--package", "dra_driver"],
            cwd=links / "python",
            environment={"MYPYPATH": str(links / "python"), "PYTHONPATH": ""},
        ),
        Step(
            "mypy modules",
            "20 s cold, 3 s warm",
            [
                *("mypy", "--config-file", configuration, "--namespace-packages", "--explicit-package-bases"),
                *sorted((links / "ansible_collections/dra/accelerators/plugins").glob("action/*.py")),
                *sorted((links / "ansible_collections/dra/accelerators/plugins").glob("filter/*.py")),
                *sorted((links / "ansible_collections/dra/accelerators/plugins").glob("inventory/*.py")),
                *sorted((links / "ansible_collections/dra/accelerators/plugins").glob("lookup/*.py")),
                *sorted((links / "ansible_collections/dra/accelerators/plugins").glob("test/*.py")),
                *sorted((links / "ansible_collections/dra/accelerators/plugins/modules").glob("*.py")),
            ],
            cwd=links,
            environment={
                "MYPYPATH": str(links),
                "PYTHONPATH": "",
                "MYPY_CACHE_DIR": str(cache() / "mypy-modules"),
            },
        ),
        Step(
            "mypy tools",
            "10 s",
            [
                "mypy",
                "--config-file",
                configuration,
                *sorted((ROOT / "tests/tools").rglob("*.py")),
                ROOT / "tests/conftest.py",
                ROOT / "noxfile.py",
            ],
            environment={"MYPYPATH": f"{ROOT}:{ROOT / 'tests/tools'}:{ROOT / 'tests/tools/checks'}", "PYTHONPATH": ""},
        ),
    ]


def found_gate(*folders: Path) -> Step:
    """Return a check that pytest can import each test of the directories, by default those that only `make prove` runs."""
    return Step(
        "tests found",
        "10 s",
        [
            *(sys.executable, "-m", "pytest", "--collect-only", "-q", "-q", "-m", ""),
            *(folders or [ROOT / "tests" / name for name in ONLY_PROVE]),
        ],
        remedy="it names the file that cannot be imported, and why.",
    )


def tarball_gate(root: Path) -> Step:
    """Build the tarball for Galaxy, and test it as a user installs it."""
    return Step(
        "tarball",
        "20 s",
        [sys.executable, ROOT / "tests/tools/checks/tarball.py", root / "dist"],
        remedy="a new file belongs in the list of checks/tarball.py or in build_ignore of galaxy.yml.",
    )


def release_gates(_work: Path) -> list[Step]:
    """Return the checks of Galaxy and ansible-builder for a release, and complete ones for steps of ``ansible_gates``.

    The importer runs the linters again on the tarball.
    """
    root = cache()
    return [
        tarball_gate(root),
        ansible_lint("6 min"),
        sanity("4 min", expect="pylint"),
        Step(
            "language",
            "3 min cold, 20 s warm",
            [sys.executable, ROOT / "tests/tools/checks/language.py"],
            remedy="CONTRIBUTING.md has the rules and the glossary; tests/tools/vale/styles has them for Vale.",
        ),
        Step(
            "importer tools",
            "1 min cold, nothing warm",
            [ROOT / "tests/tools/venv", "importer"],
            remedy="read the log; it says what pip could not install.",
        ),
        Step(
            "galaxy-importer",
            "1 min",
            [sys.executable, ROOT / "tests/tools/checks/importer.py", root / "venv-importer", root / "dist"],
            after=("tarball", "importer tools"),
            remedy="mend what it calls an error; Galaxy would refuse the release.",
        ),
        Step(
            "execution environment",
            "2 s",
            [root / "venv-importer/bin/ansible-builder", "introspect", tree()],
            after=("importer tools",),
            expect=tuple(
                f"{need}  # from collection dra.accelerators" for need in ("kubernetes>=24.2.0", "[platform:rpm]")
            ),
            remedy="meta/execution-environment.yml names two files; what they ask for is what ansible-builder is to find.",
        ),
    ]


def gates(_work: Path) -> list[Step]:
    """Return all checks of a change, the quick ones of the project first."""
    root, links = cache(), tree()
    own = [
        Step(
            f"check {name.replace('_', ' ')}",
            "1 s",
            [sys.executable, ROOT / f"tests/tools/checks/{name}.py"],
            remedy=f"wanted: {rule}.",
        )
        for name, rule in CHECKS.items()
    ]
    licences = Step(
        "reuse",
        "3 s",
        ["reuse", "lint"],
        remedy="a file names its licence in its first lines; where its format has no comments, REUSE.toml does.",
    )
    return [licences, *own, *python_gates(links), found_gate(), *ansible_gates(), tarball_gate(root)]
