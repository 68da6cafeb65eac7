# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Publish the node's ResourceSlices: compare the desired content with the API server."""
