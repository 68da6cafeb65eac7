#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_driver
version_added: 0.1.0
short_description: Run the node driver as a systemd service and verify that it works
description:
  - Reloads the systemd units, enables them, and starts the node driver. If the running process was started from other files, according to
    O(fingerprint), the module restarts the driver.
  - If only the configuration file differs from the configuration of the running driver, the module reloads the driver. This includes manual
    changes of the file. If the driver rejects the file, the module fails.
  - A restart of a serving driver is without interruption. The module first starts the relief, a second instance with the desired files, which
    takes over from the driver. Then it restarts the driver, which takes over from the relief. If the relief does not serve, the driver keeps
    running unchanged.
  - Waits until the driver has started. An active systemd unit is not sufficient. The same process must have run for O(steady) seconds, and its
    C(status) must report that it is ready and has published its devices. The module does not use the objects in the API server, because they
    can be from a previous process.
  - Fails if the driver repeatedly ends, or if it is not ready within O(timeout). The error contains the last log lines of the driver.
  - With O(state=absent), stops the units, including the services that the driver has started for claims, and removes the driver's files from the
    kubelet's directories.
  - With O(state=absent), the module removes only the unit, the state, and the sockets of this driver. The unit file must have the collection's
    marker, the state must be a store of this driver, and its sockets must not be in use. It keeps all files of another driver with the same
    name.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
    details:
      - The module does not wait.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  state:
    description: V(started) starts the driver. V(absent) stops it and removes its files.
    type: str
    choices: [started, absent]
    default: started
  fingerprint:
    description:
      - The fingerprint of the release, the environment, and the configuration for the driver. The driver's unit sets it in the environment
        variable C(DRA_ACCELERATORS_FINGERPRINT).
      - If it is empty, the module starts a stopped driver and accepts any running driver.
    type: str
    default: ""
  units_changed:
    description: Whether previous tasks changed unit files. In check mode, whether they would change them.
    type: bool
    default: false
  configuration_changed:
    description:
      - In check mode, whether previous tasks would change the driver's configuration file.
      - Without check mode, the module compares the file with the configuration of the running driver.
    type: bool
    default: false
  helpers:
    description: Additional units to enable and start, or to stop with O(state=absent). The module does not wait for them.
    type: list
    elements: str
    default: []
  kubelet_root:
    description: With O(state=absent), the kubelet's root directory.
    type: path
    default: /var/lib/kubelet
  names:
    description: With O(state=absent), the names of the drivers whose state and sockets the module removes.
    type: list
    elements: str
    default: [gpu.nvidia.com]
  companions:
    description: With O(state=absent), whether to also stop and remove the services that the driver has started for claims.
    type: bool
    default: true
  root:
    description: The directory of the Python environment and the releases.
    type: path
    default: /opt/dra-accelerators
  configuration:
    description: The path of the driver's configuration file.
    type: path
    default: /etc/dra-accelerators/driver.yaml
  steady:
    description: The minimum uptime of the driver's process, in seconds.
    type: float
    default: 5
  timeout:
    description: The maximum wait for the start of the driver, in seconds.
    type: float
    default: 90
  patience:
    description:
      - The maximum wait of one call, in seconds. After that, the module returns the missing conditions in RV(waiting). It fails only after
        O(timeout). By default, one call waits for O(timeout).
      - The action plugin with the same name uses this option. It displays the missing conditions between two calls.
    type: float
  waited:
    description:
      - The part of O(timeout) that previous calls have already waited, in seconds. With a value of more than 0, the module only waits for the
        driver, and completes a restart with the relief.
    type: float
    default: 0
seealso:
  - module: dra.accelerators.node_info
"""

EXAMPLES = r"""
- name: Start the driver and verify that it works
  dra.accelerators.node_driver:
    fingerprint: 1f2e3d4c5b6a7988
    helpers: [dra-accelerators-token.timer]

- name: Stop the driver and remove its files
  dra.accelerators.node_driver:
    state: absent
    helpers: [dra-accelerators-token.timer]
"""

RETURN = r"""
steps:
  description: The performed systemd actions, each with C(action), C(unit), and C(reason). In check mode, the expected actions.
  returned: success
  type: list
  elements: dict
  sample:
    - action: restart
      unit: dra-accelerators-driver.service
      reason: it was started from another release, environment, or configuration
drivers:
  description: The driver's C(status) without its devices, one entry for each driver name. The list is empty in check mode.
  returned: success
  type: list
  elements: dict
  sample:
    - {driver: gpu.nvidia.com, ready: true, pid: 411, version: 0.1.0, published: true, problems: []}
device_count:
  description: The number of devices of all drivers, or 0 in check mode.
  returned: success
  type: int
  sample: 8
removed:
  description: With O(state=absent), the removed files and directories. In check mode, those to remove.
  returned: success
  type: list
  elements: str
  sample: [/var/lib/kubelet/plugins/gpu.nvidia.com/state.db]
kept:
  description: With O(state=absent), the files that do not belong to the driver and stay, with the reason.
  returned: success
  type: list
  elements: str
  sample: ["/var/lib/kubelet/plugins/gpu.nvidia.com/checkpoint.json: not a file of this driver"]
waiting:
  description: With O(patience), the missing conditions for a started driver.
  returned: success
  type: list
  elements: str
  sample: [gpu.nvidia.com has not published its devices]
pid:
  description: The process ID of the driver, or 0 if no process runs.
  returned: success
  type: int
  sample: 411
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._driver_service.leftovers import (
    companions_left,
    read_leftovers,
)
from ansible_collections.dra.accelerators.plugins.module_utils._driver_service.service_plan import (
    ServiceState,
    Step,
    age_of,
    can_be_relieved,
    leftovers,
    missing,
    not_relieved,
    plan_again,
    plan_start,
    plan_stop,
    plan_stop_companions,
    registrations,
    stamps,
    works_by_another,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.node_facts import (
    DRIVER_UNIT,
    RELIEF_INSTANCE,
    RELIEF_UNIT,
    fingerprint_in_environment,
    read_unit_facts,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.companions import LIST_UNITS
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

COMMAND_SECONDS = 60.0
STATUS_SECONDS = 20.0
PAUSE_SECONDS = 0.5
#: The number of log lines in an error.
LAST_LINES = 30


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "state": {"type": "str", "choices": ["started", "absent"], "default": "started"},
        "fingerprint": {"type": "str", "default": ""},
        "units_changed": {"type": "bool", "default": False},
        "configuration_changed": {"type": "bool", "default": False},
        "helpers": {"type": "list", "elements": "str", "default": []},
        "kubelet_root": {"type": "path", "default": "/var/lib/kubelet"},
        "names": {"type": "list", "elements": "str", "default": ["gpu.nvidia.com"]},
        "companions": {"type": "bool", "default": True},
        "root": {"type": "path", "default": "/opt/dra-accelerators"},
        "configuration": {"type": "path", "default": "/etc/dra-accelerators/driver.yaml"},
        "steady": {"type": "float", "default": 5.0},
        "timeout": {"type": "float", "default": 90.0},
        "patience": {"type": "float"},
        "waited": {"type": "float", "default": 0.0},
    }


class NotStarted(AcceleratorError):
    """The driver did not start within the timeout, or systemd rejected a step."""

    default_code = "driver-not-started"

    def __init__(self, message: str, *, hint: str = "", journal: list[str] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.journal = journal or []

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the last log lines of the driver."""
        return {**super().to_dict(), "journal": self.journal}


class Service:
    """The driver's service on this node."""

    def __init__(self, system: System, params: dict[str, Any]) -> None:
        self.system = system
        self.params = params
        self.began = time.monotonic()
        self.ticks = os.sysconf("SC_CLK_TCK")

    def fingerprint_of(self, pid: int) -> str:
        """Return the fingerprint of a process, or "" if the process has ended."""
        try:
            return fingerprint_in_environment(self.system.read_bytes(f"/proc/{pid}/environ")) if pid else ""
        except OSError:
            return ""

    def age(self, pid: int) -> float | None:
        """Return the age of a process in seconds, or None if the process has ended."""
        try:
            return age_of(self.system.read_text(f"/proc/{pid}/stat"), self.system.read_text("/proc/uptime"), self.ticks)
        except (OSError, ValueError):
            return None

    def status(self, instance: str = "") -> tuple[list[dict[str, Any]] | None, str]:
        """Return the status of the active driver or of an instance, or None with the problem."""
        root = self.params["root"]
        words = ["status", "--json", "--config", self.params["configuration"]]
        named = ["env", f"DRA_DRIVER_INSTANCE={instance}"] if instance else []
        program = f"{root}/current/dra_driver/run.py"
        argv = [*named, f"{root}/venv/bin/python", "-IB", program, "dra_driver.cli", *words]
        try:
            answer = self.system.run(argv, STATUS_SECONDS)
        except AcceleratorError as error:
            return None, str(error)
        try:
            found = json.loads(answer.stdout)
        except ValueError:
            output = answer.stderr.strip() or answer.stdout.strip() or "none"
            return (
                None,
                f"the command dra-driver status ended with {answer.returncode}, with the output: {output[-300:]}",
            )
        return [one for one in found if isinstance(one, dict)], ""

    def digest(self) -> str:
        """Return the digest of the configuration file as the driver computes it, or "" if the file does not exist."""
        try:
            return hashlib.sha256(self.system.read_bytes(self.params["configuration"])).hexdigest()[:16]
        except OSError:
            return ""

    def read_state(self, name: str = DRIVER_UNIT, instance: str = "") -> ServiceState:
        """Read the state of the driver, or of another instance, once."""
        unit = read_unit_facts(self.system, [name])[name]
        pid = unit["main_pid"]
        drivers, problem = self.status(instance) if pid and unit["active"] == "active" else (None, "")
        # If the process is the same before and after the answer, the answer is from this process.
        after = read_unit_facts(self.system, [name])[name] if drivers is not None else unit
        if after["main_pid"] != pid:
            return ServiceState(after["main_pid"], None, after["restarts"], after["active"], None)
        return ServiceState(pid, self.age(pid) if pid else None, unit["restarts"], unit["active"], drivers, problem)

    def journal(self, unit: str = DRIVER_UNIT) -> list[str]:
        """Return the last log lines of the driver, or of another unit."""
        argv = ["journalctl", "--unit", unit, "--lines", str(LAST_LINES), "--no-pager", "--output", "cat"]
        try:
            return self.system.run(argv, COMMAND_SECONDS).stdout.splitlines()
        except AcceleratorError:
            return []

    def missing_conditions(self) -> tuple[ServiceState, tuple[str, ...]]:
        """Return the state of the driver, and the missing conditions for its start."""
        state = self.read_state()
        wanted, running = self.params["fingerprint"], self.fingerprint_of(state.pid)
        steady, digest = self.params["steady"], self.digest()
        return state, missing(state, fingerprint=wanted, running=running, steady=steady, digest=digest)

    def missing_relief_conditions(self) -> tuple[ServiceState, tuple[str, ...]]:
        """Return the state of the relief instance, and the missing conditions for it to replace the driver."""
        state = self.read_state(RELIEF_UNIT, RELIEF_INSTANCE)
        wanted, running = self.params["fingerprint"], self.fingerprint_of(state.pid)
        steady, digest = self.params["steady"], self.digest()
        return state, not_relieved(state, fingerprint=wanted, running=running, steady=steady, digest=digest)

    def wait(
        self, missing_conditions: Callable[[], tuple[ServiceState, tuple[str, ...]]], unit: str
    ) -> tuple[ServiceState, tuple[str, ...]]:
        """Wait until no condition is missing or ``patience`` (seconds) is over. Return the state and the missing conditions. Raises NotStarted.

        A stopped relief instance ends the wait, because systemd does not restart it.
        """
        deadline = self.began + self.params["timeout"] - self.params["waited"]
        patience = self.params["patience"]
        while True:
            state, conditions = missing_conditions()
            if not conditions:
                return state, ()
            now = time.monotonic()
            is_stopped = unit == RELIEF_UNIT and state.active in ("failed", "inactive")
            if not is_stopped and patience is not None and self.began + patience <= now < deadline:
                return state, conditions
            if is_stopped or now >= deadline:
                within = "" if is_stopped else f" within {self.params['timeout']:.0f} s"
                raise NotStarted(
                    f"The node driver has not started{within}: {'; '.join(conditions)}",
                    hint=f"Read `journalctl --unit {unit}`.",
                    journal=self.journal(unit),
                )
            time.sleep(PAUSE_SECONDS)


def start(module: AnsibleModule, service: Service) -> dict[str, Any]:
    """Start or update the driver, and verify that it works. Raises NotStarted."""
    params = module.params
    units = read_unit_facts(service.system, [DRIVER_UNIT, RELIEF_UNIT, *params["helpers"]])
    pid = units[DRIVER_UNIT]["main_pid"]
    running = service.fingerprint_of(pid)
    wanted = params["fingerprint"] or running
    if params["waited"] > 0:
        steps = plan_again(units, running=running, wanted=wanted)
    else:
        drivers = service.status()[0] if pid and units[DRIVER_UNIT]["active"] == "active" else None
        steps = plan_start(
            units,
            helpers=params["helpers"],
            running=running,
            wanted=wanted,
            changed=params["units_changed"],
            outdated=(module.check_mode and params["configuration_changed"])
            or bool(works_by_another(drivers or (), service.digest())),
            relieved=can_be_relieved(drivers or (), pid),
        )
    result = {**result_of_steps(steps), "pid": pid}
    if module.check_mode:
        return result
    state, missing_conditions = run_and_verify(service, steps)
    ready = state.drivers or []
    return {
        **result,
        # Omit the names of devices, which can be hundreds, because playbooks keep this result of each node.
        "drivers": [{key: value for key, value in each.items() if key != "devices"} for each in ready],
        "device_count": sum(len(each.get("devices") or ()) for each in ready),
        "pid": state.pid,
        "waiting": list(missing_conditions),
    }


def run_and_verify(service: Service, steps: Sequence[Step]) -> tuple[ServiceState, tuple[str, ...]]:
    """Run the steps, each when its condition is met, and verify that the driver works.

    Returns the last state, and the missing conditions if ``patience`` is over. Raises NotStarted. If the relief instance
    does not serve, it is stopped first, and the driver continues to run unchanged.
    """
    is_continued = service.params["waited"] > 0
    uses_relief = is_continued or any(step.unit == RELIEF_UNIT and step.action != "stop" for step in steps)
    # A driver that was not restarted can be on standby, and serves after the relief instance has stopped.
    restarts = is_continued or any(step.unit == DRIVER_UNIT and step.action in ("start", "restart") for step in steps)
    for step in steps:
        missing_conditions: tuple[str, ...] = ()
        if uses_relief and (step.action, step.unit) == ("restart", DRIVER_UNIT):
            try:
                state, missing_conditions = service.wait(service.missing_relief_conditions, RELIEF_UNIT)
            except NotStarted:
                service.system.run(["systemctl", "stop", RELIEF_UNIT], COMMAND_SECONDS)
                raise
        elif restarts and (step.action, step.unit) == ("stop", RELIEF_UNIT):
            state, missing_conditions = service.wait(service.missing_conditions, DRIVER_UNIT)
        if missing_conditions:
            return state, missing_conditions
        run_steps(service, [step])
    return service.wait(service.missing_conditions, DRIVER_UNIT)


def remove(module: AnsibleModule, service: Service) -> dict[str, Any]:
    """Stop the driver and remove its files. Raises NotStarted, OSError."""
    params, system = module.params, service.system
    units = read_unit_facts(system, [DRIVER_UNIT, RELIEF_UNIT, *params["helpers"]])
    steps = (*plan_stop(units), *(plan_stop_companions(companions(system)) if params["companions"] else ()))
    if not module.check_mode:
        run_steps(service, steps)
    folders = {name: f"{params['kubelet_root']}/plugins/{name}" for name in params["names"]}
    owned, kept = [path for path in stamps(units) if system.exists(path)], []
    for name, folder in folders.items():
        registry = f"{params['kubelet_root']}/plugins_registry"
        known = registrations(registry, name, system.list_directory(registry))
        to_remove, others = leftovers(read_leftovers(system, folder, known), stopping=bool(steps) and module.check_mode)
        owned += to_remove
        kept += others
    if params["companions"]:
        owned += [path for path in companions_left(system) if system.exists(path)]
    if not module.check_mode:
        for path in owned:
            target = system.path(path)
            if target.is_dir() and not target.is_symlink():
                target.rmdir()
            else:
                target.unlink()
    result = result_of_steps(steps)
    result["diff"]["after"] += "".join(f"remove {path}\n" for path in owned)
    return {**result, "changed": bool(steps or owned), "removed": owned, "kept": kept, "pid": 0}


def companions(system: System) -> str:
    """Return systemd's list of the programs that the driver runs for claims. Raises NotStarted."""
    done = system.run(LIST_UNITS, COMMAND_SECONDS)
    if done.returncode != 0:
        raise NotStarted(f"{' '.join(LIST_UNITS)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def result_of_steps(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the module's result, as far as the steps determine it."""
    lines = [f"{step.action} {step.unit}".strip() + f": {step.reason}\n" for step in steps]
    return {
        "changed": bool(steps),
        "steps": [step.to_dict() for step in steps],
        "drivers": [],
        "device_count": 0,
        "removed": [],
        "kept": [],
        "waiting": [],
        "diff": {"before": "", "after": "".join(lines)},
    }


def run_steps(service: Service, steps: Sequence[Step]) -> None:
    """Run the steps. Raises NotStarted for a step that systemd, or the driver's reload, rejects."""
    for step in steps:
        done = service.system.run(step.argv(), max(COMMAND_SECONDS, service.params["timeout"]))
        # If the driver does not start, its own log explains that better. It is read afterwards.
        if done.returncode != 0 and not (
            step.unit in (DRIVER_UNIT, RELIEF_UNIT) and step.action in ("start", "restart")
        ):
            raise NotStarted(
                f"{' '.join(step.argv())} failed: {done.stderr.strip() or done.stdout.strip()}",
                hint=f"Read `journalctl --unit {step.unit}`." if step.unit else "",
                journal=service.journal() if step.unit == DRIVER_UNIT else None,
            )


def work(module: AnsibleModule) -> dict[str, Any]:
    """Start or remove the driver, and return the module's result. Raises NotStarted."""
    service = Service(System(), module.params)
    return start(module, service) if module.params["state"] == "started" else remove(module, service)


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
