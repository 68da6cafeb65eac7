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
from ..core.model import healthy_devices
from ..core.partitioning.layout_differences import ANNOTATION, annotation_text, compare
from ..core.partitioning.rules import Rule
from ..core.repartition.record import Watch
from ..core.store.prepared_claims import prepared_partitions
from ..inventory import Survey
from ..logs import fields
from .driver_state import Shared, Snapshot

LOG = logging.getLogger(__name__)

Json = dict[str, Any]
EVENT_DIFFERS, EVENT_AGREES = "LayoutDiffers", "LayoutAgrees"


@dataclass(frozen=True)
class LayoutDifferences:
    """The differences between the devices and the layout. A difference is an entry of ``compare``: a mapping with uuid and message.

    ``since`` has the time of the first observation by device UUID, on the supervisor's clock. ``lasting`` are the differences that have
    lasted long enough to be reported. After a start it is None until they are known, and the published annotation stays. ``reported``
    are the device UUIDs of the last Event.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    lasting: tuple[Json, ...] | None = None
    reported: frozenset[str] = frozenset()

    @property
    def number(self) -> int:
        """Return the number of devices with a lasting difference."""
        return len(self.lasting or ())


def track(former: LayoutDifferences, current: Sequence[Json], now: float, seconds: float) -> LayoutDifferences:
    """Return the state after a comparison at ``now`` that found these differences. They are lasting after ``seconds``."""
    since = {str(each["uuid"]): former.since.get(str(each["uuid"]), now) for each in current}
    lasting = tuple(each for each in current if now - since[str(each["uuid"])] >= seconds)
    is_known = former.lasting is not None or len(lasting) == len(current)
    return replace(former, since=since, lasting=lasting if is_known else None)


def pause(former: LayoutDifferences) -> LayoutDifferences:
    """Return the state without a comparison: lasting differences stay, and the time of the other ones starts again later."""
    lasting = {str(each["uuid"]) for each in former.lasting or ()}
    return replace(former, since={uuid: seen_at for uuid, seen_at in former.since.items() if uuid in lasting})


def differences(survey: Survey, rules: tuple[Rule, ...], records: Collection[ClaimRecord]) -> list[Json]:
    """Return the differences between healthy devices and the rules, with the claims that use a part of them."""
    return compare(healthy_devices(survey.findings), rules, prepared_partitions(records))


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
    """Compare the devices of each snapshot with the layout, write the result to ``known``, and pass the pool's annotation to ``annotate``.

    A device must differ for ``seconds`` before it is reported. A program that changes devices notifies the driver within this time.
    """

    def __init__(
        self,
        *,
        driver: str,
        rules: tuple[Rule, ...],
        seconds: float,
        snapshots: Shared[Snapshot],
        known: Shared[LayoutDifferences],
        claims: Callable[[], Collection[ClaimRecord]],
        repartition: Watch,
        annotate: Callable[[Mapping[str, str]], None],
        reporter: LayoutReporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._rules = rules
        self._seconds = seconds
        self._snapshots = snapshots
        self._claims = claims
        self._repartition = repartition
        self._annotate = annotate
        self._reporter = reporter
        self._clock = clock
        self._known = known

    async def run(self) -> None:
        """Process each scan until canceled."""
        async for snapshot in self._snapshots.follow():
            await self.compare(snapshot)

    async def compare(self, snapshot: Snapshot) -> None:
        """Compare the devices of one snapshot, and report the lasting differences."""
        if snapshot.survey is None:
            return
        if self._repartition.is_active():
            self._known.put(pause(self._known.value))
            return
        current = await asyncio.to_thread(differences, snapshot.survey, self._rules, tuple(self._claims()))
        known = track(self._known.value, current, self._clock(), self._seconds)
        if known.lasting is not None:
            self._annotate({ANNOTATION: annotation_text(known.lasting)})
            known = replace(known, reported=self._report_changes(known.reported, known.lasting))
        self._known.put(known)

    def _report_changes(self, reported: frozenset[str], lasting: Sequence[Json]) -> frozenset[str]:
        """Write an Event if other devices differ than at the last Event. Return the UUIDs of the devices that differ."""
        uuids = frozenset(str(each["uuid"]) for each in lasting)
        for each in lasting:
            if each["uuid"] not in reported:
                LOG.warning("%s", each["message"], extra=fields(driver=self._driver, device=each["uuid"]))
        if uuids and uuids != reported:
            self._reporter.problem(EVENT_DIFFERS, message_of(lasting))
        elif reported and not uuids:
            LOG.info("all devices are as the layout wants again", extra=fields(driver=self._driver))
            self._reporter.done(EVENT_AGREES, "all devices are as the node's layout wants again", "Watch")
        return uuids
