# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Control a headless Chromium of the distribution through WebDriver, for one test."""

from __future__ import annotations

import base64
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files"),
)
SECONDS = 300.0
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Space": "\ue00d", "Shift": "\ue008"}


class BrowserError(Exception):
    """The browser rejected a command, or did not answer before the timeout."""


class Browser:
    """A browser window."""

    def __init__(self, base: str, session: str) -> None:
        self._base, self._session = base, session

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send one WebDriver command and return its value. Raises BrowserError."""
        return _request(method, f"{self._base}/session/{self._session}{path}", body if method == "POST" else None)

    def protocol(self, command: str, **parameters: Any) -> Any:
        """Send a command of the Chrome DevTools Protocol and return its result."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path: Path) -> None:
        """Open a file and wait until it is loaded."""
        self.call("POST", "/url", {"url": path.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function and return its result."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function that passes its result to its last argument, a callback, and return the result."""
        return self.call("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        actions = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def set_media(self, *, dark: bool = False, reduced: bool = False, kind: str = "screen") -> None:
        """Emulate dark mode, reduced motion, or a media type (``kind``: ``screen`` or ``print``)."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced else "no-preference"},
        ]
        self.protocol("Emulation.setEmulatedMedia", media=kind, features=features)

    def set_size(self, width: int, height: int) -> None:
        """Set the size of the window in CSS pixels."""
        self.protocol(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return a PNG image of the window, or of the ``whole`` page."""
        answer = self.protocol("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def pdf(self) -> bytes:
        """Return the printed page as PDF."""
        self.set_media(kind="")  # an emulated media type would also apply to the print
        return base64.b64decode(self.protocol("Page.printToPDF", printBackground=True)["data"])

    def console_messages(self) -> list[str]:
        """Return the messages of the browser's console."""
        return [str(each["message"]) for each in self.call("POST", "/se/log", {"type": "browser"})]


def _request(method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if method != "POST" else json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        found = json.loads(error.read()).get("value", {})
        raise BrowserError(f"{method} {url}: {found.get('error')}: {found.get('message')}") from error
    except (OSError, ValueError) as error:
        raise BrowserError(f"{method} {url}: {error}") from error


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """Start a browser with its profile and log in ``directory``. Installs the browser if it is missing."""
    subprocess.run([ROOT / "tests/tools/packages", "browser"], check=True)
    log = directory / "chromedriver.log"
    with log.open("wb") as out, subprocess.Popen(["chromedriver", "--port=0"], stdout=out, stderr=out) as driver:
        try:
            base = f"http://127.0.0.1:{_port(driver, log)}"
            options = {"args": [*ARGUMENTS, f"--user-data-dir={directory / 'profile'}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            wanted["timeouts"] = {"pageLoad": 240000, "script": 240000}  # type: ignore[dict-item]
            session = _request("POST", f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})
            window = Browser(base, session["sessionId"])
            try:
                yield window
            finally:
                window.call("DELETE", "")
        finally:
            driver.terminate()
            driver.wait(30)


def _port(driver: subprocess.Popen[bytes], log: Path) -> int:
    """Return the port that chromedriver reports in its log."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and driver.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if "started successfully on port " in line:
                return int(line.rstrip(".").rpartition(" ")[2])
        time.sleep(0.1)
    raise BrowserError(f"chromedriver did not start: {log.read_text(errors='replace')}")
