# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The part of an API server that issues and reviews service account tokens, over real HTTP."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

from dra_driver.core.api_connection import INSECURE_EXTENSION

from tests.unit.json_server import JsonHandler, JsonServer


def part(content: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


def web_token(
    account: str,
    node: str,
    uid: str,
    *,
    issued: float,
    lifetime: float,
    signature: str = "c2lnbmF0dXJl",
    audiences: list[str] | None = None,
) -> str:
    """Return a JSON web token as the API server creates it for a service account, bound to a Node object."""
    claims = {
        "sub": account,
        "iat": int(issued),
        "exp": int(issued + lifetime),
        "kubernetes.io": {"node": {"name": node, "uid": uid}} if node else {},
        **({"aud": audiences} if audiences else {}),
    }
    return f"{part({'alg': 'none'})}.{part(claims)}.{signature}"


class TokenServer(JsonServer):
    """A server with Nodes and their UIDs, the issued tokens, and the recorded requests."""

    def __init__(self) -> None:
        self.nodes = {"node-1": "11111111-0000-4000-8000-000000000000"}
        self.accounts = {"driver-node-1"}
        self.valid: set[str] = set()
        self.requests: list[dict[str, Any]] = []
        self.binds = True
        self.longest = 1 << 40
        self.audiences = ["https://kubernetes.default.svc.cluster.local"]
        #: Audiences that an admission policy permits, or None for no policy. It sees the defaults if a request names
        #: none.
        self.allowed_audiences: list[str] | None = None
        self.refuse_callers = False
        #: The Retry-After, in seconds, of the answers with status 429 to all token requests. 0 means other answers.
        self.retry_after = 0
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                if self.path.startswith("/api/v1/nodes/") and name in server.nodes:
                    self.answer(200, {"kind": "Node", "metadata": {"name": name, "uid": server.nodes[name]}})
                else:
                    self.answer(404, {"kind": "Status", "reason": "NotFound", "message": f'nodes "{name}" not found'})

            def do_POST(self) -> None:
                body = self.body()
                if self.path.endswith("/tokenreviews"):
                    known = body["spec"]["token"] in server.valid
                    self.answer(201, {"status": {"authenticated": known, "error": "" if known else "unknown key"}})
                    return
                server.requests.append({"path": self.path, "caller": self.headers["Authorization"], **body["spec"]})
                if server.retry_after:
                    self.send_response(429)
                    self.send_header("Retry-After", str(server.retry_after))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if server.refuse_callers:
                    self.answer(401, {"reason": "Unauthorized", "message": "Unauthorized"})
                    return
                words = self.path.partition("?")[0].split("/")
                if words[-2] not in server.accounts:
                    self.answer(
                        404,
                        {"kind": "Status", "reason": "NotFound", "message": f'serviceaccounts "{words[-2]}" not found'},
                    )
                    return
                audiences = body["spec"].get("audiences") or server.audiences
                if server.allowed_audiences is not None and not {*audiences} <= {*server.allowed_audiences}:
                    self.answer(
                        403, {"reason": "Forbidden", "message": "a node driver may request tokens for others only"}
                    )
                    return
                bound = body["spec"].get("boundObjectRef", {}) if server.binds else {}
                token = web_token(
                    f"system:serviceaccount:{words[-4]}:{words[-2]}",
                    bound.get("name", ""),
                    bound.get("uid", ""),
                    issued=time.time(),
                    lifetime=min(body["spec"]["expirationSeconds"], server.longest),
                    signature=f"issue{len(server.requests)}",
                    audiences=audiences,
                )
                server.valid.add(token)
                self.answer(201, {"spec": {"audiences": audiences}, "status": {"token": token}})

        super().__init__(Handler)

    def kubeconfig(self, path: Path, token: str) -> Path:
        """Write a kubeconfig for this server, in the format that the role and the renewal use."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "cluster", "cluster": {"server": self.url, "extensions": [INSECURE_EXTENSION]}}],
            "users": [{"name": "driver-node-1", "user": {"token": token}}],
            "contexts": [{"name": "driver", "context": {"cluster": "cluster", "user": "driver-node-1"}}],
            "current-context": "driver",
        }
        path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path
