# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Persistent settings of devices: the settings of each device, plans, execution, and the record of previous values."""
