# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The steps of `make lint`: checks of Ansible and Galaxy, linters, and the project's own checks. They need no cluster."""

from __future__ import annotations

import sys
from pathlib import Path

from steps import ROOT, Step, cache, tree

#: The project's own programs in checks/, each with the rule that it checks.
CHECKS = {
    "links": "every link inside README and docs leads to an existing file and heading",
    "playbook_rules": "plays and tasks follow the rules in the docstring of checks/playbook_rules.py",
    "role_arguments": "defaults, argument specs, and README of each role name the same variables",
    "role_readmes": "the generated part of each role's README agrees with its argument specs; `--write` writes it",
    "security_rules": "no line has a vulnerability of a class that ruff's S rules do not find",
    "variables_page": "docs/variables.md agrees with the table of variables; `--write` writes it",
    "silicon": "only the simulator mentions simulated silicon",
}

#: Directories of tests that no suite of `make test` imports.
ONLY_IN_PROVE = [ROOT / "tests/bench", ROOT / "tests/prove"]

#: Directories of plugins/ with the files that Ansible loads. mypy follows their imports to the others.
PLUGIN_DIRECTORIES = ("action", "filter", "inventory", "lookup", "test", "modules")

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


def sanity(usual_time: str, *options: str, expected_test: str) -> Step:
    """Return a step with Ansible's sanity tests. Its output must contain the name of ``expected_test``."""
    collection = tree() / "ansible_collections/dra/accelerators"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return Step(
        "ansible-test sanity",
        usual_time,
        ["ansible-test", "sanity", "--local", "--python", version, "--color", "no", *options],
        cwd=collection,
        environment={
            "ANSIBLE_TEST_CONTENT_ROOT": str(collection),
            "HOME": str(ansible_test_home(cache())),
            "PYTHONPATH": "",
        },
        # Without files to check, ansible-test reports that and exits with 0.
        expected_output=("Running sanity test", expected_test),
        rejected_output=("All targets skipped",),
        remedy="correct the named files. Ignore files stay empty.",
    )


def ansible_gates() -> list[Step]:
    """Return the checks of Ansible's own tools.

    ansible-lint and ansible-test take minutes. So they skip molecule scenarios, examples, pylint, and the tests that
    other steps repeat. ``release_gates`` has complete steps with the same names, which replace these.
    """
    options = [word for name in ("changelog", "pep8", "pylint", "yamllint") for word in ("--skip-test", name)]
    return [
        sanity("2 min", *options, expected_test="validate-modules"),
        ansible_lint("3 min", "examples", "molecule"),
        Step("yamllint", "5 s", ["yamllint", "--strict", "."]),
        Step(
            "antsibull-docs",
            "20 s",
            ["antsibull-docs", "lint-collection-docs", "--plugin-docs", "--validate-collection-refs=dependent", "."],
        ),
        Step("antsibull-changelog", "1 s", ["antsibull-changelog", "lint"]),
    ]


def ansible_lint(usual_time: str, *excluded: str) -> Step:
    """Return a step with ansible-lint for everything except the excluded directories."""
    options = [word for directory in excluded for word in ("--exclude", directory)]
    return Step(
        "ansible-lint", usual_time, ["ansible-lint", "--profile", "production", "--offline", "--strict", *options]
    )


def python_gates(links: Path) -> list[Step]:
    """Return the checks of Python's tools."""
    configuration = ROOT / "pyproject.toml"
    plugins = links / "ansible_collections/dra/accelerators/plugins"
    return [
        Step("ruff check", "1 s", ["ruff", "check", "."], remedy="`ruff check --fix` corrects most problems."),
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
                *(file for directory in PLUGIN_DIRECTORIES for file in sorted((plugins / directory).glob("*.py"))),
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


def collection_gate(*directories: Path) -> Step:
    """Return a check that pytest can import each test of the directories, by default of those that only `make prove` runs."""
    return Step(
        "tests found",
        "10 s",
        [*(sys.executable, "-m", "pytest", "--collect-only", "-q", "-q", "-m", ""), *(directories or ONLY_IN_PROVE)],
        remedy="the log names the file that cannot be imported, and the reason.",
    )


def tarball_gate(root: Path) -> Step:
    """Return the step that builds the tarball for Galaxy, installs it, and tests the installation."""
    return Step(
        "tarball",
        "20 s",
        [sys.executable, ROOT / "tests/tools/checks/tarball.py", root / "dist"],
        remedy="add a new file to the list in checks/tarball.py or to build_ignore in galaxy.yml.",
    )


def release_gates(_work: Path) -> list[Step]:
    """Return the checks of Galaxy and ansible-builder for a release, and the complete steps of ``ansible_gates``.

    Galaxy's importer runs the linters again on the tarball.
    """
    root = cache()
    return [
        tarball_gate(root),
        ansible_lint("6 min"),
        sanity("4 min", expected_test="pylint"),
        Step(
            "language",
            "3 min cold, 20 s warm",
            [sys.executable, ROOT / "tests/tools/checks/language.py"],
            remedy="correct the named lines. CONTRIBUTING.md has the rules and the glossary, which tests/tools/vale/styles repeats for Vale.",
        ),
        Step(
            "importer tools",
            "1 min cold, nothing warm",
            [ROOT / "tests/tools/venv", "importer"],
            remedy="the log names the package that pip could not install.",
        ),
        Step(
            "galaxy-importer",
            "1 min",
            [sys.executable, ROOT / "tests/tools/checks/importer.py", root / "venv-importer", root / "dist"],
            needs=("tarball", "importer tools"),
            remedy="correct the named errors, because Galaxy rejects a release with errors.",
        ),
        Step(
            "execution environment",
            "2 s",
            [root / "venv-importer/bin/ansible-builder", "introspect", tree()],
            needs=("importer tools",),
            expected_output=tuple(
                f"{need}  # from collection dra.accelerators" for need in ("kubernetes>=24.2.0", "[platform:rpm]")
            ),
            remedy="check the two files of requirements that meta/execution-environment.yml names: ansible-builder did not find all of them.",
        ),
    ]


def gates(_work: Path) -> list[Step]:
    """Return all checks of a change. The quick ones are first."""
    root, links = cache(), tree()
    project_checks = [
        Step(
            f"check {name.replace('_', ' ')}",
            "1 s",
            [sys.executable, ROOT / f"tests/tools/checks/{name}.py"],
            remedy=f"the rule: {rule}.",
        )
        for name, rule in CHECKS.items()
    ]
    licenses = Step(
        "reuse",
        "3 s",
        ["reuse", "lint"],
        remedy="name the license of a file in its first lines, or in REUSE.toml if its format has no comments.",
    )
    return [licenses, *project_checks, *python_gates(links), collection_gate(), *ansible_gates(), tarball_gate(root)]
