# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Errors of the API server while claims are prepared before their pods are bound."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable
from typing import Any

import pytest
from dra_driver.api.errors import ApiError
from dra_driver.claims.call_results import Outcome
from dra_driver.claims.pre_binding_lists import ListedClaim
from dra_driver.core.dra.device_json import PREPARED_CONDITION
from dra_driver.supervisors.pre_binding import PreBindingPreparer

RESULT = {"driver": "d", "pool": "n", "device": "x", "bindingConditions": [PREPARED_CONDITION]}


class Clock:
    """A clock that the sleeps of the tasks advance, so that no test waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []
        self._sleep = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", self.sleep)
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    async def sleep(self, seconds: float) -> None:
        waker = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, waker))
        await waker

    async def advance(self, seconds: float) -> None:
        """Advance the clock by ``seconds``, and wake each sleeping task at its time."""
        end = self.now + seconds
        while True:
            for _turn in range(50):
                await self._sleep(0)
            due = min((each for each in self._sleepers if not each[1].done()), key=lambda each: each[0], default=None)
            if due is None or due[0] > end:
                break
            self._sleepers.remove(due)
            self.now = max(self.now, due[0])
            due[1].set_result(None)
        self.now = end


class Api:
    """An API that answers reads of claims, or fails with a status."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.status = 0
        self.reads: list[float] = []
        self.applied: list[Any] = []

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        self.reads.append(self._clock.now)
        if self.status:
            raise ApiError("The API server is overloaded", status=self.status)
        metadata = {"namespace": namespace, "name": name, "uid": f"u-{name}"}
        return {"metadata": metadata, "status": {"allocation": {"devices": {"results": [RESULT]}}}}

    async def apply_claim_devices(self, _claim: Any, _driver: str, entries: Any) -> None:
        self.applied.append(entries)


class Statuses:
    def __init__(self) -> None:
        self.written: list[Any] = []

    async def write_now(self, record: Any) -> None:
        self.written.append(record)


def run(monkeypatch: pytest.MonkeyPatch, claims: int, codes: Callable[[float], str], scenario: Any) -> None:
    """Handle ``claims`` listed claims. ``codes`` returns the error code of an attempt at this time, "" for success."""

    async def main() -> None:
        clock = Clock(monkeypatch)
        api, statuses, record = Api(clock), Statuses(), object()

        async def prepare_ahead(_claim: Any) -> Outcome:
            code = codes(clock.now - 1000.0)
            return Outcome(error="The attempt failed", code=code) if code else Outcome(record=record)  # type: ignore[arg-type]

        service = types.SimpleNamespace(driver="d", prepare_ahead=prepare_ahead)
        ahead = PreBindingPreparer(
            service,  # type: ignore[arg-type]
            client=None,  # type: ignore[arg-type]
            api=api,
            statuses=statuses,  # type: ignore[arg-type]
            namespace="ns",
            node_name="n",
            pool="n",
            snapshots=None,  # type: ignore[arg-type]
            set_binding=lambda _possible: None,
            report_problem=lambda *_problem: None,
        )
        listed = [ListedClaim("a", f"c{number}", f"u-c{number}", "0" * 8) for number in range(claims)]
        tasks = [asyncio.ensure_future(ahead._prepare_listed(each)) for each in listed]
        try:
            await scenario(clock, api, statuses)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_reads_of_claims_server_fails_all_claims_share_the_pause(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    async def scenario(clock: Clock, api: Api, statuses: Statuses) -> None:
        api.status = status
        await clock.advance(18)
        assert len(api.reads) <= 15
        await clock.advance(600)
        before = len(api.reads)
        await clock.advance(600)
        assert 9 <= len(api.reads) - before <= 21
        api.status = 0
        await clock.advance(61)
        assert len(statuses.written) == 56

    run(monkeypatch, 56, lambda _now: "", scenario)


@pytest.mark.parametrize("code", ["api-error", "api-unreachable", "resource-api-missing"])
def test_prepare_api_server_fails_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    async def scenario(clock: Clock, api: Api, statuses: Statuses) -> None:
        await clock.advance(3660)
        assert api.applied == [] and statuses.written == []
        assert len(api.reads) <= 110  # pauses of at least 30 s, 45 s on average
        await clock.advance(100)
        assert api.applied == [] and len(statuses.written) == 1

    run(monkeypatch, 1, lambda now: code if now < 3660 else "", scenario)


def test_prepare_time_of_api_errors_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(clock: Clock, api: Api, _statuses: Statuses) -> None:
        await clock.advance(650)
        assert api.applied == []
        await clock.advance(100)
        (entries,) = api.applied
        assert entries[0]["conditions"][0]["reason"] == "DeviceBusy"

    run(monkeypatch, 1, lambda now: "api-error" if now < 600 else "device-busy", scenario)
