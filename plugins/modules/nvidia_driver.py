#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver
version_added: 0.1.0
short_description: Install, replace, take back or remove NVIDIA's driver by apt, dnf or zypper
description:
  - Installs the driver's packages at one exact version, from the package source that it is told, and has the kernel load the new modules
    without a restart where nothing has a GPU.
  - Which kernel modules, open or proprietary, follows from the GPUs on the PCI bus. What cannot work for them is refused.
  - What the package manager would do is asked before anything is done. Check mode asks a source that is not on the node yet as well, and leaves nothing behind.
  - A driver that cannot be built or loaded is taken back, and the one of before is there again. Packages are kept for that.
  - Starts no machine again, and says whether that is needed.
notes:
  - Needs root on the node, and apt, dnf 4 or zypper with their programs, whichever the distribution has.
  - An installation that was cut short is gone on with by the next run.
  - The role P(dra.accelerators.nvidia_driver#role) has the catalogs of the distributions, and the vendor's repository with its keys.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - Claims and processes in the way, and headers or keys that are missing, are returned and no failure. A real run refuses then.
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
      - V(present) has the driver be what the other options say.
      - V(previous) goes back to the driver that was there before the last change. Once more goes forward again.
      - V(absent) removes it, and what came along with it. Only what this module has installed, unless O(foreign) is true.
    type: str
    choices: [present, previous, absent]
    default: present
  version:
    description:
      - A branch such as V(580), a version such as V(580.95.05), or a package's whole version.
      - Empty keeps what is there, and takes the newest that the source has where there is none.
    type: str
    default: ""
  latest:
    description: Whether a newer version of what O(version) says replaces one that is there.
    type: bool
    default: false
  kernel_modules:
    description: Which kernel modules. V(auto) takes the right ones for the GPUs and the branch, and leaves those that are there where they fit.
    type: str
    choices: [auto, open, proprietary]
    default: auto
  build:
    description: Whether the kernel modules are built on the node (V(dkms)), or come ready for the distribution's kernels.
    type: str
    choices: [dkms, precompiled]
    default: dkms
  components:
    description: Whether the driver's libraries for computing are installed, or all, with graphics.
    type: str
    choices: [compute, full]
    default: compute
  catalog:
    description:
      - The ways to have a driver from this source, the first that fits counts. C({branch}), C({kernel}) and C({flavour}) in names are filled in, and
        C({kernel_version}), which is the kernel's release without the distribution's mark and the machine (C(5.14.0-570.23.1)).
      - C({version}) in the names of O(catalog[].packages) is the driver's. Such packages are found for an exact O(version) alone.
    type: list
    elements: dict
    required: true
    suboptions:
      modules:
        description: Which kernel modules the packages bring.
        type: str
        choices: [open, proprietary]
        required: true
      build:
        description: How they come.
        type: str
        choices: [dkms, precompiled]
        required: true
      components:
        description: What comes besides.
        type: str
        choices: [compute, full]
        required: true
      packages:
        description: Packages that have the driver's version.
        type: list
        elements: str
        required: true
      also:
        description: Packages with versions of their own.
        type: list
        elements: str
        default: []
      persistence:
        description: Packages of the persistence daemon.
        type: list
        elements: str
        default: []
      from:
        description: The first branch whose packages are called so.
        type: int
        default: 0
      to:
        description: The last one.
        type: int
        default: 100000
      kernels:
        description: A regular expression that the release of the running kernel has to match. Empty is for all.
        type: str
        default: ""
  source:
    description: The package source to set up. By default, the existing package sources of the node are used.
    type: dict
    suboptions:
      uris:
        description:
          - Addresses. None takes the mirror that the node has for the same suite.
          - A user name and password in an address, C(https://USER:PASSWORD@HOST/PATH), is written to a file that only root can read. All addresses
            need the same ones.
        type: list
        elements: str
        default: []
      suites:
        description: Suites, which apt alone has; V(/) for a source without any.
        type: list
        elements: str
        default: [/]
      components:
        description: Components.
        type: list
        elements: str
        default: []
      key:
        description: The key that signs it, in ASCII armour. Empty takes the keys that apt trusts for the same source; dnf and
          zypper refuse a source without one.
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
          - Whether each package has a signature by O(source.key) of its own, besides the index, which has one in any case. dnf and zypper ask for
            both then.
        type: bool
        default: true
  files:
    description: Packages on the node that are installed, under the names that they have in a package source.
    type: list
    elements: path
    default: []
  checksums:
    description: SHA-256 digests of O(files), by the names of the files. Those without one are not compared.
    type: dict
    default: {}
  headers:
    description:
      - Packages with the headers of the kernel, where C({kernel}) is its release, and C({flavour}) the last word of that. A version behind an equals
        sign is the one that the package's own begins with; C({kernel_release}) is the kernel's release without the machine's kind or the flavour.
    type: list
    elements: str
    default: []
  hold:
    description: Whether the driver's packages are held at their version, by apt's marks and a pin, dnf's plugin C(versionlock), or zypper's locks.
    type: bool
    default: true
  parameters:
    description: Parameters of kernel modules, by the module C(nvidia), C(nvidia_drm), C(nvidia_modeset) or C(nvidia_uvm), and by their names.
    type: dict
    default: {}
  keep_nouveau:
    description: Whether nouveau and nova may drive GPUs. Else they are kept from being loaded.
    type: bool
    default: false
  signing_key:
    description:
      - The private key with which dkms signs modules, on the node. For machines with Secure Boot.
      - Where it is named after the modules were built, they are built and signed again.
    type: path
    default: ""
  signing_certificate:
    description: Its certificate, as DER, on the node. The firmware has to know it.
    type: path
    default: ""
  persistence:
    description:
      - Whether the persistence daemon is installed, and runs. A unit that starts it with C(--no-persistence-mode) gets a drop-in without that.
      - With V(false) one that runs is stopped and not started any more; O(state=absent) has it be as it was, where it stays.
    type: bool
    default: true
  load:
    description:
      - Whether the kernel that runs is the one that the driver is for. Its modules have to be there then, and are loaded.
      - V(false) is for images of machines.
    type: bool
    default: true
  in_use:
    description:
      - What is done where a process has GPUs, or a module cannot be unloaded. V(refuse) names them. V(restart) installs beside the driver that is
        loaded, and leaves the new one to the next start of the machine.
      - Prepared claims are refused in any case.
    type: str
    choices: [refuse, restart]
    default: refuse
  foreign:
    description: Whether O(state=absent) also removes what somebody else has installed, and O(state=present) passes over a driver of a C(.run) file.
    type: bool
    default: false
  keep:
    description: Whether packages are kept on the node, for the way back.
    type: bool
    default: true
  services:
    description: Units that use GPUs and are stopped while the driver is exchanged, where they are running. They are started in the other order.
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
    description: Where the node driver keeps its prepared claims. Empty looks at none.
    type: str
    default: /var/lib/kubelet/plugins/gpu.nvidia.com/state.db
  claims_timeout:
    description:
      - For how many seconds it is waited, before claims are refused, until the node driver has unprepared them. For a node that was drained.
    type: int
    default: 0
  timeout:
    description: How many seconds one call of the package manager may take, the build of kernel modules with it.
    type: int
    default: 3600
"""

EXAMPLES = r"""
- name: Install the newest driver of a branch from a source that the node knows
  dra.accelerators.nvidia_driver:
    version: "580"
    catalog: &catalog
      - modules: open
        build: dkms
        components: compute
        packages: [nvidia-driver-cuda, nvidia-kernel-open-dkms]
        persistence: [nvidia-persistenced]

- name: Go back to the driver of before
  dra.accelerators.nvidia_driver:
    state: previous
    catalog: *catalog
"""

RETURN = r"""
steps:
  description: What was done, or would be in check mode, in words.
  returned: success
  type: list
  elements: str
  sample: ["install the driver 580.95.05 with open kernel modules: nvidia-driver-cuda, nvidia-kernel-open-dkms, and 31 packages for it"]
changes:
  description: What the package manager did, or would do, package by package.
  returned: success
  type: list
  elements: str
  sample: [install nvidia-kernel-open-dkms 580.95.05-1]
lacking:
  description: In check mode, what stands against it by C(headers), C(secure-boot) and C(hold), with a sentence for each. A real run refuses then.
  returned: success
  type: dict
  sample: {}
in_the_way:
  description: Who has GPUs of the node. A real run refuses claims, and processes unless O(in_use=restart).
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
      description: Processes that have a GPU's node open, with their pods. The node driver's own do not count, as a service and as a pod.
      returned: success
      type: list
      elements: str
      sample: ["4711 (python3, pod team-a/training-0)"]
    pods:
      description: The pods of these claims and processes, as far as the node knows them.
      returned: success
      type: list
      elements: str
      sample: [team-a/training-0]
unloads:
  description: Whether kernel modules that are loaded were unloaded, or would be. Meanwhile nobody has a GPU.
  returned: success
  type: bool
  sample: true
before:
  description: What was there before.
  returned: success
  type: dict
  contains: &there
    version:
      description: The driver's version; empty for none.
      returned: success
      type: str
      sample: 580.95.05
    kernel_modules:
      description: Which kernel modules it has; empty where that is not known.
      returned: success
      type: str
      sample: open
    loaded:
      description: The version that the kernel has loaded; empty for none.
      returned: success
      type: str
      sample: 580.95.05
after:
  description: What is there afterwards, or would be in check mode.
  returned: success
  type: dict
  contains: *there
way_back:
  description: Whether O(state=previous) can go back.
  returned: success
  type: bool
  sample: true
reboot_required:
  description: Whether the machine has to be started again, because of this run or of one before it. In check mode, whether it would be.
  returned: success
  type: bool
  sample: false
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: not-loaded
"""

from collections.abc import Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._driver_install import wait_for_claims
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_driver import (
    GROUP,
    DriverError,
    Wanted,
    kinds,
    versions_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_installer import Installer
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_plan import (
    Decision,
    Options,
    Planner,
    branches_of,
    kernel_release,
)
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_record import Record
from ansible_collections.dra.accelerators.plugins.module_utils._package_options import (
    hide_passwords,
    read_source,
    source_spec,
    verified_files,
)
from ansible_collections.dra.accelerators.plugins.module_utils._package_port import PackageTool, Places, upstream
from ansible_collections.dra.accelerators.plugins.module_utils._package_tools import tool_of
from ansible_collections.dra.accelerators.plugins.module_utils._stopped_services import (
    describe_start,
    interrupted_services,
    resumed_services,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

HINT = "Drain the node and run this again; the role nvidia_driver does it with nvidia_driver_drain."
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
        "foreign": {"type": "bool", "default": False},
        "keep": {"type": "bool", "default": True},
        "services": {"type": "list", "elements": "str", "default": SERVICES},
        "state_path": {"type": "str", "default": "/var/lib/kubelet/plugins/gpu.nvidia.com/state.db"},
        "claims_timeout": {"type": "int", "default": 0},
        "timeout": {"type": "int", "default": 3600},
    }


def options_of(params: dict[str, Any], places: Places) -> Options:
    """Read what is asked for. Raises KeyProblem for a key with another fingerprint."""
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
        foreign=params["foreign"],
    )


def refuse(decision: Decision, params: dict[str, Any]) -> None:
    """Refuse what cannot go well, before anything is done. Raises AcceleratorError."""
    if decision.lacking:
        raise DriverError(" ".join(decision.lacking.values()), hint="Nothing was changed.", code=min(decision.lacking))
    if decision.disturbs:
        decision.in_the_way.refuse_claims("GPUs", hint=HINT)
        if params["in_use"] == "refuse":
            decision.in_the_way.refuse_processes("GPUs")


def seen(planner: Planner) -> dict[str, str]:
    """Return what is there."""
    installer, installed = planner.installer, planner.packages.installed
    versions = {upstream(installed[name]): kind for name, kind in installer.kinds.items() if name in installed}
    version = max(versions, default="")
    return {"version": version, "kernel_modules": versions.get(version, ""), "loaded": planner.machine.version}


def kinds_here(installer: Installer, options: Options) -> dict[str, str]:
    """Return by packages which kernel modules they have: of drivers that are there, that were there before, and of the one that is wanted."""
    installed, record = installer.apt.packages().installed, installer.record()
    before = [kept.version for kept in (record.now, record.former) if kept is not None and kept.version]
    branches = {*branches_of(installed, options.wanted), *(each.partition(".")[0] for each in before)}
    versions = dict.fromkeys((*versions_of(installed, options.wanted), *before))
    return kinds(options.catalog, kernel_release(), sorted(branches), [*versions])


def work(module: AnsibleModule, system: System | None = None, apt: PackageTool | None = None) -> dict[str, Any]:
    """Bring the driver to the wanted state; returns the module's result. Raises AcceleratorError."""
    hide_passwords(module)
    system = system or System()
    apt = apt or tool_of(system, timeout=float(module.params["timeout"]))
    given = module.params if module.params["state"] == "present" else {**module.params, "files": []}
    with verified_files(system, given, is_check=module.check_mode) as params:
        if module.check_mode:
            return work_with(params, system, apt, check=True, stopped=interrupted_services(system, "nvidia"))
        with resumed_services(system, "nvidia") as stopped:
            return work_with(params, system, apt, check=False, stopped=stopped)


def work_with(
    params: dict[str, Any], system: System, apt: PackageTool, *, check: bool, stopped: Sequence[str]
) -> dict[str, Any]:
    """Install or remove the driver with verified package files, and return the module's result.

    ``stopped`` are the services that an interrupted run stopped; the caller starts them. Raises AcceleratorError.
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
    installer.kinds = kinds_here(installer, options)
    if not check:
        installer.mend()
        wait_for_claims(params["state_path"], params["claims_timeout"])
    planner = Planner(installer, options)
    before = seen(planner)
    decision = {"present": planner.present, "previous": planner.previous, "absent": planner.absent}[params["state"]]()
    record = planner.record
    if not check and decision.steps:
        refuse(decision, params)
        if decision.work is not None:
            record = installer.carry_out(decision.work, record)
        else:
            record = installer.remove(decision.purge, decision.files, record)
    waits = installer.waits_for_restart(record)
    if not check and params["state"] == "absent" and not waits:
        # Also without a record: a killed run can have left the directory.
        record = Record()
        installer.write(record)
    if check and decision.disturbs:
        waits = waits or bool(decision.in_the_way.processes)
    after = foretold(before, decision) if check else seen(Planner(installer, options))
    shown = [change.describe() for change in decision.changes]
    return {
        "changed": bool(decision.steps or stopped),
        "steps": [*decision.steps, *map(describe_start, stopped)],
        "changes": shown,
        "lacking": dict(decision.lacking),
        "in_the_way": {
            "claims": list(decision.in_the_way.claims),
            "processes": [str(process) for process in decision.in_the_way.processes],
            "pods": list(decision.in_the_way.pod_names()),
        },
        "unloads": decision.unloads,
        "before": before,
        "after": after,
        "way_back": record.former is not None and record.former.complete,
        "reboot_required": waits,
        "diff": differences(before, after, decision),
    }


def foretold(before: dict[str, str], decision: Decision) -> dict[str, str]:
    """Return what would be there afterwards."""
    if decision.work is None:
        return before if not decision.purge else {"version": "", "kernel_modules": "", "loaded": ""}
    target = decision.work.target
    loaded = target.version if decision.work.load and not decision.in_the_way.processes else before["loaded"]
    return {"version": target.version, "kernel_modules": target.modules or before["kernel_modules"], "loaded": loaded}


def differences(before: dict[str, str], after: dict[str, str], decision: Decision) -> list[dict[str, str]]:
    """Return what Ansible shows of a change."""

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
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
