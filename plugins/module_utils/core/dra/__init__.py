# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The objects of dynamic resource allocation: ResourceSlices, configurations, DeviceClasses, and what claims get."""
