# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Repeat the device allocation of the scheduler node by node, and explain why claims get no devices.

The package has no side effects. The caller evaluates CEL expressions.
"""
