#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: ascend_runtime
version_added: 0.1.0
short_description: Install, replace, or remove the files of ascend-docker-runtime
description:
  - Runs the vendor's package with a scratch file as the engine's configuration file, because the package overwrites that file. To
    configure an engine for the runtime, use M(dra.accelerators.containerd_handler) or M(dra.accelerators.docker_runtime).
  - The module reads the installed version from a file that the package writes, before and after the change.
notes:
  - The module needs root on the node.
  - The module does not use the package's own uninstall command, because that command also removes parent directories.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
    details:
      - For a package that is not on the node yet, the module checks only the name.
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
      - V(present) installs the version of O(package). It also replaces a newer version with an older one.
      - V(absent) removes the files that V(present) has installed, and keeps files that existed before. The module fails if containers use the
        runtime, because they cannot be stopped without it.
    type: str
    choices: [present, absent]
    default: present
  package:
    description: The path of the package on the node. The file must have the vendor's original name. It is required for O(state=present).
    type: path
  checksum:
    description: The SHA-256 digest of the package, as 64 hexadecimal digits. If empty, the module does not check the digest.
    type: str
    default: ""
  accept_eula:
    description:
      - Whether you have read and accepted the vendor's license. Without it, the module installs nothing.
      - The package prompts for the acceptance, and the module confirms it.
    type: bool
    default: false
  directory:
    description:
      - The directory in which the package creates the runtime's directory.
      - The directory must belong to root, must not be writable by other users, and must not be a symbolic link.
    type: path
    default: /usr/local/Ascend
  injection:
    description: How the runtime makes NPUs available in containers. A package that replaces an installed version keeps the current mode.
    type: str
    choices: [legacy, cdi]
    default: legacy
  type:
    description: The product type, if the package requires one. Use an empty string for servers and cards.
    type: str
    choices: ["", A200, A200ISoC, A200IA2, A500, A500A2]
    default: ""
  record:
    description: The file on the node in which the module records the directories that it creates.
    type: path
    default: /var/lib/dra-accelerators/ascend-runtime.json
  timeout:
    description: The timeout of the package in seconds.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: Install ascend-docker-runtime
  dra.accelerators.ascend_runtime:
    package: /root/Ascend-docker-runtime_6.0.0_linux-x86_64.run
    checksum: "{{ runtime_digest }}"
    accept_eula: true

- name: Remove ascend-docker-runtime
  dra.accelerators.ascend_runtime:
    state: absent
"""

RETURN = r"""
program:
  description: The path of the runtime's program.
  returned: success
  type: str
  sample: /usr/local/Ascend/Ascend-Docker-Runtime/ascend-docker-runtime
before:
  description: The version before the change. It is empty if the runtime was not installed, or if its installation was interrupted.
  returned: success
  type: str
  sample: ""
after:
  description: The version after the change. In check mode, the expected version. It is empty if the runtime is not installed.
  returned: success
  type: str
  sample: 6.0.0
managed:
  description: Whether this module has installed the runtime, or would install it in check mode.
  returned: success
  type: bool
  sample: true
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: licence
"""

import os
import posixpath
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_host.docker_runtime import (
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
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_host.driver_packages import PackageError
from ansible_collections.dra.accelerators.plugins.module_utils._host.driver_installation import (
    digest_of,
    verified_copy,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.single_run import run_alone
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import InUse
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import LONGEST_INSTALLATION, System
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.ascend.driver_files import RUNTIME_LISTS

CONSTRAINTS: dict[str, Any] = {"required_if": [("state", "present", ["package"])]}
ACCEPTED = "Y\n"
#: The directory of the package's verified copy. It is in the directory of the record.
VERIFIED = "ascend-runtime-verified"


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "package": {"type": "path"},
        "checksum": {"type": "str", "default": ""},
        "accept_eula": {"type": "bool", "default": False},
        "directory": {"type": "path", "default": DEFAULT_FOLDER},
        "injection": {"type": "str", "choices": ["legacy", "cdi"], "default": "legacy"},
        "type": {"type": "str", "choices": ["", "A200", "A200ISoC", "A200IA2", "A500", "A500A2"], "default": ""},
        "record": {"type": "path", "default": "/var/lib/dra-accelerators/ascend-runtime.json"},
        "timeout": {"type": "int", "default": 300},
    }


def check_installation(system: System, package: Package, params: dict[str, Any], *, check: bool) -> None:
    """Reject an installation that would fail. Raises PackageError."""
    if not params["accept_eula"]:
        raise PackageError(
            "The vendor's license was not accepted. The package requires this acceptance",
            hint="Read the license, and set accept_eula to true.",
            code="licence",
        )
    machine = os.uname().machine
    if package.machine != machine:
        raise PackageError(
            f"{package.path} is for {package.machine}, and this node is {machine}", code="not-for-this-node"
        )
    directory_problem = unfit(system, params["directory"])
    if directory_problem:
        raise PackageError(
            f"{directory_problem}, and the package rejects it",
            hint="Expected a directory that only root owns and can write, and not a link. Nothing was run.",
            code="directory",
        )
    if not system.exists(package.path):
        if check:
            return
        raise PackageError(
            f"{package.path} is not on the node",
            hint="Copy the package to the node. The role ascend_runtime copies it.",
            code="package-missing",
        )
    found = digest_of(system, package.path) if package.checksum else ""
    if found != package.checksum:
        raise PackageError(
            f"{package.path} has the SHA-256 digest {found}, expected {package.checksum}",
            hint="The file is damaged, or it is a different file. Nothing was run.",
            code="checksum",
        )


def install(system: System, package: Package, params: dict[str, Any], *, before: str) -> None:
    """Run the package and verify the result. Raises PackageError."""
    target = target_of(params["directory"])
    record_directory = posixpath.dirname(params["record"])
    system.make_directory(record_directory)
    with verified_copy(system, package.path, package.checksum, f"{record_directory}/{VERIFIED}") as copy:
        scratch = system.path(f"{record_directory}/{VERIFIED}/daemon.json")
        scratch.write_text("{}\n", encoding="utf-8")
        # The path for the package, below the root directory. Tests use another root directory.
        seen_path = str(scratch) if system.root == "/" else f"/{scratch.relative_to(system.path('/'))}"
        argv = words(
            package,
            params["directory"],
            replaces=bool(before),
            scratch=seen_path,
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
            f"Its last output: {' | '.join(lines[-5:])[-600:]}",
            hint="Check /var/log/ascend-docker-runtime/installer.log, and run this again.",
            code="not-proved",
        )


def remove_runtime(system: System, params: dict[str, Any], record: Record | None, *, check: bool) -> bool:
    """Remove the installed files, and return whether a record existed. Raises InUse."""
    if record is None:
        return False
    program = f"{target_of(params['directory'])}/{PROGRAM}"
    running = containers(system, program)
    if running:
        raise InUse(
            f"Containers that {program} has started are running, and only this program can stop them: {', '.join(running)}",
            blockers=running,
            hint="Delete the pods of these containers, or stop the containers.",
        )
    if not check:
        for path in reversed(record.made):
            if path in (target_of(params["directory"]), RUNTIME_LISTS):
                system.remove_tree(path)
            else:
                remove_empty(system, path)
        system.remove(params["record"])
        remove_empty(system, posixpath.dirname(params["record"]))
    return True


def keep_record(system: System, path: str, record: Record) -> None:
    """Write the record. Raises OSError."""
    system.write_atomic(path, record.to_text().encode(), mode=0o600)


def install_with_record(
    system: System, package: Package, params: dict[str, Any], record: Record | None, *, before: str, is_managed: bool
) -> None:
    """Run the package. Record the new paths before, so that the record exists even if this run is killed. Raises PackageError."""
    paths = (params["directory"], target_of(params["directory"]), RUNTIME_LISTS)
    recorded = record.made if record is not None else ()
    created = tuple(path for path in paths if path in recorded or not system.exists(path))
    if is_managed:
        keep_record(system, params["record"], Record(created, unfinished=True))
    install(system, package, params, before=before)
    # The package does not sync its files.
    system.sync_all()
    if is_managed:
        keep_record(system, params["record"], Record(created, unfinished=False))


def remove_empty(system: System, path: str) -> None:
    """Remove an empty directory."""
    if system.path(path).is_dir() and not system.list_directory(path):
        system.path(path).rmdir()


def work(module: AnsibleModule) -> dict[str, Any]:
    """Install or remove the runtime's files, and return the module's result. Raises AcceleratorError."""
    params, system = module.params, System()
    target = target_of(params["directory"])
    try:
        text: str | None = system.read_text(params["record"])
    except FileNotFoundError:
        text = None
    record = read_record(text, params["record"])
    before = after = installed(system, target)
    if params["state"] == "absent":
        changed = remove_runtime(system, params, record, check=module.check_mode)
        after = "" if changed and record is not None and target in record.made else before
        managed = False
    else:
        package = read_package(params["package"], params["checksum"])
        after = package.version
        managed = record is not None or not before
        present = before  # also of an interrupted installation
        if record is not None and record.unfinished:
            before = ""  # its files can be empty
        changed = before != package.version
        if changed:
            check_installation(system, package, params, check=module.check_mode)
            if not module.check_mode:
                install_with_record(system, package, params, record, before=present, is_managed=managed)
    return {
        "changed": changed,
        "program": f"{target}/{PROGRAM}",
        "before": before,
        "after": after,
        "managed": managed,
        "diff": {"before": f"{PROGRAM}: {before}\n", "after": f"{PROGRAM}: {after}\n"},
    }


def main() -> None:
    """Entry point."""
    run_alone(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work, System())


if __name__ == "__main__":
    main()
