# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The kubelet's protocols: .proto files and the modules generated from them (see generate.py)."""
