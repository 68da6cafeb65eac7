# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What of a node's devices can be said to an API server that drops fields, and what has to be withheld there.

A taint or a counter that the server drops would not be missed by anybody until a pod gets a device that is lost, or a
partition of one that another pod has whole. What cannot be expressed is therefore not published. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ..core.composed import without_groups
from ..core.model import DEVICE, CounterSet, Offer
from ..core.publishable import keep_publishable
from ..core.shares import exclusive
from ..core.slices import COMBINED, SEPARATE

TAINTS = "taints"
COUNTERS = "counters"
SHARES = "shares"
BINDING = "bindingConditions"
# Not dropped by a server, but not to be had of one that wants counters beside their devices.
JOINT = "counters that devices share"
# The feature gate of the API server (and of the scheduler) that each needs.
GATES = {
    TAINTS: "DRADeviceTaints",
    COUNTERS: "DRAPartitionableDevices",
    SHARES: "DRAConsumableCapacity",
    BINDING: "DRADeviceBindingConditions",
}
# An effect that tells people and keeps nobody away.
INFORMATIVE = "None"
NAMED = 8
# The API server would reject them, and their whole slice.
REJECTED = "rejected devices"
CHANGED = "invalid attributes"


@dataclass(frozen=True)
class Content:
    """What the pool is to hold."""

    offers: tuple[Offer, ...] = ()
    counter_sets: tuple[CounterSet, ...] = ()


@dataclass(frozen=True)
class Withheld:
    """Devices that are not published, or not with all that they have.

    The API server drops ``feature``; for REJECTED and CHANGED it would reject them for ``reason``.
    """

    feature: str
    names: tuple[str, ...] = field(default_factory=tuple)
    reason: str = ""

    def describe(self) -> str:
        """Say what is withheld, why, and what mends it."""
        named = ", ".join(self.names[:NAMED]) + (
            f" and {len(self.names) - NAMED} more" if len(self.names) > NAMED else ""
        )
        if self.feature == REJECTED:
            return f"device {named} is not published: {self.reason}. All other devices are published"
        if self.feature == CHANGED:
            return f"device {named}: {self.reason}. The device is published"
        if self.feature == SHARES:
            return (
                f"the API server drops {self.feature} (feature gate {GATES[self.feature]} is off): {len(self.names)} devices that "
                f"several claims should share are given to one at a time ({named}). Switch the gate on in kube-apiserver, "
                "kube-scheduler and kubelet"
            )
        if self.feature == BINDING:
            return (
                f"the API server drops {self.feature} (feature gate {GATES[self.feature]} is off): {len(self.names)} devices are "
                f"prepared after pods are bound ({named}). Switch the gate on in kube-apiserver and kube-scheduler"
            )
        if self.feature == JOINT:
            return (
                f"the API server is older than Kubernetes 1.35 and takes no counters that devices of several slices share: {len(self.names)} "
                f"devices that stand for several are withheld ({named}). Their members are published as ever"
            )
        why = {
            TAINTS: "a device that should be tainted would be given to pods",
            COUNTERS: "devices that overlap would be given away twice",
        }[self.feature]
        return (
            f"the API server drops {self.feature} (feature gate {GATES[self.feature]} is off): {why}, so "
            f"{len(self.names)} devices are withheld ({named}). Switch the gate on in kube-apiserver and kube-scheduler"
        )


def needs(offer: Offer) -> frozenset[str]:
    """Return the features without which the offer says too much."""
    return frozenset(
        feature
        for feature, needed in (
            (TAINTS, bool(offer.taints)),
            (COUNTERS, bool(offer.taken)),
            (SHARES, bool(offer.policies)),
            (BINDING, offer.prepared_before_binding),
        )
        if needed
    )


def fit(content: Content, drops: Collection[str], layout: str = SEPARATE) -> tuple[Content, tuple[Withheld, ...]]:
    """Return what can be published where the server drops the features, and what is withheld.

    Without taints, tainted devices are. Without shares, devices that have them are given to one claim at a time. Without
    binding conditions, pods are bound before their devices are prepared. Without
    counters, of those that share some only a set is left that fits beside each other: whole devices first, then in the order
    of the offers. Nothing that the server would drop remains. Where the ``layout`` puts counters beside their devices, as before
    Kubernetes 1.35, no device stands for several devices, and taints without an effect are left out, because this server rejects the effect.
    Facts: k8s.io/kubernetes/pkg/apis/resource/validation (validDeviceTaintEffects) of 1.34.
    """
    offers, counter_sets, withheld = content.offers, content.counter_sets, []
    if layout == COMBINED and any(offer.members for offer in offers):
        withheld.append(Withheld(JOINT, tuple(offer.name for offer in offers if offer.members)))
        offers, counter_sets = without_groups(offers, counter_sets)
    if layout == COMBINED:
        offers = tuple(
            replace(offer, taints=tuple(taint for taint in offer.taints if taint.effect != INFORMATIVE))
            for offer in offers
        )
    if TAINTS in drops:
        ill = [offer for offer in offers if any(taint.effect != INFORMATIVE for taint in offer.taints)]
        names = {offer.name for offer in ill}
        offers = tuple(replace(offer, taints=()) for offer in offers if offer.name not in names)
        if ill:
            withheld.append(Withheld(TAINTS, tuple(offer.name for offer in ill)))
    if SHARES in drops:
        names = {offer.name for offer in offers if offer.policies}
        offers = tuple(exclusive(offer) if offer.policies else offer for offer in offers)
        if names:
            withheld.append(Withheld(SHARES, tuple(sorted(names))))
    if BINDING in drops:
        names = {offer.name for offer in offers if offer.prepared_before_binding}
        offers = tuple(replace(offer, prepared_before_binding=False) for offer in offers)
        if names:
            withheld.append(Withheld(BINDING, tuple(sorted(names))))
    if COUNTERS not in drops:
        return Content(offers, counter_sets), tuple(withheld)
    chosen = _beside_each_other(offers, counter_sets)
    left_out = tuple(offer.name for offer in offers if offer.name not in chosen)
    if left_out:
        withheld.append(Withheld(COUNTERS, left_out))
    kept = tuple(replace(offer, counter_set=None, consumes={}, jointly={}) for offer in offers if offer.name in chosen)
    return Content(kept, ()), tuple(withheld)


def _beside_each_other(offers: tuple[Offer, ...], counter_sets: tuple[CounterSet, ...]) -> set[str]:
    left = {each.name: dict(each.counters) for each in counter_sets}
    chosen = {offer.name for offer in offers if not offer.taken}
    for offer in sorted((each for each in offers if each.taken), key=lambda each: each.kind != DEVICE):
        amounts = [(name, counter, amount) for name, taken in offer.taken.items() for counter, amount in taken.items()]
        if all(left.get(name, {}).get(counter, 0) >= amount for name, counter, amount in amounts):
            chosen.add(offer.name)
            for name, counter, amount in amounts:
                left[name][counter] -= amount
    return chosen


def without_invalid(content: Content) -> tuple[Content, tuple[Withheld, ...]]:
    """Return the content without the devices and attributes that the API server would reject, and the omitted ones."""
    found = keep_publishable(content.offers, content.counter_sets)
    withheld = [Withheld(REJECTED, (name,), why) for name, why in found.rejected.items()]
    withheld += [Withheld(CHANGED, (name,), why) for name, why in found.changed.items()]
    return Content(found.offers, found.counter_sets), tuple(withheld)
