# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""From a claim to a prepared claim and back: plans, the store, execution and recovery."""
