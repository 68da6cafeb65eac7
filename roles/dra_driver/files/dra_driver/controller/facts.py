# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Extract the facts from API objects that the controller's decisions need. No side effects.

Facts: k8s.io/api/resource/v1/types.go (ResourceSlice, ResourceClaim, DeviceTaintRule),
k8s.io/api/core/v1/well_known_taints.go.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ..claims.pre_binding_lists import awaited_allocation
from ..core.partitioning.layout_differences import ANNOTATION, parse_annotation

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
#: The prefix of this project's finalizers.
OUR_FINALIZERS = "dra.accelerators/"
#: The label of this project's objects with its value, and the label of the objects of one node.
MANAGED_BY_LABEL, MANAGED_BY = "app.kubernetes.io/managed-by", "dra-accelerators"
NODE_LABEL = "dra.accelerators/node"
#: The marks of a drain's DeviceTaintRule: the label with its operation, the annotation with its node, and its field
#: manager.
DRAIN_LABEL, DRAIN_NODE, DRAIN_MANAGER = (
    "dra.accelerators/drain",
    "dra.accelerators/drain-node",
    "dra.accelerators.device-drain",
)
#: The annotation that a run renews while it continues a drain. The controller only checks whether its value changes.
DRAIN_RENEWED = "dra.accelerators/drain-renewed"
#: The label of a Node with the release of its node driver. The role dra_driver writes it.
RELEASE_LABEL = "dra.accelerators/release"
#: The label, and its value, of a Node whose pods get devices without claims. The role dra_driver writes it.
INTERFACE_LABEL, PLUGIN = "dra.accelerators/kubelet-interface", "device-plugin"
#: Effects of taints that prevent the allocation of a device. Other effects are for display only.
BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")


class NodeFacts(NamedTuple):
    """A Node: whether its kubelet reports Ready, and whether it has the out-of-service taint.

    ``release`` is the release of its node driver, "" without one. ``uses_device_plugin``: its driver publishes no slices on
    purpose.
    """

    name: str
    uid: str
    ready: bool
    out_of_service: bool
    release: str = ""
    uses_device_plugin: bool = False


class SliceFacts(NamedTuple):
    """A ResourceSlice. ``node`` is "" if it belongs to no single node. ``is_managed``: a driver of this project wrote it.

    ``tainted`` are the names of devices with a taint in the slice that prevents their allocation. ``differing`` are
    (device, difference) pairs for the devices that differ from the node's layout according to its driver.
    """

    name: str
    uid: str
    driver: str
    node: str
    pool: str
    generation: int
    slice_count: int
    is_managed: bool
    tainted: tuple[str, ...] = ()
    differing: tuple[tuple[str, str], ...] = ()


class Consumer(NamedTuple):
    """A consumer that a claim is reserved for. ``resource`` is "pods" for a pod."""

    resource: str
    name: str
    uid: str


class ClaimFacts(NamedTuple):
    """A ResourceClaim. ``node`` is the node of its allocation, or "". ``drivers`` are the drivers of its devices.

    ``pre_binding_node`` is the node that prepares the claim before the pod is bound, or "". ``allocation_digest`` is a
    digest of the allocated devices with binding conditions, or "" without such devices.
    """

    namespace: str
    name: str
    uid: str
    node: str
    drivers: tuple[str, ...]
    consumers: tuple[Consumer, ...]
    finalizers: tuple[str, ...]
    deleting: bool
    is_prepared: bool
    pre_binding_node: str = ""
    allocation_digest: str = ""

    @property
    def allocated(self) -> bool:
        """Return whether devices are allocated to it."""
        return bool(self.drivers)


class ClaimIndex(dict[str, ClaimFacts]):
    """Claims by namespace and name, and also by the node of their allocation: ``by_node``, "" for none.

    ``awaited`` are the claims that nodes prepare before the pods are bound, by node. ``write_count`` is the
    number of writes of claims to the index. Callers reset it to 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_node: dict[str, dict[str, ClaimFacts]] = {}
        self.awaited: dict[str, dict[str, ClaimFacts]] = {}
        self.write_count = 0

    def __setitem__(self, key: str, claim: ClaimFacts) -> None:
        self._forget(key)
        self.write_count += 1
        super().__setitem__(key, claim)
        self.by_node.setdefault(claim.node, {})[key] = claim
        if claim.pre_binding_node:
            self.awaited.setdefault(claim.pre_binding_node, {})[key] = claim

    def __delitem__(self, key: str) -> None:
        self._forget(key)
        super().__delitem__(key)

    def clear(self) -> None:
        """Remove all claims."""
        super().clear()
        self.by_node.clear()
        self.awaited.clear()

    def _forget(self, key: str) -> None:
        former = self.get(key)
        if former is not None:
            _drop(self.by_node, former.node, key)
            if former.pre_binding_node:
                _drop(self.awaited, former.pre_binding_node, key)


def _drop(claims: dict[str, dict[str, ClaimFacts]], node: str, key: str) -> None:
    del claims[node][key]
    if not claims[node]:
        del claims[node]


class RuleFacts(NamedTuple):
    """A DeviceTaintRule of this project, and its node.

    ``operation`` is its drain, or "" for a permanent rule. ``renewed`` is the last renewal by a run. It is compared
    only with earlier values, never with a clock.
    """

    name: str
    uid: str
    node: str
    operation: str = ""
    renewed: str = ""


def _metadata(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return item.get("metadata") or {}


def node_facts(item: Mapping[str, Any]) -> NodeFacts:
    """Extract the facts of a Node."""
    metadata, spec, status = _metadata(item), item.get("spec") or {}, item.get("status") or {}
    return NodeFacts(
        str(metadata.get("name", "")),
        str(metadata.get("uid", "")),
        any(one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or ()),
        any(taint.get("key") == OUT_OF_SERVICE for taint in spec.get("taints") or ()),
        sys.intern(str((metadata.get("labels") or {}).get(RELEASE_LABEL) or "")),
        (metadata.get("labels") or {}).get(INTERFACE_LABEL) == PLUGIN,
    )


def slice_facts(item: Mapping[str, Any]) -> SliceFacts:
    """Extract the facts of a ResourceSlice of any version."""
    metadata, spec = _metadata(item), item.get("spec") or {}
    pool = spec.get("pool") or {}
    return SliceFacts(
        str(metadata.get("name", "")),
        str(metadata.get("uid", "")),
        sys.intern(str(spec.get("driver", ""))),
        sys.intern(str(spec.get("nodeName") or "")),
        sys.intern(str(pool.get("name", ""))),
        int(pool.get("generation") or 0),
        int(pool.get("resourceSliceCount") or 0),
        any(str(one.get("manager", "")).startswith(MANAGED_BY) for one in metadata.get("managedFields") or ()),
        tuple(
            sys.intern(str(device.get("name", "")))
            for device in spec.get("devices") or ()
            # In version v1beta1 all fields except the name are one level below.
            if any(
                taint.get("effect") in BLOCKING_EFFECTS for taint in (device.get("basic") or device).get("taints") or ()
            )
        ),
        tuple(
            (
                f"{difference['index']} ({uuid})",
                "; ".join([*difference["steps"], *([difference["error"]] if difference["error"] else [])]),
            )
            for uuid, difference in sorted(
                parse_annotation(str((metadata.get("annotations") or {}).get(ANNOTATION) or "")).items(),
                key=lambda each: (int(each[1]["index"]), each[0]),
            )
        ),
    )


def claim_facts(item: Mapping[str, Any], pre_binding_drivers: Collection[str] = ()) -> ClaimFacts:
    """Extract the facts of a ResourceClaim of any version: its metadata and status are the same in all.

    ``pre_binding_drivers`` are the drivers whose devices can be prepared before a pod is bound.
    """
    metadata, status = _metadata(item), item.get("status") or {}
    allocation = status.get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or ()
    pre_binding_node, digest = awaited_allocation(status, pre_binding_drivers)
    return ClaimFacts(
        sys.intern(str(metadata.get("namespace", ""))),
        str(metadata.get("name", "")),
        str(metadata.get("uid", "")),
        sys.intern(pinned_node(allocation.get("nodeSelector"))),
        tuple(sorted({sys.intern(str(result.get("driver", ""))) for result in results})),
        tuple(
            Consumer(sys.intern(str(one.get("resource", ""))), str(one.get("name", "")), str(one.get("uid", "")))
            for one in status.get("reservedFor") or ()
        ),
        tuple(metadata.get("finalizers") or ()),
        bool(metadata.get("deletionTimestamp")),
        any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for device in status.get("devices") or ()
            for condition in device.get("conditions") or ()
        ),
        sys.intern(pre_binding_node),
        digest,
    )


def rule_facts(item: Mapping[str, Any]) -> RuleFacts | None:
    """Extract the facts of a DeviceTaintRule; None for one of another owner or without a node."""
    metadata = _metadata(item)
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    managers = {one.get("manager") for one in metadata.get("managedFields") or ()}
    operation = str(labels.get(DRAIN_LABEL) or "") if DRAIN_MANAGER in managers else ""
    # A node's name can be longer than a label's value.
    node = labels.get(NODE_LABEL) or (notes.get(DRAIN_NODE) if operation else "")
    if labels.get(MANAGED_BY_LABEL) != MANAGED_BY or not node:
        return None
    renewed = str(notes.get(DRAIN_RENEWED) or "") if operation else ""
    return RuleFacts(str(metadata.get("name", "")), str(metadata.get("uid", "")), str(node), operation, renewed)


def pinned_node(selector: Mapping[str, Any] | None) -> str:
    """Return the single node of an allocation, in the form that the scheduler writes; "" if it is not limited to one node."""
    terms = (selector or {}).get("nodeSelectorTerms") or []
    if len(terms) != 1 or terms[0].get("matchExpressions"):
        return ""
    fields = terms[0].get("matchFields") or []
    if len(fields) != 1 or fields[0].get("key") != "metadata.name" or fields[0].get("operator") != "In":
        return ""
    values = fields[0].get("values") or []
    return str(values[0]) if len(values) == 1 else ""
