# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run a command of the driver in a pod: ``python -I run.py dra_driver.pod node``.

The pod mounts the node's root file system at the directory in DRA_DRIVER_HOST. The process first changes its root to
that directory (chroot). The driver then finds the vendor's library and programs, device nodes, sysfs, and the
directories of the kubelet and the container runtime at their paths on the node, with working symbolic links. The paths
that it writes to CDI files are valid on the node. Python and the image's packages are imported through an open
directory of the image.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from .api.kubeconfig import SERVICE_ACCOUNT, SERVICE_ACCOUNT_VARIABLE
from .core.errors import AcceleratorError

HOST_VARIABLE = "DRA_DRIVER_HOST"
# Modules that load shared libraries of the image. They are imported before chroot, because afterwards the node's
# libraries would load.
_LIBRARIES = ("bz2", "ctypes", "hashlib", "lzma", "sqlite3", "ssl", "zlib", "grpc")


class NoHost(AcceleratorError):
    """The node's root file system is not mounted at the directory in DRA_DRIVER_HOST."""

    default_code = "no-host"


def change_root(root: str) -> None:
    """Change the root of this process to ``root``, and keep the image's modules importable. Raises NoHost."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    own = os.open("/", os.O_PATH | os.O_DIRECTORY)  # stays open until the process ends
    os.set_inheritable(own, False)
    image = f"/proc/self/fd/{own}"
    if not os.path.exists(f"{root}/proc/self/fd"):  # noqa: PTH110  checks the mount before the root changes
        raise NoHost(
            f"{root} does not show the node's /proc",
            hint=f"The pod has to mount the node's root file system there; {HOST_VARIABLE} names the directory.",
        )
    os.environ[SERVICE_ACCOUNT_VARIABLE] = image + os.path.realpath(SERVICE_ACCOUNT)
    sys.path[:] = [image + os.path.realpath(entry or ".") for entry in sys.path]
    for module in tuple(sys.modules.values()):
        path = getattr(module, "__path__", None)
        if isinstance(path, list):
            path[:] = [image + os.path.realpath(entry) for entry in path]
    sys.path_importer_cache.clear()
    # In a chroot, systemctl does nothing and reports success.
    os.environ["SYSTEMD_IGNORE_CHROOT"] = "1"
    try:
        os.chroot(root)
    except OSError as error:
        raise NoHost(f"The process cannot move to {root}: {error.strerror}", hint="It needs CAP_SYS_CHROOT.") from error
    os.chdir("/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Change to the node's root, run the command, and return its exit status."""
    try:
        root = os.environ.get(HOST_VARIABLE, "")
        if not root:
            raise NoHost(f"{HOST_VARIABLE} is not set", hint="It names the directory of the node's root file system.")
        change_root(root)
    except NoHost as error:
        sys.stderr.write(f"dra-driver: {error}\n")
        return 1
    from .cli import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(main())
