# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Metrics over TLS, for callers that the API server authorizes."""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from dra_driver import scrapes
from dra_driver.api.client import ApiClient
from dra_driver.config import InvalidConfiguration, parse
from dra_driver.controller.controller_config import parse as parse_controller
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.daemon import Webhook
from dra_driver.controller.health_server import status_application
from object_server import kubeconfig


class Reviews:
    """An API server that knows tokens NAME.AUDIENCE and permits the user "prometheus" to get /metrics."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        spec, status = body["spec"], {}
        self.asked.append(body["kind"])
        if body["kind"] == "TokenReview":
            name, _dot, audience = spec["token"].partition(".")
            if audience in spec["audiences"]:
                status = {"authenticated": True, "audiences": [audience], "user": {"username": name}}
        else:
            wanted = {"path": "/metrics", "verb": "get"}
            status = {"allowed": spec["user"] == "prometheus" and spec["nonResourceAttributes"] == wanted}
        return web.json_response({**body, "status": status}, status=201)


def write_certificate(directory: Path, name: str) -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    certificate, private = directory / "tls.crt", directory / "tls.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return str(certificate), str(private)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def served_name(port: int) -> str:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    writer.close()
    return str(found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


async def eventually(read: Any) -> Any:
    for _attempt in range(200):
        try:
            found = await read()
        except (OSError, ClientError):
            found = None
        if found:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError("it does not come")


def test_metrics_tls_and_authorization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes, "CHECK_SECONDS", 0.05)
    reviews = Reviews()

    async def main() -> None:
        api = web.Application()
        api.router.add_route("*", "/{path:.*}", reviews.answer)
        runner = web.AppRunner(api)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}")))
        client = ApiClient(str(file), user_agent="test")
        port = free_port()
        serving = asyncio.create_task(
            scrapes.keep_serving_metrics(
                lambda: b"up 1\n",
                f"127.0.0.1:{port}",
                readers=scrapes.metrics_readers(client),
                certificate=str(tmp_path / "tls.crt"),
                key=str(tmp_path / "tls.key"),
            )
        )

        async def get(token: str = "", path: str = "/metrics", scheme: str = "https") -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with (
                ClientSession() as session,
                session.get(f"{scheme}://127.0.0.1:{port}{path}", headers=headers, ssl=False) as found,
            ):
                return found.status, await found.text()

        try:
            await asyncio.sleep(0.2)
            with pytest.raises(ClientError):  # no certificate yet: nothing is served, not even in clear text
                await get()
            write_certificate(tmp_path, "first")
            assert await eventually(lambda: served_name(port)) == "first"
            with pytest.raises(ClientError):
                await get(scheme="http")
            assert (await get())[0] == 401
            assert (await get("prometheus.https://kubernetes.default.svc"))[0] == 401
            status, text = await get("tenant.dra-accelerators-metrics")
            assert (status, "nonResourceURL /metrics" in text, "up 1" in text) == (403, True, False)
            assert await get("prometheus.dra-accelerators-metrics") == (200, "up 1\n")
            requested = len(reviews.asked)
            assert await get("prometheus.dra-accelerators-metrics") == (200, "up 1\n")
            assert len(reviews.asked) == requested  # the review is cached
            assert (await get("prometheus.dra-accelerators-metrics", "/other"))[0] == 404
            (tmp_path / "tls.crt").write_text("rubbish")
            await asyncio.sleep(0.2)
            assert await served_name(port) == "first"
            # A program that renews them writes one file after the other, and can be killed in between.
            (tmp_path / "other").mkdir()
            write_certificate(tmp_path / "other", "other")
            (tmp_path / "tls.crt").write_bytes((tmp_path / "other" / "tls.crt").read_bytes())
            await asyncio.sleep(0.2)
            assert await served_name(port) == "first"
            write_certificate(tmp_path, "second")

            async def renewed() -> bool:
                return await served_name(port) == "second"

            await eventually(renewed)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await client.close()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_metrics_readers_are_reviewed_every_five_minutes(tmp_path: Path) -> None:
    """Each node sends a review for each scraper: at 5,000 nodes an interval of 1 min would be 167 requests per second."""
    assert scrapes.metrics_readers(ApiClient(str(tmp_path), user_agent="test"))._kept == 300


def test_controller_serves_metrics_only_at_the_webhook_port(tmp_path: Path) -> None:
    """The controller serves metrics at the webhook port, which has a certificate. The address of the status has no TLS."""
    webhook = {"address": "127.0.0.1:1", "names": ["n"]}
    for settings, expected in (({**webhook, "metrics": True}, True), (webhook, False)):
        chosen = parse_controller({"name": "n", "kubeconfig": str(tmp_path / "kubeconfig"), "webhook": settings})
        made = Webhook(chosen, ApiClient(chosen.kubeconfig, user_agent="test"), ControllerMetrics())
        paths = {each.canonical for each in made._application().router.resources()}
        assert made.has_metrics == expected == ("/metrics" in paths)


def test_status_without_metrics_has_no_metrics_path() -> None:
    paths = [
        {each.canonical for each in status_application(metrics, lambda: ()).router.resources()}
        for metrics in (lambda: b"", None)
    ]
    assert paths == [{"/healthz", "/readyz", "/metrics"}, {"/healthz", "/readyz"}]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"metrics_certificate": "/a"}, "one of metrics_certificate and metrics_key"),
        ({"metrics_key": "/a"}, "one of metrics_certificate and metrics_key"),
        ({"metrics_authorization": True}, "clear text"),
        ({"metrics_authorization": 1}, "metrics_authorization"),
        ({"metrics_certificate": "a", "metrics_key": "/b"}, "absolute path"),
    ],
)
def test_parse_incomplete_metrics_settings_are_rejected(document: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        parse({"node_name": "n", **document})


def test_parse_metrics_settings() -> None:
    found = parse({"node_name": "n", "metrics_certificate": "/a", "metrics_key": "/b", "metrics_authorization": True})
    assert (found.metrics_certificate, found.metrics_key, found.metrics_authorization) == ("/a", "/b", True)
