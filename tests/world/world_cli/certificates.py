# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The world's certificate authority, and a certificate for every identity of the cluster."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import cache, state
from .commands import execute
from .state import Node, World

DAYS = "3650"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256")


@dataclass(frozen=True)
class Identity:
    """One certificate: file name, distinguished name, and its server names and addresses (none for a client)."""

    name: str
    common_name: str
    organization: str | None = None
    serves: tuple[str, ...] = ()


def control_plane_identities(world: World) -> tuple[Identity, ...]:
    """Return all identities of the control plane, and the administrator's."""
    service = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
    names = tuple(f"DNS:{name}" for name in (*service, "localhost", world.control))
    addresses = tuple(f"IP:{address}" for address in (world.control_address, world.service_address, "127.0.0.1"))
    return (
        Identity("apiserver", "kube-apiserver", serves=(*names, *addresses)),
        Identity("etcd", "etcd", serves=("DNS:localhost", "IP:127.0.0.1")),
        Identity("apiserver-etcd-client", "kube-apiserver-etcd-client"),
        Identity("apiserver-kubelet-client", "kube-apiserver-kubelet-client"),
        Identity("controller-manager", "system:kube-controller-manager"),
        Identity("scheduler", "system:kube-scheduler"),
        Identity("kube-proxy", "system:kube-proxy"),
        Identity("admin", "kubernetes-admin", "system:masters"),
    )


def node_identity(node: Node) -> Identity:
    """Return a kubelet's identity in the form that the node authorizer requires."""
    return Identity("kubelet", f"system:node:{node.name}", "system:nodes")


def request_arguments(identity: Identity) -> list[str]:
    """Return the arguments of ``openssl req`` for the identity's server or client certificate."""
    organization = f"/O={identity.organization}" if identity.organization else ""
    extensions = ["basicConstraints=critical,CA:FALSE", "keyUsage=critical,digitalSignature"]
    # A server that is also a client of its peers (etcd checks itself) needs both uses.
    extensions.append(f"extendedKeyUsage={'serverAuth,clientAuth' if identity.serves else 'clientAuth'}")
    if identity.serves:
        extensions.append(f"subjectAltName={','.join(identity.serves)}")
    added = [word for extension in extensions for word in ("-addext", extension)]
    return ["-subj", f"{organization}/CN={identity.common_name}", *added]


def _issue(identity: Identity, authority: Path, target: Path) -> None:
    key, certificate = target / f"{identity.name}.key", target / f"{identity.name}.crt"
    signer = ("-CA", str(authority / "ca.crt"), "-CAkey", str(authority / "ca.key"))
    output = ("-keyout", str(key), "-out", str(certificate))
    execute(["openssl", "req", "-x509", *signer, *_NEW_KEY, "-days", DAYS, *output, *request_arguments(identity)])


def _make_authority(world: World, target: Path) -> None:
    output = ("-keyout", str(target / "ca.key"), "-out", str(target / "ca.crt"))
    uses = ("-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature")
    execute(["openssl", "req", "-x509", *_NEW_KEY, "-days", DAYS, *output, "-subj", f"/CN={world.name}-ca", *uses])
    execute(
        ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(target / "service-account.key")]
    )
    execute(
        [
            "openssl",
            "ec",
            "-in",
            str(target / "service-account.key"),
            "-pubout",
            "-out",
            str(target / "service-account.pub"),
        ]
    )
    for identity in control_plane_identities(world):
        _issue(identity, target, target)


def authority_folder(world: World) -> Path:
    """Return the directory of the CA and of the control plane's certificates."""
    return state.folder(world.name) / "certificates"


def node_folder(world: World, node: Node) -> Path:
    """Return the directory of one node's certificate."""
    return state.folder(world.name) / "nodes" / node.name


def ensure(world: World) -> None:
    """Create the missing or damaged certificates of the world. A new CA invalidates the nodes' certificates."""
    authority = authority_folder(world)
    if cache.ensure(authority, lambda target: _make_authority(world, target)):
        for node in world.nodes:
            (node_folder(world, node) / cache.STAMP).unlink(missing_ok=True)
    for node in world.nodes:
        cache.ensure(node_folder(world, node), partial(_issue, node_identity(node), authority))


def kubeconfig(server: str, authority: bytes, certificate: bytes, key: bytes, user: str) -> str:
    """Return a kubeconfig (JSON, which is YAML too) with embedded certificates and keys."""

    def encode(data: bytes) -> str:
        return base64.b64encode(data).decode()

    configuration = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "world", "cluster": {"server": server, "certificate-authority-data": encode(authority)}}],
        "users": [
            {"name": user, "user": {"client-certificate-data": encode(certificate), "client-key-data": encode(key)}}
        ],
        "contexts": [{"name": "world", "context": {"cluster": "world", "user": user}}],
        "current-context": "world",
    }
    return json.dumps(configuration, indent=2) + "\n"


def kubeconfig_of(world: World, folder: Path, name: str, server: str | None = None) -> str:
    """Return the kubeconfig of one identity with its certificate and key from a directory."""
    authority = (authority_folder(world) / "ca.crt").read_bytes()
    certificate, key = ((folder / f"{name}.{kind}").read_bytes() for kind in ("crt", "key"))
    return kubeconfig(server or world.server, authority, certificate, key, name)
