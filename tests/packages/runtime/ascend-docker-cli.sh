#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# Mount files and directories of the host into a new container, read-only and with the same paths.
# usage: ascend-docker-cli --pid PID --rootfs DIRECTORY [--mount-file PATH | --mount-dir PATH] ...
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
pid="" rootfs=""

inside() { nsenter --mount="/proc/$pid/ns/mnt" -- "$@"; }

mount_path() { # path
    inside mount --bind "$1" "$rootfs$1"
    inside mount -o remount,bind,ro,nosuid "$rootfs$1"
}

while [ $# -gt 1 ]; do
    case $1 in
    --pid) pid=$2 ;;
    --rootfs) rootfs=$2 ;;
    --mount-dir)
        inside mkdir -p "$rootfs$2"
        mount_path "$2"
        ;;
    --mount-file)
        inside mkdir -p "$rootfs$(dirname "$2")"
        inside touch "$rootfs$2"
        mount_path "$2"
        ;;
    *) exit 2 ;;
    esac
    shift 2
done
