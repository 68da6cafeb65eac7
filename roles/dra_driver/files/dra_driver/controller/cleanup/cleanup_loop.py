# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The work of the active controller: read the cluster, plan, and clean up, repeatedly."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import math
import time
from collections.abc import Awaitable, Collection
from typing import Any, Callable

from ...api.client import ApiClient
from ...api.events import EventRecorder
from ...api.resources import GROUP, ResourceApi
from ...api.throttling import pause_after
from ...api.watching import Watched
from ...core.errors import AcceleratorError
from ...deadlines import within
from ...logs import StateLog
from ...supervisors.driver_state import run_together
from ..claim_lists import ClaimLists
from ..controller_metrics import ControllerMetrics
from ..facts import (
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ClaimFacts,
    ClaimIndex,
    NodeFacts,
    RuleFacts,
    SliceFacts,
    claim_facts,
    node_facts,
    rule_facts,
    slice_facts,
)
from ..pods import PodReader
from ..reporting import Reporter
from . import cleanup_plan as planning
from .cleanup_execute import Cleaner
from .cleanup_plan import Action, ClusterView

LOG = logging.getLogger(__name__)

# Seconds after a change until a pass starts. Changes within this time are processed together.
GATHER_SECONDS = 1.0
#: The minimum number of new claims before all objects are excluded from garbage collection again (gc.freeze).
FREEZE_CLAIMS = 2000
#: The number of objects in a page of a list. A slice of 64 devices has some 60 kB, and a page is in memory as a whole.
PAGE, SLICE_PAGE = 500, 100


class WatchEnded(AcceleratorError):
    """A watch that must run until it is canceled has ended, which is a fault of the controller."""

    default_code = "watch-ended"


async def _keep_watching(watched: Watched[Any]) -> None:
    """Watch until canceled. Raises WatchEnded."""
    failure: Exception | None = None
    try:
        await watched.run()
    except Exception as error:  # noqa: BLE001  it is the cause of the raised error
        failure = error
    raise WatchEnded(f"The watch of {watched.name} has ended") from failure


class CleanupLoop:
    """Clean up for the drivers with these names.

    ``grace`` is how long, in seconds, a node must be absent before its cleanup, and ``interval`` the longest time between two passes.
    After ``lift_drains_after`` seconds without a renewal, the rules of a drain are removed; 0 for never. ``may_act`` returns, before every
    write, whether this controller is still the leader. ``driver_namespace`` is the
    namespace of the lists of waiting claims; without it, and in a dry run, none are written.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        drivers: Collection[str],
        events: EventRecorder,
        measurements: ControllerMetrics,
        may_act: Callable[[], bool],
        grace: float,
        lift_drains_after: float = 0.0,
        interval: float,
        dry_run: bool,
        reporter: Reporter,
        driver_namespace: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._resources = resources = ResourceApi(client)
        self._drivers = tuple(drivers)
        self._measurements = measurements
        self._grace = grace
        self._lift_drains_after = lift_drains_after
        self._seen_drains: dict[str, planning.SeenDrain] = {}
        self._interval = interval
        self._clock = clock
        self._changed = asyncio.Event()
        self._rules_path = ""
        self._absent_since: dict[str, float] = {}
        #: The time by ``clock`` before which the cleanup sends no requests, and the number of passes in a row that an error has ended.
        self._paused_until, self._failures = -math.inf, 0
        self._state_log = StateLog(LOG)
        self._reporter = reporter
        self._cleaner = Cleaner(
            client,
            resources,
            drivers=self._drivers,
            events=events,
            measurements=measurements,
            may_act=may_act,
            rules_path=lambda: self._rules_path,
            pods=PodReader(client, alive_seconds=interval, clock=clock),
            dry_run=dry_run,
        )
        self.nodes: Watched[NodeFacts] = self._watched("Nodes", "/api/v1/nodes", node_facts)
        self.claims: Watched[ClaimFacts] = self._watched(
            "ResourceClaims",
            "resourceclaims",
            functools.partial(claim_facts, pre_binding_drivers=self._drivers),
            changed=self._claims_changed,
            matters=self._claim_matters,
            storage=ClaimIndex,
        )
        self.claim_lists: ClaimLists | None = None
        if driver_namespace and not dry_run:
            self.claim_lists = ClaimLists(
                client, namespace=driver_namespace, nodes=self.nodes, claims=self.claims, may_act=may_act
            )
        self.slices: list[Watched[SliceFacts]] = [
            self._watched(
                f"ResourceSlices of {driver}",
                "resourceslices",
                slice_facts,
                page=SLICE_PAGE,
                params={"fieldSelector": f"spec.driver={driver}"},
            )
            for driver in self._drivers
        ]
        self.rules: Watched[RuleFacts] = Watched(
            client,
            "DeviceTaintRules",
            self._find_rules,
            rule_facts,
            params={"labelSelector": f"{MANAGED_BY_LABEL}={MANAGED_BY}"},
            changed=self._changed.set,
        )

    def _watched(self, name: str, what: str, keep: Callable[[Any], Any], **options: Any) -> Watched[Any]:
        async def path() -> str:
            if what.startswith("/"):
                return what
            self._resources.forget()  # the cluster may have been upgraded
            return f"/apis/{GROUP}/{await self._resources.version()}/{what}"

        return Watched(self._client, name, path, keep, **{"changed": self._changed.set, "page": PAGE, **options})

    async def _find_rules(self) -> str | None:
        """Return the path of DeviceTaintRules, which the cleanup needs as well."""
        found = await self._resources.rules_path()
        self._rules_path = found or self._rules_path
        return found

    @property
    def _watches(self) -> tuple[Watched[Any], ...]:
        return (self.nodes, self.claims, self.rules, *self.slices)

    async def run(self) -> None:
        """Watch and clean up until canceled.

        Raises WatchEnded if a watch has ended, because later changes would not be seen.
        """
        self._absent_since = {}
        self._reporter.forget()
        works: list[Callable[[], Awaitable[None]]] = [
            self._clean_up,
            *(functools.partial(_keep_watching, watched) for watched in self._watches),
        ]
        if self.claim_lists is not None:
            works.append(self.claim_lists.run)
        try:
            await run_together(*works)
        finally:
            # An inactive controller does not observe drift and progress; the active one reports them.
            self._reporter.forget()
            self._seen_drains = {}
            # Frozen objects are never collected. Without this, each end of leadership would leak the objects of the cluster.
            gc.unfreeze()

    async def _clean_up(self) -> None:
        await asyncio.gather(*(watched.synced.wait() for watched in self._watches))
        # A full garbage collection over the objects of a large fleet blocks the event loop for up to a second.
        gc.freeze()
        if isinstance(self.claims.items, ClaimIndex):
            self.claims.items.write_count = 0
        while True:
            self._changed.clear()
            try:
                await self._pass()
            except Exception as error:
                LOG.exception("a pass failed and is repeated")
                self._pause(error)
                await asyncio.sleep(max(self._paused_until - self._clock(), 0.0))
            self._freeze_new_claims()
            try:
                now = self._clock()
                soon = planning.next_gone(self._absent_since, now=now, grace=self._grace)
                if self._paused_until > now:
                    soon = min(soon, self._paused_until - now)
                await within(self._changed.wait(), min(self._interval, soon))
                await asyncio.sleep(GATHER_SECONDS)
            except asyncio.TimeoutError:
                pass

    def _pause(self, error: Exception) -> None:
        """Set a pause before the next actions, which is longer after each failure."""
        self._failures += 1
        self._paused_until = self._clock() + pause_after(error, self._failures)

    def _freeze_new_claims(self) -> None:
        """Exclude all objects from garbage collection again when a quarter of the claims is new."""
        index = self.claims.items
        if isinstance(index, ClaimIndex) and index.write_count >= max(len(index) / 4, FREEZE_CLAIMS):
            index.write_count = 0
            gc.collect()  # a frozen reference cycle is not collected before the end of the leadership
            gc.freeze()

    def view(self) -> ClusterView:
        """Return the current facts, with only the claims of nodes that are absent or out of service. Other claims are never cleaned up."""
        index = self.claims.items
        by_node = index.by_node if isinstance(index, ClaimIndex) else {}
        return ClusterView(
            {facts.name: facts for facts in self.nodes.items.values()},
            [facts for watched in self.slices for facts in watched.items.values()],
            [claim for node, claims in by_node.items() if self._may_need_cleanup(node) for claim in claims.values()],
            tuple(self.rules.items.values()),
        )

    def _claims_changed(self) -> None:
        self._changed.set()
        if self.claim_lists is not None:
            self.claim_lists.claims_listed()

    def _claim_matters(self, *claims: ClaimFacts | None) -> bool:
        """Pass a change of a claim to the lists of waiting claims, and return whether it starts a pass.

        Claims of existing nodes change often and need no cleanup.
        """
        if self.claim_lists is not None:
            self.claim_lists.claims_changed(*claims)
        return any(claim is not None and self._may_need_cleanup(claim.node) for claim in claims)

    def _may_need_cleanup(self, node: str) -> bool:
        """Return whether the node is absent or out of service, so that its claims may need a cleanup."""
        facts = self.nodes.items.get(f"/{node}")
        return bool(node) and (facts is None or facts.out_of_service)

    async def read_view(self) -> ClusterView:
        """List all objects. Raises ApiError, ApiUnreachable."""
        for watched in self._watches:
            await watched.list_once()
        return self.view()

    async def plan_once(self) -> list[Action]:
        """List all objects and plan as if the grace period of all absent nodes were over.

        Raises ApiError, ApiUnreachable.
        """
        view = await self.read_view()
        absent = planning.absences({}, view, self._drivers, 0.0)
        gone = planning.gone_nodes(view, absent, now=self._grace, grace=self._grace)
        asked = sorted(planning.pods_to_read(view, gone, self._drivers))
        pods = {key: await self._cleaner.pods.state(key) for key in asked}
        return planning.plan(view, gone, pods, self._drivers)

    async def _pass(self) -> None:
        """Process the current objects once. Nothing is done while a watch is not current."""
        stale = [watched.name for watched in self._watches if not watched.current]
        if stale:
            self._state_log.report(
                f"nothing is cleaned up while {', '.join(stale)} cannot be seen", level=logging.WARNING
            )
            return
        self._state_log.report("all is seen")
        began = time.perf_counter()
        view, now = self.view(), self._clock()
        # On a thread, because the event loop answers the webhook and renews the Lease.
        self._absent_since = await asyncio.to_thread(planning.absences, self._absent_since, view, self._drivers, now)
        self._seen_drains = planning.observe_drains(self._seen_drains, view, now)
        drain_actions = planning.abandoned_drain_actions(
            view, self._seen_drains, now=now, lasting=self._lift_drains_after
        )
        gone = planning.gone_nodes(view, self._absent_since, now=now, grace=self._grace)
        await self._reporter.report_changes(view, self._absent_since, now)
        seconds = time.perf_counter() - began
        if now >= self._paused_until:
            try:
                if await self._cleaner.clean(view, gone, drain_actions):
                    self._changed.set()  # the next pass runs the other actions
                self._failures = 0
            except AcceleratorError as error:
                LOG.warning("a pass was not finished: %s", error)
                self._pause(error)
        self._measurements.record_pass(
            seconds,
            nodes=len(view.nodes),
            slices=len(view.slices),
            claims=len(self.claims.items),
            rules=len(view.rules),
            drains=len(self._seen_drains),
        )
