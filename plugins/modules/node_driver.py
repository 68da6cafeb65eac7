#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_driver
version_added: 0.1.0
short_description: Run the node driver as a service, and see that it works
description:
  - Has systemd read the units again, enables them, and starts the node driver, or starts it again where the process that
    runs was started from something else, by O(fingerprint). Where only its configuration file is another one than it works by, after a
    change by hand as well, the driver takes the file over without a new process, and one that it refuses is a failure.
  - A driver that serves is started again without a gap. Another instance of what is wanted comes up beside it, as the relief, and takes
    over. Only then the driver is started again, and takes over in its turn. Where the relief does not serve the driver goes on as it was.
  - Then waits until the driver has started, which is more than a unit that systemd calls active. One and the same process has
    run for some seconds, and its own C(status) says that it is ready and has published its devices. What the API server
    still holds of a former process is not believed.
  - A driver that ends again and again, or that is not ready in time, is a failure that quotes what the driver said last.
  - With O(state=absent), stops the units, those that the driver has started for claims among them, and removes what the driver
    has left in the kubelet's folders, but only what is shown to be this driver's. Its own unit's file bears the collection's
    mark, its state is a store of its own, and nobody listens on its sockets any more. Another driver of the same name keeps
    everything.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - Nothing is waited for.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  state:
    description: Whether the driver is to run, or to be gone.
    type: str
    choices: [started, absent]
    default: started
  fingerprint:
    description:
      - What the driver is to run from, in one word that its unit puts into C(DRA_ACCELERATORS_FINGERPRINT).
      - Empty starts a driver that does not run, and takes one that runs as it is.
    type: str
    default: ""
  units_changed:
    description: Whether files of the units were written, or would have been in check mode.
    type: bool
    default: false
  configuration_changed:
    description:
      - In check mode, whether the driver's configuration file would have been written.
      - Otherwise the file that is there is compared with what the driver works by.
    type: bool
    default: false
  helpers:
    description: Further units that are enabled and started, and not waited for; or stopped.
    type: list
    elements: str
    default: []
  kubelet_root:
    description: With O(state=absent), the kubelet's root folder.
    type: path
    default: /var/lib/kubelet
  names:
    description: With O(state=absent), the driver names whose state and sockets are looked for.
    type: list
    elements: str
    default: [gpu.nvidia.com]
  companions:
    description: With O(state=absent), whether the services that the driver has started for claims are stopped, and removed, too.
    type: bool
    default: true
  root:
    description: Folder of the Python environment and the releases.
    type: path
    default: /opt/dra-accelerators
  configuration:
    description: The driver's configuration file.
    type: path
    default: /etc/dra-accelerators/driver.yaml
  steady:
    description: How long one and the same process has to have run, in seconds.
    type: float
    default: 5
  timeout:
    description: How long the driver may take until it counts as started, in seconds.
    type: float
    default: 90
  patience:
    description:
      - How long one call waits at most, in seconds, until it answers with what it is still C(waiting) for. That is no failure before
        O(timeout) is over. By default one call waits as long as O(timeout).
      - The action plugin of this name calls the module so, and tells between two calls what a node waits for.
    type: float
  waited:
    description:
      - For how long of O(timeout) former calls have waited already, in seconds. With more than 0, systemd is told nothing any more,
        and the driver is only waited for.
    type: float
    default: 0
seealso:
  - module: dra.accelerators.node_info
"""

EXAMPLES = r"""
- name: Run the driver
  dra.accelerators.node_driver:
    fingerprint: 1f2e3d4c5b6a7988
    helpers: [dra-accelerators-token.timer]

- name: Stop it, and remove what it has left
  dra.accelerators.node_driver:
    state: absent
    helpers: [dra-accelerators-token.timer]
"""

RETURN = r"""
steps:
  description: What systemd was told, or would be, each with C(action), C(unit) and C(reason).
  returned: success
  type: list
  elements: dict
  sample:
    - action: restart
      unit: dra-accelerators-driver.service
      reason: it was started from another release, environment or configuration
drivers:
  description: What the driver's C(status) says, one entry for each driver name; empty in check mode.
  returned: success
  type: list
  elements: dict
  sample:
    - {driver: gpu.nvidia.com, ready: true, pid: 411, version: 0.1.0, published: true, problems: []}
removed:
  description: With O(state=absent), the files and folders that were removed, or would be.
  returned: success
  type: list
  elements: str
  sample: [/var/lib/kubelet/plugins/gpu.nvidia.com/state.db]
kept:
  description: With O(state=absent), what is somebody else's and stays, with the reason.
  returned: success
  type: list
  elements: str
  sample: ["/var/lib/kubelet/plugins/gpu.nvidia.com/checkpoint.json: not a file of this driver"]
waiting:
  description: With O(patience), what is still missing until the driver counts as started.
  returned: success
  type: list
  elements: str
  sample: [gpu.nvidia.com has not published its devices]
pid:
  description: The driver's process; 0 in check mode if none runs.
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
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._node import (
    DRIVER_UNIT,
    RELIEF_INSTANCE,
    RELIEF_UNIT,
    ask_units,
    started_from,
)
from ansible_collections.dra.accelerators.plugins.module_utils._service import (
    Look,
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
from ansible_collections.dra.accelerators.plugins.module_utils._service_state import companions_left, look_at_state
from ansible_collections.dra.accelerators.plugins.module_utils.core.companions import LIST_UNITS
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

COMMAND_SECONDS = 60.0
STATUS_SECONDS = 20.0
PAUSE_SECONDS = 0.5
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
    """The driver did not start in time, or systemd refused a step."""

    default_code = "driver-not-started"

    def __init__(self, message: str, *, hint: str = "", journal: list[str] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.journal = journal or []

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the driver's last words."""
        return {**super().to_dict(), "journal": self.journal}


class Service:
    """The driver's service on this node."""

    def __init__(self, system: System, params: dict[str, Any]) -> None:
        self.system = system
        self.params = params
        self.began = time.monotonic()
        self.ticks = os.sysconf("SC_CLK_TCK")

    def running(self, pid: int) -> str:
        """Return the fingerprint of a process; nothing if it is gone."""
        try:
            return started_from(self.system.read_bytes(f"/proc/{pid}/environ")) if pid else ""
        except OSError:
            return ""

    def age(self, pid: int) -> float | None:
        """Return how long a process has run, in seconds; None if it is gone."""
        try:
            return age_of(self.system.read_text(f"/proc/{pid}/stat"), self.system.read_text("/proc/uptime"), self.ticks)
        except (OSError, ValueError):
            return None

    def status(self, instance: str = "") -> tuple[list[dict[str, Any]] | None, str]:
        """Return what the driver's own status says, or None and why there is no answer; that of who serves, or of an instance."""
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
            said = answer.stderr.strip() or answer.stdout.strip() or "nothing"
            return None, f"its status ended with {answer.returncode} and said: {said[-300:]}"
        return [one for one in found if isinstance(one, dict)], ""

    def digest(self) -> str:
        """Return the digest of the configuration file, as the driver makes it; nothing where there is no file."""
        try:
            return hashlib.sha256(self.system.read_bytes(self.params["configuration"])).hexdigest()[:16]
        except OSError:
            return ""

    def look(self, name: str = DRIVER_UNIT, instance: str = "") -> Look:
        """Look at the driver, or at another instance of it, once."""
        unit = ask_units(self.system, [name])[name]
        pid = unit["main_pid"]
        drivers, problem = self.status(instance) if pid and unit["active"] == "active" else (None, "")
        # The same process before and after the answer: the answer is its.
        after = ask_units(self.system, [name])[name] if drivers is not None else unit
        if after["main_pid"] != pid:
            return Look(after["main_pid"], None, after["restarts"], after["active"], None)
        return Look(pid, self.age(pid) if pid else None, unit["restarts"], unit["active"], drivers, problem)

    def journal(self, unit: str = DRIVER_UNIT) -> list[str]:
        """Return the last words of the driver, or of another unit."""
        argv = ["journalctl", "--unit", unit, "--lines", str(LAST_LINES), "--no-pager", "--output", "cat"]
        try:
            return self.system.run(argv, COMMAND_SECONDS).stdout.splitlines()
        except AcceleratorError:
            return []

    def lacks(self) -> tuple[Look, tuple[str, ...]]:
        """Look at the driver; return also what is still missing until it counts as started."""
        look = self.look()
        wanted, running = self.params["fingerprint"], self.running(look.pid)
        steady, digest = self.params["steady"], self.digest()
        return look, missing(look, fingerprint=wanted, running=running, steady=steady, digest=digest)

    def relief_lacks(self) -> tuple[Look, tuple[str, ...]]:
        """Look at the relief; return also what is still missing until it serves in the driver's place."""
        look = self.look(RELIEF_UNIT, RELIEF_INSTANCE)
        wanted, running = self.params["fingerprint"], self.running(look.pid)
        steady, digest = self.params["steady"], self.digest()
        return look, not_relieved(look, fingerprint=wanted, running=running, steady=steady, digest=digest)

    def wait(self, lacks: Callable[[], tuple[Look, tuple[str, ...]]], unit: str) -> tuple[Look, tuple[str, ...]]:
        """Wait until nothing is missing, or patience ends; returns also what still is. Raises NotStarted.

        A relief that has ended is not waited for: nothing starts it again.
        """
        deadline = self.began + self.params["timeout"] - self.params["waited"]
        patience = self.params["patience"]
        while True:
            look, left = lacks()
            if not left:
                return look, ()
            now = time.monotonic()
            over = unit == RELIEF_UNIT and look.active in ("failed", "inactive")
            if not over and patience is not None and self.began + patience <= now < deadline:
                return look, left
            if over or now >= deadline:
                within = "" if over else f" within {self.params['timeout']:.0f} s"
                raise NotStarted(
                    f"The node driver has not started{within}: {'; '.join(left)}",
                    hint=f"Read `journalctl --unit {unit}`.",
                    journal=self.journal(unit),
                )
            time.sleep(PAUSE_SECONDS)


def start(module: AnsibleModule, service: Service) -> dict[str, Any]:
    """Run the driver and see that it works. Raises NotStarted."""
    params = module.params
    units = ask_units(service.system, [DRIVER_UNIT, RELIEF_UNIT, *params["helpers"]])
    pid = units[DRIVER_UNIT]["main_pid"]
    running = service.running(pid)
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
    result = {**outcome(steps), "pid": pid}
    if module.check_mode:
        return result
    look, lacks = carry_out(service, steps)
    return {**result, "drivers": list(look.drivers or []), "pid": look.pid, "waiting": list(lacks)}


def carry_out(service: Service, steps: Sequence[Step]) -> tuple[Look, tuple[str, ...]]:
    """Take the steps, each when its time has come, and see that the driver works.

    Returns what was last seen, and what is still missing where patience has ended. Raises NotStarted; a relief that does not serve is
    stopped before that, and the driver goes on as it was.
    """
    again = service.params["waited"] > 0
    relieved = again or any(step.unit == RELIEF_UNIT and step.action != "stop" for step in steps)
    # A driver that was not started again stands by, perhaps, and serves when the relief has gone.
    restarted = again or any(step.unit == DRIVER_UNIT and step.action in ("start", "restart") for step in steps)
    for step in steps:
        lacks: tuple[str, ...] = ()
        if relieved and (step.action, step.unit) == ("restart", DRIVER_UNIT):
            try:
                look, lacks = service.wait(service.relief_lacks, RELIEF_UNIT)
            except NotStarted:
                service.system.run(["systemctl", "stop", RELIEF_UNIT], COMMAND_SECONDS)
                raise
        elif restarted and (step.action, step.unit) == ("stop", RELIEF_UNIT):
            look, lacks = service.wait(service.lacks, DRIVER_UNIT)
        if lacks:
            return look, lacks
        take(service, [step])
    return service.wait(service.lacks, DRIVER_UNIT)


def remove(module: AnsibleModule, service: Service) -> dict[str, Any]:
    """Stop the driver and remove what is its. Raises NotStarted, OSError."""
    params, system = module.params, service.system
    units = ask_units(system, [DRIVER_UNIT, RELIEF_UNIT, *params["helpers"]])
    too = params["companions"]
    steps = (*plan_stop(units), *(plan_stop_companions(companions(system)) if too else ()))
    if not module.check_mode:
        take(service, steps)
    folders = {name: f"{params['kubelet_root']}/plugins/{name}" for name in params["names"]}
    owned, kept = [path for path in stamps(units) if system.exists(path)], []
    for name, folder in folders.items():
        registry = f"{params['kubelet_root']}/plugins_registry"
        known = registrations(registry, name, system.list_directory(registry))
        mine, others = leftovers(look_at_state(system, folder, known), stopping=bool(steps) and module.check_mode)
        owned += mine
        kept += others
    owned += [path for path in companions_left(system) if too and system.exists(path)]
    if not module.check_mode:
        for path in owned:
            target = system.path(path)
            target.rmdir() if target.is_dir() and not target.is_symlink() else target.unlink()
    result = outcome(steps)
    result["diff"]["after"] += "".join(f"remove {path}\n" for path in owned)
    return {**result, "changed": bool(steps or owned), "removed": owned, "kept": kept, "pid": 0}


def companions(system: System) -> str:
    """Return what systemd lists of the programs that the driver runs for claims. Raises NotStarted."""
    done = system.run(LIST_UNITS, COMMAND_SECONDS)
    if done.returncode != 0:
        raise NotStarted(f"{' '.join(LIST_UNITS)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def outcome(steps: Sequence[Step]) -> dict[str, Any]:
    """The module's result as far as the steps make it."""
    lines = [f"{step.action} {step.unit}".strip() + f": {step.reason}\n" for step in steps]
    return {
        "changed": bool(steps),
        "steps": [step.to_dict() for step in steps],
        "drivers": [],
        "removed": [],
        "kept": [],
        "waiting": [],
        "diff": {"before": "", "after": "".join(lines)},
    }


def take(service: Service, steps: Sequence[Step]) -> None:
    """Take the steps. Raises NotStarted for one that systemd, or the driver's own reload, refuses."""
    for step in steps:
        done = service.system.run(step.argv(), max(COMMAND_SECONDS, service.params["timeout"]))
        # A driver that does not start is better explained by what it says itself, afterwards.
        if done.returncode != 0 and not (
            step.unit in (DRIVER_UNIT, RELIEF_UNIT) and step.action in ("start", "restart")
        ):
            raise NotStarted(
                f"{' '.join(step.argv())} failed: {done.stderr.strip() or done.stdout.strip()}",
                hint=f"Read `journalctl --unit {step.unit}`." if step.unit else "",
                journal=service.journal() if step.unit == DRIVER_UNIT else None,
            )


def work(module: AnsibleModule) -> dict[str, Any]:
    """Run the driver, or take it away; returns the module's result. Raises NotStarted."""
    service = Service(System(), module.params)
    return start(module, service) if module.params["state"] == "started" else remove(module, service)


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
