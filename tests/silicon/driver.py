# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test claims on a real GPU: published, prepared, prepared again, restored after a restart, and unprepared, with the
durations.

Usage: python tests/silicon/driver.py     (as root; the README.md of tests lists other requirements)
"""

from __future__ import annotations

import json
import statistics
import time

from scene import exit_on_error, restart, run, scene

TIMES = 200
GPU = "gpu-0"


async def scenario() -> None:
    """Run the steps of one claim, and then many claims."""
    async with scene() as driver:
        published = driver.specs()[GPU]
        attributes = {name: next(iter(value.values())) for name, value in published["attributes"].items()}
        print(
            f"{GPU}: {attributes['productName']}, {published['capacity']['memory']['value']}, driver {attributes['driverVersion']}"
        )
        status = await driver.status()
        assert status["ready"] and not status["problems"], status
        exit_on_error(await driver.prepare("a", GPU))
        (path,) = driver.cdi()
        before = path.read_bytes()
        (device,) = json.loads(before)["devices"]
        assert device["containerEdits"]["deviceNodes"][0]["path"].startswith("/dev/nvidia")
        exit_on_error(await driver.prepare("a"))
        await restart(driver)
        exit_on_error(await driver.eventually(lambda: driver.prepare("a")))
        assert path.read_bytes() == before
        exit_on_error(await driver.unprepare("a"))
        assert driver.cdi() == []
        print("one claim: prepared, prepared again, restored after a restart, unprepared")
        seconds: dict[str, list[float]] = {"prepare": [], "unprepare": []}
        for number in range(TIMES):
            begun = time.perf_counter()
            exit_on_error(await driver.prepare(f"n{number}", GPU))
            middle = time.perf_counter()
            exit_on_error(await driver.unprepare(f"n{number}"))
            seconds["prepare"].append(middle - begun)
            seconds["unprepare"].append(time.perf_counter() - middle)
        for name, each in seconds.items():
            print(f"{name}: {1000 * statistics.median(each):.1f} ms, the median of {TIMES}")
        assert len(driver.api.slice_writes()) == 1, "the slice was written once"


if __name__ == "__main__":
    run(scenario)
