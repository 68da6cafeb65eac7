# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the report that the controller's process serves over TLS: its readers, its contents, and outages of the API
server.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dra_driver.core import certificates

from tests import planned
from tests.bench.api_server import ApiServer, free_port
from tests.cluster.manifests import claim, pod
from tests.drains import CONTROLLER
from tests.oracles.controller_process import NoNodes, acting
from tests.oracles.controller_rights import NAMESPACE, SECRET
from tests.prove.readers import answered, given, is_the_clusters, question, refusals, token, webhooks

NODE = "gpu-1"
PARTS = [{"profile": "3g.40gb", "placement": 4}, *({"profile": "1g.10gb", "placement": start} for start in range(4))]
SAID = "0/1 nodes are available: 1 cannot allocate all claims."


def furnish(cluster: NoNodes, port: int) -> None:
    """Create a node with one partitioned and two whole GPUs, a pod with a partition, a pending pod, and accounts with
    and without access.
    """
    whole = planned.fleet(1, 3)
    cut = {"match": {"uuid": [whole[NODE][0].uuid]}, "mode": "static", "partitions": PARTS}
    devices = planned.applied(whole, [{"hosts": NODE, "layout": [cut, {"match": {}, "mode": "whole"}]}])
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {}})
    cluster.apply(*({**each, "apiVersion": "resource.k8s.io/v1"} for each in planned.slices(devices)))
    for name in ("default", "reader", "other"):
        cluster.kubectl("create", "serviceaccount", name, "-n", "default")
    words = ("--clusterrole=dra-accelerators-report", "--serviceaccount=default:reader")
    cluster.kubectl("create", "clusterrolebinding", "report-reader", *words)
    for name in ("has", "waits"):
        cluster.apply(claim(name, device_class="mig.nvidia.com"), pod(name, name))
    (part,) = (name for name in cluster.devices(NODE) if "3g40gb" in name)
    result = {"request": "device", "driver": "gpu.nvidia.com", "pool": NODE, "device": part}
    user = {"resource": "pods", "name": "has", "uid": cluster.pod("has")["metadata"]["uid"]}
    says(cluster, "resourceclaim", "has", {"allocation": {"devices": {"results": [result]}}, "reservedFor": [user]})
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": SAID}
    says(cluster, "pod", "waits", {"conditions": [condition]})
    cluster.apply(
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": CONTROLLER},
            "webhooks": [
                {
                    "name": "here.controller.dra.accelerators",
                    "admissionReviewVersions": ["v1"],
                    "sideEffects": "None",
                    "clientConfig": {"url": f"https://127.0.0.1:{port}/validate"},
                }
            ],
        }
    )


def says(cluster: NoNodes, kind: str, name: str, status: object) -> None:
    """Write a status like the scheduler."""
    words = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    cluster.kubectl("patch", kind, name, "-n", "default", *words)


def trust_a_new_ca(cluster: NoNodes) -> None:
    """Write the CA of the webhook and the bundle that the API server trusts, like the module webhook_authority."""
    now = datetime.datetime.now(datetime.timezone.utc)
    authorities = certificates.Authorities(certificates.create_ca(now, 86400.0))
    metadata = {"name": SECRET, "namespace": NAMESPACE}
    cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": authorities.to_data()})
    bundle = base64.b64encode(authorities.bundle).decode()
    patch = json.dumps([{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}])
    cluster.kubectl("patch", "validatingwebhookconfiguration", CONTROLLER, "--type=json", "-p", patch)
    assert webhooks(cluster)[0]["clientConfig"]["caBundle"] == bundle


def accepts(connect: Callable[[], socket.socket]) -> bool:
    """Return whether a server accepts connections."""
    try:
        connect().close()
    except OSError:
        return False
    return True


@pytest.mark.prove
def test_the_report_is_served_over_tls_with_the_rights_of_the_role(kubectl: Path, tmp_path: Path) -> None:
    server, port = ApiServer(tmp_path), free_port()
    webhook = {"address": f"127.0.0.1:{port}", "names": ["127.0.0.1"], "report": True}
    (tmp_path / "controller").mkdir()
    with contextlib.ExitStack() as serving:
        serving.enter_context(server.running())
        cluster = NoNodes(kubectl, server.kubeconfig)
        furnish(cluster, port)
        with acting(cluster, tmp_path / "controller", webhook=webhook) as controller:
            trust_a_new_ca(cluster)
            serves = functools.partial(socket.create_connection, ("127.0.0.1", port), 1)
            cluster.wait("the webhook serves", lambda: accepts(serves))
            shown = token(cluster, "reader", "--audience=dra-accelerators-report")
            last = given(cluster, shown)
            is_the_clusters(cluster, last)
            assert [(each["pods"], each["reason"]["message"]) for each in last["waiting"]] == [(["waits"], SAID)]
            refusals(cluster, shown)
            assert controller.counted('report_requests_total{outcome="refused"}') == 4
            last, asked = given(cluster, shown), question(cluster, shown)
            serving.close()
            # A report of a moment ago is served without a warning.
            deadline = time.monotonic() + 60
            while "Warning" not in (answer := answered(cluster, NODE, asked))[1]:
                assert time.monotonic() < deadline, answer
                time.sleep(1.0)
            status, headers, body = answer
            assert (status, headers["Warning"][:4], json.loads(body)) == (200, "110 ", last)
            assert controller.counted('report_requests_total{outcome="stale"}') == 1
