# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The API client, kubeconfigs, and Events with an HTTP server."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_model import ApiModel, kubeconfig
from dra_driver.api import events as events_module
from dra_driver.api.client import ApiClient, ApiError, ApiUnreachable
from dra_driver.api.errors import ResourceApiMissing
from dra_driver.api.events import EventRecorder, Subject
from dra_driver.api.kubeconfig import InvalidKubeconfig, load_access
from dra_driver.api.resources import ResourceApi, slice_from_version, slice_to_version
from dra_driver.claims.store.records import ClaimReference
from dra_driver.core.api_connection import INSECURE_EXTENSION
from object_server import ObjectServer

DEVICE_CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"


def run(tmp_path: Path, scenario: Any, **user: str) -> None:
    async def main() -> None:
        api = ApiModel()
        await api.start()
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(kubeconfig(api.url, **user)))
        client = ApiClient(str(file))
        try:
            await scenario(api, client)
        finally:
            await client.close()
            await api.stop()

    asyncio.run(main())


def test_claim_and_its_errors(tmp_path: Path) -> None:
    async def scenario(api: ApiModel, client: ApiClient) -> None:
        resources = ResourceApi(client)
        api.claims["a"] = {"metadata": {"name": "a", "uid": "u"}, "unknownField": {"kept": True}}
        assert (await resources.claim("default", "a"))["unknownField"] == {"kept": True}
        with pytest.raises(ApiError, match="claim not found") as found:
            await resources.claim("default", "b")
        assert (found.value.status, found.value.reason) == (404, "NotFound")
        api.claims["c"] = {"status": "ok"}
        with pytest.raises(ApiError, match="not a ResourceClaim"):
            await resources.claim("default", "c")
        api.failures = [("GET", 403, "forbidden")]
        with pytest.raises(ApiError, match="lacks a permission"):
            await resources.claim("default", "a")
        assert [path for _unused, path in api.log].count("/apis/resource.k8s.io") == 1

    run(tmp_path, scenario)


def test_token_is_sent_and_read_again_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")

    async def scenario(api: ApiModel, client: ApiClient) -> None:
        await client.get("/version")
        assert api.headers[-1]["Authorization"] == "Bearer one"
        await asyncio.sleep(0.02)
        (tmp_path / "token").write_text("two")
        await client.get("/version")
        assert api.headers[-1]["Authorization"] == "Bearer two"

    run(tmp_path, scenario, tokenFile="token")


def test_many_requests_share_few_connections_and_watches_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.api.client.CONNECTIONS", 2)

    async def scenario(api: ApiModel, client: ApiClient) -> None:
        watches = [client.watch("/apis/resource.k8s.io/v1/resourceclaims", resource_version="0") for _each in range(3)]
        following = [asyncio.ensure_future(watch.__anext__()) for watch in watches]
        while [method for method, _path in api.log].count("WATCH") < len(watches):
            await asyncio.sleep(0.01)
        await asyncio.gather(*(client.get("/version") for _each in range(20)))
        assert len([each for each in api.connections if each[0] == "GET"]) == 2
        for task, watch in zip(following, watches):
            task.cancel()
            await asyncio.wait((task,))
            await watch.aclose()

    run(tmp_path, scenario)


def test_changed_kubeconfig_is_read_again(tmp_path: Path) -> None:
    async def scenario(api: ApiModel, client: ApiClient) -> None:
        await client.get("/version")
        assert not await client.reload_if_changed()
        await asyncio.sleep(0.02)
        (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig(api.url, token="renewed")))
        assert await client.reload_if_changed()
        await client.get("/version")
        assert api.headers[-1]["Authorization"] == "Bearer renewed"

    run(tmp_path, scenario)


def test_new_token_keeps_open_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(api: ApiModel, client: ApiClient) -> None:
        watch = client.watch(
            "/apis/resource.k8s.io/v1/resourceslices",
            resource_version="1",
            params={"fieldSelector": "spec.driver=gpu.nvidia.com,spec.nodeName=node-1"},
        )
        following = asyncio.ensure_future(watch.__anext__())
        while not any(method == "WATCH" for method, _path in api.log):
            await asyncio.sleep(0.01)
        (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig(api.url, token="renewed and longer")))
        with monkeypatch.context() as patch:
            patch.setattr("dra_driver.api.client.REQUEST_SECONDS", 0.02)  # time until replaced connections are closed
            assert await client.reload_if_changed()
        await client.get("/version")
        assert api.headers[-1]["Authorization"] == "Bearer renewed and longer"
        await asyncio.sleep(0.2)
        api.slices["s"] = {"metadata": {"name": "s", "resourceVersion": "1"}, "spec": {}}
        api.change_slice("s", {"x": 1})
        assert (await asyncio.wait_for(following, 30)).type == "MODIFIED"
        await watch.aclose()

    run(tmp_path, scenario)


def test_requests_under_way_survive_new_credentials(tmp_path: Path) -> None:
    async def scenario(api: ApiModel, client: ApiClient) -> None:
        watch = client.watch(
            "/apis/resource.k8s.io/v1/resourceslices",
            resource_version="1",
            params={"fieldSelector": "spec.driver=gpu.nvidia.com,spec.nodeName=node-1"},
        )
        following = asyncio.ensure_future(watch.__anext__())
        while not any(method == "WATCH" for method, _path in api.log):
            await asyncio.sleep(0.01)
        (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig(api.url, token="renewed and longer")))
        assert await client.reload_if_changed()
        await client.get("/version")
        assert api.headers[-1]["Authorization"] == "Bearer renewed and longer"
        api.slices["s"] = {"metadata": {"name": "s", "resourceVersion": "1"}, "spec": {}}
        api.change_slice("s", {"x": 1})
        event = await asyncio.wait_for(following, 30)
        assert (event.type, event.object["spec"]) == ("MODIFIED", {"x": 1})
        await watch.aclose()

    run(tmp_path, scenario)


def test_client_rejected_token_is_read_again(tmp_path: Path) -> None:
    async def scenario(api: ApiModel, client: ApiClient) -> None:
        await client.get("/version")
        (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig(api.url, token="renewed")))
        api.failures = [("GET", 401, "Unauthorized")]
        with pytest.raises(ApiError, match="not accepted"):
            await client.get("/version")
        await client.get("/version")
        assert api.headers[-1]["Authorization"] == "Bearer renewed"

    run(tmp_path, scenario)


def test_client_without_a_server_raises_api_unreachable(tmp_path: Path) -> None:
    async def scenario(api: ApiModel, client: ApiClient) -> None:
        await api.stop()
        with pytest.raises(ApiUnreachable, match="did not answer"):
            await client.get("/version")

    run(tmp_path, scenario)


def test_cluster_without_dynamic_resource_allocation(tmp_path: Path) -> None:
    async def scenario(api: ApiModel, client: ApiClient) -> None:
        resources = ResourceApi(client)
        for served in ((), ("v2",)):
            api.versions = served
            with pytest.raises(ResourceApiMissing, match="DynamicResourceAllocation"):
                await resources.version()
        api.versions = ("v1beta2", "v1beta1")
        assert await resources.version() == "v1beta2"

    run(tmp_path, scenario)


def test_requests_reach_a_server_of_another_release(tmp_path: Path) -> None:
    """During an upgrade of the control plane, a watch can reach one API server and requests another: each request uses a served version."""

    async def scenario(api: ApiModel, client: ApiClient) -> None:
        resources = ResourceApi(client)
        allocation = {"devices": {"results": [{"driver": "d", "pool": "p", "device": "x"}]}}
        api.claims["a"] = {"metadata": {"name": "a", "uid": "u"}, "status": {"allocation": allocation}}
        claim = ClaimReference("default", "a", "u")
        slice_ = {"metadata": {"generateName": "s-"}, "spec": {"devices": [{"name": "x", "attributes": {}}]}}
        for served in (("v1", "v1beta1"), ("v1beta1",), ("v1beta2", "v1beta1"), ("v1",)):
            api.versions = ("v1",)
            resources.forget()
            assert await resources.version() == "v1"
            api.versions = served
            assert (await resources.claim("default", "a"))["metadata"]["uid"] == "u"
            made = await resources.create_slice(slice_)
            for request in (
                lambda: resources.apply_claim_devices(claim, "d", []),
                lambda: resources.list_slices(api.driver, "node-1"),
                lambda made=made: resources.update_slice(made["metadata"]["name"], made),
                lambda made=made: resources.delete_slice(made["metadata"]["name"]),
            ):
                resources._version = "v1"
                await request()
            assert not api.slices
        resources._version = "v1"
        api.versions = ()
        for rejected in (lambda: resources.claim("default", "a"), lambda: resources.delete_slice("s")):
            with pytest.raises(ResourceApiMissing):
                await rejected()

    run(tmp_path, scenario)


def test_slices_converted_between_versions_are_equal() -> None:
    body = {"apiVersion": "resource.k8s.io/v1", "spec": {"devices": [{"name": "a", "taints": [1], "capacity": {}}]}}
    beta = slice_to_version(body, "v1beta1")
    assert beta["spec"]["devices"] == [{"name": "a", "basic": {"taints": [1], "capacity": {}}}]
    assert slice_from_version(beta, "v1beta1") == body
    assert slice_to_version(body, "v1") == body
    assert slice_to_version({"spec": {"sharedCounters": []}}, "v1beta1")["spec"] == {"sharedCounters": []}


def test_event_with_a_name_is_written_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: ApiModel, client: ApiClient) -> None:
        recorder = EventRecorder(client, component="driver", node_name="node-1")
        node = Subject("Node", "v1", "node-1", "node-1")
        assert recorder.normal(node, "RepartitionBegun", "it has begun", action="Repartition", name="node-1.one")
        # The same message belongs to another step.
        assert recorder.normal(node, "RepartitionBegun", "it has begun", action="Repartition", name="node-1.two")
        await recorder.close()
        assert [event["metadata"]["name"] for event in api.events] == ["node-1.one", "node-1.two"]
        assert all("generateName" not in event["metadata"] for event in api.events)
        # A restarted driver does not know its earlier Events.
        other = EventRecorder(client, component="driver", node_name="node-1")
        assert other.normal(node, "RepartitionBegun", "it has begun", action="Repartition", name="node-1.two")
        assert other.warning(node, "RepartitionFailed", "it failed", action="Repartition", name="node-1.three")
        await other.close()
        assert [event["metadata"]["name"] for event in api.events] == ["node-1.one", "node-1.two", "node-1.three"]
        assert [event["count"] for event in api.events] == [1, 1, 1] and "WARNING" not in caplog.text

    run(tmp_path, scenario)


def test_events_are_repeated_by_count_and_limited(tmp_path: Path) -> None:
    async def scenario(api: ApiModel, client: ApiClient) -> None:
        now = [1000.0]
        recorder = EventRecorder(client, component="driver", node_name="node-1", clock=lambda: now[0])
        claim = Subject("ResourceClaim", "resource.k8s.io/v1", "a", "uid-a", "team")
        for _round in range(3):
            recorder.warning(claim, "PrepareFailed", "no room", action="Prepare")
        await recorder.close()
        (event,) = api.events
        assert (event["count"], event["type"], event["reason"]) == (1, "Warning", "PrepareFailed")
        assert event["involvedObject"] == {
            "kind": "ResourceClaim",
            "apiVersion": "resource.k8s.io/v1",
            "name": "a",
            "namespace": "team",
            "uid": "uid-a",
        }
        now[0] += events_module.REPEAT_SECONDS + 1
        recorder.warning(claim, "PrepareFailed", "no room", action="Prepare")
        await recorder.close()
        assert [entry["count"] for entry in api.events] == [2]
        api.failures = [("PATCH", 404, "events are kept for an hour")]
        now[0] += events_module.REPEAT_SECONDS + 1
        recorder.warning(claim, "PrepareFailed", "no room", action="Prepare")
        await recorder.close()
        assert [(entry["count"], entry["message"]) for entry in api.events] == [(2, "no room"), (1, "no room")]
        now[0] += events_module.REPEAT_SECONDS + 1
        recorder.warning(claim, "PrepareFailed", "no room", action="Prepare")
        await recorder.close()
        assert [entry["count"] for entry in api.events] == [2, 2]
        for number in range(200):
            recorder.warning(claim, "PrepareFailed", f"reason {number}", action="Prepare")
        await recorder.close()
        reported = len(api.events)
        assert events_module.BURST <= reported <= events_module.BURST + 2
        for number in range(64):
            other = replace(claim, name=f"b{number}", uid=f"uid-b{number}")
            recorder.warning(other, "DeviceUnhealthy", "it is lost", action="Watch")
        await recorder.close()
        assert len(api.events) == reported + 64, "Events of one object do not limit those of others"
        for number in range(events_module.TOTAL_BURST):
            other = replace(claim, name=f"c{number}", uid=f"uid-c{number}")
            recorder.warning(other, "DeviceUnhealthy", "it is lost", action="Watch")
        await recorder.close()
        assert len(api.events) <= events_module.TOTAL_BURST + 2
        api.failures = [("POST", 403, "forbidden")]
        now[0] += 1000
        recorder.normal(claim, "Fine", "x" * 5000, action="Prepare")  # a failure has no effect on others
        await recorder.close()

    run(tmp_path, scenario)


def test_event_budgets_of_namespaces_and_node_are_separate(tmp_path: Path) -> None:
    """A user who creates failing claims does not keep the driver from reporting a fault of the node, or other users' claims."""

    async def scenario(api: ApiModel, client: ApiClient) -> None:
        recorder = EventRecorder(client, component="driver", node_name="node-1", clock=lambda: 1000.0)
        claim = Subject("ResourceClaim", "resource.k8s.io/v1", "a", "uid-a", "team")
        node = Subject("Node", "v1", "node-1", "node-1")
        assert recorder.warning(node, "StoreUnusable", "the disk is full", action="Watch")
        await recorder.close()
        for namespace, most in (("team", 150), ("second", 150), ("third", 0)):
            written = [
                recorder.warning(
                    replace(claim, uid=f"{namespace}-{number}", namespace=namespace), "Failed", "no", action="Prepare"
                )
                for number in range(700)
            ]
            assert written.count(True) == most
        assert recorder.warning(node, "DeviceUnhealthy", "it is lost", action="Watch")
        assert recorder.warning(node, "StoreUnusable", "the disk is full", action="Watch")
        await recorder.close()
        of_node = [event["message"] for event in api.events if event["involvedObject"]["kind"] == "Node"]
        assert sorted(of_node) == ["it is lost", "the disk is full"], "the node's Events are not forgotten"

    run(tmp_path, scenario)


def write(tmp_path: Path, document: Any) -> str:
    file = tmp_path / "kubeconfig"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(file)


def test_event_alternating_condition_updates_its_event_each_time(tmp_path: Path) -> None:
    """Each change of a condition updates its Event. Otherwise the last Event of a device with repeated faults could be outdated."""

    async def scenario(api: ApiModel, client: ApiClient) -> None:
        now = [1000.0]
        recorder = EventRecorder(client, component="dra-accelerators-driver", node_name="node-a", clock=lambda: now[0])
        node = Subject(kind="Node", api_version="v1", name="node-a")
        other = Subject(kind="Pod", api_version="v1", name="p", namespace="team", uid="uid-p")
        for _turn in range(3):
            for _time in range(2):
                now[0] += 1
                recorder.warning(node, "DeviceUnhealthy", "it is ill", action="Watch")
                recorder.warning(node, "DeviceUnhealthy", "another one is ill", action="Watch")
                recorder.normal(node, "RepartitionDone", "once", action="Watch", name="step-1")
                await recorder.close()
            now[0] += 1
            recorder.normal(node, "DeviceRecovered", "it is well", action="Watch")
            recorder.normal(other, "DeviceRecovered", "it is well", action="Watch")
            await recorder.close()
        assert {
            entry["message"]: entry["count"] for entry in api.events if entry["involvedObject"]["kind"] == "Node"
        } == {
            "it is ill": 3,
            "another one is ill": 3,
            "it is well": 3,
            "once": 1,
        }
        assert [entry["count"] for entry in api.events if entry["involvedObject"]["kind"] == "Pod"] == [1]
        for _turn in range(3):  # without waiting for pending requests in between
            recorder.warning(other, "DeviceUnhealthy", "it is ill", action="Watch")
            recorder.normal(other, "DeviceRecovered", "it is well", action="Watch")
        await recorder.close()
        found = [entry for entry in api.events if entry["involvedObject"]["kind"] == "Pod"]
        assert [(entry["message"], entry["count"]) for entry in found] == [("it is well", 4), ("it is ill", 3)]

    run(tmp_path, scenario)


def test_kubeconfig_with_relative_file_paths(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"authority")
    document = kubeconfig("https://api:6443/", **{"client-key-data": base64.b64encode(b"key").decode()})
    document["clusters"][0]["cluster"]["certificate-authority"] = "ca.pem"
    document["clusters"][0]["cluster"]["tls-server-name"] = "kubernetes"
    access = load_access(write(tmp_path, document))
    assert (access.server, access.authority, access.key) == ("https://api:6443", b"authority", b"key")
    assert access.server_name == "kubernetes"
    assert set(access.sources) == {str(tmp_path / "kubeconfig"), str(tmp_path / "ca.pem")}
    with pytest.raises(InvalidKubeconfig, match="cannot be used"):
        access.ssl_context()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.pop("current-context"), "no current-context"),
        (lambda document: document["contexts"].clear(), "no entry 'c' under contexts"),
        (lambda document: document["users"][0]["user"].update({"exec": {"command": "x"}}), "authenticates with exec"),
        (lambda document: document["clusters"][0]["cluster"].update({"server": "api:6443"}), "expected https"),
        (lambda document: document["clusters"][0]["cluster"].update({"proxy-url": "http://p"}), "proxy-url"),
        (lambda document: document["users"][0]["user"].update({"client-key-data": "%%"}), "not base64"),
        (lambda document: document["users"][0]["user"].update({"client-key": "gone.pem"}), "gone.pem"),
    ],
)
def test_kubeconfig_unusable_content_is_rejected(tmp_path: Path, change: Any, message: str) -> None:
    document = kubeconfig("https://api:6443")
    change(document)
    with pytest.raises(InvalidKubeconfig, match=message):
        load_access(write(tmp_path, document))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"server": "http://api:8080"}, "without TLS"),
        ({"server": "https://api:6443", "insecure-skip-tls-verify": True}, "is not verified"),
    ],
)
def test_kubeconfig_insecure_connection_needs_the_option(tmp_path: Path, cluster: Any, message: str) -> None:
    document = kubeconfig("")
    document["clusters"][0]["cluster"] = cluster
    with pytest.raises(InvalidKubeconfig, match=message) as raised:
        load_access(write(tmp_path, document))
    assert "dra_driver_api_insecure" in str(raised.value)
    cluster["extensions"] = [{"name": INSECURE_EXTENSION["name"], "extension": {"allowed": False}}]
    with pytest.raises(InvalidKubeconfig, match=message):
        load_access(write(tmp_path, document))
    cluster["extensions"] = [INSECURE_EXTENSION]
    assert load_access(write(tmp_path, document)).server == cluster["server"]


def test_kubeconfig_malformed_or_missing_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for text in ("a: [", "text"):
        with pytest.raises(InvalidKubeconfig):
            load_access(write(tmp_path, text))
    with pytest.raises(InvalidKubeconfig, match="could not be read"):
        load_access(str(tmp_path / "missing"))
    with pytest.raises(InvalidKubeconfig, match="No kubeconfig"):
        load_access("")


def test_list_with_expired_continue_token_begins_again(tmp_path: Path) -> None:
    async def main() -> None:
        server = ObjectServer()
        file = await server.start(tmp_path)
        client = ApiClient(file)
        try:
            for name in "abc":
                server.put(f"{DEVICE_CLASSES}/{name}", {})
            server.expired_pages = 2
            found = await client.list_all(DEVICE_CLASSES, page=1)
            assert [each["metadata"]["name"] for each in found] == ["a", "b", "c"]
            server.expired_pages = 100
            with pytest.raises(ApiError, match="410"):
                await client.list_all(DEVICE_CLASSES, page=1)
        finally:
            await client.close()
            await server.stop()

    asyncio.run(main())
