# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A process of the DCMI helper. It opens the library, and serves requests one after the other on one thread.

``python -I run.py dra_driver.core.vendors.ascend.dcmi.helper_worker REQUESTS EVENTS ROOT``: the descriptors of two sockets, and the
root directory of the host. EVENTS is -1 for a process that does not subscribe to fault events.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from ....errors import AcceleratorError, BackendUnavailable, unexpected
from ....host.system import System
from ..npu_smi.npu_smi_source import Program
from ..readings import Source, Told
from . import messages
from .boundary import refuse_container
from .dcmi_source import Library


class Answers:
    """Answer requests with the vendor's library, or with npu-smi if the library cannot be used."""

    def __init__(self, system: System, events: int) -> None:
        self._system = system
        self._events = events
        self._source: Source | None = None

    def answer(self, line: bytes) -> bytes:
        """Return the reply to a request."""
        try:
            method, arguments = messages.parse_request(line)
            if self._source is None:
                self._source = self._open()
            if method == messages.OPEN:
                return messages.result(self._source.name)
            return messages.result(getattr(self._source, method)(*arguments))
        except AcceleratorError as error:
            return messages.failure(error)
        except Exception as error:  # noqa: BLE001  the process serves the next request
            return messages.failure(unexpected(error, "A request to the DCMI helper"))

    def _open(self) -> Source:
        """Open the library, or npu-smi. Raises BackendUnavailable with the reason of the library."""
        refuse_container(self._system)
        source: Source = Library(self._system)
        try:
            source.open()
        except BackendUnavailable as reason:
            source = Program(self._system)
            try:
                source.open()
            except BackendUnavailable:
                raise reason from None
            sys.stderr.write(f"the library of the NPUs cannot be used, so npu-smi is used: {reason}\n")
        if self._events >= 0:
            source.subscribe(self._send_event)
        return source

    def _send_event(self, event: Told) -> None:
        """Send an event. Runs on a thread of the library."""
        os.write(self._events, messages.event(event))


def main(arguments: Sequence[str]) -> int:
    """Answer requests until the helper closes the socket."""
    requests, events, root = int(arguments[0]), int(arguments[1]), arguments[2]
    # Programs that the library starts must not keep the sockets open after this process.
    for each in (requests, events):
        if each >= 0:
            os.set_inheritable(each, False)
    answers = Answers(System(root), events)
    with socket.socket(fileno=requests) as channel, channel.makefile("rb") as lines:
        for line in lines:
            channel.sendall(answers.answer(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
