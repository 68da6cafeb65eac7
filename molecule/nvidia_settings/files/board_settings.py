# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Print the settings of the first and the last GPU. The simulator shows settings that NVML does not return."""

from __future__ import annotations

import json
import subprocess
import sys

SHOWN = (
    "{power} {locked_clock_minimum_mhz}-{locked_clock_maximum_mhz} "
    "{locked_memory_clock_minimum_mhz}-{locked_memory_clock_maximum_mhz} {compute_mode} {persistence_mode} {time_slice}"
)


def main() -> None:
    """Print one line for each of the two GPUs."""
    done = subprocess.run(["accelerator-simulator", "show", "--json"], check=True, capture_output=True, text=True)
    gpus = json.loads(done.stdout)["gpus"]
    for gpu in (gpus[0], gpus[-1]):
        sys.stdout.write(SHOWN.format(power=gpu["power_limit_mw"] // 1000, **gpu) + "\n")


if __name__ == "__main__":
    main()
