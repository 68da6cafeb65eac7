# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# shellcheck shell=bash
# Uninstaller of the replacement for the firmware package.
rm -rf "$(cd "$(dirname "$0")/.." && pwd)"
echo "The firmware was removed. Reboot the machine."
