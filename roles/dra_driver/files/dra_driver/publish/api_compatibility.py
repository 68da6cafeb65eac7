# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Adapt a node's devices to an API server that drops fields, and withhold devices that it cannot represent.

No side effects. If the server drops a taint or a counter, no error shows it until a pod gets a lost device, or a
partition of a device that another pod uses as a whole. Therefore such devices are not published.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ..core.dra.composite_devices import without_groups
from ..core.dra.consumable_capacity import exclusive
from ..core.dra.publishable import keep_publishable
from ..core.dra.resource_slices import COMBINED, SEPARATE
from ..core.model import DEVICE, CounterSet, Offer

TAINTS = "taints"
COUNTERS = "counters"
SHARES = "shares"
BINDING = "bindingConditions"
# A server with counters in the slices of their devices does not support counters that devices of several slices share.
SHARED_COUNTERS = "counters that devices share"
# The feature gate of the API server (and of the scheduler) for each feature.
GATES = {
    TAINTS: "DRADeviceTaints",
    COUNTERS: "DRAPartitionableDevices",
    SHARES: "DRAConsumableCapacity",
    BINDING: "DRADeviceBindingConditions",
}
# The taint effect that does not affect scheduling.
INFORMATIVE = "None"
# The maximum number of device names in a message.
NAMED_DEVICES = 8
# The API server would reject these devices, and with them their whole slice.
REJECTED = "rejected devices"
CHANGED = "invalid attributes"


@dataclass(frozen=True)
class Content:
    """The desired content of the pool."""

    offers: tuple[Offer, ...] = ()
    counter_sets: tuple[CounterSet, ...] = ()


@dataclass(frozen=True)
class Withheld:
    """Devices that are not published, or not completely.

    The API server drops ``feature``; for REJECTED and CHANGED it would reject them for ``reason``.
    """

    feature: str
    names: tuple[str, ...] = field(default_factory=tuple)
    reason: str = ""

    def describe(self) -> str:
        """Return a message with the devices, the reason, and the remedy."""
        named = ", ".join(self.names[:NAMED_DEVICES]) + (
            f" and {len(self.names) - NAMED_DEVICES} more" if len(self.names) > NAMED_DEVICES else ""
        )
        if self.feature == REJECTED:
            return f"device {named} is not published: {self.reason}. All other devices are published"
        if self.feature == CHANGED:
            return f"device {named}: {self.reason}. The device is published"
        if self.feature == SHARES:
            return (
                f"the API server drops {self.feature} (feature gate {GATES[self.feature]} is off): {len(self.names)} devices that "
                f"several claims should share are allocated to one claim at a time ({named}). Enable the gate in kube-apiserver, "
                "kube-scheduler, and kubelet"
            )
        if self.feature == BINDING:
            return (
                f"the API server drops {self.feature} (feature gate {GATES[self.feature]} is off): {len(self.names)} devices are "
                f"prepared after pods are bound ({named}). Enable the gate in kube-apiserver and kube-scheduler"
            )
        if self.feature == SHARED_COUNTERS:
            return (
                f"the API server is older than Kubernetes 1.35 and takes no counters that devices of several slices share: {len(self.names)} "
                f"devices that combine several are withheld ({named}). Their members are still published"
            )
        why = {
            TAINTS: "a device that should be tainted would be allocated to pods",
            COUNTERS: "devices that overlap would be allocated twice",
        }[self.feature]
        return (
            f"the API server drops {self.feature} (feature gate {GATES[self.feature]} is off): {why}, so "
            f"{len(self.names)} devices are withheld ({named}). Enable the gate in kube-apiserver and kube-scheduler"
        )


def needed_features(offer: Offer) -> frozenset[str]:
    """Return the features without which the offer must not be published unchanged."""
    return frozenset(
        feature
        for feature, needed in (
            (TAINTS, bool(offer.taints)),
            (COUNTERS, bool(offer.all_counters)),
            (SHARES, bool(offer.policies)),
            (BINDING, offer.prepared_before_binding),
        )
        if needed
    )


def fit_to_server(
    content: Content, drops: Collection[str], layout: str = SEPARATE
) -> tuple[Content, tuple[Withheld, ...]]:
    """Return the content for a server that drops these features, and the withheld devices.

    Without taints, tainted devices are withheld. Without shares, shareable devices are allocated to one claim at a
    time. Without binding conditions, pods are bound before their devices are prepared. Without counters, only devices
    that do not overlap are kept: whole devices first, then in the order of the offers. The result has nothing that the
    server would drop. If the ``layout`` has counters in the slices of their devices, as before Kubernetes 1.35, groups
    are withheld. Taints without an effect are removed then, because this server rejects that effect. Facts:
    k8s.io/kubernetes/pkg/apis/resource/validation (validDeviceTaintEffects) of 1.34.
    """
    offers, counter_sets, withheld = content.offers, content.counter_sets, []
    if layout == COMBINED and any(offer.members for offer in offers):
        withheld.append(Withheld(SHARED_COUNTERS, tuple(offer.name for offer in offers if offer.members)))
        offers, counter_sets = without_groups(offers, counter_sets)
    if layout == COMBINED:
        offers = tuple(
            replace(offer, taints=tuple(taint for taint in offer.taints if taint.effect != INFORMATIVE))
            for offer in offers
        )
    if TAINTS in drops:
        tainted = [offer for offer in offers if any(taint.effect != INFORMATIVE for taint in offer.taints)]
        names = {offer.name for offer in tainted}
        offers = tuple(replace(offer, taints=()) for offer in offers if offer.name not in names)
        if tainted:
            withheld.append(Withheld(TAINTS, tuple(offer.name for offer in tainted)))
    if SHARES in drops:
        names = {offer.name for offer in offers if offer.policies}
        offers = tuple(exclusive(offer) if offer.policies else offer for offer in offers)
        if names:
            withheld.append(Withheld(SHARES, tuple(sorted(names))))
    if BINDING in drops:
        names = {offer.name for offer in offers if offer.prepared_before_binding}
        offers = without_binding(Content(offers)).offers
        if names:
            withheld.append(Withheld(BINDING, tuple(sorted(names))))
    if COUNTERS not in drops:
        return Content(offers, counter_sets), tuple(withheld)
    chosen = _fitting_offers(offers, counter_sets)
    left_out = tuple(offer.name for offer in offers if offer.name not in chosen)
    if left_out:
        withheld.append(Withheld(COUNTERS, left_out))
    kept = tuple(
        replace(offer, counter_set=None, consumes={}, joint_counters={}) for offer in offers if offer.name in chosen
    )
    return Content(kept, ()), tuple(withheld)


def without_binding(content: Content) -> Content:
    """Return the content without binding conditions: pods are bound before their devices are prepared."""
    return replace(content, offers=tuple(replace(offer, prepared_before_binding=False) for offer in content.offers))


def _fitting_offers(offers: tuple[Offer, ...], counter_sets: tuple[CounterSet, ...]) -> set[str]:
    left = {each.name: dict(each.counters) for each in counter_sets}
    chosen = {offer.name for offer in offers if not offer.all_counters}
    for offer in sorted((each for each in offers if each.all_counters), key=lambda each: each.kind != DEVICE):
        amounts = [
            (name, counter, amount) for name, taken in offer.all_counters.items() for counter, amount in taken.items()
        ]
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
