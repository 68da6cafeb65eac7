# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# shellcheck shell=bash
# shellcheck disable=SC2154 # what common.sh sets
# A replacement for the firmware package. The driver loads the firmware onto the chips.
. ./common.sh

read_options "$@"
[ "$verb" != version ] || { echo "$VERSION"; exit 0; }
is_root || refuse 0x0093 "only root may run this"
take_lock
[ "$(read_record Driver_Install_Status)" = complete ] || refuse 0x0080 "there is no driver"
target=$root$(read_record Driver_Install_Path_Param)
if [ "$verb" = uninstall ]; then
    [ -f "$target/firmware/version.info" ] || refuse 0x0080 "there is no firmware"
    bash "$target/firmware/script/uninstall.sh"
    exit $?
fi
accept
[ "$verb" != upgrade ] || [ -f "$target/firmware/version.info" ] || refuse 0x0080 "there is no firmware that could be upgraded"
if [ "$(sed -n 's/^Version=//p' "$target/firmware/version.info" 2>/dev/null)" = "$VERSION" ]; then
    say "The firmware $VERSION is there already, or waits for a restart."
    exit 2
fi
mkdir -p "$target/firmware/script"
stop_if_requested firmware
cp uninstall-firmware.sh "$target/firmware/script/uninstall.sh"
chmod 500 "$target/firmware/script/uninstall.sh"
printf 'Version=%s\n' "$VERSION" >"$target/firmware/version.info"
say "The firmware $VERSION was installed. ${EFFECT:-Reboot the machine for it to take effect.}"
