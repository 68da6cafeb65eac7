#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
#
# Usage: mps-settings.sh apply|check FILE
#
# apply sends the commands in FILE to the MPS daemon of CUDA_MPS_PIPE_DIRECTORY, waits up to 10 s for it, and then checks it.
# check compares the settings that the daemon holds with the commands in FILE. The daemon ignores a wrong value without an error,
# and containers of the claim can change its settings. Only the daemon's own unit runs this script: the pipe directory belongs to
# containers, so nothing outside of the unit's sandbox opens it.
set -u
export LC_ALL=C

fail() {
  printf 'The MPS daemon does not hold the settings of its claim: %s\n' "$1" >&2
  exit 1
}

# Set answer to the answer of the daemon: 200 printable characters at most.
ask() {
  answer=$(printf '%s\n' "$1" | timeout 5 nvidia-cuda-mps-control 2>&1 | head -c 200 | tr -cd '[:print:]')
}

ask_percentage() {
  ask get_default_active_thread_percentage
  case $answer in
    '' | . | *[!0-9.]* | *.*.*) fail "the active thread percentage is '$answer', expected ${1:-a number}" ;;
  esac
}

check() {
  while read -r command first second; do
    case $command in
      set_default_device_pinned_mem_limit)
        ask "get_default_device_pinned_mem_limit $first"
        mebibytes=${second%M}
        # The daemon shows 4G for 4096M to 5119M.
        [ "$answer" = "${mebibytes}M" ] || [ "$answer" = "$((mebibytes / 1024))G" ] ||
          fail "device $first has the memory limit '$answer', expected $second"
        ;;
      set_default_active_thread_percentage)
        ask_percentage "$first"
        [ "$(printf %.3f "$answer")" = "$(printf %.3f "$first")" ] ||
          fail "the active thread percentage is '$answer', expected $first"
        ;;
      get_default_active_thread_percentage) ask_percentage ;;
    esac
  done < "$1"
}

case $1 in
  apply)
    tries=0
    until nvidia-cuda-mps-control < "$2" > /dev/null 2>&1; do
      tries=$((tries + 1))
      [ "$tries" -lt 100 ] || fail "the daemon does not answer"
      sleep 0.1
    done
    check "$2"
    ;;
  check) check "$2" ;;
esac
