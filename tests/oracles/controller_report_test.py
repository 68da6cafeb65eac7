# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the controller's report on a real API server with the role's permissions: authorized readers get it, and the
permissions suffice.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from dra_driver.api.client import ApiClient, ApiError
from dra_driver.controller.fleet_report import FleetReport
from dra_driver.controller.reader_authorization import AUDIENCE, ReaderAuthorizer, Verdict

from tests.fleets import DRIVER, Fleet, boards
from tests.oracles.controller_rights import ACCOUNT, NAMESPACE, objects

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs/report.schema.json").read_text(encoding="utf-8"))
PLACES = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}


async def token(admin: ApiClient, name: str, audience: str = AUDIENCE) -> str:
    path = f"{PLACES['ServiceAccount']}/{name}/token"
    audiences = {"audiences": [audience]} if audience else {}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": audiences}
    return str((await admin.request("POST", path, body=body))["status"]["token"])


async def prepare(admin: ApiClient) -> None:
    """Create the role's objects, two more accounts of which one is authorized, and a node's slices with a claim."""
    # The objects that its account needs here. Other tests on the same server create the same.
    for each in (one for one in objects() if one["kind"] in PLACES):
        try:
            await admin.request("POST", PLACES[each["kind"]], body=each)
        except ApiError as error:
            if error.status != 409:
                raise
    for name in ("reader", "other"):
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": NAMESPACE}}
        await admin.request("POST", PLACES["ServiceAccount"], body=account)
    group = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "report-reader"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "dra-accelerators-report"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": NAMESPACE}],
    }
    await admin.request("POST", PLACES["ClusterRoleBinding"], body=binding)
    made = Fleet()
    made.node("report-node", boards(2))
    for each in made.slices:
        body = {**each, "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
        await admin.request("POST", "/apis/resource.k8s.io/v1/resourceslices", body=body)


async def allowed(readers: ReaderAuthorizer, header: str) -> Verdict:
    """Return the verdict as soon as the server's authorizer knows the new binding."""
    end = time.monotonic() + 60
    while (found := await readers.judge(header)).status == 403 and time.monotonic() < end:
        await asyncio.sleep(0.2)
    return found


async def scenario(administrator: Path, folder: Path) -> None:
    admin = ApiClient(str(administrator), user_agent="test")
    await prepare(admin)
    document = json.loads(administrator.read_text())
    document["users"][0]["user"] = {"token": await token(admin, ACCOUNT, "")}
    (folder / "kubeconfig").write_text(json.dumps(document))
    client = ApiClient(str(folder / "kubeconfig"), user_agent="test")
    try:
        readers = ReaderAuthorizer(client)
        assert (await allowed(readers, f"Bearer {await token(admin, 'reader')}")).status == 200
        assert (await readers.judge(f"Bearer {await token(admin, 'other')}")).status == 403
        # A token for the API server, and an invalid one.
        assert (await readers.judge(f"Bearer {await token(admin, 'reader', '')}")).status == 401
        assert (await readers.judge("Bearer nonsense")).status == 401
        found = json.loads((await FleetReport(str(folder / "kubeconfig"), [DRIVER]).current()).body)
        jsonschema.validate(found, SCHEMA)
        (node,) = (each for each in found["nodes"] if each["name"] == "report-node")
        assert len(node["devices"]) == 2
        with pytest.raises(ApiError, match="403"):
            await client.get(f"/api/v1/namespaces/{NAMESPACE}/secrets")
    finally:
        await client.close()
        await admin.close()


def test_report_is_served_to_authorized_readers(administrator: Path, tmp_path: Path) -> None:
    asyncio.run(scenario(administrator, tmp_path))
