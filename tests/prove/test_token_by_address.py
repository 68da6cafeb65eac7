# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test a node that reaches the API server by an IP address that is not in its certificate, and whose environment names
a proxy that does not answer.

The kubeconfig's `tls-server-name` names the certificate's host name. The short form with a test server is in
tests/unit/roles/renew_token_test.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER_UNIT, Cluster
from tests.cluster.test_60_identity import KUBECONFIG, RENEW, claims_of

DROP_IN = f"/run/systemd/system/{DRIVER_UNIT}.d/closed-proxy.conf"
#: Nothing listens on the discard port.
PROXY = "https_proxy=http://127.0.0.1:9 HTTPS_PROXY=http://127.0.0.1:9"
LIFETIME = 2592000


def write_kubeconfig(cluster: Cluster, node: str, document: dict[str, Any]) -> None:
    """Write the kubeconfig of a node's driver."""
    cluster.shell(node, f"cat > {KUBECONFIG} <<'END'\n{json.dumps(document)}\nEND")


@pytest.fixture()
def by_address(clean: Cluster) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the first node with a proxy in its driver's environment, and a kubeconfig with a new address of the
    control plane.
    """
    node = clean.nodes()[0]
    original = clean.run(node, "cat", KUBECONFIG)
    document = json.loads(original)
    address = document["clusters"][0]["cluster"]["server"].removeprefix("https://").rpartition(":")[0]
    added = f"{address.rpartition('.')[0]}.250"
    document["clusters"][0]["cluster"]["server"] = f"https://{added}:6443"
    variables = "".join(f"Environment={each}\\n" for each in PROXY.split())
    clean.shell("control", f"ip address add {added}/24 dev eth0")
    clean.shell(
        node,
        f"mkdir -p $(dirname {DROP_IN}) && printf '[Service]\\n{variables}' > {DROP_IN} && systemctl daemon-reload",
    )
    try:
        yield node, document
    finally:
        clean.shell(node, f"rm {DROP_IN}; systemctl daemon-reload; cat > {KUBECONFIG} <<'END'\n{original}END")
        clean.restart_driver(node)
        clean.shell("control", f"ip address delete {added}/24 dev eth0")


def test_token_renewed_by_address_that_the_certificate_lacks(
    clean: Cluster, by_address: tuple[str, dict[str, Any]]
) -> None:
    node, document = by_address
    renew = f"env {PROXY} {RENEW} 2>&1"
    # Without `tls-server-name` the certificate is rejected.
    write_kubeconfig(clean, node, document)
    assert "certificate" in clean.shell(node, renew, check=False)
    # With it, the program that the timer runs gets a token.
    document["clusters"][0]["cluster"]["tls-server-name"] = "kubernetes"
    write_kubeconfig(clean, node, document)
    old = claims_of(clean, node)
    clean.shell(node, renew)
    new = claims_of(clean, node)
    assert (new["sub"], new["exp"] - new["iat"]) == (old["sub"], LIFETIME) and new["jti"] != old["jti"]

    # The driver publishes over the same connection, and renews a token of ten minutes in its last third.
    bound = ("--bound-object-kind=Node", f"--bound-object-name={node}", "--duration=600s")
    token = clean.kubectl("create", "token", f"driver-{node}", "-n", "dra-accelerators", *bound).strip()
    document["users"][0]["user"]["token"] = token
    write_kubeconfig(clean, node, document)
    clean.restart_driver(node)
    published = len(clean.slices(node))
    clean.kubectl("delete", "resourceslices", *(each["metadata"]["name"] for each in clean.slices(node)))
    clean.wait("the slices are published again", lambda: len(clean.slices(node)) == published or None)
    clean.wait(
        "the driver has renewed its token",
        lambda: claims_of(clean, node)["exp"] - claims_of(clean, node)["iat"] == LIFETIME,
        timeout=600,
        interval=5,
    )
    assert clean.status(node)["ready"], clean.status(node)["problems"]
