# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prepare claims before their pods are bound, so that pods do not wait for slow steps on the node, such as a change of the partitioning mode.

The active controller lists the claims for the node (claims/pre_binding_lists.py), and the driver watches only that list. It does
not trust the list. It reads each listed claim, and prepares those that are allocated here. The kubelet's own call then
finds the claim prepared. If the scheduler gives a claim up, the driver undoes the preparation; after a restart in
between, the reconciler does.

Without a controller that renews its sign, the devices are published without binding conditions. Pods are then bound
first, and their claims are prepared by the call of the kubelet.
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
from ..claims.claim_statuses import Waiting, failed_entries, waiting
from ..claims.pre_binding_lists import PREFIX, RENEW_SECONDS, SIGN, ListedClaim, read_list
from ..claims.service import ClaimService
from ..claims.store.records import ClaimRecord, ClaimReference
from ..core.errors import AcceleratorError
from ..logs import StateLog, fields, operation
from .claim_status_writer import GONE, ClaimStatuses, StatusApi
from .driver_state import Shared, Snapshot

LOG = logging.getLogger(__name__)

# How long a claim is tried before the scheduler must choose another node, and the first and the longest pause, in
# seconds.
GIVE_UP_SECONDS = 60.0
RETRY_FIRST, RETRY_LIMIT = 0.5, 8.0
# Errors of the API server, with a longer limit for the pause. The node can prepare the claim, so this time does not count.
OF_API = ("api-error", "api-unreachable", "resource-api-missing")
API_RETRY_LIMIT = 40.0
# Missed changes are found after this time, in seconds.
RECONCILE_SECONDS = 30.0
# Codes of errors that a retry cannot solve.
FINAL = (
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


# The interval of reads of the controller's sign (at random, up to half more or less), and the first pause after a failed read.
SIGN_SECONDS, SIGN_RETRY = RENEW_SECONDS, 1.0
# A sign that was not renewed in the first time, or cannot be read in the second time after the start, is the sign of no controller.
ABSENT_SECONDS, UNKNOWN_SECONDS = 5 * RENEW_SECONDS, 60.0
# The node's list must not be watched for so long, while the sign can be read, before the devices have no binding conditions.
UNLISTED_SECONDS = 2 * RENEW_SECONDS
# The limit for claims that are read at the same time.
READERS = 4


class ClaimApi(StatusApi, Protocol):
    """Claims in the API server."""

    async def claim(self, namespace: str, name: str) -> Json:
        """Return one ResourceClaim. Raises ApiError, ApiUnreachable."""


class Absence:
    """Counts the seconds since something was last seen. The time before a read that failed does not count."""

    def __init__(self, now: float) -> None:
        self._since = self._read = now

    def seconds(self, now: float) -> float:
        """Return the seconds of the absence."""
        return now - self._since

    def answered(self, now: float, *, seen: bool) -> None:
        """Record an answer, and whether it shows the object."""
        self._since, self._read = now if seen else self._since, now

    def failed(self, now: float) -> None:
        """Record a read without an answer."""
        self._since, self._read = self._since + now - self._read, now


class ControllerSign:
    """Decide from reads of the controller's sign whether a controller lists claims.

    ``acting`` is unset (None) until that is known. Only this machine's monotonic clock counts. A sign that exists at
    the first read counts as new, so that a restart of the driver changes no published device. While the API server does
    not answer, the controller cannot renew its sign, so this time does not count.
    """

    def __init__(self, now: float) -> None:
        self.acting: bool | None = None
        self._version = ""
        self._began = now
        self._absence = Absence(now)
        self._absences = 0

    def found(self, version: str, now: float) -> None:
        """Record the sign's resource version.

        "" means that it does not exist or must not be read, which counts from the second read in a row.
        """
        self._absences = 0 if version else self._absences + 1
        is_first = self._absences == 1
        self._absence.answered(now, seen=version != self._version and not is_first)
        if is_first:
            return
        self._version = version
        self.acting = bool(version) and self._absence.seconds(now) < ABSENT_SECONDS

    def failed(self, now: float) -> None:
        """Record a read without an answer about the sign."""
        if self.acting is None:
            self.acting = False if now - self._began >= UNKNOWN_SECONDS else None
        self._absence.failed(now)


class PreparingAhead:
    """Prepare the claims in the node's list of waiting claims.

    ``set_binding`` is called with whether a controller maintains that list.
    """

    def __init__(
        self,
        service: ClaimService,
        *,
        client: ApiClient,
        api: ClaimApi,
        statuses: ClaimStatuses,
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
        self._server = SharedPause(READERS)
        #: Listed claims with an attempt in progress, and those that need nothing more.
        self._trying: dict[str, tuple[ListedClaim, asyncio.Task[None]]] = {}
        self._handled: dict[str, ListedClaim] = {}

        async def path() -> str:
            return self._path

        self._list: Watched[tuple[ListedClaim, ...]] = Watched(
            client,
            "list of claims to prepare before pods are bound",
            path,
            read_list,
            params={"fieldSelector": f"metadata.name={PREFIX}{node_name}"},
            changed=self._changed.set,
        )

    async def run(self) -> None:
        """Follow the list while devices with binding conditions exist, until canceled."""
        while True:
            if self._has_binding_conditions():
                await self._follow()
            else:
                await self._snapshots.changed(RECONCILE_SECONDS)

    def _has_binding_conditions(self) -> bool:
        return any(offer.prepared_before_binding for offer in self._snapshots.value.inventory.offers.values())

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        working = [loop.create_task(self._list.run()), loop.create_task(self._watch_controller())]
        try:
            while self._has_binding_conditions() and not any(task.done() for task in working):
                self._changed.clear()
                if self._list.current:
                    await self._reconcile()
                pause = loop.create_task(self._changed.wait())
                await asyncio.wait((pause, *working), timeout=RECONCILE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
            for task in working:
                if task.done():
                    task.result()
        finally:
            working += [task for _claim, task in self._trying.values()]
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            self._trying.clear()
            self._handled.clear()

    # ------------------------------------------------------------------ the controller

    async def _watch_controller(self) -> None:
        """Read the controller's sign until canceled.

        Publish binding conditions only while it is renewed and the list is watched.
        """
        sign, unlisted, pause = ControllerSign(time.monotonic()), Absence(time.monotonic()), SIGN_RETRY
        while True:
            try:
                version = await self._read_sign()
            except AcceleratorError as error:
                sign.failed(time.monotonic())
                unlisted.failed(time.monotonic())
                LOG.debug("the sign of the controller cannot be read: %s", error)
                pause = min(pause * 2, SIGN_SECONDS)
            else:
                sign.found(version, time.monotonic())
                unlisted.answered(time.monotonic(), seen=self._list.current)
                pause = SIGN_SECONDS if version or sign.acting is False else SIGN_RETRY
            if sign.acting is not None:
                self._publish_conditions(sign.acting, unlisted.seconds(time.monotonic()) < UNLISTED_SECONDS)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  no secret is made of it

    async def _read_sign(self) -> str:
        try:
            found = await self._client.get(f"{self._path}/{SIGN}")
        except ApiError as error:
            # Without the right to read the sign, the driver cannot read the list either.
            if error.is_not_found or error.status == 403:
                return ""
            raise
        return str((found.get("metadata") or {}).get("resourceVersion") or "")

    def _publish_conditions(self, acting: bool, listed: bool) -> None:
        self._set_binding(acting and listed)
        namespace, _slash, name = self._key.partition("/")
        if not acting:
            reason = "ControllerMissing"
            text = (
                "the layout has prepared_before_binding, and no controller lists the claims for this node: the ConfigMap "
                f"{SIGN} in the namespace {namespace} does not exist, cannot be read, or is not renewed. Pods are bound before "
                "their devices are prepared. Deploy the controller (playbook dra.accelerators.controller), or check its log"
            )
        elif not listed:
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
        """Start to prepare new claims in the list, and undo those that are no longer allocated here."""
        listed = {each.uid: each for each in self._list.items.get(self._key, ())}
        for uid, (claim, task) in tuple(self._trying.items()):
            if task.done():
                del self._trying[uid]
                if not task.cancelled():
                    self._handled[uid] = claim
                    if (error := task.exception()) is not None:
                        LOG.error("claim %s/%s was not prepared", claim.namespace, claim.name, exc_info=error)
            elif listed.get(uid) != claim:
                task.cancel()
        self._handled = {uid: claim for uid, claim in self._handled.items() if listed.get(uid) == claim}
        for uid, claim in listed.items():
            if uid not in self._handled and uid not in self._trying:
                task = asyncio.get_running_loop().create_task(self._handle(claim))
                task.add_done_callback(lambda _task: self._changed.set())
                self._trying[uid] = (claim, task)
        for uid in tuple(self._service.ahead - set(listed) - set(self._trying)):
            if self._server.is_failing:
                return  # a read would wait for the server, and new claims would wait for the read
            await self._take_back(uid)

    async def _take_back(self, uid: str) -> None:
        """Undo a claim that is not listed, unless it is still allocated here."""
        record = self._service.store.claims.get(uid)
        with operation():
            try:
                if record is not None and await self._is_allocated(record):
                    return
                LOG.info("claim was prepared for a pod that is not bound here: undone", extra=fields(uid=uid))
                await self._service.forget_ahead(uid)
            except AcceleratorError as error:
                LOG.warning("claim %s is undone later: %s", uid, error)

    async def _is_allocated(self, record: ClaimRecord) -> bool:
        found = await self._read(record.reference)
        return found is not None and {each.device for each in found.devices} <= {each.name for each in record.devices}

    async def _read(self, reference: ClaimReference) -> Waiting | None:
        """Return a claim if pods wait for its devices of this node. Raises ApiError, ApiUnreachable."""
        try:
            claim = await self._server.send(lambda: self._api.claim(reference.namespace, reference.name))
        except ApiError as error:
            if error.is_not_found:
                return None
            raise
        found = waiting(claim, self._service.driver, self._pool)
        return found if found is not None and found.claim.uid == reference.uid else None

    async def _handle(self, listed: ListedClaim) -> None:
        """Read a listed claim, and prepare it if a pod waits for that. If the node cannot prepare it in time, refuse it.

        Time with errors of the API server does not count, and after such an error the claim is read again.
        """
        found: Waiting | None = None
        spent, delay, began = 0.0, RETRY_FIRST, time.monotonic()
        while True:
            pause = delay
            try:
                if found is None:
                    found = await self._read(ClaimReference(listed.namespace, listed.name, listed.uid))
                    began = time.monotonic()
                    if found is None or not found.untold:
                        return
                outcome = await self._service.prepare_ahead(found.claim)
                if outcome.record is not None:
                    record = outcome.record
                    await self._server.send(lambda: self._statuses.write(record))  # noqa: B023  it is awaited here
                    return
                if outcome.code in OF_API:
                    found = None
                elif outcome.code in FINAL or spent + time.monotonic() - began > self._give_up:
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
                spent, began = spent + time.monotonic() - began, time.monotonic()

    async def _refuse(self, claim: Waiting, code: str, error: str) -> None:
        entries = failed_entries(self._service.driver, claim.devices, code, error, time.time())
        await self._server.send(lambda: self._api.apply_claim_devices(claim.claim, self._service.driver, entries))
