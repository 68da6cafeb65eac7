# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# shellcheck shell=bash
# Uninstaller of the replacement for the runtime package. Like the vendor's, it removes the directory two levels above itself with all content.
rm -rf "${FAKE_ROOT:-}/etc/ascend-docker-runtime.d" "$(cd "$(dirname "$0")/../.." && pwd)"
