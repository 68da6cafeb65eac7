# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims that Python cannot decode affect neither the daemons' watches nor other claims."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from claim_steps import SMALL, SMALL_2
from controller_admission_test import CLAIM, RIGHT, RULES, WRONG, config, manifest, review
from controller_steps import CLAIMS, cluster_of, new_cleanup_loop, run, running, until
from controller_steps import DRIVER as CONTROLLED
from dra_driver.api.client import ApiClient, ApiError
from dra_driver.api.resources import ResourceApi
from dra_driver.api.watching import Watched
from dra_driver.claims.store.records import ClaimReference
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.fleet_report import make_report
from dra_driver.controller.webhook import PATH, application
from dra_driver.core.dra.device_json import PREPARED_CONDITION
from dra_driver.publish.publisher import Pace
from object_server import ObjectServer
from pre_binding_test import AHEAD, begin, has_condition, reserve, short
from publisher_test import Scene as PublisherScene
from publisher_test import content
from publisher_test import run as run_publisher
from vendor_scene import Scene
from vendor_scene import run as run_scene

from tests.unit.undecodable import LEVELS, MARK, OTHER, OWN, claim, dumps

Json = dict[str, Any]
__all__ = ["short"]


def follow(client: ApiClient, **options: Any) -> Watched[str]:
    async def path() -> str:
        return CLAIMS

    async def soon(_seconds: float) -> None:
        await asyncio.sleep(0.01)

    keep = options.pop("keep", lambda item: str(item["metadata"]["resourceVersion"]))
    return Watched(client, "ResourceClaims", path, keep, wait=soon, **options)


def test_watch_of_undecodable_claims_continues_and_names_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        for name, each in {"a": claim("a", opaque=OTHER), "bad": claim("bad", spec=MARK), "z": claim("z")}.items():
            server.put(f"{CLAIMS}/{name}", each)
        claims = follow(client)
        async with running(claims.run()):
            await until(lambda: server.count("WATCH", CLAIMS))
            assert set(claims.items) == {"default/a", "default/z"}, "listed"
            assert "ResourceClaim default/bad" in caplog.text or "object default/bad" in caplog.text
            caplog.clear()
            server.put(f"{CLAIMS}/worse", claim("worse", spec=MARK))
            server.put(f"{CLAIMS}/b", claim("b", opaque=OTHER))
            server.put(f"{CLAIMS}/z", claim("z", spec=MARK))
            await until(lambda: set(claims.items) == {"default/a", "default/b"})
            assert claims.current and server.count("WATCH", CLAIMS) == 1, "the same watch goes on"
            assert "ResourceClaim default/worse" in caplog.text and "ResourceClaim default/z" in caplog.text
            server.remove(f"{CLAIMS}/b")
            await until(lambda: set(claims.items) == {"default/a"})

    with caplog.at_level(logging.WARNING):
        run(tmp_path, scenario)


def test_object_that_keep_rejects_affects_no_other_object(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def keep(item: Json) -> str:
        if item["metadata"]["name"] == "odd":
            raise RecursionError("as the test says")
        return "kept"

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        for name in ("a", "odd"):
            server.put(f"{CLAIMS}/{name}", claim(name))
        claims = follow(client, keep=keep)
        async with running(claims.run()):
            await until(lambda: server.count("WATCH", CLAIMS))
            assert set(claims.items) == {"default/a"} and claims.current
            server.put(f"{CLAIMS}/odd", claim("odd"))
            server.put(f"{CLAIMS}/b", claim("b"))
            await until(lambda: set(claims.items) == {"default/a", "default/b"})
            assert server.count("WATCH", CLAIMS) == 1
            assert "default/odd" in caplog.text

    run(tmp_path, scenario)


def test_exception_of_an_observer_does_not_end_the_watch(tmp_path: Path) -> None:
    calls = []

    def changed() -> None:
        calls.append(1)
        raise ValueError("as the test says")

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        claims = follow(client, changed=changed)
        async with running(claims.run()):
            await until(lambda: server.count("WATCH", CLAIMS))
            server.put(f"{CLAIMS}/a", claim("a"))
            await until(lambda: claims.items)
            assert claims.current and len(calls) == 2 and server.count("WATCH", CLAIMS) == 1

    run(tmp_path, scenario)


def test_unexpected_exception_restarts_the_watch_with_backoff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("random.uniform", lambda _low, high: high)
    waits: list[tuple[float, bool]] = []
    failing = [RecursionError("first"), RuntimeError("second"), TypeError("third")]
    watch = ApiClient.watch

    def fails(self: ApiClient, *arguments: Any, **options: Any) -> Any:
        if failing:
            raise failing.pop(0)
        return watch(self, *arguments, **options)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        claims = follow(client)

        async def wait(seconds: float) -> None:
            waits.append((seconds, claims.current))

        claims._wait = wait
        monkeypatch.setattr(ApiClient, "watch", fails)
        async with running(claims.run()):
            await until(lambda: server.count("WATCH", CLAIMS))
            assert claims.current and server.count("GET", CLAIMS) == 4
        assert [current for _seconds, current in waits] == [False] * 3, "not current until then"
        assert waits[0][0] < waits[1][0] < waits[2][0]

    run(tmp_path, scenario)
    assert "unexpected exception in a watch" in caplog.text


def test_driver_undecodable_claims_other_claim_is_prepared(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await scene.until(scene.devices)
        # The controller's list names both claims, and the driver reads each of them.
        reserve(scene, "bad", SMALL_2)
        scene.api.put_claim({**scene.api.claims["bad"], "spec": claim("bad", spec=MARK)["spec"]})
        await scene.until(lambda: any(path.endswith("/resourceclaims/bad") for _method, path in scene.api.log))
        reserve(scene, "a", SMALL)
        await scene.until(lambda: has_condition(scene, "a", PREPARED_CONDITION))
        assert await scene.call("NodePrepareResources", "a") == ""

    run_scene(short, scenario)


@pytest.mark.prove
def test_driver_prepares_a_claim_with_undecodable_parameters_of_another_driver(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.settings = AHEAD
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        scene.cluster.allocate("a", SMALL)
        found = copy.deepcopy(scene.cluster.claims["default", "a"])
        entry = {"source": "FromClaim", "requests": [], "opaque": {"driver": OTHER, "parameters": {"a": MARK}}}
        found["status"]["allocation"]["devices"]["config"] = [entry]
        scene.api.put_claim(found)
        assert await scene.call("NodePrepareResources", "a") == ""
        # Undecodable parameters of this driver are refused, with an error that names claim and field.
        entry["opaque"]["driver"] = OWN
        found["metadata"] = {**found["metadata"], "name": "b", "uid": "uid-b"}
        scene.cluster.claims["default", "b"] = found
        scene.api.put_claim(copy.deepcopy(found))
        refused = await scene.call("NodePrepareResources", "b")
        assert "opaque.parameters" in refused and f"{LEVELS}" not in refused and "b" in refused

    run_scene(short, scenario)


def test_controller_undecodable_claims_cleanup_continues(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        server.put(f"{CLAIMS}/deep", claim("deep", opaque=OTHER))
        server.put(f"{CLAIMS}/bad", claim("bad", spec=MARK))
        planned = await new_cleanup_loop(client, ControllerMetrics()).plan_once()
        assert {each.name for each in planned} >= {"gone"}
        work = new_cleanup_loop(client, ControllerMetrics())
        async with running(work.run()):
            await until(lambda: not any(path.endswith("slices/gone") for path in server.objects))
            server.put(f"{CLAIMS}/deeper", claim("deeper", opaque=OTHER))
            server.put(f"{CLAIMS}/worse", claim("worse", spec=MARK))
            await until(lambda: "default/deeper" in work.claims.items)
            assert work.claims.current and "default/worse" not in work.claims.items

    run(tmp_path, scenario)


def test_controller_report_lists_claims_with_undecodable_parameters(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        server.put(f"{CLAIMS}/deep", claim("deep", opaque=OTHER, managed=True, data=OTHER))
        server.put(f"{CLAIMS}/bad", claim("bad", spec=MARK))
        client.pages = without_pods(client.pages)  # type: ignore[method-assign]
        made = await make_report(client, [CONTROLLED])
        assert made["totals"]["claims"] == 1

    run(tmp_path, scenario)


def without_pods(pages: Any) -> Any:
    """A server without a list of pods."""

    async def paged(path: str, *arguments: Any, **options: Any) -> Any:
        if path == "/api/v1/pods":
            yield {"items": []}, True
        else:
            async for each in pages(path, *arguments, **options):
                yield each

    return paged


def test_reading_one_undecodable_claim_raises_api_error(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
        server.put(f"{path}/a", claim("a", opaque=OTHER))
        server.put(f"{path}/b", claim("b", opaque=OWN))
        client.opaque_of.add(OWN)
        assert (await ResourceApi(client).claim("default", "a"))["metadata"]["name"] == "a"
        with pytest.raises(ApiError, match="ResourceClaim default/b"):
            await ResourceApi(client).claim("default", "b")

    run(tmp_path, scenario)


def test_write_to_claim_with_undecodable_parameters_succeeds(tmp_path: Path) -> None:
    """The API server has stored the write: it succeeds. An error would make the status keeper and the cleanup repeat it, and others wait."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
        client.opaque_of.add(OWN)
        for name, driver in (("a", OTHER), ("b", OWN)):
            server.put(f"{path}/{name}", claim(name, opaque=driver, managed=True, data=driver))
            reference = ClaimReference("default", name, f"uid-{name}")
            await ResourceApi(client).apply_claim_devices(reference, OWN, [])
            patch: Json = {"metadata": {"finalizers": []}}
            answer = await client.request(
                "PATCH", f"{path}/{name}", body=patch, content_type="application/merge-patch+json"
            )
            assert answer["metadata"]["name"] == name
            # The driver has not applied this entry, so it stays.
            assert [each["driver"] for each in server.objects[f"{path}/{name}"]["status"]["devices"]] == [driver]

    run(tmp_path, scenario)


def test_webhook_checks_a_claim_with_undecodable_parameters_of_another_driver() -> None:
    async def main() -> None:
        async with TestClient(TestServer(application(RULES, ControllerMetrics()))) as session:

            async def answer(*configs: Any) -> tuple[int, str]:
                deep = manifest(CLAIM, "v1", *configs)
                async with session.post(PATH, data=dumps(review(deep))) as response:
                    return response.status, await response.text()

            other = config({"a": MARK}, driver=OTHER)
            for content, allowed in ((RIGHT, True), (WRONG, False)):
                status, text = await answer(other, config(content))
                assert status == 200 and json.loads(text)["response"]["allowed"] is allowed
            status, text = await answer(config({"a": MARK}))
            assert status == 400 and "opaque.parameters" in text

    asyncio.run(main())


def test_unexpected_exception_restarts_the_watch_of_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [RecursionError("first"), TypeError("second")]
    watch = ResourceApi.watch_slices

    def fails(self: ResourceApi, *arguments: Any, **options: Any) -> Any:
        if failing:
            raise failing.pop(0)
        return watch(self, *arguments, **options)

    async def scenario(scene: PublisherScene) -> None:
        monkeypatch.setattr(ResourceApi, "watch_slices", fails)
        monkeypatch.setattr("dra_driver.api.watching.RETRY_FIRST", 0.01)
        scene.publisher._pace = Pace(retry=0.01)
        scene.publisher.set_content(content("l4"))
        await scene.until(scene.publisher.published.is_set)
        await scene.until(lambda: not failing and "WATCH" in [method for method, _path in scene.api.log])
        scene.api.delete_slice(next(iter(scene.api.slices)))
        await scene.until(lambda: scene.api.slices)

    run_publisher(tmp_path, scenario)
