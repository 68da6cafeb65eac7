# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The report of a fleet: the combined data of its nodes and its cluster, and the data of the report page."""
