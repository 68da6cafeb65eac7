# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
# shellcheck shell=bash
# A replacement for the package of ascend-docker-runtime. Like the vendor's, it always asks for the license, overwrites the engine's
# configuration without its comments, sets itself as the default runtime, and does not restart the engine.
root=$FAKE_ROOT
lists=$root/etc/ascend-docker-runtime.d
log=$root/var/log/ascend-docker-runtime/installer.log
say() {
    mkdir -p "$(dirname "$log")"
    echo "$*"
    echo "$*" >>"$log"
}
fail() {
    say "[ERROR] $*"
    exit 1
}
verb="" scene=docker mode=legacy configuration="" directory=/usr/local/Ascend/Ascend-Docker-Runtime
for word in "$@"; do
    case $word in
    --install | --upgrade | --uninstall | --version) verb=${word#--} ;;
    --install-path=/*) directory=${word#*=}/Ascend-Docker-Runtime ;;
    --install-scene=docker | --install-scene=containerd | --install-scene=isula | --install-scene=crio) scene=${word#*=} ;;
    --injection-mode=legacy | --injection-mode=cdi) mode=${word#*=} ;;
    --config-file-path=*)
        configuration=${word#*=}
        [ -e "$root$configuration" ] || fail "file $configuration does not exist"
        ;;
    --install-type=*) ;;
    *) fail "unsupported parameter $word" ;;
    esac
done
[ "$verb" != version ] || { echo "ascend-docker-runtime version: $VERSION"; exit 0; }
[ -n "$root" ] || [ "$(id -u)" = 0 ] || fail "please run with root permission"
target=$root$directory
# Reject a path with a link, and directories that do not belong to root or that other users can write to.
check_path() {
    local part=$target owner
    owner=$(stat -c %u "${root:-/}")
    while [ "$part" != "$root" ] && [ "$part" != / ]; do
        [ ! -L "$part" ] || fail "the install path has a link in it: $part"
        part=$(dirname "$part")
    done
    for part in "$target" "$(dirname "$target")"; do
        [ -e "$part" ] || continue
        [ "$(stat -c %u "$part")" = "$owner" ] || fail "the install path is not owned by root: $part"
        case $(stat -c %A "$part") in
        ?????w* | ????????w*) fail "the install path is writable by others: $part" ;;
        esac
    done
}
accept() {
    while :; do
        echo "Do you accept the EULA? [Y/N]"
        read -r answer || exit 1
        case $answer in
        [Yy]) return ;;
        [Nn]) say "declined"; exit 0 ;;
        esac
    done
}
place() {
    mkdir -p "$target/script" "$lists"
    chmod 750 "$target" "$target/script" "$lists"
    local program
    for program in runtime hook; do
        printf '#!/usr/bin/python3 -I\n# %s\n' "$VERSION" | cat - "ascend_docker_$program.py" >"$target/ascend-docker-$program"
    done
    cp ascend-docker-cli.sh "$target/ascend-docker-cli"
    # The vendor's programs that destroy vNPUs and configure engines: the tests do not need them.
    for program in ascend-docker-destroy ascend-docker-plugin-install-helper; do
        printf '#!/bin/sh\nexit 1\n' >"$target/$program"
    done
    chmod 550 "$target"/ascend-docker-*
    cp uninstall-runtime.sh "$target/script/uninstall.sh"
    chmod 500 "$target/script/uninstall.sh"
    printf '%s\n' /usr/local/Ascend/driver/lib64 /usr/local/Ascend/driver/include /usr/local/dcmi /usr/local/bin/npu-smi \
        /usr/local/sbin/npu-smi /var/queue_schedule >"$lists/base.list"
    chmod 440 "$lists/base.list"
    printf 'version=v%s\narch=%s\npath=%s\ninstall-scene=%s\ninjection-mode=%s\nconfig-file-path=%s\n' \
        "$VERSION" "$MACHINE" "$directory" "$scene" "$mode" "$configuration" >"$target/ascend_docker_runtime_install.info"
}
case $verb in
install)
    accept
    check_path
    case $MACHINE in "$(uname -m)") ;; *) fail "platform mismatch" ;; esac
    place
    if [ "${FAKE_STOP:-}" = runtime ]; then kill -9 $$; fi
    if [ -z "$configuration" ]; then
        configuration=/etc/docker/daemon.json
        [ "$scene" != containerd ] || configuration=/etc/containerd/config.toml
    fi
    mkdir -p "$(dirname "$root$configuration")"
    # The previous content of the file, including comments, is lost.
    echo "{\"default-runtime\": \"ascend\", \"runtimes\": {\"ascend\": {\"path\": \"$directory/ascend-docker-runtime\"}}}" >"$root$configuration"
    chmod 600 "$root$configuration"
    say "ascend-docker-runtime $VERSION was installed; restart the container engine"
    ;;
upgrade)
    accept
    check_path
    [ -d "$target" ] && [ -d "$lists" ] || fail "the install path does not exist"
    place
    say "ascend-docker-runtime $VERSION was installed in place of the former one"
    ;;
uninstall) [ ! -d "$target" ] || bash "$target/script/uninstall.sh" ;;
*) echo "Usage: see the documentation" ;;
esac
