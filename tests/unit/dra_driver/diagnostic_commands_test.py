# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The commands on the node: explain, claims, devices, probe, and collect, with a running and with a stopped driver."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from claim_steps import SMALL
from dra_driver import cli
from dra_driver.api.client import ApiClient
from dra_driver.commands.explain import Facts, explain, remaining_counters
from dra_driver.commands.output import outline, table
from dra_driver.commands.redact import MARK, redact
from dra_driver.core.health.conditions import Ends, Severity, Sign
from dra_driver.core.host.system import System
from dra_driver.core.model import Notice
from dra_driver.metrics import MetricsRegistry, PrometheusMetrics
from dra_driver.status_command import fault_texts
from dra_driver.supervisors.store_recovery import unwritable
from dra_driver.supervisors.token_renewal import TokenSupervisor
from hypothesis import given
from hypothesis import strategies as st
from store_model import record
from vendor_scene import Scene, run

DRIVER = "gpu.nvidia.com"


@pytest.fixture()
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short path, because it contains sockets."""
    return tmp_path_factory.mktemp("s")


def configured(scene: Scene, **more: Any) -> list[str]:
    """Write a configuration of the scene's node, and return the option that names it."""
    file = scene.folder / "driver.yaml"
    settings = {
        "node_name": "node-1",
        "backends": ["nvidia"],
        "kubelet_root": str(scene.folder / "kubelet"),
        "cdi_directory": str(scene.folder / "root/var/run/cdi"),
        "kubeconfig": str(scene.folder / "kubeconfig"),
        **more,
    }
    file.write_text(json.dumps(settings))
    return ["--config", str(file)]


async def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = await asyncio.to_thread(cli.main, list(words))
    return status, capsys.readouterr().out


def test_explain_prepared_claim_with_and_without_the_driver(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.register()
        assert await Scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        scene.cluster.allocate("b", "gpu-1")
        scene.api.claims["b"] = scene.cluster.claims["default", "b"]
        options = configured(scene)
        status, text = await run_command(capsys, "explain", "default/a", "--json", *options)
        (answer,) = json.loads(text)
        assert (status, answer["verdict"], answer["uid"]) == (0, "prepared", "0uid-a")
        (device,) = answer["record"]["devices"]
        assert (device["name"], device["profile"], device["made_for_the_claim"]) == (SMALL, "1g.10gb", True)
        assert answer["CDI file"]["there"] and answer["the kubelet gets"] == [device["cdi"]]
        assert answer["allocation"][0]["published"] is True
        for name in ("a", "0uid-a"):  # the same claim by its other names
            assert (await run_command(capsys, "explain", name, *options))[0] == 0
        status, text = await run_command(capsys, "explain", "b", "--json", *options)
        assert status == 1 and "no pod has reserved it" in json.loads(text)[0]["verdict"]
        status, text = await run_command(capsys, "explain", "other/none", *options)
        assert status == 1 and "there is no claim other/none" in text
        status, text = await run_command(capsys, "claims", *options)
        assert status == 0 and SMALL in text and device["uuid"] in text
        status, text = await run_command(capsys, "devices", "--json", *options)
        assert [each["claims"] for each in json.loads(text)] == [[f"default/a ({SMALL})"], []]
        for what in ("liveness", "readiness"):
            await Scene.until(lambda: scene.driver.status().published)
            assert await run_command(capsys, "probe", what, *options) == (0, "ok\n"), what
        await scene.stop()
        # The stores and the API server still answer.
        status, text = await run_command(capsys, "explain", "a", "--json", *options)
        (answer,) = json.loads(text)
        assert answer["verdict"] == "prepared" and "no process answers" in answer["driver"]
        status, text = await run_command(capsys, "devices", *options)
        assert "the driver does not run" in text and SMALL in text
        status, text = await run_command(capsys, "probe", "liveness", *options)
        assert status == 1 and "No process answers" in text

    run(home, scenario)


def test_devices_command_shows_faults_with_their_remedy(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = Sign("error", Severity.FAILED, "It reported error 9.", "Restart the machine.", Ends.RESTART, "9")

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        scene.backend.notices.put(Notice(scene.backend.gpus.template(1).uuid, "GPU 1 reports error 9", torn))
        await scene.until(lambda: any(device["ailments"] for device in current_devices(scene)))
        options = configured(scene)
        words = ["status"], ["devices"], ["devices", "--output", "json"]
        for command in words:
            for _try in range(10):  # on a busy machine the driver may not answer in time
                _status, text = await run_command(capsys, *command, *options)
                if "error 9" in text:
                    break
            if "json" not in command:
                assert text.count("error 9 (failed): It reported error 9. Restart the machine.") == 1, command
        assert [[each["value"] for each in device["ailments"]] for device in json.loads(text)] == [[], ["9"]]

    run(home, scenario)


def current_devices(scene: Scene) -> list[dict[str, Any]]:
    """Return the devices in the driver's current status."""
    assert scene.driver is not None
    return [dict(vars(device)) for device in scene.driver.status().devices]


def test_devices_command_shows_a_fault_once() -> None:
    faulty = {"cause": "gpu-lost", "value": "", "severity": "failed", "message": "It is lost.", "remedy": "Look."}
    device = {"fault": "gpu-lost: it is lost", "ailments": [faulty]}
    assert fault_texts(device) == ["gpu-lost (failed): It is lost. Look."]
    assert fault_texts({**device, "ailments": []}) == ["gpu-lost: it is lost"], "nothing was ever read of it"
    assert fault_texts({"fault": "", "ailments": []}) == []


def test_not_ready_is_alive(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        scene.backend.present = False
        await scene.start()
        options = configured(scene)
        assert (await run_command(capsys, "probe", "liveness", *options))[0] == 0
        status, text = await run_command(capsys, "probe", "readiness", "--output", "json", *options)
        answer = json.loads(text)
        assert status == 1 and not answer["ok"]
        assert any("kubelet" in problem for problem in answer["problems"])

    run(home, scenario)


TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJkcml2ZXIifQ.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQDx\n-----END PRIVATE KEY-----\n"
OPAQUE = "s3cr3t-0f-n0-f0rm"


def planted(text: str) -> list[str]:
    """Return the planted secrets that a text contains in any form."""
    forms = [TOKEN, KEY, "MIIEvQIBADANBgkqhkiG9w0", OPAQUE, "hunter2"]
    forms += [base64.b64encode(each.encode()).decode().rstrip("=") for each in (TOKEN, KEY, OPAQUE)]
    return [each for each in forms if each in text]


def test_collect_archive_has_all_files_and_no_secret(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        assert await Scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        user = {"token": OPAQUE, "client-key-data": base64.b64encode(KEY.encode()).decode()}
        user["client-certificate-data"] = user["client-key-data"]
        kubeconfig = json.loads((scene.folder / "kubeconfig").read_text())
        kubeconfig["users"] = [{"name": entry["name"], "user": user} for entry in kubeconfig["users"]]
        (scene.folder / "kubeconfig").write_text(json.dumps(kubeconfig))
        options = configured(scene)
        # Secrets in unexpected places: as a comment in the configuration, and in a claim's CDI file.
        with (scene.folder / "driver.yaml").open("a") as file:
            file.write(f"\n# Authorization: Bearer {TOKEN}\n# proxy http://me:hunter2@proxy:3128\n# {OPAQUE}\n")
        (cdi,) = scene.cdi()
        document = json.loads(cdi.read_text())
        document["containerEdits"]["env"] = [f"API_TOKEN={TOKEN}", f"KEY={KEY}"]
        cdi.write_text(json.dumps(document))
        bundle = scene.folder / "bundle.tar.gz"
        status, text = await run_command(capsys, "collect", "--file", str(bundle), *options)
        assert status == 0 and str(bundle) in text
        assert bundle.stat().st_mode & 0o777 == 0o600
        found: dict[str, str] = {}
        with tarfile.open(bundle) as archive:
            for member in archive:
                file_of = archive.extractfile(member)
                assert file_of is not None and member.mode == 0o600
                found[member.name.partition("/")[2]] = file_of.read().decode()
        assert {name: planted(content) for name, content in found.items() if planted(content)} == {}
        assert planted(text) == []
        assert {"versions.json", "config/driver.yaml", "claims.json", "missing.txt", f"{DRIVER}/store.json"} <= set(
            found
        )
        (claim,) = json.loads(found[f"{DRIVER}/store.json"])["claims"]
        assert claim["uid"] == "0uid-a"
        assert SMALL in found[f"{DRIVER}/slices.json"] and MARK in found["config/driver.yaml"]
        assert [name for name in found if name.startswith(f"{DRIVER}/cdi/")]
        assert not any("kubeconfig" in name for name in found)

    run(home, scenario)


@given(
    st.text(alphabet=st.characters(codec="ascii", categories=["L", "N"]), min_size=8, max_size=40),
    st.text(max_size=60),
    st.text(max_size=60),
)
def test_redact_removes_known_secrets_in_all_encodings(secret: str, before: str, after: str) -> None:
    for form in (secret, base64.b64encode(secret.encode()).decode()):
        left = redact(before + form + after, [secret])
        assert form not in left.replace(MARK, "")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("token: abcdef123", f"token: {MARK}"),
        ('{"password":"a b","x":1}', f'{{"password":"{MARK}","x":1}}'),
        ("MY_SECRET=abc def", f"MY_SECRET={MARK} def"),
        ("token_lifetime: 2592000", "token_lifetime: 2592000"),
        ("https://user:pass@host/x", f"https://{MARK}@host/x"),
        (f"x {TOKEN} y", f"x {MARK} y"),
        (KEY + "z", f"{MARK}\nz"),
        (KEY[:70] + "\nthen more", f"{MARK}\nthen more"),
        (json.dumps({"a": KEY, "b": "c"}), f'{{"a": "{MARK}\\n", "b": "c"}}'),
        ("the claim default/a has no token", "the claim default/a has no token"),
    ],
)
def test_redact_removes_text_that_looks_like_a_secret(text: str, left: str) -> None:
    assert redact(text) == left


def test_collect_partial_file_is_new_and_follows_no_link(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user of the directory knows the previous name of the partial file: the file is new, and no link is followed."""

    async def scenario(scene: Scene) -> None:
        options = configured(scene)
        victim, target = home / "victim", home / "out" / "bundle.tar.gz"
        victim.write_text("keep")
        target.parent.mkdir()
        (target.parent / ".bundle.tar.gz.part").symlink_to(victim)
        target.symlink_to(victim)
        opened: list[int] = []
        real = os.open

        def watched(path: Any, flags: int, *arguments: Any, **words: Any) -> int:
            if ".bundle.tar.gz." in str(path):
                opened.append(flags)
            return real(path, flags, *arguments, **words)

        monkeypatch.setattr(os, "open", watched)
        status, _text = await run_command(capsys, "collect", "--file", str(target), *options)
        monkeypatch.setattr(os, "open", real)
        assert status == 0
        assert opened and all(flags & os.O_EXCL for flags in opened)
        assert victim.read_text() == "keep" and not target.is_symlink()
        assert target.stat().st_mode & 0o777 == 0o600
        assert sorted(each.name for each in target.parent.iterdir()) == [".bundle.tar.gz.part", "bundle.tar.gz"]

    run(home, scenario)


BEGIN, END = (f"-----{word} RSA PRIVATE KEY-----" for word in ("BEGIN", "END"))


@pytest.mark.parametrize(
    "part",
    [
        "eyJ",
        "eyJaaaaa.",
        BEGIN,
        BEGIN + "AAAA",
        f"{BEGIN} {END}",
        'token="',
        "token='a\\",
        "bearer ",
        "://a:",
        "LS0tLS1CRUdJTi",
        ".-_",
    ],
)
def test_redact_time_is_proportional_to_the_length(part: str) -> None:
    """A container can write any text to the journal: the time for its redaction is proportional to its length."""
    text = part * (1_000_000 // len(part))
    began = time.process_time()
    redact(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{BEGIN}\nx\n{END} {BEGIN}\ny\n{END}", f"{MARK} {MARK}"),
        (f"{END} {BEGIN}\nx\n{END}", f"{END} {MARK}"),
        (f"{BEGIN}{'.' * 30000}{END} {BEGIN}.{END}", f"{MARK}{'.' * 30000}{END} {MARK}"),
        ("a.eyJhbGciOi.eyJzdWIi.c2ln.b", f"a.{MARK}.b"),
        ("x-eyJhbGciOi.eyJzdWIi y", f"x-{MARK} y"),
        ("eyJa.b eyJhbGciOi", "eyJa.b eyJhbGciOi"),
    ],
)
def test_redact_blocks_and_web_tokens_between_others(text: str, left: str) -> None:
    assert redact(text) == left


def test_redact_long_words_take_linear_time() -> None:
    text = ("x" * 200_000) + "\n" + "a.b-c_" * 50_000 + "token"
    assert redact(text) == text


WHOLE = {
    "name": "gpu-0",
    "attributes": {"type": {"string": "gpu"}, "minor": {"int": 0}, "driverVersion": {"version": "1.2.3"}},
    "capacity": {"memory": {"value": "80Gi"}},
    "consumesCounters": [{"counterSet": "gpu-0", "counters": {"slice-0": {"value": "1"}, "slice-1": {"value": "1"}}}],
}
PART = {
    "name": SMALL,
    "attributes": {"type": {"string": "mig"}, "profile": {"string": "1g.10gb"}},
    "consumesCounters": [{"counterSet": "gpu-0", "counters": {"slice-0": {"value": "1"}}}],
}
COUNTERS = [{"name": "gpu-0", "counters": {"slice-0": {"value": "1"}, "slice-1": {"value": "1"}}}]


def test_probe_is_not_counted_as_a_kubelet_request(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(scene: Scene) -> None:
        registry = MetricsRegistry()
        scene.metrics = PrometheusMetrics(registry, DRIVER)
        await scene.api.start()
        await scene.start()
        assert (await run_command(capsys, "probe", "liveness", *configured(scene)))[0] == 0
        assert 'method="NodePrepareResources"' not in registry.text().decode()
        assert await Scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        # The metrics count a call at its end, which can be later than its answer.
        await Scene.until(lambda: 'method="NodePrepareResources"' in registry.text().decode())

    run(home, scenario)


def unallocated(*, taints: Any = (), others: Any = (), expression: str = "", tolerations: Any = ()) -> dict[str, Any]:
    exactly: dict[str, Any] = {"deviceClassName": "c", "tolerations": list(tolerations)}
    if expression:
        exactly["selectors"] = [{"cel": {"expression": expression}}]
    claim = {"metadata": {"uid": "u"}, "spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}}
    answer = explain(
        Facts(
            name="default/x",
            driver=DRIVER,
            pool="node-1",
            boot_id="b",
            claim=claim,
            published=[{**WHOLE, "taints": list(taints)}, PART],
            counters=COUNTERS,
            others=others,
        )
    )
    assert answer["verdict"] == "not prepared: the scheduler has not allocated it"
    found: dict[str, Any] = answer["why no device of this node"]["r"]
    return found


def test_explain_unallocated_claim_names_why_each_device_is_excluded() -> None:
    assert unallocated()["ruled out"] == {}
    lost = {"key": "gpu.nvidia.com/gpu-lost", "effect": "NoSchedule"}
    assert unallocated(taints=[lost])["ruled out"] == {"taint gpu.nvidia.com/gpu-lost:NoSchedule": "1: gpu-0"}
    assert unallocated(taints=[lost], tolerations=[{"operator": "Exists"}])["ruled out"] == {}


@pytest.mark.parametrize(
    "expression",
    [
        "device.attributes['gpu.nvidia.com'].type == 'gpu' || device.driver == 'x' && device.driver == 'y'",
        "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'",
        "",
    ],
)
def test_explain_selector_excludes_no_device(expression: str) -> None:
    """``A || B && C`` with A true and C false excludes no device. An earlier release reported it as excluded."""
    wish = unallocated(expression=expression)
    assert wish["ruled out"] == {} and wish["nothing here rules out"] == f"2: gpu-0, {SMALL}"
    assert wish["selectors of the request and its class"].startswith("not evaluated on the node; run the why playbook")


def test_explain_names_capacity_used_by_claims() -> None:
    held = record("other", "prepared", devices=1)
    (device,) = held.devices
    held = replace(held, devices=(replace(device, name=SMALL),))
    assert remaining_counters(COUNTERS, [WHOLE, PART], [held]) == {"gpu-0": {"slice-0": 0, "slice-1": 1}}
    wish = unallocated(others=[held])
    assert wish["ruled out"] == {
        "insufficient capacity: claims use slice-0 of gpu-0": "1: gpu-0",
        f"claim {held.describe()} has it": f"1: {SMALL}",
    }


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"claim": None, "api_problem": "it is away"}, "could not be read: it is away"),
        ({"runs": False}, "no driver answers on this node"),
        ({"problems": ("store: full",)}, "the driver is not ready: store: full"),
        ({"pool": "node-2"}, "its devices are in the pool node-1"),
        ({"driver": "other.com"}, "it has no device of this driver"),
        ({}, "no pod has reserved it"),
    ],
)
def test_explain_verdict_names_the_obstacle(change: dict[str, Any], verdict: str) -> None:
    result = {"request": "r", "driver": DRIVER, "pool": "node-1", "device": "gpu-0"}
    claim = {"metadata": {"uid": "u"}, "status": {"allocation": {"devices": {"results": [result]}}}}
    facts = Facts(name="default/x", driver=DRIVER, pool="node-1", boot_id="b", claim=claim)
    assert verdict in explain(replace(facts, **change))["verdict"]


def test_output_tables_and_outlines() -> None:
    assert table([["A", "B"]]) == ""
    assert table([["A", "B"], ["long", None]]) == "A     B\nlong  -\n"
    text = outline({"a": 1, "none": [], "b": {"c": True}, "d": [{"e": 1, "f": 2}, "g"]})
    assert text == "a: 1\nb:\n  c: yes\nd:\n  - e: 1\n    f: 2\n  - g\n"


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ({}, ""),
        ({"f_flag": os.ST_RDONLY}, "is read-only"),
        ({"f_bavail": 100}, "is full"),
        (None, "cannot be examined"),
    ],
)
def test_status_unwritable_store_is_reported_before_the_next_claim(
    seen: dict[str, int] | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statvfs(path: str) -> Any:
        if seen is None:
            raise OSError(5, "Input/output error")
        return SimpleNamespace(**{"f_flag": 0, "f_bavail": 10**6, "f_frsize": 4096, **seen})

    assert unwritable(str(tmp_path)) == ""  # the file system of this machine
    monkeypatch.setattr(os, "statvfs", statvfs)
    assert problem in unwritable("/data") and bool(unwritable("/data")) == bool(problem)


def test_status_expired_token_is_not_ready(tmp_path: Path) -> None:
    now = [1000.0]
    supervisor = TokenSupervisor(ApiClient(""), "", lifetime=600, system=System(str(tmp_path)), clock=lambda: now[0])
    assert supervisor.problem() == ""  # a token without an end
    # A pod's token is in a file that the kubelet renews.
    claims = base64.urlsafe_b64encode(json.dumps({"sub": "s", "iat": 500, "exp": 1100}).encode()).decode().rstrip("=")
    (tmp_path / "token").write_text(f"e30.{claims}.x")
    user = {"name": "u", "user": {"tokenFile": "/token"}}
    cluster, context = {"name": "c", "cluster": {"server": "https://s"}}, {"cluster": "c", "user": "u"}
    document = {
        "users": [user],
        "clusters": [cluster],
        "contexts": [{"name": "x", "context": context}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(document))
    of_file = TokenSupervisor(
        ApiClient(""), str(tmp_path / "kubeconfig"), lifetime=600, system=System(str(tmp_path)), clock=lambda: now[0]
    )
    of_file.renew_if_due()
    assert of_file.expires == 1100.0
    supervisor.expires = 1100.0
    assert supervisor.problem() == ""
    now[0] = 1100.0
    assert "has ended" in supervisor.problem()
