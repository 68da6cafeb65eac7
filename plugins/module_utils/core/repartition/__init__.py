# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Change the layout of a node that pods use: operations, their record, and their progress."""
