# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Spec files of replacements for the vendors' RPM packages, with the same names, versions, epochs, and dependencies, and few files.

Source of these facts: NVIDIA's repositories rhel8 to rhel10, sles15, and suse16, and that of libnvidia-container. One spec file builds all
packages of one version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CTK = "/usr/bin/nvidia-ctk"
#: Kernels for which NVIDIA has compiled modules, as in the names of their packages.
KERNELS = ("5.14.0-570.18.1", "5.14.0-570.23.1")
#: Config file that a script of the toolkit creates. No package owns it.
CTK_CONFIG = "/etc/nvidia-container-runtime/config.toml"


@dataclass(frozen=True)
class Rpm:
    """One package. ``lines`` are its dependencies in the format of a spec file, ``files`` are texts by path, ``scripts`` are by name.

    ``anywhere`` means that it does not depend on the architecture.
    """

    name: str
    version: str
    release: str = "1"
    epoch: int = 0
    lines: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)
    anywhere: bool = False


def spec(packages: Iterable[Rpm], name: str) -> str:
    """Return a spec file of packages for rpmbuild. ``name``: the name of the spec, which is not one of the built packages."""
    found = [
        f"Name: {name}\nVersion: 1\nRelease: 1\nSummary: stand-ins\nLicense: Apache-2.0\n\n%description\nStand-ins.\n"
    ]
    install = ["%install"]
    for package in packages:
        head = [f"Version: {package.version}", f"Release: {package.release}", f"Epoch: {package.epoch}"]
        head = [line for line in head if line != "Epoch: 0"]
        head += ["Summary: a stand-in", *(["BuildArch: noarch"] if package.anywhere else []), *package.lines]
        found.append(
            f"%package -n {package.name}\n" + "\n".join(head) + f"\n\n%description -n {package.name}\nA stand-in.\n"
        )
        files = {f"/usr/share/stand-in/{package.name}": f"{package.version}\n", **package.files}
        for path, text in files.items():
            install += [
                f"mkdir -p %{{buildroot}}{path.rpartition('/')[0]}",
                f"cat > %{{buildroot}}{path} <<'END'",
                text.rstrip("\n"),
                "END",
            ]
            install += [f"chmod 755 %{{buildroot}}{path}"] if "/bin/" in path else []
        found += [f"%{script} -n {package.name}\n{text}\n" for script, text in package.scripts.items()]
        found.append(f"%files -n {package.name}\n" + "\n".join(files) + "\n")
    return "\n".join([*found, *install, ""])


def toolkit(version: str) -> list[Rpm]:
    """Return the packages of the NVIDIA Container Toolkit."""
    script = f'#!/bin/sh\necho "NVIDIA Container Toolkit CLI version {version}"\n'
    if version == "1.19.0":
        script = "#!/bin/sh\nexit 127\n"
    config = f"mkdir -p {CTK_CONFIG.rpartition('/')[0]}\n[ -e {CTK_CONFIG} ] || echo '# of {version}' > {CTK_CONFIG}"
    return [
        Rpm("nvidia-container-toolkit-base", version, files={CTK: script}, scripts={"posttrans": config}),
        Rpm("libnvidia-container1", version),
        Rpm("libnvidia-container-tools", version, lines=(f"Requires: libnvidia-container1 >= {version}",)),
        Rpm(
            "nvidia-container-toolkit",
            version,
            lines=(
                f"Requires: nvidia-container-toolkit-base = {version}-1",
                f"Requires: libnvidia-container-tools >= {version}",
            ),
        ),
    ]


def base() -> list[Rpm]:
    """Return the package of each machine's base system. The test machine has a shell that no RPM package has installed."""
    return [Rpm("base-system", "1", lines=("Provides: /bin/sh",))]


def needs() -> list[Rpm]:
    """Return the distribution's packages that the vendors' packages require."""
    return [Rpm("dkms", "3.0.13", "1.el9", anywhere=True)]


def _unit(name: str) -> dict[str, str]:
    return {f"/usr/lib/systemd/system/{name}.service": f"[Unit]\nDescription={name}, a stand-in\n"}


def fabric(version: str) -> list[Rpm]:
    """Return the fabric manager for one driver version. Its package has an older name before 560; the unit has the same name."""
    name = "nvidia-fabricmanager" if int(version.partition(".")[0]) >= 560 else "nvidia-fabric-manager"
    return [Rpm(name, version, files=_unit("nvidia-fabricmanager"))]


def subnet_manager() -> list[Rpm]:
    """Return NVLSM. Its versions are independent of the driver's."""
    return [Rpm("nvlsm", "2025.06.5")]


def driver_redhat(version: str) -> list[Rpm]:
    """Return the driver's packages of the repositories rhel8 to rhel10, which have an epoch."""
    same = f"3:{version}"

    def part(name: str, *lines: str, anywhere: bool = False) -> Rpm:
        return Rpm(name, version, "1.el9", 3, lines, anywhere=anywhere)

    provides = f"Provides: nvidia-kmod = {same}"
    return [
        part("nvidia-driver-cuda", f"Requires: nvidia-kmod = {same}", f"Requires: nvidia-driver-cuda-libs = {same}"),
        part("nvidia-driver-cuda-libs", f"Requires: libnvidia-ml = {same}"),
        part("libnvidia-ml"),
        part("kmod-nvidia-open-dkms", provides, "Requires: dkms", "Conflicts: kmod-nvidia-latest-dkms", anywhere=True),
        part("kmod-nvidia-latest-dkms", provides, "Requires: dkms", "Conflicts: kmod-nvidia-open-dkms", anywhere=True),
        # Compiled for one kernel. Only the proprietary modules have such packages.
        *(
            Rpm(
                f"kmod-nvidia-{version}-{kernel}",
                version,
                "3.el9_6",
                3,
                (provides, "Conflicts: kmod-nvidia-latest-dkms"),
            )
            for kernel in KERNELS
        ),
        part("nvidia-persistenced"),
        *fabric(version),
        Rpm("nvidia-imex", version, files=_unit("nvidia-imex")),
    ]


def driver_suse(version: str) -> list[Rpm]:
    """Return the driver's packages of the repositories sles15 and suse16. Their names contain the generation (G06, G07)."""
    generation, other = ("G07", "G06") if int(version.partition(".")[0]) >= 590 else ("G06", "G07")

    def part(name: str, *lines: str) -> Rpm:
        return Rpm(f"{name}-{generation}", version, "1", 0, (*lines, f"Conflicts: {name}-{other}"))

    same = f"= {version}"
    module = f"Provides: nvidia-module-{generation} {same}"
    signed = Rpm(
        f"nvidia-open-driver-{generation}-signed-cuda-kmp-default",
        f"{version}_k6.4.0_150600.21",
        "150600.1.1",
        lines=(module, "Provides: multiversion(kernel)"),
    )
    return [
        part("nvidia-open-driver", module, "Requires: dkms", f"Conflicts: nvidia-driver-{generation}"),
        part("nvidia-driver", module, "Requires: dkms", f"Conflicts: nvidia-open-driver-{generation}"),
        part("nvidia-compute", f"Requires: libnvidia-ml {same}"),
        part(
            "nvidia-compute-utils",
            f"Requires: nvidia-compute-{generation} {same}",
            f"Requires: nvidia-module-{generation} {same}",
        ),
        signed,
        Rpm("libnvidia-ml", version),
        Rpm("nvidia-persistenced", version),
        *fabric(version),
    ]
