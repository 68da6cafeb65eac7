# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Switch a node between its two interfaces, claims (DRA) and the kubelet's device-plugin API, and end the previous one first.

Neither interface knows the allocations of the other. So the slices for claims are deleted before the plugin offers the
first device, and a device of a claim is not offered until the claim has ended. In the other direction nothing is
published while a container has a device from the plugin, according to the kubelet. A note file next to the store
records that the plugin was used, so that unchanged nodes skip both checks.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from ..api.errors import ResourceApiMissing
from ..api.resources import ResourceApi
from ..claims.call_results import Outcome
from ..claims.store.records import ClaimReference
from ..core.errors import AcceleratorError
from ..core.host.system import System
from ..kubelet.pod_resources import PodResourcesUnreachable, plugin_assignments
from ..kubelet.server import ClaimHandler
from ..logs import StateLog
from . import driver_state
from .driver_state import Conditions

LOG = logging.getLogger(__name__)

PART = "way"  # the published name of this part in the status and the metrics
NOTE = "device-plugin.json"
# The timeout, in seconds, of the query of the kubelet.
KUBELET_SECONDS = 5.0
# The maximum number of containers that a message names.
MAX_NAMED = 3


class InterfaceSwitch:
    """Switch one driver between the interfaces, and keep the note file.

    ``directory`` is the driver's state directory, and ``pod_resources`` the kubelet's PodResources socket. ``cdi_file``
    is the CDI file of the plugin's devices, which is removed when no container has one of them.
    """

    def __init__(
        self,
        *,
        directory: str,
        system: System,
        driver: str,
        node_name: str,
        api: ResourceApi,
        pod_resources: str,
        cdi_file: str,
        conditions: Conditions,
    ) -> None:
        self._path = f"{directory}/{NOTE}"
        self._system = system
        self._driver = driver
        self._node_name = node_name
        self._api = api
        self._pod_resources = pod_resources
        self._cdi_file = cdi_file
        self._conditions = conditions
        self._state = StateLog(LOG)

    @property
    def recorded_resources(self) -> frozenset[str] | None:
        """Return the resources that the plugin has offered on this node, from the note file; None if it was never used."""
        try:
            data = json.loads(self._system.read_text(self._path))
            return frozenset(str(each) for each in data["resources"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AcceleratorError(
                f"{self._path} cannot be read: {error}",
                hint="It records that devices were allocated through the kubelet's device-plugin API. Remove it when no pod has any.",
                code="note-unreadable",
            ) from error

    def record_resources(self, resources: Collection[str]) -> None:
        """Add resources to the note file, before the plugin offers them. Raises AcceleratorError, OSError."""
        known = self.recorded_resources
        wanted = frozenset(resources) | (known or frozenset())
        if wanted != known:
            text = json.dumps({"resources": sorted(wanted)}) + "\n"
            self._system.write_atomic(self._path, text.encode(), mode=0o600)

    async def stop_claims(self) -> None:
        """Delete the slices that were published for claims. Retry until this succeeds. Do nothing if a note file exists."""
        await self._retry_until_done(self._delete_slices)

    async def wait_for_plugin_pods(self) -> None:
        """Wait until no container has a device from the plugin. Returns at once if the plugin was never used."""
        await self._retry_until_done(self._plugin_pods_problem)

    async def _delete_slices(self) -> str:
        """Delete the slices once. Return "", because only an exception is a reason to retry."""
        if self.recorded_resources is not None:
            return ""
        try:
            items, _version = await self._api.list_slices(self._driver, self._node_name)
            for item in items:
                await self._api.delete_slice(item["metadata"]["name"])
        except ResourceApiMissing:
            self._api.forget()
        else:
            if items:
                LOG.info("withdrew %d ResourceSlices: devices are offered by the device plugin now", len(items))
        await asyncio.to_thread(self.record_resources, ())
        return ""

    async def _plugin_pods_problem(self) -> str:
        """Return which containers have devices from the plugin. Without any, remove the note file, and return ""."""
        resources = self.recorded_resources
        if resources is None:
            return ""
        try:
            held = await asyncio.to_thread(plugin_assignments, self._pod_resources, resources, KUBELET_SECONDS)
        except PodResourcesUnreachable as error:
            return f"whether pods still have devices from the device plugin is not known: {error.message}"
        if held:
            holders = [
                f"{each.namespace}/{each.pod} ({each.resource}: {', '.join(each.ids)})" for each in held[:MAX_NAMED]
            ]
            more = f" and {len(held) - MAX_NAMED} more" if len(held) > MAX_NAMED else ""
            return (
                f"containers still have devices from the device plugin, and nothing is published for claims until they end: "
                f"{', '.join(holders)}{more}"
            )
        for path in (self._cdi_file, self._path):
            await asyncio.to_thread(self._system.remove, path)
        LOG.info("no container has a device from the device plugin any more")
        return ""

    async def _retry_until_done(self, step: Callable[[], Awaitable[str]]) -> None:
        """Repeat a step until it returns no problem ("")."""
        delay = driver_state.RETRY_FIRST
        while True:
            try:
                problem = await step()
            except (AcceleratorError, OSError) as error:
                problem = str(error)
            self._conditions.report(PART, problem)
            if not problem:
                return
            self._state.report(problem, level=logging.WARNING, driver=self._driver)
            await asyncio.sleep(delay)
            delay = min(delay * 2, driver_state.RETRY_LIMIT)


class RemainingClaims:
    """Serve the claims that were prepared before the switch to the device plugin, and refuse new ones.

    ``prepared_uids`` returns the UIDs of the remaining claims.
    """

    def __init__(self, claims: ClaimHandler, prepared_uids: Callable[[], Collection[str]]) -> None:
        self._claims = claims
        self._prepared_uids = prepared_uids

    async def prepare(self, references: Sequence[ClaimReference]) -> Mapping[str, Outcome]:
        """Return one outcome for each claim, by UID. Claims that are not prepared already are refused."""
        known = set(self._prepared_uids())
        found = await self._claims.prepare([each for each in references if each.uid in known])
        refused = Outcome(
            error="This node gives its devices to pods through the kubelet's device-plugin API (kubelet_interface: device-plugin), "
            "and none to claims any more. Delete the pod, so that its claim is allocated elsewhere.",
            code="other-way",
        )
        return {**found, **{each.uid: refused for each in references if each.uid not in known}}

    async def unprepare(self, references: Sequence[ClaimReference]) -> Mapping[str, Outcome]:
        """Return one outcome for each claim, by UID."""
        return await self._claims.unprepare(references)
