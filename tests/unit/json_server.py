# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A local HTTP server with JSON requests and answers, as a base of model API servers."""

from __future__ import annotations

import datetime
import json
import ssl
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from typing import Self

    from dra_driver.core.certificates import KeyPair


class JsonHandler(BaseHTTPRequestHandler):
    """One request. Derived classes define do_GET and the other methods."""

    def body(self) -> Any:
        """Return the body of the request, or None without a body."""
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length)) if length else None

    def answer(self, status: int, body: Any) -> None:
        """Send the answer. As in an API server, a Status with the reason NotFound names the object of the path."""
        if status == 404 and isinstance(body, dict) and body.get("kind") == "Status":
            body = {"details": {"name": unquote(self.path.partition("?")[0].rpartition("/")[2])}, **body}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


class JsonServer:
    """A server on a free port while its context is active."""

    def __init__(self, handler: type[JsonHandler], port: int = 0) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def serve_tls(self, authority: KeyPair, names: list[str]) -> None:
        """Serve TLS from now on, with a certificate for these names only."""
        from dra_driver.core.certificates import create_serving_certificate

        now = datetime.datetime.now(datetime.timezone.utc)
        pair = create_serving_certificate(authority, names, now=now, seconds=3600)
        with tempfile.NamedTemporaryFile() as file:
            file.write(pair.certificate + pair.key)
            file.flush()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(file.name)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = self.url.replace("http:", "https:")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
