# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read the claims of a service account token: subject, lifetime, and when to renew it.

Facts: The API server can limit the lifetime (--service-account-max-token-expiration), to ten minutes at least. A token
bound to a Node object becomes invalid when that object is deleted. Then the node cannot get another one, because the
kubelet may request tokens only for pods. This module has no side effects.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.times import text_of

# A token is renewed when this part of its lifetime is left. It is checked CHECKS times in its lifetime.
RENEW_BELOW = 1 / 3
CHECKS = 4
SOONEST_SECONDS, LATEST_SECONDS = 5.0, 86400.0
# The service account created by the role dra_controller. Those of the node drivers are named driver-NODE.
CONTROLLER_ACCOUNT = "controller"
# The server rounds. A lifetime below this part of the requested one counts as shortened.
NEARLY = 0.99


@dataclass(frozen=True)
class Claims:
    """The unverified claims of a token. Times are in seconds since 1970. Missing names are ""."""

    subject: str
    issued: float
    expires: float
    node: str = ""
    node_uid: str = ""
    audiences: tuple[str, ...] = ()

    @property
    def life(self) -> float:
        """The lifetime of the token in seconds."""
        return max(self.expires - self.issued, 0.0)

    def due(self, now: float, renew_below: float = RENEW_BELOW) -> bool:
        """Return whether at most the part ``renew_below`` of the lifetime is left."""
        return self.expires - now <= renew_below * self.life

    def seconds_until_check(self, now: float) -> float:
        """Return the seconds until the next check of the token: when it is due, and CHECKS times in its lifetime."""
        until_due = self.expires - RENEW_BELOW * self.life - now
        wait = self.life / CHECKS if until_due <= 0 else min(until_due, self.life / CHECKS)
        return min(max(wait, SOONEST_SECONDS), LATEST_SECONDS)


def read_claims(token: str) -> Claims | None:
    """Return the claims of a JSON web token; None for other text and for a token without an expiry time."""
    parts = token.strip().split(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        node: Mapping[str, Any] = (claims.get("kubernetes.io") or {}).get("node") or {}
        audiences = claims.get("aud") or ()
        return Claims(
            subject=str(claims.get("sub", "")),
            issued=float(claims["iat"]),
            expires=float(claims["exp"]),
            node=str(node.get("name", "")),
            node_uid=str(node.get("uid", "")),
            audiences=(audiences,) if isinstance(audiences, str) else tuple(map(str, audiences)),
        )
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, binascii.Error):
        return None


def shortened(claims: Claims, asked: float) -> str:
    """Return a message if the server granted a shorter lifetime than requested; "" if it did not."""
    if claims.life >= asked * NEARLY:
        return ""
    return (
        f"the API server grants tokens for {int(claims.life)} seconds, but {int(asked)} seconds were requested "
        "(its option --service-account-max-token-expiration); a node that is off for longer than that loses its identity"
    )


def refusal(token: str, now: float) -> str:
    """Return why the API server rejects a token, from its claims, and the remedy."""
    claims = read_claims(token)
    if claims is None:
        return "The credentials in the kubeconfig are not accepted; run the dra_driver role to renew them."
    until = text_of(claims.expires)
    if claims.expires <= now:
        why = f"The token of {claims.subject} ended at {until}: this node was off, or could not renew it, until then."
    elif claims.node:
        why = (
            f"The token of {claims.subject} lasts until {until}, but belongs to the Node object {claims.node} with UID "
            f"{claims.node_uid}: the Node object or the service account was deleted, and possibly created again."
        )
    else:
        why = f"The token of {claims.subject} lasts until {until}: the service account was deleted, or the cluster's keys."
    limit = f" --limit {claims.node}" if claims.node else ""
    playbook = "controller" if claims.subject.rpartition(":")[2] == CONTROLLER_ACCOUNT else "site"
    return f"{why} Only the operator can give the node a new one: ansible-playbook dra.accelerators.{playbook}{limit}"
