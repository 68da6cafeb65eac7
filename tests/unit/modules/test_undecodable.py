# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Claims that Python cannot decode affect no module and no other claim: report, why, plan, inventory, and files of objects."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.manifest_files import documents_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError

from tests import planned
from tests.unit.ansible_process import run_ansible
from tests.unit.undecodable import MARK, NESTED, OTHER, OWN, claim, dumps

if TYPE_CHECKING:
    from typing import Self

Json = dict[str, Any]
Run = Callable[..., Json]
BASE = "/apis/resource.k8s.io"
SLICE = {
    "kind": "ResourceSlice",
    "apiVersion": "resource.k8s.io/v1",
    "metadata": {"name": "s"},
    "spec": {
        "driver": OWN,
        "nodeName": "node-1",
        "pool": {"name": "node-1", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": name, "attributes": {"type": {"string": "gpu"}}} for name in ("deep", "bad", "good")],
    },
}
CLAIMS = [claim("deep", opaque=OTHER, managed=True, data=OTHER), claim("bad", spec=MARK), claim("good")]
NODE: Json = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": "node-1"}}
CLASS = {"kind": "DeviceClass", "apiVersion": "resource.k8s.io/v1", "metadata": {"name": "gpu"}, "spec": {}}
WANTED = claim("wanted")
del WANTED["status"]


class Cluster:
    """An API server with these claims. It answers with the same bytes as Kubernetes."""

    def __init__(self) -> None:
        answers: dict[str, Json] = {
            BASE: {"versions": [{"version": "v1"}]},
            f"{BASE}/v1": {"resources": []},
            f"{BASE}/v1/resourceclaims": {"kind": "ResourceClaimList", "items": CLAIMS},
            f"{BASE}/v1/resourceslices": {"kind": "ResourceSliceList", "items": [SLICE]},
            f"{BASE}/v1/resourceclaimtemplates": {"items": []},
            f"{BASE}/v1/deviceclasses": {"items": [CLASS]},
            "/api/v1/nodes": {"kind": "NodeList", "items": [NODE]},
            "/api/v1/pods": {"items": []},
            "/version": {"major": "1", "minor": "36"},
        }

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = answers.get(urlsplit(self.path).path)
                body = dumps(found if found is not None else {"kind": "Status", "message": "not found"})
                self.send_response(200 if found is not None else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.options = {"host": f"http://127.0.0.1:{self._server.server_port}", "api_key": "let-me-in"}

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def skips_bad_only(result: Json) -> bool:
    warnings = json.dumps(result.get("warnings"))
    return "ResourceClaim default/bad" in warnings and "deep" not in warnings.replace("levels deep", "")


def test_report_undecodable_claims_are_skipped(run_here: Run) -> None:
    with Cluster() as cluster:
        result = run_here("accelerator_report", {"nodes": {}, **cluster.options})
    picture = result["ansible_facts"]["accelerator_report"]["picture"]
    assert {each["name"] for each in picture["claims"]} == {"default/deep", "default/good"} and skips_bad_only(result)


def test_why_needs_cel_undecodable_claims_are_skipped(run_here: Run) -> None:
    with Cluster() as cluster:
        result = run_here("claim_explanation_info", {"definition": json.dumps(WANTED), **cluster.options})
    assert result["explanations"][0]["verdict"] and skips_bad_only(result)


def test_plan_needs_cel_undecodable_claims_are_skipped(run_here: Run, tmp_path: Path) -> None:
    wanted = tmp_path / "wanted.json"
    wanted.write_bytes(json.dumps(WANTED).encode())
    with Cluster() as cluster:
        result = run_here(
            "fleet_plan", {"nodes": planned.answers(planned.fleet()), "src": [str(wanted)], **cluster.options}
        )
    assert "error_code" not in result and skips_bad_only(result), result


def test_claim_info_undecodable_claims_are_skipped(run_here: Run) -> None:
    with Cluster() as cluster:
        result = run_here("claim_info", {**cluster.options})
    assert {each["name"] for each in result["claims"]} == {"deep", "good"} and skips_bad_only(result)


@pytest.mark.parametrize("of_file", [False, True])
def test_inventory_undecodable_claims_are_skipped(tmp_path: Path, of_file: bool) -> None:
    with Cluster() as cluster:
        options = {"file": "cluster.json"} if of_file else cluster.options
        items = {"kind": "List", "apiVersion": "v1", "items": [SLICE, *CLAIMS, NODE]}
        (tmp_path / "cluster.json").write_bytes(dumps(items))
        given = {"plugin": "dra.accelerators.accelerators", **options}
        (tmp_path / "accelerators.yml").write_text(yaml.safe_dump(given))
        done = run_ansible(
            [Path(sys.executable).with_name("ansible-inventory"), "-i", tmp_path / "accelerators.yml", "--list"],
            env={**os.environ, "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true", "HOME": str(tmp_path)},
        )
    assert done.returncode == 0, done.stderr
    assert "ResourceClaim default/bad" in " ".join(done.stderr.split())
    (host,) = json.loads(done.stdout, object_hook=lambda each: each.get("__ansible_unsafe", each))["_meta"][
        "hostvars"
    ].values()
    free = {each["name"]: each["available"] for each in host["accelerators"]}
    assert free == {"deep": False, "bad": True, "good": False}


@pytest.mark.parametrize("indent", [None, 4])
def test_file_of_objects_skips_undecodable_ones(indent: int | None) -> None:
    listed = {"kind": "List", "apiVersion": "v1", "items": CLAIMS}
    text = json.dumps(listed, indent=indent).replace(json.dumps(MARK), NESTED)
    warnings: list[str] = []
    (found,) = documents_of(text, "cluster.json", warnings.append)
    assert [each["metadata"]["name"] for each in found["items"]] == ["deep", "good"]
    assert len(warnings) == 1 and "cluster.json" in warnings[0] and "default/bad" in warnings[0]
    with pytest.raises(AcceleratorError, match="default/bad"):
        documents_of(text, "cluster.json")


@pytest.mark.parametrize("levels", [5000, 100_000])
@pytest.mark.parametrize("text", ["a: " + "[" * 100_000, "a:\n  - " + "- " * 2000 + "b", "a: {0}"])
def test_deeply_nested_yaml_is_rejected_with_position(text: str, levels: int) -> None:
    nested = text.replace("{0}", "[" * levels + "]" * levels)
    # Newer versions of libyaml have their own limit, with another message.
    with pytest.raises(AcceleratorError, match=r"(?s)manifest\.yaml is not valid YAML: .*nest"):
        documents_of(nested, "manifest.yaml")
