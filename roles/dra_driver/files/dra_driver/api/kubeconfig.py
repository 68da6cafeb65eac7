# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The address and credentials for the API server, from a kubeconfig file or the service account of a pod."""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.api_connection import find_insecurity
from ..core.errors import AcceleratorError

# The kubelet's directory for the pod's token, and the environment variable that overrides it.
SERVICE_ACCOUNT_VARIABLE = "DRA_DRIVER_SERVICE_ACCOUNT"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
#: The limits for a kubeconfig: its characters, and the flow collections (``[`` and ``{``) in it.
LARGEST_KUBECONFIG, MOST_FLOW_COLLECTIONS = 1024 * 1024, 1000


class InvalidKubeconfig(AcceleratorError):
    """A kubeconfig is missing, invalid, or not supported."""

    default_code = "invalid-kubeconfig"


@dataclass(frozen=True)
class Access:
    """The address and credentials for one API server.

    Certificates and keys are PEM. ``token_file`` is read again when it changes. ``sources`` are the files of the
    access. When one of them changes, the access is read again.
    """

    server: str
    authority: bytes = b""
    verify: bool = True
    server_name: str = ""
    certificate: bytes = b""
    key: bytes = b""
    token: str = ""
    token_file: str = ""
    sources: tuple[str, ...] = ()

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context, or None for plain HTTP. Raises InvalidKubeconfig for invalid certificates."""
        if not self.server.startswith("https:"):
            return None
        try:
            context = ssl.create_default_context(cadata=self.authority.decode() or None)
            if not self.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.certificate:
                _load_client_certificate(context, self.certificate, self.key)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise InvalidKubeconfig(
                f"The certificates in {self.sources[0] if self.sources else 'the kubeconfig'} cannot be used: {error}",
                hint="Expected PEM: certificate-authority, and client-certificate with the matching client-key.",
            ) from error
        return context

    def has_same_server_as(self, other: Access) -> bool:
        """Return whether server and certificates are equal, so that connections can be kept.

        Tokens are ignored, because each request sends the current token.
        """
        return replace(self, token="", token_file="", sources=()) == replace(other, token="", token_file="", sources=())

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        """Return path, modification time (ns), and size of every source, to detect changes."""
        found = []
        for source in self.sources:
            try:
                status = Path(source).stat()
                found.append((source, status.st_mtime_ns, status.st_size))
            except OSError:
                found.append((source, 0, 0))
        return tuple(found)


def _load_client_certificate(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    # The ssl module reads certificates only from files. Anonymous memory keeps the key off the disk. If the kernel does
    # not support it, a private temporary file is used, which is removed at once.
    data = certificate.rstrip() + b"\n" + key
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("client-certificate")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        context.load_cert_chain(file.name)


def load_access(kubeconfig: str) -> Access:
    """Read the current context of a kubeconfig, or the service account of this pod for "".

    Raises InvalidKubeconfig if the file is missing or uses an unsupported setting.
    """
    if not kubeconfig:
        return _service_account()
    import yaml

    path = Path(kubeconfig)
    try:
        text = path.read_text(encoding="utf-8")
        # The YAML reader needs quadratic time and recursion for nested flow collections.
        if len(text) > LARGEST_KUBECONFIG or text.count("[") + text.count("{") > MOST_FLOW_COLLECTIONS:
            raise InvalidKubeconfig(
                f"The kubeconfig {kubeconfig} has {len(text)} characters with {text.count('[') + text.count('{')} opening brackets; "
                f"expected at most {LARGEST_KUBECONFIG} and {MOST_FLOW_COLLECTIONS}",
                hint="Remove the contexts, clusters, and users that this node does not use.",
            )
        document = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidKubeconfig(f"The kubeconfig {kubeconfig} could not be read: {str(error)[:300]}") from error
    if not isinstance(document, dict):
        raise InvalidKubeconfig(f"The kubeconfig {kubeconfig} does not hold a mapping")
    return _parse(document, path)


def _service_account() -> Access:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    folder = os.environ.get(SERVICE_ACCOUNT_VARIABLE, SERVICE_ACCOUNT)
    authority = Path(folder) / "ca.crt"
    if not host or not authority.exists():
        raise InvalidKubeconfig(
            "No kubeconfig is configured and this process does not run in a pod with a service account",
            hint="Set kubeconfig in the driver's configuration.",
        )
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(
        server=server,
        authority=authority.read_bytes(),
        token_file=f"{folder}/token",
        sources=(str(authority),),
    )


def _named(document: Mapping[str, Any], section: str, name: str, path: Path) -> Mapping[str, Any]:
    entries = document.get(section)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name:
            value = entry.get(section[:-1])
            if isinstance(value, dict):
                return value
    raise InvalidKubeconfig(f"The kubeconfig {path} has no entry {name!r} under {section}")


def _parse(document: Mapping[str, Any], path: Path) -> Access:
    current = document.get("current-context")
    if not current:
        raise InvalidKubeconfig(f"The kubeconfig {path} has no current-context")
    context = _named(document, "contexts", current, path)
    cluster = _named(document, "clusters", context.get("cluster", ""), path)
    user = _named(document, "users", context.get("user", ""), path)
    for key in ("exec", "auth-provider", "username", "password"):
        if user.get(key):
            raise InvalidKubeconfig(
                f"The user in the kubeconfig {path} authenticates with {key}",
                hint="The driver takes a client certificate, a token or a tokenFile.",
            )
    for section, key in ((cluster, "proxy-url"), (user, "as")):
        if section.get(key):
            raise InvalidKubeconfig(f"The kubeconfig {path} sets {key}, which the driver does not do; take it out")
    server = str(cluster.get("server", "")).rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise InvalidKubeconfig(f"The server in the kubeconfig {path} is {server!r}; expected https://host:port")
    insecurity = find_insecurity(cluster)
    if insecurity:
        raise InvalidKubeconfig(
            f"The kubeconfig {path} is rejected: {insecurity}; expected https:// and a verified certificate",
            hint="Anyone on the network could read the token. Set the CA file (dra_driver_api_ca_file, "
            "dra_controller_api_ca_file), or allow this with dra_driver_api_insecure or dra_controller_api_insecure.",
        )
    sources = [str(path)]
    authority = _data(cluster, "certificate-authority", path, sources)
    certificate = _data(user, "client-certificate", path, sources)
    private_key = _data(user, "client-key", path, sources)
    token_file = str(user.get("tokenFile") or "")
    return Access(
        server=server,
        authority=authority,
        verify=not cluster.get("insecure-skip-tls-verify", False),
        server_name=str(cluster.get("tls-server-name") or ""),
        certificate=certificate,
        key=private_key,
        token=str(user.get("token") or ""),
        token_file=str(path.parent / token_file) if token_file else "",
        sources=tuple(sources),
    )


def _data(section: Mapping[str, Any], key: str, path: Path, sources: list[str]) -> bytes:
    inline = section.get(f"{key}-data")
    if inline:
        try:
            return base64.b64decode(str(inline), validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidKubeconfig(f"{key}-data in the kubeconfig {path} is not base64: {error}") from error
    name = section.get(key)
    if not name:
        return b""
    file = path.parent / str(name)
    sources.append(str(file))
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidKubeconfig(f"{key} in the kubeconfig {path} names {file}: {error.strerror}") from error
