# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A package index with a password, and with a proxy: it serves small wheels of any name, and watches the process list."""

from __future__ import annotations

import base64
import io
import os
import re
import threading
import zipfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

USER, PASSWORD = "reader", "open-sesame-4711"


def normal(name: str) -> str:
    """Return a project's name in the form of an index."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wheel(name: str, version: str) -> bytes:
    """Return an empty wheel."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return buffer.getvalue()


def process_list() -> list[str]:
    """Return the command lines of all processes."""
    found = []
    for name in os.listdir("/proc"):
        try:
            found.append(Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # no process, or it has ended
    return found


class PackageIndex:
    """A server for the projects of ``versions`` while its context is active."""

    def __init__(self, versions: Mapping[str, str]) -> None:
        self.versions = {normal(name): version for name, version in versions.items()}
        self.requests: list[tuple[str, bool, str]] = []  # target, whether the password was sent, the proxy's password
        self.exposed: list[str] = []
        self.installers: set[str] = set()

    def __enter__(self) -> Self:
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.answer(self)

            def log_message(self, *_words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.done = threading.Event()
        self.threads = [threading.Thread(target=self.server.serve_forever), threading.Thread(target=self.watch)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.done.set()
        self.server.shutdown()
        for thread in self.threads:
            thread.join()
        self.server.server_close()

    @property
    def address(self) -> str:
        """Return host and port."""
        return f"127.0.0.1:{self.server.server_port}"

    def watch(self) -> None:
        """Watch the process list until the end."""
        while not self.done.wait(0.1):
            self.check_processes()

    def check_processes(self) -> None:
        """Check the process list once."""
        for line in process_list():
            if PASSWORD in line:
                self.exposed.append(line)
            if "install.py" in line:
                self.installers.add(line.strip())

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Serve one request of a client, or of a client that uses this as its proxy."""
        self.check_processes()
        wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        known = request.headers.get("Authorization") == wanted
        self.requests.append((request.path, known, request.headers.get("Proxy-Authorization", "")))
        parts = urlsplit(request.path).path.strip("/").split("/")
        if not known:
            request.send_response(401)
            request.send_header("WWW-Authenticate", 'Basic realm="index"')
            request.end_headers()
            return
        body, kind = b"", "text/html"
        if parts[0] == "simple" and parts[-1] in self.versions:
            name, version = parts[-1], self.versions[parts[-1]]
            file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
            body = f'<html><body><a href="/files/{name}/{file}">{file}</a></body></html>'.encode()
        elif parts[0] == "files" and parts[1] in self.versions:
            body, kind = wheel(parts[1], self.versions[parts[1]]), "application/octet-stream"
        request.send_response(200 if body else 404)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
