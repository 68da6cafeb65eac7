# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Device conditions in the status of claims, and claims that are prepared before their pods are bound."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER
from claim_steps import SMALL
from dra_driver.api.client import ApiClient, ApiError
from dra_driver.claims.claim_statuses import DeviceKey, awaited_claim, failed_entries, prepared_entries
from dra_driver.claims.store.records import ClaimRecord, DeviceRecord
from dra_driver.core.dra.device_json import FAILED_CONDITION, PREPARED_CONDITION
from dra_driver.core.partitioning.rules import parse_rules
from dra_driver.supervisors.claim_status_writer import ClaimStatusWriter
from dra_driver.supervisors.pre_binding import ABSENT_SECONDS, UNKNOWN_SECONDS, ControllerSign
from hypothesis import given
from hypothesis import strategies as st
from machine_model import POOL
from vendor_scene import Scene, run

AHEAD = {"layout": [{"match": {}, "mode": "dynamic", "prepared_before_binding": True}]}
BINDING = {"bindingConditions": [PREPARED_CONDITION], "bindingFailureConditions": [FAILED_CONDITION]}


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_LIMIT", 0.1)
    monkeypatch.setattr("dra_driver.supervisors.claim_status_writer.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.claim_status_writer.SPREAD_SECONDS", 0.1)
    return tmp_path_factory.mktemp("a")


async def begin(scene: Scene, *, controller: bool = True) -> None:
    """Start a driver with devices that pods wait for, and the controller that lists their claims."""
    scene.settings = AHEAD
    if controller:
        scene.api.act_as_controller()
    await scene.api.start()
    await scene.start()


def reserve(scene: Scene, name: str, *devices: str, at: str = "2026-01-01T00:00:00Z", **allocation: Any) -> None:
    """Reserve a claim, as the scheduler does before it waits."""
    scene.cluster.allocate(name, *({"device": device, **BINDING} for device in devices), **allocation)
    claim = copy.deepcopy(scene.cluster.claims["default", name])
    claim["status"]["allocation"]["allocationTimestamp"] = at
    scene.api.put_claim(claim)


def release(scene: Scene, name: str) -> None:
    """Release a claim, as the scheduler does after a timeout: the device entries are removed with the allocation."""
    claim = copy.deepcopy(scene.api.claims[name])
    claim["status"] = {}
    scene.api.put_claim(claim)


def conditions(scene: Scene, name: str) -> dict[str, str]:
    return {
        condition["type"]: condition["status"]
        for entry in scene.api.claims[name]["status"].get("devices", ())
        for condition in entry["conditions"]
    }


def has_condition(scene: Scene, name: str, condition: str) -> bool:
    return conditions(scene, name).get(condition) == "True"


def test_pre_binding_allocated_claim_is_prepared_before_its_pod_is_bound(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await scene.until(scene.devices)
        (small,) = [
            each
            for item in scene.api.slices.values()
            for each in item["spec"].get("devices", ())
            if each["name"] == SMALL
        ]
        assert small["bindingConditions"] == [PREPARED_CONDITION]
        assert small["bindingFailureConditions"] == [FAILED_CONDITION]
        reserve(scene, "a", SMALL)
        await scene.until(lambda: has_condition(scene, "a", PREPARED_CONDITION))
        assert len(scene.partitions()) == 1 and len(scene.cdi()) == 1
        made = scene.backend.gpus.devices()[0].partitions[0]
        (entry,) = scene.api.claims["a"]["status"]["devices"]
        assert entry["data"]["uuid"] == made.uuid and entry["data"]["parentUUID"]
        assert entry["data"]["profile"] == "1g.10gb"
        # The pod is bound, and the kubelet calls.
        assert await scene.call("NodePrepareResources", "a") == ""
        assert scene.backend.gpus.devices()[0].partitions[0].uuid == made.uuid
        assert await scene.unprepare("a") == ""
        assert scene.partitions() == [] and scene.cdi() == []

    run(short, scenario)


def test_pre_binding_deallocated_claim_is_unprepared(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await scene.until(scene.devices)
        reserve(scene, "a", SMALL)
        reserve(scene, "b", "gpu-1-mig-1g10gb-19-0")
        await scene.until(
            lambda: has_condition(scene, "a", PREPARED_CONDITION) and has_condition(scene, "b", PREPARED_CONDITION)
        )
        assert await scene.call("NodePrepareResources", "b") == ""
        release(scene, "a")
        release(scene, "b")  # its containers can still run: the kubelet will unprepare it
        await scene.until(lambda: len(scene.cdi()) == 1)
        assert len(scene.partitions()) == 1
        assert "b" in scene.cdi()[0].name
        # A new allocation on the other GPU is prepared.
        reserve(scene, "a", "gpu-1-mig-1g10gb-19-1", at="2026-01-01T00:01:00Z")
        await scene.until(lambda: has_condition(scene, "a", PREPARED_CONDITION))
        assert await scene.call("NodePrepareResources", "a") == ""

    run(short, scenario)


def test_pre_binding_invalid_config_sets_the_failed_condition(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await scene.until(scene.devices)
        wrong = {"opaque": {"driver": DRIVER, "parameters": {"kind": "Nothing"}}, "source": "FromClaim"}
        reserve(scene, "a", SMALL, config=[wrong])
        await scene.until(lambda: has_condition(scene, "a", FAILED_CONDITION))
        (entry,) = scene.api.claims["a"]["status"]["devices"]
        assert not has_condition(scene, "a", PREPARED_CONDITION)
        assert "no apiVersion" in entry["conditions"][0]["message"]
        assert entry["conditions"][0]["reason"] == "ConfigRefused"
        assert scene.partitions() == [] and scene.cdi() == []

    run(short, scenario)


def test_claims_are_watched_only_where_pods_wait_for_devices(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        assert await scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        await scene.until(lambda: has_condition(scene, "a", "Ready"))
        assert PREPARED_CONDITION not in conditions(scene, "a")
        assert not [path for _method, path in scene.api.log if path.endswith("/resourceclaims")]

    run(short, scenario)


def binds(scene: Scene) -> bool | None:
    """Return whether the published device has binding conditions, or None if it is not published."""
    found = scene.specs().get(SMALL)
    return None if found is None else "bindingConditions" in found


def requested(scene: Scene, method: str, part: str) -> int:
    return sum(one == method and part in path for one, path in scene.api.log)


def test_pre_binding_claims_of_other_nodes_cause_no_requests(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await scene.until(lambda: binds(scene))
        await scene.until(lambda: requested(scene, "WATCH", "/configmaps"))
        version = scene.api.lists["waiting-claims"]["metadata"]["resourceVersion"]
        sent: list[Any] = []
        for queue in scene.api._list_watchers:
            queue.put_nowait = sent.append  # type: ignore[method-assign]
        for number in range(100):
            results = [{"driver": DRIVER, "pool": "node-2", "device": SMALL, **BINDING}]
            metadata = {"namespace": "default", "name": f"other-{number}", "uid": f"other-{number}"}
            scene.api.put_claim(
                {"metadata": metadata, "status": {"allocation": {"devices": {"results": results}}}},
            )
        assert sent == []
        assert scene.api.lists["waiting-claims"]["metadata"]["resourceVersion"] != version
        assert not [path for _method, path in scene.api.log if path.endswith("/resourceclaims")]
        assert not requested(scene, "GET", "/resourceclaims/other")

    run(short, scenario)


def test_pre_binding_without_a_controller_pods_are_bound_first(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene, controller=False)
        await scene.until(lambda: binds(scene) is False)
        await scene.until(lambda: any(each["reason"] == "ControllerMissing" for each in scene.api.events))
        assert await scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        assert len(scene.partitions()) == 1

    run(short, scenario)


def test_conditions_follow_the_controller(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.pre_binding.SIGN_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.pre_binding.ABSENT_SECONDS", 0.5)

    async def scenario(scene: Scene) -> None:
        await begin(scene, controller=False)
        await scene.until(lambda: binds(scene) is False)

        async def renew() -> None:
            while True:
                scene.api.act_as_controller()
                await asyncio.sleep(0.05)

        for _each in range(2):
            renewing = asyncio.ensure_future(renew())
            await scene.until(lambda: binds(scene))
            reserve(scene, "a", SMALL)
            await scene.until(lambda: has_condition(scene, "a", PREPARED_CONDITION))
            release(scene, "a")
            await scene.until(lambda: scene.partitions() == [])
            renewing.cancel()
            await scene.until(lambda: binds(scene) is False)
        # The role of the controller deletes its objects.
        scene.api.act_as_controller()
        await scene.until(lambda: binds(scene))
        monkeypatch.setattr("dra_driver.supervisors.pre_binding.ABSENT_SECONDS", 1000.0)
        scene.api.has_controller = False
        scene.api.put_list("waiting-claims", None)
        await scene.until(lambda: binds(scene) is False)

    run(short, scenario)


def test_restart_changes_no_slice(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await scene.until(lambda: binds(scene))
        await scene.stop()
        written = scene.api.slice_writes()
        scene.api.failures = [("GET", 503, "overloaded")] * 3
        asked = requested(scene, "GET", "/configmaps/waiting-claims")
        await scene.start()
        await scene.until(
            lambda: requested(scene, "GET", "/configmaps/waiting-claims") > asked and not scene.api.failures
        )
        await scene.until(lambda: scene.driver._serving.publisher.is_current)
        assert scene.api.slice_writes() == written

    run(short, scenario)


def test_driver_prepares_only_claims_that_are_allocated_to_it(short: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await scene.until(lambda: binds(scene))
        scene.api.has_controller = False
        scene.cluster.allocate("elsewhere", {"device": SMALL, **BINDING})
        elsewhere = copy.deepcopy(scene.cluster.claims["default", "elsewhere"])
        elsewhere["status"]["allocation"]["devices"]["results"][0]["pool"] = "node-2"
        scene.api.put_claim(elsewhere)
        reserve(scene, "right", "gpu-1-mig-1g10gb-19-0")
        lines = ("missing 0uid-missing", "elsewhere 0uid-elsewhere", "right another-uid", "../nodes/node-1 u")
        scene.api.put_list("waiting-claims-node-1", {"claims": "".join(f"default/{each} 00000000\n" for each in lines)})
        await scene.until(
            lambda: all(
                requested(scene, "GET", f"/resourceclaims/{name}") for name in ("missing", "elsewhere", "right")
            )
        )
        reserve(scene, "marker", SMALL)
        scene.api.act_as_controller()
        await scene.until(
            lambda: (
                has_condition(scene, "marker", PREPARED_CONDITION) and has_condition(scene, "right", PREPARED_CONDITION)
            )
        )
        assert len(scene.cdi()) == 2 and not conditions(scene, "elsewhere")
        assert not requested(scene, "GET", "resourceclaims/..")

    run(short, scenario)


def test_claim_that_is_not_listed_is_undone_only_if_it_is_not_allocated_here(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await scene.until(lambda: binds(scene))
        reserve(scene, "a", SMALL)
        await scene.until(lambda: has_condition(scene, "a", PREPARED_CONDITION))
        read = requested(scene, "GET", "/resourceclaims/a")
        scene.api.has_controller = False
        scene.api.put_list("waiting-claims-node-1", None)
        await scene.until(lambda: requested(scene, "GET", "/resourceclaims/a") > read)
        reserve(scene, "b", "gpu-1-mig-1g10gb-19-0")
        scene.api.put_list("waiting-claims-node-1", {"claims": "default/b 0uid-b 00000000\n"})
        await scene.until(lambda: has_condition(scene, "b", PREPARED_CONDITION))
        assert len(scene.partitions()) == 2
        release(scene, "a")
        scene.api.act_as_controller()
        await scene.until(lambda: len(scene.partitions()) == 1)

    run(short, scenario)


def test_claim_that_is_allocated_again_is_prepared_with_its_new_devices(short: Path) -> None:
    """The list shows the last allocation only, because two changes of a claim can be one write of the controller: it is prepared."""

    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await scene.until(lambda: binds(scene))
        reserve(scene, "a", SMALL)
        await scene.until(lambda: has_condition(scene, "a", PREPARED_CONDITION))
        scene.api.has_controller = False
        release(scene, "a")
        reserve(scene, "a", "gpu-1-mig-1g10gb-19-0", at="2026-01-01T00:01:00Z")
        scene.api.act_as_controller()
        await scene.until(lambda: has_condition(scene, "a", PREPARED_CONDITION))
        assert [index for index, *_place in scene.partitions()] != [0] and len(scene.partitions()) == 1

    run(short, scenario)


@pytest.mark.parametrize("failing", [5, 2])
def test_sign_not_renewed_some_reads_fail_counts_as_absent(failing: int) -> None:
    now, sign = 0.0, ControllerSign(0.0)
    sign.found("1", now)
    while sign.has_controller and now < 4 * 3600:
        now += 60.0
        if now / 60 % failing == 0:
            sign.failed(now)
        else:
            sign.found("1", now)
    assert not sign.has_controller and now <= 2 * ABSENT_SECONDS


def test_conditions_list_cannot_be_watched_pods_are_bound_first(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.pre_binding.SIGN_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.pre_binding.UNLISTED_SECONDS", 0.5, raising=False)
    monkeypatch.setattr("dra_driver.api.watching.RETRY_LIMIT", 0.2)
    pages, refused = ApiClient.pages, [True]

    async def refuse() -> Any:
        raise ApiError("User cannot list resource configmaps", status=403, reason="Forbidden")
        yield

    def answer(self: ApiClient, path: str, *arguments: Any, **options: Any) -> Any:
        is_refused = refused[0] and path.endswith("/configmaps")
        return refuse() if is_refused else pages(self, path, *arguments, **options)

    monkeypatch.setattr(ApiClient, "pages", answer)

    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await scene.until(lambda: any(each["reason"] == "ClaimListUnreadable" for each in scene.api.events))
        await scene.until(lambda: binds(scene) is False)
        refused[0] = False
        await scene.until(lambda: binds(scene))

    run(short, scenario)


@given(st.lists(st.tuples(st.sampled_from(["", "1", "2", "failed"]), st.floats(0.0, 100.0)), max_size=30))
def test_sign_counts_only_time_with_successful_reads(reads: list[tuple[str, float]]) -> None:
    now, sign = 0.0, ControllerSign(0.0)
    last, since, absences = "", 0.0, 0
    for found, seconds in reads:
        now += seconds
        if found == "failed":
            before = sign.has_controller
            sign.failed(now)
            assert sign.has_controller == before or (
                before is None and sign.has_controller is False and now >= UNKNOWN_SECONDS
            )
            since += seconds
        else:
            before, absences = sign.has_controller, 0 if found else absences + 1
            sign.found(found, now)
            if absences == 1:
                assert sign.has_controller == before, "one answer can be of a server that is starting"
                continue
            if found != last:
                last, since = found, now
            assert sign.has_controller == (bool(found) and now - since < ABSENT_SECONDS)


def test_pre_binding_server_without_binding_conditions_binds_at_once(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.api.drop_fields = ("bindingConditions", "bindingFailureConditions")
        await begin(scene)
        await scene.until(lambda: SMALL in scene.devices())
        await scene.until(lambda: any("DRADeviceBindingConditions" in str(each) for each in scene.api.events))
        assert await scene.eventually(lambda: scene.prepare("a", SMALL)) == ""

    run(short, scenario)


def test_status_failed_writes_are_retried(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        scene.api.failures = [("PATCH", 500, "etcd has no leader"), ("PATCH", 429, "too many")]
        assert await scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        await scene.until(lambda: has_condition(scene, "a", "Ready"))
        before = copy.deepcopy(scene.api.claims["a"])
        await scene.stop()
        patches = len([entry for entry in scene.api.writes() if entry[0] == "PATCH" and entry[1].endswith("/status")])
        await scene.start()
        await scene.until(
            lambda: (
                len([each for each in scene.api.writes() if each[0] == "PATCH" and each[1].endswith("/status")])
                > patches
            )
        )
        assert scene.api.claims["a"] == before, "rewritten without a change"

    run(short, scenario)


def test_status_claim_prepared_again_is_written_after_the_settle_time(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the four calls, even on a slow machine.
    monkeypatch.setitem(ClaimStatusWriter.__init__.__kwdefaults__, "settle", 3.0)  # type: ignore[arg-type]

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        assert await scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        assert await scene.prepare("b", "gpu-1-mig-1g10gb-19-0") == ""
        assert await scene.unprepare("a") == ""
        assert await scene.prepare("a") == ""
        await scene.until(lambda: has_condition(scene, "a", "Ready") and has_condition(scene, "b", "Ready"))
        written = [
            path.split("/")[-2] for verb, path in scene.api.writes() if verb == "PATCH" and path.endswith("/status")
        ]
        assert written == ["b", "a"]

    run(short, scenario)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"mode": "whole", "prepared_before_binding": True}, "takes time"),
        ({"mode": "static", "partitions": {}, "prepared_before_binding": True}, "takes time"),
        ({"mode": "dynamic", "prepared_before_binding": 1}, "true or false"),
    ],
)
def test_parse_contradictory_rules_are_rejected(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        parse_rules([{"match": {}, **rule}])


places = st.builds(
    DeviceKey, st.just(POOL), st.sampled_from(["gpu-0", "gpu-1", SMALL]), st.sampled_from(["", "s1", "s2"])
)


@given(
    allocated=st.lists(places, unique=True, max_size=6),
    waited=st.sets(st.integers(0, 5)),
    done=st.sets(st.integers(0, 5)),
    failed=st.booleans(),
)
def test_waiting_claim_with_a_condition_is_not_waiting(
    allocated: list[DeviceKey], waited: set[int], done: set[int], failed: bool
) -> None:
    results = [
        {
            "request": "r",
            "driver": DRIVER,
            "pool": place.pool,
            "device": place.device,
            **({"shareID": place.share_id} if place.share_id else {}),
            **(BINDING if number in waited else {}),
        }
        for number, place in enumerate(allocated)
    ]
    told_places = [place for number, place in enumerate(allocated) if number in done]
    entries = failed_entries(DRIVER, told_places, "in-use", "x", 0.0)
    if not failed:
        for entry in entries:
            entry["conditions"] = [{"type": PREPARED_CONDITION, "status": "True"}]
    claim = {
        "metadata": {"namespace": "n", "name": "c", "uid": "u"},
        "status": {"allocation": {"devices": {"results": results}}, "devices": entries},
    }
    found = awaited_claim(claim, DRIVER, POOL)
    expected = [place for number, place in enumerate(allocated) if number in waited]
    assert (list(found.devices) if found else []) == expected
    assert (list(found.unreported) if found else []) == [place for place in expected if place not in told_places]
    assert awaited_claim(claim, DRIVER, "another") is None and awaited_claim(claim, "dra.net", POOL) is None


def test_status_without_an_offer_has_the_values_of_the_record() -> None:
    device = DeviceRecord(request="r", pool=POOL, name="gpu-0", device_uuid="GPU-0", kind="device")
    record = ClaimRecord("u", "n", "c", "prepared", "boot-1", 0.0, (device,))
    (entry,) = prepared_entries(DRIVER, record, {}, "store-1")
    assert entry["data"] == {"uuid": "GPU-0", "driverStore": "store-1"}
    assert [each["type"] for each in entry["conditions"]] == ["Ready"]


@pytest.mark.parametrize("status", [409, 400, 403, 413, 422, 500, 504, 0])
def test_refused_status_of_one_claim_does_not_delay_others(
    short: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.claim_status_writer.RETRY_FIRST", 1000.0)
    monkeypatch.setattr("dra_driver.supervisors.claim_status_writer.RETRY_LIMIT", 1000.0)
    monkeypatch.setattr("dra_driver.supervisors.claim_status_writer.REFUSED_FIRST", 0.1, raising=False)
    if not status:
        monkeypatch.setattr("dra_driver.api.client.REQUEST_SECONDS", 2.0)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        scene.api.refused_claims["a"] = status
        assert await scene.eventually(lambda: scene.prepare("a", SMALL)) == ""

        def attempts() -> int:
            return sum(verb == "PATCH" and "/a/status" in path for verb, path in scene.api.writes())

        await scene.until(attempts)
        assert await scene.prepare("b", "gpu-1-mig-1g10gb-19-0") == ""
        await scene.until(lambda: has_condition(scene, "b", "Ready"))
        tried = attempts()
        await scene.until(lambda: attempts() > tried)
        scene.api.refused_claims.clear()
        await scene.until(lambda: has_condition(scene, "a", "Ready"))

    run(short, scenario)


@pytest.mark.parametrize(("status", "tried"), [(401, 1), (429, 1), (503, 1), (500, 2)])
def test_errors_of_server_delay_statuses_of_all_claims(
    short: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int, tried: int
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.claim_status_writer.RETRY_FIRST", 1000.0)
    monkeypatch.setattr("dra_driver.supervisors.claim_status_writer.RETRY_LIMIT", 1000.0)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        scene.api.refused_claims.update(dict.fromkeys("abc", status))
        assert await scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        assert await scene.prepare("b", "gpu-1-mig-1g10gb-19-0") == ""
        assert await scene.prepare("c", "gpu-1-mig-1g10gb-19-1") == ""
        await scene.until(lambda: "the status of claims cannot be written" in caplog.text)
        written = [path for verb, path in scene.api.writes() if verb == "PATCH" and path.endswith("/status")]
        assert len(written) == tried

    run(short, scenario)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_prepare_read_that_fails_for_a_moment_is_repeated_without_event(short: Path, status: int) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        assert await scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        scene.api.retry_after = "0"
        scene.api.failures = [("GET", status, "overloaded")] * 3
        assert await scene.prepare("b", "gpu-1-mig-1g10gb-19-0") == ""
        assert not scene.api.failures
        assert not [each for each in scene.api.events if each["type"] == "Warning"]

    run(short, scenario)
