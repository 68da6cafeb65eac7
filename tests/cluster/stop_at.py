# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Start the node driver so that it kills itself between two stages of its work: nothing is flushed, closed, or cleaned
up.

``stop_at.py STAGE[:N] ARGUMENTS…`` runs ``dra-driver ARGUMENTS…`` and sends it SIGKILL when the stage is complete for
the N-th time. The tests copy this file to a node. It is not part of the installed software.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from typing import Callable

from dra_driver import stages


def kill_own_process() -> None:
    """Kill this process like a crash."""
    os.kill(os.getpid(), signal.SIGKILL)


class StopPoint:
    """Counts how often each stage was reached and stops the process at the requested one.

    ``wanted`` is "" (never), "<stage>", or "<stage>:<n>". Raises ValueError for a stage that does not exist.
    """

    def __init__(self, wanted: str = "", stop: Callable[[], None] = kill_own_process) -> None:
        stage, _colon, number = wanted.partition(":")
        if stage and stage not in stages.STAGES:
            raise ValueError(f"{wanted!r} is not a stage; expected one of {', '.join(stages.STAGES)}, or one with :<n>")
        self._stage = stage
        self._number = int(number or 1)
        self._stop = stop
        self._seen: Counter[str] = Counter()

    def reached(self, stage: str) -> None:
        """Count a stage."""
        self._seen[stage] += 1
        if stage == self._stage and self._seen[stage] == self._number:
            self._stop()


def main() -> int:
    """Run the driver's command line."""
    from dra_driver import cli

    stages.listen(StopPoint(sys.argv[1]).reached)
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
