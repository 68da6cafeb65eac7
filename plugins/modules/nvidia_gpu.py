#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_gpu
version_added: 0.1.0
short_description: Configure persistent settings of NVIDIA GPUs
description:
  - Applies settings to GPUs by rules. The settings are the persistence mode, the compute mode, the power limit, locked graphics and memory clocks,
    workload power profiles, the time slice, and ECC with the reset that it needs.
  - Reads the current values from NVML and changes only values that differ. NVML does not report whether clocks are locked, or the time slice. The
    module reads the values that it set for these from O(record).
  - Scans all GPUs and plans all changes before the first one. It rejects a value that a GPU does not support, and reports the supported range. It
    also rejects a change that would affect a process or a prepared resource claim, and the error names them. In these cases it changes nothing.
  - If a change fails, the module restores the previous values on all GPUs.
  - Does not set the MIG mode, because a change of this mode deletes partitions. Use M(dra.accelerators.nvidia_mig) for it.
notes:
  - All settings except ECC are lost at a reset of the GPU and at a reboot. The role P(dra.accelerators.nvidia_settings#role) applies them again at
    every boot. After a reset or a change of the MIG mode by this collection, they are applied again at once. After a manual reset, delete O(record)
    and run the module again.
  - A claim with C(DeviceSettings) changes settings while it is prepared. The node driver then restores the values before the claim, which include
    those of this module. For a setting that a claim has changed, the module compares the value before the claim and does not change the setting. It
    fails if another value is requested.
  - On NVIDIA Grace systems, disabling the persistence mode can make the GPU unavailable to programs that use it.
  - Requires root on the node.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._node_driver
  - dra.accelerators._nvml
attributes:
  check_mode:
    support: full
    details:
      - RV(steps) and RV(devices[].after) show the planned changes. The module rejects the same values and changes as without check mode.
      - A run without check mode fails if a program such as a monitoring agent has a GPU open that must be reset. Check mode lists these processes in
        a warning.
  diff_mode:
    support: full
    details:
      - The diff has one entry for each GPU that changes.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  settings:
    description:
      - Rules with the values for the GPUs. For each GPU, the first matching rule applies. Settings that a rule does not contain do not change. GPUs
        without a matching rule do not change either, unless O(exclusive=true).
      - Required for O(state=present). With O(state=absent), rules need only O(settings[].match) and select the GPUs whose previous values are
        restored. Without rules, these are all GPUs.
    type: list
    elements: dict
    suboptions:
      match:
        description:
          - The GPUs to which the rule applies. All given keys must match. An empty dictionary matches every GPU.
        type: dict
        required: true
        suboptions:
          vendor:
            description: The vendor. This module supports only V(nvidia).
            type: str
          index:
            description: The driver's index of the GPU, or a list of indexes.
            type: raw
          uuid:
            description: The GPU's UUID, or a list of UUIDs.
            type: raw
          pci_address:
            description: The GPU's PCI address, or a list of addresses.
            type: raw
          product:
            description: A shell pattern for the product name, or a list of patterns.
            type: raw
      persistence:
        description: Whether the driver keeps the GPU initialized while no process uses it.
        type: bool
      compute_mode:
        description:
          - How many processes can use the GPU. V(Default) allows any number, V(ExclusiveProcess) allows one, and V(Prohibited) allows no process.
          - A GPU with MIG enabled does not support this setting. The module skips it with a warning, and sets it in a later run while MIG is disabled.
          - The module rejects a mode other than V(Default) while a process or a claim uses the GPU.
        type: str
        choices: [Default, ExclusiveProcess, Prohibited]
      power_limit:
        description: The maximum power of the GPU in watts.
        type: int
      graphics_clocks:
        description:
          - The range of the graphics clock in MHz, as C(minimum) and C(maximum). The default of C(minimum) is the lowest clock of the GPU.
        type: dict
        suboptions:
          minimum:
            description: The lowest clock in MHz.
            type: int
          maximum:
            description: The highest clock in MHz.
            type: int
            required: true
      memory_clocks:
        description: The range of the memory clock in MHz, as C(minimum) and C(maximum). Supported from the Ampere generation, but not on Hopper GPUs,
          which do not lock memory clocks.
        type: dict
        suboptions:
          minimum:
            description: The lowest clock in MHz.
            type: int
          maximum:
            description: The highest clock in MHz.
            type: int
            required: true
      workload_profiles:
        description:
          - The only workload power profiles to request, such as V(max-q). Supported from the Blackwell generation and driver 570.
        type: list
        elements: str
      time_slice:
        description:
          - How long one process computes while others wait, one of V(Default), V(Short), V(Medium), and V(Long). The module sets it with C(nvidia-smi).
          - Skipped while MIG is enabled, like the compute mode.
        type: str
      ecc:
        description:
          - Whether the memory corrects errors. A change takes effect after a reset of the GPU, which O(reset) allows. The value persists after a reboot.
        type: bool
  state:
    description:
      - V(present) applies O(settings).
      - V(absent) restores the values before this module's changes. If the previous value is unknown, it restores the GPU's default. It does not
        change settings that this module did not set.
    type: str
    choices: [present, absent]
    default: present
  exclusive:
    description:
      - Whether to restore settings that this module set and that no rule contains any more, also on GPUs without a matching rule.
    type: bool
    default: false
  reset:
    description:
      - Whether the module can reset GPUs to change ECC.
      - If it is not set and a reset is needed, the module fails with an explanation before any change.
      - With V(when_needed), the module resets GPUs that need it if they are not in use and have no partitions. GPUs before the Ampere generation that
        are connected by NVLink are reset together. On an HGX A100 board, the fabric manager must run.
      - With V(never), the change is pending until the next reboot, and RV(reset_required) is true.
    type: str
    choices: [never, when_needed]
  record:
    description: File on the node with the values that the module set and the previous values. The module deletes the file with its last entry.
    type: path
    default: /var/lib/dra-accelerators/settings-nvidia.json
  state_path:
    description:
      - The node driver's store of prepared claims. The module only reads it. A missing file means that no claims are prepared.
      - The default is C(state.db) in O(state_directory). If this option is set, the module uses the directory of this file as the state
        directory.
    type: path
seealso:
  - module: dra.accelerators.nvidia_mig
  - module: dra.accelerators.accelerator_info
"""

EXAMPLES = r"""
- name: Enable persistence mode on all GPUs and limit the power of the first four
  dra.accelerators.nvidia_gpu:
    settings:
      - match:
          index: [0, 1, 2, 3]
        persistence: true
        power_limit: 500
      - match: {}
        persistence: true

- name: Lock the clocks of A100 boards for measurements
  dra.accelerators.nvidia_gpu:
    settings:
      - match:
          product: "NVIDIA A100*"
        graphics_clocks:
          minimum: 1410
          maximum: 1410
        memory_clocks:
          minimum: 1215
          maximum: 1215

- name: Enable ECC and reset the GPUs if needed
  dra.accelerators.nvidia_gpu:
    settings:
      - match: {}
        ecc: true
    reset: when_needed

- name: Set the compute mode and restore all other settings of this module
  dra.accelerators.nvidia_gpu:
    settings:
      - match: {}
        compute_mode: ExclusiveProcess
    exclusive: true

- name: Restore all previous values
  dra.accelerators.nvidia_gpu:
    state: absent
"""

RETURN = r"""
steps:
  description: The completed steps in order. In check mode, the planned steps.
  returned: success
  type: list
  elements: dict
  contains:
    step:
      description: The kind of the step, V(set) or V(reset).
      type: str
      returned: success
      sample: set
    indices:
      description: The driver's indexes of the GPUs in this step.
      type: list
      elements: int
      returned: success
      sample: [0]
    device_uuid:
      description: The UUID of the GPU.
      type: str
      returned: for V(set)
      sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
    setting:
      description: The name of the setting, as in O(settings).
      type: str
      returned: for V(set)
      sample: power_limit
    from:
      description: The value before. Null if it is unknown, or for the GPU's default.
      type: raw
      returned: for V(set)
      sample: 700
    to:
      description: The value after. Null for the GPU's default.
      type: raw
      returned: for V(set)
      sample: 500
    device_uuids:
      description: The UUIDs of the GPUs that are reset together.
      type: list
      elements: str
      returned: for V(reset)
      sample: ["GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071"]
    description:
      description: The step as text.
      type: str
      returned: success
      sample: set power_limit of GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071 from 700 W to 500 W
devices:
  description: Each GPU that a rule matches or whose previous values are restored.
  returned: success
  type: list
  elements: dict
  contains:
    index:
      description: The driver's index of the GPU.
      type: int
      returned: success
      sample: 0
    uuid:
      description: The UUID of the GPU.
      type: str
      returned: success
      sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
    product:
      description: The product name.
      type: str
      returned: success
      sample: NVIDIA H100 80GB HBM3
    pci_address:
      description: The PCI address.
      type: str
      returned: success
      sample: "0000:18:00.0"
    changed:
      description: Whether the GPU was changed, or would be in check mode.
      type: bool
      returned: success
      sample: true
    before:
      description:
        - All settings that the GPU supports, by the names in O(settings), and C(ecc_pending), the value of ECC after the next reset. Null for a
          setting that cannot be read and that this module did not set.
      type: dict
      returned: success
      sample: {persistence: true, compute_mode: Default, power_limit: 700, graphics_clocks: null, ecc: true, ecc_pending: true}
    after:
      description: The settings after the run. In check mode, the expected settings, with null for the GPU's default.
      type: dict
      returned: success
      sample: {persistence: true, compute_mode: Default, power_limit: 500, graphics_clocks: null, ecc: true, ecc_pending: true}
    allowed:
      description: The supported values of each setting on this GPU, as text.
      type: dict
      returned: success
      sample: {power_limit: a whole number from 200 to 700 W}
    withheld:
      description: Settings that the GPU does not support at present, each with the reason.
      type: dict
      returned: success
      sample: {compute_mode: MIG is on}
    claims:
      description: The prepared claims that use the GPU or parts of it. They continue during a change of settings. The module rejects a reset of their GPU.
      type: list
      elements: str
      returned: success
      sample: ["team-a/training"]
    pods:
      description: The pods of these claims, if the node knows them.
      type: list
      elements: str
      returned: success
      sample: ["team-a/training-0"]
    reset_required:
      description: Whether the requested value of ECC takes effect only after a reset that was not allowed.
      type: bool
      returned: success
      sample: false
reset_required:
  description: Whether C(reset_required) is true for any GPU.
  returned: success
  type: bool
  sample: false
up_to_date:
  description:
    - Whether the module has nothing to change. If V(true) in check mode, a run without check mode is not needed.
    - Also V(false) if only the record is outdated, for example after a reboot.
  returned: success
  type: bool
  sample: true
error_code:
  description: A stable code for the type of the error, or V(several).
  returned: failure
  type: str
  sample: invalid-settings
errors:
  description: All errors, each with its code and its details.
  returned: when settings are refused
  type: list
  elements: dict
  sample:
    - code: invalid-settings
      message: "The settings are not valid for GPU 0: power_limit is 900; expected a whole number from 200 to 700 W"
      hint: ""
pids:
  description: The processes that block the change.
  returned: when processes block the change
  type: list
  elements: int
  sample: [4711]
claims:
  description: The prepared resource claims that block the change, as namespace and name.
  returned: when claims block the change
  type: list
  elements: str
  sample: ["team-a/training"]
undone:
  description: The settings that were restored after a change failed.
  returned: when a change failed
  type: list
  elements: str
  sample: ["power_limit of GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071"]
not_undone:
  description: The settings that could not be restored.
  returned: when a change failed
  type: list
  elements: str
  sample: []
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._host.driver_installation import pods_of
from ansible_collections.dra.accelerators.plugins.module_utils._host.state_directory import (
    STATE_DIRECTORY_OPTIONS,
    state_directory_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import (
    INTERPRETER_OPTION,
    fail_all,
    find_binding,
    run,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import BackendUnavailable, InvalidSettings
from ansible_collections.dra.accelerators.plugins.module_utils.core.health.resets import held_reset
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.kubelet_pods import pod_names
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import Match
from ansible_collections.dra.accelerators.plugins.module_utils.core.settings.settings_execute import (
    Asked,
    Decision,
    decide,
    execute,
    lock_devices,
    predicted_values,
    record_to_write,
    update_record,
    values_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.settings.settings_plan import (
    KEYS,
    DevicePlan,
    SettingsRule,
    parse_settings,
    setting_text,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.settings.settings_plan import (
    KNOBS as KNOBS_BY_KEY,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.store.prepared_claims import (
    prepared_claims,
    wake_driver,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.backend import NvidiaBackend
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.vendor import FACTS

RECORD = "/var/lib/dra-accelerators/settings-nvidia.json"
PENDING = "_pending"


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options. The core validates the keys of a rule, and names the rule in errors."""
    return {
        **INTERPRETER_OPTION,
        "settings": {"type": "list", "elements": "dict"},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "exclusive": {"type": "bool", "default": False},
        "reset": {"type": "str", "choices": ["never", "when_needed"]},
        "record": {"type": "path", "default": RECORD},
        "state_path": {"type": "path"},
        **STATE_DIRECTORY_OPTIONS,
    }


CONSTRAINTS: dict[str, Any] = {"required_if": [("state", "present", ["settings"])]}


def requested_settings(params: Mapping[str, Any]) -> Asked:
    """Return the requested settings. Raises InvalidSettings."""
    absent = params["state"] == "absent"
    all_gpus = (SettingsRule(Match(), {}),)
    rules = all_gpus if absent and params["settings"] is None else parse_settings(params["settings"])
    return Asked(
        rules,
        state=params["state_path"] or f"{state_directory_of(params, FACTS.driver_name)}/state.db",
        record=params["record"],
        reset=params["reset"],
        restore=params["exclusive"] or absent,
        absent=absent,
    )


def lines(settings: Mapping[str, Any]) -> str:
    """Return settings as text for a diff. No side effects."""
    shown = []
    for key, value in settings.items():
        name = KNOBS_BY_KEY[key.removesuffix(PENDING)]
        if key.endswith(PENDING):
            if value != settings[key.removesuffix(PENDING)]:
                shown.append(f"{key.removesuffix(PENDING)} after the next reset: {setting_text(name, value)}")
        else:
            shown.append(f"{key}: {setting_text(name, value)}")
    return "\n".join(shown) + "\n"


def entry(plan: DevicePlan, pods: Mapping[str, Sequence[str]], *, is_reset: bool) -> dict[str, Any]:
    """Return the result for one GPU. No side effects."""
    device = plan.seen.device
    return {
        "index": device.index,
        "uuid": device.uuid,
        "product": device.product,
        "pci_address": device.pci_address,
        "changed": bool(plan.changes) or is_reset,
        "before": values_of(plan.seen.knobs),
        "after": predicted_values(plan, is_reset=is_reset),
        "allowed": {KEYS[name]: knob.allowed.expected for name, knob in plan.seen.knobs.items()},
        "withheld": {KEYS[name]: reason for name, reason in plan.withheld.items()},
        "claims": list(plan.seen.claims),
        "pods": sorted({pod for claim in plan.seen.claims for pod in pods.get(claim, ())}),
        "reset_required": plan.reset and not is_reset,
    }


def pods_by_claim(system: System, state_path: str, decision: Decision) -> Mapping[str, Sequence[str]]:
    """Return the pods of the claims on the GPUs of the plan. Queries nothing if there are no such claims."""
    if not any(each.seen.claims for each in decision.plan.devices):
        return {}
    return pods_of(system, state_path, prepared_claims(state_path), pod_names(system))


def report(decision: Decision, pods: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the planned or completed changes. No side effects."""
    plan = decision.plan
    reset = {uuid for group in plan.resets for uuid in group}
    numbers = {seen.device.uuid: seen.device.index for seen in decision.seen_devices}
    steps = [
        {**step, "indices": [numbers[uuid] for uuid in step.get("device_uuids") or [step["device_uuid"]]]}
        for step in plan.steps()
    ]
    return {
        "changed": bool(steps),
        "steps": steps,
        "devices": [entry(each, pods, is_reset=each.uuid in reset) for each in plan.devices],
        "reset_required": bool(plan.waiting),
    }


def with_diff(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer with a diff entry for each GPU that differs. No side effects."""
    entries = []
    for each in answer["devices"]:
        before, after = lines(each["before"]), lines(each["after"])
        if before != after:
            header = f"GPU {each['index']} ({each['uuid']}, {each['pci_address']})"
            entries.append({"before_header": header, "after_header": header, "before": before, "after": after})
    return {**answer, "diff": entries}


def warn(module: AnsibleModule, decision: Decision) -> None:
    """Warn about GPUs and settings that stay unchanged."""
    for finding in decision.faulty:
        module.warn(f"One GPU keeps its settings: {finding.describe()}")
    for seen in decision.away:
        claims = ", ".join(seen.claims) or "an unknown claim"
        module.warn(
            f"One GPU keeps its settings: {seen.device.describe()} is passed through to a virtual machine by {claims}"
        )
    for plan in decision.plan.devices:
        for name, reason in plan.withheld.items():
            module.warn(f"{KEYS[name]} of {plan.seen.device.describe()} was not changed: {reason}")


def warn_of_holders(module: AnsibleModule, backend: NvidiaBackend, request: Asked, decision: Decision) -> None:
    """Warn about processes that would prevent a planned reset. A run without check mode fails with the same processes."""
    for group in decision.plan.resets:
        devices = [seen.device for seen in decision.seen_devices if seen.device.uuid in group]
        text = held_reset(devices, backend.reset_holders(group, request.state))
        if text:
            module.warn(text)


def apply_settings(module: AnsibleModule, backend: NvidiaBackend, request: Asked) -> dict[str, Any]:
    """Apply the settings with an open backend, or only plan them in check mode, and return the result."""
    system = System()

    def decided() -> Decision:
        decision = decide(backend, system, request)
        if decision.errors:
            fail_all(module, decision.errors)
        return decision

    decision = decided()
    pods = pods_by_claim(system, request.state, decision)
    answer = report(decision, pods)
    answer["up_to_date"] = not answer["changed"] and record_to_write(system, request.record, decision) is None
    if module.check_mode:
        warn_of_holders(module, backend, request, decision)
    elif answer["changed"]:
        try:
            with lock_devices(request, decision, "the module nvidia_gpu") as check:
                decision = decided()
                check(decision)
                answer = {**report(decision, pods), "up_to_date": False}
                execute(backend, system, request.record, decision.record, decision.plan)
        finally:
            if decision.plan.resets:
                wake_driver(str(Path(request.state).parent))
        for each in answer["devices"]:
            each["after"] = values_of(backend.knobs(each["uuid"], tuple(KEYS)))
    else:
        update_record(system, request.record, decision)
    warn(module, decision)
    return with_diff(answer)


def work(module: AnsibleModule) -> dict[str, Any]:
    """Apply GPU settings, and return the module's result. Raises AcceleratorError."""
    try:
        request = requested_settings(module.params)
    except InvalidSettings as error:
        fail_all(module, [error])
    missing = find_binding("pynvml", module.params["interpreter"])
    if missing is not None:
        raise BackendUnavailable(
            missing,
            hint="Install the package nvidia-ml-py for one of these interpreters, for example with the role "
            "dra.accelerators.python_environment, or set another one with the option interpreter.",
            code="binding-missing",
        )
    backend = NvidiaBackend(System(), record=request.record)
    backend.use_number_file(str(Path(request.state).parent))
    backend.open()
    try:
        return apply_settings(module, backend, request)
    finally:
        backend.close()


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
