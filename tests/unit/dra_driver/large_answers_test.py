# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Large answers of the API server: pages that are too large, and answers that are decoded while the event loop continues."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from controller_steps import NODES, run
from dra_driver.api import client as client_module
from dra_driver.api.client import ApiClient, ApiError, TooLarge
from dra_driver.core.decoding import decode
from object_server import ObjectServer

LIMIT = 20_000


def put_nodes(server: ObjectServer, sizes: list[int]) -> list[str]:
    """Store a Node with a text of each of these sizes."""
    for number, size in enumerate(sizes):
        server.put(f"{NODES}/n{number:02}", {"spec": {"text": "x" * size}})
    return [f"n{number:02}" for number in range(len(sizes))]


@pytest.mark.parametrize("sizes", [[3000] * 12, [10] * 6 + [15_000] * 6, [15_000, *[10] * 11]])
def test_list_with_pages_above_the_limit_is_read_in_smaller_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr("dra_driver.api.exchange.MOST_BYTES", LIMIT)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        names = put_nodes(server, sizes)
        found = await client.list_all(NODES, page=12)
        assert [each["metadata"]["name"] for each in found] == names

    run(tmp_path, scenario)


def test_list_with_one_object_above_the_limit_fails_and_names_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.api.exchange.MOST_BYTES", LIMIT)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        put_nodes(server, [10, LIMIT, 10])
        with pytest.raises(TooLarge, match=f"GET {NODES} cannot be read: the answer has more than {LIMIT} bytes"):
            await client.list_all(NODES, page=3)
        with pytest.raises(ApiError) as failed:
            await client.get(f"{NODES}/n01")
        assert failed.value.is_of_server, "callers that retry other objects treat it as a fault of the server"

    run(tmp_path, scenario)


@pytest.mark.parametrize(("size", "in_thread"), [(10, False), (client_module.THREAD_BYTES, True)])
def test_large_answer_is_decoded_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, in_thread: bool
) -> None:
    threads: list[int] = []

    def recorded(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return decode(*arguments, **options)

    monkeypatch.setattr(client_module, "decode", recorded)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        (name,) = put_nodes(server, [size])
        assert (await client.get(f"{NODES}/{name}"))["metadata"]["name"] == name
        async for event in client.watch(NODES, resource_version="0", opened=lambda: threads.clear() or put(server)):
            assert event.object["metadata"]["name"] == "n00"
            break
        assert [each != threading.get_ident() for each in threads] == [in_thread]

    def put(server: ObjectServer) -> None:
        assert len(threads) == 0
        put_nodes(server, [size])

    run(tmp_path, scenario)


def test_decoding_of_a_long_text_lets_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython's scanner holds the interpreter lock, so a thread alone would block the event loop: other threads run nevertheless."""
    claims = [{"metadata": {"name": f"claim-{number}", "labels": {"a": "b"}}} for number in range(60_000)]
    payload = json.dumps({"kind": "ResourceClaimList", "items": claims}).encode()
    turns, is_done = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not is_done.is_set():
            turns += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    monkeypatch.setattr("dra_driver.core.decoding._is_nested_deeper", lambda _value, _levels: False)  # it yields
    other = threading.Thread(target=take_turns)
    sys.setswitchinterval(1e-4)
    try:
        other.start()
        before = turns
        assert len(decode(payload).value["items"]) == len(claims)
        assert turns - before > 20
    finally:
        is_done.set()
        other.join()
        sys.setswitchinterval(interval)
