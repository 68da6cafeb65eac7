# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The whole node driver on a real GPU: what it publishes, claims, and what a claim takes. It changes no setting of the GPU.

Usage: python tests/silicon/driver.py FILE     (PYTHONPATH as `make test-unit` has it; the API server is the unit tests' model)
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/unit/dra_driver"), str(ROOT / "tests/unit/core")]
from dra_driver.core.nvidia.backend import NvidiaBackend  # noqa: E402
from vendor_scene import Scene  # noqa: E402

TIMES = 100


async def scenario(folder: Path, made: dict[str, Any]) -> None:
    """Publish, prepare, look into the CDI files, unprepare; many times; then find it all again after a restart."""
    scene = Scene(folder)
    scene.backend = NvidiaBackend()  # type: ignore[assignment]
    scene.settings = {"layout": []}
    await scene.api.start()
    try:
        begun = time.monotonic()
        await scene.start()
        await scene.register()
        await scene.until(lambda: scene.devices())
        made["published_after"] = round(time.monotonic() - begun, 3)
        made["slices"] = list(scene.api.slices.values())
        made["status"] = await scene.status()
        made["prepared"] = await scene.prepare("a", "gpu-0")
        made["cdi"] = {path.name: json.loads(path.read_text()) for path in scene.cdi()}
        made["again"] = await scene.prepare("a")
        await scene.stop()
        scene.backend = NvidiaBackend()  # type: ignore[assignment]
        await scene.start()
        made["after_restart"] = await scene.eventually(lambda: scene.prepare("a"))
        made["unprepared"] = await scene.unprepare("a")
        made["left"] = [path.name for path in scene.cdi()]
        seconds: dict[str, list[float]] = {"prepare": [], "unprepare": []}
        for number in range(TIMES):
            begun = time.perf_counter()
            error = await scene.prepare(f"n{number}", "gpu-0")
            middle = time.perf_counter()
            error += await scene.unprepare(f"n{number}")
            if error:
                made.setdefault("errors", []).append(error)
            seconds["prepare"].append(middle - begun)
            seconds["unprepare"].append(time.perf_counter() - middle)
        made["milliseconds"] = {
            name: {"p50": round(1000 * statistics.median(each), 2), "p99": round(1000 * sorted(each)[-2], 2)}
            for name, each in seconds.items()
        }
        made["slice_writes"] = len(scene.api.slice_writes())
        made["events"] = [str(each)[:400] for each in getattr(scene.api, "events", [])]
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
    except BaseException as error:
        made["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        Path(sys.argv[1]).write_text(json.dumps(made, indent=1, default=str), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
