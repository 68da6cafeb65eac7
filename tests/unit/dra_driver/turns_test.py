# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Turns: quick work goes one after the other, in the order of asking; what is not quick keeps nobody waiting."""

from __future__ import annotations

import asyncio

import pytest
from dra_driver.claims.turns import Turns

#: Longer than any test, and no time at all.
EVER, AT_ONCE = 3600.0, 0.0


class Work:
    """Something that is done in a turn until it is told to end."""

    def __init__(self, turns: Turns, entered: list[str], name: str) -> None:
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
    """Let everything go on that can."""
    for _each in range(20):
        await asyncio.sleep(0)


def test_quick_work_goes_one_after_the_other_in_the_order_of_asking() -> None:
    async def scenario() -> None:
        entered: list[str] = []
        turns = Turns(EVER)
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
        turns = Turns(AT_ONCE)
        work = [Work(turns, entered, name) for name in "abc"]
        deadline = asyncio.get_running_loop().time() + 30
        while len(entered) < len(work):
            assert asyncio.get_running_loop().time() < deadline, f"{entered} have had a turn"
            await asyncio.sleep(0.001)
        assert entered == list("abc") and not any(each.task.done() for each in work)
        # Whose turn was over before it ended gives none back twice: there is one again, and no second one.
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
def test_who_does_not_come_to_its_end_gives_its_turn_back(how: str) -> None:
    async def scenario() -> None:
        entered: list[str] = []
        turns = Turns(EVER)
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
