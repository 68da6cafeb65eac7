#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
#
# Usage: mps-settings.sh apply|check FILE
#
# apply waits up to 10 s for the MPS daemon of CUDA_MPS_PIPE_DIRECTORY, sends it the commands in FILE, and then checks it.
# check compares the settings that the daemon holds with the commands in FILE. The daemon ignores a wrong value without an error,
# and containers of the claim can change its settings. Only the daemon's own unit runs this script: the pipe directory belongs to
# containers, so nothing outside of the unit's sandbox opens it.
set -u
export LC_ALL=C

fail() {
  printf 'The MPS daemon does not hold the settings of its claim: %s\n' "$1" >&2
  exit 1
}

# Send the commands on standard input to the daemon, and print 200 printable characters of its answer at most.
send() {
  timeout 5 nvidia-cuda-mps-control 2>&1 | head -c 200 | tr -cd '[:print:]'
}

# Set answer to the answer of the daemon to one command.
ask() {
  answer=$(printf '%s\n' "$1" | send)
}

# Set answer to the active thread percentage. Return 1 if the daemon does not answer with a number.
ask_percentage() {
  ask get_default_active_thread_percentage
  case $answer in
    '' | . | *[!0-9.]* | *.*.*) return 1 ;;
  esac
}

require_percentage() {
  ask_percentage || fail "the active thread percentage is '$answer', expected ${1:-a number}"
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
        require_percentage "$first"
        [ "$(printf %.3f "$answer")" = "$(printf %.3f "$first")" ] ||
          fail "the active thread percentage is '$answer', expected $first"
        ;;
      get_default_active_thread_percentage) require_percentage ;;
    esac
  done < "$1"
}

case $1 in
  apply)
    tries=0
    until ask_percentage; do
      tries=$((tries + 1))
      [ "$tries" -lt 100 ] || fail "the active thread percentage is '$answer', expected a number"
      sleep 0.1
    done
    answer=$(send < "$2")
    check "$2"
    ;;
  check) check "$2" ;;
esac
