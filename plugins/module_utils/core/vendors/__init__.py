# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The vendors of devices: one directory each, the protocol that it implements, and the list of all vendors."""
