# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A node that is only an API object, with the dependent objects of a real node, to test the controller's cleanup."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.cluster.cluster import DRIVER, Cluster

OURS = {"app.kubernetes.io/managed-by": "dra-accelerators"}


@dataclass(frozen=True)
class Ghost:
    """One such node. ``stranded`` is a claim without a reservation, ``held`` is reserved for a running pod."""

    cluster: Cluster
    name: str

    @property
    def stranded(self) -> str:
        return f"{self.name}-stranded"

    @property
    def held(self) -> str:
        return f"{self.name}-held"

    def appear(self) -> None:
        """Create the Node and its objects: slices of ours and of another driver, taint rules, two allocated claims,
        and a pod.
        """
        self.cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name}, "spec": {}})
        self._apply_as("dra-accelerators-driver", self._slice(self.name))
        self._apply_as("another-driver", self._slice(f"{self.name}-foreign"))
        labels = {**OURS, "dra.accelerators/node": self.name}
        self._apply_as("dra-accelerators-driver", self._rule(self.name, labels))
        self._apply_as("somebody", self._rule(f"{self.name}-foreign", {"dra.accelerators/node": self.name}))
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.held, "namespace": "default"},
            "spec": {
                "schedulingGates": [{"name": "tests.example.com/never"}],
                "containers": [{"name": "one", "image": "localhost/busybox", "imagePullPolicy": "Never"}],
            },
        }
        self.cluster.apply(pod)
        self._claim(self.stranded, "device-0", None)
        self._claim(self.held, "device-1", self.cluster.pod(self.held)["metadata"]["uid"])

    def vanish(self) -> None:
        """Delete the Node only."""
        self.cluster.kubectl("delete", "node", self.name)

    def left(self) -> set[str]:
        """Return the names of its remaining objects."""
        found = {f"slice {one['metadata']['name']}" for one in self.cluster.slices(self.name)}
        for rule in self.cluster.get("devicetaintrules")["items"]:
            if rule["metadata"]["name"].startswith(self.name):
                found.add(f"rule {rule['metadata']['name']}")
        for claim in (self.stranded, self.held):
            if "allocation" in self.cluster.get("resourceclaim", claim, "-n", "default").get("status", {}):
                found.add(f"claim {claim}")
        return found

    @property
    def everything(self) -> set[str]:
        """Return the objects that exist as long as the node can return."""
        return {
            *(f"slice {self.name}", f"slice {self.name}-foreign", f"rule {self.name}", f"rule {self.name}-foreign"),
            *(f"claim {self.stranded}", f"claim {self.held}"),
        }

    @property
    def what_stays(self) -> set[str]:
        """Return the objects that the controller must not delete."""
        return {f"slice {self.name}-foreign", f"rule {self.name}-foreign", f"claim {self.held}"}

    def exorcise(self) -> None:
        """Delete all remaining objects."""
        never_mind = ("--ignore-not-found", "--timeout=60s")
        self.cluster.kubectl("delete", "node", self.name, *never_mind)
        self.cluster.kubectl("delete", "pod", self.held, "-n", "default", "--grace-period=0", "--force", *never_mind)
        for kind in ("resourceslices", "devicetaintrules"):
            self.cluster.kubectl("delete", kind, self.name, f"{self.name}-foreign", *never_mind)
        self.cluster.kubectl("delete", "resourceclaims", self.stranded, self.held, "-n", "default", *never_mind)

    def _apply_as(self, manager: str, document: dict[str, Any]) -> None:
        self.cluster.kubectl(
            "apply", "--server-side", f"--field-manager={manager}", "-f", "-", text=json.dumps(document)
        )

    def _slice(self, name: str) -> dict[str, Any]:
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        devices = [{"name": "device-0"}, {"name": "device-1"}]
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": name},
            "spec": {"driver": DRIVER, "nodeName": self.name, "pool": pool, "devices": devices},
        }

    def _rule(self, name: str, labels: dict[str, str]) -> dict[str, Any]:
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceTaintRule",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "deviceSelector": {"driver": DRIVER, "pool": self.name},
                "taint": {"key": "tests.example.com/ghost", "effect": "NoSchedule"},
            },
        }

    def _claim(self, name: str, device: str, pod: str | None) -> None:
        request = {"name": "one", "exactly": {"deviceClassName": DRIVER}}
        self.cluster.apply(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"devices": {"requests": [request]}},
            }
        )
        fields = [{"key": "metadata.name", "operator": "In", "values": [self.name]}]
        status: dict[str, Any] = {
            "allocation": {
                "devices": {"results": [{"request": "one", "driver": DRIVER, "pool": self.name, "device": device}]},
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": fields}]},
            }
        }
        if pod is not None:
            status["reservedFor"] = [{"resource": "pods", "name": self.held, "uid": pod}]
        patch = json.dumps({"status": status})
        self.cluster.kubectl(
            *("patch", "resourceclaim", name, "-n", "default", "--subresource=status", "--type=merge", "-p", patch)
        )
