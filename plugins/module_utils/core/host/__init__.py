# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Access to the host: commands, files, PCI, VFIO, CDI, and the kubelet's pods."""
