# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Generate the configuration of every component as text, from the world, the host's facts, and the feature gates. No
side effects.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from .gates import as_flag
from .host import Host
from .pins import PAUSE_IMAGE
from .state import Node, World

PKI = "/etc/kubernetes/pki"
#: API versions and groups that are off by default and that the tests use.
RUNTIME_CONFIGURATION = (
    "resource.k8s.io/v1beta1=true",
    "resource.k8s.io/v1beta2=true",
    "resource.k8s.io/v1alpha3=true",
)


def unit(description: str, command: Sequence[str], after: str = "network.target", kind: str = "simple") -> str:
    """Return a systemd unit for one control plane program, which restarts whenever it exits."""
    start = " \\\n    ".join(command)
    return (
        f"[Unit]\nDescription={description}\nAfter={after}\nStartLimitIntervalSec=0\n\n"
        f"[Service]\nType={kind}\nExecStart={start}\nRestart=always\nRestartSec=1\nLimitNOFILE=65536\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def gates_flag(gates: dict[str, bool]) -> list[str]:
    """Return the flag that sets feature gates; empty if a component keeps its defaults."""
    return [f"--feature-gates={as_flag(gates)}"] if gates else []


def etcd_command() -> list[str]:
    """Return the command of etcd for tests: without fsync it takes a third of the time, and a power loss would lose
    data.
    """
    return [
        "/usr/local/bin/etcd",
        "--name=world",
        "--data-dir=/var/lib/etcd",
        "--unsafe-no-fsync=true",
        "--log-level=warn",
        "--auto-compaction-retention=1h",
        "--listen-client-urls=https://127.0.0.1:2379",
        "--advertise-client-urls=https://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        f"--cert-file={PKI}/etcd.crt",
        f"--key-file={PKI}/etcd.key",
        f"--trusted-ca-file={PKI}/ca.crt",
        "--client-cert-auth=true",
    ]


def apiserver_command(world: World, gates: dict[str, bool]) -> list[str]:
    """Return the command of the API server: Node and RBAC authorization, NodeRestriction, real certificates."""
    return [
        "/usr/local/bin/kube-apiserver",
        f"--advertise-address={world.control_address}",
        "--secure-port=6443",
        "--etcd-servers=https://127.0.0.1:2379",
        f"--etcd-cafile={PKI}/ca.crt",
        f"--etcd-certfile={PKI}/apiserver-etcd-client.crt",
        f"--etcd-keyfile={PKI}/apiserver-etcd-client.key",
        f"--client-ca-file={PKI}/ca.crt",
        f"--tls-cert-file={PKI}/apiserver.crt",
        f"--tls-private-key-file={PKI}/apiserver.key",
        f"--kubelet-client-certificate={PKI}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={PKI}/apiserver-kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP,Hostname",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={PKI}/service-account.pub",
        f"--service-account-signing-key-file={PKI}/service-account.key",
        f"--service-cluster-ip-range={world.service_subnet}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        # The control plane runs no kube-proxy: webhooks are called at their pods' addresses.
        "--enable-aggregator-routing=true",
        f"--runtime-config={','.join(RUNTIME_CONFIGURATION)}",
        *gates_flag(gates),
        "--profiling=false",
        "--v=1",
    ]


def controller_manager_command(gates: dict[str, bool]) -> list[str]:
    """Return the command of the controller manager. It is the only one, so it elects no leader."""
    configuration = "/etc/kubernetes/controller-manager.conf"
    return [
        "/usr/local/bin/kube-controller-manager",
        f"--kubeconfig={configuration}",
        f"--authentication-kubeconfig={configuration}",
        f"--authorization-kubeconfig={configuration}",
        f"--client-ca-file={PKI}/ca.crt",
        f"--root-ca-file={PKI}/ca.crt",
        f"--cluster-signing-cert-file={PKI}/ca.crt",
        f"--cluster-signing-key-file={PKI}/ca.key",
        f"--service-account-private-key-file={PKI}/service-account.key",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        *gates_flag(gates),
        "--v=1",
    ]


def scheduler_configuration() -> dict[str, object]:
    """Return the scheduler's config file."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": "/etc/kubernetes/scheduler.conf"},
        "leaderElection": {"leaderElect": False},
    }


def scheduler_command(gates: dict[str, bool]) -> list[str]:
    """Return the command of the scheduler."""
    configuration = "/etc/kubernetes/scheduler.conf"
    return [
        "/usr/local/bin/kube-scheduler",
        "--config=/etc/kubernetes/scheduler.json",
        f"--authentication-kubeconfig={configuration}",
        f"--authorization-kubeconfig={configuration}",
        f"--client-ca-file={PKI}/ca.crt",
        *gates_flag(gates),
        "--v=1",
    ]


def control_units(world: World, gates: dict[str, bool]) -> dict[str, str]:
    """Return the units of the control plane by file name."""
    return {
        "etcd.service": unit("etcd", etcd_command(), kind="notify"),
        "kube-apiserver.service": unit("Kubernetes API server", apiserver_command(world, gates), "etcd.service"),
        "kube-controller-manager.service": unit(
            "Kubernetes controller manager", controller_manager_command(gates), "kube-apiserver.service"
        ),
        "kube-scheduler.service": unit("Kubernetes scheduler", scheduler_command(gates), "kube-apiserver.service"),
    }


def kubelet_configuration(
    world: World, host: Host, gates: dict[str, bool], resolvers: Sequence[str]
) -> dict[str, object]:
    """Return the config file of a kubelet.

    Disk and memory belong to the host, not to the node, so no pod is evicted for them. Pods have no cluster DNS and
    use the host's name servers.
    """
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{PKI}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDomain": "cluster.local",
        "clusterDNS": list(resolvers) or [f"10.{world.block}.240.10"],
        "resolvConf": "/etc/kubernetes/resolv.conf",
        "cgroupDriver": cgroup_driver(host),
        "failCgroupV1": False,
        "failSwapOn": False,
        # Retry interval of the kubelet. The default is a minute, for which tests of recovery would wait.
        "syncFrequency": "10s",
        "maxPods": 200,
        "evictionHard": {
            "memory.available": "1Mi",
            "nodefs.available": "0%",
            "imagefs.available": "0%",
            "nodefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "featureGates": dict(sorted(gates.items())),
    }


def cgroup_driver(host: Host) -> str:
    """Return the cgroup driver: systemd owns the tree of version 2. With version 1, a container has no tree that
    systemd could own.
    """
    return "systemd" if host.cgroup_version == 2 else "cgroupfs"


def containerd_configuration(host: Host) -> str:
    """Return the config file of containerd: only the settings for the host and for the missing registry."""
    restricted = "" if host.can_lower_oom_score else "  restrict_oom_score_adj = true\n"
    return (
        "version = 3\n\n"
        "[plugins.'io.containerd.cri.v1.images'.pinned_images]\n"
        f"  sandbox = '{PAUSE_IMAGE}'\n\n"
        "[plugins.'io.containerd.cri.v1.runtime']\n"
        f"{restricted}\n"
        "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n"
        "  runtime_type = 'io.containerd.runc.v2'\n\n"
        "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\n"
        f"  SystemdCgroup = {str(host.cgroup_version == 2).lower()}\n"
    )


def pod_network(world: World, node: Node) -> str:
    """Return the CNI config of the node's pod network."""
    subnet = [{"subnet": world.pod_subnet(node)}]
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [subnet], "routes": [{"dst": "0.0.0.0/0"}]},
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "1.0.0", "name": "world", "plugins": [bridge, ports]}, indent=2) + "\n"


def routes(world: World, own: Node | None) -> str:
    """Return an idempotent script that routes to the other nodes' pods and lets the node's own pods out."""
    lines = ["set -e"]
    lines += [
        f"ip route replace {world.pod_subnet(node)} via {world.node_address(node)}"
        for node in world.nodes
        if own is None or node.index != own.index
    ]
    if own is not None:
        rule = f"POSTROUTING -s {world.pod_subnet(own)} ! -d {world.cluster_subnet} -j MASQUERADE"
        lines.append(f"iptables -w -t nat -C {rule} 2>/dev/null || iptables -w -t nat -A {rule}")
    return "\n".join(lines) + "\n"


def kube_proxy_configuration(world: World) -> dict[str, object]:
    """Return the config file of kube-proxy, which does not change the host's connection tracking."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": "/etc/kubernetes/kube-proxy.conf"},
        "mode": "iptables",
        "clusterCIDR": world.cluster_subnet,
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
            "udpTimeout": "0s",
            "udpStreamTimeout": "0s",
        },
    }


def bootstrap_objects() -> dict[str, object]:
    """Return the objects that the cluster needs before its first pod: the API server can read logs and run commands at
    kubelets.
    """
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "world:apiserver-to-kubelets"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin"},
        "subjects": [
            {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "kube-apiserver-kubelet-client"}
        ],
    }
