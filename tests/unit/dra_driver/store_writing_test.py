# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Threads that write to the store: one writes for all waiting ones, each gets its own result, and no thread waits for an ended one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dra_driver.claims.store.files import StoreError
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.tables import Change
from store_model import commit, record


def test_many_changes_at_once_share_transactions(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    transactions = []
    real = store._transaction
    store._transaction = lambda changes: (transactions.append(len(list(changes))), real(changes))  # type: ignore
    commit(store, *(Change(put=record(f"u{number}")) for number in range(64)))
    assert sum(transactions) == 64
    assert len(transactions) <= 10
    assert len(store.claims) == 64
    store.close()


def test_concurrent_threads_write_and_read_their_own_records(tmp_path: Path) -> None:
    """The writing thread includes the changes of waiting threads. No change is lost, and the event loop sees its change afterwards."""
    store = Store.open(str(tmp_path / "state.db"))
    transactions = []
    real = store._transaction
    store._transaction = lambda changes: (transactions.append(len(list(changes))), real(changes))  # type: ignore

    async def main() -> None:

        async def on_a_thread(uid: str) -> None:
            await asyncio.to_thread(store.write, Change(put=record(uid)))
            assert uid in store.claims
            await asyncio.to_thread(store.write, Change(delete=uid, meta={uid: "gone"}))
            assert uid not in store.claims
            assert store.meta[uid] == "gone"

        async def on_the_loop(uid: str) -> None:
            await store.commit(Change(put=record(uid)))
            assert uid in store.claims

        work = [on_a_thread(f"t{number}") for number in range(40)] + [on_the_loop(f"l{number}") for number in range(40)]
        await asyncio.wait_for(asyncio.gather(*work), 60)

    asyncio.run(main())
    assert sum(transactions) == 120
    assert set(store.claims) == {f"l{number}" for number in range(40)}
    store.close()
    again = Store.open(str(tmp_path / "state.db"))
    assert (again.claims, again.meta) == (store.claims, store.meta)
    again.close()


def test_read_claims_do_not_change_while_a_thread_writes(tmp_path: Path) -> None:
    """A reader of the claims never sees a partial change, and needs no lock. The next read has the change, on any thread."""
    store = Store.open(str(tmp_path / "state.db"))
    commit(store, *(Change(put=record(f"u{number}"), meta={f"m{number}": "1"}) for number in range(8)))
    claims, meta = store.claims, store.meta
    seen = []
    for uid in claims:
        writing = threading.Thread(target=store.write, args=(Change(delete=uid, meta={f"m{uid[1:]}": None}),))
        writing.start()
        writing.join(60)
        assert uid not in store.claims and f"m{uid[1:]}" not in store.meta
        seen.append(uid)
    assert len(seen) == len(claims) == 8 and set(meta) >= {f"m{number}" for number in range(8)}
    assert not store.claims
    store.close()


def test_change_during_a_write_is_written_without_another_call(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    writes, go_on = threading.Event(), threading.Event()
    real = store._write_changes

    def slowly(changes: Any) -> None:
        if not writes.is_set():
            writes.set()
            assert go_on.wait(60)
        real(changes)

    store._write_changes = slowly  # type: ignore[method-assign]

    async def main() -> None:
        first = asyncio.ensure_future(asyncio.to_thread(store.write, Change(put=record("first"))))
        assert await asyncio.to_thread(writes.wait, 60)
        others = [asyncio.ensure_future(store.commit(Change(put=record("of the loop"))))]
        others += [asyncio.ensure_future(asyncio.to_thread(store.write, Change(put=record("of a thread"))))]
        await asyncio.sleep(0.2)
        assert not any(each.done() for each in (first, *others))
        go_on.set()
        await asyncio.wait_for(asyncio.gather(first, *others), 60)

    asyncio.run(main())
    assert set(store.claims) == {"first", "of the loop", "of a thread"}
    store.close()


@pytest.mark.parametrize("is_leading", [True, False])
def test_unserializable_change_raises_and_changes_nothing(tmp_path: Path, is_leading: bool) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    bad = Change(put=replace(record("bad"), created_at=float("nan")))

    async def main() -> None:
        if not is_leading:
            store._writing.acquire()
        work = asyncio.gather(
            *(asyncio.to_thread(store.write, change) for change in (bad, Change(put=record("u1")))),
            return_exceptions=True,
        )
        if not is_leading:
            while store._queue.qsize() < 2:
                await asyncio.sleep(0.01)
            store._writing.release()
            store._wake.put(True)
        failed, done = await asyncio.wait_for(work, 60)
        assert isinstance(failed, StoreError)
        assert done is None

    asyncio.run(main())
    assert set(store.claims) == {"u1"}
    store.close()


def test_unserializable_change_fails_alone(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))

    async def main() -> list[Any]:
        changes = (Change(put=record("u1")), Change(put=replace(record("bad"), created_at=float("nan"))))
        async with asyncio.timeout(10) if hasattr(asyncio, "timeout") else contextlib.AsyncExitStack():
            return await asyncio.gather(
                *(store.commit(change) for change in (*changes, Change(put=record("u2")))), return_exceptions=True
            )

    good, bad, also_good = asyncio.run(main())
    assert (good, also_good) == (None, None)
    assert isinstance(bad, StoreError)
    commit(store, Change(put=record("later")))
    assert set(store.claims) == {"u1", "u2", "later"}
    store.close()


def test_ended_writer_leaves_no_waiting_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(str(tmp_path / "state.db"))

    def ends(changes: Any) -> None:
        raise SystemExit("out of memory")

    monkeypatch.setattr(store, "_write_changes", ends)

    async def main() -> None:
        for number in range(3):
            with pytest.raises(StoreError, match="can no longer be written"):
                await asyncio.wait_for(store.commit(Change(put=record(f"u{number}"))), 10)
            with pytest.raises(StoreError, match="can no longer be written"):
                await asyncio.wait_for(asyncio.to_thread(store.write, Change(put=record())), 10)

    asyncio.run(main())
    store.close()


def test_ended_writer_thread_leaves_no_waiting_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(str(tmp_path / "state.db"))

    def ends(changes: Any) -> None:
        raise SystemExit("out of memory")

    monkeypatch.setattr(store, "_write_changes", ends)

    async def main() -> None:
        work = [asyncio.to_thread(store.write, Change(put=record(f"u{number}"))) for number in range(5)]
        failed = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 10)
        assert [type(each) for each in failed] == [StoreError] * 5
        with pytest.raises(StoreError, match="can no longer be written"):
            await asyncio.wait_for(store.commit(Change(put=record())), 10)

    asyncio.run(main())
    store.close()


def test_change_during_the_end_of_the_writer_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer has refused the waiting changes, and its thread is still running: a new change is refused at once."""
    store = Store.open(str(tmp_path / "state.db"))
    refuse, refused, end = store._fail_queued, threading.Event(), threading.Event()

    def lingers() -> None:
        refuse()
        if threading.current_thread() is store._thread:
            refused.set()
            assert end.wait(60)

    def ends(changes: Any) -> None:
        raise SystemExit("out of memory")

    monkeypatch.setattr(store, "_write_changes", ends)
    monkeypatch.setattr(store, "_fail_queued", lingers)

    async def main() -> None:
        with pytest.raises(StoreError, match="can no longer be written"):
            await store.commit(Change(put=record("u0")))
        assert await asyncio.to_thread(refused.wait, 60)
        late = asyncio.ensure_future(store.commit(Change(put=record("u1"))))
        done, _waiting = await asyncio.wait([late], timeout=10)
        assert done and isinstance(late.exception(), StoreError)

    try:
        asyncio.run(main())
    finally:
        end.set()
        store.close()


def test_closed_store_rejects_changes(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "state.db"))
    store.close()

    async def main() -> None:
        with pytest.raises(StoreError, match="closed"):
            await asyncio.wait_for(store.commit(Change(put=record())), 10)
        with pytest.raises(StoreError, match="closed"):
            await asyncio.wait_for(asyncio.to_thread(store.write, Change(put=record())), 10)

    asyncio.run(main())


def test_change_without_durability_does_not_sync_and_the_next_one_does(tmp_path: Path) -> None:
    """SQLite's synchronous level shows the kind of commit: 2 waits for the disk, 1 leaves that to the next commit."""
    store = Store.open(str(tmp_path / "state.db"))

    def levels(*changes: Change) -> list[int]:
        found: list[int] = []
        real = store._transaction

        def seen(group: Any) -> None:
            real(group)
            found.append(store._connection.execute("PRAGMA synchronous").fetchone()[0])

        store._transaction = seen  # type: ignore[method-assign]
        try:
            for change in changes:
                store.write(change)
        finally:
            store._transaction = real  # type: ignore[method-assign]
        return found

    begun, done = Change(put=record("a"), durable=False), Change(put=record("a"))
    assert levels(begun, done, done, begun, Change(delete="a")) == [1, 2, 2, 1, 2]
    # A change in the same transaction as a durable one is durable as well.
    store._write_changes([Change(put=record("b"), durable=False), Change(put=record("c"))])
    assert store._connection.execute("PRAGMA synchronous").fetchone()[0] == 2
    store.write(begun)
    store.close()
    again = Store.open(str(tmp_path / "state.db"))
    assert set(again.claims) == {"a", "b", "c"}
    again.close()
