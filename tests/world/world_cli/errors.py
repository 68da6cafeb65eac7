# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The one exception of the test world."""


class WorldError(Exception):
    """A step cannot go on. The message says what was found, what was expected and what to do."""
