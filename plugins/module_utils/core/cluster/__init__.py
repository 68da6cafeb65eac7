# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the objects of an API server say: which devices are published, what of them is free, and what claims have."""
