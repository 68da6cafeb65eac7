#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_info
version_added: 0.1.0
short_description: Gather facts about a node
description:
  - Returns all facts about a node that the roles of this collection need. They include the platform, the Python interpreters, the kubelet, the
    container runtime, the accelerators and drivers of each vendor, other programs that manage devices, and the installed parts of this collection.
  - Needs only Python on the node. The result reports missing or failing parts, and the module does not fail because of them. Every command and every
    request has a timeout.
  - Returns no secrets. The module returns the kubelet's kubeconfig without its users, and only the claims of the node driver's token.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.info_module
attributes:
  platform:
    support: full
    platforms: linux
options:
  kubelet_root:
    description: The kubelet's root directory, its option C(--root-dir).
    type: path
    default: /var/lib/kubelet
  kubelet_kubeconfigs:
    description: Possible paths of the kubelet's kubeconfig file. The module reads the first file that exists.
    type: list
    elements: path
    default:
      - /etc/kubernetes/kubelet.conf
      - /var/lib/kubelet/kubeconfig
      - /var/lib/rancher/k3s/agent/kubelet.kubeconfig
      - /var/lib/rancher/rke2/agent/kubelet.kubeconfig
  root:
    description: Directory of the Python environments and the releases.
    type: path
    default: /opt/dra-accelerators
  interpreters:
    description: Python interpreters whose version the module reads.
    type: list
    elements: path
    default: [/usr/bin/python3]
  layout:
    description: Layout rules to validate. RV(layout_problem) reports an error in them. The validation queries no device.
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
- name: Gather facts about the node
  dra.accelerators.node_info:
  register: node

- name: Show other programs that manage its GPUs
  ansible.builtin.debug:
    msg: "{{ node.managers + node.kubelet.device_plugins }}"

- name: Validate a layout before the installation
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
    - The operating system. C(iommu) reports whether the kernel has IOMMU groups. C(selinux) is the SELinux mode (V(enforcing), V(permissive) or V(disabled)).
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
    - For each interpreter, its C(version), whether it can create a C(venv), and the C(problem) if it did not run.
    - C(directory) is its installation directory. C(hidden_from_services) reports whether this is a home directory or a temporary directory, which the
      services of this collection cannot access.
  returned: success
  type: dict
  sample:
    /usr/bin/python3:
      version: 3.11.2
      identity: 3.11.2 (main)
      venv: true
      directory: /usr
      hidden_from_services: false
      problem: ""
units:
  description:
    - The systemd units of this collection, each with C(exists), C(managed), C(active), C(enabled), C(file), C(need_reload), C(main_pid), C(restarts) and
      C(type). C(managed) reports whether the unit file contains the marker of this collection.
  returned: success
  type: dict
  sample:
    dra-accelerators-driver.service: {exists: true, managed: true, active: active, enabled: enabled, main_pid: 411}
runtime:
  description: The units that identify a container runtime, in the form of RV(units).
  returned: success
  type: dict
  sample:
    containerd.service: {exists: true, managed: false, active: active, enabled: enabled, main_pid: 120}
managers:
  description: Units of other programs that partition GPUs and that run now or start at the next boot.
  returned: success
  type: list
  elements: str
  sample: [nvidia-mig-manager.service]
kubelet:
  description: The kubelet's directories, the sockets in them, and its kubeconfig without the users.
  returned: success
  type: dict
  contains:
    root:
      description: The kubelet's root directory.
      returned: success
      type: str
      sample: /var/lib/kubelet
    directories:
      description: Whether the kubelet's plugin directories exist.
      returned: success
      type: bool
      sample: true
    sockets:
      description: Sockets of registered plugins.
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
      description: Path of the kubeconfig file that the module read. Empty if no file exists.
      returned: success
      type: str
      sample: /etc/kubernetes/kubelet.conf
    cluster:
      description: Content of the kubeconfig file without the users, which contain the kubelet's credentials.
      returned: success
      type: str
      sample: "apiVersion: v1\nkind: Config\n"
    unit:
      description: The kubelet's systemd unit, in the form of RV(units).
      returned: success
      type: dict
      sample: {exists: true, active: active}
nvidia:
  description:
    - Whether C(nvidia-smi) works, the driver version or the error, and the installed programs of the NVIDIA Container Toolkit. C(toolkit_version) is
      the lowest version of these programs and of the toolkit that NVIDIA's GPU Operator has installed. It is empty if no program reports a version.
    - C(uvm) is V(loaded) if the kernel module C(nvidia-uvm) is loaded. It is V(installed) if the module is installed for the running kernel, and
      otherwise empty.
    - C(numa_memory) lists the PCI addresses of the GPUs whose memory is a NUMA node of the host.
  returned: success
  type: dict
  sample: {answers: true, version: 580.65.06, problem: "", uvm: loaded, numa_memory: [], toolkit: [/usr/bin/nvidia-cdi-hook],
    toolkit_version: 1.17.8}
devices:
  description:
    - The PCI addresses of the accelerators, by vendor, also if their driver does not work. Vendors without devices are omitted.
    - NPUs on the unified bus (950) have no PCI address. They are listed by their device nodes after their driver is installed.
  returned: success
  type: dict
  sample: {ascend: ["0000:82:00.0"]}
ascend:
  description:
    - Whether all files of the Ascend driver exist (C(answers)), which files are missing (C(problem)), the version, the library, and the group that
      can open the device nodes of NPUs. The module runs no program for this.
    - C(unified_bus) reports whether the installed driver is for NPUs on the unified bus. The node lists these NPUs only while the driver is loaded.
    - C(uid) and C(gid) are the IDs of the driver's user, or -1 if the user does not exist on the host.
    - C(container) is the reason why the NPU kernel driver would treat the module's process as an ordinary container. It is empty on the host itself.
  returned: success
  type: dict
  sample: {answers: true, version: 24.1.rc1, unified_bus: false, library: /usr/local/dcmi/libdcmi.so, group: HwHiAiUser, uid: 1000, gid: 1000,
    problem: "", container: ""}
programs:
  description: Content of O(root). The active environment and release, and all complete ones, newest first.
  returned: success
  type: dict
  contains:
    path:
      description: Path of the directory.
      returned: success
      type: str
      sample: /opt/dra-accelerators
    exists:
      description: Whether the directory exists.
      returned: success
      type: bool
      sample: true
    release:
      description: The active release. Empty if no release is active.
      returned: success
      type: str
      sample: 0.1.0-1a2b3c4d
    environment:
      description: The active environment. Empty if no environment is active.
      returned: success
      type: str
      sample: 0123456789ab
    releases:
      description: The complete releases.
      returned: success
      type: list
      elements: str
      sample: [0.1.0-1a2b3c4d]
    environments:
      description: The complete environments.
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
    proven:
      description:
        - For each of the services V(driver) and V(controller), the C(release) and the C(environment) with which it last became ready.
        - C(files) is the SHA-256 digest of the recorded units and configuration.
        - All values are empty if the service has no record, or if a recorded release or environment does not exist.
      returned: success
      type: dict
      sample:
        driver: {release: 0.1.0-1a2b3c4d, environment: 0123456789ab, files: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855}
        controller: {release: "", environment: "", files: ""}
    usable:
      description: Whether the interpreter of the active environment exists.
      returned: success
      type: bool
      sample: true
driver:
  description: The running node driver and its identity.
  returned: success
  type: dict
  contains:
    configuration:
      description: Names of the files in its configuration directory.
      returned: success
      type: list
      elements: str
      sample: [driver.yaml, kubeconfig]
    fingerprint:
      description: The fingerprint of the release and configuration with which the running process was started. The role writes it into the unit. It
        is empty if no driver runs.
      returned: success
      type: str
      sample: 1f2e3d4c5b6a7988
    identity:
      description:
        - The claims of the token in its kubeconfig (C(account), C(node), C(node_uid), C(seconds_left), C(lifetime)), the connection to the
          C(cluster), and whether the API server has C(accepted) the token. If the module did not query the API server, or if the server did not
          respond, C(accepted) is null, and C(problem) has the reason.
      returned: success
      type: dict
      sample: {exists: true, account: "system:serviceaccount:dra-accelerators:driver-node-1", accepted: true, problem: ""}
layout_problem:
  description: The error in O(layout). Empty if the layout is valid.
  returned: success
  type: str
  sample: "Layout rule 1, key match: unknown key indx"
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._host.node_facts import layout_problem, read_node_facts
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

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
    """Read the node's facts, and return the module's result."""
    params = module.params
    facts = read_node_facts(
        System(),
        kubelet_root=params["kubelet_root"],
        kubeconfigs=params["kubelet_kubeconfigs"],
        root=params["root"],
        configuration=CONFIGURATION,
        interpreters=params["interpreters"],
        verify=params["verify_identity"],
    )
    problem = layout_problem(params["layout"]) if params["layout"] is not None else ""
    return {"changed": False, **facts, "layout_problem": problem}


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
