# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that the role upgrades a controller of an earlier release: its CA, which the controllers managed, and its
permissions.

Earlier controllers created the webhook's CA with a lifetime of 1 year and replaced it. For this they could write
Secrets and the webhook configuration. The test writes these objects like the earlier release.
"""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils.core import certificates

from tests.cluster.cluster import DRIVER, Cluster
from tests.cluster.test_45_controller import (
    KEPT,
    NAMESPACE,
    Installed,
    answer_to,
    installed,
    settings_of,
    trusted_by_server,
)

__all__ = ["installed"]

NAME, SECRET = "dra-accelerators-controller", "dra-accelerators-controller-authority"
YEAR = 365 * 86400
#: Permissions of an earlier controller that the present one does not have.
RIGHTS = {
    "clusterrole": [
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["validatingwebhookconfigurations"],
            "resourceNames": [NAME],
            "verbs": ["get", "patch"],
        }
    ],
    "role": [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [SECRET], "verbs": ["get", "update"]},
    ],
}


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def stored(cluster: Cluster) -> certificates.Authorities:
    """Return the CAs in the Secret."""
    return certificates.read_authorities(cluster.get("secret", SECRET, "-n", NAMESPACE)["data"])


def replace(cluster: Cluster, kind: str, name: str, document: dict[str, Any], *words: str) -> None:
    """Patch an object."""
    cluster.kubectl("patch", kind, name, *words, "--type=merge", "-p", json.dumps(document))


def answers(cluster: Cluster) -> list[str]:
    """Return the answers of the API server to a valid and to an invalid claim."""
    return [answer_to(cluster, settings_of("ResourceClaim", "v1", DRIVER, percentage)) for percentage in (50, 150)]


def works(cluster: Cluster) -> bool:
    """Return whether all webhooks answer. With failure policy Fail, a webhook without a trusted certificate rejects
    the valid claim.
    """
    right, wrong = answers(cluster)
    return KEPT in right and "it is 150" in wrong


def rights(cluster: Cluster) -> list[str]:
    """Return the write permissions of the controller on its webhook configuration and its Secret."""
    identity = f"--as=system:serviceaccount:{NAMESPACE}:controller"
    asked = {
        f"patch {NAME}": ("patch", f"validatingwebhookconfigurations.admissionregistration.k8s.io/{NAME}"),
        f"update {SECRET}": ("update", f"secret/{SECRET}", "-n", NAMESPACE),
        "create secrets": ("create", "secrets", "-n", NAMESPACE),
    }
    return [
        what
        for what, words in asked.items()
        if cluster.kubectl("auth", "can-i", *words, identity, check=False).strip() == "yes"
    ]


@pytest.fixture()
def earlier(installed: Installed) -> Iterator[certificates.Authorities]:
    """Write the Secret, the webhook configuration, and the permissions of an earlier release, whose CA was created 100
    days ago.
    """
    cluster = installed.cluster
    installed.change(webhook_failure_policy="Fail")
    authority = certificates.create_ca(now() - datetime.timedelta(days=100), YEAR)
    authorities = certificates.Authorities(active=authority)
    replace(cluster, "secret", SECRET, {"data": authorities.to_data()}, "-n", NAMESPACE)
    hooks = cluster.get("validatingwebhookconfiguration", NAME)["webhooks"]
    for hook in hooks:
        hook["clientConfig"]["caBundle"] = base64.b64encode(authorities.bundle).decode()
    replace(cluster, "validatingwebhookconfiguration", NAME, {"webhooks": hooks})
    for kind, name, words in (("clusterrole", NAME, ()), ("role", "controller", ("-n", NAMESPACE))):
        rules = cluster.get(kind, name, *words)["rules"]
        replace(cluster, kind, name, {"rules": [*rules, *RIGHTS[kind]]}, *words)
    cluster.wait("the controllers have certificates of the earlier CA", lambda: works(cluster), timeout=120)
    yield authorities
    installed.change()


def test_upgrade_replaces_the_ca_of_an_earlier_release(installed: Installed, earlier: certificates.Authorities) -> None:
    cluster = installed.cluster
    assert len(rights(cluster)) == 3
    checked = installed.change("--check", "--diff", webhook_failure_policy="Fail")
    assert checked.changed and stored(cluster) == earlier and len(rights(cluster)) == 3
    assert installed.change(webhook_failure_policy="Fail").changed
    assert rights(cluster) == []
    present = stored(cluster)
    assert earlier.active is not None and present.active is not None and present.next is None
    assert present.active != earlier.active and present.active.remaining_seconds(now()) > 9 * YEAR
    assert present.previous == earlier.active.certificate, "certificates of the earlier CA are still trusted"
    assert trusted_by_server(cluster) == {base64.b64encode(present.bundle).decode()}
    assert works(cluster), answers(cluster)
    again = installed.change(webhook_failure_policy="Fail")
    assert not again.changed, again.output
    assert stored(cluster) == present
    # Each controller issues a certificate below the new CA, so that the webhook works without the earlier one.
    hooks = cluster.get("validatingwebhookconfiguration", NAME)["webhooks"]
    for hook in hooks:
        hook["clientConfig"]["caBundle"] = base64.b64encode(present.active.certificate).decode()
    replace(cluster, "validatingwebhookconfiguration", NAME, {"webhooks": hooks})
    cluster.wait("both webhooks have certificates of the new CA", lambda: works(cluster), timeout=60)
