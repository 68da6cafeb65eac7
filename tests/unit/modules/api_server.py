# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A model API server for ResourceSlices: versions of objects, preconditions, dry run, and field managers.

It does not validate the content of slices. Tests with the real API server do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.unit.json_server import JsonHandler, JsonServer

Json = dict[str, Any]
GROUP = "/apis/resource.k8s.io"


class Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class ApiServer(JsonServer):
    """A server on its own port. ``writes`` are all requests that changed something, or would have in a dry run."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.requests: list[tuple[str, str, dict[str, str], Json | None]] = []
        self.minor = "37"
        self.versions = ["v1", "v1beta2", "v1beta1"]
        self.drop: Callable[[Json], None] = lambda spec: None
        self.before_write: Callable[[str], None] = lambda method: None
        self.token = "let-me-in"
        self._number = 0
        server = self

        class Handler(JsonHandler):
            def take(self) -> None:
                body = self.body()
                parts = urlsplit(self.path)
                try:
                    if self.headers.get("Authorization") != f"Bearer {server.token}":
                        raise Refused(401, "Unauthorized", "Unauthorized")
                    status, data = 200, server.handle(self.command, parts.path, dict(parse_qsl(parts.query)), body)
                except Refused as error:
                    status = error.status
                    data = {"kind": "Status", "message": str(error), "reason": error.reason, "code": status}
                self.answer(status, data)

            do_GET = do_POST = do_PUT = do_DELETE = take  # noqa: N815 http.server's names

        super().__init__(Handler)

    @property
    def writes(self) -> list[tuple[str, str, dict[str, str]]]:
        """Return method, path, and query of each write without dry run."""
        return [
            (method, path, query)
            for method, path, query, body in self.requests
            if method != "GET" and not self.is_dry(method, query, body)
        ]

    @property
    def slices(self) -> list[Json]:
        return [self.objects[name] for name in sorted(self.objects)]

    def add(self, name: str, spec: Json, **metadata: Any) -> Json:
        """Store an object as another client does."""
        self._number += 1
        self.objects[name] = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": name, "uid": f"uid-{self._number}", "resourceVersion": str(self._number), **metadata},
            "spec": spec,
        }
        return self.objects[name]

    def handle(self, method: str, path: str, query: dict[str, str], body: Json | None) -> Json:
        self.requests.append((method, path, query, copy.deepcopy(body)))
        if path == "/version":
            return {"major": "1", "minor": self.minor}
        if path == GROUP:
            return {"versions": [{"version": version} for version in self.versions]}
        version, _slash, rest = path.removeprefix(f"{GROUP}/").partition("/")
        kind, _slash, name = rest.partition("/")
        if version not in self.versions or kind != "resourceslices":
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if method == "GET":
            return self._list(query)
        dry = self.is_dry(method, query, body)
        if not dry:
            self.before_write(method)
        if method == "DELETE":
            return self._delete(name, body or {}, dry)
        return self._write(name, body or {}, query, f"resource.k8s.io/{version}", dry)

    @staticmethod
    def is_dry(method: str, query: dict[str, str], body: Json | None) -> bool:
        """Return whether a request is a dry run. For a deletion with a body the query is ignored, as in the real server."""
        if method == "DELETE" and body:
            return body.get("dryRun") == ["All"]
        return query.get("dryRun") == "All"

    def _list(self, query: dict[str, str]) -> Json:
        driver = query["fieldSelector"].removeprefix("spec.driver=")
        found = [each for each in self.slices if each["spec"]["driver"] == driver]
        start = int(query.get("continue", 0))
        end = start + min(int(query["limit"]), 2)  # short pages, so that a client has to request several
        rest = {"continue": str(end)} if end < len(found) else {}
        return {"kind": "ResourceSliceList", "metadata": rest, "items": copy.deepcopy(found[start:end])}

    def _check(self, name: str, wanted: Json) -> Json:
        if name not in self.objects:
            raise Refused(404, "NotFound", f'resourceslices "{name}" not found')
        metadata = self.objects[name]["metadata"]
        for key in ("uid", "resourceVersion"):
            if wanted.get(key) and wanted[key] != metadata[key]:
                raise Refused(409, "Conflict", "the object has been modified")
        return self.objects[name]

    def _delete(self, name: str, body: Json, dry: bool) -> Json:
        self._check(name, body.get("preconditions", {}))
        if not dry:
            del self.objects[name]
        return {"kind": "Status", "status": "Success"}

    def _write(self, name: str, body: Json, query: dict[str, str], api_version: str, dry: bool) -> Json:
        if body.get("apiVersion") != api_version:
            raise Refused(400, "BadRequest", f"the API version in the data ({body.get('apiVersion')}) does not match")
        written: Json = copy.deepcopy(body)
        self.drop(written["spec"])
        self._number += 1
        if name:
            old = self._check(name, body["metadata"])
            written["metadata"] = {**old["metadata"], "resourceVersion": str(self._number)}
            managers = old["metadata"].get("managedFields", [])
        else:
            name = f"{body['metadata']['generateName']}{self._number:05d}"
            written["metadata"].update(
                {"name": name, "uid": f"uid-{self._number}", "resourceVersion": str(self._number)}
            )
            managers = []
        entry = {"manager": query["fieldManager"], "operation": "Update"}
        written["metadata"]["managedFields"] = [*(one for one in managers if one != entry), entry]
        if not dry:
            self.objects[name] = written
        return copy.deepcopy(written)
