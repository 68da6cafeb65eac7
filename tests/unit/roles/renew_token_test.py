# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The node renews its own token in time, and does not change the kubeconfig if it cannot."""

from __future__ import annotations

import asyncio
import base64
import datetime
import itertools
import json
import stat
import time
from pathlib import Path

import pytest
from dra_driver import renew_token
from dra_driver.api.kubeconfig import load_access
from dra_driver.api.token import Claims, read_claims, refusal
from dra_driver.core.certificates import create_ca
from dra_driver.core.host.system import System
from dra_driver.supervisors.token_renewal import TokenSupervisor
from hypothesis import given
from hypothesis import strategies as st
from token_server import TokenServer, web_token

from tests.unit.crash_steps import kill_before

ACCOUNT = "system:serviceaccount:dra-accelerators:driver-node-1"
LIFETIME = 2592000


def token_of(server: TokenServer, age: float, node: str = "node-1", audiences: list[str] | None = None) -> str:
    uid = server.nodes["node-1"]
    return web_token(ACCOUNT, node, uid, issued=time.time() - age, lifetime=LIFETIME, audiences=audiences)


def renew(kubeconfig: Path) -> int:
    return renew_token.main(["--kubeconfig", str(kubeconfig), "--lifetime", str(LIFETIME)])


def test_young_token_is_not_renewed(server: TokenServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token_of(server, age=LIFETIME * 0.6))
    before = kubeconfig.read_text(encoding="utf-8")
    assert renew(kubeconfig) == 0
    assert "nothing was done" in capsys.readouterr().out
    assert server.requests == []
    assert kubeconfig.read_text(encoding="utf-8") == before


def test_older_token_is_renewed_with_its_own_identity(server: TokenServer, tmp_path: Path) -> None:
    old = token_of(server, age=LIFETIME * 0.7)
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", old)
    assert renew(kubeconfig) == 0
    (request,) = server.requests
    assert request["caller"] == f"Bearer {old}"
    assert request["path"] == "/api/v1/namespaces/dra-accelerators/serviceaccounts/driver-node-1/token"
    assert request["boundObjectRef"]["uid"] == server.nodes["node-1"]
    new = load_access(str(kubeconfig)).token
    assert new in server.valid
    assert stat.S_IMODE(kubeconfig.stat().st_mode) == 0o600
    expected = server.kubeconfig(tmp_path / "as the role writes it", new)
    assert kubeconfig.read_text(encoding="utf-8") == expected.read_text(encoding="utf-8")


def test_renewal_killed_before_any_step_next_run_completes_it(server: TokenServer, tmp_path: Path) -> None:
    for number in itertools.count():
        directory = tmp_path / str(number)
        directory.mkdir()
        old = token_of(server, age=LIFETIME * 0.7)
        kubeconfig = server.kubeconfig(directory / "kubeconfig", old)
        step = kill_before(number, lambda kubeconfig=kubeconfig: renew(kubeconfig), directory)
        assert (load_access(str(kubeconfig)).token == old) is bool(step)
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in directory.glob(".*")), step
        assert renew(kubeconfig) == 0
        assert load_access(str(kubeconfig)).token != old and list(directory.iterdir()) == [kubeconfig], step
        if not step:
            assert number > 1
            return


def test_shorter_lifetime_than_requested_is_reported(
    server: TokenServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.longest = 3600
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token_of(server, age=LIFETIME * 0.7))
    assert renew(kubeconfig) == 0
    assert "for 3600 seconds, but 2592000 seconds were requested" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["program", "driver"])
def test_renew_by_address_uses_tls_server_name_and_no_proxy(
    server: TokenServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The certificate names only the host ``kubernetes``, the server is dialed by its IP address, and the proxy is a closed port."""
    for variable in ("https_proxy", "HTTPS_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    authority = create_ca(datetime.datetime.now(datetime.timezone.utc), 3600)
    server.serve_tls(authority, ["kubernetes"])
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token_of(server, age=LIFETIME * 0.7))
    document = json.loads(kubeconfig.read_text(encoding="utf-8"))
    document["clusters"][0]["cluster"] = {
        "server": server.url,
        "certificate-authority-data": base64.b64encode(authority.certificate).decode(),
        "tls-server-name": "kubernetes",
    }
    kubeconfig.write_text(json.dumps(document), encoding="utf-8")
    if by == "program":
        assert renew(kubeconfig) == 0
    else:
        assert supervisor(kubeconfig)[0].renew_if_due() > 600
    assert load_access(str(kubeconfig)).token in server.valid


def test_renew_after_change_of_issuer_requests_audiences_of_the_present_token(
    server: TokenServer, tmp_path: Path
) -> None:
    """The policy for token requests lists the audiences of the last playbook run, and all nodes have renewed their tokens since."""
    old, new = "https://old.example", "https://new.example"
    server.audiences, server.allowed_audiences = [old], [old]
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token_of(server, age=LIFETIME * 0.7, audiences=[old]))
    assert renew(kubeconfig) == 0 and "audiences" not in server.requests[-1]
    server.audiences = [new, old]
    server.kubeconfig(kubeconfig, token_of(server, age=LIFETIME * 0.7, audiences=[old]))
    assert renew(kubeconfig) == 0
    claims = read_claims(load_access(str(kubeconfig)).token)
    assert claims is not None and claims.audiences == (old,)
    # After a playbook run the token is for both issuers again, so that it survives the removal of the old issuer.
    server.allowed_audiences = [new, old]
    server.kubeconfig(kubeconfig, token_of(server, age=LIFETIME * 0.7, audiences=[old]))
    assert renew(kubeconfig) == 0
    claims = read_claims(load_access(str(kubeconfig)).token)
    assert claims is not None and claims.audiences == (new, old)


def test_renew_rejected_for_all_audiences_keeps_the_token(
    server: TokenServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.allowed_audiences = []
    old = token_of(server, age=LIFETIME * 0.7, audiences=["https://old.example"])
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", old)
    assert renew(kubeconfig) == 1 and "403" in capsys.readouterr().err
    assert load_access(str(kubeconfig)).token == old and len(server.requests) == 2


@given(st.floats(600, 1e8), st.floats(0, 2))
def test_checks_of_any_lifetime_are_in_time(life: float, age: float) -> None:
    """For any lifetime that the server grants: the token is due with a third left, checked four times in its lifetime, and before its end."""
    claims = Claims("a", 1000.0, 1000.0 + life, "n", "u")
    now = 1000.0 + life * age
    assert claims.due(now) == (claims.expires - now <= life / 3)
    wait = claims.seconds_until_check(now)
    assert 0 < wait <= max(life / 4, 5.0)
    if not claims.due(now):
        assert now + wait <= claims.expires - life / 3 + 5.0


@given(st.floats(600, 1e7), st.integers(1, 30))
def test_token_renewed_at_its_checks_never_expires(life: float, lives: int) -> None:
    now, claims = 0.0, Claims("a", 0.0, life, "n", "u")
    while now < life * lives:
        assert now < claims.expires
        if claims.due(now):
            claims = Claims("a", now, now + life, "n", "u")
        now += claims.seconds_until_check(now)


class KeptClient:
    """A client that reloads its credentials on request."""

    def __init__(self) -> None:
        self.read_again = 0

    async def reload_if_changed(self) -> bool:
        self.read_again += 1
        return False


def supervisor(kubeconfig: Path, lifetime: int = LIFETIME) -> tuple[TokenSupervisor, KeptClient]:
    client = KeptClient()
    return TokenSupervisor(client, str(kubeconfig), lifetime=lifetime, system=System()), client  # type: ignore[arg-type]


def test_driver_renews_by_the_granted_lifetime(
    server: TokenServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.longest = 600
    uid = server.nodes["node-1"]
    old = web_token(ACCOUNT, "node-1", uid, issued=time.time() - 500, lifetime=600)
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", old)
    kept, _client = supervisor(kubeconfig)
    with caplog.at_level("INFO"):
        wait = kept.renew_if_due()
        assert load_access(str(kubeconfig)).token in server.valid
        assert wait <= 150
        assert kept.renew_if_due() <= 150
    assert len(server.requests) == 1
    assert "The token was renewed" in caplog.text
    assert caplog.text.count("for 600 seconds, but") == 1


def test_check_server_is_overloaded_waits_at_least_its_retry_after(server: TokenServer, tmp_path: Path) -> None:
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token_of(server, age=LIFETIME * 0.9))
    server.retry_after = 120
    kept, _client = supervisor(kubeconfig)
    waits = [kept.renew_if_due() for _round in range(6)]
    assert all(120 <= wait <= 180 for wait in waits[:4]) and len(set(waits[:4])) > 1
    assert waits[5] >= 320
    assert len(server.requests) == 6


def test_driver_retries_and_reports_the_remedy(
    server: TokenServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token_of(server, age=LIFETIME * 0.9))
    server.refuse_callers = True
    kept, client = supervisor(kubeconfig)
    waits = [kept.renew_if_due() for _round in range(8)]
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600]
    assert caplog.text.count("is not renewed") == 1
    assert "ansible-playbook dra.accelerators.site --limit node-1" in caplog.text
    server.refuse_callers = False
    assert kept.renew_if_due() > 600

    async def main() -> None:
        running = asyncio.ensure_future(kept.run())
        while client.read_again < 2:
            await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("step", [-7200.0, 7200.0])
def test_system_clock_step_does_not_delay_checks(
    server: TokenServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """Hosts whose hardware clock has local time start with a wrong time, and a token can last less than the difference: checks are not delayed."""
    monkeypatch.setattr("dra_driver.supervisors.token_renewal.TICK_SECONDS", 0.01)
    uid = server.nodes["node-1"]
    young = web_token(ACCOUNT, "node-1", uid, issued=time.time(), lifetime=LIFETIME)
    system, monotonic, scans = [5000.0], [100.0], []
    kept = TokenSupervisor(
        KeptClient(),  # type: ignore[arg-type]
        str(server.kubeconfig(tmp_path / "kubeconfig", young)),
        lifetime=LIFETIME,
        system=System(),
        clock=lambda: system[0],
        monotonic=lambda: monotonic[0],
    )

    def check() -> float:
        scans.append(monotonic[0])
        return 900.0

    async def until(number: int) -> bool:
        for _each in range(100):
            if len(scans) == number:
                return True
            await asyncio.sleep(0.02)
        return False

    async def main() -> None:
        running = asyncio.ensure_future(kept.run())
        assert await until(1)
        system[0] += step
        assert await until(2), "the dates of the token are compared with the new time"
        system[0] += 899
        monotonic[0] += 899
        await asyncio.sleep(0.2)
        assert len(scans) == 2
        system[0] += 1
        monotonic[0] += 1
        assert await until(3)
        running.cancel()

    monkeypatch.setattr(kept, "renew_if_due", check)
    asyncio.run(main())


def test_externally_managed_credentials_are_unchanged(server: TokenServer, tmp_path: Path) -> None:
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", "opaque")
    before = kubeconfig.read_text(encoding="utf-8")
    assert supervisor(kubeconfig)[0].renew_if_due() == 600
    assert supervisor(tmp_path / "none")[0].renew_if_due() == 10
    assert kubeconfig.read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    ("age", "node", "words"),
    [
        (0.1, "node-1", ["Node object node-1", "was deleted", "--limit node-1"]),
        (1.5, "node-1", ["ended at", "--limit node-1"]),
        (0.1, "", ["the service account was deleted"]),
    ],
)
def test_rejection_reports_reason_and_command(server: TokenServer, age: float, node: str, words: list[str]) -> None:
    text = refusal(token_of(server, LIFETIME * age, node), time.time())
    for word in [*words, "ansible-playbook dra.accelerators.site"]:
        assert word in text
    assert "run the dra_driver role" in refusal("opaque", 0)
    controllers = "system:serviceaccount:dra-accelerators-controller:controller"
    token = web_token(controllers, node, server.nodes["node-1"], issued=time.time() - LIFETIME * age, lifetime=LIFETIME)
    assert "ansible-playbook dra.accelerators.controller" in refusal(token, time.time())


@pytest.mark.parametrize("case", ["refused", "unreachable", "unbound", "not a token"])
def test_failure_is_reported_and_the_file_is_kept(
    server: TokenServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    token = {"unbound": token_of(server, LIFETIME, node=""), "not a token": "x"}.get(case, token_of(server, LIFETIME))
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token)
    if case == "refused":
        server.accounts.clear()
    if case == "unreachable":
        document = json.loads(kubeconfig.read_text(encoding="utf-8"))
        document["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
        kubeconfig.write_text(json.dumps(document), encoding="utf-8")
    before = kubeconfig.read_text(encoding="utf-8")
    assert renew(kubeconfig) == 1
    expected = {
        "refused": "was answered with 404",
        "unreachable": "did not answer",
        "unbound": "bound to no node",
        "not a token": "not a JSON web token",
    }
    assert expected[case] in capsys.readouterr().err
    assert kubeconfig.read_text(encoding="utf-8") == before
