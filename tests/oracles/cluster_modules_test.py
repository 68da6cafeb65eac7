# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the modules that read and write a cluster's objects on a real API server without nodes: the test writes slices,
claims, and pods.
"""

from __future__ import annotations

import importlib
import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

Json = dict[str, Any]
DRA = "/apis/resource.k8s.io/v1"
CLAIMS = f"{DRA}/namespaces/default/resourceclaims"
PODS = "/api/v1/namespaces/default/pods"
RULES = f"{DRA}/devicetaintrules"
DRIVER = "gpu.nvidia.com"


class Server:
    """Client that acts as the other writers of the cluster."""

    def __init__(self, kubeconfig: Path) -> None:
        document = json.loads(kubeconfig.read_text())
        self.kubeconfig = kubeconfig
        self._url = document["clusters"][0]["cluster"]["server"]
        self._token = document["users"][0]["user"]["token"]
        self._context = ssl.create_default_context(cafile=document["clusters"][0]["cluster"]["certificate-authority"])

    def request(self, method: str, path: str, body: Json | None = None) -> Json:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._context) as answer:
                said: Json = json.loads(answer.read())
                return said
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()}") from None

    def exists(self, path: str, name: str) -> bool:
        return name in [each["metadata"]["name"] for each in self.request("GET", path)["items"]]

    def allocate(self, name: str, *results: Json, pods: tuple[str, ...] = ()) -> None:
        """Create an allocated claim like the scheduler."""
        requests = [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]
        claim = self.request(
            "POST",
            CLAIMS,
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": "default", "labels": {"team": name}},
                "spec": {"devices": {"requests": requests}},
            },
        )
        claim["status"] = {
            "allocation": {"devices": {"results": [{"request": "gpu", "driver": DRIVER, **each} for each in results]}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods],
        }
        self.request("PUT", f"{CLAIMS}/{name}/status", claim)

    def release(self, name: str) -> None:
        claim = self.request("GET", f"{CLAIMS}/{name}")
        claim["status"]["reservedFor"] = []
        self.request("PUT", f"{CLAIMS}/{name}/status", claim)


@pytest.fixture(scope="module")
def server(administrator: Path) -> Server:
    found = Server(administrator)
    prepare(found)
    return found


def prepare(server: Server) -> None:
    """Create two nodes with a shared or partitioned GPU each, and claims that use parts of them."""
    server.request("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "default"}})
    tainted = [{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoExecute"}]
    text = {name: {"string": value} for name, value in (("type", "gpu"), ("productName", "NVIDIA H100 80GB HBM3"))}
    for node, more in (("node-1", {"allowMultipleAllocations": True}), ("node-2", {"taints": tainted})):
        device = {"name": "gpu-0", "attributes": text, "capacity": {"memory": {"value": "80Gi"}}, **more}
        spec = {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [device],
        }
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": node}, "spec": spec}
        server.request("POST", f"{DRA}/resourceslices", body)
    share = {"pool": "node-1", "device": "gpu-0", "consumedCapacity": {"memory": "20Gi"}}
    first, second = (f"0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e5{number}" for number in (1, 2))
    server.allocate("first", {**share, "shareID": first}, pods=("worker-1",))
    patient = [{"operator": "Exists", "effect": "NoExecute"}]
    server.allocate("second", {**share, "shareID": second, "tolerations": patient}, pods=("worker-2",))
    server.allocate("sick", {"pool": "node-2", "device": "gpu-0"}, pods=("worker-3",))
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "worker-1", "namespace": "default"},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [{"name": "main", "image": "i", "resources": {"claims": [{"name": "it", "request": "gpu"}]}}],
            "resourceClaims": [{"name": "it", "resourceClaimName": "first"}],
        },
    }
    made = server.request("POST", PODS, pod)
    health = {"name": "claim:it/gpu", "resources": [{"resourceID": "x/y=z", "health": "Unhealthy", "message": "hot"}]}
    state = {"name": "main", "image": "i", "imageID": "", "ready": True, "restartCount": 0}
    made["status"]["containerStatuses"] = [{**state, "allocatedResourcesStatus": [health]}]
    server.request("PUT", f"{PODS}/worker-1/status", made)


@pytest.fixture
def module(server: Server, capsys: pytest.CaptureFixture[str]) -> Callable[..., Json]:
    """Return a function that runs a module against the server."""

    def run(name: str, options: Json, *, check: bool = False) -> Json:
        given = {"kubeconfig": str(server.kubeconfig), **options, "_ansible_check_mode": check, "_ansible_diff": True}
        found = importlib.import_module(f"ansible_collections.dra.accelerators.plugins.modules.{name}")
        with patch_module_args(given), pytest.raises(SystemExit):
            found.main()
        answer: Json = json.loads(capsys.readouterr().out)
        return answer

    return run


# ---------------------------------------------------------------------- claim_info


def test_claims_list_devices_pods_shares_and_health(module: Callable[..., Json]) -> None:
    answer = module("claim_info", {})
    assert not answer["changed"]
    found = {one["name"]: one for one in answer["claims"]}
    assert list(found) == ["first", "second", "sick"]
    (device,) = found["first"]["devices"]
    assert device["consumed"] == {"memory": "20Gi"} and device["share_id"].endswith("51")
    assert device["product"] == "NVIDIA H100 80GB HBM3" and device["published"]
    assert found["first"]["nodes"] == ["node-1"] and found["first"]["pods"] == ["worker-1"]
    (sign,) = found["first"]["health"]
    assert sign["container"] == "main" and sign["health"] == "Unhealthy" and sign["message"] == "hot"
    assert [one["healthy"] for one in found.values()] == [False, True, False]
    assert found["sick"]["devices"][0]["taints"][0]["key"] == "gpu.nvidia.com/xid"


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"healthy": False}, ["first", "sick"]),
        ({"healthy": False, "health": False}, ["sick"]),
        ({"nodes": ["node-2"]}, ["sick"]),
        ({"devices": ["node-1/*"], "pods": ["worker-*"]}, ["first", "second"]),
        ({"label_selectors": ["team in (second, sick)"], "namespace": "default"}, ["second", "sick"]),
        ({"allocated": False}, []),
        ({"drivers": ["npu.huawei.com"]}, []),
        ({"device_classes": ["gpu.nvidia.com"], "names": ["s*"]}, ["second", "sick"]),
    ],
)
def test_filters_of_claims(module: Callable[..., Json], filters: Json, names: list[str]) -> None:
    assert [one["name"] for one in module("claim_info", filters)["claims"]] == names


# ---------------------------------------------------------------------- device_taint


def test_rule_is_created_once_changed_and_deleted(module: Callable[..., Json], server: Server) -> None:
    options = {"name": "worn-out", "match": {"node": "node-1", "device": "gpu-0"}, "reason": "It is worn out."}
    looked = module("device_taint", options, check=True)
    assert looked["changed"] and looked["steps"] == [{"verb": "create", "name": "worn-out"}]
    assert not server.exists(RULES, "worn-out")
    made = module("device_taint", options)
    assert made["diff"]["before"] == {} and made["diff"]["after"] == looked["diff"]["after"]
    assert made["rule"]["match"] == {"pool": "node-1", "device": "gpu-0"}
    assert [(one["name"], one["tolerates"]) for one in made["held_by"]] == [("first", False), ("second", False)]
    assert not module("device_taint", options)["changed"]
    stored = server.request("GET", f"{RULES}/worn-out")
    assert stored["metadata"]["labels"]["dra.accelerators/node"] == "node-1"
    since = stored["spec"]["taint"]["timeAdded"]

    # Another reason keeps the time. Another effect reports which holders tolerate it.
    reported = module("device_taint", {**options, "reason": "Two rows."})
    assert reported["steps"][0]["verb"] == "update" and reported["diff"]["before"]["reason"] == "It is worn out."
    assert server.request("GET", f"{RULES}/worn-out")["spec"]["taint"]["timeAdded"] == since
    hard = module("device_taint", {**options, "effect": "NoExecute"})
    assert [(one["name"], one["tolerates"]) for one in hard["held_by"]] == [("first", False), ("second", True)]

    gone = {"name": "worn-out", "state": "absent"}
    assert module("device_taint", gone, check=True)["changed"] and server.exists(RULES, "worn-out")
    assert module("device_taint", gone)["steps"] == [{"verb": "delete", "name": "worn-out"}]
    assert not server.exists(RULES, "worn-out")
    assert not module("device_taint", gone)["changed"]


def test_fields_of_other_managers_are_kept(module: Callable[..., Json], server: Server) -> None:
    taint = {"key": "example.com/theirs", "effect": "NoSchedule"}
    labels = {"app.kubernetes.io/managed-by": "dra-accelerators", "theirs": "yes"}
    rule = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceTaintRule",
        "metadata": {"name": "theirs", "labels": labels},
        "spec": {"deviceSelector": {"pool": "node-2"}, "taint": taint},
    }
    server.request("POST", RULES, rule)
    for options in ({"match": {"pool": "node-1"}}, {"state": "absent"}):
        refused = module("device_taint", {"name": "theirs", **options})
        assert refused["failed"] and refused["error_code"] == "foreign-rule", refused
    assert server.request("GET", f"{RULES}/theirs")["spec"]["deviceSelector"] == {"pool": "node-2"}
    taken = module("device_taint", {"name": "theirs", "match": {"pool": "node-1"}, "force": True})
    assert taken["changed"] and server.request("GET", f"{RULES}/theirs")["metadata"]["labels"]["theirs"] == "yes"
    assert module("device_taint", {"name": "theirs", "state": "absent"})["changed"]


def test_rule_rejected_by_the_server_fails_in_check_mode_too(module: Callable[..., Json]) -> None:
    wrong = {"name": "wrong", "match": {"pool": "node-1"}, "key": "no key"}
    refused = module("device_taint", wrong, check=True)
    assert refused["failed"] and refused["status"] == 422 and "no key" in refused["msg"]


@pytest.mark.parametrize("version", ["v1beta2", "v1alpha3"])
def test_rules_of_older_versions_of_the_api(
    module: Callable[..., Json], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    rules = importlib.import_module("ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.taint_rules")
    monkeypatch.setattr(rules, "VERSIONS", ("v1alpha1", version))
    options = {"name": "older", "match": {"pool": "node-1"}, "effect": "None", "reason": "It is only asked."}
    made = module("device_taint", options)
    assert made["changed"] and made["rule"]["api_version"] == f"resource.k8s.io/{version}"
    assert made["rule"]["taint"]["effect"] == "None" and not module("device_taint", options)["changed"]
    assert module("device_taint", {**options, "effect": "NoSchedule"})["steps"][0]["verb"] == "update"
    assert module("device_taint", {"name": "older", "state": "absent"})["changed"]
    monkeypatch.setattr(rules, "VERSIONS", ("v1alpha1",))
    refused = module("device_taint", options)
    assert refused["failed"] and refused["error_code"] == "api-version"


def test_waiting_for_claims(module: Callable[..., Json], server: Server) -> None:
    options = {"name": "free-it", "match": {"node": "node-2"}, "effect": "NoExecute", "wait": True, "wait_timeout": 0}
    late = module("device_taint", options)
    assert late["failed"] and late["error_code"] == "still-held" and late["claims"] == ["default/sick"]
    assert late["changed"] and late["steps"][0]["verb"] == "create" and late["held_by"][0]["pods"] == ["worker-3"]
    assert server.exists(RULES, "free-it")
    server.release("sick")
    assert not module("device_taint", options)["changed"]
    module("device_taint", {"name": "free-it", "state": "absent"})


# ---------------------------------------------------------------------- device_drain

BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"


@pytest.fixture
def _drained_node(server: Server) -> Iterator[None]:
    """Create a node with a GPU that a pod of a ReplicaSet uses. Its budget does not have a status yet."""
    server.request("POST", "/api/v1/nodes", {"metadata": {"name": "node-3"}})
    spec = {
        "driver": DRIVER,
        "nodeName": "node-3",
        "pool": {"name": "node-3", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu-0", "attributes": {"driverVersion": {"version": "580.95.5"}}}, {"name": "gpu-1"}],
    }
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "node-3"}, "spec": spec}
    server.request("POST", f"{DRA}/resourceslices", body)
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "trainer", "uid": "u", "controller": True}
    pod = {
        "metadata": {"name": "trainer", "labels": {"app": "trainer"}, "ownerReferences": [owner]},
        "spec": {"automountServiceAccountToken": False, "containers": [{"name": "main", "image": "i"}]},
    }
    made = server.request("POST", PODS, pod)
    # A pod that has not started would be evicted despite its budget.
    made["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    server.request("PUT", f"{PODS}/trainer/status", made)
    server.allocate("trained", {"pool": "node-3", "device": "gpu-0"}, pods=("trainer",))
    claim = server.request("GET", f"{CLAIMS}/trained")
    claim["status"]["reservedFor"][0]["uid"] = made["metadata"]["uid"]
    server.request("PUT", f"{CLAIMS}/trained/status", claim)
    budget = {
        "metadata": {"name": "trainer"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "trainer"}}},
    }
    server.request("POST", BUDGETS, {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", **budget})
    yield
    # The other tests expect two nodes.
    server.request("DELETE", f"{DRA}/resourceslices/node-3")
    server.request("DELETE", "/api/v1/nodes/node-3")


@pytest.mark.usefixtures("_drained_node")
def test_devices_are_drained_by_evictions_and_returned_to_service(module: Callable[..., Json], server: Server) -> None:
    options = {"state": "drained", "node": "node-3", "operation": "new-driver", "timeout": 0}

    def rules() -> list[Json]:
        return [
            one
            for one in server.request("GET", RULES)["items"]
            if "dra.accelerators/drain" in one["metadata"]["labels"]
        ]

    refused = module("device_drain", options)
    assert refused["error_code"] == "blocked" and "default/trainer" in refused["msg"] and rules() == []
    assert [one["code"] for one in refused["problems"]] == ["no-consent"] and refused["pods"][0]["claims"] == [
        "trained"
    ]
    reported = module("device_drain", {**options, "evict": True}, check=True)
    assert reported["evicted"] == ["default/trainer"] and reported["changed"] and rules() == []

    late = module("device_drain", {**options, "evict": True, "reason": "A new driver."})
    assert late["error_code"] == "time-is-up" and late["evicted"] == [] and server.exists(PODS, "trainer")
    assert [(one["pod"], one["claims"]) for one in late["blocked"]] == [("default/trainer", ["trained"])]
    assert "disruption budget" in late["blocked"][0]["reason"]
    (rule,) = rules()
    assert rule["spec"]["deviceSelector"] == {"driver": DRIVER, "pool": "node-3"}
    assert (
        rule["spec"]["taint"]["effect"] == "NoSchedule"
        and rule["metadata"]["labels"]["dra.accelerators/node"] == "node-3"
    )

    server.request("DELETE", f"{BUDGETS}/trainer")
    gone = module("device_drain", {**options, "evict": True, "reason": "A new driver."})
    assert gone["evicted"] == ["default/trainer"] and not server.exists(PODS, "trainer")
    server.release("trained")
    claim = server.request("GET", f"{CLAIMS}/trained")
    del claim["status"]["allocation"]
    server.request("PUT", f"{CLAIMS}/trained/status", claim)
    done = module("device_drain", {**options, "reason": "A new driver."})
    assert not done["changed"] and done["claims"] == [] and done["published"] == [f"{DRIVER}/node-3"]

    returning = {"state": "in_service", "node": "node-3", "operation": "new-driver", "timeout": 0}
    early = module("device_drain", {**returning, "published": {"driverVersion": "580.105.08"}})
    assert early["error_code"] == "time-is-up" and "580.95.5" in early["msg"] and rules() == [rule]
    assert module("device_drain", returning, check=True)["changed"] and rules() == [rule]
    returned = module("device_drain", {**returning, "published": {"driverVersion": "580.95.05"}})
    assert returned["changed"] and rules() == [] and not module("device_drain", returning)["changed"]


# ---------------------------------------------------------------------- resource_slices


def test_dry_run_of_a_removal_deletes_nothing(module: Callable[..., Json], server: Server) -> None:
    pool = {"driver": "fpga.example.com", "pool": "shelf-1"}
    assert module("resource_slices", {**pool, "all_nodes": True, "devices": [{"name": "fpga-0"}]})["changed"]
    assert module("resource_slices", {**pool, "state": "absent"}, check=True)["changed"]
    slices = server.request("GET", f"{DRA}/resourceslices")["items"]
    assert [each for each in slices if each["spec"]["driver"] == "fpga.example.com"]
    assert module("resource_slices", {**pool, "state": "absent"})["changed"]


# ---------------------------------------------------------------------- device_class

BY_TYPE = "device.attributes['gpu.nvidia.com'].type == 'gpu'"


def test_classes_are_created_once_changed_and_deleted(module: Callable[..., Json], server: Server) -> None:
    classes = [
        {"name": "large", "selectors": [BY_TYPE], "extended_resource": "example.com/large"},
        {"name": "any", "selectors": ["device.driver == 'gpu.nvidia.com'"]},
    ]
    path = f"{DRA}/deviceclasses"
    assert module("device_class", {"classes": classes}, check=True)["changed"] and not server.exists(path, "large")
    made = module("device_class", {"classes": classes})
    assert [each["verb"] for each in made["steps"]] == ["create", "create"] and made["dropped_fields"] == []
    assert server.request("GET", f"{path}/large")["spec"]["extendedResourceName"] == "example.com/large"
    assert not module("device_class", {"classes": classes})["changed"]
    del classes[0]["extended_resource"]
    changed = module("device_class", {"classes": classes})
    assert changed["steps"] == [{"verb": "update", "name": "large"}]
    assert changed["diff"]["before"]["large"]["extended_resource"] == "example.com/large"
    assert "extendedResourceName" not in server.request("GET", f"{path}/large")["spec"]
    # If the server rejects one class, the others are not changed.
    wrong = [{**classes[0], "selectors": []}, {"name": "wrong", "selectors": ["device.driver =="]}]
    refused = module("device_class", {"classes": wrong})
    assert refused["failed"] and refused["status"] == 422 and "wrong" in refused["msg"]
    assert server.request("GET", f"{path}/large")["spec"]["selectors"]
    gone = {"classes": [{"name": "large"}, {"name": "any"}], "state": "absent"}
    assert module("device_class", gone, check=True)["changed"] and server.exists(path, "large")
    assert len(module("device_class", gone)["steps"]) == 2 and not server.exists(path, "large")
    assert not module("device_class", gone)["changed"]


def test_foreign_class_is_kept_rejected_or_replaced(module: Callable[..., Json], server: Server) -> None:
    path = f"{DRA}/deviceclasses"
    spec = {"selectors": [{"cel": {"expression": "device.driver == 'x.example.com'"}}]}
    theirs = {"metadata": {"name": "theirs", "labels": {"app": "x"}}, "spec": spec}
    server.request("POST", path, {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", **theirs})
    mine = {"classes": [{"name": "theirs", "selectors": [BY_TYPE]}]}
    left = module("device_class", mine)
    assert not left["changed"] and left["unmanaged"] == ["theirs"]
    refused = module("device_class", {**mine, "on_unmanaged": "refuse"})
    assert refused["failed"] and refused["error_code"] == "foreign-class"
    assert "set on_unmanaged to leave or replace" in refused["hint"]
    assert module("device_class", {**mine, "on_unmanaged": "replace"})["changed"]
    labels = server.request("GET", f"{path}/theirs")["metadata"]["labels"]
    assert labels == {"app": "x", "app.kubernetes.io/managed-by": "dra-accelerators"}
    assert module("device_class", {**mine, "state": "absent"})["changed"]
    twice = module("device_class", {"classes": [{"name": "a"}, {"name": "a"}]})
    assert twice["failed"] and twice["error_code"] == "invalid-classes"


# ---------------------------------------------------------------------- the inventory


def test_inventory_of_a_cluster(server: Server, tmp_path: Path) -> None:
    node = {"metadata": {"name": "node-1", "labels": {"zone": "z1"}}}
    server.request("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", **node})
    (tmp_path / "accelerators.yml").write_text(
        "plugin: dra.accelerators.accelerators\n"
        f"kubeconfig: {server.kubeconfig}\n"
        "groups: {roomy: \"accelerators is dra.accelerators.holding_accelerators(free='40Gi')\"}\n"
    )
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-inventory"), "-i", tmp_path / "accelerators.yml", "--list"],
        env={**os.environ, "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout, object_hook=lambda each: each.get("__ansible_unsafe", each))
    assert found["accelerators"]["hosts"] == ["node-1", "node-2"]
    # Two claims use 20 GiB each of the first node's GPU with 80 GiB. The second node's GPU has a taint.
    assert found["roomy"]["hosts"] == found["accelerator_free"]["hosts"] == ["node-1"]
    assert found["accelerator_tainted"]["hosts"] == ["node-2"]
    variables = found["_meta"]["hostvars"]["node-1"]
    assert variables["accelerators"][0]["free"]["memory"] == 40 << 30
    assert variables["accelerators"][0]["claims"] == ["default/first", "default/second"]
    assert variables["accelerator_node"]["labels"]["zone"] == "z1"
