#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: token_audiences_info
version_added: 0.1.0
short_description: Read the default audiences of service account tokens
description:
  - Returns the audiences that the API server adds to a token if its request contains no audiences (its option C(--api-audiences)).
  - Requests a token for O(name) in a server-side dry run, reads the audiences from the response, and discards the token.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup_k8s
  - dra.accelerators._attributes.info_module
  - dra.accelerators._kubernetes
attributes:
  platform:
    support: full
    platforms: posix
options:
  name:
    description: Name of the service account that the token is requested for.
    type: str
    default: default
  namespace:
    description: Namespace of the service account.
    type: str
    default: default
seealso:
  - module: dra.accelerators.service_account_token
"""

EXAMPLES = r"""
- name: Read the default audiences of the API server
  dra.accelerators.token_audiences_info:
  register: defaults
  delegate_to: localhost
"""

RETURN = r"""
audiences:
  description: The default audiences.
  returned: success
  type: list
  elements: str
  sample: ["https://kubernetes.default.svc.cluster.local"]
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    ApiError,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run

# The shortest lifetime that the API server accepts.
SHORTEST_LIFETIME = 600


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "name": {"type": "str", "default": "default"},
        "namespace": {"type": "str", "default": "default"},
        **API_OPTIONS,
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    """Read the default audiences, and return the module's result. Raises ApiError."""
    name, namespace = module.params["name"], module.params["namespace"]
    answer = connect(module).request(
        "POST",
        f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
        query={"dryRun": "All"},
        body={
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": SHORTEST_LIFETIME},
        },
    )
    spec = answer.get("spec")
    audiences = spec.get("audiences") if isinstance(spec, dict) else None
    if not isinstance(audiences, list) or not audiences or not all(isinstance(each, str) for each in audiences):
        raise ApiError(
            f"The API server's answer to a token request for the service account {namespace}/{name} has no list of audiences",
            status=0,
            hint="Expected Kubernetes 1.32 or newer.",
            code="no-audiences",
        )
    return {"changed": False, "audiences": audiences}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec=argument_spec(), required_together=API_REQUIRED_TOGETHER, supports_check_mode=True
    )
    run(module, work)


if __name__ == "__main__":
    main()
