# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A real GPU from inside what a claim's CDI file makes: only its mounts and device nodes, and the C library beside them.

Usage: python tests/silicon/container.py FILE     (as root, with gcc; PYTHONPATH as for driver.py; it changes no setting of the GPU)

A program compiled here loads libcuda.so.1 by its name, compiles a kernel and runs it, and nvidia-smi lists the GPU. Both must work with
the claim's edits, and neither with an empty list of edits.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/unit/dra_driver"), str(ROOT / "tests/unit/core")]
from dra_driver.core.nvidia.backend import NvidiaBackend  # noqa: E402
from vendor_scene import Scene  # noqa: E402

SECONDS = 60
KERNEL = r"""
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
    printf("%d device, %s, sum %u\n", count, name, sum);
    return sum == 992 ? 0 : 5;
}
"""


def compiled(folder: Path) -> Path:
    """The program."""
    text = PROGRAM.replace("KERNEL", json.dumps(KERNEL), 1)
    source = folder / "twice.c"
    source.write_text(text)
    subprocess.run(["gcc", "-w", "-o", folder / "twice", source, "-ldl"], check=True)
    return folder / "twice"


def container(folder: Path, program: Path, edits: list[dict[str, Any]], name: str) -> Path:
    """A root with the C library, the program, a shell, and what the edits bring, and the script that enters it."""
    root = folder / name
    libraries = root / "usr/lib/x86_64-linux-gnu"
    for each in (
        libraries,
        root / "usr/lib64",
        root / "usr/bin",
        root / "dev",
        root / "proc",
        root / "sys",
        root / "tmp",
    ):
        each.mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    (root / "lib64").symlink_to("usr/lib64")
    (root / "bin").symlink_to("usr/bin")
    loaded = subprocess.run(["ldd", "/bin/sh", str(program)], capture_output=True, text=True, check=True).stdout
    # What images of every distribution have: the C library whole, and what belongs to it.
    wanted = {word for word in loaded.split() if word.startswith("/") and ".so" in word.rstrip(":")}
    beside = Path(next(each for each in wanted if "libc.so" in each)).resolve().parent
    wanted |= {
        str(beside / each) for each in ("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1")
    }
    for each in wanted:
        if Path(each).exists():
            target = root / "usr/lib64" if "ld-linux" in each else libraries
            shutil.copy(Path(each).resolve(), target / Path(each).name)
    shutil.copy(Path("/bin/sh").resolve(), root / "usr/bin/sh")
    shutil.copy(program, root / "usr/bin/twice")
    script = ["set -e"]
    environment = []
    for edit in edits:
        environment += edit.get("env", [])
        for node in edit.get("deviceNodes", []):
            path = root / node["path"].lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            script.append(f"mknod -m 666 {path} {node.get('type', 'c')} {node['major']} {node['minor']}")
        for mount in edit.get("mounts", []):
            path = root / mount["containerPath"].lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if Path(mount["hostPath"]).is_dir():
                path.mkdir(exist_ok=True)
            else:
                path.touch()
            script.append(f"mount --bind {mount['hostPath']} {path}")
    script.append(f"mount -t proc proc {root}/proc")
    words = " ".join(f"'{each}'" for each in environment)
    script.append(f'exec env -i PATH=/usr/bin {words} {shutil.which("chroot")} {root} "$@"')
    (folder / f"{name}.sh").write_text("\n".join(script) + "\n")
    return folder / f"{name}.sh"


def inside(script: Path, *words: str) -> list[Any]:
    """What a program says inside, and how it ends; the mounts are its own and end with it."""
    dev = Path(script.with_suffix("")) / "dev"
    for node in dev.rglob("*"):
        if node.is_char_device():
            node.unlink()
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", str(script), *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return [done.returncode, done.stdout[-1500:], done.stderr[-1500:]]


async def scenario(folder: Path, made: dict[str, Any]) -> None:
    """A claim for the GPU, and what is seen with it."""
    scene = Scene(folder)
    scene.backend = NvidiaBackend()  # type: ignore[assignment]
    scene.settings = {"layout": []}
    program = compiled(folder)
    await scene.api.start()
    try:
        await scene.start()
        await scene.until(lambda: scene.devices())
        made["prepared"] = await scene.prepare("a", "gpu-0")
        (path,) = scene.cdi()
        document = json.loads(path.read_text())
        edits = [document["containerEdits"], *(each["containerEdits"] for each in document["devices"])]
        for edit in edits:
            for mount in edit.get("mounts", []):
                if mount["hostPath"].startswith("/var/run/cdi"):
                    mount["hostPath"] = f"{scene.folder}/root{mount['hostPath']}"
        for name, given in (("claimed", edits), ("empty", [])):
            script = container(folder, program, given, name)
            made[name] = {each: inside(script, each, *rest) for each, *rest in (("twice",), ("nvidia-smi", "-L"))}
        made["metadata"] = {
            mount["containerPath"]: Path(mount["hostPath"]).read_text()
            for edit in edits
            for mount in edit.get("mounts", [])
            if "metadata" in mount["hostPath"]
        }
        made["unprepared"] = await scene.unprepare("a")
    finally:
        if hasattr(scene, "task"):
            await scene.stop()
        await scene.api.stop()


def main() -> int:
    """Run it, and write what was seen."""
    made: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="dra-", dir="/tmp") as name:
            asyncio.run(asyncio.wait_for(scenario(Path(name), made), 150))
    finally:
        Path(sys.argv[1]).write_text(json.dumps(made, indent=1, default=str), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
