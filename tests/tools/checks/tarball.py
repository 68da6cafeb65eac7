# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the collection, check the content of the tarball, and test it with only the essential directories.

A collection has to work without any directory other than meta, plugins, roles, and playbooks. The tarball is installed
into an empty directory, and all other files are deleted. Then Ansible documents each module and role, checks the syntax
of each playbook and of a play with each role, and runs the module without requirements. The checkout is not in any
search path.

usage: tarball.py DIRECTORY
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from files import ROOT, close, project_files

TOP_LEVEL = {
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "FILES.json",
    "LICENSE",
    "LICENSES",
    "MANIFEST.json",
    "README.md",
    "REUSE.toml",
    "SECURITY.md",
    "changelogs",
    "docs",
    "examples",
    "meta",
    "playbooks",
    "plugins",
    "roles",
}
ESSENTIAL = {"meta", "plugins", "roles", "playbooks"}
MADE_BY_BUILD = {"FILES.json", "MANIFEST.json"}
LARGEST_BYTES = 5 * 1024 * 1024


def run(command: Sequence[str], cwd: Path, environment: dict[str, str]) -> str:
    """Run an Ansible command and return its output. Exit with the output if it fails."""
    completed = subprocess.run(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if completed.returncode:
        raise SystemExit(f"{' '.join(command)}\n{completed.stdout}\nexit status {completed.returncode}")
    return completed.stdout


def content_problems(tarball: Path) -> list[str]:
    """Return unexpected files in the tarball, and missing ones."""
    with tarfile.open(tarball) as archive:
        names = {member.name for member in archive.getmembers() if not member.isdir()}
    tracked = {str(path) for path in project_files()}
    problems = [f"{name}: not one of {sorted(TOP_LEVEL)}" for name in names if Path(name).parts[0] not in TOP_LEVEL]
    problems += [f"{name}: Git does not know it" for name in names - tracked - MADE_BY_BUILD]
    problems += [f"{name}: hidden file" for name in names if any(part.startswith(".") for part in Path(name).parts)]
    wanted = {name for name in tracked if Path(name).parts[0] in ESSENTIAL and not Path(name).name.startswith(".")}
    problems += [f"{name}: is missing from the tarball" for name in wanted - names]
    if tarball.stat().st_size > LARGEST_BYTES:
        problems.append(f"{tarball.name}: {tarball.stat().st_size} bytes; expected at most {LARGEST_BYTES}")
    return sorted(problems)


def try_installed(tarball: Path, scratch: Path) -> int:
    """Install the tarball into ``scratch``, delete all that is not essential, and use each part. Return the number of parts."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ANSIBLE_") and name not in ("PYTHONPATH", "MAKEFLAGS")
    }
    environment |= {"ANSIBLE_COLLECTIONS_PATH": str(scratch), "ANSIBLE_NOCOLOR": "1", "HOME": str(scratch)}
    galaxy = ["ansible-galaxy", "collection", "install", str(tarball), "--no-deps", "--offline", "-p", str(scratch)]
    run(galaxy, scratch, environment)
    installed = scratch / "ansible_collections/dra/accelerators"
    for entry in installed.iterdir():
        if entry.name not in ESSENTIAL:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    modules = sorted(path.stem for path in (installed / "plugins/modules").glob("*.py"))
    names = [f"dra.accelerators.{module}" for module in modules]
    documented = run(["ansible-doc", "-t", "module", *names], scratch, environment)
    missing = [name for name in names if f"> MODULE {name} " not in documented]
    if missing:
        raise SystemExit(f"ansible-doc shows nothing of these modules of the installed collection: {missing}")
    roles = sorted(path.parents[1].name for path in (installed / "roles").glob("*/tasks/main.yml"))
    listing = run(["ansible-doc", "-t", "role", "--list", "dra.accelerators"], scratch, environment)
    undocumented = [role for role in roles if f"dra.accelerators.{role}" not in listing]
    if undocumented:
        raise SystemExit(f"ansible-doc does not know these roles of the installed collection: {undocumented}")

    playbooks = sorted(path.stem for path in (installed / "playbooks").glob("*.yml"))
    command = ["ansible-playbook", "-i", "localhost,", "--syntax-check"]
    run([*command, *(f"dra.accelerators.{playbook}" for playbook in playbooks)], scratch, environment)
    play = {
        "name": "Use every part of the installed collection",
        "hosts": "localhost",
        "gather_facts": False,
        "roles": [{"role": f"dra.accelerators.{role}"} for role in roles],
        "tasks": [{"name": "Facts of accelerators", "dra.accelerators.accelerator_info": {}}],
    }
    (scratch / "every_role.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    run(["ansible-playbook", "-i", "localhost,", "--syntax-check", "every_role.yml"], scratch, environment)
    return len(modules) + len(roles) + len(playbooks)


def main(folder: Path) -> int:
    """Build into a directory, check and test the tarball, and return the exit status."""
    # The importer takes the tarball in this directory, so one of an earlier version must not remain.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = dict(os.environ)
    run(["ansible-galaxy", "collection", "build", "--force", "--output-path", str(folder), "."], ROOT, environment)
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text(encoding="utf-8"))
    tarball = folder / f"{galaxy['namespace']}-{galaxy['name']}-{galaxy['version']}.tar.gz"
    problems = content_problems(tarball)
    with tempfile.TemporaryDirectory(prefix="dra-accelerators-tarball-") as scratch:
        parts = try_installed(tarball, Path(scratch))
    print(f"{tarball}: {tarball.stat().st_size} bytes")
    return close(problems, parts, "modules, roles and playbooks of the installed tarball")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
