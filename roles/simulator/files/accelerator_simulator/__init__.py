# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A machine full of GPUs as the driver, the kernel and NVML would show it, made of data files."""
