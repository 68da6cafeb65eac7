# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare the locked packages of a node with known vulnerabilities.

python audit_requirements.py [ADVISORIES.json]

With a file of advisories the comparison is local: ``{"advisories": [{"id", "package", "affected", "fixed",
"summary"}]}``, where ``affected`` is a version specifier (PEP 440). Without one, pip-audit queries its service, which
needs internet access. If the service is unreachable, the exit status is 2.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from lock_requirements import FILES, parse_lock
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PIP_AUDIT = "pip-audit>=2.9,<3"


def findings(lock: str, advisories: str) -> list[str]:
    """Return a line for each advisory that affects a locked version. Exit if the file has another format."""
    try:
        entries = [
            (each["id"], canonicalize_name(each["package"]), SpecifierSet(each["affected"]), each)
            for each in json.loads(advisories)["advisories"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"The file of advisories cannot be read ({error!r}); expected the format in the docstring of this program"
        ) from error
    found = []
    for line in parse_lock(lock):
        requirement = Requirement(line)
        (version,) = (each.version for each in requirement.specifier)
        name = canonicalize_name(requirement.name)
        found += [
            f"{name} {version}: {identifier}, {entry.get('summary', '')}; fixed in {entry.get('fixed') or 'no version'}"
            for identifier, package, affected, entry in entries
            if package == name and affected.contains(version, prereleases=True)
        ]
    return sorted(found)


def audit_online() -> int:
    """Run pip-audit on the lock with its service, and return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        venv.create(directory / "venv", with_pip=True)
        python = directory / "venv/bin/python"
        subprocess.run(
            [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PIP_AUDIT], check=True
        )
        audit: list[str | Path] = [
            python,
            "-I",
            "-m",
            "pip_audit",
            "--require-hashes",
            "--disable-pip",
            "--requirement",
            FILES / "requirements.lock",
        ]
        done = subprocess.run(audit, check=False, capture_output=True, text=True)
    print(done.stdout + done.stderr[-2000:])
    if done.returncode and "vulnerabilit" not in done.stdout + done.stderr:
        print(
            "The service of pip-audit could not be reached. Run `make audit AUDIT=advisories.json` with a local file of advisories."
        )
        return 2
    return done.returncode


def main(arguments: list[str]) -> int:
    """Audit the lock and return the exit status: 0 without findings, 1 with findings, 2 if the service cannot be reached."""
    if not arguments:
        return audit_online()
    found = findings((FILES / "requirements.lock").read_text("utf-8"), Path(arguments[0]).read_text("utf-8"))
    for each in found:
        print(each)
    print(f"{len(found)} vulnerabilities found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
