# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Simulate a machine with accelerators as the driver, the kernel, and the vendors' libraries show it, from data files."""
