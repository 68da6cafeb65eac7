# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The settings of GPUs: read, set, save, and restore them."""
