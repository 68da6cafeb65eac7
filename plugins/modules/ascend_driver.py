#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: ascend_driver
version_added: 0.1.0
short_description: Install, replace or remove the driver and the firmware of Ascend NPUs
description:
  - Runs the vendor's packages (C(.run) files) in the order that they want. A first installation takes the driver before the firmware; what
    is there already is replaced, and removed, the other way round.
  - What is installed is read from the files that the installation leaves, C(/etc/ascend_install.info) and C(version.info), before and
    afterwards. A package counts as installed only when these say so.
  - Refuses what cannot go well before anything is run. Such are a package for other chips or another machine, a digest that differs, headers of
    the kernel or a user that are missing, and claims or processes that have NPUs.
  - Starts no machine again, and says whether that is needed.
notes:
  - Needs root on the node.
  - An installation that was cut short is gone on with by the next run.
  - Packages that were installed are kept on the node, so that O(state=previous) can go back to them.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - Packages that are not on the node yet are judged by their names alone. A user or headers that are missing are named in
        RV(lacking), because they may be about to come.
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
      - V(present) installs the versions of O(driver) and O(firmware), also older ones in place of newer ones.
      - V(previous) goes back to the packages that were there before the last ones. Once more goes forward again. With O(driver_version) and
        O(firmware_version) it goes back to these, of those that are kept, also when a package has failed half way.
      - V(absent) removes both, by what they have left for that. Only those that this module has installed, unless O(foreign) is true.
    type: str
    choices: [present, previous, absent]
    default: present
  driver:
    description: The driver's package on the node, under the name that it has at the vendor's.
    type: path
  firmware:
    description: The firmware's package on the node, under the name that it has at the vendor's.
    type: path
  driver_checksum:
    description: SHA-256 digest of the driver's package, as 64 hexadecimal digits. Empty looks at none.
    type: str
    default: ""
  firmware_checksum:
    description: The same for the firmware's package.
    type: str
    default: ""
  driver_version:
    description: The driver's version as C(version.info) is to have it, where that is another one than in the package's name.
    type: str
    default: ""
  firmware_version:
    description: The same for the firmware.
    type: str
    default: ""
  accept_eula:
    description: Whether the vendor's licence was read and accepted. Nothing is installed without it.
    type: bool
    default: false
  type:
    description: Which parts of the driver are installed first; later packages keep to that.
    type: str
    choices: [full, run, devel, docker]
    default: full
  folder:
    description: Folder in which the driver is installed first.
    type: path
    default: /usr/local/Ascend
  user:
    description: The user whose the driver is. It has to be there.
    type: str
    default: HwHiAiUser
  group:
    description: That user's group.
    type: str
    default: HwHiAiUser
  for_all:
    description: Whether all users may use the driver.
    type: bool
    default: false
  build:
    description:
      - Whether a kernel module is built where none of the package's own fits the kernel. That needs the headers of the kernel, a compiler and
        C(dkms).
    type: bool
    default: true
  foreign:
    description: Whether O(state=absent) also removes what somebody else has installed.
    type: bool
    default: false
  keep:
    description: Whether packages are kept on the node, for O(state=previous).
    type: bool
    default: true
  services:
    description: Units that use NPUs and are stopped while packages are run, where they are running.
    type: list
    elements: str
    default: [dra-accelerators-driver.service]
  state_path:
    description: Where the node driver keeps its prepared claims. While there are any, nothing is run. Empty looks at none.
    type: str
    default: /var/lib/kubelet/plugins/npu.huawei.com/state.db
  claims_timeout:
    description:
      - How many seconds it is waited until the node driver has no claims, by its own store, before claims and processes are refused.
      - Above 0, check mode returns who is in the way in RV(in_the_way) in place of refusing, since they may go until then.
    type: int
    default: 0
  timeout:
    description: How many seconds one package may take.
    type: int
    default: 1800
"""

EXAMPLES = r"""
- name: Install driver and firmware of 310P chips
  dra.accelerators.ascend_driver:
    driver: /root/Ascend-hdk-310p-npu-driver_24.1.rc2_linux-x86-64.run
    firmware: /root/Ascend-hdk-310p-npu-firmware_7.5.0.1.129.run
    driver_checksum: "{{ driver_digest }}"
    firmware_checksum: "{{ firmware_digest }}"
    accept_eula: true
  register: driver

- name: Go back to what was there before
  dra.accelerators.ascend_driver:
    state: previous
    accept_eula: true

- name: Remove both
  dra.accelerators.ascend_driver:
    state: absent
"""

RETURN = r"""
steps:
  description: What was done, or would be in check mode, in order.
  returned: success
  type: list
  elements: str
  sample: ["install the firmware 7.5.0.1.129 in place of 7.3.0.1.231", "install the driver 24.1.rc2 in place of 24.1.rc1"]
packages:
  description: Which packages were run for that, or would be, V(driver) and V(firmware).
  returned: success
  type: list
  elements: str
  sample: [firmware, driver]
lacking:
  description: In check mode, what the driver's package needs and does not find, V(user), V(group) (which is not the user's)
    and V(headers). A real run refuses then.
  returned: success
  type: list
  elements: str
  sample: []
in_the_way:
  description: In check mode, who has NPUs of the node. A real run refuses then, once O(claims_timeout) is over.
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
      description: Processes that have an NPU's node open, with their pods. The node driver's own do not count.
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
before:
  description: What was installed before.
  returned: success
  type: dict
  contains: &installed
    driver:
      description: The driver's version; empty for none.
      returned: success
      type: str
      sample: 24.1.rc2
    firmware:
      description: The firmware's version; empty for none.
      returned: success
      type: str
      sample: 7.5.0.1.129
    complete:
      description: Whether the driver's installation calls itself complete.
      returned: success
      type: bool
      sample: true
    folder:
      description: Where it is installed.
      returned: success
      type: str
      sample: /usr/local/Ascend
    user:
      description: Whose it is.
      returned: success
      type: str
      sample: HwHiAiUser
    group:
      description: Which group's it is.
      returned: success
      type: str
      sample: HwHiAiUser
    type:
      description: Which parts of it are installed.
      returned: success
      type: str
      sample: full
after:
  description: What is installed afterwards, or would be in check mode.
  returned: success
  type: dict
  contains: *installed
reboot_required:
  description: Whether the machine has to be started again, because of this run or of one before it. In check mode, whether it would be.
  returned: success
  type: bool
  sample: true
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: checksum
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_installer import Installer, shown
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_packages import (
    DEFAULT_FOLDER,
    DRIVER,
    FIRMWARE,
    KINDS,
    OWNER,
    Choices,
    Installed,
    Package,
    PackageError,
    Record,
    Step,
    plan,
    plan_removal,
    read_package,
)
from ansible_collections.dra.accelerators.plugins.module_utils._driver_install import InTheWay, wait_for_claims
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._stopped_services import (
    describe_start,
    interrupted_services,
    resumed_services,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "state": {"type": "str", "choices": ["present", "previous", "absent"], "default": "present"},
        "driver": {"type": "path"},
        "firmware": {"type": "path"},
        "driver_checksum": {"type": "str", "default": ""},
        "firmware_checksum": {"type": "str", "default": ""},
        "driver_version": {"type": "str", "default": ""},
        "firmware_version": {"type": "str", "default": ""},
        "accept_eula": {"type": "bool", "default": False},
        "type": {"type": "str", "choices": ["full", "run", "devel", "docker"], "default": "full"},
        "folder": {"type": "path", "default": DEFAULT_FOLDER},
        "user": {"type": "str", "default": OWNER},
        "group": {"type": "str", "default": OWNER},
        "for_all": {"type": "bool", "default": False},
        "build": {"type": "bool", "default": True},
        "foreign": {"type": "bool", "default": False},
        "keep": {"type": "bool", "default": True},
        "services": {"type": "list", "elements": "str", "default": ["dra-accelerators-driver.service"]},
        "state_path": {"type": "str", "default": "/var/lib/kubelet/plugins/npu.huawei.com/state.db"},
        "claims_timeout": {"type": "int", "default": 0},
        "timeout": {"type": "int", "default": 1800},
    }


def wanted(params: dict[str, Any], record: Record) -> list[Package]:
    """Return the packages that are wanted. Raises PackageError."""
    if params["state"] == "previous":
        return record.way_back({kind: params[f"{kind}_version"] for kind in KINDS if params[f"{kind}_version"]})
    named = [kind for kind in KINDS if params[kind]]
    if not named:
        raise PackageError(
            "Neither a driver nor a firmware is named", hint="Set driver, firmware or both.", code="no-package"
        )
    return [read_package(kind, params[kind], params[f"{kind}_version"], params[f"{kind}_checksum"]) for kind in named]


def refuse_removal(steps: Sequence[Step], record: Record, params: dict[str, Any]) -> None:
    """Refuse to remove what somebody else has installed. Raises PackageError."""
    # What was begun is ours as well.
    others = [step for step in steps if step.kind not in (*record.packages, record.doing)]
    if others and not params["foreign"]:
        raise PackageError(
            f"Not installed by this collection: {', '.join(f'{step.kind} {step.before}'.strip() for step in others)}",
            hint="Set foreign to true to remove it all the same.",
            code="foreign",
        )


def refuse(
    installer: Installer, steps: Sequence[Step], choices: Choices, params: dict[str, Any], *, check: bool
) -> None:
    """Refuse steps that cannot go well, before the first is taken. Raises AcceleratorError."""
    packages = [step.package for step in steps if step.package is not None]
    if packages and not params["accept_eula"]:
        raise PackageError(
            f"The vendor's licence was not accepted, and {len(packages)} packages are to be run without asking",
            hint="Read it, and set accept_eula to true.",
            code="licence",
        )
    unfit = installer.unfit(steps)
    if unfit:
        raise PackageError(f"Not for this node: {' '.join(unfit)}", hint="Nothing was run.", code="not-for-this-node")
    lacking = installer.lacking(steps, choices)
    if lacking and not check:
        raise PackageError(
            f"The node is not ready: {' '.join(lacking.values())}", hint="Nothing was run.", code="not-ready"
        )
    for package in packages:
        if not check or installer.system.exists(package.path):
            installer.verify(package)
    refuse_users(installer, params, check=check)


def refuse_users(installer: Installer, params: dict[str, Any], *, check: bool) -> None:
    """Refuse who has NPUs, once the claims had their time to go. Raises InUse."""
    if check and params["claims_timeout"] > 0:
        return
    if not check:
        wait_for_claims(params["state_path"], params["claims_timeout"])
    installer.refuse_users()


def foretold(before: Installed, steps: Sequence[Step]) -> dict[str, Any]:
    """Return what would be installed after the steps."""
    versions = {step.kind: step.after for step in steps}
    driver = versions.get(DRIVER, before.driver)
    return replace(
        before,
        driver=driver,
        firmware=versions.get(FIRMWARE, before.firmware),
        complete=before.complete or DRIVER in versions,
    ).to_dict()


def work(module: AnsibleModule, system: System | None = None) -> dict[str, Any]:
    """Install or remove driver and firmware; returns the module's result. Raises AcceleratorError."""
    params = module.params
    installer = Installer(
        system or System(),
        timeout=float(params["timeout"]),
        services=params["services"],
        state_path=params["state_path"],
        keep=params["keep"],
    )
    with contextlib.closing(installer):
        if module.check_mode:
            return work_with(installer, module, interrupted_services(installer.system, "ascend"))
        with resumed_services(installer.system, "ascend") as stopped:
            return work_with(installer, module, stopped)


def work_with(installer: Installer, module: AnsibleModule, stopped: Sequence[str]) -> dict[str, Any]:
    """Install or remove driver and firmware from the installer's verified copies, and return the module's result.

    ``stopped`` are the services that an interrupted run stopped; the caller starts them.
    """
    params = module.params
    record, before = installer.record(), installer.installed()
    lacking: list[str] = []
    choices = Choices(
        params["type"], params["folder"], params["user"], params["group"], params["for_all"], params["build"]
    )
    finishing: list[str] = []
    if params["state"] == "absent":
        steps = plan_removal(before)
        if not steps and record.is_of_packages:
            finishing = ["finish an interrupted removal"]
        refuse_removal(steps, record, params)
        if steps:
            refuse_users(installer, params, check=module.check_mode)
    else:
        steps = plan(before, wanted(params, record), unfinished=record.doing)
        if steps:
            refuse(installer, steps, choices, params, check=module.check_mode)
            lacking = sorted(installer.lacking(steps, choices))
    way = installer.users() if steps and module.check_mode else InTheWay()
    waits = installer.waits_for_restart(record)
    after = foretold(before, steps)
    if not module.check_mode:
        if steps:
            record = installer.carry_out(steps, choices, record)
            after = installer.installed().to_dict()
        if params["state"] == "absent" and record.is_of_packages:
            record = installer.finish_removal(record)
        waits = installer.waits_for_restart(record)
        if params["state"] == "absent" and not waits:
            # Also without a record: a killed run can have left the directory.
            installer.write(Record())
    return {
        "changed": bool(steps or finishing or stopped),
        "steps": [*(step.describe() for step in steps), *finishing, *map(describe_start, stopped)],
        "packages": [step.kind for step in steps if step.package is not None],
        "lacking": lacking,
        "in_the_way": {
            "claims": way.described_claims(),
            "processes": [str(each) for each in way.processes],
            "pods": list(way.pod_names()),
        },
        "before": before.to_dict(),
        "after": after,
        "reboot_required": waits or (module.check_mode and bool(steps or finishing)),
        "diff": shown(before, after),
    }


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
