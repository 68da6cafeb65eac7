# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The servers for the kubelet: registration and the DRA service. Protocol only, no decisions.

The import of this package selects gRPC's transport. gRPC reads the selection once, when it is first imported, so modules
import this package before gRPC.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os

# The tested gRPC releases, by major and minor version. Others keep their default.
_TESTED_RELEASES = ("1.85.",)
# gRPC reads and writes on its own threads ("event engine"), and passes each message to the waiting thread. The previous
# transport does both on the waiting thread: a call needs a third less processor time, and three wake-ups less.
_EXPERIMENTS = "-event_engine_listener"


def select_transport(release: str) -> None:
    """Make a tested gRPC release serve without its own threads. An existing environment variable has precedence."""
    if release.startswith(_TESTED_RELEASES):
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)


with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    select_transport(importlib.metadata.version("grpcio"))
