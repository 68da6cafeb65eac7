# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the kubelet calls: registration and the DRA service. Protocol only, no decisions.

Importing this settles which of its transports gRPC uses, before anything here imports gRPC, which reads that once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os

# The releases of gRPC, by major and minor number, of which it was measured and tested: others keep their own choice, and say nothing.
_MEASURED = ("1.85.",)
# gRPC reads and writes on its own threads ("event engine") and hands each message over to the thread that waits for it. The transport
# before that does both on the thread that waits: a call costs a third less of the processor, and three wake-ups less.
_TRANSPORT = "-event_engine_listener"


def settle_transport(release: str) -> None:
    """Have gRPC of a release serve without threads of its own; what the environment says already stands."""
    if release.startswith(_MEASURED):
        os.environ.setdefault("GRPC_EXPERIMENTS", _TRANSPORT)


with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    settle_transport(importlib.metadata.version("grpcio"))
