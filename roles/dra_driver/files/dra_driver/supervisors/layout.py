# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Says whether the devices are as the layout wants: what has differed for a while is noted at the pool, told on the node and counted.

The rules are those that the driver itself works by, and the devices those of its looks: nobody asks the hardware for this. While an operation
of a repartitioning is under way nothing is judged, since it is what changes the devices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Protocol

from ..claims.records import ClaimRecord
from ..core.layout_differences import ANNOTATION, compare, note_of
from ..core.layout_rules import Rule
from ..core.model import well
from ..core.prepared import prepared_partitions
from ..core.repartition_record import Watch
from ..inventory import Survey
from ..logs import fields
from .shared import Shared, Snapshot

LOG = logging.getLogger(__name__)

Json = dict[str, Any]
DIFFERS, AGREES = "LayoutDiffers", "LayoutAgrees"


@dataclass(frozen=True)
class Differing:
    """Since when each device differs, by its UUID and the keeper's clock, and what of that has lasted.

    ``lasting`` is None until it is known after a start: what was said before it stays said until then. ``told`` are the UUIDs that the
    last Event was about.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    lasting: tuple[Json, ...] | None = None
    told: frozenset[str] = frozenset()

    @property
    def number(self) -> int:
        """How many devices have differed for long."""
        return len(self.lasting or ())


def follow(former: Differing, found: Sequence[Json], now: float, seconds: float) -> Differing:
    """Return what differs now, and what of that has for ``seconds``; ``found`` are entries of ``compare``. Pure."""
    since = {str(each["uuid"]): former.since.get(str(each["uuid"]), now) for each in found}
    lasting = tuple(each for each in found if now - since[str(each["uuid"])] >= seconds)
    known = former.lasting is not None or len(lasting) == len(found)
    return replace(former, since=since, lasting=lasting if known else None)


def paused(former: Differing) -> Differing:
    """Return what is known while nothing is judged: what has lasted stays, and all else begins anew afterwards. Pure."""
    told = {str(each["uuid"]) for each in former.lasting or ()}
    return replace(former, since={uuid: at for uuid, at in former.since.items() if uuid in told})


def differences(survey: Survey, rules: tuple[Rule, ...], records: Collection[ClaimRecord]) -> list[Json]:
    """Return how the devices that are well differ from the rules, with the claims that have something of them. Pure."""
    return compare(well(survey.findings), rules, prepared_partitions(records))


def message_of(lasting: Sequence[Json]) -> str:
    """What differs, in words, and what to do."""
    number = "1 device is" if len(lasting) == 1 else f"{len(lasting)} devices are"
    told = " ".join(f"{each['message'].rstrip('.')}." for each in lasting)
    return f"{number} not as the node's layout wants. Apply the layout (the playbook repartition, or site), or correct it. {told}"


class Teller(Protocol):
    """Who writes Events on the node."""

    def problem(self, reason: str, message: str) -> None:
        """Tell of something that an administrator should know."""

    def done(self, reason: str, message: str, action: str) -> None:
        """Tell that it is over."""


class LayoutKeeper:
    """One vendor's devices. Follows ``snapshots`` and writes ``known``; ``note`` puts annotations at the pool.

    ``seconds`` is for how long a device differs until it is said: who changes devices and then tells the driver is given that time.
    """

    def __init__(
        self,
        *,
        driver: str,
        rules: tuple[Rule, ...],
        seconds: float,
        snapshots: Shared[Snapshot],
        known: Shared[Differing],
        claims: Callable[[], Collection[ClaimRecord]],
        repartition: Watch,
        note: Callable[[Mapping[str, str]], None],
        teller: Teller,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._rules = rules
        self._seconds = seconds
        self._snapshots = snapshots
        self._claims = claims
        self._repartition = repartition
        self._note = note
        self._teller = teller
        self._clock = clock
        self._known = known

    async def run(self) -> None:
        """Follow the looks until cancelled."""
        async for snapshot in self._snapshots.follow():
            await self.look(snapshot)

    async def look(self, snapshot: Snapshot) -> None:
        """Judge one look. What is not known of the hardware is not judged."""
        if snapshot.survey is None:
            return
        if self._repartition.is_active():
            self._known.put(paused(self._known.value))
            return
        found = await asyncio.to_thread(differences, snapshot.survey, self._rules, tuple(self._claims()))
        known = follow(self._known.value, found, self._clock(), self._seconds)
        if known.lasting is not None:
            self._note({ANNOTATION: note_of(known.lasting)})
            known = replace(known, told=self._tell(known.told, known.lasting))
        self._known.put(known)

    def _tell(self, told: frozenset[str], lasting: Sequence[Json]) -> frozenset[str]:
        """Write one Event where other devices differ than were ``told``; returns those that are told now."""
        uuids = frozenset(str(each["uuid"]) for each in lasting)
        for each in lasting:
            if each["uuid"] not in told:
                LOG.warning("%s", each["message"], extra=fields(driver=self._driver, device=each["uuid"]))
        if uuids and uuids != told:
            self._teller.problem(DIFFERS, message_of(lasting))
        elif told and not uuids:
            LOG.info("all devices are as the layout wants again", extra=fields(driver=self._driver))
            self._teller.done(AGREES, "all devices are as the node's layout wants again", "Watch")
        return uuids
