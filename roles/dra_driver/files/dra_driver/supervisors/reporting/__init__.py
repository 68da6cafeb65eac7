# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""One vendor's driver in parts: each keeps one thing going on its own, and all that they share is data."""
