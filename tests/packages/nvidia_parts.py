# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Makes signed sources of packages that are called as NVIDIA's Container Toolkit, fabric manager, NVLSM and IMEX, and hold nothing of theirs.

    python3 nvidia_parts.py [--files FILES] toolkit FOLDER VERSION ...
    python3 nvidia_parts.py fabric FOLDER VERSION ...

Stands beside nvidia.py, whose key and index it takes. For the fabric manager FOLDER may be one that has drivers already.

Of the toolkit's versions, one that ends in .66 has a program that does not run. Of one that FILES has a folder for, nvidia-ctk and nvidia-cdi-hook
are those in it: the real ones, from the vendor's sources.
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
#: As the vendor's: a configuration that dpkg does not know, and units that are switched on at each installation.
BASE_SCRIPT = """
mkdir -p /etc/nvidia-container-runtime
test -e /etc/nvidia-container-runtime/config.toml || echo "# a stand-in" > /etc/nvidia-container-runtime/config.toml
systemctl daemon-reload
systemctl enable --now nvidia-cdi-refresh.path || true
systemctl enable --now nvidia-cdi-refresh.service || true
"""
#: Says of IMEX what its command service would: that it is ready while its unit runs, or what a test has written down.
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


def toolkit(folder: Path, version: str, built: Path | None = None) -> None:
    """Make the toolkit's packages of one version; ``built`` has its programs."""
    full = f"{version}-1"
    programs: dict[str, str | Path] = {
        "usr/bin/nvidia-ctk": CTK.format(version=version),
        "usr/bin/nvidia-cdi-hook": "#!/bin/sh\n",
    }
    if built is not None:
        programs = {where: built / Path(where).name for where in programs}
    library = f"{nvidia.LIBRARIES}/libnvidia-container.so.{version}"
    nvidia.package(folder, "libnvidia-container1", full, files={library: "a stand-in\n"})
    nvidia.package(
        folder,
        "libnvidia-container-tools",
        full,
        fields=f"Depends: libnvidia-container1 (>= {full})\n",
        files={"usr/bin/nvidia-container-cli": "#!/bin/sh\n"},
    )
    nvidia.package(
        folder,
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
        folder,
        TOOLKIT,
        full,
        fields=f"Depends: {TOOLKIT}-base (= {full}), libnvidia-container-tools (>= {full})\n",
        files={"usr/bin/nvidia-container-runtime-hook": "#!/bin/sh\n"},
    )


def fabric(folder: Path, version: str) -> None:
    """Make the fabric manager, NVLSM and IMEX for a driver of one version."""
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
            folder,
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
    """Make the packages of the versions that are named, and the index of all that are there."""
    parser = argparse.ArgumentParser(description="Make packages that are called as NVIDIA's, and their index.")
    parser.add_argument("--files", type=Path, help="where a version of the toolkit has a folder with its programs")
    parser.add_argument("what", choices=["toolkit", "fabric"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="+")
    given = parser.parse_args()
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    for version in given.versions:
        built = given.files / version if given.files is not None else None
        if given.what == "fabric":
            fabric(folder, version)
        else:
            toolkit(folder, version, built if built is not None and built.is_dir() else None)
    nvidia.index(folder)
    # Where the toolkit's vendor has it.
    shutil.copyfile(folder / "3bf863cc.pub", folder / "gpgkey")


if __name__ == "__main__":
    main()
