#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: service_account_token
version_added: 0.1.0
short_description: Request a service account token that is bound to a Node
description:
  - Requests a token for a service account with the TokenRequest API, bound to a Node object. The token contains the name of its node. The API server
    no longer accepts it after the Node object or the service account is deleted.
  - Keeps an existing token while the API server accepts it, it is bound to the same Node object, and enough of its lifetime remains.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup_k8s
  - dra.accelerators._kubernetes
attributes:
  check_mode:
    support: full
    details:
      - The module requests no token, and RV(token) is empty.
  diff_mode:
    support: none
    details:
      - A token is a secret.
  idempotent:
    support: full
    details:
      - Requires O(token).
  platform:
    support: full
    platforms: posix
options:
  name:
    description: Name of the service account.
    type: str
    required: true
  namespace:
    description: Namespace of the service account.
    type: str
    required: true
  node:
    description: Name of the Node object to which the token is bound.
    type: str
    required: true
  token:
    description: The existing token. Empty if no token exists.
    type: str
    default: ""
  lifetime:
    description:
      - The requested lifetime of the token in seconds.
      - The API server can reduce it, see its option C(--service-account-max-token-expiration). The module then reports a warning, and RV(lifetime) is
        the actual lifetime.
    type: int
    default: 2592000
  renew_below:
    description: The module replaces a token when less than this fraction of its lifetime remains.
    type: float
    default: 0.33
seealso:
  - name: Bound service account tokens
    description: The objects to which a token can be bound.
    link: https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/
"""

EXAMPLES = r"""
- name: Read the existing token
  ansible.builtin.slurp:
    src: /etc/example/token
  register: present
  no_log: true

- name: Request a new token if needed
  dra.accelerators.service_account_token:
    name: driver-node-1
    namespace: dra-accelerators
    node: node-1
    token: "{{ present.content | b64decode }}"
  register: wanted
  delegate_to: localhost
  no_log: true

- name: Write the token if it is new
  ansible.builtin.copy:
    content: "{{ wanted.token }}"
    dest: /etc/example/token
    owner: root
    group: root
    mode: "0600"
  no_log: true
  when: wanted is changed and not ansible_check_mode
"""

RETURN = r"""
token:
  description: The new token. Empty if the existing token is valid, and in check mode.
  returned: success
  type: str
  sample: eyJhbGciOiJSUzI1NiIsImtpZCI6IiJ9.e30.c2lnbmF0dXJl
reason:
  description: Why a new token was requested. Empty if the existing token is valid.
  returned: success
  type: str
  sample: less than a third of its life is left
expires:
  description: When the token expires, in seconds since 1970. 0 in check mode if a new token would be requested.
  returned: success
  type: int
  sample: 1798761600
lifetime:
  description: The total lifetime of the token in seconds that the API server granted. 0 in the same case as RV(expires).
  returned: success
  type: int
  sample: 2592000
"""

import time
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    Api,
    ApiError,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.service_account import claims_of
from ansible_collections.dra.accelerators.plugins.module_utils._module import run

# The API server rounds the lifetime. A lifetime below this fraction of the requested one counts as shortened.
SHORTENED_BELOW = 0.99


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "name": {"type": "str", "required": True},
        "namespace": {"type": "str", "required": True},
        "node": {"type": "str", "required": True},
        "token": {"type": "str", "default": "", "no_log": True},
        "lifetime": {"type": "int", "default": 2592000},
        "renew_below": {"type": "float", "default": 0.33},
        **API_OPTIONS,
    }


def dates_of(claims: Mapping[str, Any]) -> dict[str, int]:
    """Return the expiry time and the total lifetime of a token, for the result."""
    expires = int(claims.get("exp", 0))
    return {"expires": expires, "lifetime": max(expires - int(claims.get("iat", expires)), 0)}


def reason_to_renew(
    claims: Mapping[str, Any] | None, *, account: str, node: str, node_uid: str, now: float, renew_below: float
) -> str:
    """Return why the token's claims require a new token, or "". ``account`` is the full user name."""
    if claims is None:
        return "it is not a token"
    if claims.get("sub") != account:
        return f"it belongs to {claims.get('sub')}"
    bound = (claims.get("kubernetes.io") or {}).get("node") or {}
    if bound.get("name") != node or bound.get("uid") != node_uid:
        return f"it is not bound to the current Node object {node}"
    issued, expires = claims.get("iat"), claims.get("exp")
    if not isinstance(issued, (int, float)) or not isinstance(expires, (int, float)):
        return "it has no lifetime"
    left = expires - now
    if left < renew_below * (expires - issued):
        return f"{max(0, int(left))} of its {int(expires - issued)} seconds are left"
    return ""


def review(api: Api, token: str) -> str:
    """Return why the API server does not accept a token, or "". Raises ApiError."""
    answer = api.request(
        "POST",
        "/apis/authentication.k8s.io/v1/tokenreviews",
        body={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}},
    )
    status = answer.get("status") or {}
    if status.get("authenticated"):
        return ""
    return f"the API server does not accept it: {status.get('error') or 'no reason given'}"


def request_token(api: Api, *, name: str, namespace: str, node: str, node_uid: str, lifetime: int) -> str:
    """Request a token that is bound to a Node object. Raises ApiError."""
    answer = api.request(
        "POST",
        f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
        body={
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "expirationSeconds": lifetime,
                "boundObjectRef": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid},
            },
        },
    )
    return str(answer["status"]["token"])


def work(module: AnsibleModule) -> dict[str, Any]:
    """Keep the given token or request a new one, and return the module's result. Raises ApiError."""
    params = module.params
    api = connect(module)
    node = api.request("GET", f"/api/v1/nodes/{params['node']}")
    node_uid = str(node["metadata"]["uid"])
    token = params["token"].strip()
    reason = "there is no token"
    if token:
        reason = reason_to_renew(
            claims_of(token),
            account=f"system:serviceaccount:{params['namespace']}:{params['name']}",
            node=params["node"],
            node_uid=node_uid,
            now=time.time(),
            renew_below=params["renew_below"],
        ) or review(api, token)
    if not reason:
        return {"changed": False, "token": "", "reason": "", **dates_of(claims_of(token) or {})}
    if module.check_mode:
        return {"changed": True, "token": "", "reason": reason, "expires": 0, "lifetime": 0}
    token = request_token(
        api,
        name=params["name"],
        namespace=params["namespace"],
        node=params["node"],
        node_uid=node_uid,
        lifetime=params["lifetime"],
    )
    claims = claims_of(token) or {}
    if ((claims.get("kubernetes.io") or {}).get("node") or {}).get("uid") != node_uid:
        raise ApiError(
            f"The API server issued a token for {params['namespace']}/{params['name']} that is not bound to the node {params['node']}",
            status=0,
            hint="Expected Kubernetes 1.32 or newer with ServiceAccountTokenNodeBinding on.",
            code="unbound-token",
        )
    dates = dates_of(claims)
    if dates["lifetime"] < SHORTENED_BELOW * params["lifetime"]:
        module.warn(
            f"The API server grants tokens for {dates['lifetime']} seconds instead of the requested {params['lifetime']}"
            " (its option --service-account-max-token-expiration). The node renews the token in time. If the node is off for longer"
            " than this lifetime, run the playbook again."
        )
    return {"changed": True, "token": token, "reason": reason, **dates}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec=argument_spec(), required_together=API_REQUIRED_TOGETHER, supports_check_mode=True
    )
    run(module, work)


if __name__ == "__main__":
    main()
