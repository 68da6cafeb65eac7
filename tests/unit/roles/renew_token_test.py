# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The node renews its own token in time, and leaves the kubeconfig alone when it cannot."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest
from dra_driver import renew_token
from dra_driver.api.kubeconfig import load_access
from token_server import TokenServer, web_token

ACCOUNT = "system:serviceaccount:dra-accelerators:driver-node-1"
LIFETIME = 2592000


def token_of(server: TokenServer, age: float, node: str = "node-1") -> str:
    return web_token(ACCOUNT, node, server.nodes["node-1"], issued=time.time() - age, lifetime=LIFETIME)


def renew(kubeconfig: Path) -> int:
    return renew_token.main(["--kubeconfig", str(kubeconfig), "--lifetime", str(LIFETIME)])


def test_young_token_is_left_alone(server: TokenServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token_of(server, age=LIFETIME * 0.3))
    before = kubeconfig.read_text(encoding="utf-8")
    assert renew(kubeconfig) == 0
    assert "nothing was done" in capsys.readouterr().out
    assert server.requests == []
    assert kubeconfig.read_text(encoding="utf-8") == before


def test_older_token_is_renewed_by_itself(server: TokenServer, tmp_path: Path) -> None:
    old = token_of(server, age=LIFETIME * 0.4)
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


@pytest.mark.parametrize("case", ["refused", "unreachable", "unbound", "not a token"])
def test_failure_is_said_and_the_file_is_kept(
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
        "refused": "HTTP status 404",
        "unreachable": "could not be asked",
        "unbound": "bound to no node",
        "not a token": "not a JSON web token",
    }
    assert expected[case] in capsys.readouterr().err
    assert kubeconfig.read_text(encoding="utf-8") == before
