# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the command line with ``python -m world_cli``."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
