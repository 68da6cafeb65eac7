# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The backend for NVIDIA GPUs: discovery, Multi-Instance GPU (MIG), published devices, and container edits."""
