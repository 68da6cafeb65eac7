# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What a person asks on the node: the driver is asked where it runs, and its files are read where it does not."""
