# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Runs the command line: ``python -m dra_driver.controller``."""

from __future__ import annotations

import sys

from .commands import main

sys.exit(main())
