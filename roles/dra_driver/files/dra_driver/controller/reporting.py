# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Report drift and progress: one Event for each change, and Prometheus metrics."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping

from ..api.events import EventRecorder, Subject
from ..api.resources import GROUP
from ..logs import fields
from . import drift, progress
from .cleanup.cleanup_plan import ClusterView
from .controller_metrics import ControllerMetrics
from .drift import Drift, EventKey, FindingKey, Report

LOG = logging.getLogger(__name__)

ENDED = "DriftEnded"
REASONS = {
    drift.NODE_ABSENT: "DevicesWithoutNode",
    drift.NODE_NOT_READY: "DevicesOfNodeNotReady",
    drift.NO_SLICES: "DevicesNotPublished",
    drift.POOL_INCOMPLETE: "PoolIncomplete",
    drift.POOL_MIXED: "PoolMixed",
    drift.DEVICE_TAINTED: "DevicesTainted",
    drift.RELEASE_BEHIND: "ReleaseBehind",
    drift.DRAIN_LEFT: "DrainLeft",
    drift.LAYOUT_DIFFERS: "LayoutDiffers",
}


class Reporter:
    """Report the observed findings. ``lasting`` is the duration in seconds after which a finding is reported.

    With ``dry_run`` it writes no Event, but logs. Events over the rate limit are written in a later pass.
    """

    def __init__(
        self,
        *,
        drivers: Collection[str],
        events: EventRecorder,
        measurements: ControllerMetrics,
        lasting: float,
        dry_run: bool = False,
    ) -> None:
        self._drivers = drivers
        self._events = events
        self._measurements = measurements
        self._lasting = lasting
        self._dry_run = dry_run
        self.forget()

    def forget(self) -> None:
        """Start again without observations, because another controller has been, or will be, active."""
        self._drifts: dict[FindingKey, Drift] = {}
        self._reported: dict[EventKey, Report] = {}
        self._releases: dict[str, str] | None = None
        self._changed_at: float | None = None
        self._unreported: dict[str, progress.Change] = {}
        self._drains: dict[progress.Drain, int] | None = None
        self._unreported_drains: dict[progress.Drain, tuple[str, str]] = {}
        self._measurements.fleet({}, {})
        self._measurements.draining(0)

    async def report_changes(self, view: ClusterView, absent_since: Mapping[str, float], now: float) -> None:
        """Process one view, at ``now`` of the controller's own clock, and report the changes."""
        changed = progress.release_changes(self._releases, view)
        if changed or self._changed_at is None:
            self._changed_at = now
        self._releases = progress.releases(view)
        # On a thread, because the event loop answers the webhook and renews the Lease.
        found = await asyncio.to_thread(
            drift.findings, view, self._drivers, absent_since=absent_since, changed_at=self._changed_at
        )
        self._drifts = drift.track(self._drifts, found, now=now, lasting=self._lasting)
        self._report_drift()
        self._report_releases(changed)
        self._report_drains(view)
        nodes = {each.finding.node for each in self._drifts.values() if each.lasting}
        self._measurements.fleet(drift.lasting_of(self._drifts), progress.count_nodes(view, nodes))
        self._measurements.draining(progress.drained_nodes(self._drains or {}))

    def _report_drift(self) -> None:
        begun, ended = drift.reports(self._reported, self._drifts, self._lasting)
        for key, report in begun.items():
            if self._write_event(report, REASONS[key.kind], warning=True):
                self._reported[key] = report
        for key, report in ended.items():
            if self._write_event(report, ENDED, warning=False):
                del self._reported[key]

    def _report_releases(self, changed: Collection[progress.Change]) -> None:
        for change in changed:
            LOG.info(
                "a node has another release",
                extra=fields(node=change.node, former=change.former, release=change.release),
            )
            self._measurements.release_changed()
        # Of two unreported changes of a node, the later one counts.
        self._unreported.update({change.node: change for change in changed})
        numbers = Counter((self._releases or {}).values()) if self._unreported else {}
        for node, change in tuple(self._unreported.items()):
            subject = Subject.of_node(node)
            message = progress.release_message(change, numbers)
            del self._unreported[node]
            if not self._dry_run and not self._events.normal(subject, "ReleaseChanged", message, action="RollOut"):
                # The other Events are refused as well. At the end of the queue, a node at its own limit delays no other node.
                self._unreported[node] = change
                break

    def _report_drains(self, view: ClusterView) -> None:
        """Report drains of devices: a repartitioning and a driver upgrade drain one device after the other."""
        found = progress.drains(view)
        begun, ended = progress.drain_changes(self._drains, found)
        self._drains = found
        nodes = progress.drained_nodes(found)
        for drain in begun:
            self._unreported_drains[drain] = (
                "DevicesDrained",
                progress.drain_begun_message(drain, found[drain], nodes),
            )
        for drain in ended:
            self._measurements.drain_ended()
            self._unreported_drains[drain] = ("DevicesReturned", progress.drain_ended_message(drain, nodes))
        for drain, (reason, message) in tuple(self._unreported_drains.items()):
            subject = Subject.of_node(drain[0])
            del self._unreported_drains[drain]
            if not self._dry_run and not self._events.normal(subject, reason, message, action="Drain"):
                self._unreported_drains[drain] = (reason, message)
                break
            LOG.info("%s", message, extra=fields(reason=reason, node=drain[0]))

    def _write_event(self, report: Report, reason: str, *, warning: bool) -> bool:
        if report.slice_name:
            subject = Subject("ResourceSlice", f"{GROUP}/v1", report.slice_name, report.slice_uid)
        else:
            subject = Subject.of_node(report.node)
        write = self._events.warning if warning else self._events.normal
        if not self._dry_run and not write(subject, reason, report.message, action="Look"):
            return False
        LOG.log(
            logging.WARNING if warning else logging.INFO,
            "%s",
            report.message,
            extra=fields(reason=reason, node=report.node),
        )
        return True
