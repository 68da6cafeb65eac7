# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Renew the token in the kubeconfig of the driver or the controller, using that token.

Their service accounts may request tokens only for themselves. The driver and the controller renew the token according
to its dates. In addition, a systemd timer runs this program once a day, so that a node keeps its identity while they
are stopped. A node that was off for longer than the token's lifetime gets a new token from the next run of the
playbook.

    python -I run.py dra_driver.renew_token --kubeconfig /etc/dra-accelerators/kubeconfig
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .api.client import ApiClient, ApiError, ApiUnreachable
from .api.kubeconfig import load_access
from .api.token import RENEW_BELOW, Claims, read_claims, shortened
from .core.errors import AcceleratorError
from .core.host.system import System

# The shortest lifetime that the API server accepts, in seconds.
SHORTEST_LIFETIME = 600
PREFIX = "system:serviceaccount:"
#: The code of a renewal that the API server rejected with status 403, as an admission policy does.
FORBIDDEN = "renewal-forbidden"


class RenewalFailed(AcceleratorError):
    """The token could not be renewed. The old token stays in the kubeconfig.

    ``retry_after`` is the Retry-After of the API server in seconds, or None.
    """

    default_code = "renewal-failed"
    retry_after: float | None = None


@dataclass(frozen=True)
class Renewal:
    """The result of a renewal.

    ``text`` describes it. ``claims`` are those of the current token. ``shortened`` is a message if the lifetime is
    shorter than requested, else "".
    """

    text: str
    renewed: bool
    claims: Claims
    shortened: str = ""


def claims_of(token: str) -> Claims:
    """Return the unverified claims of a JSON web token. Raises RenewalFailed if the token is not one."""
    claims = read_claims(token)
    if claims is None:
        raise RenewalFailed("The kubeconfig's token is not a JSON web token", hint="Run playbooks/site.yml again.")
    return claims


def token_request(claims: Claims, *, lifetime: int, audiences: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Return path and body of a TokenRequest for the same service account, bound to the same node.

    Without ``audiences`` the token is for the default audiences of the API server. Raises RenewalFailed if the present
    token is not a service account's token bound to a node.
    """
    if not claims.subject.startswith(PREFIX) or not claims.node:
        raise RenewalFailed(
            f"The kubeconfig's token belongs to {claims.subject or 'nobody'} and is bound to "
            f"{'node ' + claims.node if claims.node else 'no node'}; expected a service account's token bound to a node",
            hint="Run playbooks/site.yml again.",
        )
    namespace, _colon, name = claims.subject[len(PREFIX) :].partition(":")
    bound = {"apiVersion": "v1", "kind": "Node", "name": claims.node, "uid": claims.node_uid}
    spec = {"expirationSeconds": max(lifetime, SHORTEST_LIFETIME), "boundObjectRef": bound}
    return f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {**spec, "audiences": list(audiences)} if audiences else spec,
    }


def request_token(kubeconfig: str, claims: Claims, *, lifetime: int) -> str:
    """Request a token for the API server's default audiences, or if these are forbidden, for those of the present token.

    The admission policy for token requests lists the default audiences at the time of the last playbook run. They
    change when the API server gets another issuer (``--service-account-issuer``), but it still accepts the audiences of
    present tokens. Raises AcceleratorError.
    """
    path, body = token_request(claims, lifetime=lifetime)
    try:
        answer = post(kubeconfig, path, body)
    except RenewalFailed as error:
        if error.code != FORBIDDEN or not claims.audiences:
            raise
        path, body = token_request(claims, lifetime=lifetime, audiences=claims.audiences)
        answer = post(kubeconfig, path, body)
    return str((answer.get("status") or {}).get("token", ""))


def post(kubeconfig: str, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Send one POST request with the driver's API client and return the response. Raises AcceleratorError.

    The client uses every setting of the kubeconfig, such as ``tls-server-name``, and ignores proxies. Call this on a
    thread without a running event loop.
    """

    async def send() -> Mapping[str, Any]:
        client = ApiClient(kubeconfig)
        try:
            return await client.request("POST", path, body=body)
        finally:
            await client.close()

    try:
        return asyncio.run(send())
    except AcceleratorError as error:
        if isinstance(error, ApiError):
            text = f"The API server rejected the renewal of the token: {error.message}"
            code = FORBIDDEN if error.status == 403 else ""
        elif isinstance(error, ApiUnreachable):
            text, code = f"The token could not be renewed. {error.message}", ""
        else:
            raise
        failure = RenewalFailed(text, hint=error.hint, code=code)
        failure.retry_after = error.retry_after if isinstance(error, ApiError) else None
        raise failure from error


def with_token(document: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the kubeconfig with the token ``old`` replaced by ``new``."""
    users = [
        {**entry, "user": {**entry["user"], "token": new}} if (entry.get("user") or {}).get("token") == old else entry
        for entry in document.get("users") or ()
    ]
    return {**document, "users": users}


def renew(kubeconfig: str, *, lifetime: int, system: System, renew_below: float = RENEW_BELOW) -> Renewal:
    """Renew the token if it is due, and return the result. Raises AcceleratorError."""
    import yaml

    access = load_access(kubeconfig)
    claims = claims_of(access.token)
    if not claims.due(time.time(), renew_below):
        left = int(claims.expires - time.time())
        return Renewal(f"The token is good for another {left} seconds; nothing was done.", False, claims)
    token = request_token(kubeconfig, claims, lifetime=lifetime)
    new = claims_of(token)
    document = yaml.safe_load(Path(kubeconfig).read_text(encoding="utf-8"))
    # JSON is valid YAML with one canonical form. The role writes the same form, so it reports no change.
    data = json.dumps(with_token(document, access.token, token), indent=2, sort_keys=True) + "\n"
    try:
        system.write_atomic(kubeconfig, data.encode(), mode=0o600)
    except OSError as error:
        raise RenewalFailed(f"{kubeconfig} cannot be written: {error.strerror or error}") from error
    seconds = int(new.expires - time.time())
    return Renewal(
        f"The token was renewed; the new one is good for {seconds} seconds.", True, new, shortened(new, lifetime)
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="renew_token", description="Renew the token inside the driver's kubeconfig.")
    parser.add_argument("--kubeconfig", required=True, help="the file to renew the token in")
    parser.add_argument(
        "--lifetime", type=int, default=2592000, help="validity of the new token in seconds (default: 30 days)"
    )
    parser.add_argument(
        "--renew-below", type=float, default=RENEW_BELOW, help="renew when at most this part of the validity is left"
    )
    options = parser.parse_args(arguments)
    try:
        done = renew(options.kubeconfig, lifetime=options.lifetime, renew_below=options.renew_below, system=System())
    except AcceleratorError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{done.text}\n")
    if done.shortened:
        sys.stderr.write(f"{done.shortened}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
