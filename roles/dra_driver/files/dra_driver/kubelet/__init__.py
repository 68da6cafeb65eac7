# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the kubelet calls: registration and the DRA service. Protocol only, no decisions."""
