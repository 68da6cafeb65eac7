# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module token_audiences_info."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dra.accelerators.plugins.modules import token_audiences_info
from token_server import TokenServer


def run(server: TokenServer, directory: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    """Run the module and return its result."""
    whole = {"kubeconfig": str(server.kubeconfig(directory / "operator", "operator")), **options}
    with patch_module_args(whole), pytest.raises(SystemExit):
        token_audiences_info.main()
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_audiences_are_returned_without_the_token(
    server: TokenServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.accounts.add("default")
    server.audiences = ["https://issuer.example.com", "k3s"]
    for check in (False, True):
        found = run(server, tmp_path, capsys, _ansible_check_mode=check)
        assert not found["changed"] and found["audiences"] == ["https://issuer.example.com", "k3s"]
        assert not any(token in json.dumps(found) for token in server.valid)
    assert {each["path"] for each in server.requests} == {
        "/api/v1/namespaces/default/serviceaccounts/default/token?dryRun=All"
    }
    assert {each["expirationSeconds"] for each in server.requests} == {600}


def test_answer_without_audiences_fails(
    server: TokenServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.accounts.add("default")
    server.audiences = []
    found = run(server, tmp_path, capsys)
    assert found["failed"] and found["error_code"] == "no-audiences" and "default/default" in found["msg"]


def test_missing_account_is_named(server: TokenServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(server, tmp_path, capsys, name="other")
    assert found["failed"] and 'serviceaccounts "other" not found' in found["msg"]
