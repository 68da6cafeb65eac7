#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_repartition
version_added: 0.1.0
short_description: Plan how the devices of a node get another layout under running pods, and hold those that change
description:
  - With O(state=planned) it says by what operations the devices of a node come to a layout. An operation is what is done at one go, on one device
    or on devices that are reset together. It names the partitions that go, the claims that hold them, and those published devices that nobody may be
    given meanwhile. Nothing is changed.
  - With O(state=present) an operation has begun, or has come to its next step. That is written down in the state folder of the node driver, which
    from then on prepares no claim on these devices, publishes them as it did before, and serves all others.
  - With O(state=absent) it has ended. The driver looks at the devices and publishes what they are, at once.
  - The playbook C(dra.accelerators.repartition) does all of it in order. The devices are changed by M(dra.accelerators.nvidia_mig) and
    M(dra.accelerators.ascend_vnpu), and pods are evicted by M(dra.accelerators.device_drain).
notes:
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
  diff_mode:
    support: full
    details:
      - With O(state=planned) one entry for each device that will change; otherwise the record before and after.
  idempotent:
    support: full
    details:
      - A record that says the same is written again only when more than a tenth of its time is over.
  platform:
    support: full
    platforms: linux
options:
  state:
    description:
      - V(planned) plans. V(present) writes the record of an operation, and V(absent) removes it.
    type: str
    choices: [planned, present, absent]
    default: planned
  layout:
    description:
      - Rules that say what the devices are to become, as in M(dra.accelerators.nvidia_mig). Needed for O(state=planned).
    type: list
    elements: dict
  former_layout:
    description:
      - The current rules of the node driver. By default they are read from the files that the roles M(dra.accelerators.nvidia_mig) and
        M(dra.accelerators.ascend_vnpu) have written.
    type: list
    elements: dict
  pods:
    description:
      - How many pods have a claim, by the claim's namespace and name joined by a slash. A claim that is not named counts as one.
    type: dict
    default: {}
  prefer:
    description:
      - What is disturbed the least, before anything else, where there are several ways to a layout. With V(pods) the pods that have what goes, and
        then partitions; with V(partitions) the other way round.
    type: str
    choices: [pods, partitions]
    default: pods
  reset:
    description:
      - Whether devices whose mode changes only by a reset can be reset. If it is not set, the module rejects an operation that needs a reset.
    type: str
    choices: [never, when_needed]
  settings:
    description:
      - Rules of settings, as in M(dra.accelerators.nvidia_gpu). Of these, what changes only while nobody uses the GPU becomes a part of the plan. That is
        C(ecc), which needs a reset, and a C(compute_mode) other than V(Default). All others are passed over.
    type: list
    elements: dict
    default: []
  settings_reset:
    description:
      - Whether GPUs can be reset for a change of C(ecc). If it is not set, the module rejects such an operation. With V(never) the
        plan does not contain ECC, and the change takes effect at the next reboot.
    type: str
    choices: [never, when_needed]
  vendor:
    description: The vendors of the devices, C(nvidia) and C(ascend). By default, all vendors that have devices on the node.
    type: list
    elements: str
    choices: [ascend, nvidia]
  driver:
    description: The name of the driver that publishes the devices. Needed for O(state=present) and O(state=absent).
    type: str
  operation:
    description:
      - The name of the operation. Needed for O(state=present). With O(state=absent) the record of another operation stays; without it
        every record goes.
    type: str
  devices:
    description: The UUIDs of the devices. Needed for O(state=present).
    type: list
    elements: str
  names:
    description: The names of published devices that nobody may be given meanwhile, for the record.
    type: list
    elements: str
    default: []
  wanted:
    description: Rules for these devices that say what they are to become, for the record.
    type: list
    elements: dict
    default: []
  former:
    description:
      - Rules for these devices that say what they are before the operation. What the record of the same operation says already stays.
    type: list
    elements: dict
    default: []
  step:
    description: What is done next.
    type: str
    choices: [draining, applying, publishing, reverting]
    default: draining
  reason:
    description:
      - Which step has failed, and why, in words, where the operation goes back (O(step=reverting)) or ends without its new layout (O(state=absent)).
      - The node driver makes an Event on the Node of each step, and says so there.
    type: str
    default: ""
  going:
    description:
      - The partitions that go, as RV(operations[].going) has them. With O(step=applying) it is waited until the node driver itself has unprepared
        every claim on them, by its own store; that the claim has gone from the API server does not count, since pods that are deleted by force
        give their claims back there before their containers have ended.
    type: list
    elements: dict
    default: []
  restarts:
    description: Whether everything on the devices ends, as RV(operations[].restarts) says, so that it is waited for every claim of them.
    type: bool
    default: false
  unprepare_timeout:
    description: How many seconds it is waited for that. Then the module fails and names the claims, and the step is not begun.
    type: int
    default: 300
  seconds:
    description:
      - For how long the devices are held from now on, at most six hours. A run that is killed holds them no longer than that.
    type: int
    default: 1800
seealso:
  - module: dra.accelerators.device_drain
  - module: dra.accelerators.nvidia_mig
  - module: dra.accelerators.ascend_vnpu
"""

EXAMPLES = r"""
- name: Say what a new layout means on this node
  dra.accelerators.device_repartition:
    layout:
      - match: {index: 0}
        mode: static
        partitions: {3g.40gb: 1, 2g.20gb: 1, 1g.10gb: 2}
  register: planned

- name: Hold a device for a quarter of an hour
  dra.accelerators.device_repartition:
    state: present
    driver: gpu.nvidia.com
    operation: "{{ planned.operations[0].operation }}"
    devices:
      - GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55
    wanted:
      - match: {uuid: GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55}
        mode: static
        partitions: [{profile: 3g.40gb, placement: 4}]
    former:
      - match: {uuid: GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55}
        mode: whole
    step: draining
    seconds: 900

- name: Let go of whatever an earlier run has left
  dra.accelerators.device_repartition:
    state: absent
    driver: gpu.nvidia.com
"""

RETURN = r"""
operations:
  description: What is done, in order. None where the devices have the layout.
  returned: O(state=planned)
  type: list
  elements: dict
  contains:
    operation:
      description: Its name, the same at each run for the same devices.
      type: str
      returned: success
      sample: repartition-4c1f0a6e2b7d
    vendor:
      description: The vendor of the devices.
      type: str
      returned: success
      sample: nvidia
    driver:
      description: The name of the driver that publishes them.
      type: str
      returned: success
      sample: gpu.nvidia.com
    devices:
      description: The devices, each with C(index), C(uuid), C(product), C(pci_address) and C(vendor).
      type: list
      elements: dict
      returned: success
      sample:
        - index: 0
          uuid: GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55
          product: NVIDIA H100 80GB HBM3
          pci_address: 0000:1b:00.0
          vendor: nvidia
    steps:
      description: What is done on them, each with C(step), what it is about, and a C(description).
      type: list
      elements: dict
      returned: success
      sample:
        - step: create_partition
          device_uuid: GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55
          profile: 2g.20gb
          start: 0
          size: 2
          description: create 2g.20gb at 0:2 on GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55
    going:
      description:
        - The partitions that go, each with C(device_uuid), C(profile), C(start), C(size), C(uuid) and the C(claims) that hold it. Those that the node
          driver has made for a claim go with the claim.
      type: list
      elements: dict
      returned: success
      sample: []
    kept:
      description: The partitions that stay, in the same form without claims.
      type: list
      elements: dict
      returned: success
      sample: []
    claims:
      description: The claims that have to end first, as namespace and name.
      type: list
      elements: str
      returned: success
      sample: ["team-a/training"]
    names:
      description: All names under which what changes may be published.
      type: list
      elements: str
      returned: success
      sample: [gpu-0]
    wanted:
      description: Rules for these devices alone, with the places that were chosen.
      type: list
      elements: dict
      returned: success
      sample: []
    former:
      description: Rules for these devices that bring back what was there before the operation was begun, by this run or an earlier one.
      type: list
      elements: dict
      returned: success
      sample: []
    resets:
      description: Whether devices are reset.
      type: bool
      returned: success
      sample: false
    restarts:
      description: Whether everything on the devices ends, partitions that come back included.
      type: bool
      returned: success
      sample: false
    settings:
      description: Rules of settings that change meanwhile, for M(dra.accelerators.nvidia_gpu).
      type: list
      elements: dict
      returned: success
      sample: [{match: {uuid: [GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55]}, ecc: false}]
    former_settings:
      description: Rules that set them back.
      type: list
      elements: dict
      returned: success
      sample: [{match: {uuid: [GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55]}, ecc: true}]
    emptied:
      description: Where settings change, rules that leave nothing on the devices, in their mode.
      type: list
      elements: dict
      returned: success
      sample: []
    resumes:
      description: Whether an earlier run has begun it.
      type: bool
      returned: success
      sample: false
    tells_driver:
      description: Whether the node driver has to be told the devices' new rules, since it publishes them in another way then.
      type: bool
      returned: success
      sample: false
    driver_layout_before:
      description: The node's layout before the operation, for the node driver and for the next boot.
      type: list
      elements: dict
      returned: success
      sample: []
    driver_layout:
      description: The node's layout after the operation.
      type: list
      elements: dict
      returned: success
      sample: []
unfinished:
  description: Operations that an earlier run has begun and not ended, each with C(driver), C(operation), C(devices), C(step) and more.
  returned: O(state=planned)
  type: list
  elements: dict
  sample: []
untouched:
  description: The devices that no operation is about.
  returned: O(state=planned)
  type: list
  elements: dict
  sample: []
vendors:
  description: The vendors whose devices were looked at.
  returned: O(state=planned)
  type: list
  elements: str
  sample: [nvidia]
rules_differ:
  description: Whether the rules that the driver works by are others than O(layout), be there an operation or not.
  returned: O(state=planned)
  type: bool
  sample: true
unmatched:
  description: The devices that no rule matches.
  returned: O(state=planned)
  type: list
  elements: str
  sample: []
unread:
  description: The devices that cannot be read, and keep what they have.
  returned: O(state=planned)
  type: list
  elements: str
  sample: []
before:
  description: The devices as they are, each with C(device), C(uuid), C(mode) and C(partitions).
  returned: O(state=planned)
  type: list
  elements: dict
  sample: []
after:
  description: The devices when all is done, in the same form.
  returned: O(state=planned)
  type: list
  elements: dict
  sample: []
record:
  description: The operation that is written down, or was.
  returned: O(state=present) and O(state=absent)
  type: dict
  sample: {}
claims:
  description: The claims that the node driver still has prepared on what goes.
  returned: failure with RV(error_code=still-prepared)
  type: list
  elements: str
  sample: ["team-a/training"]
error_code:
  description:
    - A stable word for the kind of the error, such as V(reset-needs-consent), V(does-not-fit), V(in-use), V(still-prepared), V(other-operation) or
      V(several).
  returned: failure
  type: str
  sample: does-not-fit
errors:
  description: All errors, each with its code and what it names.
  returned: when the layout is refused
  type: list
  elements: dict
  sample:
    - {code: does-not-fit, message: it does not fit, hint: "", blockers: []}
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._layout_module import look_at
from ansible_collections.dra.accelerators.plugins.module_utils._module import (
    INTERPRETER_OPTION,
    end,
    fail_all,
    find_binding,
    run,
)
from ansible_collections.dra.accelerators.plugins.module_utils._repartition import Vendor, difference, node_plan
from ansible_collections.dra.accelerators.plugins.module_utils._state_directory import (
    STATE_DIRECTORY_OPTIONS,
    check_one_vendor,
    state_directory_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core import repartition_record as records
from ansible_collections.dra.accelerators.plugins.module_utils.core import repartition_steps as steps
from ansible_collections.dra.accelerators.plugins.module_utils.core.backend import BACKENDS, vendors_there
from ansible_collections.dra.accelerators.plugins.module_utils.core.backend_protocol import Backend
from ansible_collections.dra.accelerators.plugins.module_utils.core.device_locks import DeviceLocks
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError, InUse
from ansible_collections.dra.accelerators.plugins.module_utils.core.layout_rules import parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Device
from ansible_collections.dra.accelerators.plugins.module_utils.core.node_settings import parse_settings
from ansible_collections.dra.accelerators.plugins.module_utils.core.packing import PODS, PREFERENCES
from ansible_collections.dra.accelerators.plugins.module_utils.core.prepared import (
    prepared_claims,
    prepared_partitions,
    wake_driver,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition import still_held
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition_record import Moment, Record
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition_settings import Unrest, unrest
from ansible_collections.dra.accelerators.plugins.module_utils.core.settings import COMPUTE_MODE, ECC
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

PLANNED = "planned"
PRESENT = "present"
ABSENT = "absent"
#: Where the roles write the layout for the next boot: all of them the whole of it.
LAYOUT_FILES = ("/etc/dra-accelerators/layout.json", "/etc/dra-accelerators/layout-ascend.json")
#: How long claims that are being prepared on the devices may take until they count as held.
LOCK_SECONDS = 60.0
CONSTRAINTS: dict[str, Any] = {
    "required_if": [
        ("state", PLANNED, ["layout"]),
        ("state", PRESENT, ["driver", "operation", "devices"]),
        ("state", ABSENT, ["driver"]),
    ]
}


def argument_spec() -> dict[str, Any]:
    # What a rule may hold is checked by the core, which names the rule, and which the node driver shares.
    rules: dict[str, Any] = {"type": "list", "elements": "dict"}
    return {
        **INTERPRETER_OPTION,
        "state": {"type": "str", "choices": [PLANNED, PRESENT, ABSENT], "default": PLANNED},
        "layout": rules,
        "former_layout": rules,
        "pods": {"type": "dict", "default": {}},
        "prefer": {"type": "str", "choices": list(PREFERENCES), "default": PODS},
        "reset": {"type": "str", "choices": ["never", "when_needed"]},
        "settings": {**rules, "default": []},
        "settings_reset": {"type": "str", "choices": ["never", "when_needed"]},
        "vendor": {"type": "list", "elements": "str", "choices": sorted(BACKENDS)},
        **STATE_DIRECTORY_OPTIONS,
        "driver": {"type": "str"},
        "operation": {"type": "str"},
        "devices": {"type": "list", "elements": "str"},
        "names": {"type": "list", "elements": "str", "default": []},
        "wanted": {**rules, "default": []},
        "former": {**rules, "default": []},
        "step": {"type": "str", "choices": list(records.STEPS), "default": records.DRAINING},
        "reason": {"type": "str", "default": ""},
        "going": {**rules, "default": []},
        "restarts": {"type": "bool", "default": False},
        "unprepare_timeout": {"type": "int", "default": 300},
        "seconds": {"type": "int", "default": 1800},
    }


def former_documents(system: System, given: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the rules that the driver works by, as they were written; none where nobody has written any. Raises AcceleratorError."""
    if given is not None:
        return given
    for path in LAYOUT_FILES:
        if system.exists(path):
            try:
                found = json.loads(system.read_text(path))
            except ValueError as error:
                raise AcceleratorError(
                    f"{path} cannot be read: {error}",
                    hint="The roles nvidia_mig and ascend_vnpu write it; run the playbook site, or give former_layout.",
                    code="layout-unreadable",
                ) from error
            return list(found)
    return []


def planned(module: AnsibleModule, system: System) -> dict[str, Any]:
    """Look at the devices and plan; nothing is changed."""
    params = module.params
    rules = parse_rules(params["layout"])
    documents = former_documents(system, params["former_layout"])
    vendors = tuple(dict.fromkeys(params["vendor"] or vendors_there(system)))
    check_one_vendor(params, vendors)
    if "nvidia" in vendors:
        # A binding that is nowhere to be found is a driver that is not there: the backend says so when it is opened.
        find_binding("pynvml", params["interpreter"])
    found = []
    settings = parse_settings(params["settings"])
    for word in vendors:
        backend = BACKENDS[word](system)
        directory = state_directory_of(params, backend.driver_name)
        record = records.read(system, directory)
        backend.open()
        try:
            look = look_at(backend, f"{directory}/state.db")
            found.append(Vendor(backend, look, record, unrest_of(backend, look.devices, params) if settings else {}))
        finally:
            backend.close()
    pods = {str(claim): int(number) for claim, number in params["pods"].items()}
    answer, errors = node_plan(
        found,
        rules,
        parse_rules(documents),
        documents,
        pods=pods,
        reset=params["reset"],
        prefer=params["prefer"],
        settings_reset=params["settings_reset"],
    )
    if errors:
        fail_all(module, errors)
    return {
        "changed": False,
        **answer,
        "vendors": list(vendors),
        "rules_differ": documents != params["layout"],
        "diff": difference(answer["before"], answer["after"]),
    }


def unrest_of(backend: Backend, devices: Sequence[Device], params: dict[str, Any]) -> dict[str, Unrest]:
    """Return which settings have to change while nobody uses a device, by its UUID. Raises AcceleratorError."""
    rules = parse_settings(params["settings"])
    found = {}
    for device in devices:
        knobs = backend.knobs(
            device.uuid, (ECC, COMPUTE_MODE) if params["settings_reset"] != "never" else (COMPUTE_MODE,)
        )
        change = unrest(device, knobs, rules)
        if change is not None:
            found[device.uuid] = change
    return found


def wanted_record(params: dict[str, Any], there: Record | None, now: Moment) -> Record:
    """Return the desired record. Raises InUse with code other-operation."""
    if there is not None and there.operation != params["operation"] and there.holds(now):
        raise InUse(
            f"The operation {there.operation} is under way ({there.step}), on {', '.join(there.devices)}",
            hint="Let it end. If nobody runs it any more, end it with state absent.",
            code="other-operation",
        )
    same = there is not None and there.operation == params["operation"]
    return Record(
        operation=params["operation"],
        devices=tuple(params["devices"]),
        step=params["step"],
        until=0.0,
        wanted=tuple(params["wanted"]),
        former=there.former if there is not None and same and there.former else tuple(params["former"]),
        names=tuple(params["names"]),
    ).held_for(params["seconds"], now)


def is_fresh(wanted: Record, there: Record | None, now: Moment) -> bool:
    """Return whether the existing record equals the desired record and more than nine tenths of its time remain."""
    return (
        there is not None
        and replace(there, until=wanted.until, boottime=wanted.boottime) == wanted
        and there.remaining(now) > 0.9 * wanted.seconds
    )


def await_unprepared(
    look: Callable[[], Sequence[str]],
    driver: str,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the driver has nothing prepared on what goes. Raises InUse with code still-prepared, naming the claims."""
    deadline = clock() + seconds
    while claims := look():
        if clock() >= deadline:
            raise InUse(
                f"After {seconds:g} s the node driver {driver} still has {', '.join(claims)} prepared on what goes, expected none",
                claims=claims,
                hint="The kubelet has it unprepared when the pod's containers have ended. See that both run, what their logs say of the claim, "
                "and run again, which goes on from here.",
                code="still-prepared",
            )
        sleep(1.0)


def held_on_what_goes(params: dict[str, Any], directory: str) -> tuple[str, ...]:
    """Return the claims that the driver has prepared on what goes, by its own store. Raises AcceleratorError."""
    return still_held(
        prepared_partitions(prepared_claims(f"{directory}/state.db")),
        parse_rules(params["wanted"]),
        [(str(each["device_uuid"]), int(each["start"]), int(each["size"])) for each in params["going"]],
        params["restarts"],
        params["devices"],
    )


def present(module: AnsibleModule, system: System, directory: str) -> dict[str, Any]:
    """Write down that an operation has begun or gone on; when this returns, nobody is preparing a claim on the devices."""
    params = module.params
    if not 0 < params["seconds"] <= records.LONGEST_SECONDS:
        end(module, msg=f"seconds is {params['seconds']}, expected 1 to {records.LONGEST_SECONDS:g}")
    for rules in (params["wanted"], params["former"]):
        parse_rules(rules)
    if params["step"] == records.APPLYING and not module.check_mode:
        await_unprepared(
            lambda: held_on_what_goes(params, directory), str(params["driver"]), float(params["unprepare_timeout"])
        )
    there, now = records.read(system, directory), records.moment(system)
    wanted = wanted_record(params, there, now)
    changed = not is_fresh(wanted, there, now)
    if changed and not module.check_mode:
        if not system.exists(directory):
            raise AcceleratorError(
                f"There is no folder {directory}: no node driver {params['driver']} has run here",
                hint="Run the playbook site first.",
                code="no-driver",
            )
        # Who holds a device's lock prepares a claim on it, and has not seen the record.
        with DeviceLocks(directory, "the module device_repartition").hold(params["devices"], LOCK_SECONDS):
            records.write(system, directory, wanted)
            tell(module, system, directory, steps.begun(there, wanted, params["reason"], now.wall))
    before = there.to_dict() if there is not None else {}
    return {"changed": changed, "record": wanted.to_dict(), "diff": {"before": before, "after": wanted.to_dict()}}


def tell(module: AnsibleModule, system: System, directory: str, taken: steps.Taken | None) -> None:
    """Write a step down for the node driver, which makes an Event of it. Nothing depends on it, so that a full disk is only warned of."""
    if taken is None:
        return
    try:
        steps.add(system, directory, taken)
    except OSError as error:
        module.warn(f"The step {taken.step} of the operation {taken.operation} is in no Event: {error}")


def absent(module: AnsibleModule, system: System, directory: str) -> dict[str, Any]:
    """Forget the operation, and have the driver look at what the devices are now."""
    there = records.read(system, directory)
    named = module.params["operation"]
    changed = there is not None and named in (None, there.operation)
    if changed and not module.check_mode:
        records.remove(system, directory)
        if there is not None:
            tell(module, system, directory, steps.over(there, module.params["reason"], time.time()))
        wake_driver(directory)
    before = there.to_dict() if there is not None else {}
    return {"changed": changed, "record": before, "diff": {"before": before, "after": {} if changed else before}}


def work(module: AnsibleModule) -> dict[str, Any]:
    params, system = module.params, System()
    if params["state"] == PLANNED:
        return planned(module, system)
    directory = state_directory_of(params, params["driver"])
    return (present if params["state"] == PRESENT else absent)(module, system, directory)


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
