# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Huawei's Ascend NPUs: everything that is theirs alone."""
