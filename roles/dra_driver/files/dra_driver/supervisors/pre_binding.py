# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepare claims before their pods are bound, so that pods do not wait for slow steps on the node, such as a change of the partitioning mode.

The active controller writes a list of these claims for each node (claims/pre_binding_lists.py), and the driver watches only its list. The
driver does not trust the list: it reads each listed claim, and prepares the claims that are allocated to its devices. The kubelet's
later call then finds the claim prepared. If the scheduler deallocates a claim before its pod is bound, the driver undoes the preparation.
After a restart of the driver, the reconciler undoes it.

The sign is a ConfigMap that the active controller renews. Without a renewed sign, the driver publishes its devices without binding
conditions. Pods are then bound at once, and the kubelet's calls prepare their claims.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Protocol

from ..api.client import ApiClient, ApiError, Json
from ..api.throttling import SharedPause, is_of_server, spread
from ..api.watching import Watched
from ..claims.claim_statuses import AwaitedClaim, awaited_claim, failed_entries
from ..claims.pre_binding_lists import PREFIX, RENEW_SECONDS, SIGN, ListedClaim, read_list
from ..claims.service import ClaimService
from ..claims.store.records import ClaimRecord, ClaimReference
from ..core.errors import AcceleratorError
from ..logs import StateLog, fields, operation
from .claim_status_writer import GONE, ClaimStatusApi, ClaimStatusWriter
from .driver_state import Shared, Snapshot

LOG = logging.getLogger(__name__)

# Seconds of attempts for a claim before the driver refuses it, so that the scheduler chooses another node.
GIVE_UP_SECONDS = 60.0
# The first and the longest pause, in seconds, between attempts.
RETRY_FIRST, RETRY_LIMIT = 0.5, 8.0
# The codes of errors of the API server, and the longest pause, in seconds, after them. The time of these attempts does not count.
API_CODES = ("api-error", "api-unreachable", "resource-api-missing")
API_RETRY_LIMIT = 40.0
# Seconds between comparisons with the list without a change of the list.
RECONCILE_SECONDS = 30.0
# Codes of errors that a retry cannot solve.
FINAL_CODES = (
    "claim-annotation",
    "claim-refused",
    "config-refused",
    "device-gone",
    "device-faulty",
    "partitioning-off",
    "overlap",
    "unsupported",
    "does-not-fit",
    "not-shareable",
)


# Seconds between reads of the controller's sign, and until the first repetition after a failed read. Both vary randomly by half.
SIGN_SECONDS, SIGN_RETRY = RENEW_SECONDS, 1.0
# There is no controller if its sign was not renewed for the first time, or if the sign could not be read for the second time after the
# start. In seconds.
ABSENT_SECONDS, UNKNOWN_SECONDS = 5 * RENEW_SECONDS, 60.0
# Seconds without a watch of the node's list, while the sign can be read, until the devices are published without binding conditions.
UNLISTED_SECONDS = 2 * RENEW_SECONDS
# The limit for claims that are read at the same time.
READERS = 4


class ClaimApi(ClaimStatusApi, Protocol):
    """Claims in the API server."""

    async def claim(self, namespace: str, name: str) -> Json:
        """Return one ResourceClaim. Raises ApiError, ApiUnreachable."""


class AbsenceTimer:
    """Measure the time since an object was last seen. The time before a failed read does not count."""

    def __init__(self, now: float) -> None:
        self._last_seen = self._last_read = now

    def seconds(self, now: float) -> float:
        """Return the seconds since the object was last seen."""
        return now - self._last_seen

    def record_answer(self, now: float, *, seen: bool) -> None:
        """Record a read, and whether it shows the object."""
        self._last_seen, self._last_read = now if seen else self._last_seen, now

    def failed(self, now: float) -> None:
        """Record a failed read."""
        self._last_seen, self._last_read = self._last_seen + now - self._last_read, now


class ControllerSign:
    """Decide from reads of the controller's sign whether a controller writes the lists of claims.

    ``has_controller`` is None until the first decision. All times are of this machine's monotonic clock. A sign that exists at the
    first read counts as renewed, so that a restart of the driver changes no published device. While the API server does not answer, the
    controller cannot renew its sign, so this time does not count.
    """

    def __init__(self, now: float) -> None:
        self.has_controller: bool | None = None
        self._version = ""
        self._began = now
        self._absence = AbsenceTimer(now)
        self._missing_reads = 0

    def found(self, version: str, now: float) -> None:
        """Record the resource version of the sign.

        "" means that the sign does not exist, or that the driver may not read it. The first such read in a row is ignored.
        """
        self._missing_reads = 0 if version else self._missing_reads + 1
        is_first = self._missing_reads == 1
        self._absence.record_answer(now, seen=version != self._version and not is_first)
        if is_first:
            return
        self._version = version
        self.has_controller = bool(version) and self._absence.seconds(now) < ABSENT_SECONDS

    def failed(self, now: float) -> None:
        """Record a failed read of the sign."""
        if self.has_controller is None:
            self.has_controller = False if now - self._began >= UNKNOWN_SECONDS else None
        self._absence.failed(now)


class PreBindingPreparer:
    """Prepare the claims in the node's list.

    ``set_binding`` publishes the devices with (True) or without (False) binding conditions.
    """

    def __init__(
        self,
        service: ClaimService,
        *,
        client: ApiClient,
        api: ClaimApi,
        statuses: ClaimStatusWriter,
        namespace: str,
        node_name: str,
        pool: str,
        snapshots: Shared[Snapshot],
        set_binding: Callable[[bool], None],
        report_problem: Callable[[str, str], None],
        give_up: float = GIVE_UP_SECONDS,
    ) -> None:
        self._service = service
        self._client = client
        self._api = api
        self._statuses = statuses
        self._path = f"/api/v1/namespaces/{namespace}/configmaps"
        self._key = f"{namespace}/{PREFIX}{node_name}"
        self._pool = pool
        self._snapshots = snapshots
        self._set_binding = set_binding
        self._report_problem = report_problem
        self._give_up = give_up
        self._changed = asyncio.Event()
        self._state = StateLog(LOG)
        self._shared_pause = SharedPause(READERS)
        #: The listed claims with an attempt in progress, and those that are prepared or refused, by UID.
        self._attempts: dict[str, tuple[ListedClaim, asyncio.Task[None]]] = {}
        self._done: dict[str, ListedClaim] = {}

        async def path() -> str:
            return self._path

        self._listed: Watched[tuple[ListedClaim, ...]] = Watched(
            client,
            "list of claims to prepare before pods are bound",
            path,
            read_list,
            params={"fieldSelector": f"metadata.name={PREFIX}{node_name}"},
            changed=self._changed.set,
        )

    async def run(self) -> None:
        """Follow the list while the node has devices with binding conditions, until canceled."""
        while True:
            if self._has_binding_conditions():
                await self._follow()
            else:
                await self._snapshots.changed(RECONCILE_SECONDS)

    def _has_binding_conditions(self) -> bool:
        return any(offer.prepared_before_binding for offer in self._snapshots.value.inventory.offers.values())

    async def _follow(self) -> None:
        """Watch the list and the sign, and prepare listed claims, until no device has binding conditions."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._listed.run()), loop.create_task(self._watch_controller())]
        try:
            while self._has_binding_conditions() and not any(task.done() for task in tasks):
                self._changed.clear()
                if self._listed.current:
                    await self._reconcile()
                pause = loop.create_task(self._changed.wait())
                await asyncio.wait((pause, *tasks), timeout=RECONCILE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            tasks += [task for _claim, task in self._attempts.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._attempts.clear()
            self._done.clear()

    # ------------------------------------------------------------------ the controller

    async def _watch_controller(self) -> None:
        """Read the controller's sign until canceled. Publish binding conditions only while it is renewed and the list is watched."""
        sign, list_absence, pause = ControllerSign(time.monotonic()), AbsenceTimer(time.monotonic()), SIGN_RETRY
        while True:
            try:
                version = await self._read_sign()
            except AcceleratorError as error:
                sign.failed(time.monotonic())
                list_absence.failed(time.monotonic())
                LOG.debug("the sign of the controller cannot be read: %s", error)
                pause = min(pause * 2, SIGN_SECONDS)
            else:
                sign.found(version, time.monotonic())
                list_absence.record_answer(time.monotonic(), seen=self._listed.current)
                pause = SIGN_SECONDS if version or sign.has_controller is False else SIGN_RETRY
            if sign.has_controller is not None:
                is_list_watched = list_absence.seconds(time.monotonic()) < UNLISTED_SECONDS
                self._set_binding_conditions(has_controller=sign.has_controller, is_list_watched=is_list_watched)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  no secret is made of it

    async def _read_sign(self) -> str:
        """Return the resource version of the sign; "" if it does not exist or may not be read."""
        try:
            found = await self._client.get(f"{self._path}/{SIGN}")
        except ApiError as error:
            # Without the right to read the sign, the driver cannot read the list either.
            if error.is_not_found or error.status == 403:
                return ""
            raise
        return str((found.get("metadata") or {}).get("resourceVersion") or "")

    def _set_binding_conditions(self, *, has_controller: bool, is_list_watched: bool) -> None:
        self._set_binding(has_controller and is_list_watched)
        namespace, _slash, name = self._key.partition("/")
        if not has_controller:
            reason = "ControllerMissing"
            text = (
                "the layout has prepared_before_binding, and no controller lists the claims for this node: the ConfigMap "
                f"{SIGN} in the namespace {namespace} does not exist, cannot be read, or is not renewed. Pods are bound before "
                "their devices are prepared. Deploy the controller (playbook dra.accelerators.controller), or check its log"
            )
        elif not is_list_watched:
            reason = "ClaimListUnreadable"
            text = (
                f"the layout has prepared_before_binding, and the ConfigMap {namespace}/{name} with the claims for this node cannot be "
                f"listed and watched since {UNLISTED_SECONDS:g} s. Pods are bound before their devices are prepared. Check the log of the "
                "driver for the error, and that the driver may list and watch ConfigMaps in this namespace"
            )
        else:
            self._state.report("a controller lists the claims that pods wait for")
            return
        if self._state.report(text, level=logging.WARNING):
            self._report_problem(reason, text)

    # ------------------------------------------------------------------ claims

    async def _reconcile(self) -> None:
        """Start to prepare new claims in the list, and undo prepared ones that are no longer allocated here."""
        listed = {each.uid: each for each in self._listed.items.get(self._key, ())}
        for uid, (claim, task) in tuple(self._attempts.items()):
            if task.done():
                del self._attempts[uid]
                if not task.cancelled():
                    self._done[uid] = claim
                    if (error := task.exception()) is not None:
                        LOG.error("claim %s/%s was not prepared", claim.namespace, claim.name, exc_info=error)
            elif listed.get(uid) != claim:
                task.cancel()
        self._done = {uid: claim for uid, claim in self._done.items() if listed.get(uid) == claim}
        for uid, claim in listed.items():
            if uid not in self._done and uid not in self._attempts:
                task = asyncio.get_running_loop().create_task(self._prepare_listed(claim))
                task.add_done_callback(lambda _task: self._changed.set())
                self._attempts[uid] = (claim, task)
        for uid in tuple(self._service.prepared_ahead - set(listed) - set(self._attempts)):
            if self._shared_pause.is_failing:
                return  # a read would wait for the server, and new claims would wait for the read
            await self._undo_unless_allocated(uid)

    async def _undo_unless_allocated(self, uid: str) -> None:
        """Undo the preparation of a claim that is not listed, unless it is still allocated here."""
        record = self._service.store.claims.get(uid)
        with operation():
            try:
                if record is not None and await self._is_allocated(record):
                    return
                LOG.info("claim was prepared for a pod that is not bound here: undone", extra=fields(uid=uid))
                await self._service.undo_prepared_ahead(uid)
            except AcceleratorError as error:
                LOG.warning("claim %s is undone later: %s", uid, error)

    async def _is_allocated(self, record: ClaimRecord) -> bool:
        found = await self._read(record.reference)
        return found is not None and {each.device for each in found.devices} <= {each.name for each in record.devices}

    async def _read(self, reference: ClaimReference) -> AwaitedClaim | None:
        """Return a claim if a pod waits for its devices of this node, else None. Raises ApiError, ApiUnreachable."""
        try:
            claim = await self._shared_pause.send(lambda: self._api.claim(reference.namespace, reference.name))
        except ApiError as error:
            if error.is_not_found:
                return None
            raise
        found = awaited_claim(claim, self._service.driver, self._pool)
        return found if found is not None and found.claim.uid == reference.uid else None

    async def _prepare_listed(self, listed: ListedClaim) -> None:
        """Read a listed claim, and prepare it if a pod waits for it. Refuse it after ``give_up`` seconds of failed attempts.

        After an error of the API server the claim is read again, and the time until then does not count.
        """
        found: AwaitedClaim | None = None
        seconds_spent, delay, started_at = 0.0, RETRY_FIRST, time.monotonic()
        while True:
            pause = delay
            try:
                if found is None:
                    found = await self._read(ClaimReference(listed.namespace, listed.name, listed.uid))
                    started_at = time.monotonic()
                    if found is None or not found.unreported:
                        return
                outcome = await self._service.prepare_ahead(found.claim)
                if outcome.record is not None:
                    record = outcome.record
                    await self._shared_pause.send(lambda: self._statuses.write_now(record))  # noqa: B023  it is awaited here
                    return
                if outcome.code in API_CODES:
                    found = None
                elif outcome.code in FINAL_CODES or seconds_spent + time.monotonic() - started_at > self._give_up:
                    await self._refuse(found, outcome.code, outcome.error)
                    return
            except AcceleratorError as error:
                if isinstance(error, ApiError) and error.status == GONE and not error.is_of_server:
                    return  # the claim will be removed from the list
                LOG.warning("claim %s/%s is not prepared yet: %s", listed.namespace, listed.name, error)
                found = None
                if is_of_server(error):
                    pause = delay = RETRY_FIRST  # the pause of all claims is longer
            limit = API_RETRY_LIMIT if found is None else RETRY_LIMIT
            await asyncio.sleep(spread(min(pause, limit)))
            delay = min(delay * 2, limit)
            if found is not None:
                seconds_spent, started_at = seconds_spent + time.monotonic() - started_at, time.monotonic()

    async def _refuse(self, claim: AwaitedClaim, code: str, error: str) -> None:
        entries = failed_entries(self._service.driver, claim.devices, code, error, time.time())
        await self._shared_pause.send(lambda: self._api.apply_claim_devices(claim.claim, self._service.driver, entries))
