# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# shellcheck shell=bash
# shellcheck disable=SC2154 # what common.sh sets
# A replacement for the driver package.
. ./common.sh

read_options "$@"
[ "$verb" != version ] || { echo "$VERSION"; exit 0; }
is_root || refuse 0x0093 "only root may run this"
take_lock

known=$(read_record Driver_Install_Path_Param)
target=$root${known:-${directory:-/usr/local/Ascend}}

uninstall() {
    [ -f "$target/driver/version.info" ] || refuse 0x0080 "there is no driver"
    in_use && refuse 0x0094 "the NPUs are in use"
    bash "$target/driver/script/uninstall.sh" --nested
}

[ "$verb" != uninstall ] || { uninstall; exit $?; }
accept
if [ "$verb" = upgrade ]; then
    [ -f "$target/driver/version.info" ] || refuse 0x0080 "there is no driver that could be upgraded"
    [ "$(read_record Driver_Install_Status)" = complete ] || refuse 0x0080 "the driver that is there is not complete"
fi
[ ! -f "$target/driver/version.info" ] || ! in_use || refuse 0x0094 "the NPUs are in use"
owner=${user:-$(read_record UserName)}
owner=${owner:-HwHiAiUser}
owners=${group:-$(read_record UserGroup)}
owners=${owners:-HwHiAiUser}
has_user "$owner" || refuse 0x0091 "there is no user $owner"
before=$(read_record UserName)
[ -z "$before" ] || [ "$before" = "$owner" ] || refuse 0x0095 "the driver is $before's"
has_group "$owner" "$owners" || refuse 0x0096 "$owner is not in the group $owners"
before=$(read_record UserGroup)
[ -z "$before" ] || [ "$before" = "$owners" ] || refuse 0x0096 "the driver is the group $before's"
kernel=$(uname -r)
# shellcheck disable=SC2254 # a pattern
case $kernel in
$FITS) ;;
*)
    [ "$rebuild" = yes ] || say "No module fits $kernel, and none is built."
    if [ "$rebuild" = yes ] && [ ! -e "$root/lib/modules/$kernel/build" ]; then
        refuse 0x0002 "no module fits $kernel, and its headers are not there"
    fi
    ;;
esac

write_record UserName "$owner"
write_record UserGroup "$owners"
kind=$(read_record Driver_Install_Type)
[ "$verb" = upgrade ] || kind=$verb
write_record Driver_Install_Type "${kind:-full}"
write_record Driver_Install_Path_Param "${known:-${directory:-/usr/local/Ascend}}"
write_record Driver_Install_Mode normal
write_record Driver_Install_For_All "$for_all"
write_record Driver_Install_Status start
mkdir -p "$target/driver/lib64/driver" "$target/driver/script" "$target/driver/tools"
rm -f "$target/driver/version.info"
stop_if_requested driver
if [ -n "$FILES" ]; then
    cp -an "$FILES/." "$root/" # keep existing files, which contain the state of simulated NPUs
    ldconfig
fi
cp uninstall-driver.sh "$target/driver/script/uninstall.sh"
chmod 500 "$target/driver/script/uninstall.sh"
printf 'Version=%s\npackage_version=%s\n' "$VERSION" "$VERSION" >"$target/driver/version.info"
stop_if_requested driver-late
if [ ! -e "$root/etc/vnpu.cfg" ]; then
    (umask 077 && echo "vnpu_config_recover:enable" >"$root/etc/vnpu.cfg")
fi
write_record Driver_Install_Status complete
say "The driver $VERSION was installed. ${EFFECT:-Reboot the machine for it to take effect.}"
