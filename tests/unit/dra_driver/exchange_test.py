# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""HTTP requests over persistent connections, with scripted socket servers."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from dra_driver.api import client
from dra_driver.api import exchange as exchange_module
from dra_driver.api.exchange import Answer, Exchange, InvalidHttpResponse
from dra_driver.controller.serving_certificate import utc_now
from dra_driver.core.certificates import create_ca, create_serving_certificate
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import Peer, Script, Server, answering, silent

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"
PACKED = gzip.compress(b"ok" * 1000, mtime=0)


def run(server: Server, scenario: Callable[[Exchange], Awaitable[None]], *, connections: int = 4) -> None:
    async def main() -> None:
        url = await server.start()
        exchange = Exchange(url, None, headers={"User-Agent": "test"}, connections=connections)
        try:
            await scenario(exchange)
        finally:
            exchange.close()
            server.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


async def get(exchange: Exchange, target: str = "/a", seconds: float = 30) -> Answer:
    return await exchange.ask("GET", target, seconds=seconds)


@pytest.mark.parametrize(
    ("pieces", "status", "payload"),
    [
        ([OK], 200, b"ok"),
        ([OK[:20], OK[20:41], OK[41:]], 200, b"ok"),
        ([CHUNKED], 200, b"ok"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], 204, b""),
        ([b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK], 200, b"ok"),
        ([b"HTTP/1.1 404 Not Found\r\nContent-Length: 1\r\nRetry-After: 7\r\n\r\nx"], 404, b"x"),
        (
            [b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED), PACKED],
            200,
            b"ok" * 1000,
        ),
        ([b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Length: 2\r\n\r\nok"], 200, b"ok"),
    ],
)
def test_response_with_any_framing_is_read_and_the_connection_kept(
    pieces: list[bytes], status: int, payload: bytes
) -> None:
    server = Server(answering(*pieces))

    async def scenario(exchange: Exchange) -> None:
        for _time in range(3):
            answer = await get(exchange)
            assert (answer.status, answer.payload) == (status, payload)
            assert answer.headers.get("retry-after", "") == ("7" if status == 404 else "")
        assert server.connections == 1

    run(server, scenario)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\n\r\nok",
    ],
)
def test_response_can_end_with_its_connection(answer: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer)

    server = Server(script)

    async def scenario(exchange: Exchange) -> None:
        for number in (1, 2):
            assert (await get(exchange)).payload == b"ok"
            assert server.connections == number

    run(server, scenario)


def test_request_has_the_method_path_headers_and_body() -> None:
    server = Server(answering(OK))

    async def scenario(exchange: Exchange) -> None:
        headers = {"Authorization": "Bearer a", "Content-Type": "application/json"}
        await exchange.ask("POST", "/b?c=d", headers=headers, body=b"{}", seconds=30)
        lines, _blank, body = server.requests[0].partition("\r\n\r\n")
        first, *others = lines.split("\r\n")
        assert (first, body) == ("POST /b?c=d HTTP/1.1", "{}")
        assert [line for line in others if not line.startswith("Host: 127.0.0.1:")] == [
            "Accept-Encoding: gzip",
            "User-Agent: test",
            "Authorization: Bearer a",
            "Content-Type: application/json",
            "Content-Length: 2",
        ]

    run(server, scenario)


def test_request_path_follows_the_path_of_the_server() -> None:
    server = Server(answering(OK))

    async def scenario() -> None:
        exchange = Exchange(f"{await server.start()}/clusters/one/", None, connections=1)
        assert (await get(exchange, "/version")).status == 200
        assert server.requests[0].startswith("GET /clusters/one/version HTTP/1.1\r\n")
        exchange.close()
        server.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def once(peer: Peer) -> None:
    """Answer one request, and close the connection when the next request has arrived."""
    await peer.request()
    await peer.send(OK)
    await peer.request()


async def once_and_idle(peer: Peer) -> None:
    """Answer one request, and close the connection."""
    await peer.request()
    await peer.send(OK)


@pytest.mark.parametrize("script", [once, once_and_idle])
def test_idempotent_request_on_a_closed_connection_is_repeated(script: Script) -> None:
    server = Server(script, answering(OK))

    async def scenario(exchange: Exchange) -> None:
        await get(exchange)
        await asyncio.sleep(0.05 if script is once_and_idle else 0)
        assert (await get(exchange)).payload == b"ok"
        assert server.connections == 2

    run(server, scenario)


def test_modifying_request_is_not_sent_twice() -> None:
    server = Server(once, answering(OK))

    async def scenario(exchange: Exchange) -> None:
        await get(exchange)
        with pytest.raises(ConnectionError, match="closed"):
            await exchange.ask("POST", "/a", body=b"{}", seconds=30)
        assert [request.split()[0] for request in server.requests] == ["GET", "POST"]

    run(server, scenario)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_connection_that_is_closed_before_the_request_is_an_error(method: str) -> None:
    """With plain HTTP, the event loop reports the end of the connection before the request is written: it is an error."""

    async def script(_peer: Peer) -> None:
        return

    server = Server(script)

    async def scenario(exchange: Exchange) -> None:
        connect = exchange._connect

        async def connect_and_lose(until: float) -> Any:
            connection = await connect(until)
            while connection.is_open:
                await asyncio.sleep(0.01)
            return connection

        exchange._connect = connect_and_lose  # type: ignore[method-assign]
        with pytest.raises(ConnectionResetError, match="closed"):
            await exchange.ask(method, "/a", seconds=30)
        assert exchange._idle == [] and server.connections == 1

    run(server, scenario)


def test_request_on_a_new_closed_connection_is_an_error() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()

    server = Server(script)

    async def scenario(exchange: Exchange) -> None:
        with pytest.raises(ConnectionError):
            await get(exchange)
        assert server.connections == 1

    run(server, scenario)


@pytest.mark.parametrize("part", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no", CHUNKED[:-4], b"HTTP/1.1 200"])
def test_partial_response_is_an_error_and_is_not_repeated(part: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        await peer.send(part)

    server = Server(script, answering(OK))

    async def scenario(exchange: Exchange) -> None:
        await get(exchange)
        with pytest.raises(ConnectionError):
            await get(exchange)
        assert len(server.requests) == 2

    run(server, scenario)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + PACKED[:20],
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    ],
)
def test_invalid_response_is_rejected(rubbish: bytes) -> None:
    async def scenario(exchange: Exchange) -> None:
        with pytest.raises(InvalidHttpResponse):
            await get(exchange)

    run(Server(answering(rubbish)), scenario)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED) + PACKED,
        b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + (b"200\r\n" + b"x" * 512 + b"\r\n") * 4
        + b"0\r\n\r\n",
    ],
    ids=["gzip", "length", "chunked"],
)
def test_answer_above_the_limit_is_refused(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has 2,000 bytes, which gzip compresses to a few: a small answer could otherwise unpack to gigabytes."""
    monkeypatch.setattr("dra_driver.api.exchange.MOST_BYTES", 1999)

    async def scenario(exchange: Exchange) -> None:
        with pytest.raises(InvalidHttpResponse, match="more than 1999 bytes"):
            await get(exchange)

    run(Server(answering(answer)), scenario)


def test_answer_at_the_limit_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.api.exchange.MOST_BYTES", 2000)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED)

    async def scenario(exchange: Exchange) -> None:
        assert (await get(exchange)).payload == b"ok" * 1000

    run(Server(answering(head + PACKED)), scenario)


@pytest.mark.parametrize("more", [b"x", OK, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"])
def test_data_after_a_response_is_discarded(more: bytes) -> None:
    server = Server(answering(OK + more), answering(OK))

    async def scenario(exchange: Exchange) -> None:
        for _time in range(3):
            try:
                assert (await get(exchange)).payload == b"ok"
            except InvalidHttpResponse:
                assert more == b"x"
        assert server.connections > 1

    run(server, scenario)


def test_silent_server_times_out_and_its_connection_is_closed() -> None:
    server = Server(silent, answering(OK))

    async def scenario(exchange: Exchange) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await get(exchange, seconds=0.1)
        assert (await get(exchange)).payload == b"ok"
        assert server.connections == 2

    run(server, scenario)


def test_timeout_includes_the_wait_for_a_connection() -> None:
    server = Server(silent)

    async def scenario(exchange: Exchange) -> None:
        first = asyncio.ensure_future(get(exchange))
        await asyncio.sleep(0.05)
        with pytest.raises(asyncio.TimeoutError):
            await get(exchange, seconds=0.1)
        first.cancel()
        await asyncio.wait((first,))
        assert server.connections == 1

    run(server, scenario, connections=1)


def test_connection_limit_holds_and_all_requests_get_responses() -> None:
    server = Server(answering(OK))

    async def scenario(exchange: Exchange) -> None:
        answers = await asyncio.gather(*(get(exchange) for _each in range(50)))
        assert [answer.payload for answer in answers] == [b"ok"] * 50
        assert server.most == server.connections == 3

    run(server, scenario, connections=3)


def test_cancelled_request_does_not_affect_other_requests() -> None:
    """A request is canceled while it waits for a connection, when it just got one, or while it waits for an answer: others are unaffected."""
    held = asyncio.Event()

    async def script(peer: Peer) -> None:
        while request := await peer.request():
            if "/held" in request:
                await held.wait()
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(request), request.encode())

    server = Server(script)

    async def scenario(exchange: Exchange) -> None:
        first = asyncio.ensure_future(get(exchange, "/held"))
        await asyncio.sleep(0.05)
        waiting = [asyncio.ensure_future(get(exchange, f"/{number}")) for number in range(4)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()
        first.cancel()
        await asyncio.sleep(0)  # the second request gets the connection, but has not run yet
        waiting[1].cancel()
        held.set()
        for number in (2, 3):
            assert (await waiting[number]).payload.startswith(b"GET /%d " % number)
        await asyncio.wait((first, *waiting))
        assert [each.cancelled() for each in (first, *waiting)] == [True, True, True, False, False]
        assert (await get(exchange, "/last")).payload.startswith(b"GET /last ")

    run(server, scenario, connections=1)


def test_connection_idle_for_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(answering(OK))

    async def scenario(exchange: Exchange) -> None:
        await get(exchange)
        monkeypatch.setattr(exchange_module, "IDLE_SECONDS", 0.0)
        await get(exchange)
        assert server.connections == 2

    run(server, scenario)


def test_close_running_request_completes_and_its_connection_closes() -> None:
    let = asyncio.Event()

    async def script(peer: Peer) -> None:
        while await peer.request():
            await let.wait()
            await peer.send(OK)

    server = Server(script)

    async def scenario(exchange: Exchange) -> None:
        under_way = asyncio.ensure_future(get(exchange))
        while not server.requests:
            await asyncio.sleep(0.01)
        exchange.close()
        let.set()
        assert (await under_way).payload == b"ok"
        while server.open:
            await asyncio.sleep(0.01)

    run(server, scenario)


@pytest.mark.parametrize(
    ("target", "header"),
    [
        ("/a b", "x"),
        ("/a\r\nX: y", "x"),
        ("a", "x"),
        ("", "x"),
        ("/ä", "x"),
        ("/a", "x\r\nX: y"),
        ("/a", "x\ny"),
        ("/a", "\N{SNOWMAN}"),
    ],
)
def test_header_injection_is_rejected_before_sending(target: str, header: str) -> None:
    server = Server(answering(OK))

    async def scenario(exchange: Exchange) -> None:
        with pytest.raises(ValueError, match="cannot be made of"):
            await exchange.ask("GET", target, headers={"Authorization": header}, seconds=30)
        assert server.connections == 0
        await get(exchange)

    run(server, scenario, connections=1)


def test_request_without_a_server_raises_connection_error() -> None:
    server = Server(answering(OK))

    async def scenario(exchange: Exchange) -> None:
        server.stop()
        for _time in range(2):
            with pytest.raises(OSError, match="Connect call failed"):
                await get(exchange)

    run(server, scenario, connections=1)


def test_certificate_of_another_name_is_rejected(tmp_path: Path) -> None:
    server = Server(answering(OK))
    authority = create_ca(utc_now(), 3600)
    pair = create_serving_certificate(authority, ["api.example"], now=utc_now(), seconds=3600)
    (tmp_path / "pair").write_bytes(pair.certificate + pair.key)

    async def scenario() -> None:
        ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ours.load_cert_chain(tmp_path / "pair")
        url = await server.start(ours)
        trusting = ssl.create_default_context(cadata=authority.certificate.decode())
        named = Exchange(url, trusting, server_name="api.example", connections=1)
        for _time in range(2):
            assert (await get(named)).payload == b"ok"
        assert server.connections == 1
        with pytest.raises(ssl.SSLError, match="verify failed"):
            await get(Exchange(url, trusting, connections=1))
        named.close()
        server.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))


class Wire(asyncio.Transport):
    """A transport that discards the sent bytes, and records whether it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False

    def write(self, data: Any) -> None:
        del data

    def abort(self) -> None:
        self.is_cut = True


@given(cuts=st.lists(st.integers(min_value=1, max_value=200), max_size=12), answer=st.sampled_from([OK, CHUNKED]))
def test_response_in_any_pieces_is_read_completely(cuts: list[int], answer: bytes) -> None:
    whole = b"HTTP/1.1 100 Continue\r\n\r\n" + answer
    places = [0, *sorted({cut for cut in cuts if cut < len(whole)}), len(whole)]

    async def main() -> None:
        connection = exchange_module._Connection()
        connection.connection_made(Wire())
        for _time in range(2):
            found: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            connection.ask(b"", found)
            for begin, end in zip(places, places[1:]):
                assert not found.done()
                connection.data_received(whole[begin:end])
            assert found.result().payload == b"ok" and connection.is_reusable

    asyncio.run(main())


def test_watch_event_above_the_limit_ends_the_watch_and_nothing_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    packed = head + b"Content-Encoding: gzip\r\n\r\n" + b"%x\r\n" % len(PACKED) + PACKED + b"\r\n1\r\n\n\r\n0\r\n\r\n"
    long = head + b"\r\n" + (b"200\r\n" + b"x" * 512 + b"\r\n") * 4 + b"0\r\n\r\n"
    monkeypatch.setattr(client, "LONGEST_EVENT", 1999)

    async def received(answer: bytes) -> bytes:
        server = Server(answering(answer))
        session = client.ApiClient("/nowhere")._watching(None)
        try:
            async with session.get(await server.start()) as response:
                return b"\n".join([line async for line in client._lines(response.content)])
        finally:
            await session.close()
            server.stop()
            assert "accept-encoding: identity" in server.requests[0].lower()

    with pytest.raises(InvalidHttpResponse, match="more than 1999 bytes"):
        asyncio.run(received(long))
    assert b"okok" not in asyncio.run(received(packed))
