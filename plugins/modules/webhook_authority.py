#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: webhook_authority
version_added: 0.1.0
short_description: Create and rotate the CA of the controller's admission webhook
description:
  - Manages a certificate authority (CA) in a Secret. The controllers sign their serving certificates with this CA. The controllers need the
    permission to read this Secret, and no permission for webhook configurations.
  - Creates the CA if it does not exist or has expired. Rotates it if less than a third of its lifetime or of O(lifetime) remains, or with O(rotate).
  - During a rotation, the API server trusts both CAs. The module writes the next CA to the Secret and its certificate to the webhook configuration,
    waits O(settle) seconds, and then activates the next CA. The certificate of the previous CA stays trusted until it expires. The next run resumes
    an interrupted rotation.
  - Stores the keys only in the Secret. The result and the diff do not contain them.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup_k8s
  - dra.accelerators._kubernetes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: partial
    details:
      - With O(rotate=true) each run replaces the CA.
  platform:
    support: full
    platforms: all
options:
  name:
    description: Name of the Secret.
    type: str
    default: dra-accelerators-controller-authority
  namespace:
    description: Namespace of the Secret.
    type: str
    required: true
  configuration:
    description: Name of the ValidatingWebhookConfiguration that has to trust both CAs before the next one is activated.
    type: str
    default: dra-accelerators-controller
  lifetime:
    description: Lifetime of a new CA in seconds, at least 300.
    type: int
    default: 315360000
  rotate:
    description: Whether to replace a CA that has enough lifetime left.
    type: bool
    default: false
  settle:
    description: The number of seconds for which the API servers trust the next CA before it is activated.
    type: int
    default: 30
requirements:
  - Python package C(cryptography) 38 or newer, which ansible-core itself requires.
seealso:
  - name: Role dra.accelerators.dra_controller
    description: Uses this module.
    link: https://github.com/dra-accelerators/dra.accelerators/blob/main/roles/dra_controller/README.md
"""

EXAMPLES = r"""
- name: Keep the CA of the webhook
  dra.accelerators.webhook_authority:
    namespace: dra-accelerators-controller
  register: authority
  delegate_to: localhost

- name: Replace the CA of the webhook
  dra.accelerators.webhook_authority:
    namespace: dra-accelerators-controller
    rotate: true
  delegate_to: localhost
"""

RETURN = r"""
ca_bundle:
  description:
    - The certificates that the API server has to trust, PEM in base64, for C(caBundle) of the webhook configuration. Empty in check mode if
      there is no CA yet.
  returned: success
  type: str
  sample: LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCg==
steps:
  description: The steps that were taken, or that would be taken in check mode.
  returned: success
  type: list
  elements: str
  sample: [make-next, promote]
expires:
  description: When the active CA expires, in ISO 8601. Empty in check mode if there is no CA yet.
  returned: success
  type: str
  sample: "2036-11-25T12:00:00+00:00"
"""

import base64
import datetime
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    Api,
    ApiError,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import end, importable, run
from ansible_collections.dra.accelerators.plugins.module_utils.core import certificates
from ansible_collections.dra.accelerators.plugins.module_utils.core.certificates import Authorities
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError

LABELS = {"app.kubernetes.io/managed-by": "dra-accelerators", "app.kubernetes.io/component": "controller"}
SHORTEST_LIFETIME = 300


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "name": {"type": "str", "default": "dra-accelerators-controller-authority"},
        "namespace": {"type": "str", "required": True},
        "configuration": {"type": "str", "default": "dra-accelerators-controller"},
        "lifetime": {"type": "int", "default": 315360000},
        "rotate": {"type": "bool", "default": False},
        "settle": {"type": "int", "default": 30},
        **API_OPTIONS,
    }


def describe(authorities: Authorities) -> dict[str, str]:
    """Return the public part of the CAs for the diff: the expiry time of each."""
    found = {}
    for name, pair in (("active", authorities.active), ("next", authorities.next)):
        if pair is not None:
            found[name] = f"serial {pair.parsed.serial_number:x}, expires {pair.expires.isoformat()}"
    return {**found, **({"previous": "trusted until it expires"} if authorities.previous else {})}


class Cluster:
    """The Secret and the webhook configuration in the cluster."""

    def __init__(self, api: Api, params: dict[str, Any]) -> None:
        self._api = api
        self._secrets = f"/api/v1/namespaces/{params['namespace']}/secrets"
        self._name, self._namespace = params["name"], params["namespace"]
        self._configuration = (
            f"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/{params['configuration']}"
        )

    def _get(self, path: str) -> dict[str, Any] | None:
        try:
            return self._api.request("GET", path)
        except ApiError as error:
            if error.is_not_found:
                return None
            raise

    def read(self) -> tuple[Authorities, str]:
        """Return the CAs and the Secret's resourceVersion ("" without a Secret). Raises ApiError, AcceleratorError."""
        secret = self._get(f"{self._secrets}/{self._name}")
        if secret is None:
            return Authorities(), ""
        self._check_owner(secret, f"The Secret {self._namespace}/{self._name}")
        return certificates.read_authorities(secret.get("data") or {}), str(secret["metadata"]["resourceVersion"])

    def write(self, authorities: Authorities, version: str) -> str:
        """Write the CAs and return the new resourceVersion. Raises ApiError; 409 after a concurrent write."""
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace, "labels": LABELS}
        body = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata}
        body["data"] = authorities.to_data()
        if version:
            metadata["resourceVersion"] = version
            written = self._api.request("PUT", f"{self._secrets}/{self._name}", body=body)
        else:
            written = self._api.request("POST", self._secrets, body=body)
        return str(written["metadata"]["resourceVersion"])

    def trust_patch(self, bundle: bytes) -> list[dict[str, Any]]:
        """Return the JSON patch that sets the CA bundle of the webhook configuration, or an empty list if it is current."""
        found = self._get(self._configuration)
        if found is None:
            return []
        self._check_owner(found, f"The ValidatingWebhookConfiguration {found['metadata']['name']}")
        wanted = base64.b64encode(bundle).decode()
        changes = [
            {"op": "add", "path": f"/webhooks/{number}/clientConfig/caBundle", "value": wanted}
            for number, webhook in enumerate(found.get("webhooks") or ())
            if (webhook.get("clientConfig") or {}).get("caBundle") != wanted
        ]
        version = {"op": "test", "path": "/metadata/resourceVersion", "value": found["metadata"]["resourceVersion"]}
        return [version, *changes] if changes else []

    def trust(self, bundle: bytes) -> bool:
        """Set the CA bundle of the webhook configuration, and return whether it was changed. Raises ApiError, AcceleratorError."""
        patch = self.trust_patch(bundle)
        if patch:
            self._api.request("PATCH", self._configuration, body=patch, content_type="application/json-patch+json")
        return bool(patch)

    @staticmethod
    def _check_owner(found: dict[str, Any], what: str) -> None:
        if (found["metadata"].get("labels") or {}).get("app.kubernetes.io/managed-by") != "dra-accelerators":
            raise AcceleratorError(
                f"{what} has no label app.kubernetes.io/managed-by=dra-accelerators, so it is not managed by this collection",
                hint="Use another name, or delete the object. Nothing was changed.",
                code="not-managed",
            )


def now() -> datetime.datetime:
    """Return the current time for certificates, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc)


def run_due_steps(
    cluster: Cluster, params: dict[str, Any], *, check_mode: bool
) -> tuple[Authorities, Authorities, list[str]]:
    """Run all due steps. Return the CAs before and after, and the steps. Raises ApiError, AcceleratorError."""
    before, version = cluster.read()
    present, trusted_for, rotate = before, 0.0, params["rotate"]
    steps: list[str] = []
    while True:
        what = certificates.next_step(
            present, trusted_for=trusted_for, now=now(), rotate=rotate, lifetime=params["lifetime"]
        )
        if what == certificates.NOTHING and present.next is None:
            return before, present, steps
        if what == certificates.NOTHING:
            # The next CA is stored. The API servers must trust it before it signs a certificate.
            if not check_mode:
                cluster.trust(present.bundle)
                time.sleep(params["settle"])
            trusted_for = certificates.TRUST_SECONDS
            continue
        if what in (certificates.MAKE, certificates.MAKE_NEXT):
            rotate = False
        steps.append(what)
        present = certificates.apply_step(present, what, now=now(), seconds=params["lifetime"])
        trusted_for = 0.0
        if not check_mode:
            version = cluster.write(present, version)


def work(module: AnsibleModule) -> dict[str, Any]:
    """Create or renew the CA, and return the module's result. Raises ApiError, AcceleratorError."""
    params = module.params
    for name, least in (("lifetime", SHORTEST_LIFETIME), ("settle", 0)):
        if params[name] < least:
            raise AcceleratorError(f"{name} is {params[name]}; expected at least {least} seconds", code="bad-option")
    before, after, steps = run_due_steps(Cluster(connect(module), params), params, check_mode=module.check_mode)
    # In check mode the new CA does not exist, so the previous bundle is returned.
    shown = before if module.check_mode else after
    return {
        "changed": bool(steps),
        "steps": steps,
        "ca_bundle": base64.b64encode(shown.bundle).decode(),
        "expires": shown.active.expires.isoformat() if shown.active is not None else "",
        "diff": {"before": describe(before), "after": describe(after)},
    }


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec=argument_spec(), required_together=API_REQUIRED_TOGETHER, supports_check_mode=True
    )
    if not importable("cryptography"):
        end(module, msg=missing_required_lib("cryptography"), error_code="binding-missing")
    run(module, work)


if __name__ == "__main__":
    main()
