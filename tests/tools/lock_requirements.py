# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Write the lock of the packages on a node, and a software bill of materials (SBOM) of it.

    python lock_requirements.py [--upgrade | --check]

``roles/python_environment/files/requirements.lock`` pins each package of ``requirements.txt`` and its dependencies by version and by the
SHA-256 digests of its wheels: for CPython 3.10 and newer on Linux, x86_64 and aarch64, with glibc. It names no index, so that a mirror
serves it. ``sbom.cdx.json`` in the same directory is CycloneDX 1.6. Without ``--upgrade``, versions in the present lock stay. ``--check`` changes
nothing and fails if the lock does not satisfy ``requirements.txt``, or if the SBOM differs from the lock; it needs no index.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import uuid
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles/python_environment/files"
HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
#
# Written by `make lock` from requirements.txt. Wheels for CPython 3.10 and newer on Linux with glibc, x86_64 and aarch64.
"""
UV = "uv>=0.9,<1"
WHEEL = re.compile(r"-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl$")
PYTHON = re.compile(r"(?:py2\.)?py3|py3\d*(?:\.py3\d*)*|cp3\d+(?:\.cp3\d+)*")


def is_wheel_for_a_node(file: str) -> bool:
    """Return whether a wheel is for a node: CPython with the GIL, and any platform or glibc on x86_64 or aarch64."""
    match = WHEEL.search(file)
    if match is None or not PYTHON.fullmatch(match["python"]):
        return False
    if not re.fullmatch(r"none|abi3|cp3\d+", match["abi"]):
        return False
    platform = match["platform"]
    return platform == "any" or bool(re.search(r"manylinux\S*_(x86_64|aarch64)", platform))


def without_constant_markers(line: str) -> str:
    """Return a requirement without the parts of its marker that always hold on a node."""
    name, _semicolon, marker = line.partition(" ; ")
    always = ("implementation_name == 'cpython'", "sys_platform == 'linux'", "platform_python_implementation != 'PyPy'")
    left = [each for each in marker.split(" and ") if each and each not in always]
    return f"{name} ; {' and '.join(left)}" if left else name


def lock_entries(lock: dict[str, Any], resolved: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each line of uv's resolution without comments, with the digests of its wheels for a node."""
    packages = {
        (canonicalize_name(each["name"]), each["version"]): each for each in lock["package"] if "version" in each
    }
    for resolved_line in resolved.splitlines():
        if not resolved_line or resolved_line.startswith(("#", " ", "-")):
            continue
        line = without_constant_markers(resolved_line)
        requirement = Requirement(line)
        (version,) = (each.version for each in requirement.specifier)
        found = packages[canonicalize_name(requirement.name), version]
        wheels = [each for each in found.get("wheels", ()) if is_wheel_for_a_node(each["url"].rpartition("/")[2])]
        if not wheels:
            raise SystemExit(
                f"{requirement.name} {version} has no wheel for a node; expected one, because nodes have no compiler"
            )
        yield line, sorted({each["hash"] for each in wheels})


def write_lock(*, upgrade: bool) -> str:
    """Resolve requirements.txt with uv and return the text of the lock."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        venv.create(directory / "uv", with_pip=True)
        pip: list[str | Path] = [
            directory / "uv/bin/python",
            *("-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV),
        ]
        subprocess.run(pip, check=True)
        uv = directory / "uv/bin/uv"
        lines = (FILES / "requirements.txt").read_text("utf-8").splitlines()
        wanted = [line for line in lines if line and not line.startswith("#")]
        constraints = [] if upgrade or not (FILES / "requirements.lock").exists() else sorted(pins())
        (directory / "pyproject.toml").write_text(
            f'[project]\nname = "locked"\nversion = "0"\nrequires-python = ">=3.10"\ndependencies = {json.dumps(wanted)}\n'
            "[tool.uv]\nenvironments = [\"sys_platform == 'linux' and implementation_name == 'cpython'\"]\n"
            f"constraint-dependencies = {json.dumps(constraints)}\n",
            "utf-8",
        )
        subprocess.run([uv, "lock", "--quiet", "--project", directory], check=True)
        export: list[str | Path] = [
            uv,
            "export",
            "--quiet",
            "--project",
            directory,
            "--frozen",
            "--no-emit-project",
            "--no-hashes",
            "--no-header",
        ]
        resolved = subprocess.run([*export, "--no-annotate"], check=True, capture_output=True, text=True).stdout
        lock = tomllib.loads((directory / "uv.lock").read_text("utf-8"))
    return HEADER + "".join(
        f"{line} \\\n" + " \\\n".join(f"    --hash={digest}" for digest in digests) + "\n"
        for line, digests in lock_entries(lock, resolved)
    )


def parse_lock(text: str) -> dict[str, list[str]]:
    """Return the requirement lines of a lock, each with its digests."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", " ")):
            found[line.rstrip("\\ ").strip()] = []
        elif line.strip().startswith("--hash="):
            found[next(reversed(found))].append(line.strip().rstrip("\\ ").removeprefix("--hash="))
    return found


def pins() -> set[str]:
    """Return the pinned versions of the present lock."""
    return set(parse_lock((FILES / "requirements.lock").read_text("utf-8")))


def bill_of_materials(text: str) -> str:
    """Return a CycloneDX document of a lock: the same for the same lock."""
    components = []
    for line, digests in parse_lock(text).items():
        requirement = Requirement(line)
        (version,) = (each.version for each in requirement.specifier)
        name = canonicalize_name(requirement.name)
        components.append(
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{name}@{version}",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{version}",
                "properties": [
                    {"name": "dra.accelerators:sha256", "value": each.removeprefix("sha256:")} for each in digests
                ],
            }
        )
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, text)}",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "dra.accelerators", "bom-ref": "dra.accelerators"}},
        "components": sorted(components, key=lambda each: str(each["bom-ref"])),
    }
    return json.dumps(document, indent=1) + "\n"


def find_problems() -> list[str]:
    """Return how lock and SBOM differ from requirements.txt."""
    text = (FILES / "requirements.lock").read_text("utf-8")
    pinned = [Requirement(line) for line in parse_lock(text)]
    found = [f"{line} has no digest" for line, digests in parse_lock(text).items() if not digests]
    for line in (FILES / "requirements.txt").read_text("utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        wanted = Requirement(line)
        versions = [
            next(iter(each.specifier)).version
            for each in pinned
            if canonicalize_name(each.name) == canonicalize_name(wanted.name)
        ]
        if not versions or not all(wanted.specifier.contains(version) for version in versions):
            found.append(f"{line}: the lock has {', '.join(versions) or 'no version'}; run `make lock`")
    if (FILES / "sbom.cdx.json").read_text("utf-8") != bill_of_materials(text):
        found.append("sbom.cdx.json differs from the lock; run `make lock`")
    return found


def main(arguments: list[str]) -> int:
    """Write the lock and the SBOM, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that requirements.txt permits")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something differs")
    chosen = parser.parse_args(arguments)
    if chosen.check:
        found = find_problems()
        for each in found:
            print(each)
        print(f"requirements.lock and sbom.cdx.json checked, {len(found)} problems")
        return bool(found)
    text = write_lock(upgrade=chosen.upgrade)
    (FILES / "requirements.lock").write_text(text, "utf-8")
    (FILES / "sbom.cdx.json").write_text(bill_of_materials(text), "utf-8")
    print(f"{len(parse_lock(text))} packages locked")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
