# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare the devices with the node's layout, and report lasting differences as pool annotations, Events, and a metric.

The rules are those of the driver itself, and the devices those of its scans: no extra query of the hardware is needed.
During an operation of a repartitioning nothing is compared, because it changes the devices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Protocol

from ..claims.store.records import ClaimRecord
from ..core.model import well
from ..core.partitioning.layout_differences import ANNOTATION, compare, note_of
from ..core.partitioning.rules import Rule
from ..core.repartition.record import Watch
from ..core.store.prepared_claims import prepared_partitions
from ..inventory import Survey
from ..logs import fields
from .driver_state import Shared, Snapshot

LOG = logging.getLogger(__name__)

Json = dict[str, Any]
DIFFERS, AGREES = "LayoutDiffers", "LayoutAgrees"


@dataclass(frozen=True)
class Differing:
    """The devices that differ, each with the time since when (by UUID, on the supervisor's clock), and the lasting differences.

    ``lasting`` is not set (None) after a start until it is known. Earlier reports stay valid until then. ``reported`` are the UUIDs
    of the last Event.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    lasting: tuple[Json, ...] | None = None
    reported: frozenset[str] = frozenset()

    @property
    def number(self) -> int:
        """Return how many devices have a lasting difference."""
        return len(self.lasting or ())


def follow(former: Differing, found: Sequence[Json], now: float, seconds: float) -> Differing:
    """Return the current differences, and those that have lasted ``seconds``. ``found`` are entries of ``compare``."""
    since = {str(each["uuid"]): former.since.get(str(each["uuid"]), now) for each in found}
    lasting = tuple(each for each in found if now - since[str(each["uuid"])] >= seconds)
    known = former.lasting is not None or len(lasting) == len(found)
    return replace(former, since=since, lasting=lasting if known else None)


def paused(former: Differing) -> Differing:
    """Return the state during a pause of the comparison: lasting differences stay, and the time of others starts again."""
    lasting = {str(each["uuid"]) for each in former.lasting or ()}
    return replace(former, since={uuid: at for uuid, at in former.since.items() if uuid in lasting})


def differences(survey: Survey, rules: tuple[Rule, ...], records: Collection[ClaimRecord]) -> list[Json]:
    """Return the differences between healthy devices and the rules, with the claims that use a part of them."""
    return compare(well(survey.findings), rules, prepared_partitions(records))


def message_of(lasting: Sequence[Json]) -> str:
    """Return a message with the differences and the remedy."""
    number = "1 device differs" if len(lasting) == 1 else f"{len(lasting)} devices differ"
    texts = " ".join(f"{each['message'].rstrip('.')}." for each in lasting)
    return (
        f"{number} from the node's layout. Apply the layout (the playbook repartition, or site), or correct it. {texts}"
    )


class LayoutReporter(Protocol):
    """Writes Events on the node."""

    def problem(self, reason: str, message: str) -> None:
        """Write a warning for an administrator."""

    def done(self, reason: str, message: str, action: str) -> None:
        """Write that a problem has ended."""


class LayoutSupervisor:
    """Compare one vendor's devices with the layout: read ``snapshots``, write ``known``, and annotate the pool with ``note``.

    ``seconds`` is how long a device must differ before it is reported, so that a program that changes devices has time
    to notify the driver.
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
        reporter: LayoutReporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._rules = rules
        self._seconds = seconds
        self._snapshots = snapshots
        self._claims = claims
        self._repartition = repartition
        self._note = note
        self._reporter = reporter
        self._clock = clock
        self._known = known

    async def run(self) -> None:
        """Process each scan until canceled."""
        async for snapshot in self._snapshots.follow():
            await self.compare(snapshot)

    async def compare(self, snapshot: Snapshot) -> None:
        """Compare one scan. Without facts about the hardware there is no comparison."""
        if snapshot.survey is None:
            return
        if self._repartition.is_active():
            self._known.put(paused(self._known.value))
            return
        found = await asyncio.to_thread(differences, snapshot.survey, self._rules, tuple(self._claims()))
        known = follow(self._known.value, found, self._clock(), self._seconds)
        if known.lasting is not None:
            self._note({ANNOTATION: note_of(known.lasting)})
            known = replace(known, reported=self._report(known.reported, known.lasting))
        self._known.put(known)

    def _report(self, reported: frozenset[str], lasting: Sequence[Json]) -> frozenset[str]:
        """Write one Event if the differing devices are not the reported ones (``reported``).

        Return the reported ones.
        """
        uuids = frozenset(str(each["uuid"]) for each in lasting)
        for each in lasting:
            if each["uuid"] not in reported:
                LOG.warning("%s", each["message"], extra=fields(driver=self._driver, device=each["uuid"]))
        if uuids and uuids != reported:
            self._reporter.problem(DIFFERS, message_of(lasting))
        elif reported and not uuids:
            LOG.info("all devices are as the layout wants again", extra=fields(driver=self._driver))
            self._reporter.done(AGREES, "all devices are as the node's layout wants again", "Watch")
        return uuids
