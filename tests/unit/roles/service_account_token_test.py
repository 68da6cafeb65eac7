# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module service_account_token: kept tokens, replaced tokens, and refused inputs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dra.accelerators.plugins.modules import service_account_token
from token_server import TokenServer, web_token

ACCOUNT = "system:serviceaccount:dra-accelerators:driver-node-1"
LIFETIME = 2592000
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(server: TokenServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the module for node-1 and returns its result."""

    def call(*, check: bool = False, **options: Any) -> dict[str, Any]:
        whole = {
            "kubeconfig": str(server.kubeconfig(tmp_path / "operator", "operator")),
            "name": "driver-node-1",
            "namespace": "dra-accelerators",
            "node": "node-1",
            **options,
        }
        with patch_module_args({**whole, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            service_account_token.main()
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return call


def present(server: TokenServer, *, age: float = 0, accepted: bool = True, **other: str) -> str:
    facts = {"account": ACCOUNT, "node": "node-1", "uid": server.nodes["node-1"], **other}
    token = web_token(facts["account"], facts["node"], facts["uid"], issued=time.time() - age, lifetime=LIFETIME)
    if accepted:
        server.valid.add(token)
    return token


def test_first_token_is_bound_to_the_node(server: TokenServer, run: Run) -> None:
    result = run()
    assert result["changed"], result
    (request,) = server.requests
    assert request["path"] == "/api/v1/namespaces/dra-accelerators/serviceaccounts/driver-node-1/token"
    assert request["boundObjectRef"] == {
        "apiVersion": "v1",
        "kind": "Node",
        "name": "node-1",
        "uid": server.nodes["node-1"],
    }
    assert request["expirationSeconds"] == LIFETIME
    assert result["token"] in server.valid
    assert abs(result["expires"] - time.time() - LIFETIME) < 60


def test_shorter_lifetime_than_requested_is_reported(server: TokenServer, run: Run) -> None:
    # Ansible collects the warnings of all modules in one process.
    flag = "--service-account-max-token-expiration"
    result = run()
    assert result["lifetime"] == LIFETIME
    assert flag not in str(result.get("warnings"))
    server.longest = 3600
    result = run()
    assert result["lifetime"] == 3600
    (text,) = (str(warning) for warning in result["warnings"] if flag in str(warning))
    assert "3600 seconds" in text and str(LIFETIME) in text


def test_good_token_is_kept(server: TokenServer, run: Run) -> None:
    result = run(token=present(server, age=LIFETIME / 2))
    assert not result["changed"], result
    assert result["token"] == ""
    assert server.requests == []


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"age": LIFETIME * 0.7}, "are left"),
        ({"age": LIFETIME * 2}, "0 of its"),
        ({"uid": "22222222-0000-4000-8000-000000000000"}, "not bound to the current Node object"),
        ({"node": "node-2"}, "not bound to the current Node object"),
        ({"node": ""}, "not bound to the current Node object"),
        ({"account": "system:serviceaccount:default:default"}, "belongs to system:serviceaccount:default:default"),
        ({"accepted": False}, "does not accept it: unknown key"),
    ],
)
def test_token_that_is_no_longer_good_is_replaced(
    server: TokenServer, run: Run, facts: dict[str, Any], why: str
) -> None:
    result = run(token=present(server, **facts))
    assert result["changed"], result
    assert why in result["reason"]
    assert result["token"] in server.valid


@pytest.mark.parametrize("text", ["nonsense", "a.b.c", "e30.bm90IGpzb24.e30", "VALUE.W10.x"])
def test_file_without_a_token_is_replaced(run: Run, text: str) -> None:
    result = run(token=text)
    assert result["changed"], result
    assert result["reason"] == "it is not a token"


def test_check_mode_reports_the_change_and_requests_nothing(server: TokenServer, run: Run) -> None:
    result = run(check=True)
    assert result["changed"], result
    assert (result["token"], result["expires"]) == ("", 0)
    assert server.requests == []
    assert not run(check=True, token=present(server))["changed"]


def test_missing_node_and_missing_account_are_named(run: Run) -> None:
    assert 'nodes "node-9" not found' in run(node="node-9")["msg"]
    assert 'serviceaccounts "driver-node-7" not found' in run(name="driver-node-7")["msg"]


def test_server_that_does_not_bind_tokens_is_refused(server: TokenServer, run: Run) -> None:
    server.binds = False
    result = run()
    assert result["failed"]
    assert result["error_code"] == "unbound-token"
    assert "not bound to the node node-1" in result["msg"]
