# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Turns: short work runs one after the other, in the order of requests. Long work does not delay the next turn."""

from __future__ import annotations

import asyncio

import pytest
from dra_driver.claims.locking import FairQueue

#: Longer than any test, and no time (seconds).
EVER, AT_ONCE = 3600.0, 0.0


class Work:
    """Work in a turn that ends when the test sets ``ends``."""

    def __init__(self, turns: FairQueue, entered: list[str], name: str) -> None:
        self._turns, self._entered, self._name = turns, entered, name
        self.ends = asyncio.Event()
        self.fails = False
        self.task = asyncio.ensure_future(self._do())

    async def _do(self) -> None:
        async with self._turns.take():
            self._entered.append(self._name)
            await self.ends.wait()
            if self.fails:
                raise ValueError(self._name)


async def settle() -> None:
    """Run all tasks that can continue."""
    for _each in range(20):
        await asyncio.sleep(0)


def test_short_tasks_run_one_after_the_other_in_request_order() -> None:
    async def scenario() -> None:
        entered: list[str] = []
        turns = FairQueue(EVER)
        work = [Work(turns, entered, name) for name in "abc"]
        for number, each in enumerate(work):
            await settle()
            assert entered == list("abc")[: number + 1]
            each.ends.set()
        await asyncio.gather(*(each.task for each in work))

    asyncio.run(scenario())


def test_task_longer_than_its_turn_continues_during_the_next() -> None:
    async def scenario() -> None:
        entered: list[str] = []
        turns = FairQueue(AT_ONCE)
        work = [Work(turns, entered, name) for name in "abc"]
        deadline = asyncio.get_running_loop().time() + 30
        while len(entered) < len(work):
            assert asyncio.get_running_loop().time() < deadline, f"{entered} have had a turn"
            await asyncio.sleep(0.001)
        assert entered == list("abc") and not any(each.task.done() for each in work)
        # A task that exceeded its turn does not release it twice: one turn is free again, not two.
        for each in work:
            each.ends.set()
        await asyncio.gather(*(each.task for each in work))
        turns._seconds = EVER
        first, second = Work(turns, entered, "d"), Work(turns, entered, "e")
        await settle()
        assert entered == list("abcd")
        first.ends.set()
        second.ends.set()
        await asyncio.gather(first.task, second.task)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["fails", "is cancelled", "is cancelled as it waits"])
def test_failed_or_canceled_task_releases_its_turn(how: str) -> None:
    async def scenario() -> None:
        entered: list[str] = []
        turns = FairQueue(EVER)
        first, second, third = (Work(turns, entered, name) for name in "abc")
        await settle()
        if how == "fails":
            first.fails = True
            first.ends.set()
        elif how == "is cancelled":
            first.task.cancel()
        else:
            second.task.cancel()
            await settle()
            first.ends.set()
        second.ends.set()
        third.ends.set()
        await asyncio.wait([each.task for each in (first, second, third)], timeout=30)
        assert entered == (["a", "c"] if how == "is cancelled as it waits" else ["a", "b", "c"])
        assert third.task.done() and third.task.exception() is None

    asyncio.run(scenario())
