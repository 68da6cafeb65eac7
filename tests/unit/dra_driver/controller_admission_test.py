# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The admission webhook: rejected configurations, their messages, and the certificate rotation during requests."""

from __future__ import annotations

import asyncio
import base64
import copy
import datetime
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from controller_steps import run, running, until
from dra_driver.api.client import ApiClient
from dra_driver.controller.admission import MOST_LISTED, NoReview, answer, rules_for
from dra_driver.controller.controller_config import parse
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.daemon import Webhook
from dra_driver.controller.serving_certificate import SOON_SECONDS, ServingCertificate, WebhookSecret
from dra_driver.controller.webhook import MOST_BYTES, PATH, application
from dra_driver.core import certificates
from dra_driver.core.certificates import Authorities
from dra_driver.core.dra.configuration_check import CLAIM, CLASS, TEMPLATE, VERSIONS
from dra_driver.core.vendors.registry import BACKENDS, create
from hypothesis import given
from hypothesis import strategies as st
from object_server import ObjectServer

NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL
DRIVER = "gpu.nvidia.com"
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
RULES = rules_for([DRIVER], {"our-partitions": "partition", "our-passed": "passthrough"})
WRONG = {"sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 150}}}
RIGHT = {"sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}}}


def config(content: Mapping[str, Any], driver: str = DRIVER, kind: str = "GpuConfig") -> dict[str, Any]:
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, **content}
    return {"opaque": {"driver": driver, "parameters": parameters}}


def manifest(kind: str, version: str, *configs: Any, device_class: str = DRIVER) -> dict[str, Any]:
    request: dict[str, Any] = {"deviceClassName": device_class}
    request = {"name": "one", **(request if version == "v1beta1" else {"exactly": request})}
    spec: dict[str, Any] = {"devices": {"requests": [request], "config": list(configs)}}
    if kind == CLASS:
        spec = {"config": list(configs)}
    if kind == TEMPLATE:
        spec = {"spec": spec}
    return {"apiVersion": f"resource.k8s.io/{version}", "kind": kind, "metadata": {"name": device_class}, "spec": spec}


def review(document: Any, operation: str = "CREATE") -> dict[str, Any]:
    request = {"uid": "42", "operation": operation, "object": document}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def response_to(document: Any, operation: str = "CREATE") -> dict[str, Any]:
    answered = answer(review(document, operation), RULES)
    assert (answered["apiVersion"], answered["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert answered["response"]["uid"] == "42" and "patch" not in answered["response"]
    return dict(answered["response"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", [CLAIM, TEMPLATE, CLASS])
def test_webhook_rejection_names_field_value_and_range(kind: str, version: str) -> None:
    response = response_to(manifest(kind, version, config(WRONG)))
    path = {CLAIM: "spec.devices", TEMPLATE: "spec.spec.devices", CLASS: "spec"}[kind]
    field = f"{path}.config[0].opaque.parameters.sharing.mpsConfig.defaultActiveThreadPercentage"
    assert response["allowed"] is False
    assert response["status"]["message"] == f"{field}: it is 150; expected a whole number from 1 to 100 percent"
    assert (response["status"]["code"], response["status"]["reason"]) == (422, "Invalid")
    (cause,) = response["status"]["details"]["causes"]
    assert (cause["reason"], cause["field"]) == ("FieldValueInvalid", field)
    assert response_to(manifest(kind, version, config(RIGHT))) == {"uid": "42", "allowed": True}
    assert response_to(manifest(kind, version, config(WRONG, driver="another.example.com")))["allowed"]
    assert response_to(manifest(kind, version, config(WRONG)), "DELETE")["allowed"]


@pytest.mark.parametrize("kind", [CLAIM, TEMPLATE, CLASS])
def test_webhook_stored_invalid_claim_can_lose_its_finalizer(kind: str) -> None:
    """A stored invalid claim can lose its finalizer if its configuration does not change. Otherwise it would stay forever."""
    old = manifest(kind, "v1", config(WRONG))
    for changed, allowed in ((copy.deepcopy(old), True), (manifest(kind, "v1", config({**WRONG, "more": 1})), False)):
        changed["metadata"]["finalizers"] = []
        requested = review(changed, "UPDATE")
        requested["request"]["oldObject"] = old
        assert answer(requested, RULES)["response"]["allowed"] is allowed
    assert response_to(old, "UPDATE")["allowed"] is False, "the previous object is unknown"


def test_webhook_class_decides_which_kinds_fit() -> None:
    refused = response_to(manifest(CLAIM, "v1", config(RIGHT), device_class="our-partitions"))
    assert "GpuConfig is for a device, and the class our-partitions has partitions" in refused["status"]["message"]
    assert response_to(manifest(CLAIM, "v1", config(RIGHT, kind="MigDeviceConfig"), device_class="our-partitions"))[
        "allowed"
    ]
    assert response_to(manifest(CLAIM, "v1", config(RIGHT), device_class="nobody-knows"))["allowed"]


def of_type(name: str, value: str, *configs: Any) -> dict[str, Any]:
    """Return a DeviceClass whose selector requires a type."""
    document = manifest(CLASS, "v1", *configs, device_class=name)
    expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{value}'"
    document["spec"]["selectors"] = [{"cel": {"expression": expression}}]
    return document


def test_webhook_reads_device_kinds_from_the_classes_of_the_cluster() -> None:
    claim = review(manifest(CLAIM, "v1", config(RIGHT), device_class="theirs"))
    assert answer(claim, RULES)["response"]["allowed"] is True
    refused = answer(claim, RULES, {"theirs": "partition"})["response"]
    assert "GpuConfig is for a device, and the class theirs has partitions" in refused["status"]["message"]
    configured = review(manifest(CLAIM, "v1", config(RIGHT), device_class="our-partitions"))
    assert answer(configured, RULES, {"our-partitions": "device"})["response"]["allowed"] is False, (
        "the configured kind of device takes precedence over that of the cluster"
    )
    assert response_to(of_type("theirs", "gpu", config(RIGHT)))["allowed"] is True
    refused = response_to(of_type("theirs", "mig", config(RIGHT)))
    assert "the class theirs has partitions" in refused["status"]["message"]


def test_webhook_follows_changed_classes_of_the_cluster(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        server.put(f"{CLASSES}/small", of_type("small", "mig"))
        server.put(f"{CLASSES}/any", manifest(CLASS, "v1", device_class="any"))
        settings = parse({"name": "here", "webhook": {"address": "127.0.0.1:1"}})
        webhook = Webhook(settings, client, ControllerMetrics())
        assert webhook.kinds() == {}, "requests do not wait for the list of classes"
        async with running(webhook.classes.run()):
            await until(lambda: webhook.kinds() == {"small": "partition"} and server._watchers)
            server.put(f"{CLASSES}/large", of_type("large", "gpu"))
            await until(lambda: webhook.kinds() == {"small": "partition", "large": "device"})

    run(tmp_path, scenario)


def test_webhook_passthrough_class_accepts_only_passthrough_configuration() -> None:
    passed = config({"iommu": {"backendPolicy": "PreferIommuFD"}}, kind="VfioDeviceConfig")
    for device_class in ("our-passed", "vfio.gpu.nvidia.com"):
        assert response_to(manifest(CLAIM, "v1", passed, device_class=device_class))["allowed"]
        refused = response_to(manifest(CLAIM, "v1", config(RIGHT), device_class=device_class))
        given = f"GpuConfig is for a device, and the class {device_class} has devices that are passed through"
        assert given in refused["status"]["message"]
    refused = response_to(manifest(CLAIM, "v1", passed, device_class="our-partitions"))
    wanted = "VfioDeviceConfig is for a device that is passed through, and the class our-partitions has partitions"
    assert wanted in refused["status"]["message"]


def test_webhook_rejection_lists_all_errors_up_to_a_limit() -> None:
    two = response_to(manifest(CLAIM, "v1", config(WRONG), config({"unheard": 1})))["status"]
    assert len(two["details"]["causes"]) == 2 and two["message"].count("; ") >= 1
    many = response_to(manifest(CLAIM, "v1", config({f"field{number}" * 30: 1 for number in range(500)})))["status"]
    assert (
        len(many["details"]["causes"]) == MOST_LISTED and "it is a mapping with 500 unknown fields" in many["message"]
    )
    assert len(many["message"]) < 10_000


def test_webhook_overridden_config_gets_a_warning() -> None:
    response = response_to(manifest(CLAIM, "v1", config(RIGHT), config({})))
    assert response["allowed"] is True
    (warning,) = response["warnings"]
    assert warning.startswith("spec.devices.config[0]: it has no effect: of GpuConfig")


@pytest.mark.parametrize(
    "document", [None, [], {}, {"request": {}}, {**review({}), "apiVersion": "admission.k8s.io/v9"}, {"request": 1}]
)
def test_webhook_body_without_a_review_is_rejected(document: Any) -> None:
    with pytest.raises(NoReview):
        answer(document, RULES)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(parameters=anything, config_entry=anything, spec=anything)
def test_webhook_any_content_gets_an_answer(parameters: Any, config_entry: Any, spec: Any) -> None:
    for kind in (CLAIM, TEMPLATE, CLASS):
        whole = manifest(kind, "v1", {"opaque": {"driver": DRIVER, "parameters": parameters}})
        assert isinstance(response_to(whole)["allowed"], bool)
        assert isinstance(response_to(manifest(kind, "v1", config_entry))["allowed"], bool)
        assert isinstance(response_to({**whole, "spec": spec})["allowed"], bool)


def test_webhook_uses_the_rules_of_every_named_driver() -> None:
    everything = rules_for([create(vendor).driver_name for vendor in BACKENDS], {})
    assert len(everything.config_kinds) == len(BACKENDS)
    assert rules_for([], {}).config_kinds == {}


def test_webhook_bounds_bodies_and_counts_outcomes() -> None:
    async def main() -> None:
        measurements = ControllerMetrics()
        runner = web.AppRunner(application(RULES, measurements))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{PATH}"
        async with aiohttp.ClientSession() as session:

            async def status(data: bytes) -> int:
                async with session.post(url, data=data) as response:
                    return response.status

            async with session.post(url, json=review(manifest(CLAIM, "v1", config(WRONG)))) as response:
                assert response.status == 200 and (await response.json())["response"]["allowed"] is False
            assert await status(b"{") == 400
            assert await status(b"[" * 100_000) == 400
            assert await status(b" " * (MOST_BYTES + 1)) == 413
        await runner.cleanup()
        text = measurements.text().decode()
        assert 'admission_duration_seconds_count{outcome="refused"} 1.0' in text
        assert 'admission_duration_seconds_count{outcome="unreadable"} 3.0' in text

    asyncio.run(main())


SECRET = "/api/v1/namespaces/here/secrets/authority"
LIFE = 3600.0


class Clock:
    """The time of a test, for certificates and for waits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.began = datetime.datetime.now(datetime.timezone.utc)

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime.datetime:
        return self.began + datetime.timedelta(seconds=self.seconds)


def authorities_in(server: ObjectServer) -> Authorities:
    data = server.objects.get(SECRET, {}).get("data", {})
    return certificates.read_authorities(data)


def test_rotation_of_the_ca_keeps_all_requests_trusted(tmp_path: Path) -> None:
    """TLS requests succeed while the steps of the module webhook_authority rotate the CA twice."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        clock, trusted_for = Clock(), 0.0
        serving = ServingCertificate(
            WebhookSecret(client, "here", "authority"), ["127.0.0.1"], seconds=LIFE / 4, now=clock.now
        )
        await serving.refresh()
        assert not serving.ready.is_set()

        def rotate() -> bytes:
            """Take the next step of the module and return the bundle that the API server trusts."""
            nonlocal trusted_for
            present = authorities_in(server)
            what = certificates.next_step(present, trusted_for=trusted_for, now=clock.now())
            trusted_for = certificates.TRUST_SECONDS
            if what != certificates.NOTHING:
                present = certificates.apply_step(present, what, now=clock.now(), seconds=LIFE)
                server.put(SECRET, {"data": present.to_data()})
                trusted_for = 0.0
            return present.bundle

        bundle = rotate()
        await serving.refresh()
        runner = web.AppRunner(application(RULES, ControllerMetrics()))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=serving.context).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}{PATH}"

        async def ask() -> None:
            trusting = ssl.create_default_context(cadata=bundle.decode())
            # The clock of the test is ahead of real time, so TLS must not check dates.
            trusting.verify_flags |= NO_CHECK_TIME
            body = review(manifest(CLAIM, "v1", config(RIGHT)))
            connector = aiohttp.TCPConnector(ssl=trusting)
            async with aiohttp.ClientSession(connector=connector) as session, session.post(url, json=body) as response:
                assert (await response.json())["response"]["allowed"] is True

        signers = set()
        for _turn in range(110):
            clock.seconds += LIFE / 60
            bundle = rotate()
            await ask()
            await serving.refresh()
            await ask()
            active = authorities_in(server).active
            assert active is not None and active.remaining_seconds(clock.now()) > 0
            assert serving.key_pair is not None and serving.key_pair.remaining_seconds(clock.now()) > 0
            signers.add(active.certificate)
        assert len(signers) >= 3
        await runner.cleanup()

    run(tmp_path, scenario)


def test_certificate_of_a_tls_secret_is_served_and_replaced(tmp_path: Path) -> None:
    """cert-manager writes and renews tls.crt and tls.key: the server serves the current certificate."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        now = datetime.datetime.now(datetime.timezone.utc)
        authority = certificates.create_ca(now, LIFE)
        serving = ServingCertificate(WebhookSecret(client, "here", "authority"), ["unused"], seconds=LIFE)

        def put(pair: certificates.KeyPair, key: bytes) -> None:
            content = {"tls.crt": pair.certificate, "tls.key": key, "ca.crt": authority.certificate}
            server.put(SECRET, {"data": {name: base64.b64encode(each).decode() for name, each in content.items()}})

        first, second = (
            certificates.create_serving_certificate(authority, ["a"], now=now, seconds=LIFE) for _each in range(2)
        )
        put(first, second.key)
        await serving.refresh()
        assert not serving.ready.is_set(), "the key of another certificate"
        put(first, first.key)
        await serving.refresh()
        assert serving.ready.is_set() and serving.key_pair == first
        put(second, second.key)
        await serving.refresh()
        assert serving.key_pair == second

    run(tmp_path, scenario)


def test_controller_writes_neither_secrets_nor_webhook_configurations(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        serving = ServingCertificate(WebhookSecret(client, "here", "authority"), ["a"], seconds=LIFE)
        await serving.refresh()
        assert not server.objects and serving.pause == SOON_SECONDS

    run(tmp_path, scenario)
