# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The result of the galaxy-importer check for each output of the importer."""

from __future__ import annotations

from pathlib import Path

import importer
import pytest
import yaml

COMPLETED = "INFO: Importer processing completed successfully"


def imported(directory: Path, printed: str, status: int = 0) -> int:
    """Check a tarball with an importer that prints this output, in an environment like a virtual one."""
    programs, packages = directory / "venv/bin", directory / "venv/lib/python3.11/site-packages"
    for each in (programs, packages, directory / "built"):
        each.mkdir(parents=True)
    (directory / "built/dra-accelerators-0.1.0.tar.gz").touch()
    (directory / "printed").write_text(printed + "\n", encoding="utf-8")
    python = programs / "python"
    # The tarball has its own name, as the importer requires.
    python.write_text(
        f'#!/bin/sh\ntest -f "$3" || exit 9\ncat {directory}/printed\nexit {status}\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    return importer.main(directory / "venv", directory / "built")


def test_import_without_findings_passes_and_has_the_dependencies(tmp_path: Path) -> None:
    assert imported(tmp_path, f"INFO: Linting collection\n{COMPLETED}") == 0
    linked = tmp_path / "venv/lib/python3.11/site-packages/ansible_collections"
    wanted = yaml.safe_load((importer.ROOT / "galaxy.yml").read_text(encoding="utf-8"))["dependencies"]
    assert wanted and all((linked.joinpath(*name.split(".")) / "plugins").is_dir() for name in wanted)


@pytest.mark.parametrize(
    ("printed", "status"),
    [
        (f"WARNING: no requires_ansible\n{COMPLETED}", 0),
        (f"ERROR: a role without a readme\n{COMPLETED}", 0),
        ("INFO: Linting collection", 0),
        (COMPLETED, 1),
    ],
)
def test_import_with_a_finding_an_early_end_or_an_error_status_fails(tmp_path: Path, printed: str, status: int) -> None:
    assert imported(tmp_path, printed, status) == 1


def test_import_distinguishes_a_killed_linter_from_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert imported(tmp_path, f"ERROR: Timeout on call to ansible-lint: 180 s\n{COMPLETED}") == 1
    assert "too slow or too busy" in capsys.readouterr().out
