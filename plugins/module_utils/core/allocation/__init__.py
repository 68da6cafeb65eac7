# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the scheduler does with claims, node by node, and why it does not find devices for one. Pure; expressions are judged by who calls."""
