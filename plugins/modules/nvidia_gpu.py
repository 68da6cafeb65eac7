#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_gpu
version_added: 0.1.0
short_description: Set what NVIDIA GPUs of a node have, whoever uses them
description:
  - Brings GPUs to wanted settings by rules. These are the persistence mode, the compute mode, the power limit, locked graphics and memory
    clocks, workload power profiles, the time slice, and ECC with the reset that it needs.
  - What is so is read back from NVML, and only what differs is set. NVML does not tell whether clocks are locked, nor the time slice. What
    this module has set of these is read from O(record).
  - All GPUs are looked at and all changes are planned before the first one is made. What a GPU does not take is refused with the GPU's own
    range. What would hurt a process or a prepared resource claim is refused as well, and the error names them. Nothing is touched then.
  - If a change fails, those before it are set back, on all GPUs.
  - The MIG mode is not among the settings, because partitions go with it. It is set by M(dra.accelerators.nvidia_mig).
notes:
  - But for ECC, no setting outlives a reset of the GPU or a start of the machine. The role P(dra.accelerators.nvidia_settings#role) has
    them made at every boot. After a reset, or a change of the MIG mode, that this collection makes, they are set again at once. After a reset by
    hand, run the module again with O(record) removed.
  - A claim with C(DeviceSettings) changes settings for its time. The node driver sets back what it has found, so what this module has set.
    While a claim has changed a setting, this module leaves it, compares what the claim has found, and refuses to set another value.
  - On NVIDIA Grace systems, switching the persistence mode off may take the GPU away from programs that have it open.
  - Needs root on the node.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._node_driver
  - dra.accelerators._nvml
attributes:
  check_mode:
    support: full
    details:
      - RV(steps) and RV(devices[].after) show what would be done. Refusals are the same as without check mode.
  diff_mode:
    support: full
    details:
      - One entry for each GPU that changes.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  settings:
    description:
      - Rules that say what the GPUs are to have. For each GPU the first rule that matches counts. What a rule does not name is left as it is,
        and so is a GPU that no rule matches, unless O(exclusive=true).
      - Needed for O(state=present). With O(state=absent) rules need only O(settings[].match), and say where settings are set back; without
        rules that is everywhere.
    type: list
    elements: dict
    suboptions:
      match:
        description:
          - Which GPUs the rule is for. All given keys must match; an empty dictionary matches every GPU.
        type: dict
        required: true
        suboptions:
          vendor:
            description: The vendor; V(nvidia) is the only one that this module knows.
            type: str
          index:
            description: The number that the driver gives the GPU, or a list of such numbers.
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
        description: Whether the driver holds the GPU while nobody uses it.
        type: bool
      compute_mode:
        description:
          - How many processes may have the GPU. V(Default) is any number, V(ExclusiveProcess) one, V(Prohibited) none.
          - A GPU with MIG on does not take it. It is withheld, which is said, and set when the module runs while MIG is off.
          - A mode other than V(Default) is refused while a process or a claim uses the GPU.
        type: str
        choices: [Default, ExclusiveProcess, Prohibited]
      power_limit:
        description: How many watts the GPU may draw at most.
        type: int
      graphics_clocks:
        description:
          - Between which clocks, in MHz, the GPU computes, as C(minimum) and C(maximum). Without C(minimum), from the GPU's lowest one on.
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
        description: The same of its memory, from the Ampere generation on.
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
          - The workload power profiles that are requested, and no others, such as V(max-q). There are such from the Blackwell generation and
            driver 570 on.
        type: list
        elements: str
      time_slice:
        description:
          - How long one process computes while others wait, one of V(Default), V(Short), V(Medium) and V(Long). It is set by C(nvidia-smi).
          - Withheld while MIG is on, like the compute mode.
        type: str
      ecc:
        description:
          - Whether the memory corrects errors. A change is in force after a reset of the GPU, which O(reset) allows. It outlives a start of the
            machine.
        type: bool
  state:
    description:
      - V(present) sets what O(settings) want.
      - V(absent) sets back what this module has set, to what was there before, or to the GPU's default where that cannot be known. What it has
        not set is left as it is.
    type: str
    choices: [present, absent]
    default: present
  exclusive:
    description:
      - Whether what this module has set, and no rule wants any more, is set back, also on GPUs that no rule matches.
    type: bool
    default: false
  reset:
    description:
      - Whether GPUs may be reset for a change of ECC.
      - If it is not set and a reset is needed, the module fails with an explanation before any change.
      - With V(when_needed), GPUs that need it are reset if nothing uses them and they have no partitions. GPUs that are linked directly are
        reset together.
      - With V(never), the change is left pending until the machine is started again, and RV(reset_required) is true.
    type: str
    choices: [never, when_needed]
  record:
    description: File on the node in which is written what was set, and what was there before. It is removed with its last entry.
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
- name: Keep all GPUs awake, and draw less power on the first four
  dra.accelerators.nvidia_gpu:
    settings:
      - match:
          index: [0, 1, 2, 3]
        persistence: true
        power_limit: 500
      - match: {}
        persistence: true

- name: Lock the clocks of H100 boards for measurements
  dra.accelerators.nvidia_gpu:
    settings:
      - match:
          product: "NVIDIA H100*"
        graphics_clocks:
          minimum: 1410
          maximum: 1410
        memory_clocks:
          minimum: 2619
          maximum: 2619

- name: Switch ECC on, now
  dra.accelerators.nvidia_gpu:
    settings:
      - match: {}
        ecc: true
    reset: when_needed

- name: Have these settings and no others of ours
  dra.accelerators.nvidia_gpu:
    settings:
      - match: {}
        compute_mode: ExclusiveProcess
    exclusive: true

- name: Set everything back
  dra.accelerators.nvidia_gpu:
    state: absent
"""

RETURN = r"""
steps:
  description: What was done, or would be done in check mode, in order.
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
      description: The numbers that the driver gives the GPUs that the step concerns.
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
      description: The value before; null for what cannot be known, or is the GPU's default.
      type: raw
      returned: for V(set)
      sample: 700
    to:
      description: The value afterwards; null for the GPU's default.
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
      description: The step in words.
      type: str
      returned: success
      sample: set power_limit of GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071 from 700 W to 500 W
devices:
  description: Each GPU that a rule matches, or of which something is set back.
  returned: success
  type: list
  elements: dict
  contains:
    index:
      description: The number that the driver gives the GPU.
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
        - All settings that the GPU has, by the names of O(settings), and C(ecc_pending), which is what ECC will be after the next reset. Null
          is what cannot be read back and was not set by this module.
      type: dict
      returned: success
      sample: {persistence: true, compute_mode: Default, power_limit: 700, graphics_clocks: null, ecc: true, ecc_pending: true}
    after:
      description: The same afterwards; in check mode as it would be, with null for the GPU's default.
      type: dict
      returned: success
      sample: {persistence: true, compute_mode: Default, power_limit: 500, graphics_clocks: null, ecc: true, ecc_pending: true}
    allowed:
      description: What each setting may be on this GPU, in words.
      type: dict
      returned: success
      sample: {power_limit: a whole number from 200 to 700 W}
    withheld:
      description: What the GPU does not take at present, each with the reason.
      type: dict
      returned: success
      sample: {compute_mode: MIG is on}
    claims:
      description: The prepared claims that have the GPU or parts of it. They go on while it is set; a reset under them is refused.
      type: list
      elements: str
      returned: success
      sample: ["team-a/training"]
    pods:
      description: The pods of these claims, as far as the node knows them.
      type: list
      elements: str
      returned: success
      sample: ["team-a/training-0"]
    reset_required:
      description: Whether ECC becomes what is wanted only after a reset that was not allowed.
      type: bool
      returned: success
      sample: false
reset_required:
  description: Whether that is so of any GPU.
  returned: success
  type: bool
  sample: false
settled:
  description:
    - Whether there is nothing to do for this module, so that after a look in check mode no real run is needed.
    - False also where only the record of what was set is behind, as after a start of the machine.
  returned: success
  type: bool
  sample: true
error_code:
  description: A stable word for the kind of the error, or V(several).
  returned: failure
  type: str
  sample: invalid-settings
errors:
  description: All errors, each with its code and what it names.
  returned: when settings are refused
  type: list
  elements: dict
  sample:
    - code: invalid-settings
      message: "What is wanted is not taken by GPU 0: power_limit is 900; expected a whole number from 200 to 700 W"
      hint: ""
pids:
  description: The processes that are in the way.
  returned: when processes are in the way
  type: list
  elements: int
  sample: [4711]
claims:
  description: The prepared resource claims that are in the way, as namespace and name.
  returned: when claims are in the way
  type: list
  elements: str
  sample: ["team-a/training"]
undone:
  description: What was set back after a change had failed.
  returned: when a change failed
  type: list
  elements: str
  sample: ["power_limit of GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071"]
not_undone:
  description: What could not be set back.
  returned: when a change failed
  type: list
  elements: str
  sample: []
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._driver_install import pods_of
from ansible_collections.dra.accelerators.plugins.module_utils._module import (
    INTERPRETER_OPTION,
    fail_all,
    find_binding,
    run,
)
from ansible_collections.dra.accelerators.plugins.module_utils._state_directory import (
    STATE_DIRECTORY_OPTIONS,
    state_directory_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import BackendUnavailable, InvalidSettings
from ansible_collections.dra.accelerators.plugins.module_utils.core.layout_rules import Match
from ansible_collections.dra.accelerators.plugins.module_utils.core.node_settings import (
    KEYS,
    DevicePlan,
    SettingsRule,
    parse_settings,
    words,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.node_settings import KNOBS as KNOBS_BY_KEY
from ansible_collections.dra.accelerators.plugins.module_utils.core.node_settings_run import (
    Asked,
    Decision,
    decide,
    execute,
    foretold,
    keep_notes,
    notes_to_keep,
    told,
    undisturbed,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.nvidia.backend import NvidiaBackend
from ansible_collections.dra.accelerators.plugins.module_utils.core.nvidia.vendor import FACTS
from ansible_collections.dra.accelerators.plugins.module_utils.core.pods import pod_names
from ansible_collections.dra.accelerators.plugins.module_utils.core.prepared import prepared_claims, wake_driver
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

RECORD = "/var/lib/dra-accelerators/settings-nvidia.json"
PENDING = "_pending"


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options. What a rule may hold is checked by the core, which names the rule."""
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


def what_is_asked(params: Mapping[str, Any]) -> Asked:
    """Read the options. Raises InvalidSettings."""
    absent = params["state"] == "absent"
    given = params["settings"]
    rules = (SettingsRule(Match(), {}),) if absent and given is None else parse_settings(given)
    return Asked(
        rules,
        state=params["state_path"] or f"{state_directory_of(params, FACTS.driver_name)}/state.db",
        record=params["record"],
        reset=params["reset"],
        restore=params["exclusive"] or absent,
        absent=absent,
    )


def lines(settings: Mapping[str, Any]) -> str:
    """Return settings as text for a diff; pure."""
    shown = []
    for key, value in settings.items():
        name = KNOBS_BY_KEY[key.removesuffix(PENDING)]
        if key.endswith(PENDING):
            if value != settings[key.removesuffix(PENDING)]:
                shown.append(f"{key.removesuffix(PENDING)} after the next reset: {words(name, value)}")
        else:
            shown.append(f"{key}: {words(name, value)}")
    return "\n".join(shown) + "\n"


def entry(plan: DevicePlan, pods: Mapping[str, Sequence[str]], *, is_reset: bool) -> dict[str, Any]:
    """Return what happens to one GPU; pure."""
    device = plan.seen.device
    return {
        "index": device.index,
        "uuid": device.uuid,
        "product": device.product,
        "pci_address": device.pci_address,
        "changed": bool(plan.changes) or is_reset,
        "before": told(plan.seen.knobs),
        "after": foretold(plan, is_reset=is_reset),
        "allowed": {KEYS[name]: knob.allowed.expected for name, knob in plan.seen.knobs.items()},
        "withheld": {KEYS[name]: reason for name, reason in plan.withheld.items()},
        "claims": list(plan.seen.claims),
        "pods": sorted({pod for claim in plan.seen.claims for pod in pods.get(claim, ())}),
        "reset_required": plan.reset and not is_reset,
    }


def pods_by_claim(system: System, state_path: str, decision: Decision) -> Mapping[str, Sequence[str]]:
    """Return the pods of the claims that have GPUs which a plan concerns; nobody is asked where none has."""
    if not any(each.seen.claims for each in decision.plan.devices):
        return {}
    return pods_of(system, state_path, prepared_claims(state_path), pod_names(system))


def report(decision: Decision, pods: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return what is done, or would be; pure."""
    plan = decision.plan
    reset = {uuid for group in plan.resets for uuid in group}
    numbers = {seen.device.uuid: seen.device.index for seen in decision.looks}
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
    """Return the answer with one entry of a diff for each GPU that differs; pure."""
    entries = []
    for each in answer["devices"]:
        before, after = lines(each["before"]), lines(each["after"])
        if before != after:
            header = f"GPU {each['index']} ({each['uuid']}, {each['pci_address']})"
            entries.append({"before_header": header, "after_header": header, "before": before, "after": after})
    return {**answer, "diff": entries}


def warn(module: AnsibleModule, decision: Decision) -> None:
    """Say what is left as it is."""
    for finding in decision.faulty:
        module.warn(f"One GPU keeps what it has: {finding.describe()}")
    for seen in decision.away:
        claims = ", ".join(seen.claims) or "somebody"
        module.warn(f"One GPU keeps what it has: {seen.device.describe()} is given to a virtual machine by {claims}")
    for plan in decision.plan.devices:
        for name, reason in plan.withheld.items():
            module.warn(f"{KEYS[name]} of {plan.seen.device.describe()} is left as it is: {reason}")


def set_up(module: AnsibleModule, backend: NvidiaBackend, asked: Asked) -> dict[str, Any]:
    """Bring the GPUs of a backend that is open to the settings, or say in check mode what would be done; returns the result."""
    system = System()

    def decided() -> Decision:
        decision = decide(backend, system, asked)
        if decision.errors:
            fail_all(module, decision.errors)
        return decision

    decision = decided()
    pods = pods_by_claim(system, asked.state, decision)
    answer = report(decision, pods)
    answer["settled"] = not answer["changed"] and notes_to_keep(system, asked.record, decision) is None
    if not module.check_mode:
        if answer["changed"]:
            try:
                with undisturbed(asked, decision, "the module nvidia_gpu") as check:
                    decision = decided()
                    check(decision)
                    answer = {**report(decision, pods), "settled": False}
                    execute(backend, system, asked.record, decision.record, decision.plan)
            finally:
                if decision.plan.resets:
                    wake_driver(str(Path(asked.state).parent))
            for each in answer["devices"]:
                each["after"] = told(backend.knobs(each["uuid"], tuple(KEYS)))
        else:
            keep_notes(system, asked.record, decision)
    warn(module, decision)
    return with_diff(answer)


def work(module: AnsibleModule) -> dict[str, Any]:
    """Set GPUs; returns the module's result. Raises AcceleratorError."""
    try:
        asked = what_is_asked(module.params)
    except InvalidSettings as error:
        fail_all(module, [error])
    missing = find_binding("pynvml", module.params["interpreter"])
    if missing is not None:
        raise BackendUnavailable(
            missing,
            hint="Install the package nvidia-ml-py into one of them, for example with the role "
            "dra.accelerators.python_environment, or name another with the option interpreter.",
            code="binding-missing",
        )
    backend = NvidiaBackend(System(), record=asked.record)
    backend.number_by(str(Path(asked.state).parent))
    backend.open()
    try:
        return set_up(module, backend, asked)
    finally:
        backend.close()


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
