# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Diagnostic commands on the node. They query the running driver, and read its files if it does not run."""
