#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: runtime_cdi
version_added: 0.1.0
short_description: Enable CDI in the container runtime of a node
description:
  - Configures the runtime that the kubelet uses. It can be containerd, CRI-O, Docker Engine, or the containerd of k3s, RKE2, or MicroK8s. If CDI is
    enabled and the runtime reads the CDI directories, the module changes nothing.
  - Makes the smallest possible change. If the runtime has a command for it, the module validates the change first. It rejects a change that affects
    any setting other than CDI.
  - Restarts the runtime only if needed. The runtime must then report that it reads the directories. Otherwise the module restores the files and
    restarts the runtime again.
  - For containerd, the module uses the main file of the running process (C(--config)) and its socket (C(--address)). If containerd reads drop-in
    files, the module writes one. Otherwise it sets the keys in the file that contains the table, and saves a copy of the file in the same directory.
    The output of C(containerd config dump) with copies of the files shows that no other setting changes. If an earlier run ended before its restart,
    the module restarts containerd. For the containerd of k3s, RKE2, and MicroK8s, it writes a drop-in file to the directory that their generated settings
    import, and restarts their unit. If the settings import no directory, the module fails and reports the settings to make.
  - For CRI-O, a drop-in file contains the directories. The output of C(crio config) with copies of the files shows that no other setting changes. The
    response of the running process to C(GET /config) on its socket verifies the directories. The module restarts CRI-O instead of reloading it,
    because this response does not include the changes of a reload.
  - For Docker Engine, the module sets the keys C(features.cdi) and C(cdi-spec-dirs) in the configuration file. All other keys keep their order.
    C(dockerd --validate) validates the file, and C(docker info) verifies the result. Docker reads both keys only at its start. If a restart would
    stop running containers, the module fails unless O(docker.stop_containers) is true.
notes:
  - Requires root on the node.
  - Containers continue while containerd, CRI-O, k3s and RKE2 restart. Containers of Docker Engine continue if its setting C(live-restore) is on.
  - The module keeps records of its changes in O(records), for O(state=absent).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
    details:
      - Check mode validates the changes in the same way and rejects the same changes. If the node has no library that reads TOML yet, check mode
        reports this in a warning and predicts no changes.
  diff_mode:
    support: full
    details:
      - The diff contains the changed lines and the lines around them. For Docker's file it contains only the CDI settings, because the file can
        contain passwords.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  state:
    description:
      - V(present) enables CDI in the runtime.
      - V(absent) reverts only the changes of this module. From a file that was changed afterwards, it removes only the keys of this module. With
        O(runtime=auto), it reverts the changes of each runtime that the module configured.
    type: str
    choices: [present, absent]
    default: present
  runtime:
    description:
      - The runtime to configure.
      - V(auto) selects the running service. If several services run, the kubelet's endpoint in its command line or its configuration file decides. If
        no service runs, V(auto) selects a failed service, containerd first.
      - V(auto) rejects Docker Engine with cri-dockerd, because most releases of cri-dockerd do not pass CDI devices to pods.
    type: str
    choices: [auto, containerd, cri-o, docker, k3s, microk8s, rke2]
    default: auto
  cdi_directories:
    description:
      - Directories from which the runtime must read CDI files. The runtime also continues to read its other directories. The module creates missing
        directories.
    type: list
    elements: path
    default:
      - /etc/cdi
      - /var/run/cdi
  containerd:
    description: Paths and commands of containerd.
    type: dict
    default: {}
    suboptions:
      command:
        description: The containerd command.
        type: str
        default: containerd
      config:
        description: containerd's main configuration file.
        type: path
        default: /etc/containerd/config.toml
      drop_ins:
        description:
          - Directory of drop-in files, used if containerd imports it. If containerd imports another directory, the module uses that one.
        type: path
        default: /etc/containerd/conf.d
      service:
        description: The systemd unit that runs containerd.
        type: str
        default: containerd.service
      timeout:
        description: Timeout in seconds for a restart of containerd.
        type: int
        default: 60
  crio:
    description: Paths and commands of CRI-O.
    type: dict
    default: {}
    suboptions:
      command:
        description: The CRI-O program, 1.28 or newer.
        type: str
        default: crio
      config:
        description: CRI-O's main configuration file.
        type: path
        default: /etc/crio/crio.conf
      drop_ins:
        description: Directory of drop-in files.
        type: path
        default: /etc/crio/crio.conf.d
      service:
        description: The systemd unit that runs CRI-O.
        type: str
        default: crio.service
      timeout:
        description: Timeout in seconds for a restart of CRI-O.
        type: int
        default: 60
  docker:
    description: Paths and commands of Docker Engine.
    type: dict
    default: {}
    suboptions:
      command:
        description: The Docker command, 25 or newer.
        type: str
        default: docker
      daemon:
        description: The Docker daemon program, which validates the file.
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
        description: Timeout in seconds for a restart of Docker Engine.
        type: int
        default: 120
      stop_containers:
        description: Whether a restart can stop running containers. A restart stops them if C(live-restore) is off.
        type: bool
        default: false
  distribution:
    description: Paths of k3s or RKE2.
    type: dict
    default: {}
    suboptions:
      data:
        description:
          - The data directory of k3s or RKE2, its option C(--data-dir).
          - The default is V(/var/lib/rancher/k3s) or V(/var/lib/rancher/rke2).
        type: path
      timeout:
        description: Timeout in seconds for a restart of k3s or RKE2.
        type: int
        default: 300
  records:
    description: Directory on the node with the records of changes.
    type: path
    default: /var/lib/dra-accelerators
  interpreter:
    description:
      - A Python interpreter on the node with the library C(tomli). It is used only if the interpreter of Ansible on the node has no library that
        reads TOML, which Python includes from 3.11.
      - The default is the virtual environment of the role P(dra.accelerators.python_environment#role).
    type: path
    default: /opt/dra-accelerators/venv/bin/python
requirements:
  - Python 3.11 or newer on the node, or the Python package C(tomli) in the interpreter that Ansible uses there or in O(interpreter). Not required for
    O(runtime=docker).
  - containerd 1.7.2, CRI-O 1.28, Docker Engine 25, or a k3s or RKE2 with containerd 2.x, each or newer, run by systemd.
seealso:
  - module: dra.accelerators.docker_runtime
"""

EXAMPLES = r"""
- name: Enable CDI in the runtime of the node
  dra.accelerators.runtime_cdi:

- name: Add a CDI directory to CRI-O
  dra.accelerators.runtime_cdi:
    runtime: cri-o
    cdi_directories: [/etc/cdi, /var/run/cdi, /srv/cdi]

- name: Enable CDI in Docker Engine and allow a restart that stops its containers
  dra.accelerators.runtime_cdi:
    runtime: docker
    docker:
      stop_containers: true

- name: Revert the changes
  dra.accelerators.runtime_cdi:
    state: absent
"""

RETURN = r"""
runtime:
  description: The configured runtime. With V(absent), the last runtime with a reverted change, or empty.
  returned: success
  type: str
  sample: cri-o
files:
  description: Paths of the runtime's files that were written or removed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: ["/etc/crio/crio.conf.d/60-dra-accelerators.conf"]
directories:
  description: CDI directories that were created or removed, or would be in check mode.
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
  description: Why the runtime was restarted. Empty if it was not restarted.
  returned: success
  type: str
  sample: its settings were changed
stops:
  description: The number of running containers that the restart stopped, or would stop in check mode. Only Docker Engine without live-restore stops
    containers.
  returned: success
  type: int
  sample: 0
pods:
  description: With RV(restarted=true), the pods with processes on the node, if the node knows their names. They continue, except the containers in RV(stops).
  returned: success
  type: list
  elements: str
  sample: ["team-a/training-0"]
up_to_date:
  description:
    - Whether the module has nothing to change. If V(true) in check mode, a run without check mode is not needed.
    - Also V(false) if check mode could not predict the changes, or if only the record of changes is outdated.
  returned: success
  type: bool
  sample: false
enabled:
  description: Whether CDI is enabled in the runtime's files after the run. In check mode, the expected value.
  returned: if the runtime returned its settings
  type: bool
  sample: true
verified:
  description:
    - Whether the running runtime reported its CDI settings. V(false) only for containerd, if C(crictl) is missing or received no response. A warning
      reports this.
  returned: with O(state=present), and in check mode if no restart is needed
  type: bool
  sample: true
error_code:
  description: A stable code for the type of the error.
  returned: failure
  type: str
  sample: containers-run
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime import (
    apply as container_runtime_apply,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime import (
    restore_record,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.config_files import RuntimeFileStore
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd import (
    apply as containerd_apply,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd import (
    plan as containerd_plan,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.apply import (
    CdiRequest,
    CopiedFiles,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.daemon import Daemon
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.crio.daemon import Crio
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.detect import (
    AUTO,
    CONTAINERD,
    CRIO,
    DISTRIBUTIONS,
    DOCKER,
    RUNTIMES,
    Choice,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.docker.daemon import Docker
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.k3s_rke2 import (
    Place,
    daemon_of,
    place_of,
    ready_daemon,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.kubelet_runtime import (
    find,
    unit_states,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.toml_edit import reader
from ansible_collections.dra.accelerators.plugins.module_utils._host.single_run import run_alone
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, end, find_binding
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.kubelet_pods import running_pods
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

#: The names of the records. docker-NAME.json is the record of docker_runtime.
RECORDS = {name: f"{name}.json" for name in RUNTIMES} | {CRIO: "crio.json", DOCKER: "docker_cdi.json"}


def _runtime_option(command: str, config: str, service: str, timeout: int, **more: dict[str, Any]) -> dict[str, Any]:
    """Return the option with the paths and the commands of a runtime. The arguments are the defaults of its suboptions."""
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
        "cdi_directories": {"type": "list", "elements": "path", "default": ["/etc/cdi", "/var/run/cdi"]},
        "containerd": _runtime_option(
            "containerd",
            "/etc/containerd/config.toml",
            "containerd.service",
            60,
            drop_ins={"type": "path", "default": "/etc/containerd/conf.d"},
        ),
        "crio": _runtime_option(
            "crio",
            "/etc/crio/crio.conf",
            "crio.service",
            60,
            drop_ins={"type": "path", "default": "/etc/crio/crio.conf.d"},
        ),
        "docker": _runtime_option(
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
        self.wanted: list[str] = module.params["cdi_directories"]

    def record(self, runtime: str) -> str:
        """Return the path of a runtime's record."""
        return f"{self.params['records']}/{RECORDS[runtime]}"

    def configure(self, choice: Choice) -> dict[str, Any]:
        """Configure a runtime. Raises AcceleratorError."""
        check = self.module.check_mode
        if choice.runtime in (CRIO, DOCKER):
            engine, files = self._engine(choice.runtime)
            return container_runtime_apply.present(files, engine, self.wanted, check=check)
        files_of_containerd = CopiedFiles(
            self.module, self.system, self.record(choice.runtime), containerd_plan.read_record
        )
        daemon, drop_ins = self._daemon(choice)
        return containerd_apply.present(files_of_containerd, daemon, CdiRequest(self.wanted, drop_ins), check=check)

    def revert(self, choice: Choice) -> dict[str, Any]:
        """Undo the changes to a runtime. Raises AcceleratorError."""
        check = self.module.check_mode
        if choice.runtime in (CRIO, DOCKER):
            engine, files = self._engine(choice.runtime)
            return container_runtime_apply.absent(files, engine, check=check)
        files_of_containerd = CopiedFiles(
            self.module, self.system, self.record(choice.runtime), containerd_plan.read_record
        )
        if choice.runtime == CONTAINERD:
            daemon, drop_ins = self._containerd()
        else:
            place, timeout = self._place(choice.runtime)
            daemon, drop_ins = daemon_of(self.system, place, choice.unit, self.wanted, timeout), place.drop_ins
        return containerd_apply.absent(files_of_containerd, daemon, CdiRequest(self.wanted, drop_ins), check=check)

    def runtimes_to_revert(self) -> list[Choice]:
        """Return the runtimes whose changes may have to be undone: those with a record, or containerd without any record."""
        requested = self.params["runtime"]
        # Also without a record, a drop-in file of containerd is recognized as a file of this collection.
        known = [name for name in RUNTIMES if self.system.exists(self.record(name))] or [CONTAINERD]
        if requested != AUTO:
            known = [requested]
        states = unit_states(self.system) if any(name in DISTRIBUTIONS.values() for name in known) else {}
        found = []
        for name in known:
            units = [unit for unit, runtime in DISTRIBUTIONS.items() if runtime == name]
            active = [unit for unit in units if states.get(unit) == "active"]
            found.append(Choice(name, (active or units or [""])[0]))
        return found

    def _engine(self, runtime: str) -> tuple[Crio | Docker, RuntimeFileStore[restore_record.Record]]:
        engine: Crio | Docker
        scratch = ""
        if runtime == CRIO:
            engine = Crio(self.system, **self.params["crio"])
            # CRI-O reads every file in its drop-in directory, so temporary files are created in the parent directory.
            scratch = str(Path(engine.drop_ins).parent)
        else:
            engine = Docker(self.system, **self.params["docker"])
        return engine, RuntimeFileStore(
            self.module, self.system, self.record(runtime), restore_record.read_record, scratch
        )

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
    """Configure the node's runtime or undo the changes, and return the module's result. Raises AcceleratorError."""
    node = Node(module)
    if module.params["state"] == "present":
        choice = find(node.system, module.params["runtime"])
        return with_affected_pods(node.system, {"runtime": choice.runtime, **node.configure(choice)})
    done: dict[str, Any] = {}
    diffs = []
    for choice in node.runtimes_to_revert():
        one = node.revert(choice)
        diffs.append(one.pop("diff"))
        if one["changed"] or not done:
            done = {"runtime": choice.runtime if one["changed"] else "", **merged_results(done, one)}
    return with_affected_pods(node.system, {**done, "diff": diffs if len(diffs) > 1 else diffs[0]})


def with_affected_pods(system: System, done: dict[str, Any]) -> dict[str, Any]:
    """Add the pods that a restart affects to a result. A restart of containerd or CRI-O stops no container."""
    return {**done, "stops": done.get("stops", 0), "pods": list(running_pods(system)) if done["restarted"] else []}


def merged_results(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the merged results of two runtimes."""
    lists = {key: [*first.get(key, []), *second[key]] for key in ("files", "directories")}
    return {
        **second,
        **lists,
        "changed": bool(first.get("changed")) or second["changed"],
        "up_to_date": bool(first.get("up_to_date", True)) and second["up_to_date"],
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
            module.warn(f"{missing}. Therefore the module cannot predict whether the runtime's settings would change.")
            module.exit_json(
                changed=False,
                up_to_date=False,
                runtime="",
                files=[],
                directories=[],
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
    run_alone(module, work, System())


if __name__ == "__main__":
    main()
