# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The exception of the test world."""


class WorldError(Exception):
    """A step failed. The message names the found value, the expected value, and the remedy."""
