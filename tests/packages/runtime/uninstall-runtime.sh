# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# shellcheck shell=bash
# What the stand-in for the runtime leaves to remove itself. Like the vendor's it removes the folder two levels above itself, whatever else is there.
rm -rf "${FAKE_ROOT:-}/etc/ascend-docker-runtime.d" "$(cd "$(dirname "$0")/../.." && pwd)"
