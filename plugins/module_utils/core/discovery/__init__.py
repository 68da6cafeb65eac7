# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Scan the devices of a node: one worker per device, and locks that programs share."""
