# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The role python_environment with a package index that needs a password: no process list or file shows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from package_index import PASSWORD, USER, PackageIndex

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "roles/python_environment/files"
#: The version that the index serves for each requirement: its lowest one.
VERSIONS = dict(re.findall(r"(?m)^([A-Za-z][\w.-]*)>=([\d.]+)", (FILES / "requirements.txt").read_text("utf-8")))


def run(directory: Path, variables: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    """Run the role on this machine in its own directory."""
    playbook, given = directory / "playbook.json", directory / "variables.json"
    role = {"ansible.builtin.include_role": {"name": "dra.accelerators.python_environment"}}
    playbook.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": [role]}]))
    settings = {
        "python_environment_root": str(directory / "opt"),
        # The index of the tests has only the packages of requirements.txt.
        "python_environment_require_hashes": False,
        "python_environment_interpreter": sys.executable,
        "ansible_python_interpreter": sys.executable,
        **variables,
    }
    given.write_text(json.dumps(settings))
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("PIP_")}
    environment |= {
        "HOME": str(directory),
        "ANSIBLE_LOCAL_TEMP": str(directory / "local"),
        "ANSIBLE_LOCALHOST_WARNING": "false",
    }
    return subprocess.run(
        [
            *(Path(sys.executable).with_name("ansible-playbook"), "--connection", "local", "--inventory", "localhost,"),
            *("--extra-vars", f"@{given}", "-vv", *options, playbook),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def leftovers(directory: Path) -> list[str]:
    """Return the files in the directory that contain the password, except those of the test."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.parent != directory]
    return [str(path) for path in found if PASSWORD.encode() in path.read_bytes()]


@pytest.mark.prove
def test_index_password_is_in_no_file_or_process_list(tmp_path: Path) -> None:
    with PackageIndex(VERSIONS) as index:
        url = f"http://{USER}:{PASSWORD}@{index.address}/simple"
        done = run(tmp_path, {"python_environment_index_url": url})
        assert done.returncode == 0, done.stdout + done.stderr
        again = run(tmp_path, {"python_environment_index_url": url})
    assert index.installers, "pip was not seen at work"
    assert index.exposed == []
    assert any(known for _target, known, _proxy in index.requests)
    assert PASSWORD not in done.stdout + done.stderr
    assert leftovers(tmp_path) == []
    listed = subprocess.run(
        [tmp_path / "opt/venv/bin/python", "-m", "pip", "list", "--format=json"], capture_output=True, check=True
    )
    assert {"grpcio", "kubernetes", "protobuf"} <= {each["name"] for each in json.loads(listed.stdout)}
    assert (tmp_path / "opt/current/dra_driver").is_dir()
    assert re.search(r"changed=0 .*failed=0", again.stdout), again.stdout


@pytest.mark.prove
def test_proxy_password_is_not_shown_if_pip_fails(tmp_path: Path) -> None:
    with PackageIndex({"grpcio": "1.0"}) as index:
        done = run(
            tmp_path,
            {
                "python_environment_pip_arguments": [
                    *("--index-url", f"http://{USER}:{PASSWORD}@index.invalid/simple"),
                    *("--trusted-host", "index.invalid"),  # without it pip sends no request
                ],
                "python_environment_proxy": {"http_proxy": f"http://way:{PASSWORD}@{index.address}"},
            },
        )
    assert done.returncode != 0
    assert "No matching distribution found for grpcio" in done.stdout
    assert index.installers
    assert index.exposed == []
    assert index.requests
    assert all(target.startswith("http://index.invalid/") for target, _known, _proxy in index.requests)
    assert all(proxy.startswith("Basic ") for _target, _known, proxy in index.requests)
    assert PASSWORD not in done.stdout + done.stderr
    assert leftovers(tmp_path) == []


def test_too_old_interpreter_is_rejected_by_name(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    # This interpreter, with the version 3.9 in its output.
    old.write_text(f'#!/bin/sh\n{sys.executable} "$@" | sed -E "s/3[.]1[0-9][.][0-9]+/3.9.18/"\n')
    old.chmod(0o755)
    done = run(tmp_path, {"python_environment_interpreter": str(old)}, "--check")
    assert done.returncode != 0
    output = " ".join(done.stdout.split())
    assert "is Python 3.9.18, and 3.10 or newer is required" in output
    assert not (tmp_path / "opt").exists()


def test_check_mode_on_a_bare_node_changes_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, {}, "--check", "--diff")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"changed=[1-9]", done.stdout)
    assert not (tmp_path / "opt").exists()


def make(root: Path, *files: str) -> None:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_removal_keeps_files_of_other_owners(tmp_path: Path) -> None:
    root = tmp_path / "opt"
    release, environment = "0.1.0-1a2b3c4d", "0123456789ab"
    make(root, f"releases/{release}/complete", f"venvs/{environment}/bin/python")
    make(root, "releases/theirs/README", "venvs/app/bin/python")
    (root / "current").symlink_to(f"releases/{release}")
    (root / "venv").symlink_to("venvs/app")
    done = run(tmp_path, {"python_environment_state": "absent"})
    assert done.returncode == 0, done.stdout + done.stderr
    left = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir() or path.is_symlink()}
    assert left == {"releases/theirs/README", "venvs/app/bin/python", "venv"}


@pytest.mark.prove
def test_removal_removes_all_own_files(tmp_path: Path) -> None:
    root = tmp_path / "opt"
    make(root, "releases/0.1.0-1a2b3c4d/complete", "venvs/0123456789ab/complete", "venvs/ba9876543210/bin/python")
    (root / "current").symlink_to("releases/0.1.0-1a2b3c4d")
    (root / "venv").symlink_to("venvs/0123456789ab")
    reported = run(tmp_path, {"python_environment_state": "absent"}, "--check")
    assert re.search(r"changed=[1-9]", reported.stdout), reported.stdout
    assert (root / "current").is_symlink()
    done = run(tmp_path, {"python_environment_state": "absent"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert not root.exists()
    again = run(tmp_path, {"python_environment_state": "absent"})
    assert re.search(r"changed=0 .*failed=0", again.stdout), again.stdout
