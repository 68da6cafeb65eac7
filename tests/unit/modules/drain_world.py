# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Simulate a cluster for tests of drains: that of migration_world, with DeviceTaintRules and with claims of devices by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import taint_rules as rules
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import ApiError
from migration_world import World, node, pod

Json = dict[str, Any]
DRIVER = "gpu.nvidia.com"


def device_with_counters(name: str, *slots: int) -> Json:
    """Return a published device that consumes slots of a GPU."""
    gpu = "-".join(name.split("-")[:2])
    counters = {f"slot-{slot}": {"value": "1"} for slot in slots}
    return {"name": name, "consumesCounters": [{"counterSet": gpu, "counters": counters}]}


def pool(name: str, *devices: Json, driver: str = DRIVER) -> Json:
    """Return the slice of a node's devices, each GPU with four slots."""
    gpus = sorted({each["consumesCounters"][0]["counterSet"] for each in devices if "consumesCounters" in each})
    sets = [{"name": gpu, "counters": {f"slot-{slot}": {"value": "1"} for slot in range(4)}} for gpu in gpus]
    spec = {
        "driver": driver,
        "nodeName": name,
        "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
        "devices": list(devices),
        "sharedCounters": sets,
    }
    return {"metadata": {"name": f"slice-{name}-{driver}"}, "spec": spec}


def claim_of(
    name: str, on: str, *devices: str, pods: tuple[Json, ...] = (), groups: tuple[str, ...] = (), **more: Any
) -> Json:
    """Return a claim with devices for pods, or for pod groups."""
    reserved = [{"resource": "pods", "name": each["metadata"]["name"], "uid": each["metadata"]["uid"]} for each in pods]
    reserved += [{"resource": "podgroups", "name": each, "uid": f"uid-{each}"} for each in groups]
    results = [{"request": "r", "driver": DRIVER, "pool": on, "device": each, **more} for each in devices]
    return {
        "metadata": {"namespace": "default", "name": name},
        "status": {"allocation": {"devices": {"results": results}}, "reservedFor": reserved},
    }


class DrainWorld(World):
    """A cluster with DeviceTaintRules. It runs in the time of the test.

    ``evicted_pods`` has the names of the evicted pods in order, ``unending`` those of evicted pods that keep running. A rule is
    rejected when ``maximum_rules`` exist. Without ``served`` the API server has no DeviceTaintRules.
    """

    def __init__(self, **kinds: list[Json]) -> None:
        super().__init__(**kinds)
        self.kinds["devicetaintrules"] = []
        self.evicted_pods: list[str] = []
        self.options: list[Json] = []
        self.unending: set[str] = set()
        self.maximum_rules = 10**6
        self.served = True
        self.claim_reads: list[str] = []

    def list_all(
        self, path: str, query: Mapping[str, str], keep: Callable[[Json], Any] = lambda item: item
    ) -> list[Any]:
        if path.endswith("/devicetaintrules"):
            assert query["labelSelector"] == "app.kubernetes.io/managed-by=dra-accelerators,dra.accelerators/drain"
            return [
                copy.deepcopy(each)
                for each in self.kinds["devicetaintrules"]
                if "dra.accelerators/drain" in each["metadata"]["labels"]
            ]
        if path.endswith("/resourceclaims"):
            self.claim_reads.append("list")
        return super().list_all(path, query, keep)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        repeat: bool = True,
    ) -> Json:
        if re.fullmatch(r"/apis/resource\.k8s\.io/v1", path):
            return {"resources": [{"name": rules.PLURAL}] if self.served else []}
        if re.fullmatch(r"/apis/resource\.k8s\.io/(v1beta2|v1alpha3)", path):
            raise ApiError("not served", status=404)
        if "/resourceclaims/" in path and method == "GET":
            name = path.rpartition("/")[2]
            self.claim_reads.append(name)
            return copy.deepcopy(self.find("resourceclaims", name))
        if "/pods/" in path and method == "GET":
            return copy.deepcopy(self.find("pods", path.rpartition("/")[2]))
        if "/devicetaintrules" in path:
            return self._rule(method, path.partition("/devicetaintrules")[2].strip("/"), query or {}, body or {})
        return super().request(method, path, query=query, body=body, content_type=content_type)

    def _rule(self, method: str, name: str, query: Mapping[str, str], body: Json) -> Json:
        dry = "dryRun" in query or "dryRun" in body
        if method == "GET":
            return copy.deepcopy(self.find("devicetaintrules", name))
        if not dry:
            self.writes.append((method, f"devicetaintrules/{name or body['metadata']['name']}"))
        if method == "DELETE":
            found = self.find("devicetaintrules", name)
            if not dry:
                self.kinds["devicetaintrules"].remove(found)
            return {}
        if len(self.kinds["devicetaintrules"]) >= self.maximum_rules:
            raise ApiError("it is not allowed", status=403)
        made = copy.deepcopy(body)
        made["metadata"]["managedFields"] = [{"manager": query["fieldManager"]}]
        made["metadata"].setdefault("resourceVersion", "1")
        if not dry:
            rest = [
                each for each in self.kinds["devicetaintrules"] if each["metadata"]["name"] != made["metadata"]["name"]
            ]
            self.kinds["devicetaintrules"] = [*rest, made]
        return copy.deepcopy(made)

    def _evict(self, path: str, body: Json) -> Json:
        answer = super()._evict(path, body)
        self.evicted_pods.append(path.split("/")[-2])
        self.options.append(body["deleteOptions"])
        return answer

    def tick(self) -> None:
        """Delete evicted pods except for steady ones, and deallocate claims without pods."""
        held = [each for each in self.kinds["pods"] if each["metadata"]["name"] in self.unending]
        kept = [each["metadata"].pop("deletionTimestamp", None) for each in held]
        super().tick()
        for each, when in zip(held, kept):
            if when:
                each["metadata"]["deletionTimestamp"] = when
        for each in self.kinds["resourceclaims"]:
            if not each["status"]["reservedFor"]:
                each["status"].pop("allocation", None)

    def rule_targets(self) -> list[tuple[str, str]]:
        """Return pool and device of each rule. An empty device means all."""
        found = [each["spec"]["deviceSelector"] for each in self.kinds["devicetaintrules"]]
        return sorted((each["pool"], each.get("device", "")) for each in found)


def busy_cluster() -> DrainWorld:
    """Return a cluster of node a with three GPUs, one with two partitions, and node b with one GPU.

    Four pods use devices, the pod `none` uses no device.
    """
    first, second, part, far = (
        pod(name, on=on) for name, on in (("p0", "a"), ("p1", "a"), ("part", "a"), ("far", "b"))
    )
    whole = (0, 1, 2, 3)
    return DrainWorld(
        nodes=[node("a"), node("b")],
        pods=[first, second, part, far, pod("none", on="a")],
        resourceslices=[
            pool(
                "a",
                device_with_counters("gpu-0", *whole),
                device_with_counters("gpu-1", *whole),
                device_with_counters("gpu-2", *whole),
                device_with_counters("gpu-2-mig-0", 0, 1),
                device_with_counters("gpu-2-mig-2", 2, 3),
            ),
            pool("b", device_with_counters("gpu-0", *whole)),
        ],
        resourceclaims=[
            claim_of("c0", "a", "gpu-0", pods=(first,)),
            claim_of("c1", "a", "gpu-1", pods=(second,)),
            claim_of("cp", "a", "gpu-2-mig-0", pods=(part,)),
            claim_of("cf", "b", "gpu-0", pods=(far,)),
        ],
    )
