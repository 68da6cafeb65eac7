# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# shellcheck shell=bash
# Shared functions of the replacements for the driver and firmware packages. Codes and states are the vendor's, messages are not.

root=$FAKE_ROOT
info=$root/etc/ascend_install.info
log_directory=$root/var/log/ascend_seclog
lock=$root/var/lock/ascend-package

say() {
    mkdir -p "$log_directory"
    echo "$*"
    echo "$*" >>"$log_directory/ascend_install.log"
}

refuse() { # code, words
    say "[ERROR] $1: $2"
    exit 1
}

read_record() { # key
    [ -f "$info" ] && sed -n "s/^$1=//p" "$info" | tail -n 1
}

write_record() { # key, value
    mkdir -p "$(dirname "$info")"
    touch "$info"
    grep -v "^$1=" "$info" >"$info.new"
    echo "$1=$2" >>"$info.new"
    mv "$info.new" "$info"
    chmod 644 "$info"
}

is_root() { [ -n "$root" ] || [ "$(id -u)" = 0 ]; }

has_user() { # name
    if [ -n "$root" ]; then grep -qs "^$1:" "$root/etc/passwd"; else getent passwd "$1" >/dev/null; fi
}

has_group() { # user, group: the primary group of the user, or one with the user as a member
    local number
    if [ -n "$root" ]; then
        number=$(sed -n "s/^$1:[^:]*:[^:]*:\([0-9]*\):.*/\1/p" "$root/etc/passwd")
        grep -qsE "^$2:[^:]*:($number:|[0-9]*:(.*,)?$1(,.*)?$)" "$root/etc/group"
    else
        id -nG "$1" | tr ' ' '\n' | grep -qxF -- "$2"
    fi
}

in_use() { # whether a process has the device node of a chip open; below FAKE_ROOT, a file shows this
    if [ -n "$root" ]; then
        [ -e "$root/run/npus-in-use" ]
        return
    fi
    local link
    for link in /proc/[0-9]*/fd/*; do
        case $(readlink "$link" 2>/dev/null) in /dev/davinci[0-9]* | /dev/vdavinci*) return 0 ;; esac
    done
    return 1
}

take_lock() {
    mkdir -p "$(dirname "$lock")"
    exec 9>"$lock"
    flock -n 9 || refuse 0x0094 "another package is being run"
}

# Options of all packages. $verb is the requested action.
# shellcheck disable=SC2034 # each package reads its own
verb="" quiet=no for_all=no directory="" user="" group="" rebuild=yes
# shellcheck disable=SC2034
read_options() {
    local word
    for word in "$@"; do
        case $word in
        --full | --run | --devel | --docker | --upgrade | --uninstall | --version)
            [ -z "$verb" ] || refuse 0x0004 "$word and --$verb do not go together"
            verb=${word#--}
            ;;
        --quiet) quiet=yes ;;
        --install-for-all) for_all=yes ;;
        --install-path=/*) directory=${word#*=} ;;
        --install-path=*) refuse 0x0003 "${word#*=} is no absolute path" ;;
        --install-username=?*) user=${word#*=} ;;
        --install-usergroup=?*) group=${word#*=} ;;
        --norebuild) rebuild=no ;;
        --force | --nox11) ;;
        *) refuse 0x0004 "$word is not known" ;;
        esac
    done
    [ -n "$verb" ] || refuse 0x0002 "it is not said what is to be done"
}

accept() {
    [ "$quiet" = no ] || return 0
    echo "Do you accept the licence? [y/n]"
    local answer=""
    read -r answer || true
    [ "$answer" = y ] || [ "$answer" = Y ] || refuse 0x0002 "the licence was not accepted"
}

stop_if_requested() { # point of the installation
    if [ "${FAKE_STOP:-}" = "$1" ]; then kill -9 $$; fi
}
