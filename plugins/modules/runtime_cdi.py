#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: runtime_cdi
version_added: 0.1.0
short_description: Have the container runtime of a node hand CDI devices to containers
description:
  - Sets up the runtime that the kubelet uses, containerd, CRI-O, Docker Engine, or the containerd of k3s, RKE2, and MicroK8s. Where it has
    CDI on and reads the right directories, nothing is changed.
  - The change is the least one that does it. It is tried before it is made where the runtime has a command for that, and nothing else than
    CDI may change by it.
  - The runtime is restarted only where that is needed, and has to say itself that it reads the folders. If it does not, the files are
    put back and it is restarted once more.
  - For containerd it does what M(dra.accelerators.containerd_config) does. The main file is the one that the process was started with by
    C(--config), and the socket the one of C(--address). For the containerd of k3s, RKE2, and MicroK8s a drop-in file is written in
    the folder that their generated settings import, and their unit is restarted; one that imports none is refused, with what to do.
  - For CRI-O a drop-in file names the folders, C(crio config) of copies proves that nothing else changes, and what the running
    process answers to C(GET /config) on its socket proves the rest. CRI-O is restarted and not reloaded, because that answer does not show
    what a reload has changed.
  - For Docker Engine the keys C(features.cdi) and C(cdi-spec-dirs) are set in its configuration file, all others stay in their order.
    C(dockerd --validate) tries the file and C(docker info) is the proof. Docker reads both keys at its start alone. Where a
    restart would stop containers that run, it is refused unless O(docker.stop_containers) is true.
notes:
  - Needs root on the node.
  - Containers go on while containerd, CRI-O, k3s and RKE2 restart; those of Docker Engine do where its C(live-restore) is on.
  - Records of what was changed are kept in O(records), for O(state=absent).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - The trial is made in check mode as well, so that refusals are the same. On a node that has no library that reads TOML yet,
        check mode says so in a warning and predicts nothing.
  diff_mode:
    support: full
    details:
      - The lines that change and those around them; of Docker's file what it says of CDI, because it may hold passwords.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  state:
    description:
      - V(present) has the runtime hand CDI devices to containers.
      - V(absent) takes back what V(present) has changed, and nothing else. A file that was changed since keeps all but the keys of this
        module. With O(runtime=auto) it is taken back for each runtime that was set up.
    type: str
    choices: [present, absent]
    default: present
  runtime:
    description:
      - The runtime that is to be set up.
      - V(auto) looks at which service is running; where several are, the kubelet's endpoint decides, by its command line or its
        configuration file. Where none is running, one that has failed is the one, containerd before others.
      - V(auto) refuses Docker Engine behind cri-dockerd, of which most releases hand no CDI devices to pods.
    type: str
    choices: [auto, containerd, cri-o, docker, k3s, microk8s, rke2]
    default: auto
  cdi_folders:
    description:
      - Folders that the runtime has to read CDI files from. Folders that it reads already stay. They are made if missing.
    type: list
    elements: path
    default:
      - /etc/cdi
      - /var/run/cdi
  containerd:
    description: Where containerd is.
    type: dict
    default: {}
    suboptions:
      command:
        description: containerd's command.
        type: str
        default: containerd
      config:
        description: containerd's main configuration file.
        type: path
        default: /etc/containerd/config.toml
      drop_ins:
        description:
          - Folder of drop-in files. It is used if containerd imports its files; if it imports those of another folder, that one is used.
        type: path
        default: /etc/containerd/conf.d
      service:
        description: The systemd unit that runs containerd.
        type: str
        default: containerd.service
      timeout:
        description: How many seconds containerd may take to restart.
        type: int
        default: 60
  crio:
    description: Where CRI-O is.
    type: dict
    default: {}
    suboptions:
      command:
        description: CRI-O's program, of release 1.28 or newer.
        type: str
        default: crio
      config:
        description: CRI-O's main configuration file.
        type: path
        default: /etc/crio/crio.conf
      drop_ins:
        description: Folder of drop-in files.
        type: path
        default: /etc/crio/crio.conf.d
      service:
        description: The systemd unit that runs CRI-O.
        type: str
        default: crio.service
      timeout:
        description: How many seconds CRI-O may take to restart.
        type: int
        default: 60
  docker:
    description: Where Docker Engine is.
    type: dict
    default: {}
    suboptions:
      command:
        description: Docker's command line, of release 25 or newer.
        type: str
        default: docker
      daemon:
        description: Docker's daemon, which tries the file.
        type: str
        default: dockerd
      config:
        description: Docker's configuration file.
        type: path
        default: /etc/docker/daemon.json
      service:
        description: The systemd unit that runs Docker Engine.
        type: str
        default: docker.service
      timeout:
        description: How many seconds Docker Engine may take to restart.
        type: int
        default: 120
      stop_containers:
        description: Whether a restart may stop the containers that run, which it does where C(live-restore) is off.
        type: bool
        default: false
  distribution:
    description: Where k3s or RKE2 is.
    type: dict
    default: {}
    suboptions:
      data:
        description:
          - The folder that k3s or RKE2 was told by C(--data-dir).
          - The default is V(/var/lib/rancher/k3s) or V(/var/lib/rancher/rke2).
        type: path
      timeout:
        description: How many seconds k3s or RKE2 may take to restart.
        type: int
        default: 300
  records:
    description: Folder on the node in which is written what was changed.
    type: path
    default: /var/lib/dra-accelerators
  interpreter:
    description:
      - A Python interpreter on the node that has the library C(tomli). It is used only if the interpreter that Ansible uses on the node has no
        library that reads TOML, which is part of Python from 3.11 on.
      - The default is the virtual environment that the role P(dra.accelerators.python_environment#role) makes.
    type: path
    default: /opt/dra-accelerators/venv/bin/python
requirements:
  - Python 3.11 or newer on the node, or the Python package C(tomli) in the interpreter that Ansible uses there or in O(interpreter); not for
    O(runtime=docker).
  - containerd 1.7.2, CRI-O 1.28, Docker Engine 25, or a k3s or RKE2 with containerd 2.x, each or newer, run by systemd.
seealso:
  - module: dra.accelerators.containerd_config
  - module: dra.accelerators.docker_runtime
"""

EXAMPLES = r"""
- name: Have the runtime of the node hand CDI devices to containers
  dra.accelerators.runtime_cdi:

- name: Have CRI-O read one more folder
  dra.accelerators.runtime_cdi:
    runtime: cri-o
    cdi_folders: [/etc/cdi, /var/run/cdi, /srv/cdi]

- name: Have Docker Engine hand them out, even where its containers stop for that
  dra.accelerators.runtime_cdi:
    runtime: docker
    docker:
      stop_containers: true

- name: Take back what was changed
  dra.accelerators.runtime_cdi:
    state: absent
"""

RETURN = r"""
runtime:
  description: The runtime that was set up; for V(absent) the last one of which something was taken back, or empty.
  returned: success
  type: str
  sample: cri-o
files:
  description: Paths of the runtime's files that were written or removed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: ["/etc/crio/crio.conf.d/60-dra-accelerators.conf"]
folders:
  description: Folders of CDI files that were made or removed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: ["/etc/cdi"]
restarted:
  description: Whether the runtime was restarted, or would be in check mode.
  returned: success
  type: bool
  sample: true
reason:
  description: Why the runtime was restarted; empty if it was not.
  returned: success
  type: str
  sample: its settings were changed
stops:
  description: How many containers that run the restart ended, or would end in check mode. Only Docker Engine without its live-restore ends any.
  returned: success
  type: int
  sample: 0
pods:
  description: With RV(restarted=true), the pods that have processes on the node, as far as the node knows their names. They go on, but for RV(stops).
  returned: success
  type: list
  elements: str
  sample: ["team-a/training-0"]
settled:
  description:
    - Whether there is nothing to do for this module, so that after a look in check mode no real run is needed.
    - False also where the look could not tell, and where only the record of what was changed is behind.
  returned: success
  type: bool
  sample: false
enabled:
  description: Whether CDI is on afterwards, by the runtime's files; in check mode, whether it would be.
  returned: if the runtime could be asked
  type: bool
  sample: true
verified:
  description:
    - Whether the running runtime reported its CDI settings itself. False only for containerd, where C(crictl) is missing or got no answer. A
      warning says so.
  returned: with O(state=present), and in check mode if no restart is needed
  type: bool
  sample: true
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: containers-run
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils import (
    _changed_texts,
    _containerd_plan,
    _containerd_switch,
    _runtime_switch,
)
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_daemon import Daemon
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_switch import CopiedFiles, Wish
from ansible_collections.dra.accelerators.plugins.module_utils._crio_daemon import Crio
from ansible_collections.dra.accelerators.plugins.module_utils._distribution import (
    Place,
    daemon_of,
    place_of,
    ready_daemon,
)
from ansible_collections.dra.accelerators.plugins.module_utils._docker_daemon import Docker
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, end, find_binding, run
from ansible_collections.dra.accelerators.plugins.module_utils._runtime_choice import (
    AUTO,
    CONTAINERD,
    CRIO,
    DISTRIBUTIONS,
    DOCKER,
    RUNTIMES,
    Choice,
)
from ansible_collections.dra.accelerators.plugins.module_utils._runtime_files import Files
from ansible_collections.dra.accelerators.plugins.module_utils._runtime_find import find, unit_states
from ansible_collections.dra.accelerators.plugins.module_utils._toml import reader
from ansible_collections.dra.accelerators.plugins.module_utils.core.pods import running_pods
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

#: The names of the records. docker_runtime has docker-NAME.json.
RECORDS = {name: f"{name}.json" for name in RUNTIMES} | {CRIO: "crio.json", DOCKER: "docker_cdi.json"}


def _place(command: str, config: str, service: str, timeout: int, **more: dict[str, Any]) -> dict[str, Any]:
    options = {
        "command": {"type": "str", "default": command},
        "config": {"type": "path", "default": config},
        "service": {"type": "str", "default": service},
        "timeout": {"type": "int", "default": timeout},
        **more,
    }
    return {"type": "dict", "default": {}, "options": options}


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        **INTERPRETER_OPTION,
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "runtime": {"type": "str", "choices": [AUTO, *RUNTIMES], "default": AUTO},
        "cdi_folders": {"type": "list", "elements": "path", "default": ["/etc/cdi", "/var/run/cdi"]},
        "containerd": _place(
            "containerd",
            "/etc/containerd/config.toml",
            "containerd.service",
            60,
            drop_ins={"type": "path", "default": "/etc/containerd/conf.d"},
        ),
        "crio": _place(
            "crio",
            "/etc/crio/crio.conf",
            "crio.service",
            60,
            drop_ins={"type": "path", "default": "/etc/crio/crio.conf.d"},
        ),
        "docker": _place(
            "docker",
            "/etc/docker/daemon.json",
            "docker.service",
            120,
            daemon={"type": "str", "default": "dockerd"},
            stop_containers={"type": "bool", "default": False},
        ),
        "distribution": {
            "type": "dict",
            "default": {},
            "options": {"data": {"type": "path"}, "timeout": {"type": "int", "default": 300}},
        },
        "records": {"type": "path", "default": "/var/lib/dra-accelerators"},
    }


class Node:
    """The node's runtimes, each with its files."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params: dict[str, Any] = module.params
        self.system = System()
        self.wanted: list[str] = module.params["cdi_folders"]

    def record(self, runtime: str) -> str:
        """Return the path of a runtime's record."""
        return f"{self.params['records']}/{RECORDS[runtime]}"

    def bring(self, choice: Choice) -> dict[str, Any]:
        """Set up a runtime. Raises AcceleratorError."""
        check = self.module.check_mode
        if choice.runtime in (CRIO, DOCKER):
            engine, files = self._engine(choice.runtime)
            return _runtime_switch.present(files, engine, self.wanted, check=check)
        files_of_containerd = CopiedFiles(
            self.module, self.system, self.record(choice.runtime), _containerd_plan.read_record
        )
        daemon, drop_ins = self._daemon(choice)
        return _containerd_switch.present(files_of_containerd, daemon, Wish(self.wanted, drop_ins), check=check)

    def take_back(self, choice: Choice) -> dict[str, Any]:
        """Take back what was changed for a runtime. Raises AcceleratorError."""
        check = self.module.check_mode
        if choice.runtime in (CRIO, DOCKER):
            engine, files = self._engine(choice.runtime)
            return _runtime_switch.absent(files, engine, check=check)
        files_of_containerd = CopiedFiles(
            self.module, self.system, self.record(choice.runtime), _containerd_plan.read_record
        )
        if choice.runtime == CONTAINERD:
            daemon, drop_ins = self._containerd()
        else:
            place, timeout = self._place(choice.runtime)
            daemon, drop_ins = daemon_of(self.system, place, choice.unit, self.wanted, timeout), place.drop_ins
        return _containerd_switch.absent(files_of_containerd, daemon, Wish(self.wanted, drop_ins), check=check)

    def set_up(self) -> list[Choice]:
        """Return the runtimes of which something may have to be taken back: those that have a record, else containerd."""
        asked = self.params["runtime"]
        # A drop-in file of containerd is known as ours without a record, too.
        known = [name for name in RUNTIMES if self.system.exists(self.record(name))] or [CONTAINERD]
        if asked != AUTO:
            known = [asked]
        states = unit_states(self.system) if any(name in DISTRIBUTIONS.values() for name in known) else {}
        found = []
        for name in known:
            units = [unit for unit, runtime in DISTRIBUTIONS.items() if runtime == name]
            active = [unit for unit in units if states.get(unit) == "active"]
            found.append(Choice(name, (active or units or [""])[0]))
        return found

    def _engine(self, runtime: str) -> tuple[Crio | Docker, Files[_changed_texts.Record]]:
        engine: Crio | Docker
        scratch = ""
        if runtime == CRIO:
            engine = Crio(self.system, **self.params["crio"])
            # CRI-O reads whatever lies in its folder, so that files are made beside that.
            scratch = str(Path(engine.drop_ins).parent)
        else:
            engine = Docker(self.system, **self.params["docker"])
        return engine, Files(self.module, self.system, self.record(runtime), _changed_texts.read_record, scratch)

    def _containerd(self) -> tuple[Daemon, str]:
        place = dict(self.params["containerd"])
        drop_ins: str = place.pop("drop_ins")
        return Daemon(self.system, **place), drop_ins

    def _daemon(self, choice: Choice) -> tuple[Daemon, str]:
        """Return the containerd, and its directory of drop-in files. Raises AcceleratorError."""
        if choice.runtime == CONTAINERD:
            return self._containerd()
        place, timeout = self._place(choice.runtime)
        return ready_daemon(self.system, place, choice.unit, self.wanted, timeout), place.drop_ins

    def _place(self, runtime: str) -> tuple[Place, float]:
        options = self.params["distribution"]
        return place_of(runtime, options["data"] or ""), float(options["timeout"])


def work(module: AnsibleModule) -> dict[str, Any]:
    """Bring the node's runtime to the wanted state; returns the module's result. Raises AcceleratorError."""
    node = Node(module)
    if module.params["state"] == "present":
        choice = find(node.system, module.params["runtime"])
        return disturbing(node.system, {"runtime": choice.runtime, **node.bring(choice)})
    done: dict[str, Any] = {}
    diffs = []
    for choice in node.set_up():
        one = node.take_back(choice)
        diffs.append(one.pop("diff"))
        if one["changed"] or not done:
            done = {"runtime": choice.runtime if one["changed"] else "", **joined(done, one)}
    return disturbing(node.system, {**done, "diff": diffs if len(diffs) > 1 else diffs[0]})


def disturbing(system: System, done: dict[str, Any]) -> dict[str, Any]:
    """Add to a result whom the restart concerns. containerd and CRI-O stop no container by one."""
    return {**done, "stops": done.get("stops", 0), "pods": list(running_pods(system)) if done["restarted"] else []}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the results for two runtimes as one."""
    lists = {key: [*first.get(key, []), *second[key]] for key in ("files", "folders")}
    return {
        **second,
        **lists,
        "changed": bool(first.get("changed")) or second["changed"],
        "settled": bool(first.get("settled", True)) and second["settled"],
        "restarted": bool(first.get("restarted")) or second["restarted"],
        "stops": first.get("stops", 0) + second.get("stops", 0),
        "reason": second["reason"] or first.get("reason", ""),
    }


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    if reader() is None and module.params["runtime"] != DOCKER:
        missing = find_binding("tomli", module.params["interpreter"])
        if module.check_mode:
            module.warn(f"{missing}, so that it is not known yet whether the runtime's settings would change.")
            module.exit_json(
                changed=False,
                settled=False,
                runtime="",
                files=[],
                folders=[],
                restarted=False,
                reason="",
                stops=0,
                pods=[],
                diff={"prepared": ""},
            )
        end(
            module,
            msg=f"{missing}. Expected Python 3.11 or newer, or the package tomli, which the role python_environment installs.",
            error_code="binding-missing",
        )
    run(module, work)


if __name__ == "__main__":
    main()
