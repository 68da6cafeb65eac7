# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The roles reject a kubelet's kubeconfig with an insecure connection to the API server, unless the option allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_driver.core.api_connection import INSECURE_EXTENSION
from playing import play

ROLES = Path(__file__).resolve().parents[3] / "roles"
HTTP = {"server": "http://api:8080"}
UNVERIFIED = {"server": "https://api:6443", "insecure-skip-tls-verify": True}
VERIFIED = {"server": "https://api:6443", "certificate-authority-data": "x"}


@pytest.mark.parametrize("role", ["dra_driver", "dra_controller"])
def test_insecure_connection_needs_the_option(tmp_path: Path, role: str) -> None:
    variables = yaml.safe_load((ROLES / role / "vars/main.yml").read_text("utf-8"))
    names = ("document", "context_entry", "theirs", "authority_file", "keys", "cluster", "insecurity", "missing")
    taken = {f"__{role}_{name}": variables.get(f"__{role}_{name}", "") for name in names}
    scene: dict[str, Any] = {f"{role}_{name}": "" for name in ("api_server", "api_ca_file", "api_insecure")}
    scene |= {f"__{role}_release": "1", f"__{role}_environment": "e", f"{role}_root": "/r"}
    scene[f"{role}_kubelet_kubeconfigs"] = []

    def host(cluster: dict[str, Any], **options: Any) -> dict[str, Any]:
        document = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k"}}],
            "clusters": [{"name": "k", "cluster": cluster}],
        }
        facts = {"kubelet": {"cluster": yaml.safe_dump(document), "kubeconfig": "/k"}}
        return {**taken, **scene, f"__{role}_host": facts, **{f"{role}_{key}": value for key, value in options.items()}}

    hosts = {
        "http": host(HTTP),
        "unverified": host(UNVERIFIED),
        "by-option": host(VERIFIED, api_server="http://api:8080"),
        "verified": host(VERIFIED),
        "with-authority": host(UNVERIFIED, api_ca_file="/ca.crt"),
        "allowed": host(HTTP, api_insecure=True),
        "claims-to-be-allowed": host({**HTTP, "extensions": [INSECURE_EXTENSION]}),
    }
    output = f"{{{{ {{'lacks': __{role}_missing, 'cluster': __{role}_cluster}} | to_json | b64encode }}}}"
    played = play(tmp_path, [{"ansible.builtin.debug": {"msg": output}}], hosts)
    assert played.status == 0, played.output
    rejected = {name for name, reported in played.messages.items() if reported["lacks"]}
    assert rejected == {"http", "unverified", "by-option", "claims-to-be-allowed"}
    (message,) = played.messages["unverified"]["lacks"]
    assert "insecure-skip-tls-verify" in message and f"{role}_api_insecure" in message
    assert played.messages["allowed"]["cluster"]["extensions"] == [INSECURE_EXTENSION]
    assert "extensions" not in played.messages["verified"]["cluster"]
