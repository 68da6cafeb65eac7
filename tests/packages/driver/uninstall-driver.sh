# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# shellcheck shell=bash
# Uninstaller of the replacement for the driver package.
here=$(cd "$(dirname "$0")/.." && pwd)
root=${FAKE_ROOT:-}
if [ -e "$root/run/npus-in-use" ]; then
    echo "[ERROR] 0x0090: the NPUs are in use"
    exit 1
fi
if ! rm -rf "$here"; then
    echo "[ERROR] 0x0090: $here cannot be removed"
    exit 1
fi
rm -f "$root/etc/ascend_install.info"
rmdir "$(dirname "$here")" 2>/dev/null
echo "The driver was removed. Reboot the machine."
