# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The report of a fleet: what its nodes and its cluster say together, and the picture that is drawn of it."""
