# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Renews the token inside the driver's kubeconfig, with that token itself.

The driver's service account may request tokens for itself alone. A systemd timer runs this program once a day, so that a
node that is up keeps its identity without anybody looking after it; one that was off for longer than a token's life gets
a new token from the next run of the playbook.

    python -m dra_driver.renew_token --kubeconfig /etc/dra-accelerators/kubeconfig
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .api.kubeconfig import Access, load_access
from .core.errors import AcceleratorError
from .core.system import System

TIMEOUT_SECONDS = 30
PREFIX = "system:serviceaccount:"


class RenewalFailed(AcceleratorError):
    """The token could not be renewed; the old one stays in place."""

    default_code = "renewal-failed"


def claims_of(token: str) -> Mapping[str, Any]:
    """Return what a JSON web token claims, unverified. Raises RenewalFailed for anything else."""
    parts = token.split(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        if not isinstance(claims, dict):
            raise TypeError(claims)
    except (IndexError, TypeError, ValueError, binascii.Error):
        raise RenewalFailed(
            "The kubeconfig's token is not a JSON web token", hint="Run playbooks/site.yml again."
        ) from None
    return claims


def due(claims: Mapping[str, Any], *, now: float, renew_below: float) -> bool:
    """Whether less than ``renew_below`` (0 to 1) of the token's life is left at ``now`` (seconds since 1970)."""
    issued, expires = float(claims.get("iat", 0)), float(claims.get("exp", 0))
    return expires - now < renew_below * (expires - issued)


def token_request(claims: Mapping[str, Any], *, lifetime: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of the request for a token like the present one: same account, bound to the same node."""
    subject = str(claims.get("sub", ""))
    node = (claims.get("kubernetes.io") or {}).get("node") or {}
    if not subject.startswith(PREFIX) or not node.get("name"):
        raise RenewalFailed(
            f"The kubeconfig's token belongs to {subject or 'nobody'} and is bound to "
            f"{'node ' + node['name'] if node.get('name') else 'no node'}; expected a service account's token bound to a node",
            hint="Run playbooks/site.yml again.",
        )
    namespace, _colon, name = subject[len(PREFIX) :].partition(":")
    bound = {"apiVersion": "v1", "kind": "Node", "name": node["name"], "uid": node.get("uid", "")}
    return f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": lifetime, "boundObjectRef": bound},
    }


def post(access: Access, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Send one request as the present token's owner and return the answer. Raises RenewalFailed."""
    request = urllib.request.Request(  # noqa: S310
        access.server + path,
        data=json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {access.token}",
            "Content-Type": "application/json",
            "Accept": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=access.ssl_context()) as response:  # noqa: S310
            answer: Mapping[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        detail = error.read(2000).decode("utf-8", "replace")
        raise RenewalFailed(
            f"{access.server} refused to renew the token with HTTP status {error.code}: {detail}"
        ) from error
    except (OSError, ValueError) as error:
        raise RenewalFailed(f"{access.server} could not be asked to renew the token: {error}") from error
    return answer


def replaced(document: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the kubeconfig with one user's token exchanged."""
    users = [
        {**entry, "user": {**entry["user"], "token": new}} if (entry.get("user") or {}).get("token") == old else entry
        for entry in document.get("users") or ()
    ]
    return {**document, "users": users}


def renew(kubeconfig: str, *, lifetime: int, renew_below: float, system: System) -> str:
    """Renew the token if it is due; returns a sentence on what was done. Raises AcceleratorError."""
    import yaml

    access = load_access(kubeconfig)
    claims = claims_of(access.token)
    if not due(claims, now=time.time(), renew_below=renew_below):
        return f"The token is good for another {int(float(claims['exp']) - time.time())} seconds; nothing was done."
    path, body = token_request(claims, lifetime=lifetime)
    token = str((post(access, path, body).get("status") or {}).get("token", ""))
    seconds = int(float(claims_of(token)["exp"]) - time.time())
    document = yaml.safe_load(Path(kubeconfig).read_text(encoding="utf-8"))
    # JSON is YAML too, and has one form only: the role writes the same one and sees no difference.
    data = json.dumps(replaced(document, access.token, token), indent=2, sort_keys=True) + "\n"
    system.write_atomic(kubeconfig, data.encode(), mode=0o600)
    return f"The token was renewed; the new one is good for {seconds} seconds."


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="renew_token", description="Renew the token inside the driver's kubeconfig.")
    parser.add_argument("--kubeconfig", required=True, help="the file to renew the token in")
    parser.add_argument(
        "--lifetime", type=int, default=2592000, help="seconds the new token is to be valid (default: 30 days)"
    )
    parser.add_argument(
        "--renew-below", type=float, default=0.67, help="renew when less than this part of the life is left"
    )
    options = parser.parse_args(arguments)
    try:
        done = renew(options.kubeconfig, lifetime=options.lifetime, renew_below=options.renew_below, system=System())
    except AcceleratorError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{done}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
