# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read and write ResourceClaims and ResourceSlices in the API version that the server supports.

v1 is used if the server has it (1.34 and later). v1beta2 has the same fields. v1beta1 nests a device's fields in
``basic``. Two functions convert these, so that all other code uses v1 only.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ..claims.store.records import ClaimReference
from .client import ApiClient, ApiError, Json, WatchEvent, list_items
from .errors import ResourceApiMissing

T = TypeVar("T")

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")
# The resource name of DeviceTaintRules, and their versions, the newest one first.
RULES, RULE_VERSIONS = "devicetaintrules", ("v1", "v1beta2", "v1alpha3")
# The content type of server-side apply. The body is JSON, which is valid YAML.
APPLY = "application/apply-patch+yaml"


class ResourceApi:
    """The resource.k8s.io group of one cluster. All methods raise ApiError, ApiUnreachable, or ResourceApiMissing."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self._version: str | None = None

    async def version(self) -> str:
        """Return the newest version of the group that server and driver support. It is cached until ``forget``."""
        if self._version is None:
            served = await self._served_versions()
            self._version = next((version for version in VERSIONS if version in served), None)
            if self._version is None:
                raise ResourceApiMissing(
                    f"The API server serves no version of {GROUP} that this driver knows ({', '.join(VERSIONS)})",
                    hint="Kubernetes 1.34 and later serve v1; 1.32 and 1.33 need the feature gate "
                    "DynamicResourceAllocation and --runtime-config=resource.k8s.io/v1beta1=true.",
                )
        return self._version

    def forget(self) -> None:
        """Discard the cached version, because the cluster may have been upgraded."""
        self._version = None

    async def server_version(self) -> tuple[int, int]:
        """Return the server's major and minor version."""
        answer = await self.client.get("/version")
        numbers = [re.match(r"\d+", str(answer.get(key, ""))) for key in ("major", "minor")]
        if numbers[0] is None or numbers[1] is None:
            raise ApiError(f"The API server's version is {answer!r}; expected major and minor numbers", status=502)
        return int(numbers[0].group()), int(numbers[1].group())

    async def claim(self, namespace: str, name: str) -> Json:
        """Return one ResourceClaim. Only its metadata and status are used, which are the same in all versions."""

        async def get(version: str) -> Json:
            return await self.client.get(f"/apis/{GROUP}/{version}/namespaces/{namespace}/resourceclaims/{name}")

        claim = await self._in_served_version(get)
        if not (claim.get("metadata") or {}).get("uid"):
            raise ApiError(
                f"The API server's answer for claim {namespace}/{name} is not a ResourceClaim: it has no metadata.uid",
                status=502,
            )
        return claim

    async def pod(self, namespace: str, name: str) -> Json:
        """Return one pod. The driver may read pods only with ``read_pods``."""
        return await self.client.get(f"/api/v1/namespaces/{namespace}/pods/{name}")

    async def apply_claim_devices(self, claim: ClaimReference, driver: str, entries: list[Json]) -> None:
        """Replace the driver's entries in a claim's ``status.devices``.

        Entries of other managers stay. The claim's UID must match.
        """
        params = {"fieldManager": driver, "force": "true"}

        async def apply(version: str) -> Json:
            path = f"/apis/{GROUP}/{version}/namespaces/{claim.namespace}/resourceclaims/{claim.name}/status"
            body = {
                "apiVersion": f"{GROUP}/{version}",
                "kind": "ResourceClaim",
                "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid},
                "status": {"devices": entries},
            }
            return await self.client.request("PATCH", path, params=params, body=body, content_type=APPLY)

        await self._in_served_version(apply)

    async def list_slices(self, driver: str, node_name: str) -> tuple[list[Json], str]:
        """Return a node's slices of one driver, in v1 form, and the resource version to watch from."""

        async def read(version: str) -> tuple[list[Json], str]:
            path = _slices_path(version)
            answer = await self.client.get(path, params=_selector(driver, node_name))
            items = [slice_from_version(item, version) for item in list_items(answer, path)]
            return items, str(answer.get("metadata", {}).get("resourceVersion", ""))

        return await self._in_served_version(read)

    async def watch_slices(
        self, driver: str, node_name: str, resource_version: str, *, opened: Callable[[], None] = lambda: None
    ) -> AsyncIterator[WatchEvent]:
        """Yield the changes of a node's slices of one driver, in v1 form.

        ``opened`` is called once the server accepts the watch.
        """
        version = await self.version()
        async for event in self.client.watch(
            _slices_path(version),
            resource_version=resource_version,
            params=_selector(driver, node_name),
            opened=opened,
        ):
            yield WatchEvent(type=event.type, object=slice_from_version(event.object, version))

    async def create_slice(self, body: Mapping[str, Any], *, dry_run: bool = False) -> Json:
        """Create a slice given in v1 form, and return the server's object. A dry run stores nothing."""
        params = {"dryRun": "All"} if dry_run else None

        async def create(version: str) -> Json:
            sent = slice_to_version(body, version)
            answer = await self.client.request("POST", _slices_path(version), params=params, body=sent)
            return slice_from_version(answer, version)

        return await self._in_served_version(create)

    async def update_slice(self, name: str, body: Mapping[str, Any]) -> Json:
        """Replace a slice given in v1 form, including its resource version, and return the server's object."""

        async def update(version: str) -> Json:
            sent = slice_to_version(body, version)
            answer = await self.client.request("PUT", f"{_slices_path(version)}/{name}", body=sent)
            return slice_from_version(answer, version)

        return await self._in_served_version(update)

    async def delete_slice(self, name: str, preconditions: Mapping[str, str] | None = None) -> None:
        """Delete a slice. A missing slice is not an error."""
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if preconditions:
            body["preconditions"] = dict(preconditions)

        async def delete(version: str) -> Json:
            return await self.client.request("DELETE", f"{_slices_path(version)}/{name}", body=body)

        try:
            await self._in_served_version(delete)
        except ApiError as error:
            if not error.is_not_found:
                raise

    async def rules_path(self) -> str | None:
        """Return the path of the DeviceTaintRules, which have separate versions; None if the cluster has none.

        Raises ApiError for status 404 too. A load balancer without an API server also returns it, so only the server's
        list of versions can show that there are no rules.
        """
        group = await self.client.get(f"/apis/{GROUP}")
        served = {entry.get("version") for entry in group.get("versions", ())}
        for version in RULE_VERSIONS:
            if version in served:
                found = await self.client.get(f"/apis/{GROUP}/{version}")
                if any(resource.get("name") == RULES for resource in found.get("resources") or ()):
                    return f"/apis/{GROUP}/{version}/{RULES}"
        return None

    async def _served_versions(self) -> set[str]:
        """Return the versions of the group that the server lists.

        Raises ApiError for status 404 unless the server's list of groups shows that the group is missing, because a
        load balancer without an API server also returns status 404.
        """
        try:
            group = await self.client.get(f"/apis/{GROUP}")
        except ApiError as error:
            if error.status != 404:
                raise
            groups = await self.client.get("/apis")
            if groups.get("kind") != "APIGroupList" or any(
                each.get("name") == GROUP for each in groups.get("groups") or ()
            ):
                raise
            return set()
        return {str(entry.get("version")) for entry in group.get("versions") or ()}

    async def _in_served_version(self, send: Callable[[str], Awaitable[T]]) -> T:
        """Send a request in the current version of the group.

        If the server does not have it, send it once more in another version.

        During an upgrade of the control plane, connections can lead to API servers of two releases. Only the end of a
        watch makes the publisher query the version again.
        """
        version = await self.version()
        try:
            return await send(version)
        except ApiError as error:
            if error.status != 404 or error.is_not_found:
                raise
            if self._version == version:
                self.forget()
            served = await self.version()
            if served == version:
                raise
            return await send(served)


def _slices_path(version: str) -> str:
    return f"/apis/{GROUP}/{version}/resourceslices"


def _selector(driver: str, node_name: str) -> dict[str, str]:
    return {"fieldSelector": f"spec.driver={driver},spec.nodeName={node_name}"}


def slice_to_version(body: Mapping[str, Any], version: str) -> Json:
    """Return a slice given in v1 form in the form of another version."""
    result = {**body, "apiVersion": f"{GROUP}/{version}"}
    if version == "v1beta1" and "devices" in result.get("spec", {}):
        devices = [
            {"name": device["name"], "basic": {key: value for key, value in device.items() if key != "name"}}
            for device in result["spec"]["devices"] or ()
        ]
        result["spec"] = {**result["spec"], "devices": devices}
    return result


def slice_from_version(body: Mapping[str, Any], version: str) -> Json:
    """Return a slice of another version in v1 form."""
    result = {**body, "apiVersion": f"{GROUP}/v1"}
    if version == "v1beta1" and result.get("spec", {}).get("devices"):
        devices = [{"name": device["name"], **(device.get("basic") or {})} for device in result["spec"]["devices"]]
        result["spec"] = {**result["spec"], "devices": devices}
    return result
