# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test a real GPU inside a container of a claim's CDI file: with only its mounts, its device nodes, and the C library.

Usage: python tests/silicon/container.py     (as root, with gcc; the README.md of tests lists other requirements)

A program that is compiled here loads libcuda.so.1 by name, compiles a kernel with it, and runs that. It works with the
claim's edits and finds no GPU without them. No container runtime is needed: the test creates a root directory and
mounts that end with the process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from scene import exit_on_error, run, scene

SECONDS = 60
KERNEL = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry twice(.param .u64 at)
{
    .reg .u64 %address, %offset;
    .reg .u32 %place, %value;
    ld.param.u64 %address, [at];
    cvta.to.global.u64 %address, %address;
    mov.u32 %place, %tid.x;
    mul.wide.u32 %offset, %place, 4;
    add.u64 %address, %address, %offset;
    ld.global.u32 %value, [%address];
    add.u32 %value, %value, %value;
    st.global.u32 [%address], %value;
    ret;
}
"""
PROGRAM = r"""
#include <dlfcn.h>
#include <stdio.h>
typedef int (*any)();
#define TAKE(name) any name = (any)dlsym(cuda, #name); if (!name) { printf("no " #name "\n"); return 3; }
#define DO(call) if ((code = (call))) { printf(#call ": %d\n", code); return 4; }
static const char kernel[] = KERNEL;
int main(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) { printf("%s\n", dlerror()); return 2; }
    TAKE(cuInit) TAKE(cuDeviceGetCount) TAKE(cuDeviceGet) TAKE(cuDeviceGetName) TAKE(cuDevicePrimaryCtxRetain) TAKE(cuCtxSetCurrent)
    TAKE(cuModuleLoadData) TAKE(cuModuleGetFunction) TAKE(cuMemAlloc_v2) TAKE(cuMemcpyHtoD_v2) TAKE(cuMemcpyDtoH_v2) TAKE(cuLaunchKernel)
    int code, count = -1, device;
    char name[100] = "";
    void *context, *module, *function;
    unsigned long long at;
    unsigned int numbers[32], sum = 0;
    DO(cuInit(0)) DO(cuDeviceGetCount(&count)) DO(cuDeviceGet(&device, 0)) DO(cuDeviceGetName(name, 100, device))
    DO(cuDevicePrimaryCtxRetain(&context, device)) DO(cuCtxSetCurrent(context))
    DO(cuModuleLoadData(&module, kernel)) DO(cuModuleGetFunction(&function, module, "twice"))
    for (int place = 0; place < 32; place++) numbers[place] = place;
    DO(cuMemAlloc_v2(&at, sizeof numbers)) DO(cuMemcpyHtoD_v2(at, numbers, sizeof numbers))
    void *arguments[] = {&at};
    DO(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, (void *)0, arguments, (void *)0))
    DO(cuMemcpyDtoH_v2(numbers, at, sizeof numbers))
    for (int place = 0; place < 32; place++) sum += numbers[place];
    printf("%d device, %s, %u\n", count, name, sum);
    return sum == 2 * (31 * 32 / 2) ? 0 : 5;
}
"""
#: Files of the C library, which images of every distribution contain.
C_LIBRARY = ("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1")
LOADER = "ld-linux-x86-64.so.2"


def compiled(folder: Path) -> Path:
    """Compile the program and return its path."""
    source = folder / "twice.c"
    source.write_text(PROGRAM.replace("KERNEL", json.dumps(KERNEL), 1))
    subprocess.run(["gcc", "-w", "-o", folder / "twice", source, "-ldl"], check=True)
    return folder / "twice"


def container(folder: Path, program: Path, edits: list[dict[str, Any]]) -> Path:
    """Create a root with the C library, the program, and the edits' files; return the script that mounts it and
    changes into it.
    """
    root = folder / "root"
    libraries = root / "usr/lib/x86_64-linux-gnu"
    for each in (libraries, root / "usr/lib64", root / "usr/bin", root / "dev", root / "proc", root / "tmp"):
        each.mkdir(parents=True)
    for name in ("lib", "lib64", "bin"):
        (root / name).symlink_to(f"usr/{name}")
    beside = Path("/lib/x86_64-linux-gnu").resolve()
    for name in C_LIBRARY:
        shutil.copy((beside / name).resolve(), libraries / name)
    shutil.copy(Path("/lib64", LOADER).resolve(), root / "usr/lib64" / LOADER)
    shutil.copy(program, root / "usr/bin/twice")
    lines, environment = ["set -e", f"mount -t proc proc {root}/proc", f"mount -t tmpfs tmpfs {root}/dev"], []
    for edit in edits:
        environment += edit.get("env", [])
        for node in edit.get("deviceNodes", []):
            path = root / node["path"].lstrip("/")
            lines += [f"mkdir -p {path.parent}", f"mknod -m 666 {path} {node['type']} {node['major']} {node['minor']}"]
        for mount in edit.get("mounts", []):
            path = root / mount["containerPath"].lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            lines.append(f"mount --bind {mount['hostPath']} {path}")
    words = " ".join(f"'{each}'" for each in environment)
    lines.append(f"exec env -i PATH=/usr/bin {words} {shutil.which('chroot')} {root} twice")
    (folder / "enter").write_text("\n".join(lines) + "\n")
    return folder / "enter"


def inside(script: Path) -> tuple[int, str]:
    """Return the program's exit code inside and its output."""
    words = ["unshare", "--mount", "--pid", "--fork", "sh", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


async def scenario() -> None:
    """Prepare a claim and print the results with and without it."""
    async with scene() as driver:
        program = compiled(driver.folder)
        exit_on_error(await driver.prepare("a", "gpu-0"))
        (path,) = driver.cdi()
        document = json.loads(path.read_text())
        edits = [document["containerEdits"], *(each["containerEdits"] for each in document["devices"])]
        for edit in edits:
            for mount in edit.get("mounts", []):
                if mount["hostPath"].startswith(
                    "/var/run/cdi"
                ):  # the driver's own files are below the scene's directory
                    mount["hostPath"] = f"{driver.folder}/root{mount['hostPath']}"
        seen = {}
        for name, given in (("with the claim", edits), ("without", [])):
            folder = driver.folder / name.replace(" ", "-")
            folder.mkdir()
            seen[name] = inside(container(folder, program, given))
            print(f"{name}: {seen[name][1]}")
        product = driver.specs()["gpu-0"]["attributes"]["productName"]["string"]
        assert seen["with the claim"] == (0, f"1 device, {product}, 992")
        assert seen["without"][0] == 2 and "libcuda.so.1" in seen["without"][1]
        exit_on_error(await driver.unprepare("a"))
        assert driver.cdi() == []


if __name__ == "__main__":
    run(scenario)
