# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Metrics of the current state, read at each scrape and independent of the work on claims."""
