# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role dra_driver with the driver as a pod: refused variables, the DaemonSet, and how the role recognizes its pods."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/dra_driver"
AHEAD = [{"match": {}, "mode": "dynamic", "prepared_before_binding": True}]
MACHINES = [{"match": {}, "mode": "dynamic", "passthrough": True}]
IMAGE = "localhost/dra-accelerators-driver:0.1.0-1a2b3c4d-0a1b2c3d"


def host(**more: Any) -> dict[str, Any]:
    """Return the variables of a host without files of the driver. Its Node has been read."""
    labels = {"dra-accelerators/driver": "daemonset"} if more.pop("label", False) else {}
    return {
        "dra_driver_deploy_as": "daemonset",
        "dra_driver_node_name": "n",
        "dra_driver_image": IMAGE,
        "dra_driver_node_info": {
            "driver": {"configuration": more.pop("files", [])},
            "ascend": {"group": "HwHiAiUser"},
            "devices": {vendor: ["0000:18:00.0"] for vendor in more.pop("has", ["nvidia"])},
        },
        "dra_driver_cluster_info": {"namespace": {"exists": True}, "nodes": {"n": {"labels": labels}}},
        **more,
    }


REFUSED = {
    "no-image": (host(dra_driver_image=""), "dra_driver_image names no image"),
    "machines": (host(dra_driver_layout=MACHINES), "dra_driver_pod_passthrough"),
    # Without access to the node's processes, the driver would unbind a device that a process has open.
    "machines-without-processes": (
        host(dra_driver_layout=MACHINES, dra_driver_pod_passthrough=True, dra_driver_pod_host_pid=False),
        "without dra_driver_pod_host_pid",
    ),
}


def test_labels_of_a_deleted_node_are_not_written(tmp_path: Path) -> None:
    """A host keeps files of the pod after its Node is deleted: the label task is skipped, because kubernetes.core would wait for the Node."""
    (task,) = (
        each
        for each in yaml.safe_load((ROLE / "tasks/no_pod.yml").read_text("utf-8"))
        if each["name"] == "Remove the labels that select the node for the driver's DaemonSets"
    )
    hosts = {name: host() for name in ("deleted", "present")}
    for name, each in hosts.items():
        each["dra_driver_cluster_info"]["nodes"]["n"]["exists"] = name == "present"
    tasks = [
        {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")},
        {"ansible.builtin.debug": {"msg": "{{ 'patch' | to_json | b64encode }}"}, "when": task["when"]},
    ]
    assert set(play(tmp_path, tasks, hosts).messages) == {"present"}


def test_layout_without_its_permissions_is_rejected(tmp_path: Path) -> None:
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.dra_driver"}}]
    played = play(tmp_path, tasks, {name: variables for name, (variables, _said) in REFUSED.items()})
    assert set(played.failed) == set(REFUSED), played.output
    for name, (_variables, output) in REFUSED.items():
        (text,) = played.failed[name]["msg"]
        assert output in text and "daemonset" in text, text


@pytest.mark.parametrize(
    ("tags", "refused"),
    [(["--tags", "layout"], True), (["--tags", "layout,driver"], False), ([], False)],
)
def test_site_refuses_a_pod_without_an_image_before_devices_change(
    tmp_path: Path, tags: list[str], refused: bool
) -> None:
    """With the tag ``layout`` alone, no task of this run builds the image: the run fails before the devices change."""
    plays = yaml.safe_load((ROLE.parents[1] / "playbooks/site.yml").read_text("utf-8"))
    (tasks,) = (each["tasks"] for each in plays if each["name"] == "Prepare the nodes")
    names = [task["name"] for task in tasks]
    shown = {"ansible.builtin.debug": {"msg": "partitions"}, "tags": ["layout"]}
    pods = [task for task in tasks[: names.index("Partition the GPUs")] if task["name"] == CHECK]
    variables = host(dra_driver_image="")
    variables |= {"accelerator_cluster": variables.pop("dra_driver_cluster_info"), "accelerator_node_layout": []}
    hosts = {"plain": variables, "named": {**variables, "dra_driver_image": IMAGE}}
    hosts["service"] = {**variables, "dra_driver_deploy_as": "service"}
    played = play(tmp_path, [*pods, shown], hosts, *tags)
    assert set(played.failed) == ({"plain"} if refused else set()), played.output
    assert played.output.count('"msg": "partitions"') == len(hosts) - refused


CHECK = "Reject a node without an image for the driver's pod"


def test_repartition_refuses_a_pod_without_an_image_before_devices_change(tmp_path: Path) -> None:
    """A node with changes and without an image is refused. A node without changes needs no image."""
    plays = yaml.safe_load((ROLE.parents[1] / "playbooks/repartition.yml").read_text("utf-8"))
    (plan,) = (each for each in plays if each["name"] == "Plan the layout changes")
    names = [task["name"] for task in plan["tasks"]]
    (number,) = (index for index, name in enumerate(names) if name == CHECK)
    assert number < names.index("Fail if the plan is blocked")
    checks = {"accelerator_checks_pod": plan["vars"]["accelerator_checks_pod"]}
    variables = {**host(dra_driver_image=""), **checks, "accelerator_node_layout": [], "accelerator_is_idle": False}
    variables["accelerator_cluster"] = variables.pop("dra_driver_cluster_info")
    hosts = {"plain": variables, "idle": {**variables, "accelerator_is_idle": True}}
    hosts["service"] = {**variables, "dra_driver_deploy_as": "service"}
    hosts["named"] = {**variables, "dra_driver_image": IMAGE}
    played = play(tmp_path, [plan["tasks"][number]], hosts)
    assert set(played.failed) == {"plain"} and "names no image" in str(played.failed["plain"]), played.output


@pytest.mark.parametrize("role", ["dra_driver", "dra_controller"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("pod_api_ports", "6443"), ("pod_api_ports", 6443), ("token_audiences", "https://api.example")],
)
def test_string_instead_of_a_list_is_rejected(tmp_path: Path, role: str, option: str, value: str | int) -> None:
    """A string instead of a list is refused. Each character of "6443" would become a port of the NetworkPolicy."""
    tasks = [{"ansible.builtin.include_role": {"name": f"dra.accelerators.{role}"}}]
    variables = {**host(), "dra_controller_deploy_as": "deployment", f"{role}_{option}": value}
    played = play(tmp_path, tasks, {"n1": variables})
    assert f"{role}_{option} is " in played.failed["n1"]["msg"], played.output


INVALID_SIZES = ["50%", "63M", "0G", "1", 1073741824, "1G,uid=0", "1G; reboot", "1G\n", "1.5G", "1Gi", "12345G", ""]


@pytest.mark.prove
def test_invalid_size_of_mps_memory_is_rejected(tmp_path: Path) -> None:
    """An invalid size is refused, because the value becomes a part of a command that root runs."""
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.dra_driver"}}]
    # Without an image the role fails later, so that the valid sizes stop before anything is written.
    sizes = {f"n{index}": size for index, size in enumerate([*INVALID_SIZES, "64M", "999M", "1024M", "1G", "64G"])}
    hosts = {name: host(dra_driver_image="", dra_driver_mps_memory=size) for name, size in sizes.items()}
    played = play(tmp_path, tasks, hosts)
    output = {name: "".join(played.failed[name]["msg"]) for name in sizes}
    rejected = [sizes[name] for name, text in output.items() if "dra_driver_mps_memory is" in text]
    assert rejected == INVALID_SIZES, output


def test_invalid_network_tools_are_rejected(tmp_path: Path) -> None:
    """A vendor without such a tool is refused. Otherwise it would be ignored, and the driver would not start with that vendor's runtime."""
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.dra_driver"}}]
    runtime = {"dra_driver_network_tools": ["ascend"], "dra_driver_vendor_runtimes": ["ascend"]}
    hosts = {
        "unknown": host(dra_driver_image="", dra_driver_network_tools=["nvidia"]),
        "both": host(dra_driver_image="", **runtime),
        "valid": host(dra_driver_image="", dra_driver_network_tools=["ascend"]),
    }
    played = play(tmp_path, tasks, hosts)
    output = {name: "dra_driver_network_tools is" in "".join(played.failed[name]["msg"]) for name in hosts}
    assert output == {"unknown": True, "both": True, "valid": False}, played.output


FACTS = (
    "{{ {'set': __dra_driver_pod_set, 'revision': __dra_driver_revision, 'has': __dra_driver_has_pod | bool, 'lacks': __dra_driver_pod_missing,"
    " 'rules': __dra_driver_pod_settings.device_rules | default('')}"
    " | to_json | b64encode }}"
)
HOSTS = {
    "plain": host(),
    "metrics": host(dra_driver_metrics_address="0.0.0.0:9817", files=["driver-pod.yaml"]),
    "node-network": host(dra_driver_metrics_address="0.0.0.0:9817", dra_driver_pod_host_network=True, label=True),
    "another-layout": host(dra_driver_layout=[{"match": {}, "mode": "whole"}], dra_driver_log_level="debug"),
    "device-rules": host(__dra_driver_handler_written={"device_rules": [{"allow": True, "type": "c", "major": 195}]}),
    "another-image": host(dra_driver_image=f"{IMAGE}1"),
    "selinux": host(dra_driver_pod_selinux_type="spc_t", files=["driver.yaml", "kubeconfig"]),
    "allowed": host(dra_driver_layout=AHEAD + MACHINES, dra_driver_pod_passthrough=True),
}


def values(directory: Path, hosts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the value of the expression FACTS for each host."""
    (directory / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    read = {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")}
    given = {name: {**defaults, **variables} for name, variables in hosts.items()}
    return play(directory, [read, {"ansible.builtin.debug": {"msg": FACTS}}], given).messages


def test_node_without_a_named_image_keeps_its_image(tmp_path: Path) -> None:
    """Without a configured image the node keeps its current image, for example in a repartition, which builds no image."""

    def daemon_set(revision: str, image: str, created: str) -> dict[str, Any]:
        pod = {"spec": {"containers": [{"name": "driver", "image": image}]}}
        return {
            "metadata": {"name": f"dra-accelerators-driver-{revision}", "creationTimestamp": created},
            "spec": {"template": pod},
        }

    present = [
        daemon_set("1111111111", "r/of-another-node:3", "2026-11-03T00:00:00Z"),
        daemon_set("2222222222", "r/new:2", "2026-11-02T00:00:00Z"),
        daemon_set("3333333333", "r/old:1", "2026-11-01T00:00:00Z"),
    ]
    hosts = {
        "a": host(dra_driver_image="", __dra_driver_pod_sets_present={"resources": present}),
        "b": host(__dra_driver_pod_sets_present={"resources": present}),
    }
    for each in hosts.values():
        each["dra_driver_cluster_info"]["nodes"]["n"]["labels"] = {
            "dra-accelerators/driver": "daemonset",
            "dra-accelerators/driver-2222222222": "",
            "dra-accelerators/driver-3333333333": "",
        }
    reported = values(tmp_path, hosts)
    images = {
        name: each["set"]["spec"]["template"]["spec"]["containers"][0]["image"] for name, each in reported.items()
    }
    assert images == {"a": "r/new:2", "b": IMAGE}
    assert [each["lacks"] for each in reported.values()] == [[], []]


def test_daemonset_follows_the_variables_exactly(tmp_path: Path) -> None:
    reported = values(tmp_path, HOSTS)
    assert set(reported) == set(HOSTS)
    specs = {name: each["set"]["spec"]["template"]["spec"] for name, each in reported.items()}
    containers = {name: spec["containers"][0] for name, spec in specs.items()}
    ports = {name: each.get("ports") for name, each in containers.items()}
    assert ports == {**dict.fromkeys(HOSTS), "metrics": [{"name": "metrics", "containerPort": 9817}]}, (
        "a port of the host's could not be had by two pods that overlap"
    )
    assert {name for name, spec in specs.items() if spec.get("hostNetwork")} == {"node-network"}
    types = {name: each["securityContext"].get("seLinuxOptions") for name, each in containers.items()}
    assert types == {**dict.fromkeys(HOSTS), "selinux": {"type": "spc_t"}}
    # Systemd mounts the companions of a claim there while the pod runs. Without the mount the pod does not see an MPS
    # daemon.
    mounts = [mount for each in containers.values() for mount in each["volumeMounts"]]
    assert "/host/run/dra-accelerators/companions" in {mount["mountPath"] for mount in mounts}
    apart = {mount["mountPath"] for mount in mounts if mount.get("mountPropagation") != "HostToContainer"}
    assert apart == {"/host/sys"}, (
        "Kubernetes has no propagation where all that is mounted below is to be read-only too"
    )
    # A pod is recognized by the Node's label, and by the file that is removed last.
    assert {name for name, each in reported.items() if each["has"]} == {"metrics", "node-network"}
    assert {name: each["lacks"] for name, each in reported.items()} == {name: [] for name in HOSTS}
    # Options that the node reads from its own file do not change the pod's revision. All other parts of the pod do.
    revisions = {name: each["revision"] for name, each in reported.items()}
    assert revisions["plain"] == revisions["another-layout"] == revisions["device-rules"]
    assert len(set(revisions.values())) == len(HOSTS) - 2
    assert {name for name, each in reported.items() if each["rules"]} == {"device-rules"}
    for name, each in reported.items():
        wanted = {"dra-accelerators/driver": "daemonset", f"dra-accelerators/driver-{revisions[name]}": ""}
        assert specs[name]["nodeSelector"] == wanted and each["set"]["metadata"]["name"].endswith(revisions[name])
        chosen = each["set"]["spec"]["selector"]["matchLabels"]
        assert chosen.items() <= each["set"]["spec"]["template"]["metadata"]["labels"].items()
        assert chosen["dra-accelerators/revision"] == revisions[name]


MOUNTED = "{{ __dra_driver_pod_spec | to_json | b64encode }}"
PLACES = {
    "claims": host(),
    "machines": host(dra_driver_pod_passthrough=True),
    "resources": host(dra_driver_kubelet_interface="device-plugin"),
    "npus": host(has=["ascend"], accelerator_vendors=["nvidia", "ascend"]),
    "elsewhere": host(dra_driver_cdi_directory="/etc/cdi", dra_driver_kubelet_root="/srv/kubelet"),
}
# Paths that are mounted writable on each host, and the additional ones by host.
WRITTEN = {
    "/var/lib/kubelet/plugins/gpu.nvidia.com",
    "/var/lib/kubelet/plugins_registry",
    "/run/cdi",
    "/run/dra-accelerators/companions",
}
LOCKS = {
    f"/run/{name}_lock"
    for name in ("vnpu_cfg", "npu_dev_syslog_cfg", "custom_op_cfg", "op_timeout_cfg", "device_share_cfg")
}
WRITTEN_BY = {
    "claims": WRITTEN,
    "machines": WRITTEN | {"/sys/bus/pci/drivers", "/sys/devices"},
    "resources": WRITTEN | {"/var/lib/kubelet/device-plugins"},
    "npus": WRITTEN - {"/var/lib/kubelet/plugins/gpu.nvidia.com"} | {"/var/lib/kubelet/plugins/npu.huawei.com"},
    "elsewhere": {
        "/srv/kubelet/plugins/gpu.nvidia.com",
        "/srv/kubelet/plugins_registry",
        "/etc/cdi",
        "/run/dra-accelerators/companions",
    },
}


def test_pod_writes_only_to_the_listed_directories(tmp_path: Path) -> None:
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    hosts = {name: {**defaults, **variables} for name, variables in PLACES.items()}
    read = {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")}
    reported = play(tmp_path, [read, {"ansible.builtin.debug": {"msg": MOUNTED}}], hosts).messages
    assert set(reported) == set(PLACES)
    for name, spec in reported.items():
        volumes = {each["name"]: each["hostPath"] for each in spec["volumes"]}
        mounts = spec["containers"][0]["volumeMounts"]
        assert len(volumes) == len(spec["volumes"]) == len(mounts)
        # Each path is mounted at the node's path below /host, so that a path means the same in the container.
        for mount in mounts:
            assert mount["mountPath"] == f"/host{volumes[mount['name']]['path']}".rstrip("/")
        read_only = {mount["mountPath"] for mount in mounts if mount.get("readOnly")}
        assert read_only == {"/host", "/host/run", "/host/proc", "/host/sys"}, name
        written = {volumes[mount["name"]]["path"]: mount for mount in mounts if not mount.get("readOnly")}
        assert set(written) == WRITTEN_BY[name]
        # The container runtime cannot create a mount point in a read-only mount: the kubelet creates it on the node, or
        # the kernel has it.
        for path, mount in written.items():
            there = path.startswith(("/sys/", "/etc")) and path != "/etc/cdi"
            assert volumes[mount["name"]]["type"] == ("" if there else "DirectoryOrCreate")
        # These file systems contain other mounts, which are read-only where the node supports that.
        below = {mount["mountPath"]: mount["recursiveReadOnly"] for mount in mounts if "recursiveReadOnly" in mount}
        assert below == {"/host/sys": "IfPossible"}
        assert not [mount for mount in mounts if "recursiveReadOnly" in mount and "mountPropagation" in mount]


SERVED = (
    "{{ {'backends': __dra_driver_settings.backends, 'names': __dra_driver_node_names, 'paths': __dra_driver_pod_paths | map(attribute='path'),"
    " 'objects': __dra_driver_shared_objects, 'tmpfiles': lookup('ansible.builtin.template', 'tmpfiles.conf.j2'),"
    " 'directories': __dra_driver_npu_lock_files | default([]) | map(attribute='path'),"
    " 'unit': lookup('ansible.builtin.template', __dra_driver_unit ~ '.j2')} | to_json | b64encode }}"
)
FLEET = {"accelerator_vendors": ["nvidia", "ascend"]}
UNIT = {"ansible_managed": "written", "dra_driver_release": "0.1.0-1a2b3c4d", "dra_driver_environment": "0123456789ab"}
NODES = {
    "as-ever": host(),
    "gpus": host(**FLEET),
    "npus": host(has=["ascend"], **FLEET),
    "both": host(has=["ascend", "nvidia"], **FLEET),
    "nothing-to-see": host(has=[], **FLEET),
    "npus-that-are-left": host(has=["ascend", "nvidia"]),
}


def test_fleet_with_several_vendors_serves_the_devices_of_each_node(tmp_path: Path) -> None:
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    hosts = {
        name: {**defaults, **UNIT, **variables, "accelerator_kubeconfig": f"/{name}"}
        for name, variables in NODES.items()
    }
    read = {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")}
    played = play(tmp_path, [read, {"ansible.builtin.debug": {"msg": SERVED}}], hosts)
    reported = played.messages
    assert set(reported) == set(NODES), played.output
    both = ["nvidia", "ascend"]
    assert {name: each["backends"] for name, each in reported.items()} == {
        "as-ever": ["nvidia"],
        "gpus": ["nvidia"],
        "npus": ["ascend"],
        "both": both,
        "nothing-to-see": both,
        "npus-that-are-left": ["nvidia"],
    }
    assert reported["npus"]["names"] == ["npu.huawei.com"]
    folders = {name: {path for path in each["paths"] if "/plugins/" in path} for name, each in reported.items()}
    assert folders["gpus"] == {"/var/lib/kubelet/plugins/gpu.nvidia.com"} == folders["as-ever"]
    assert folders["npus"] == {"/var/lib/kubelet/plugins/npu.huawei.com"}
    # Only nodes with NPUs get the writable paths of the vendor library.
    of_npus = {"npus", "both", "nothing-to-see"}
    # The DCMI helper writes the vendor's files; the driver does not.
    assert not any("/etc" in each["paths"] or any(lock in each["unit"] for lock in LOCKS) for each in reported.values())
    assert {
        name for name, each in reported.items() if "\nWants=dra-accelerators-dcmi.service\n" in each["unit"]
    } == of_npus
    for lock in LOCKS:
        assert {
            name for name, each in reported.items() if f"d {lock} 0700 root root -" in each["tmpfiles"]
        } == of_npus, lock
        assert {name for name, each in reported.items() if lock in each["directories"]} == of_npus, lock
    # The policies belong to the cluster: each node writes the same ones.
    assert reported["gpus"]["objects"] == reported["npus"]["objects"]
    for fleet, names in (("npus", ["gpu.nvidia.com", "npu.huawei.com"]), ("as-ever", ["gpu.nvidia.com"])):
        rights = next(each for each in reported[fleet]["objects"] if each["kind"] == "ClusterRole")
        (allowed,) = (rule["resourceNames"] for rule in rights["rules"] if "resourceNames" in rule)
        assert allowed == names
        policy = next(each for each in reported[fleet]["objects"] if each["metadata"]["name"].endswith("driver-slices"))
        output = [each["expression"] for each in policy["spec"]["validations"]]
        assert f"variables.slice.spec.driver in {json.dumps(names)}".replace('"', "'") in output


OFFERED = (
    "{{ {'settings': __dra_driver_settings, 'paths': __dra_driver_pod_paths | map(attribute='path'), 'print': __dra_driver_fingerprint,"
    " 'unit': lookup('ansible.builtin.template', __dra_driver_unit ~ '.j2'), 'absent': __dra_driver_absent_plugin_files,"
    " 'label': {__dra_driver_interface_label: __dra_driver_interface_value}} | to_json | b64encode }}"
)


def test_device_plugin_node_mounts_only_the_kubelets_plugin_directory(tmp_path: Path) -> None:
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    ways = {"claims": {}, "plugin": {"dra_driver_kubelet_interface": "device-plugin"}}
    hosts = {name: {**defaults, **UNIT, **host(**FLEET), **more} for name, more in ways.items()}
    read = {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")}
    played = play(tmp_path, [read, {"ansible.builtin.debug": {"msg": OFFERED}}], hosts)
    assert set(played.messages) == set(ways), played.output
    claims, plugin = played.messages["claims"], played.messages["plugin"]
    # A release that does not support the option does not get it.
    assert "kubelet_interface" not in claims["settings"]
    assert plugin["settings"]["kubelet_interface"] == "device-plugin"
    assert claims["print"] != plugin["print"], "the driver is started again for it"
    label = "dra.accelerators/kubelet-interface"
    assert (claims["label"], plugin["label"]) == ({label: ""}, {label: "device-plugin"})
    directory = "/var/lib/kubelet/device-plugins"
    assert directory not in claims["paths"] and "device-plugins" not in claims["unit"]
    assert set(plugin["paths"]) - set(claims["paths"]) == {directory}
    lines = plugin["unit"].splitlines()
    assert [line for line in lines if directory in line and not line.startswith("#")] == [
        f"ExecStartPre=+/bin/mkdir -p -m 0750 /var/lib/kubelet/plugins /var/lib/kubelet/plugins_registry {directory}",
        f"ReadWritePaths={directory}",
    ]
    alike = [
        [
            line
            for line in each["unit"].splitlines()
            if not re.search("FINGERPRINT|device-plugins|ExecStartPre|^# The device plugin creates", line)
        ]
        for each in (claims, plugin)
    ]
    assert alike[0] == alike[1], "no other right"
    # Files for containers are removed with the driver, for both kubelet interfaces.
    wanted = {
        "/var/run/cdi/k8s.gpu.nvidia.com-device_plugin.json": "k8s.gpu.nvidia.com/device",
        "/var/run/cdi/k8s.npu.huawei.com-device_plugin.json": "k8s.npu.huawei.com/device",
    }
    folders = ["/var/run/cdi/k8s.gpu.nvidia.com-metadata", "/var/run/cdi/k8s.npu.huawei.com-metadata"]
    assert {each["path"]: each["marker"] for each in claims["absent"] if "marker" in each} == wanted
    assert [each["path"] for each in claims["absent"] if "marker" not in each] == folders, "if they are empty"
    assert {each["state"] for each in plugin["absent"]} == {"absent"}


POLICY = "{{ {'objects': __dra_driver_pod_objects, 'resources': dra_driver_pod_resources} | to_json | b64encode }}"
OTHER_CLUSTER = {"dra_driver_context": "other", "accelerator_kubeconfig_context": "other"}
NETWORKS = {
    "read": host(__dra_driver_api_endpoints={"resources": [{"ports": [{"port": 6443}]}, {"ports": [{"port": 6443}]}]}),
    "named": host(
        dra_driver_pod_api_ports=[16443], dra_driver_pod_metrics_peers=[{"podSelector": {}}], **OTHER_CLUSTER
    ),
}


def test_pods_have_a_memory_limit_and_connect_to_the_api_server_only(tmp_path: Path) -> None:
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    hosts = {name: {**defaults, **variables} for name, variables in NETWORKS.items()}
    read = {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")}
    reported = play(tmp_path, [read, {"ansible.builtin.debug": {"msg": POLICY}}], hosts).messages
    assert reported["read"]["resources"]["limits"] == {"memory": "1Gi"}
    specs = {
        name: next(each["spec"] for each in one["objects"] if each["kind"] == "NetworkPolicy")
        for name, one in reported.items()
    }
    for spec in specs.values():
        assert (spec["podSelector"], spec["policyTypes"]) == ({}, ["Ingress", "Egress"])
        (ingress,) = spec["ingress"]
        assert ingress["ports"] == [{"port": "metrics", "protocol": "TCP"}]
    assert [each["port"] for each in specs["read"]["egress"][0]["ports"]] == [443, 6443]
    assert [each["port"] for each in specs["named"]["egress"][0]["ports"]] == [16443]
    # An empty list would change the object in each run, because the API server does not store it.
    assert "from" not in specs["read"]["ingress"][0]
    assert specs["named"]["ingress"][0]["from"] == [{"podSelector": {}}]


def test_network_policy_serves_the_pods_of_all_hosts_of_the_cluster(tmp_path: Path) -> None:
    """One host of a batch writes the policy for all hosts. With its own settings only, the last batch would block the other pods."""
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    peers = [[{"podSelector": {}}], [{"ipBlock": {"cidr": "10.0.0.0/8"}}]]
    variables: dict[str, dict[str, Any]] = {
        "one": {"dra_driver_pod_api_ports": [16443], "dra_driver_pod_metrics_peers": peers[0]},
        "two": {"dra_driver_pod_api_ports": [6443, 16443], "dra_driver_pod_metrics_peers": peers[1]},
        "other": {"dra_driver_pod_api_ports": [8443], **OTHER_CLUSTER},
    }
    hosts = {name: {**defaults, **host(**each)} for name, each in variables.items()}
    groups = {"ansible.builtin.group_by": {"key": "accelerator_nodes"}}
    read = {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")}
    reported = play(tmp_path, [groups, read, {"ansible.builtin.debug": {"msg": POLICY}}], hosts).messages
    specs = {
        name: next(each["spec"] for each in one["objects"] if each["kind"] == "NetworkPolicy")
        for name, one in reported.items()
    }
    assert specs["one"] == specs["two"]
    assert [each["port"] for each in specs["one"]["egress"][0]["ports"]] == [6443, 16443]
    assert specs["one"]["ingress"][0]["from"] == [peers[1][0], peers[0][0]]
    assert [each["port"] for each in specs["other"]["egress"][0]["ports"]] == [8443]
    assert "from" not in specs["other"]["ingress"][0]
