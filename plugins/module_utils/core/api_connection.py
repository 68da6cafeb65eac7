# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The cluster entry of a kubeconfig: whether its connection to the API server is encrypted and verified.

Facts: kubeconfig (v1), ``clusters[].cluster`` with its ``extensions``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The extension of a cluster entry that allows a connection that is not secure, as the roles write it for ``*_api_insecure``.
INSECURE_EXTENSION = {"name": "dra.accelerators/insecure-connection", "extension": {"allowed": True}}


def find_insecurity(cluster: Mapping[str, Any]) -> str:
    """Return what makes the connection of a cluster entry insecure. Return "" for a secure one, or if the entry allows it."""
    extensions = cluster.get("extensions")
    if isinstance(extensions, list) and INSECURE_EXTENSION in extensions:
        return ""
    server = str(cluster.get("server") or "")
    if server.lower().startswith("http://"):
        return f"the server {server} is reached without TLS"
    if cluster.get("insecure-skip-tls-verify"):
        return f"insecure-skip-tls-verify is set, so that the certificate of the server {server} is not verified"
    return ""
