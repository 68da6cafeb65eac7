#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver
version_added: 0.1.0
short_description: Install, upgrade, roll back, or remove the NVIDIA driver with apt, dnf, or zypper
description:
  - Installs the driver packages at one exact version from the configured package source. If no program uses a GPU, it loads the new kernel modules
    without a reboot.
  - Selects open or proprietary kernel modules for the GPUs on the PCI bus. It rejects drivers that cannot work with these GPUs.
  - Queries the package manager for its planned changes before the first change. Check mode also queries a source that is not configured on the node
    yet, and leaves no files.
  - Rolls back a driver that cannot be built or loaded, and restores the previous driver. The node keeps packages for this purpose.
  - Does not reboot the node, and reports in RV(reboot_required) whether a reboot is required.
notes:
  - Requires root on the node, and the distribution's package manager with its programs, apt, dnf 4, or zypper.
  - The next run resumes an interrupted installation.
  - The role P(dra.accelerators.nvidia_driver#role) contains the catalogs of the distributions, and the vendor's repository with its keys.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
    details:
      - Check mode reports blocking claims and processes, missing headers, and missing keys, and does not fail because of them. A run without check
        mode fails in these cases.
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
      - V(present) installs the driver that the other options describe.
      - V(previous) restores the driver before the last change. Another run with V(previous) reverses this.
      - V(absent) removes the driver and everything that was installed with it. It removes only packages that this module installed, unless O(remove_unmanaged)
        is true.
    type: str
    choices: [present, previous, absent]
    default: present
  version:
    description:
      - A branch such as V(580), a version such as V(580.95.05), or a package's full version.
      - If empty, an installed driver does not change. A node without a driver gets the newest version of the source.
    type: str
    default: ""
  latest:
    description: Whether to upgrade an installed driver to the newest version that matches O(version).
    type: bool
    default: false
  kernel_modules:
    description: Type of the kernel modules. V(auto) selects the type for the GPUs and the branch, and keeps installed modules that work with them.
    type: str
    choices: [auto, open, proprietary]
    default: auto
  build:
    description: Whether the kernel modules are built on the node (V(dkms)), or prebuilt for the distribution's kernels (V(precompiled)).
    type: str
    choices: [dkms, precompiled]
    default: dkms
  components:
    description: Whether to install only the compute libraries of the driver, or all libraries including graphics.
    type: str
    choices: [compute, full]
    default: compute
  catalog:
    description:
      - The package sets that provide a driver from this source. Of the entries that match, the module prefers one whose packages are installed, then
        the type of kernel modules that suits the GPUs best, then the first entry.
      - The placeholders C({branch}), C({kernel}), C({kernel_version}), and C({flavour}) in package names are replaced. C({kernel_version}) is the
        kernel release without the suffix of the distribution and the architecture (C(5.14.0-570.23.1)).
      - C({version}) in O(catalog[].packages) is the driver version. Such packages are found only for an exact O(version).
    type: list
    elements: dict
    required: true
    suboptions:
      modules:
        description: Type of the kernel modules in these packages.
        type: str
        choices: [open, proprietary]
        required: true
      build:
        description: How these packages provide the kernel modules.
        type: str
        choices: [dkms, precompiled]
        required: true
      components:
        description: Driver components in these packages.
        type: str
        choices: [compute, full]
        required: true
      packages:
        description: Packages whose version is the driver version.
        type: list
        elements: str
        required: true
      also:
        description: Packages with other versions.
        type: list
        elements: str
        default: []
      persistence:
        description: Packages of the persistence daemon.
        type: list
        elements: str
        default: []
      from:
        description: The first branch with these package names.
        type: int
        default: 0
      to:
        description: The last branch with these package names.
        type: int
        default: 100000
      kernels:
        description: A regular expression that must match the release of the running kernel. Empty matches all kernels.
        type: str
        default: ""
  source:
    description: The package source to set up. By default, the existing package sources of the node are used.
    type: dict
    suboptions:
      uris:
        description:
          - URLs of the source. If empty, the mirror that the node uses for the same suite.
          - A user name and password in a URL, C(https://USER:PASSWORD@HOST/PATH), is written to a file that only root can read. All URLs need the
            same user name and password.
        type: list
        elements: str
        default: []
      suites:
        description: Suites, which only apt uses. V(/) is for a source without suites.
        type: list
        elements: str
        default: [/]
      components:
        description: Components of the suites.
        type: list
        elements: str
        default: []
      key:
        description: The public key that signs the source, in ASCII armor. If empty, the keys that apt trusts for the same source. dnf and zypper
          reject a source without a key.
        type: str
        default: ""
      fingerprints:
        description:
          - The pinned fingerprints of O(source.key), which is one block in ASCII armor with nothing around it. A key file with any other primary key
            is rejected.
          - The installed key file contains only the pinned keys. A subkey is installed only if its fingerprint is listed too.
        type: list
        elements: str
        default: []
      packages_signed:
        description:
          - Whether O(source.key) signs each package in addition to the index, which is always signed. If V(true), dnf and zypper verify both signatures.
        type: bool
        default: true
  files:
    description: Package files on the node to install, with the names that they have in a package source.
    type: list
    elements: path
    default: []
  checksums:
    description: SHA-256 digests of O(files), by file name. Files without a digest are not verified.
    type: dict
    default: {}
  headers:
    description:
      - Packages with the kernel headers. C({kernel}) in a name is the kernel release, and C({flavour}) is the last part of it.
      - After an equals sign, a name can contain the beginning of the package version. C({kernel_release}) in it is the kernel release without the
        architecture or the flavour.
    type: list
    elements: str
    default: []
  hold:
    description: Whether to hold the driver packages at their version, with apt's holds and a pin, dnf's plugin C(versionlock), or zypper's locks.
    type: bool
    default: true
  parameters:
    description: Parameters of the kernel modules C(nvidia), C(nvidia_drm), C(nvidia_modeset), and C(nvidia_uvm), by module and by name.
    type: dict
    default: {}
  keep_nouveau:
    description: Whether nouveau and nova can drive GPUs. If V(false), the module prevents them from loading.
    type: bool
    default: false
  signing_key:
    description:
      - The private key on the node with which dkms signs kernel modules. It is for nodes with Secure Boot.
      - If the key is added after the kernel modules were built, the module builds and signs them again.
    type: path
    default: ""
  signing_certificate:
    description: The DER certificate of this key on the node. It must be enrolled in the firmware.
    type: path
    default: ""
  persistence:
    description:
      - Whether the persistence daemon is installed and running. If its unit starts it with C(--no-persistence-mode), a drop-in file removes this argument.
      - V(false) stops and disables a running daemon. If the daemon remains installed, O(state=absent) restores its previous state.
    type: bool
    default: true
  load:
    description:
      - Whether the driver is for the running kernel. If V(true), the kernel modules for this kernel must exist, and the module loads them.
      - V(false) is for machine images.
    type: bool
    default: true
  in_use:
    description:
      - What the module does if a process uses GPUs or a kernel module cannot be unloaded. V(refuse) fails and lists the processes. V(restart)
        installs the new driver next to the loaded driver. The next reboot loads the new driver.
      - If claims are prepared, the module fails with both values.
    type: str
    choices: [refuse, restart]
    default: refuse
  remove_unmanaged:
    description: Whether O(state=absent) also removes a driver that this module did not install, and whether O(state=present) ignores a driver from a
      C(.run) file.
    type: bool
    default: false
  keep:
    description: Whether the node keeps the packages for a rollback.
    type: bool
    default: true
  services:
    description: Units that use GPUs. Running units are stopped while the driver is replaced, and started in reverse order afterwards.
    type: list
    elements: str
    default:
      - dra-accelerators-driver.service
      - nvidia-dcgm.service
      - nvsm.service
      - nvidia-imex.service
      - nvidia-fabricmanager.service
      - nvidia-persistenced.service
  state_path:
    description: The node driver's store of prepared claims. If empty, the module checks no claims.
    type: str
    default: /var/lib/kubelet/plugins/gpu.nvidia.com/state.db
  claims_timeout:
    description:
      - The number of seconds to wait until the node driver has unprepared all claims. If claims remain, the module fails. Set it for a node that was drained.
    type: int
    default: 0
  timeout:
    description: Timeout in seconds for one call of the package manager, including the build of kernel modules.
    type: int
    default: 3600
"""

EXAMPLES = r"""
- name: Install the newest driver of a branch from a source that is configured on the node
  dra.accelerators.nvidia_driver:
    version: "580"
    catalog: &catalog
      - modules: open
        build: dkms
        components: compute
        packages: [nvidia-driver-cuda, nvidia-kernel-open-dkms]
        persistence: [nvidia-persistenced]

- name: Roll back to the previous driver
  dra.accelerators.nvidia_driver:
    state: previous
    catalog: *catalog
"""

RETURN = r"""
steps:
  description: The completed steps as text. In check mode, the planned steps.
  returned: success
  type: list
  elements: str
  sample: ["install the driver 580.95.05 with open kernel modules: nvidia-driver-cuda, nvidia-kernel-open-dkms, and 31 packages for it"]
changes:
  description: The package manager's changes, one entry for each package. In check mode, the planned changes.
  returned: success
  type: list
  elements: str
  sample: [install nvidia-kernel-open-dkms 580.95.05-1]
missing_requirements:
  description: In check mode, the messages for missing requirements, by C(headers), C(secure-boot) and C(hold). A run without check mode fails in this case.
  returned: success
  type: dict
  sample: {}
blocked_by:
  description: The users of the node's GPUs. A run without check mode fails if claims are listed, or if processes are listed and O(in_use) is not V(restart).
  returned: success
  type: dict
  contains:
    claims:
      description: Prepared claims.
      returned: success
      type: list
      elements: str
      sample: [team-a/training]
    processes:
      description: Processes with an open device node of a GPU, and their pods. The node driver is not listed, whether it runs as a service or in a pod.
      returned: success
      type: list
      elements: str
      sample: ["4711 (python3, pod team-a/training-0)"]
    pods:
      description: The pods of these claims and processes, if the node knows them.
      returned: success
      type: list
      elements: str
      sample: [team-a/training-0]
unloads:
  description: Whether loaded kernel modules were unloaded, or would be in check mode. No program can use a GPU during this time.
  returned: success
  type: bool
  sample: true
before:
  description: The state before the run.
  returned: success
  type: dict
  contains: &there
    version:
      description: The version of the installed driver. Empty if no driver is installed.
      returned: success
      type: str
      sample: 580.95.05
    kernel_modules:
      description: The type of its kernel modules. Empty if it is unknown.
      returned: success
      type: str
      sample: open
    loaded:
      description: The version of the loaded driver. Empty if no driver is loaded.
      returned: success
      type: str
      sample: 580.95.05
after:
  description: The state after the run. In check mode, the expected state.
  returned: success
  type: dict
  contains: *there
previous_available:
  description: Whether O(state=previous) can restore the previous driver.
  returned: success
  type: bool
  sample: true
reboot_required:
  description: Whether a reboot is required because of this run or a previous run. In check mode, whether it would be required.
  returned: success
  type: bool
  sample: false
error_code:
  description: A stable code for the type of the error.
  returned: failure
  type: str
  sample: not-loaded
"""

from collections.abc import Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._host.driver_installation import wait_for_claims
from ansible_collections.dra.accelerators.plugins.module_utils._host.single_run import run_alone
from ansible_collections.dra.accelerators.plugins.module_utils._host.stopped_services import (
    describe_start,
    interrupted_services,
    resumed_services,
)
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.driver_catalog import (
    GROUP,
    DriverError,
    Wanted,
    kinds,
    versions_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.driver_installer import Installer
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.driver_planner import (
    Decision,
    Options,
    Planner,
    branches_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.driver_record import Record
from ansible_collections.dra.accelerators.plugins.module_utils._packages.argspec import (
    hide_passwords,
    read_source,
    source_spec,
    verified_files,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import (
    PackageTool,
    Places,
    upstream,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.manager_detection import tool_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

HINT = "Drain the node, and run this again. With nvidia_driver_drain=true, the role nvidia_driver drains it."
SERVICES = [
    "dra-accelerators-driver.service",
    "nvidia-dcgm.service",
    "nvsm.service",
    "nvidia-imex.service",
    "nvidia-fabricmanager.service",
    "nvidia-persistenced.service",
]


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    names: dict[str, Any] = {"type": "list", "elements": "str"}
    kind: dict[str, Any] = {"type": "str", "choices": ["open", "proprietary"], "required": True}
    build: dict[str, Any] = {"type": "str", "choices": ["dkms", "precompiled"]}
    components: dict[str, Any] = {"type": "str", "choices": ["compute", "full"]}
    entry = {
        "modules": kind,
        "build": {**build, "required": True},
        "components": {**components, "required": True},
        "packages": {**names, "required": True},
        "also": {**names, "default": []},
        "persistence": {**names, "default": []},
        "from": {"type": "int", "default": 0},
        "to": {"type": "int", "default": 100000},
        "kernels": {"type": "str", "default": ""},
    }
    return {
        "state": {"type": "str", "choices": ["present", "previous", "absent"], "default": "present"},
        "version": {"type": "str", "default": ""},
        "latest": {"type": "bool", "default": False},
        "kernel_modules": {"type": "str", "choices": ["auto", "open", "proprietary"], "default": "auto"},
        "build": {**build, "default": "dkms"},
        "components": {**components, "default": "compute"},
        "catalog": {"type": "list", "elements": "dict", "required": True, "options": entry},
        "source": {"type": "dict", "options": source_spec()},
        "files": {"type": "list", "elements": "path", "default": []},
        "checksums": {"type": "dict", "default": {}},
        "headers": {**names, "default": []},
        "hold": {"type": "bool", "default": True},
        "parameters": {"type": "dict", "default": {}},
        "keep_nouveau": {"type": "bool", "default": False},
        "signing_key": {"type": "path", "default": "", "no_log": False},
        "signing_certificate": {"type": "path", "default": ""},
        "persistence": {"type": "bool", "default": True},
        "load": {"type": "bool", "default": True},
        "in_use": {"type": "str", "choices": ["refuse", "restart"], "default": "refuse"},
        "remove_unmanaged": {"type": "bool", "default": False},
        "keep": {"type": "bool", "default": True},
        "services": {"type": "list", "elements": "str", "default": SERVICES},
        "state_path": {"type": "str", "default": "/var/lib/kubelet/plugins/gpu.nvidia.com/state.db"},
        "claims_timeout": {"type": "int", "default": 0},
        "timeout": {"type": "int", "default": 3600},
    }


def options_of(params: dict[str, Any], places: Places) -> Options:
    """Return the options of the planner. Raises KeyProblem for a key with another fingerprint."""
    source, key = read_source(params["source"], places)
    wanted = Wanted(
        version=params["version"],
        latest=params["latest"],
        modules=params["kernel_modules"],
        build=params["build"],
        components=params["components"],
        persistence=params["persistence"],
    )
    return Options(
        wanted=wanted,
        catalog=params["catalog"],
        source=source,
        key=key,
        files=params["files"],
        headers=params["headers"],
        hold=params["hold"],
        parameters=params["parameters"],
        keep_rivals=params["keep_nouveau"],
        signing_key=params["signing_key"],
        signing_certificate=params["signing_certificate"],
        load=params["load"],
        remove_unmanaged=params["remove_unmanaged"],
    )


def check_decision(decision: Decision, params: dict[str, Any]) -> None:
    """Reject changes that would fail, before the first one. Raises AcceleratorError."""
    if decision.lacking:
        raise DriverError(" ".join(decision.lacking.values()), hint="Nothing was changed.", code=min(decision.lacking))
    if decision.disturbs:
        decision.blocked_by.refuse_claims("GPUs", hint=HINT)
        if params["in_use"] == "refuse":
            decision.blocked_by.refuse_processes("GPUs")


def driver_state(planner: Planner) -> dict[str, str]:
    """Return the installed and the loaded driver."""
    installer, installed = planner.installer, planner.packages.installed
    versions = {upstream(installed[name]): kind for name, kind in installer.kinds.items() if name in installed}
    version = max(versions, default="")
    return {"version": version, "kernel_modules": versions.get(version, ""), "loaded": planner.machine.version}


def kinds_by_package(installer: Installer, options: Options) -> dict[str, str]:
    """Return the kind of kernel modules by package, for the installed, the recorded, and the requested drivers."""
    installed, record = installer.apt.packages().installed, installer.record()
    before = [kept.version for kept in (record.now, record.former) if kept is not None and kept.version]
    branches = {*branches_of(installed, options.wanted), *(each.partition(".")[0] for each in before)}
    versions = dict.fromkeys((*versions_of(installed, options.wanted), *before))
    return kinds(options.catalog, installer.machine().kernel, sorted(branches), [*versions])


def work(module: AnsibleModule, system: System | None = None, apt: PackageTool | None = None) -> dict[str, Any]:
    """Install or remove the driver, and return the module's result. Raises AcceleratorError."""
    hide_passwords(module)
    system = system or System()
    apt = apt or tool_of(system, timeout=float(module.params["timeout"]))
    given = module.params if module.params["state"] == "present" else {**module.params, "files": []}
    with verified_files(system, given, is_check=module.check_mode) as params:
        if module.check_mode:
            return apply_state(params, system, apt, check=True, stopped=interrupted_services(system, "nvidia"))
        with resumed_services(system, "nvidia") as stopped:
            return apply_state(params, system, apt, check=False, stopped=stopped)


def apply_state(
    params: dict[str, Any], system: System, apt: PackageTool, *, check: bool, stopped: Sequence[str]
) -> dict[str, Any]:
    """Install or remove the driver with verified package files, and return the module's result. Raises AcceleratorError.

    ``stopped`` are the services that an interrupted run stopped; the caller starts them.
    """
    options = options_of(params, apt.places(GROUP))
    installer = Installer(
        system,
        apt,
        services=params["services"],
        state_path=params["state_path"],
        keep=params["keep"],
        restart_allowed=params["in_use"] == "restart",
        kinds={},
    )
    installer.kinds = kinds_by_package(installer, options)
    if not check:
        installer.mend()
        wait_for_claims(params["state_path"], params["claims_timeout"])
    planner = Planner(installer, options)
    before = driver_state(planner)
    decision = {"present": planner.present, "previous": planner.previous, "absent": planner.absent}[params["state"]]()
    record = planner.record
    if not check and decision.steps:
        check_decision(decision, params)
        if decision.work is not None:
            record = installer.carry_out(decision.work, record)
        else:
            record = installer.remove(decision.purge, decision.files, record)
    reboot_pending = installer.waits_for_restart(record)
    if not check and params["state"] == "absent" and not reboot_pending:
        # Also without a record: an interrupted run can have left the directory.
        record = Record()
        installer.write(record)
    if check and decision.disturbs:
        reboot_pending = reboot_pending or bool(decision.blocked_by.processes)
    after = predicted_state(before, decision) if check else driver_state(Planner(installer, options))
    change_texts = [change.describe() for change in decision.changes]
    return {
        "changed": bool(decision.steps or stopped),
        "steps": [*decision.steps, *map(describe_start, stopped)],
        "changes": change_texts,
        "missing_requirements": dict(decision.lacking),
        "blocked_by": {
            "claims": list(decision.blocked_by.claims),
            "processes": [str(process) for process in decision.blocked_by.processes],
            "pods": list(decision.blocked_by.pod_names()),
        },
        "unloads": decision.unloads,
        "before": before,
        "after": after,
        "previous_available": record.former is not None and record.former.complete,
        "reboot_required": reboot_pending,
        "diff": differences(before, after, decision),
    }


def predicted_state(before: dict[str, str], decision: Decision) -> dict[str, str]:
    """Return the installed and the loaded driver after the changes."""
    if decision.work is None:
        return before if not decision.purge else {"version": "", "kernel_modules": "", "loaded": ""}
    target = decision.work.target
    loaded = target.version if decision.work.load and not decision.blocked_by.processes else before["loaded"]
    return {"version": target.version, "kernel_modules": target.modules or before["kernel_modules"], "loaded": loaded}


def differences(before: dict[str, str], after: dict[str, str], decision: Decision) -> list[dict[str, str]]:
    """Return Ansible's diff of the driver, the packages, and the files."""

    def lines(facts: dict[str, str]) -> str:
        return "".join(f"{key}: {value}\n" for key, value in facts.items())

    packages = "".join(f"{change.name} {change.before}\n" for change in decision.changes if change.before)
    new = "".join(f"{change.name} {change.after}\n" for change in decision.changes if change.after)
    return [
        {"before_header": "driver", "after_header": "driver", "before": lines(before), "after": lines(after)},
        *(
            [{"before_header": "packages", "after_header": "packages", "before": packages, "after": new}]
            if decision.changes
            else []
        ),
        *(change.to_diff() for change in decision.files),
    ]


def main() -> None:
    """Entry point."""
    run_alone(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work, System())


if __name__ == "__main__":
    main()
