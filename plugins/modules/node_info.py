#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_info
version_added: 0.1.0
short_description: Show what a node is, before anything is done to it
description:
  - Returns in one answer what the roles of this collection have to know of a node. Its platform and interpreters, its
    kubelet and container runtime, which vendors' accelerators it has and what their drivers say, other programs that give
    them out, and what of this collection is there already.
  - Needs nothing on the node but Python. What is missing or does not answer is part of the answer and no failure; every
    command and request has a deadline.
  - No secret is returned. Of the kubelet's kubeconfig all but its users is read, and of the node driver's token what it
    claims.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._attributes.info_module
attributes:
  platform:
    support: full
    platforms: linux
options:
  kubelet_root:
    description: The kubelet's root folder, its option C(--root-dir).
    type: path
    default: /var/lib/kubelet
  kubelet_kubeconfigs:
    description: Where the kubelet's kubeconfig may be; the first that is there is read.
    type: list
    elements: path
    default:
      - /etc/kubernetes/kubelet.conf
      - /var/lib/kubelet/kubeconfig
      - /var/lib/rancher/k3s/agent/kubelet.kubeconfig
      - /var/lib/rancher/rke2/agent/kubelet.kubeconfig
  root:
    description: Folder of the Python environment and the releases.
    type: path
    default: /opt/dra-accelerators
  interpreters:
    description: Python interpreters that are asked for their version.
    type: list
    elements: path
    default: [/usr/bin/python3]
  layout:
    description: Layout rules that are read, and refused in RV(layout_problem), without asking any device.
    type: raw
  verify_identity:
    description: Whether the node asks the API server if it accepts the node driver's token.
    type: bool
    default: true
seealso:
  - module: dra.accelerators.accelerator_info
  - module: dra.accelerators.cluster_info
"""

EXAMPLES = r"""
- name: Ask what the node is
  dra.accelerators.node_info:
  register: node

- name: Show who gives out its GPUs by another way
  ansible.builtin.debug:
    msg: "{{ node.managers + node.kubelet.device_plugins }}"

- name: Read a layout before anything is installed
  dra.accelerators.node_info:
    layout:
      - match: {index: 0}
        mode: static
        partitions: {3g.40gb: 1, 1g.10gb: 4}
    verify_identity: false
"""

RETURN = r"""
platform:
  description:
    - The operating system. C(iommu) says whether the kernel has IOMMU groups, and C(selinux) how SELinux is (V(enforcing), V(permissive)
      or V(disabled)).
  returned: success
  type: dict
  sample:
    system: Linux
    machine: x86_64
    kernel: 6.1.0
    systemd: true
    iommu: true
    selinux: disabled
    os_release: {id: debian, version_id: "12"}
interpreters:
  description:
    - For each interpreter asked for its C(version), whether it can make a C(venv), and the C(problem) if it did not run.
    - C(folder) is where it is installed, and C(hidden_from_services) whether that is a home or a temporary folder, which the
      services of this collection do not see.
  returned: success
  type: dict
  sample:
    /usr/bin/python3:
      version: 3.11.2
      identity: 3.11.2 (main)
      venv: true
      folder: /usr
      hidden_from_services: false
      problem: ""
units:
  description:
    - The collection's own systemd units, each with C(exists), C(ours), C(active), C(enabled), C(file), C(need_reload),
      C(main_pid), C(restarts) and C(type). C(ours) says whether the unit's file bears the collection's mark.
  returned: success
  type: dict
  sample:
    dra-accelerators-driver.service: {exists: true, ours: true, active: active, enabled: enabled, main_pid: 411}
runtime:
  description: The same of the units by which a container runtime is known.
  returned: success
  type: dict
  sample:
    containerd.service: {exists: true, ours: false, active: active, enabled: enabled, main_pid: 120}
managers:
  description: Units of other programs that cut GPUs up, which run now or at the next boot.
  returned: success
  type: list
  elements: str
  sample: [nvidia-mig-manager.service]
kubelet:
  description: The kubelet's folders, the sockets in them, and its kubeconfig without its users.
  returned: success
  type: dict
  contains:
    root:
      description: Its root folder.
      returned: success
      type: str
      sample: /var/lib/kubelet
    folders:
      description: Whether its folders for plugins are there.
      returned: success
      type: bool
      sample: true
    sockets:
      description: Sockets through which plugins have registered.
      returned: success
      type: list
      elements: str
      sample: [/var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock]
    device_plugins:
      description: Sockets of device plugins.
      returned: success
      type: list
      elements: str
      sample: [/var/lib/kubelet/device-plugins/nvidia-gpu.sock]
    kubeconfig:
      description: The kubeconfig that was found; empty if none was.
      returned: success
      type: str
      sample: /etc/kubernetes/kubelet.conf
    cluster:
      description: Its text without the users, which hold the kubelet's own identity.
      returned: success
      type: str
      sample: "apiVersion: v1\nkind: Config\n"
    unit:
      description: The kubelet's systemd unit, as in RV(units).
      returned: success
      type: dict
      sample: {exists: true, active: active}
nvidia:
  description:
    - Whether C(nvidia-smi) answers, the driver's version, the error otherwise, and the installed programs of NVIDIA's container
      toolkit. C(toolkit_version) is the lowest version of these and of the toolkit that NVIDIA's GPU Operator has installed, empty if none
      reports one.
  returned: success
  type: dict
  sample: {answers: true, version: 580.65.06, problem: "", toolkit: [/usr/bin/nvidia-cdi-hook], toolkit_version: 1.17.8}
devices:
  description: The PCI addresses of the accelerators by vendor, whether their driver works or not. A vendor without any is left out.
  returned: success
  type: dict
  sample: {ascend: ["0000:82:00.0"]}
ascend:
  description:
    - Whether the files of Ascend's driver are all there (C(answers)) and what is not (C(problem)), its version, its library, and the
      group that may open the nodes of NPUs. No program is run for it.
  returned: success
  type: dict
  sample: {answers: true, version: 24.1.rc1, library: /usr/local/dcmi/libdcmi.so, group: HwHiAiUser, problem: ""}
programs:
  description: What O(root) holds. The environment and the release in use, and all that are complete, newest first.
  returned: success
  type: dict
  contains:
    path:
      description: The folder.
      returned: success
      type: str
      sample: /opt/dra-accelerators
    exists:
      description: Whether it is there.
      returned: success
      type: bool
      sample: true
    release:
      description: The release in use; empty if there is none.
      returned: success
      type: str
      sample: 0.1.0-1a2b3c4d
    environment:
      description: The environment in use; empty if there is none.
      returned: success
      type: str
      sample: 0123456789ab
    releases:
      description: Complete releases.
      returned: success
      type: list
      elements: str
      sample: [0.1.0-1a2b3c4d]
    environments:
      description: Complete environments.
      returned: success
      type: list
      elements: str
      sample: [0123456789ab]
    names:
      description: All releases and environments of the collection, complete or not.
      returned: success
      type: list
      elements: str
      sample: [releases/0.1.0-1a2b3c4d, venvs/0123456789ab]
    usable:
      description: Whether the environment's interpreter is there.
      returned: success
      type: bool
      sample: true
driver:
  description: The node driver that runs, and its identity.
  returned: success
  type: dict
  contains:
    configuration:
      description: Names of the files in its folder of configuration.
      returned: success
      type: list
      elements: str
      sample: [driver.yaml, kubeconfig]
    fingerprint:
      description: What the running process was started from, as the role wrote it into the unit; empty if none runs.
      returned: success
      type: str
      sample: 1f2e3d4c5b6a7988
    identity:
      description:
        - What the token in its kubeconfig claims (C(account), C(node), C(node_uid), C(seconds_left), C(lifetime)), how the
          C(cluster) is reached, and whether the API server has C(accepted) it; null with a C(problem) where it was not
          asked or did not answer.
      returned: success
      type: dict
      sample: {exists: true, account: "system:serviceaccount:dra-accelerators:driver-node-1", accepted: true, problem: ""}
layout_problem:
  description: What is wrong with O(layout); empty if nothing is.
  returned: success
  type: str
  sample: "Layout rule 1, key match: unknown key indx"
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._node import ask, layout_problem
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

CONFIGURATION = "/etc/dra-accelerators"
KUBECONFIGS = [
    "/etc/kubernetes/kubelet.conf",
    "/var/lib/kubelet/kubeconfig",
    "/var/lib/rancher/k3s/agent/kubelet.kubeconfig",
    "/var/lib/rancher/rke2/agent/kubelet.kubeconfig",
]


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "kubelet_root": {"type": "path", "default": "/var/lib/kubelet"},
        "kubelet_kubeconfigs": {"type": "list", "elements": "path", "default": KUBECONFIGS},
        "root": {"type": "path", "default": "/opt/dra-accelerators"},
        "interpreters": {"type": "list", "elements": "path", "default": ["/usr/bin/python3"]},
        "layout": {"type": "raw"},
        "verify_identity": {"type": "bool", "default": True},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    """Ask the node; returns the module's result."""
    params = module.params
    found = ask(
        System(),
        kubelet_root=params["kubelet_root"],
        kubeconfigs=params["kubelet_kubeconfigs"],
        root=params["root"],
        configuration=CONFIGURATION,
        interpreters=params["interpreters"],
        verify=params["verify_identity"],
    )
    problem = layout_problem(params["layout"]) if params["layout"] is not None else ""
    return {"changed": False, **found, "layout_problem": problem}


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
