# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a service account's token says of itself: whose it is, how long it lasts, when to renew it. Pure.

Facts: the API server grants as long a life as it likes (--service-account-max-token-expiration), ten minutes at least; a
token that is bound to a Node object ends with that object, and nobody on the node can get another one: the kubelet may
request tokens for pods alone.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.times import text_of

# A token is renewed when this part of its life is left, and looked at this often in its life.
RENEW_BELOW = 1 / 3
LOOKS = 4
SOONEST_SECONDS, LATEST_SECONDS = 5.0, 86400.0
# The account that the role dra_controller makes; those of the node drivers are called driver-NODE.
CONTROLLER_ACCOUNT = "controller"
# A server rounds; less than this part of what was asked for is a shorter life.
NEARLY = 0.99


@dataclass(frozen=True)
class Claims:
    """What a token claims, unverified. Times are seconds since 1970; names are "" where it has none."""

    subject: str
    issued: float
    expires: float
    node: str = ""
    node_uid: str = ""
    audiences: tuple[str, ...] = ()

    @property
    def life(self) -> float:
        """How long the token lasts, from its beginning."""
        return max(self.expires - self.issued, 0.0)

    def due(self, now: float, renew_below: float = RENEW_BELOW) -> bool:
        """Whether no more than that part of the life is left."""
        return self.expires - now <= renew_below * self.life

    def next_look(self, now: float) -> float:
        """How many seconds from now the token is to be looked at again: when it is due, and LOOKS times in its life."""
        until_due = self.expires - RENEW_BELOW * self.life - now
        wait = self.life / LOOKS if until_due <= 0 else min(until_due, self.life / LOOKS)
        return min(max(wait, SOONEST_SECONDS), LATEST_SECONDS)


def read_claims(token: str) -> Claims | None:
    """Read a JSON web token; None for anything else, and for one that does not end."""
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
    """Say that the server granted a shorter life than was asked for; "" if it did not."""
    if claims.life >= asked * NEARLY:
        return ""
    return (
        f"the API server grants tokens for {int(claims.life)} seconds and not for the {int(asked)} that were asked for "
        "(its option --service-account-max-token-expiration); a node that is off for longer than that loses its identity"
    )


def refusal(token: str, now: float) -> str:
    """Say why the API server does not accept a token, as far as its claims tell, and what to do."""
    claims = read_claims(token)
    if claims is None:
        return "The credentials in the kubeconfig are not accepted; run the dra_driver role to renew them."
    until = text_of(claims.expires)
    if claims.expires <= now:
        why = f"The token of {claims.subject} ended at {until}: this node was off, or could not renew it, until then."
    elif claims.node:
        why = (
            f"The token of {claims.subject} lasts until {until}, but belongs to the Node object {claims.node} with UID "
            f"{claims.node_uid}: that, or the service account, was deleted (and made anew)."
        )
    else:
        why = f"The token of {claims.subject} lasts until {until}: the service account was deleted, or the cluster's keys."
    limit = f" --limit {claims.node}" if claims.node else ""
    playbook = "controller" if claims.subject.rpartition(":")[2] == CONTROLLER_ACCOUNT else "site"
    return f"{why} Only the operator can give the node a new one: ansible-playbook dra.accelerators.{playbook}{limit}"
