# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The controller's fleet report: its content, its readers, and both during an outage of the API server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from aiohttp import ClientConnectorError, ClientSession, web
from api_model import kubeconfig
from dra_driver.api.client import ApiClient
from dra_driver.controller import connection_limit, reader_authorization, report_endpoint
from dra_driver.controller import fleet_report as fleet_module
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.fleet_fold import FleetReportBuilder
from dra_driver.controller.fleet_report import FAILED_SECONDS, KEPT_SECONDS, FleetReport, ReportFailed, memory_limit
from dra_driver.controller.health_server import keep_serving
from dra_driver.controller.reader_authorization import AUDIENCE, OUTAGE_SECONDS, PATH, REFUSED_SECONDS, ReaderAuthorizer
from dra_driver.controller.reader_authorization import KEPT_SECONDS as JUDGED_SECONDS
from dra_driver.controller.report_endpoint import add_report
from dra_driver.core.partitioning.layout_differences import ANNOTATION, differences_in_slices
from scrapes_test import free_port

from tests.fleets import DRIVER, Fleet, boards, generate_fleet

Json = dict[str, Any]
SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs/report.schema.json").read_text(encoding="utf-8"))
TAINT = {"key": "example.com/firmware", "value": "update", "effect": "NoSchedule"}


def report_of(made: Fleet, page: int = 100) -> Json:
    """Return the report of a fleet whose objects arrive in pages."""
    fold = FleetReportBuilder()
    for _list in range(2):  # a list that restarts replaces its first pages
        fold.begin_slices(DRIVER)
        fold.begin_claims()
        fold.add_slices(DRIVER, made.slices[:page])
        fold.add_claims(made.claims[:page])
    for start in range(page, len(made.slices), page):
        fold.add_slices(DRIVER, made.slices[start : start + page])
    for start in range(page, len(made.claims), page):
        fold.add_claims(made.claims[start : start + page])
    found: Json = json.loads(json.dumps(fold.report(made.pending, made.rules, [], "2026-11-24T10:00:00Z")))
    return found


def fleet() -> Fleet:
    made = Fleet()
    made.node("node-1", boards(2))
    made.claim("training", "node-1", "gpu-0", pods=("trainer-0",))
    made.pending_pod("late-0", "late", "0/1 nodes are available: 1 cannot allocate all claims.")
    selector = {"driver": DRIVER, "pool": "node-1", "device": "gpu-1"}
    made.rules = [{"metadata": {"name": "r"}, "spec": {"deviceSelector": selector, "taint": TAINT}}]
    return made


def test_report_equals_the_picture_of_the_cluster() -> None:
    made = fleet()
    found = report_of(made)
    jsonschema.validate(found, SCHEMA)
    assert found["asked"] == {"nodes": False, "cluster": True} and found["totals"]["silent"] == 0
    (node,) = found["nodes"]
    assert [each["claims"] for each in node["devices"]] == [["research/training"], []]
    assert node["devices"][1]["taints"][0]["rule"] == "r"
    assert found["claims"][0]["pods"] == ["trainer-0"]
    (waits,) = found["waiting"]
    assert waits["claim"] == "research/late" and waits["reason"]["source"] == "scheduler"
    assert found["attention"] == []


def test_report_has_the_layout_differences_of_drivers() -> None:
    made = fleet()
    drawn = report_of(made)["nodes"][0]["devices"][0]["uuid"]
    differs = {"index": 0, "wanted": "static: 1 × 3g.40gb", "steps": ["+ 3g.40gb at 0"], "error": ""}
    output = {drawn: differs, "GPU-unpublished": {**differs, "index": 7}}
    made.slices[0]["metadata"]["annotations"] = {ANNOTATION: json.dumps(output)}
    found = report_of(made)
    jsonschema.validate(found, SCHEMA)
    drifts = [each["drift"] for each in found["nodes"][0]["devices"]]
    assert drifts == [{"wanted": "static: 1 × 3g.40gb", "steps": ["+ 3g.40gb at 0"], "held_by": [], "error": ""}, None]
    assert (found["totals"]["drifting"], found["totals"]["drifting_nodes"]) == (1, 1)
    (note,) = found["attention"]
    assert note["node"] == "node-1" and "device 7 (GPU-unpublished)" in note["message"]


@pytest.mark.parametrize("page", [3, 1000])
def test_report_page_by_page_equals_the_picture_of_all_objects(page: int) -> None:
    made = generate_fleet(12)
    made.answers = {}
    made.rules = fleet().rules
    made.slices.reverse()  # the slices of a node can be on several pages
    expected = made.picture(differing=differences_in_slices(made.slices))
    expected["attention"] = [each for each in expected["attention"] if each["code"] != "node-unknown"]
    assert report_of(made, page) == expected


class Cluster:
    """An API server that lists a fleet in pages of one object. It knows a permitted and a forbidden reader."""

    def __init__(self, made: Fleet) -> None:
        base = "/apis/resource.k8s.io"
        self.lists = {
            f"{base}/v1/resourceslices": made.slices,
            f"{base}/v1/resourceclaims": made.claims,
            f"{base}/v1beta2/devicetaintrules": made.rules,
            f"{base}/v1/deviceclasses": [],
            "/api/v1/pods": made.pending,
        }
        self.about: Json = {
            base: {"versions": [{"version": "v1"}, {"version": "v1beta2"}]},
            f"{base}/v1": {"resources": [{"name": "resourceslices"}]},
            f"{base}/v1beta2": {"resources": [{"name": "devicetaintrules"}]},
        }
        self.asked: list[str] = []
        self.away = False
        #: Lists get no answer.
        self.is_silent = False
        self.reviews_fail_with = 0
        self.readers = {"reader"}
        #: Reviews of tokens with this prefix are answered after ``goes_on`` is set.
        self.hanging, self.goes_on = "", asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.away:
            return web.json_response({"message": "away"}, status=503)
        if request.method == "POST" and self.reviews_fail_with:
            return web.json_response({"message": "no reviews"}, status=self.reviews_fail_with)
        if request.method == "POST":
            if self.hanging and (await request.json())["spec"].get("token", "").startswith(self.hanging):
                await self.goes_on.wait()
            return web.json_response({"status": self.judged(request.path, (await request.json())["spec"])}, status=201)
        if request.path in self.about:
            return web.json_response(self.about[request.path])
        if self.is_silent:
            await asyncio.Event().wait()
        if request.path not in self.lists:
            return web.json_response({"message": "none"}, status=404)
        start, items = int(request.query.get("continue", "0")), self.lists[request.path]
        more = {"continue": str(start + 1)} if start + 1 < len(items) else {}
        return web.json_response({"metadata": more, "items": items[start : start + 1]})

    def judged(self, path: str, spec: Json) -> Json:
        if path == "/apis/authentication.k8s.io/v1/tokenreviews":
            name, _dot, audience = spec["token"].partition(".")
            known = audience in spec["audiences"]
            return {"authenticated": known, "audiences": [audience], "user": {"username": name, "groups": ["all"]}}
        assert path == "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        assert spec["nonResourceAttributes"] == {"path": PATH, "verb": "get"} and spec["groups"] == ["all"]
        return {"allowed": spec["user"] in self.readers}

    def reviews(self) -> int:
        return sum(path.endswith("tokenreviews") for path in self.asked)


class Scene:
    """The report server with a cluster, and a clock that only the test advances."""

    def __init__(self) -> None:
        self.cluster, self.now, self.url = Cluster(fleet()), 1000.0, ""
        self.measurements = ControllerMetrics()
        self.readers: ReaderAuthorizer
        self.kubeconfig = ""

    async def get(self, token: str | None = f"reader.{AUDIENCE}") -> tuple[int, str, Any]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with ClientSession() as session, session.get(self.url + PATH, headers=headers) as found:
            return found.status, await found.text(), found.headers

    def counted(self, outcome: str) -> bool:
        return f'report_requests_total{{outcome="{outcome}"}} 0.0' not in self.measurements.text().decode()


async def started(handler: Any) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(handler, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def run(tmp_path: Path, scenario: Any) -> None:
    async def main() -> None:
        scene = Scene()
        server = web.Application()
        server.router.add_route("*", "/{path:.*}", scene.cluster.answer)
        api, api_url = await started(server)
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(kubeconfig(api_url)))
        client = ApiClient(str(file), user_agent="test")
        application = web.Application()
        scene.kubeconfig = str(file)
        report = FleetReport(str(file), [DRIVER], lambda: scene.now)
        scene.readers = ReaderAuthorizer(client, lambda: scene.now)
        add_report(application, report, scene.readers, scene.measurements)
        runner, scene.url = await started(application)
        try:
            await asyncio.wait_for(scenario(scene), 600)
        finally:
            await runner.cleanup()
            await client.close()
            await api.cleanup()

    asyncio.run(main())


def test_report_allowed_reader_gets_the_report(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        status, text, headers = await scene.get()
        assert status == 200 and headers["Content-Type"].startswith("application/json"), text
        found = json.loads(text)
        jsonschema.validate(found, SCHEMA)
        assert found["totals"]["devices"] == 2 and found["totals"]["waiting"] == 1
        assert found["nodes"][0]["devices"][1]["taints"][0]["rule"] == "r"
        assert scene.counted("served")

    run(tmp_path, scenario)


def test_extended_resource_of_several_classes_is_named(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        assert json.loads((await scene.get())[1])["attention"] == []
        scene.cluster.lists["/apis/resource.k8s.io/v1/deviceclasses"] = [
            {"metadata": {"name": name}, "spec": {"extendedResourceName": resource}}
            for name, resource in (("b", "nvidia.com/gpu"), ("a", "nvidia.com/gpu"), ("c", "example.com/other"))
        ]
        scene.now += KEPT_SECONDS
        found = json.loads((await scene.get())[1])
        jsonschema.validate(found, SCHEMA)
        (note,) = found["attention"]
        assert (note["code"], note["node"]) == ("duplicate-extended-resource", "")
        assert "nvidia.com/gpu is served by several DeviceClasses: a, b." in note["message"]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("token", "status", "output"),
    [
        (None, 401, AUDIENCE),
        ("reader.https://kubernetes.default.svc", 401, AUDIENCE),
        ("", 401, "bearer token"),
        (f"other.{AUDIENCE}", 403, "other may not get"),
    ],
)
def test_report_unauthorized_reader_is_rejected(tmp_path: Path, token: str | None, status: int, output: str) -> None:
    async def scenario(scene: Scene) -> None:
        found = await scene.get(token)
        assert found[0] == status and output in found[1]
        assert not any("resourceslices" in path for path in scene.cluster.asked)
        assert scene.counted("refused")

    run(tmp_path, scenario)


def test_report_repeated_requests_cause_no_more_api_requests(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.get()
        before = len(scene.cluster.asked)
        answers = await asyncio.gather(*(scene.get() for _each in range(5)))
        assert {status for status, _text, _headers in answers} == {200} and len(scene.cluster.asked) == before
        scene.now += KEPT_SECONDS
        await scene.get()
        assert len(scene.cluster.asked) > before and scene.cluster.reviews() == 1

    run(tmp_path, scenario)


def test_report_revoked_permission_ends_soon(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        assert (await scene.get())[0] == 200
        scene.cluster.readers.clear()
        assert (await scene.get())[0] == 200
        scene.now += JUDGED_SECONDS
        assert (await scene.get())[0] == 403
        scene.now += REFUSED_SECONDS
        scene.cluster.away = True
        assert (await scene.get())[0] == 503

    run(tmp_path, scenario)


def test_report_without_the_api_server_is_the_last_one(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        first = (await scene.get())[1]
        scene.cluster.away = True
        scene.now += JUDGED_SECONDS
        status, text, headers = await scene.get()
        assert (status, text) == (200, first) and headers["Warning"].startswith("110")
        assert scene.counted("stale")
        # A reader without a permission, or with an expired one, is refused.
        status, text, headers = await scene.get(f"new.{AUDIENCE}")
        assert status == 503 and headers["Retry-After"] and "cannot say who may read" in text
        scene.now += OUTAGE_SECONDS
        assert (await scene.get())[0] == 503
        scene.cluster.away = False
        status, text, headers = await scene.get()
        assert status == 200 and "Warning" not in headers

    run(tmp_path, scenario)


@pytest.mark.prove
@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_failed_review_of_allowed_reader_keeps_permission(tmp_path: Path, status: int) -> None:
    """Each of these statuses concerns the request of the controller, not the reader: a permitted reader keeps its permission."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.get())[0] == 200
        scene.cluster.reviews_fail_with = status
        scene.now += JUDGED_SECONDS
        assert (await scene.get())[0] == 200
        assert (await scene.get(f"new.{AUDIENCE}"))[0] == 503
        scene.now += OUTAGE_SECONDS
        assert (await scene.get())[0] == 503

    run(tmp_path, scenario)


def test_refused_reader_is_reviewed_again_after_30_seconds(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        for _each in range(5):
            assert (await scene.get(f"other.{AUDIENCE}"))[0] == 403
        assert scene.cluster.reviews() == 1
        scene.cluster.readers.add("other")
        scene.now += REFUSED_SECONDS
        assert (await scene.get(f"other.{AUDIENCE}"))[0] == 200
        assert scene.cluster.reviews() == 2

    run(tmp_path, scenario)


def test_memory_for_refused_tokens_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_authorization, "MOST_READERS", 3)

    async def scenario(scene: Scene) -> None:
        for number in range(6):
            assert (await scene.get(f"other{number}.{AUDIENCE}"))[0] == 403
        assert len(scene.readers._refused) == 3
        assert (await scene.get(f"other5.{AUDIENCE}"))[0] == 403 and scene.cluster.reviews() == 6
        assert (await scene.get(f"other0.{AUDIENCE}"))[0] == 403 and scene.cluster.reviews() == 7

    run(tmp_path, scenario)


def test_flood_of_unknown_tokens_is_rejected_and_known_readers_are_served(tmp_path: Path) -> None:
    """The API server does not answer reviews of unknown tokens: a flood of them is rejected, and known readers are served."""

    async def scenario(scene: Scene) -> None:
        assert (await scene.get())[0] == 200
        scene.cluster.hanging = "random"
        most = reader_authorization.AT_ONCE + reader_authorization.MOST_WAITING
        flood = [asyncio.ensure_future(scene.get(f"random-{number}.{AUDIENCE}")) for number in range(5 * most)]
        # Requests can be rejected before the reviews of the accepted ones arrive at the API server.
        while (
            sum(each.done() for each in flood) < 4 * most or scene.cluster.reviews() < 1 + reader_authorization.AT_ONCE
        ):
            await asyncio.sleep(0.01)
        rejected = [each.result() for each in flood if each.done()]
        assert {status for status, _text, _headers in rejected} == {429}
        assert all(headers["Retry-After"] for _status, _text, headers in rejected)
        scene.now += JUDGED_SECONDS
        assert (await scene.get())[0] == 200, "the reader is reviewed again at the same time"
        assert scene.cluster.reviews() == 2 + reader_authorization.AT_ONCE
        scene.cluster.hanging = ""
        scene.cluster.goes_on.set()
        left = [status for status, _text, _headers in await asyncio.gather(*flood)]
        assert left.count(403) == most and left.count(429) == 4 * most
        assert (await scene.get(f"random-new.{AUDIENCE}"))[0] == 403, "the queue is empty again"

    run(tmp_path, scenario)


def test_report_without_a_complete_read_is_unavailable(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        del scene.cluster.about["/apis/resource.k8s.io"]
        scene.cluster.about["/apis"] = {"kind": "APIGroupList", "groups": [{"name": "apps"}]}
        status, text, _headers = await scene.get()
        assert status == 503 and "serves no version of resource.k8s.io" in text
        assert scene.counted("unavailable")

    run(tmp_path, scenario)


def test_report_that_takes_too_long_is_ended_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(scene: Scene) -> None:
        first = (await scene.get())[1]
        scene.now += KEPT_SECONDS
        monkeypatch.setattr(fleet_module, "MOST_SECONDS", 0.5)
        scene.cluster.is_silent = True
        status, text, headers = await scene.get()
        assert (status, text) == (200, first) and headers["Warning"].startswith("110")
        report = FleetReport(scene.kubeconfig, [DRIVER])
        with pytest.raises(ReportFailed, match=r"not complete after 0\.5 s, so its process was ended"):
            await report.current()

    run(tmp_path, scenario)


def test_report_that_fails_is_not_created_again_for_each_waiting_reader(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        del scene.cluster.about["/apis/resource.k8s.io"]
        answers = await asyncio.gather(*(scene.get() for _each in range(4)))
        assert {status for status, _text, _headers in answers} == {503}
        assert scene.cluster.asked.count("/apis/resource.k8s.io") == 1
        scene.now += FAILED_SECONDS
        assert (await scene.get())[0] == 503
        assert scene.cluster.asked.count("/apis/resource.k8s.io") == 2

    run(tmp_path, scenario)


def test_report_is_sent_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_endpoint, "PART_BYTES", 100)
    sizes: list[int] = []
    write = web.StreamResponse.write

    async def recorded(self: web.StreamResponse, data: bytes) -> None:
        sizes.append(len(data))
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", recorded)

    async def scenario(scene: Scene) -> None:
        status, text, headers = await scene.get()
        jsonschema.validate(json.loads(text), SCHEMA)
        assert status == 200 and headers["Content-Length"] == str(len(text))
        assert len(sizes) == -(-len(text) // 100) and max(sizes) == 100

    run(tmp_path, scenario)


def test_report_that_takes_longer_than_an_idle_connection_lives_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limit, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(connection_limit, "CHECK_SECONDS", 0.05)

    async def scenario(scene: Scene) -> None:
        made = web.Application()
        add_report(made, FleetReport(scene.kubeconfig, [DRIVER]), scene.readers, scene.measurements)
        address = f"127.0.0.1:{free_port()}"
        scene.url = f"http://{address}"
        serving = asyncio.ensure_future(keep_serving(lambda: made, address, "the report"))
        try:
            while True:
                try:
                    status, _text, _headers = await scene.get(None)
                    break
                except ClientConnectorError:
                    await asyncio.sleep(0.02)
            assert status == 401
            # A new process creates the report, which takes longer than 0.2 s.
            status, text, _headers = await scene.get()
            assert status == 200
            jsonschema.validate(json.loads(text), SCHEMA)
        finally:
            serving.cancel()
            await asyncio.wait((serving,))

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("group", "limit", "expected"),
    [
        ("0::/system.slice/a.service", str(4 << 30), 1 << 30),
        ("0::/", str(1 << 30), 1 << 29),
        ("0::/", "max", 1 << 30),
        ("0::/without-a-limit", None, 1 << 30),
    ],
)
def test_report_process_gets_at_most_half_of_the_memory_of_its_group(
    tmp_path: Path, group: str, limit: str | None, expected: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n", encoding="utf-8")
    directory = tmp_path / "sys/fs/cgroup" / group.partition("::/")[2]
    directory.mkdir(parents=True)
    if limit is not None:
        (directory / "memory.max").write_text(f"{limit}\n", encoding="utf-8")
    assert memory_limit(tmp_path) == expected


def test_report_process_lowers_its_priority_and_is_ended_first() -> None:
    program = (
        "import os, resource; from dra_driver.controller import fleet_report; fleet_report._leave_room(); "
        "print(os.nice(0), open('/proc/self/oom_score_adj').read().strip(), resource.getrlimit(resource.RLIMIT_DATA)[0])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert output == [str(min(os.nice(0) + 10, 19)), "1000", str(memory_limit())]
