# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the controller remembers of the API server's objects: no more than its decisions need. Pure.

Facts: k8s.io/api/resource/v1/types.go (ResourceSlice, ResourceClaim, DeviceTaintRule), k8s.io/api/core/v1/well_known_taints.go.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core.layout_differences import ANNOTATION, read_note

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
#: Finalizers with this prefix are ours, and no others.
OUR_FINALIZERS = "dra.accelerators/"
#: The labels of objects that are ours, and of what belongs to one node.
OUR_LABEL, OURS = "app.kubernetes.io/managed-by", "dra-accelerators"
NODE_LABEL = "dra.accelerators/node"
#: What a DeviceTaintRule of a drain bears: the label with its operation, an annotation with its node, and who wrote it.
DRAIN_LABEL, DRAIN_NODE, DRAIN_MANAGER = (
    "dra.accelerators/drain",
    "dra.accelerators/drain-node",
    "dra.accelerators.device-drain",
)
#: What a run that goes on with a drain writes anew at its rules, the last sign of its life.
DRAIN_RENEWED = "dra.accelerators/drain-renewed"
#: The label of a Node that says of which release its node driver is; the role dra_driver writes it.
RELEASE_LABEL = "dra.accelerators/release"
#: The label of a Node whose devices pods have without claims, and its value; the same role writes it.
INTERFACE_LABEL, PLUGIN = "dra.accelerators/kubelet-interface", "device-plugin"
#: Effects of taints for which a device is not given out; what has another effect is only told.
KEEPING_AWAY = ("NoSchedule", "NoExecute")


class NodeFacts(NamedTuple):
    """A Node: whether its kubelet says that it is ready, and whether somebody has said that it is out of service.

    ``release`` is that of its node driver, "" where it has none; ``is_plugin`` says that this publishes nothing, and is meant to.
    """

    name: str
    uid: str
    ready: bool
    out_of_service: bool
    release: str = ""
    is_plugin: bool = False


class SliceFacts(NamedTuple):
    """A ResourceSlice. ``node`` is "" for one that belongs to no single node; ``ours`` says that one of our drivers wrote it.

    ``tainted`` are the names of its devices that are not given out for a taint in the slice itself. ``differing`` are devices, in words,
    of which the node's driver says that they are not as the node's layout wants, each with what.
    """

    name: str
    uid: str
    driver: str
    node: str
    pool: str
    generation: int
    slice_count: int
    ours: bool
    tainted: tuple[str, ...] = ()
    differing: tuple[tuple[str, str], ...] = ()


class Consumer(NamedTuple):
    """Whom a claim is reserved for. ``resource`` is "pods" for a pod."""

    resource: str
    name: str
    uid: str


class ClaimFacts(NamedTuple):
    """A ResourceClaim. ``node`` is the one that its allocation is pinned to, "" for none; ``drivers`` those it has devices of."""

    namespace: str
    name: str
    uid: str
    node: str
    drivers: tuple[str, ...]
    consumers: tuple[Consumer, ...]
    finalizers: tuple[str, ...]
    deleting: bool
    prepared: bool

    @property
    def allocated(self) -> bool:
        """Whether devices were given to it."""
        return bool(self.drivers)


class ClaimIndex(dict[str, ClaimFacts]):
    """Claims by namespace and name, and also by the node of their allocation: ``by_node``, "" for none.

    ``stored`` is how many claims were stored since a caller has set it to 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_node: dict[str, dict[str, ClaimFacts]] = {}
        self.stored = 0

    def __setitem__(self, key: str, claim: ClaimFacts) -> None:
        self._forget(key)
        self.stored += 1
        super().__setitem__(key, claim)
        self.by_node.setdefault(claim.node, {})[key] = claim

    def __delitem__(self, key: str) -> None:
        self._forget(key)
        super().__delitem__(key)

    def clear(self) -> None:
        """Remove all claims."""
        super().clear()
        self.by_node.clear()

    def _forget(self, key: str) -> None:
        former = self.get(key)
        if former is not None:
            del self.by_node[former.node][key]
            if not self.by_node[former.node]:
                del self.by_node[former.node]


class RuleFacts(NamedTuple):
    """A DeviceTaintRule of ours and the node that it was made for.

    ``operation`` is the drain that it is of, "" for a rule of another kind: that one was written to stay. ``renewed`` is what the last
    run that went on with the drain has written: it is compared with itself, never with a clock.
    """

    name: str
    uid: str
    node: str
    operation: str = ""
    renewed: str = ""


def _metadata(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return item.get("metadata") or {}


def node_facts(item: Mapping[str, Any]) -> NodeFacts:
    """Read a Node."""
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
    """Read a ResourceSlice of any version."""
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
        any(str(one.get("manager", "")).startswith(OURS) for one in metadata.get("managedFields") or ()),
        tuple(
            sys.intern(str(device.get("name", "")))
            for device in spec.get("devices") or ()
            # Version v1beta1 has everything but the name one level below.
            if any(taint.get("effect") in KEEPING_AWAY for taint in (device.get("basic") or device).get("taints") or ())
        ),
        tuple(
            (f"{said['index']} ({uuid})", "; ".join([*said["steps"], *([said["error"]] if said["error"] else [])]))
            for uuid, said in sorted(
                read_note(str((metadata.get("annotations") or {}).get(ANNOTATION) or "")).items(),
                key=lambda each: (int(each[1]["index"]), each[0]),
            )
        ),
    )


def claim_facts(item: Mapping[str, Any]) -> ClaimFacts:
    """Read a ResourceClaim of any version: its metadata and status are the same in all."""
    metadata, status = _metadata(item), item.get("status") or {}
    allocation = status.get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or ()
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
    )


def rule_facts(item: Mapping[str, Any]) -> RuleFacts | None:
    """Read a DeviceTaintRule; None for one that is not ours or belongs to no node."""
    metadata = _metadata(item)
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    managers = {one.get("manager") for one in metadata.get("managedFields") or ()}
    operation = str(labels.get(DRAIN_LABEL) or "") if DRAIN_MANAGER in managers else ""
    # A node's name can be longer than a label's value.
    node = labels.get(NODE_LABEL) or (notes.get(DRAIN_NODE) if operation else "")
    if labels.get(OUR_LABEL) != OURS or not node:
        return None
    renewed = str(notes.get(DRAIN_RENEWED) or "") if operation else ""
    return RuleFacts(str(metadata.get("name", "")), str(metadata.get("uid", "")), str(node), operation, renewed)


def pinned_node(selector: Mapping[str, Any] | None) -> str:
    """The one node that an allocation is for, in the form that the scheduler writes it; "" where it is for others too."""
    terms = (selector or {}).get("nodeSelectorTerms") or []
    if len(terms) != 1 or terms[0].get("matchExpressions"):
        return ""
    fields = terms[0].get("matchFields") or []
    if len(fields) != 1 or fields[0].get("key") != "metadata.name" or fields[0].get("operator") != "In":
        return ""
    values = fields[0].get("values") or []
    return str(values[0]) if len(values) == 1 else ""
