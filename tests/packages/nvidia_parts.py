# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build signed package sources with replacements for NVIDIA's Container Toolkit, fabric manager, NVLSM, and IMEX. They contain no
files of the vendor.

    python3 nvidia_parts.py [--files FILES] toolkit DIRECTORY VERSION ...
    python3 nvidia_parts.py fabric DIRECTORY VERSION ...

Imports nvidia.py from the same directory for the key and the index. With `fabric`, DIRECTORY can already contain packages of drivers.

The program of a toolkit version that ends in .66 does not run. If FILES has a directory with the name of a version, the packages contain
nvidia-ctk and nvidia-cdi-hook from there, which are compiled from the vendor's sources.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import nvidia

TOOLKIT = "nvidia-container-toolkit"
CTK = """#!/bin/sh
case {version} in *.66) echo "nvidia-ctk: cannot execute" >&2; exit 127;; esac
case "$1 $2" in
"--version ") echo "NVIDIA Container Toolkit CLI version {version}";;
"cdi generate") mkdir -p /var/run/cdi; echo "cdiVersion: 0.5.0" > "${{NVIDIA_CTK_CDI_OUTPUT_FILE_PATH:-/dev/stdout}}";;
esac
"""
RUNTIME = '#!/bin/sh\nexec runc "$@"\n'
REFRESH_SERVICE = """[Unit]
Description=Refresh the CDI file, a stand-in
[Service]
Type=oneshot
Environment=NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/var/run/cdi/nvidia.yaml
ExecStart=/usr/bin/nvidia-ctk cdi generate
RemainAfterExit=yes
[Install]
WantedBy=multi-user.target
"""
REFRESH_PATH = """[Unit]
Description=Refresh the CDI file when the driver changes, a stand-in
[Path]
PathChanged=/lib/modules/modules.dep
[Install]
WantedBy=multi-user.target
"""
#: Like the vendor's script: it creates a config file that no package owns, and enables the units at each installation.
BASE_SCRIPT = """
mkdir -p /etc/nvidia-container-runtime
test -e /etc/nvidia-container-runtime/config.toml || echo "# a stand-in" > /etc/nvidia-container-runtime/config.toml
systemctl daemon-reload
systemctl enable --now nvidia-cdi-refresh.path || true
systemctl enable --now nvidia-cdi-refresh.service || true
"""
#: Prints the state of IMEX like its command service: READY while the unit runs, or the state in a test's file.
IMEX_CTL = """#!/bin/sh
[ "$*" = -q ] || exit 2
[ "$(systemctl is-active nvidia-imex.service)" = active ] || { echo "cannot connect to the command service" >&2; exit 1; }
cat /srv/molecule/imex-state 2>/dev/null || echo READY
"""
DAEMON = """[Unit]
Description={name}, a stand-in
[Service]
ExecStart=/bin/sleep infinity
[Install]
WantedBy=multi-user.target
"""


def toolkit(directory: Path, version: str, built: Path | None = None) -> None:
    """Build the toolkit's packages of one version. ``built`` is the directory with its programs."""
    full = f"{version}-1"
    programs: dict[str, str | Path] = {
        "usr/bin/nvidia-ctk": CTK.format(version=version),
        "usr/bin/nvidia-cdi-hook": "#!/bin/sh\n",
    }
    if built is not None:
        programs = {where: built / Path(where).name for where in programs}
    library = f"{nvidia.LIBRARIES}/libnvidia-container.so.{version}"
    nvidia.package(directory, "libnvidia-container1", full, files={library: "a stand-in\n"})
    nvidia.package(
        directory,
        "libnvidia-container-tools",
        full,
        fields=f"Depends: libnvidia-container1 (>= {full})\n",
        files={"usr/bin/nvidia-container-cli": "#!/bin/sh\n"},
    )
    nvidia.package(
        directory,
        f"{TOOLKIT}-base",
        full,
        files={
            **programs,
            "usr/bin/nvidia-container-runtime": RUNTIME,
            "lib/systemd/system/nvidia-cdi-refresh.service": REFRESH_SERVICE,
            "lib/systemd/system/nvidia-cdi-refresh.path": REFRESH_PATH,
        },
        scripts={"postinst": BASE_SCRIPT},
    )
    nvidia.package(
        directory,
        TOOLKIT,
        full,
        fields=f"Depends: {TOOLKIT}-base (= {full}), libnvidia-container-tools (>= {full})\n",
        files={"usr/bin/nvidia-container-runtime-hook": "#!/bin/sh\n"},
    )


def fabric(directory: Path, version: str) -> None:
    """Build the fabric manager, NVLSM, and IMEX for one driver version."""
    programs: dict[str, dict[str, str | Path]] = {"nvidia-imex": {"usr/bin/nvidia-imex-ctl": IMEX_CTL}}
    for name, full in (
        ("nvidia-fabricmanager", f"{version}-1"),
        ("nvidia-imex", f"{version}-1"),
        ("nvlsm", "2025.06.5-1"),
    ):
        unit: dict[str, str | Path] = (
            {} if name == "nvlsm" else {f"lib/systemd/system/{name}.service": DAEMON.format(name=name)}
        )
        stop = "" if name == "nvlsm" else f'if [ "$1" = remove ]; then systemctl stop {name}.service || true; fi'
        nvidia.package(
            directory,
            name,
            full,
            files={f"usr/share/doc/{name}/stand-in": "a stand-in\n", **unit, **programs.get(name, {})},
            scripts={
                "postinst": "systemctl daemon-reload",
                "prerm": stop or "true",
                "postrm": "systemctl daemon-reload",
            },
        )


def main() -> None:
    """Build the packages of the versions on the command line, and the index of all packages in the directory."""
    parser = argparse.ArgumentParser(description="Build replacements for NVIDIA's packages, and their index.")
    parser.add_argument("--files", type=Path, help="directory with a subdirectory of programs for each toolkit version")
    parser.add_argument("what", choices=["toolkit", "fabric"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("versions", nargs="+")
    given = parser.parse_args()
    directory: Path = given.directory
    directory.mkdir(parents=True, exist_ok=True)
    for version in given.versions:
        built = given.files / version if given.files is not None else None
        if given.what == "fabric":
            fabric(directory, version)
        else:
            toolkit(directory, version, built if built is not None and built.is_dir() else None)
    nvidia.index(directory)
    # The vendor's file name of the key in the toolkit's repository.
    shutil.copyfile(directory / "3bf863cc.pub", directory / "gpgkey")


if __name__ == "__main__":
    main()
