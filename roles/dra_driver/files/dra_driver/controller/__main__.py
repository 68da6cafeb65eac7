# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the command line of the controller: ``python -I run.py dra_driver.controller``."""

from __future__ import annotations

import sys

from .commands import main

sys.exit(main())
