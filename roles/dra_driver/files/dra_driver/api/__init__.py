# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The API server: kubeconfig, a client that speaks raw JSON, and Events."""
