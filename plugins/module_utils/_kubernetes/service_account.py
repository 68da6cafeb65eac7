# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Check the node driver's identity on the node: the claims of its token, and whether the API server accepts it.

The token never leaves the node. Needs only the standard library.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ..core.api_connection import find_insecurity

TIMEOUT_SECONDS = 10.0
REVIEW = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


def read_identity(text: str | None, *, verify: bool, now: float | None = None) -> dict[str, Any]:
    """Return the facts of the identity in the driver's kubeconfig.

    ``accepted`` is whether the API server accepts the token. It is None if the server was not queried or did not answer.
    ``problem`` then contains the reason.
    """
    found: dict[str, Any] = {
        "exists": text is not None,
        "cluster": {},
        "account": "",
        "node": "",
        "node_uid": "",
        "seconds_left": 0,
        "lifetime": 0,
        "accepted": None,
        "problem": "",
    }
    if text is None:
        return {**found, "problem": "there is no token"}
    cluster, token = read(text)
    claims = claims_of(token)
    if claims is None:
        return {**found, "cluster": cluster, "problem": "it is not a token"}
    bound = (claims.get("kubernetes.io") or {}).get("node") or {}
    issued, expires = claims.get("iat"), claims.get("exp")
    if isinstance(issued, (int, float)) and isinstance(expires, (int, float)):
        found["seconds_left"] = max(0, int(expires - (time.time() if now is None else now)))
        found["lifetime"] = int(expires - issued)
    found.update(
        cluster=cluster,
        account=str(claims.get("sub", "")),
        node=str(bound.get("name", "")),
        node_uid=str(bound.get("uid", "")),
    )
    if verify:
        found["accepted"], found["problem"] = review(cluster, token)
    return found


def read(text: str) -> tuple[dict[str, Any], str]:
    """Return the cluster entry and the token of a kubeconfig in the JSON format of the role."""
    try:
        document = json.loads(text)
        cluster = document["clusters"][0]["cluster"]
        token = document["users"][0]["user"]["token"]
    except (ValueError, LookupError, TypeError):
        return {}, ""
    return (cluster if isinstance(cluster, dict) else {}), str(token or "")


def claims_of(token: str) -> Mapping[str, Any] | None:
    """Return the claims of a JSON web token without verification, or None for any other string."""
    parts = token.strip().split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError):
        return None
    return claims if isinstance(claims, dict) else None


def review(cluster: Mapping[str, Any], token: str) -> tuple[bool | None, str]:
    """Return whether the API server accepts the token, and the problem. The connection uses the node's kubeconfig."""
    try:
        connection = connect(cluster)
        try:
            body = json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
            headers = {"Authorization": f"Bearer {token.strip()}", "Content-Type": "application/json"}
            connection.request("POST", REVIEW, body=body, headers=headers)
            answer = connection.getresponse()
            answer.read()
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return None, f"the API server at {cluster.get('server', 'no address')} cannot be queried: {error}"
    if answer.status == 401:
        return False, "the API server does not accept it"
    # A caller that lacks only this permission has been authenticated.
    return True, ""


def connect(cluster: Mapping[str, Any]) -> http.client.HTTPConnection:
    """Connect to the server of a kubeconfig's cluster entry. Raises OSError, ValueError."""
    address = urlsplit(str(cluster["server"]) if cluster.get("server") else "")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError("there is no address in the kubeconfig")
    insecurity = find_insecurity(cluster)
    if insecurity:
        raise ValueError(f"the kubeconfig is rejected: {insecurity}")
    port = address.port or (443 if address.scheme == "https" else 80)
    connection = http.client.HTTPConnection(address.hostname, port, timeout=TIMEOUT_SECONDS)
    tcp_socket = socket.create_connection((address.hostname, port), timeout=TIMEOUT_SECONDS)
    if address.scheme == "http":
        connection.sock = tcp_socket
        return connection
    try:
        connection.sock = tls_context(cluster).wrap_socket(
            tcp_socket, server_hostname=str(cluster.get("tls-server-name") or address.hostname)
        )
    except BaseException:
        tcp_socket.close()
        raise
    return connection


def tls_context(cluster: Mapping[str, Any]) -> ssl.SSLContext:
    """Return the TLS context for a cluster entry. Raises OSError, ValueError."""
    if cluster.get("certificate-authority-data"):
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode("ascii")
        context = ssl.create_default_context(cadata=authority)
    else:
        context = ssl.create_default_context(cafile=cluster.get("certificate-authority") or None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
