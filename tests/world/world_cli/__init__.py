# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The test world: a real Kubernetes cluster of systemd containers on one host."""
