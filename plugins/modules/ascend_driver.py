#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: ascend_driver
version_added: 0.1.0
short_description: Install, replace, or remove the driver and the firmware of Ascend NPUs
description:
  - Runs the vendor's packages (C(.run) files) in the required order. A first installation installs the driver before the firmware. A
    replacement or a removal processes the firmware before the driver.
  - The module reads the installed versions from C(/etc/ascend_install.info) and C(version.info), which the packages write, before and
    after the change. It reports a package as installed only if these files contain its version.
  - Before it runs any package, the module checks the conditions of the change, and fails if one is not met. It rejects packages for other chips
    or another architecture, digests that differ, missing kernel headers, a missing user, and NPUs that claims or processes use.
  - The module does not reboot the node. RV(reboot_required) reports whether a reboot is necessary.
  - The module refuses, with every O(state), to change a driver or firmware that belongs to an installed deb or rpm package. If the package has
    the requested version, the module changes nothing.
notes:
  - The module needs root on the node.
  - The next run resumes an interrupted installation.
  - The module keeps the installed packages on the node, so that O(state=previous) can roll back to them.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
    details:
      - For packages that are not on the node yet, the module checks only their names. It reports a missing user, group, or missing headers in
        RV(missing_requirements) and does not fail, because an earlier task can create or install them.
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
      - V(present) installs the versions of O(driver) and O(firmware). It also replaces newer versions with older ones.
      - V(previous) rolls back to the packages that were installed before the current ones. A second run returns to the newer packages.
      - With O(driver_version) and O(firmware_version), V(previous) installs these versions from the kept packages, also after a package has failed.
      - V(absent) removes the driver and the firmware with the vendor's uninstall scripts. It removes only those that this module has
        installed, unless O(remove_unmanaged=true).
    type: str
    choices: [present, previous, absent]
    default: present
  driver:
    description: The path of the driver's package on the node. The file must have the vendor's original name.
    type: path
  firmware:
    description: The path of the firmware's package on the node. The file must have the vendor's original name.
    type: path
  driver_checksum:
    description: The SHA-256 digest of the driver's package, as 64 hexadecimal digits. If empty, the module does not check the digest.
    type: str
    default: ""
  firmware_checksum:
    description: The SHA-256 digest of the firmware's package, as 64 hexadecimal digits. If empty, the module does not check the digest.
    type: str
    default: ""
  driver_version:
    description: The driver's version in C(version.info), if it differs from the version in the package's name.
    type: str
    default: ""
  firmware_version:
    description: The firmware's version in C(version.info), if it differs from the version in the package's name.
    type: str
    default: ""
  accept_eula:
    description: Whether you have read and accepted the vendor's license. Without it, the module installs nothing.
    type: bool
    default: false
  type:
    description: The parts of the driver that the first installation installs. Later packages keep this selection.
    type: str
    choices: [full, run, devel, docker]
    default: full
  directory:
    description: The directory of the first installation of the driver. Later packages keep this directory.
    type: path
    default: /usr/local/Ascend
  user:
    description: The user that owns the driver. The user must exist.
    type: str
    default: HwHiAiUser
  group:
    description: The group of this user.
    type: str
    default: HwHiAiUser
  uid:
    description:
      - The UID of O(user) if the user is missing. The module fails if another user has this UID.
      - The vendor requires the same UID on all hosts and in containers. The vendor's images use V(1000).
    type: int
    default: 1000
  gid:
    description: The GID of O(group) if the group is missing. The module fails if another group has this GID.
    type: int
    default: 1000
  for_all:
    description: Whether all users can use the driver.
    type: bool
    default: false
  build:
    description:
      - Whether to build a kernel module if no kernel module of the package matches the kernel. The build needs the kernel headers, a compiler,
        and C(dkms).
    type: bool
    default: true
  remove_unmanaged:
    description: Whether O(state=absent) also removes a driver or firmware that another program or user has installed.
    type: bool
    default: false
  keep:
    description: Whether to keep the packages on the node for O(state=previous).
    type: bool
    default: true
  services:
    description: The systemd units that use NPUs. The module stops those that run before it runs packages, and starts them again afterwards.
    type: list
    elements: str
    default: [dra-accelerators-driver.service]
  state_path:
    description:
      - The node driver's store of prepared claims. The module does not run packages while there are prepared claims.
      - If empty, the module does not check for prepared claims.
    type: str
    default: /var/lib/kubelet/plugins/npu.huawei.com/state.db
  claims_timeout:
    description:
      - The number of seconds to wait until the node driver has no prepared claims in its store. If claims or processes still use NPUs after this time,
        the module fails.
      - If greater than 0, check mode returns the claims and processes in RV(blocked_by) and does not fail, because they can end before the timeout.
    type: int
    default: 0
  timeout:
    description: The timeout in seconds for each package.
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

- name: Roll back to the previous packages
  dra.accelerators.ascend_driver:
    state: previous
    accept_eula: true

- name: Remove the driver and the firmware
  dra.accelerators.ascend_driver:
    state: absent
"""

RETURN = r"""
steps:
  description: The steps that the module has run, or would run in check mode, in order.
  returned: success
  type: list
  elements: str
  sample: ["install the firmware 7.5.0.1.129 in place of 7.3.0.1.231", "install the driver 24.1.rc2 in place of 24.1.rc1"]
packages:
  description: The kinds of packages that the module has run, or would run in check mode, V(driver) and V(firmware).
  returned: success
  type: list
  elements: str
  sample: [firmware, driver]
missing_requirements:
  description:
    - In check mode, the unmet requirements of the driver's package, V(user), V(group) (the user is not a member of O(group)), and V(headers).
    - Without check mode, the module fails if a requirement is not met.
  returned: success
  type: list
  elements: str
  sample: []
blocked_by:
  description: In check mode, the claims and processes that use NPUs of the node. Without check mode, the module fails after O(claims_timeout).
  returned: success
  type: dict
  contains:
    claims:
      description: The prepared claims.
      returned: success
      type: list
      elements: str
      sample: [team-a/training]
    processes:
      description: The processes that use a device node of an NPU, with their pods. Processes of the node driver are excluded.
      returned: success
      type: list
      elements: str
      sample: ["4711 (python3, pod team-a/training-0)"]
    pods:
      description: The pods of these claims and processes, if the node knows their names.
      returned: success
      type: list
      elements: str
      sample: [team-a/training-0]
before:
  description: The installation before the change.
  returned: success
  type: dict
  contains: &installed
    driver:
      description: The driver's version. It is empty if no driver is installed.
      returned: success
      type: str
      sample: 24.1.rc2
    firmware:
      description: The firmware's version. It is empty if no firmware is installed.
      returned: success
      type: str
      sample: 7.5.0.1.129
    complete:
      description: Whether the driver's installation reports that it is complete.
      returned: success
      type: bool
      sample: true
    directory:
      description: The installation directory of the driver.
      returned: success
      type: str
      sample: /usr/local/Ascend
    user:
      description: The user that owns the driver.
      returned: success
      type: str
      sample: HwHiAiUser
    group:
      description: The group that owns the driver.
      returned: success
      type: str
      sample: HwHiAiUser
    type:
      description: The installed parts of the driver.
      returned: success
      type: str
      sample: full
after:
  description: The installation after the change. In check mode, the expected installation.
  returned: success
  type: dict
  contains: *installed
reboot_required:
  description: Whether the node needs a reboot because of this run or an earlier run. In check mode, whether it would need one.
  returned: success
  type: bool
  sample: true
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: checksum
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_host.driver_packages import (
    DEFAULT_FOLDER,
    DRIVER,
    FIRMWARE,
    ID,
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
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_host.package_installer import Installer, shown
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_host.package_owners import (
    read_owners,
    refuse_managed,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.driver_installation import (
    DeviceUsers,
    wait_for_claims,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.single_run import run_alone
from ansible_collections.dra.accelerators.plugins.module_utils._host.stopped_services import (
    describe_start,
    interrupted_services,
    resumed_services,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System


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
        "directory": {"type": "path", "default": DEFAULT_FOLDER},
        "user": {"type": "str", "default": OWNER},
        "group": {"type": "str", "default": OWNER},
        "uid": {"type": "int", "default": ID},
        "gid": {"type": "int", "default": ID},
        "for_all": {"type": "bool", "default": False},
        "build": {"type": "bool", "default": True},
        "remove_unmanaged": {"type": "bool", "default": False},
        "keep": {"type": "bool", "default": True},
        "services": {"type": "list", "elements": "str", "default": ["dra-accelerators-driver.service"]},
        "state_path": {"type": "str", "default": "/var/lib/kubelet/plugins/npu.huawei.com/state.db"},
        "claims_timeout": {"type": "int", "default": 0},
        "timeout": {"type": "int", "default": 1800},
    }


def requested_packages(params: dict[str, Any], record: Record) -> list[Package]:
    """Return the requested packages. Raises PackageError."""
    if params["state"] == "previous":
        return record.previous_packages(
            {kind: params[f"{kind}_version"] for kind in KINDS if params[f"{kind}_version"]}
        )
    named = [kind for kind in KINDS if params[kind]]
    if not named:
        raise PackageError(
            "Neither driver nor firmware is set", hint="Set driver, firmware, or both.", code="no-package"
        )
    return [read_package(kind, params[kind], params[f"{kind}_version"], params[f"{kind}_checksum"]) for kind in named]


def refuse_removal(steps: Sequence[Step], record: Record, params: dict[str, Any]) -> None:
    """Reject the removal of components that this collection has not installed. Raises PackageError."""
    # A component of an interrupted step also belongs to this collection.
    others = [step for step in steps if step.kind not in (*record.packages, record.doing)]
    if others and not params["remove_unmanaged"]:
        raise PackageError(
            f"Not installed by this collection: {', '.join(f'{step.kind} {step.before}'.strip() for step in others)}",
            hint="To remove it anyway, set remove_unmanaged to true.",
            code="foreign",
        )


def check_change(
    installer: Installer, steps: Sequence[Step], choices: Choices, params: dict[str, Any], *, check: bool
) -> None:
    """Wait for the claims, and reject steps that would fail. No step has run yet. Raises AcceleratorError."""
    packages = [step.package for step in steps if step.package is not None]
    if packages and not params["accept_eula"]:
        raise PackageError(
            f"The vendor's license was not accepted. Expected accept_eula=true, because {len(packages)} packages run without a prompt",
            hint="Read the license, and set accept_eula to true.",
            code="licence",
        )
    unfit = installer.unfit(steps)
    if unfit:
        raise PackageError(f"Not for this node: {' '.join(unfit)}", hint="Nothing was run.", code="not-for-this-node")
    unmet = installer.lacking(steps, choices)
    taken = installer.taken_ids(choices) if "user" in unmet else []
    if taken:
        raise PackageError(
            f"The user {choices.user} cannot be created: {' '.join(taken)}",
            hint=f"Containers expect the driver's user to have UID {ID} and GID {ID}. Change the numbers of the other account (usermod, groupmod), "
            "or choose other numbers for the driver's user, which the users of your images must have too.",
            code="id-taken",
        )
    if unmet and not check:
        raise PackageError(
            f"The node is not ready: {' '.join(unmet.values())}", hint="Nothing was run.", code="not-ready"
        )
    for package in packages:
        if not check or installer.system.exists(package.path):
            installer.verify(package)
    wait_and_refuse_users(installer, params, check=check)


def wait_and_refuse_users(installer: Installer, params: dict[str, Any], *, check: bool) -> None:
    """Wait for the claims, then raise InUse if NPUs are still in use."""
    if check and params["claims_timeout"] > 0:
        return
    if not check:
        wait_for_claims(params["state_path"], params["claims_timeout"])
    installer.refuse_users()


def predicted_state(before: Installed, steps: Sequence[Step]) -> dict[str, Any]:
    """Return the installed versions after the steps."""
    versions = {step.kind: step.after for step in steps}
    driver = versions.get(DRIVER, before.driver)
    return replace(
        before,
        driver=driver,
        firmware=versions.get(FIRMWARE, before.firmware),
        complete=before.complete or DRIVER in versions,
    ).to_dict()


def work(module: AnsibleModule, system: System | None = None) -> dict[str, Any]:
    """Install or remove driver and firmware, and return the module's result. Raises AcceleratorError."""
    params = module.params
    installer = Installer(
        system or System(),
        timeout=float(params["timeout"]),
        services=params["services"],
        state_path=params["state_path"],
        keep=params["keep"],
        is_check=module.check_mode,
    )
    with contextlib.closing(installer):
        if module.check_mode:
            return apply_state(installer, module, interrupted_services(installer.system, "ascend"))
        with resumed_services(installer.system, "ascend") as stopped:
            return apply_state(installer, module, stopped)


def apply_state(installer: Installer, module: AnsibleModule, stopped: Sequence[str]) -> dict[str, Any]:
    """Install or remove driver and firmware from the installer's verified copies, and return the module's result.

    ``stopped`` are the services that an interrupted run stopped; the caller starts them.
    """
    params = module.params
    record, owners = installer.record(), read_owners(installer.system)
    installer.is_managed = DRIVER in owners
    before = installer.installed()
    unmet: list[str] = []
    choices = Choices(
        type=params["type"],
        folder=params["directory"],
        user=params["user"],
        group=params["group"],
        for_all=params["for_all"],
        build=params["build"],
        uid=params["uid"],
        gid=params["gid"],
    )
    finishing: list[str] = []
    if params["state"] == "absent":
        steps = plan_removal(before)
        if not steps and record.is_of_packages:
            finishing = ["finish an interrupted removal"]
        refuse_managed(steps, owners)
        refuse_removal(steps, record, params)
        if steps:
            wait_and_refuse_users(installer, params, check=module.check_mode)
    else:
        # For components of its packages, the package manager has already completed an interrupted installation.
        unfinished = "" if record.doing in owners else record.doing
        steps = plan(before, requested_packages(params, record), unfinished=unfinished)
        refuse_managed(steps, owners)
        if steps:
            check_change(installer, steps, choices, params, check=module.check_mode)
            unmet = sorted(installer.lacking(steps, choices))
    device_users = installer.users() if steps and module.check_mode else DeviceUsers()
    after = predicted_state(before, steps)
    if not module.check_mode:
        record = execute(installer, steps, choices, record, state=params["state"])
        after = installer.installed().to_dict() if steps else after
    return {
        "changed": bool(steps or finishing or stopped),
        "steps": [*(step.describe() for step in steps), *finishing, *map(describe_start, stopped)],
        "packages": [step.kind for step in steps if step.package is not None],
        "missing_requirements": unmet,
        "blocked_by": {
            "claims": device_users.described_claims(),
            "processes": [str(each) for each in device_users.processes],
            "pods": list(device_users.pod_names()),
        },
        "before": before.to_dict(),
        "after": after,
        "reboot_required": installer.waits_for_restart(record) or (module.check_mode and bool(steps or finishing)),
        "diff": shown(before, after),
    }


def execute(installer: Installer, steps: Sequence[Step], choices: Choices, record: Record, *, state: str) -> Record:
    """Run the steps, finish a removal, and return the new record. Raises AcceleratorError."""
    if steps:
        record = installer.carry_out(steps, choices, record)
    if state == "absent":
        if record.is_of_packages:
            record = installer.finish_removal(record)
        if not installer.waits_for_restart(record):
            # Also without a record: an interrupted run can have left the directory.
            installer.write(Record())
    return record


def main() -> None:
    """Entry point."""
    run_alone(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work, System())


if __name__ == "__main__":
    main()
