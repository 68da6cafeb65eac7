# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The preflight role refuses settings that the driver in a pod cannot support, and names the variable or form to use instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.ascend.families import DIES_AS_ONE
from playing import play

SITE = Path(__file__).resolve().parents[3] / "playbooks/site.yml"
ROLE = SITE.parents[1] / "roles/preflight"
AHEAD = [{"match": {}, "mode": "dynamic", "prepared_before_binding": True}]
MACHINES = [{"match": {}, "mode": "dynamic", "passthrough": True}]
UNIT = {"managed": False}


def node(*, selinux: str = "disabled", devices: dict[str, list[str]] | None = None, **more: Any) -> dict[str, Any]:
    """Return the facts of a node without problems, by default with GPUs."""
    return {
        "platform": {"systemd": True, "iommu": True, "selinux": selinux},
        "interpreters": {"/usr/bin/python3": {"version": "3.11.2", "hidden_from_services": False, "problem": ""}},
        "kubelet": {"directories": True, "sockets": [], "device_plugins": []},
        "managers": [],
        "units": {"dra-accelerators-driver.service": UNIT},
        "nvidia": {
            "answers": True,
            "version": "580.95.05",
            "problem": "",
            "uvm": "installed",
            "toolkit": ["/usr/bin/nvidia-ctk"],
            "toolkit_version": "1.17.8",
        },
        "devices": {"nvidia": ["0000:18:00.0"]} if devices is None else devices,
        "ascend": {"answers": False, "version": "", "library": "", "problem": "there is no /dev/davinci_manager"},
        "layout_problem": "",
        **more,
    }


def cluster(
    *,
    runtime: str = "containerd://2.3.7",
    allocatable: dict[str, str] | None = None,
    kubelet: str = "v1.37.0",
    **more: Any,
) -> dict[str, Any]:
    """Return the facts of its cluster."""
    known = {"exists": True, "ready": "True", "kubelet": kubelet, "runtime": runtime}
    return {
        "reached": True,
        "problem": "",
        "versions": ["v1"],
        "counters": {"kept": True, "problem": ""},
        "nodes": {"n": {**known, "labels": {}, "allocatable": allocatable or {}, "slices": []}},
        **more,
    }


def host(layout: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """Return the variables of a host."""
    return {
        "preflight_node_name": "n",
        "preflight_node_info": node(selinux=more.pop("selinux", "disabled"), **more.pop("node", {})),
        "preflight_cluster_info": cluster(
            runtime=more.pop("runtime", "containerd://2.3.7"),
            allocatable=more.pop("allocatable", None),
            **more.pop("cluster", {}),
        ),
        "preflight_layout": layout or [],
        **more,
    }


NPUS = {"devices": {"ascend": ["0000:82:00.0"]}}
BOTH = {"devices": {"ascend": ["0000:82:00.0"], "nvidia": ["0000:18:00.0"]}}
WELL = {"ascend": {"answers": True, "version": "24.1.rc1", "library": "/l/libdcmi.so", "problem": ""}}
NO_GPU = {"nvidia": {"answers": False, "version": "", "problem": "no nvidia-smi", "toolkit": [], "toolkit_version": ""}}
FLEET = {"accelerator_vendors": ["nvidia", "ascend"]}
POD = {"dra_driver_deploy_as": "daemonset"}
PLUGIN = {"dra_driver_kubelet_interface": "device-plugin"}
WITHOUT_CLAIMS = {"versions": [], "kubelet": "v1.32.4", "counters": {"kept": None, "problem": ""}}
OWN_SOCKETS = {
    "kubelet": {
        "directories": True,
        "sockets": [],
        "device_plugins": [
            "/var/lib/kubelet/device-plugins/dra-nvidia.com_gpu.sock",
            "/var/lib/kubelet/device-plugins/dra-nvidia.com_mig-1g.10gb.sock",
        ],
    }
}
HOSTS = {
    "plain": host(**POD),
    "service": host(AHEAD + MACHINES, selinux="enforcing", runtime="cri-o://1.33.0"),
    "ahead": host(AHEAD, **POD),
    "machines": host(MACHINES, **POD),
    "machines-allowed": host(MACHINES, **POD, dra_driver_pod_passthrough=True),
    "machines-without-processes": host(MACHINES, **POD, dra_driver_pod_passthrough=True, dra_driver_pod_host_pid=False),
    "crio": host(runtime="cri-o://1.33.0", **POD),
    "selinux": host(selinux="enforcing", **POD),
    "selinux-permissive": host(selinux="permissive", **POD),
    "selinux-named": host(selinux="enforcing", **POD, dra_driver_pod_selinux_type="spc_t"),
    # In a fleet with both vendors, a node needs only the driver for its devices.
    "npus": host(node=NPUS | WELL | NO_GPU, **FLEET),
    "npus-without-driver": host(node=NPUS | NO_GPU, **FLEET),
    # A driver that the same run installs is not missing, for that vendor only.
    "gpus-before-their-driver": host(
        node=NO_GPU | {"devices": BOTH["devices"]} | WELL, preflight_drivers_to_come=["nvidia"]
    ),
    "npus-before-another-driver": host(node=NPUS | NO_GPU, preflight_drivers_to_come=["nvidia"], **FLEET),
    "npus-with-old-driver": host(node=NPUS | NO_GPU | {"ascend": WELL["ascend"] | {"version": "21.0.2"}}, **FLEET),
    "npus-given-out": host(node=NPUS | WELL | NO_GPU, allocatable={"huawei.com/Ascend310P": "8"}, **FLEET),
    "gpus-of-a-fleet": host(allocatable={"huawei.com/Ascend310P": "8"}, **FLEET),
    "gpus-beside-npus-that-are-left": host(node=BOTH),
    "both": host(node=BOTH | WELL, **FLEET),
    # A device plugin needs no claims, and its own resources belong to no other plugin.
    "plugin": host(AHEAD + MACHINES, cluster=WITHOUT_CLAIMS, **PLUGIN),
    "plugin-again": host(
        node=OWN_SOCKETS,
        allocatable={"nvidia.com/gpu": "7", "nvidia.com/mig-1g.10gb": "7"},
        cluster=WITHOUT_CLAIMS,
        **PLUGIN,
    ),
    "plugin-beside-another": host(node=OWN_SOCKETS, allocatable={"nvidia.com/gpu.shared": "7"}, **PLUGIN),
    "plugin-on-too-old-a-kubelet": host(cluster={"kubelet": "v1.31.9"}, **PLUGIN),
    "claims-where-there-are-none": host(cluster={"versions": []}),
    # Without known devices, the GPU driver is required, as before.
    "nothing": host(node={"devices": {}} | NO_GPU),
    "no-uvm": host(node={"nvidia": {**node()["nvidia"], "uvm": ""}}),
}
#: The terms that each refusal has to contain.
REFUSED = {
    "npus-without-driver": ("Ascend driver", "/dev/davinci_manager", "reboot"),
    "npus-with-old-driver": ("Ascend driver", "21.0.2", "22.0.0"),
    "npus-before-another-driver": ("Ascend driver",),
    "npus-given-out": ("Other managers of NPUs", "huawei.com/Ascend310P", "preflight_allow_other_managers"),
    "nothing": ("NVIDIA driver", "no nvidia-smi"),
    "no-uvm": ("NVIDIA driver", "nvidia-uvm"),
    "machines": ("passthrough", "daemonset", "dra_driver_pod_passthrough"),
    "machines-without-processes": ("passthrough", "daemonset", "dra_driver_pod_host_pid"),
    "crio": ("cri-o://1.33.0", "daemonset", "dra_driver_deploy_as to service"),
    "plugin-beside-another": ("Other managers of GPUs", "7 nvidia.com/gpu.shared", "preflight_allow_other_managers"),
    "plugin-on-too-old-a-kubelet": ("Kubelet: version v1.31.9", "1.32 or newer"),
    "claims-where-there-are-none": ("DRA API", "dra_driver_kubelet_interface: device-plugin"),
    "selinux": ("SELinux", "daemonset", "dra_driver_deploy_as to service", "dra_driver_pod_selinux_type"),
}


@pytest.mark.prove
def test_options_unsupported_in_a_pod_are_rejected_by_name(tmp_path: Path) -> None:
    played = play(tmp_path, [{"ansible.builtin.include_role": {"name": "dra.accelerators.preflight"}}], HOSTS)
    assert set(played.failed) == set(REFUSED), played.output
    for name, words in REFUSED.items():
        head, *texts = played.failed[name]["msg"]
        assert "(1 found)" in head and len(texts) == 1, texts
        assert [word for word in words if word not in texts[0]] == [], texts


def test_site_playbook_passes_the_layout_of_the_node() -> None:
    """A layout of accelerator_layouts is not in the role's own default variable: the playbook passes it."""
    tasks = [task for play in yaml.safe_load(SITE.read_text("utf-8")) for task in play.get("tasks", ())]
    (given,) = (
        task["vars"]
        for task in tasks
        if task.get("ansible.builtin.include_role", {}).get("name") == "dra.accelerators.preflight"
    )
    assert given["preflight_layout"] == "{{ accelerator_node_layout }}"


def test_devices_outside_the_fleet_file_are_named(tmp_path: Path) -> None:
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.preflight"}}]
    played = play(tmp_path, tasks, {"plain": host(), "left": host(node=BOTH)})
    assert not played.failed, played.output
    words = "the node has devices of ascend, which this collection does not manage: accelerator_vendors is nvidia"
    assert played.output.count(words) == 1, played.output


def test_dry_run_that_is_rejected_is_no_missing_feature_gate(tmp_path: Path) -> None:
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.preflight"}}]
    problem = {"kept": None, "problem": "POST was refused with HTTP status 403: forbidden"}
    played = play(tmp_path, tasks, {"forbidden": host(cluster={"counters": problem})})
    assert not played.failed, played.output
    assert "the dry run that creates one was rejected" in played.output and "HTTP status 403" in played.output


def test_memory_that_is_a_numa_node_is_named(tmp_path: Path) -> None:
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.preflight"}}]
    coherent = {"nvidia": {**node()["nvidia"], "numa_memory": ["0008:01:00.0"]}}
    played = play(tmp_path, tasks, {"plain": host(), "coherent": host(node=coherent)})
    assert not played.failed, played.output
    assert played.output.count("the memory of 0008:01:00.0 is a NUMA node of the host") == 1
    assert "nvidia_driver_coherent_memory" in played.output


def test_toolkit_with_known_vulnerability_is_named(tmp_path: Path) -> None:
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.preflight"}}]
    old = {"nvidia": {**node()["nvidia"], "toolkit_version": "1.17.7"}}
    played = play(tmp_path, tasks, {"fixed": host(), "old": host(node=old)})
    assert not played.failed, played.output
    assert played.output.count("version 1.17.7 has the vulnerability CVE-2025-23266") == 1
    assert "CVE-2024-0132" in played.output


def test_extended_resource_of_several_classes_is_named(tmp_path: Path) -> None:
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.preflight"}}]
    text = "The extended resource nvidia.com/gpu is served by several DeviceClasses: a, b."
    hosts = {
        "one": host(cluster={"duplicates": []}),
        "earlier": host(),
        "several": host(cluster={"duplicates": [text]}),
    }
    played = play(tmp_path, tasks, hosts)
    assert not played.failed, played.output
    assert played.output.count(text) == 1


def test_uid_of_the_ascend_drivers_user_differs_warns(tmp_path: Path) -> None:
    hosts = {
        name: host(node=NPUS | NO_GPU | {"ascend": WELL["ascend"] | ids}, **FLEET)
        for name, ids in (
            ("system-uid", {"uid": 990, "gid": 990}),
            ("required", {"uid": 1000, "gid": 1000}),
            ("unknown", {"uid": -1, "gid": -1}),
        )
    }
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.preflight"}}]
    played = play(tmp_path, tasks, hosts)
    assert not played.failed, played.output
    assert played.output.count("its user has UID 990 and GID 990") == 1 and played.output.count("its user has UID") == 1


@pytest.mark.prove
def test_npu_modes_that_forbid_slices_are_named_where_the_layout_asks_for_slices(tmp_path: Path) -> None:
    """The refusal names the node, the NPUs, the mode, and the remedy."""

    def npus(*reasons: str) -> dict[str, Any]:
        return {
            "devices": [
                {"vendor": "ascend", "index": index, "partitioning": {"blocked": reason}}
                for index, reason in enumerate(reasons)
            ]
        }

    machine = node(**NPUS, **WELL, **NO_GPU)
    dynamic = [{"match": {}, "mode": "dynamic"}]
    static = [{"match": {"vendor": "ascend"}, "mode": "static", "partitions": {"vir01": 1}}]
    for_gpus = [{"match": {"vendor": "nvidia"}, "mode": "dynamic"}]
    hosts = {
        name: {**host(layout, **FLEET), "preflight_node_info": machine, "preflight_accelerator_info": found}
        for name, layout, found in (
            ("dynamic", dynamic, npus(DIES_AS_ONE, "", DIES_AS_ONE)),
            ("static", static, npus("SMP mode")),
            ("for-gpus", for_gpus, npus("not for GPUs")),
            ("whole", [{"match": {}, "mode": "whole"}], npus("not for whole NPUs")),
            ("possible", dynamic, npus("", "")),
        )
    }
    hosts["read-by-the-role"] = {**host(dynamic, **FLEET), "preflight_node_info": machine}
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.preflight"}}]
    played = play(tmp_path, tasks, hosts)
    assert not played.failed, played.output
    assert played.output.count("NPU modes: the layout of n contains vNPUs") == 2
    assert f"NPU 0, 2: {DIES_AS_ONE}" in played.output and "multi-die-policy -d 1" in played.output
    assert "NPU 0: SMP mode" in played.output
    assert "not for" not in played.output


def test_layout_prepared_before_binding_needs_a_controller(tmp_path: Path) -> None:
    hosts = {
        "without-controller": host(AHEAD, cluster={"controller": False}),
        "pod-without-controller": host(AHEAD, **POD, cluster={"controller": False}),
        "with-controller": host(AHEAD, cluster={"controller": True}),
        "pod-with-controller": host(AHEAD, **POD, cluster={"controller": True}),
        "other-layout": host(MACHINES, cluster={"controller": None}),
        "plugin": host(AHEAD, cluster=WITHOUT_CLAIMS | {"controller": False}, **PLUGIN),
    }
    played = play(tmp_path, [{"ansible.builtin.include_role": {"name": "dra.accelerators.preflight"}}], hosts)
    assert set(played.failed) == {"without-controller", "pod-without-controller"}, played.output
    (text,) = played.failed["without-controller"]["msg"][1:]
    assert "prepared_before_binding" in text and "waiting-claims" in text and "dra.accelerators.controller" in text


@pytest.mark.prove
def test_metrics_without_authorization_beyond_loopback_are_named(tmp_path: Path) -> None:
    """The listener returns claims, pods, and namespaces to each program that can connect: addresses beyond loopback are reported."""
    open_to_all = {"all": "0.0.0.0:9817", "ipv6": "[::]:9817", "node": "10.0.0.1:9817", "name": "node-1:9817"}
    local = {"loopback": "127.0.0.1:9817", "ipv6-loopback": "[::1]:9817", "localhost": "localhost:9817", "none": ""}
    hosts = {name: host(dra_driver_metrics_address=address) for name, address in {**open_to_all, **local}.items()}
    hosts["authorized"] = host(dra_driver_metrics_address="0.0.0.0:9817", dra_driver_metrics_authorization=True)
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.preflight"}}]
    played = play(tmp_path, tasks, hosts)
    assert not played.failed, played.output
    named = {
        address
        for address in {**open_to_all, **local}.values()
        if f"serves metrics at {address} without" in played.output
    }
    assert named == set(open_to_all.values())
    assert played.output.count("serves metrics at 0.0.0.0:9817 without authorization") == 1, "not the authorized one"


def test_checks_do_not_evaluate_whole_answers() -> None:
    """A variable's expression is evaluated at each use: checks do not copy the whole facts of a node with 200 devices."""
    role = ROLE / "vars/main.yml"
    known: dict[str, Any] = yaml.safe_load(role.read_text("utf-8"))
    seen, names = set[str](), {"__preflight_problems", "__preflight_warnings"}
    while names:
        seen |= names
        used = {word for name in names for word in re.findall(r"\w+", str(known[name]))}
        names = (used & known.keys()) - seen
        assert used.isdisjoint({"preflight_node_info", "preflight_cluster_info"}), sorted(seen)
    assert "__preflight_managers" in seen
