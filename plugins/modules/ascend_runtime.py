#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: ascend_runtime
version_added: 0.1.0
short_description: Install, replace or remove the files of ascend-docker-runtime
description:
  - Runs the vendor's package, with a scratch file in the place of an engine's configuration, which the package would write anew. Engines are told
    of the runtime by M(dra.accelerators.containerd_handler) and M(dra.accelerators.docker_runtime).
  - What is installed is read from the file that the package leaves, before and afterwards.
notes:
  - Needs root on the node.
  - The package's own removal is not used, because it removes folders above its own.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - A package that is not on the node yet is judged by its name alone.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  state:
    description:
      - V(present) installs the version of O(package), also an older one in place of a newer one.
      - V(absent) removes what V(present) has installed, and nothing that was there before. Refused while containers run by the runtime, which
        could not be ended without it.
    type: str
    choices: [present, absent]
    default: present
  package:
    description: The package on the node, under the name that it has at the vendor's; required for V(present).
    type: path
  checksum:
    description: SHA-256 digest of the package, as 64 hexadecimal digits. Empty looks at none.
    type: str
    default: ""
  accept_eula:
    description: Whether the vendor's licence was read and accepted. The package asks, and gets the answer from here.
    type: bool
    default: false
  folder:
    description: Folder in which the runtime gets a folder of its own. Root's, writable by nobody else, and no link.
    type: path
    default: /usr/local/Ascend
  injection:
    description: How the runtime brings NPUs into containers. Packages that replace one keep to that.
    type: str
    choices: [legacy, cdi]
    default: legacy
  type:
    description: The product, where it is one of those that the package asks for. Empty for servers and cards.
    type: str
    choices: ["", A200, A200ISoC, A200IA2, A500, A500A2]
    default: ""
  record:
    description: File on the node in which is written what was made.
    type: path
    default: /var/lib/dra-accelerators/ascend-runtime.json
  timeout:
    description: How many seconds the package may take.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: Install ascend-docker-runtime
  dra.accelerators.ascend_runtime:
    package: /root/Ascend-docker-runtime_6.0.0_linux-x86_64.run
    checksum: "{{ runtime_digest }}"
    accept_eula: true

- name: Remove it
  dra.accelerators.ascend_runtime:
    state: absent
"""

RETURN = r"""
program:
  description: The runtime's program.
  returned: success
  type: str
  sample: /usr/local/Ascend/Ascend-Docker-Runtime/ascend-docker-runtime
before:
  description: The version that was installed before; empty for none.
  returned: success
  type: str
  sample: ""
after:
  description: The version that is installed afterwards, or would be in check mode; empty for none.
  returned: success
  type: str
  sample: 6.0.0
ours:
  description: Whether this module has installed what there is, or would have.
  returned: success
  type: bool
  sample: true
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: licence
"""

import os
import posixpath
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_packages import PackageError
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_runtime import (
    DEFAULT_FOLDER,
    PROGRAM,
    Package,
    Record,
    containers,
    installed,
    read_package,
    read_record,
    target_of,
    unfit,
    words,
)
from ansible_collections.dra.accelerators.plugins.module_utils._driver_install import digest_of, verified_copy
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.ascend.driver_files import RUNTIME_LISTS
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import InUse
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import LONGEST_INSTALLATION, System

CONSTRAINTS: dict[str, Any] = {"required_if": [("state", "present", ["package"])]}
ACCEPTED = "Y\n"
#: The directory of the package's verified copy, next to the record.
VERIFIED = "ascend-runtime-verified"


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "package": {"type": "path"},
        "checksum": {"type": "str", "default": ""},
        "accept_eula": {"type": "bool", "default": False},
        "folder": {"type": "path", "default": DEFAULT_FOLDER},
        "injection": {"type": "str", "choices": ["legacy", "cdi"], "default": "legacy"},
        "type": {"type": "str", "choices": ["", "A200", "A200ISoC", "A200IA2", "A500", "A500A2"], "default": ""},
        "record": {"type": "path", "default": "/var/lib/dra-accelerators/ascend-runtime.json"},
        "timeout": {"type": "int", "default": 300},
    }


def refuse(system: System, package: Package, params: dict[str, Any], *, check: bool) -> None:
    """Refuse what cannot go well. Raises PackageError."""
    if not params["accept_eula"]:
        raise PackageError(
            "The vendor's licence was not accepted, which the package asks for",
            hint="Read it, and set accept_eula to true.",
            code="licence",
        )
    machine = os.uname().machine
    if package.machine != machine:
        raise PackageError(
            f"{package.path} is for {package.machine}, and this node is {machine}", code="not-for-this-node"
        )
    why = unfit(system, params["folder"])
    if why:
        raise PackageError(
            f"{why}, which the package does not take",
            hint="Expected a folder of root's that nobody else may write, and that is no link. Nothing was run.",
            code="folder",
        )
    if not system.exists(package.path):
        if check:
            return
        raise PackageError(
            f"{package.path} is not on the node", hint="Copy it there; the role does.", code="package-missing"
        )
    found = digest_of(system, package.path) if package.checksum else ""
    if found != package.checksum:
        raise PackageError(
            f"{package.path} has the SHA-256 digest {found}, expected {package.checksum}",
            hint="It is damaged or another file. Nothing was run.",
            code="checksum",
        )


def install(system: System, package: Package, params: dict[str, Any], *, before: str) -> None:
    """Run the package and see what it has left. Raises PackageError."""
    target = target_of(params["folder"])
    beside = system.path(posixpath.dirname(params["record"]))
    beside.mkdir(mode=0o755, parents=True, exist_ok=True)
    verified = verified_copy(
        system, package.path, package.checksum, f"{posixpath.dirname(params['record'])}/{VERIFIED}"
    )
    with tempfile.TemporaryDirectory(prefix="ascend-runtime-", dir=beside) as folder, verified as copy:
        scratch = Path(folder, "daemon.json")
        scratch.write_text("{}\n", encoding="utf-8")
        seen = str(scratch) if system.root == "/" else f"/{scratch.relative_to(system.path('/'))}"
        argv = words(
            package,
            params["folder"],
            replaces=bool(before),
            scratch=seen,
            mode=params["injection"],
            type=params["type"],
        )
        argv[1] = str(system.path(copy))
        done = system.run(argv, params["timeout"], input=ACCEPTED, longest=LONGEST_INSTALLATION)
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    now = installed(system, target)
    if done.returncode or now != package.version or not system.exists(RUNTIME_LISTS):
        raise PackageError(
            f"{package.path} ended with {done.returncode}, and {target} has {now or 'no version'}, expected {package.version}. "
            f"It said: {' | '.join(lines[-5:])[-600:]}",
            hint="Look at /var/log/ascend-docker-runtime/installer.log, and run this again.",
            code="not-proved",
        )


def absent(system: System, params: dict[str, Any], record: Record | None, *, check: bool) -> bool:
    """Remove what was installed; whether there was anything. Raises InUse."""
    if record is None:
        return False
    program = f"{target_of(params['folder'])}/{PROGRAM}"
    running = containers(system, program)
    if running:
        raise InUse(
            f"Containers run by {program}, which has to end them: {', '.join(running)}",
            blockers=running,
            hint="Delete the pods, or stop the containers, that use it.",
        )
    if not check:
        for path in reversed(record.made):
            if path in (target_of(params["folder"]), RUNTIME_LISTS):
                system.remove_tree(path)
            else:
                remove_empty(system, path)
        system.remove(params["record"])
        remove_empty(system, posixpath.dirname(params["record"]))
    return True


def remove_empty(system: System, path: str) -> None:
    """Remove a folder if nothing is in it."""
    if system.path(path).is_dir() and not system.list_directory(path):
        system.path(path).rmdir()


def work(module: AnsibleModule) -> dict[str, Any]:
    """Bring the runtime's files to the wanted state; returns the module's result. Raises AcceleratorError."""
    params, system = module.params, System()
    target = target_of(params["folder"])
    try:
        text: str | None = system.read_text(params["record"])
    except FileNotFoundError:
        text = None
    record = read_record(text, params["record"])
    before = after = installed(system, target)
    if params["state"] == "absent":
        changed = absent(system, params, record, check=module.check_mode)
        after = "" if changed and record is not None and target in record.made else before
        ours = False
    else:
        package = read_package(params["package"], params["checksum"])
        after, changed = package.version, before != package.version
        ours = record is not None or not before
        if changed:
            refuse(system, package, params, check=module.check_mode)
            if not module.check_mode:
                if ours:
                    # Before the package is run: what is ours is known also of a run that is killed.
                    places = (params["folder"], target, RUNTIME_LISTS)
                    made = [path for path in places if not system.exists(path)]
                    known = record.made if record is not None else ()
                    kept = Record(tuple(path for path in places if path in made or path in known))
                    system.write_atomic(params["record"], kept.to_text().encode(), mode=0o600)
                install(system, package, params, before=before)
    return {
        "changed": changed,
        "program": f"{target}/{PROGRAM}",
        "before": before,
        "after": after,
        "ours": ours,
        "diff": {"before": f"{PROGRAM}: {before}\n", "after": f"{PROGRAM}: {after}\n"},
    }


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
