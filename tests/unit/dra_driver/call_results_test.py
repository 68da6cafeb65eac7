# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Reports of a successful claim follow its answer, whether the caller waits or not. The device's lock is free before."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from claim_steps import SMALL, prepare_all
from dra_driver.claims import operations
from dra_driver.claims.call_results import ClaimWorkRunner, DeferredCallbacks
from dra_driver.claims.store.records import ClaimReference
from dra_driver.core.errors import AcceleratorError
from dra_driver.kubelet.server import PluginServer
from dra_driver.metrics import Metrics, Stopwatch
from dra_driver.protocol import dra_v1_pb2, dra_v1_pb2_grpc
from machine_model import Claims, Node

LONG = 30.0


class Nothing:
    """Health without any changes to report."""

    devices = ()

    async def changed(self) -> None:
        await asyncio.Event().wait()


class Requests:
    """Metrics that only record calls."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[str, str]] = []

    def request(self, method: str, outcome: str, _seconds: float) -> None:
        self.outcomes.append((method, outcome))


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a path short enough for the names of sockets."""
    return tmp_path_factory.mktemp("k")


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.getMessage() == "prepared claim"]


def served(
    directory: Path,
    scenario: Callable[[Node, Claims, Requests, Any], Awaitable[None]],
    reached: Any = lambda _stage: None,
) -> None:
    async def main() -> None:
        claims, requests = Claims(), Requests()
        node = Node(directory, claims, reached=reached)
        await node.start()
        socket = f"{directory}/plugins/gpu.nvidia.com/dra.sock"
        plugin = PluginServer(
            node.service,
            health=Nothing(),
            driver="gpu.nvidia.com",
            service_path=socket,
            registration_path=f"{directory}/plugins_registry/gpu.nvidia.com-reg.sock",
            metrics=requests,  # type: ignore[arg-type]
        )
        await plugin.start()
        try:
            async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
                await scenario(node, claims, requests, dra_v1_pb2_grpc.DRAPluginStub(channel))
        finally:
            await plugin.stop()
            node.close()

    asyncio.run(asyncio.wait_for(main(), 2 * LONG))


def prepare_request(claim: Any) -> Any:
    message = dra_v1_pb2.Claim(namespace=claim.namespace, name=claim.name, uid=claim.uid)
    return dra_v1_pb2.NodePrepareResourcesRequest(claims=[message])


def test_prepare_reports_follow_the_answer(short: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(node: Node, claims: Claims, requests: Requests, stub: Any) -> None:
        claim = claims.allocate("a", SMALL)
        answer = await stub.NodePrepareResources(prepare_request(claim))
        assert not answer.claims[claim.uid].error
        while not requests.outcomes:
            await asyncio.sleep(0)
        assert requests.outcomes == [("NodePrepareResources", "success")]
        (line,) = lines(caplog)
        assert (line["claim"], line["devices"]) == ("default/a", [SMALL]) and line["total_ms"] >= line["files_ms"] > 0

    served(short, scenario)


def test_prepare_canceled_call_is_logged(short: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    entered, go_on = threading.Event(), threading.Event()

    def reached(stage: str) -> None:
        if stage == "recording-prepared":
            entered.set()
            assert go_on.wait(LONG)

    async def scenario(node: Node, claims: Claims, requests: Requests, stub: Any) -> None:
        claim, canceled, prepare = claims.allocate("a", SMALL), asyncio.Event(), node.service.prepare

        async def noting_the_cancellation(*arguments: Any) -> Any:
            try:
                return await prepare(*arguments)
            except asyncio.CancelledError:
                canceled.set()
                raise

        node.service.prepare = noting_the_cancellation  # type: ignore[method-assign]
        call = stub.NodePrepareResources(prepare_request(claim))
        waiting = asyncio.ensure_future(call)
        assert await asyncio.to_thread(entered.wait, LONG)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await canceled.wait()  # the server cancels the call later than the client
        assert not lines(caplog)
        go_on.set()
        while not lines(caplog):
            await asyncio.sleep(0.01)
        assert node.store.claims[claim.uid].prepared and not requests.outcomes, "no call had an answer"

    served(short, scenario, reached)


def test_deferred_callbacks_after_the_answer_run_at_once() -> None:
    afterwards, reported = DeferredCallbacks(), []
    afterwards.run_later(lambda: reported.append(1))
    assert reported == []
    afterwards.run_all_now()
    afterwards.run_later(lambda: reported.append(2))
    afterwards.run_all_now()
    assert reported == [1, 2]


def test_device_lock_is_free_while_files_of_the_claim_are_written(tmp_path: Path) -> None:
    threads: dict[str, str] = {}
    requested: list[bool] = []

    def reached(stage: str) -> None:
        threads[stage] = threading.current_thread().name
        if stage == "recording-prepared":
            other = threading.Thread(
                target=lambda: requested.append(bool(node.backend.device(node.gpus.template(0).uuid)))
            )
            other.start()
            other.join(LONG)

    async def main() -> None:
        await node.start()
        assert await prepare_all(node, claims.allocate("a", SMALL)) == [""]
        assert requested == [True], "a query of the device has an answer during the write"
        visit = ("planned", "partition-created", "recording-prepared", "cdi-written")
        assert len({threads[stage] for stage in visit}) == 1, "all of it on one thread"

    claims = Claims()
    node = Node(tmp_path, claims, reached=reached)
    try:
        asyncio.run(main())
    finally:
        node.close()


def test_answers_of_one_call_are_separate_for_each_claim() -> None:
    """The call ends with its last claim. A duplicate claim is prepared once, and a claim that cannot start does not delay the others."""
    done: list[str] = []

    class Reporter:
        def failed(self, claim: ClaimReference, verb: str, error: AcceleratorError) -> None:
            done.append(f"{verb} of {claim.uid}: {error.message}")

    async def work(reference: ClaimReference, _watch: Stopwatch) -> None:
        await asyncio.sleep({"quick": 0.0, "slow": 0.05}[reference.name])
        done.append(reference.uid)
        if reference.uid == "b":
            raise AcceleratorError("No")

    def claim(uid: str, name: str) -> ClaimReference:
        return ClaimReference(namespace="default", name=name, uid=uid)

    async def main() -> None:
        answers = ClaimWorkRunner(Reporter(), Metrics())
        several = [claim("a", "slow"), claim("b", "quick"), claim("a", "slow"), claim("/", "quick")]
        outcomes = await answers.run_all(several, "Prepare", work)
        assert done == ["b", "Prepare of b: No", "a"]
        assert {uid: outcome.code for uid, outcome in outcomes.items()} == {
            "a": "",
            "b": AcceleratorError.default_code,
            "/": "invalid-claim",
        }
        assert answers.calls_in_progress == 0 and await answers.run_all([], "Prepare", work) == {}

        call = asyncio.ensure_future(answers.run_all([claim("c", "slow")], "Prepare", work))
        await asyncio.sleep(0)
        (begun,) = answers._running
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(call, LONG)
        assert "c" not in done

    asyncio.run(main())


def test_driver_ready_at_the_end_of_the_wait_serves_waiting_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        await node.start()
        node.service.set_ready("The driver is starting")

        async def ends(waiting: Any, _seconds: float) -> None:
            waiting.close()
            node.service.set_ready()
            raise asyncio.TimeoutError

        with monkeypatch.context() as patch:
            patch.setattr(operations, "within", ends)
            await node.service.wait_until_ready()

    claims = Claims()
    node = Node(tmp_path, claims)
    try:
        asyncio.run(main())
    finally:
        node.close()
