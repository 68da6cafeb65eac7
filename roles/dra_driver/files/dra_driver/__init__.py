# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The DRA node driver: publishes a node's accelerators to Kubernetes and prepares claims for the kubelet."""

__version__ = "0.1.0"
