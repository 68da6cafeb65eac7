# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keep one device that the API server would reject from making the whole pool unpublishable; without side effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..model import AttributeValue, CounterSet, Offer
from ..texts import cut_bytes
from .device_json import counter_set_form, published_form
from .resource_slices import (
    LONGEST_STRING,
    MOST_ATTRIBUTES_AND_CAPACITIES,
    is_qualified_name,
    validate_counter_set,
    validate_device,
)


@dataclass(frozen=True)
class Publishable:
    """The devices and counter sets that the API server accepts.

    ``changed`` are the problems of published devices whose attributes were shortened or left out, ``rejected`` those of
    the devices that are not published; both by the device's name.
    """

    offers: tuple[Offer, ...]
    counter_sets: tuple[CounterSet, ...]
    changed: Mapping[str, str]
    rejected: Mapping[str, str]


def keep_publishable(offers: Iterable[Offer], counter_sets: Iterable[CounterSet]) -> Publishable:
    """Return the publishable ones of these devices and counter sets, with valid attributes.

    A string that is too long is shortened, because selectors fail on a missing attribute. An attribute with an invalid
    name, and those beyond the limit, are left out. Any other problem of a device leaves out that device.
    """
    forms: dict[str, Mapping[str, Any]] = {}
    kept_sets = []
    reasons: dict[str, str] = {}
    for each in counter_sets:
        try:
            validate_counter_set(counter_set_form(each), forms)
        except ValueError as error:
            reasons.setdefault(each.name, str(error))
        else:
            kept_sets.append(each)
    kept: dict[str, Offer] = {}
    changed: dict[str, str] = {}
    rejected: dict[str, str] = {}
    for offer in offers:
        repaired, problem = _with_valid_attributes(offer)
        unusable = [reasons[name] for name in offer.all_counters if name not in forms and name in reasons]
        try:
            if unusable:
                raise ValueError(unusable[0])
            validate_device(published_form(repaired), kept, forms)
        except ValueError as error:
            rejected[offer.name] = str(error)
            continue
        kept[offer.name] = repaired
        if problem:
            changed[offer.name] = problem
    return Publishable(tuple(kept.values()), tuple(kept_sets), changed, rejected)


def _with_valid_attributes(offer: Offer) -> tuple[Offer, str]:
    """Return a device with valid attributes, and a description of the changes; "" without changes."""
    attributes: dict[str, AttributeValue] = {}
    problems = []
    most = MOST_ATTRIBUTES_AND_CAPACITIES - len(offer.capacities)
    for name, value in offer.attributes.items():
        if not is_qualified_name(name):
            problems.append(f"attribute {name!r} is left out: this is not a qualified name")
        elif len(attributes) >= most:
            problems.append(
                f"attribute {name} is left out: a device has {MOST_ATTRIBUTES_AND_CAPACITIES} attributes and capacities at most"
            )
        elif isinstance(value, str) and len(value.encode("utf-8", "replace")) > LONGEST_STRING:
            attributes[name] = cut_bytes(value, LONGEST_STRING)
            problems.append(f"attribute {name} is shortened to {LONGEST_STRING} bytes")
        else:
            attributes[name] = value
    if not problems:
        return offer, ""
    return replace(offer, attributes=MappingProxyType(attributes)), "; ".join(problems)
