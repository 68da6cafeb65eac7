# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The configuration of components, and the parts of a container that restart after a change."""

from __future__ import annotations

import json
import shlex

import pytest
import tomllib
from world_cli import nodes, settings, state
from world_cli.archive import Entry
from world_cli.gates import feature_gates
from world_cli.host import Host
from world_cli.state import World

WORLD = World("w", 215, state.plan_nodes("w", 3, []))
OLD = Host(cgroup_version=1, missing_capabilities=("SYS_RESOURCE",))
NEW = Host(cgroup_version=2)
RUNTIME = "io.containerd.cri.v1.runtime"


@pytest.mark.parametrize(("host", "systemd", "restricted"), [(OLD, False, True), (NEW, True, None)])
def test_containerd_follows_the_machine(host: Host, systemd: bool, restricted: bool | None) -> None:
    configuration = tomllib.loads(settings.containerd_configuration(host))
    runtime = configuration["plugins"][RUNTIME]
    assert configuration["version"] == 3
    assert configuration["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == "localhost/pause:1"
    assert runtime["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is systemd
    assert runtime.get("restrict_oom_score_adj") is restricted


def test_containerd_leaves_the_device_interface_to_its_default_and_the_role() -> None:
    assert "cdi" not in settings.containerd_configuration(NEW).lower()


def test_kubelet_and_containerd_agree_on_control_groups() -> None:
    for host, driver in ((OLD, "cgroupfs"), (NEW, "systemd")):
        kubelet = settings.kubelet_configuration(WORLD, host, {"A": True}, ["10.0.0.53"])
        assert kubelet["cgroupDriver"] == driver
        assert kubelet["clusterDNS"] == ["10.0.0.53"]
        assert kubelet["featureGates"] == {"A": True}


def test_pods_have_a_name_server_even_where_the_machine_has_none() -> None:
    assert settings.kubelet_configuration(WORLD, OLD, {}, [])["clusterDNS"] == ["10.215.240.10"]


def test_every_node_reaches_the_pods_of_all_others() -> None:
    script = settings.routes(WORLD, WORLD.nodes[1]).splitlines()
    assert "ip route replace 10.215.1.0/24 via 10.215.0.11" in script
    assert "ip route replace 10.215.3.0/24 via 10.215.0.13" in script
    assert not any("10.215.2.0/24 via" in line for line in script)
    assert any("-s 10.215.2.0/24 ! -d 10.215.0.0/16 -j MASQUERADE" in line for line in script)


def test_the_control_plane_reaches_all_pods_and_hides_none() -> None:
    script = settings.routes(WORLD, None)
    assert script.count("ip route replace") == 3
    assert "iptables" not in script


def test_the_api_server_is_a_real_one() -> None:
    command = settings.apiserver_command(WORLD, feature_gates())
    assert "--authorization-mode=Node,RBAC" in command
    assert "--enable-admission-plugins=NodeRestriction" in command
    assert not any("anonymous" in word or "insecure" in word for word in command)
    runtime = next(word for word in command if word.startswith("--runtime-config="))
    assert "resource.k8s.io/v1beta1=true" in runtime
    assert "resource.k8s.io/v1beta2=true" in runtime


def test_gates_are_set_in_every_component_or_in_none() -> None:
    for gates in ({"A": True, "B": False}, {}):
        units = settings.control_units(WORLD, gates)
        kubernetes = [text for name, text in units.items() if name.startswith("kube-")]
        assert [text.count("--feature-gates=A=true,B=false") for text in kubernetes] == [int(bool(gates))] * 3
        assert [text.count("--feature-gates") for text in kubernetes] == [int(bool(gates))] * 3


def test_units_hold_their_whole_command() -> None:
    for name, text in settings.control_units(WORLD, {"A": True}).items():
        start = text.split("ExecStart=", 1)[1].split("\nRestart=")[0].replace("\\\n", " ")
        words = shlex.split(start)
        assert words[0].startswith("/usr/local/bin/"), name
        assert all(word.startswith("--") for word in words[1:]), name


def test_the_pod_network_is_the_nodes_own() -> None:
    network = json.loads(settings.pod_network(WORLD, WORLD.nodes[2]))
    assert network["plugins"][0]["ipam"]["ranges"] == [[{"subnet": "10.215.3.0/24"}]]


@pytest.mark.parametrize(
    ("path", "services"),
    [
        ("etc/world/routes", {"world-network"}),
        ("etc/containerd/config.toml", {"containerd"}),
        ("var/lib/kubelet/config.yaml", {"kubelet"}),
        ("etc/kubernetes/kubelet.conf", {"kubelet"}),
        ("etc/kubernetes/kube-proxy.yaml", {"kube-proxy"}),
        ("etc/kubernetes/pki/ca.crt", {"kubelet", "kube-proxy"}),
        ("etc/pip.conf", set()),
        ("etc/cni/net.d/10-world.conflist", set()),
    ],
)
def test_only_what_reads_a_file_of_a_worker_starts_again(path: str, services: set[str]) -> None:
    assert nodes.services_of(path, nodes.WORKER_SERVICES) == services


@pytest.mark.parametrize(
    ("path", "services"),
    [
        ("etc/systemd/system/etcd.service", {"etcd"}),
        ("etc/systemd/system/kube-apiserver.service", {"kube-apiserver"}),
        ("etc/kubernetes/scheduler.conf", {"kube-scheduler"}),
        ("etc/kubernetes/scheduler.json", {"kube-scheduler"}),
        ("etc/kubernetes/controller-manager.conf", {"kube-controller-manager"}),
        ("etc/world/routes", {"world-network"}),
    ],
)
def test_only_what_reads_a_file_of_the_control_plane_starts_again(path: str, services: set[str]) -> None:
    assert nodes.services_of(path, nodes.CONTROL_SERVICES) == services


def test_a_file_differs_by_content_mode_and_link() -> None:
    base = nodes.file_digests([Entry("x", b"a", 0o644)])["x"]
    for other in (Entry("x", b"b", 0o644), Entry("x", b"a", 0o600), Entry("x", b"a", 0o644, link="a")):
        assert nodes.file_digests([other])["x"] != base
    assert nodes.file_digests([Entry("x", b"a", 0o644)])["x"] == base


@pytest.mark.parametrize(("host", "cut"), [(OLD, True), (NEW, False)])
def test_a_node_is_never_privileged_and_gets_what_the_machine_has(host: Host, cut: bool) -> None:
    arguments = nodes.run_arguments(WORLD, "w-node1", "10.215.0.11", host, {"HTTP_PROXY": "p"}, "volume")
    assert "--privileged" not in arguments
    assert ("SYS_RESOURCE" in arguments) is cut
    assert "volume:/var/lib/containerd" in arguments
    assert "HTTP_PROXY=p" in arguments
    assert "dra.accelerators.world=w" in arguments
    # Runtimes keep containers' programs below /run, and Ansible keeps its own below /tmp.
    assert all("exec" in word for word in arguments if word.startswith(("/run:", "/tmp:")))
