# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The servers for the kubelet: registration and the DRA service. Protocol only, no decisions.

The import of this package selects gRPC's transport, before another module imports gRPC, which reads the selection only
once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os

# The tested gRPC releases, by major and minor version. Others keep their default.
_MEASURED = ("1.85.",)
# gRPC reads and writes on its own threads ("event engine"), and passes each message to the waiting thread. The previous
# transport does both on the waiting thread: a call needs a third less processor time, and three wake-ups less.
_TRANSPORT = "-event_engine_listener"


def settle_transport(release: str) -> None:
    """Make a tested gRPC release serve without its own threads. An existing environment variable has precedence."""
    if release.startswith(_MEASURED):
        os.environ.setdefault("GRPC_EXPERIMENTS", _TRANSPORT)


with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    settle_transport(importlib.metadata.version("grpcio"))
