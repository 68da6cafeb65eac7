# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module webhook_authority: creation and rotation of the CA, whose keys stay in the Secret."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dra.accelerators.plugins.module_utils.core import certificates
from ansible_collections.dra.accelerators.plugins.modules import webhook_authority

SECRETS = "/api/v1/namespaces/here/secrets"
SECRET = f"{SECRETS}/dra-accelerators-controller-authority"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/dra-accelerators-controller"
MANAGED = {"labels": {"app.kubernetes.io/managed-by": "dra-accelerators"}}


class Objects:
    """A model API server with the Secret and the webhook configuration. ``stop_after`` ends the module after this number of writes."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.writes: list[tuple[str, str]] = []
        self.stop_after = -1
        self.version = 0

    def request(self, method: str, path: str, *, body: Any = None, **_more: Any) -> dict[str, Any]:
        if method == "GET":
            if path not in self.objects:
                raise webhook_authority.ApiError("not found", status=404, reason="NotFound")
            return json.loads(json.dumps(self.objects[path]))  # type: ignore[no-any-return]
        if len(self.writes) == self.stop_after:
            raise KeyboardInterrupt
        self.writes.append((method, path))
        self.version += 1
        if method == "PATCH":
            found = self.objects[path]
            test, *changes = body
            if test["value"] != found["metadata"]["resourceVersion"]:
                raise webhook_authority.ApiError("conflict", status=409)
            for change in changes:
                number = int(change["path"].split("/")[2])
                found["webhooks"][number]["clientConfig"]["caBundle"] = change["value"]
        else:
            path = SECRET
            expected = body["metadata"].get("resourceVersion", "")
            if expected != self.objects.get(path, {}).get("metadata", {}).get("resourceVersion", ""):
                raise webhook_authority.ApiError("conflict", status=409)
            self.objects[path] = json.loads(json.dumps(body))
        self.objects[path]["metadata"]["resourceVersion"] = str(self.version)
        return self.objects[path]

    def configure(self) -> None:
        """Add the webhook configuration as the role writes it first."""
        hooks = [{"name": name, "clientConfig": {"url": "https://a"}} for name in ("a", "b")]
        self.objects[CONFIGURATION] = {
            "metadata": {**MANAGED, "name": "ours", "resourceVersion": "1"},
            "webhooks": hooks,
        }

    @property
    def authorities(self) -> certificates.Authorities:
        return certificates.read_authorities(self.objects[SECRET]["data"])

    @property
    def trusted(self) -> list[bytes]:
        hooks = self.objects[CONFIGURATION]["webhooks"]
        return [base64.b64decode(each["clientConfig"].get("caBundle", "")) for each in hooks]


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Objects:
    objects = Objects()
    monkeypatch.setattr(webhook_authority, "connect", lambda _module: objects)
    return objects


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    def call(*, check: bool = False, **options: Any) -> dict[str, Any]:
        arguments = {"namespace": "here", "settle": 0, "_ansible_check_mode": check, "_ansible_diff": True, **options}
        with patch_module_args(arguments), pytest.raises(SystemExit):
            webhook_authority.main()
        text = capsys.readouterr().out
        assert "PRIVATE KEY" not in text and "LS0tLS1CRUdJTiBQUklWQVRF" not in text, "a key is in the result"
        answer: dict[str, Any] = json.loads(text)
        return answer

    return call


def age(server: Objects, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """Advance the clock by days."""
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
    monkeypatch.setattr(webhook_authority, "now", lambda: later)


def test_first_run_creates_the_ca_second_run_changes_nothing(server: Objects, run: Run) -> None:
    checked = run(check=True)
    assert checked["changed"] and checked["steps"] == ["make"] and not server.objects and checked["ca_bundle"] == ""
    first = run()
    assert first["changed"] and server.writes == [("POST", SECRETS)]
    assert base64.b64decode(first["ca_bundle"]) == server.authorities.bundle
    again = run()
    assert not again["changed"] and again["ca_bundle"] == first["ca_bundle"] and len(server.writes) == 1
    assert again["diff"]["before"] == again["diff"]["after"]


@pytest.mark.parametrize("reason", ["due", "requested"])
def test_rotation_trusts_both_before_the_next_signs(
    server: Objects, run: Run, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    server.configure()
    run(lifetime=90 * 86400)
    first = server.authorities.active
    waited: list[tuple[Any, list[bytes]]] = []
    monkeypatch.setattr(
        webhook_authority.time, "sleep", lambda _seconds: waited.append((server.authorities, server.trusted))
    )
    options = {"rotate": True} if reason == "requested" else {}
    if reason == "due":
        age(server, monkeypatch, 70)
    done = run(lifetime=90 * 86400, **options)
    assert done["steps"] == ["make-next", "promote"]
    ((during, trusted),) = waited
    assert during.active == first and during.next is not None
    assert trusted == [during.bundle] * 2 and during.next.certificate in trusted[0]
    after = server.authorities
    assert after.active == during.next and first is not None and after.previous == first.certificate
    assert not run(lifetime=90 * 86400)["changed"]


def test_second_rotation_removes_the_first_ca_from_the_bundle(server: Objects, run: Run) -> None:
    """After the theft of a CA key: one rotation leaves the stolen CA trusted, the second one removes it."""
    server.configure()
    run()
    stolen = server.authorities.active
    assert stolen is not None
    once = base64.b64decode(run(rotate=True)["ca_bundle"])
    assert stolen.certificate.strip() in once
    twice = base64.b64decode(run(rotate=True)["ca_bundle"])
    assert stolen.certificate.strip() not in twice and twice.count(b"BEGIN CERTIFICATE") == 2


def test_interrupted_rotation_is_resumed(server: Objects, run: Run) -> None:
    server.configure()
    run()
    for stop_after in (2, 3):
        server.writes.clear()
        server.stop_after = stop_after - 1
        with pytest.raises(KeyboardInterrupt):
            webhook_authority.run_due_steps(
                webhook_authority.Cluster(
                    server,
                    {
                        "namespace": "here",
                        "name": "dra-accelerators-controller-authority",
                        "configuration": "dra-accelerators-controller",
                    },
                ),  # type: ignore[arg-type]
                {"rotate": True, "settle": 0, "lifetime": 10**7},
                check_mode=False,
            )
        server.stop_after = -1
        before = server.authorities
        assert before.next is not None and before.active is not None
        done = run(lifetime=10**7)
        assert done["steps"] == ["promote"] and server.authorities.active == before.next


def test_expired_ca_is_replaced_and_previous_one_forgotten(
    server: Objects, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.configure()
    run(lifetime=86400)
    age(server, monkeypatch, 2)
    assert run(lifetime=864000)["steps"] == ["make"]
    age(server, monkeypatch, 10)
    assert run(lifetime=86400 * 20)["steps"] == ["make-next", "promote"]
    age(server, monkeypatch, 13)
    assert run(lifetime=86400 * 20)["steps"] == ["forget"]


def test_ca_of_an_earlier_release_is_replaced_with_an_overlap(server: Objects, run: Run) -> None:
    """Earlier controllers kept a CA with a lifetime of 1 year, which nothing would replace between two playbook runs: it is replaced."""
    server.configure()
    run(lifetime=365 * 86400)
    earlier = server.authorities.active
    assert earlier is not None
    checked = run(check=True)
    assert checked["changed"] and server.authorities.active == earlier
    done = run()
    assert done["steps"] == ["make-next", "promote"]
    present = server.authorities
    assert present.active is not None and present.active.remaining_seconds(webhook_authority.now()) > 9 * 365 * 86400
    assert present.previous == earlier.certificate
    again = run()
    assert not again["changed"] and again["ca_bundle"] == done["ca_bundle"]


def test_foreign_objects_are_not_changed(server: Objects, run: Run) -> None:
    server.objects[SECRET] = {"metadata": {"name": "x", "resourceVersion": "1"}, "data": {}}
    refused = run()
    assert refused["failed"] and refused["error_code"] == "not-managed" and not server.writes
    del server.objects[SECRET]
    server.configure()
    server.objects[CONFIGURATION]["metadata"]["labels"] = {}
    run()
    refused = run(rotate=True)
    assert refused["failed"] and "ValidatingWebhookConfiguration" in refused["msg"]


def test_lifetime_below_the_minimum_is_rejected(server: Objects, run: Run) -> None:
    refused = run(lifetime=10)
    assert refused["failed"] and "expected at least 300 seconds" in refused["msg"] and not server.writes
