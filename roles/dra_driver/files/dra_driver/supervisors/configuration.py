# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Apply a changed configuration while the process runs, or report why it cannot be applied."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Callable

from ..config import Configuration, InvalidConfiguration
from ..logs import fields

LOG = logging.getLogger(__name__)


class ConfigurationSupervisor:
    """Reload the configuration file on request, and hold the applied configuration.

    ``load`` reads the file, and ``apply`` applies a configuration to the process.
    """

    def __init__(
        self, configuration: Configuration, load: Callable[[], Configuration], apply: Callable[[Configuration], None]
    ) -> None:
        self._configuration = configuration
        self._load = load
        self._apply = apply
        self._reload_requested = asyncio.Event()
        #: The ``digest`` of the last rejected configuration, and the ``problem``; empty if the last reload succeeded.
        self.refused: Mapping[str, str] = {}

    @property
    def digest(self) -> str:
        """Return the digest of the applied configuration."""
        return self._configuration.digest

    def request_reload(self) -> None:
        """Read the file again soon."""
        self._reload_requested.set()

    async def run(self) -> None:
        """Read the file after each request, until canceled."""
        while True:
            await self._reload_requested.wait()
            self._reload_requested.clear()
            try:
                self._apply_if_possible(await asyncio.to_thread(self._load))
            except InvalidConfiguration as error:
                self._refuse("", str(error))

    def _apply_if_possible(self, found: Configuration) -> None:
        differs = self._configuration.needing_restart(found)
        if differs:
            self._refuse(found.digest, f"{', '.join(differs)} cannot change while the driver runs; restart it")
            return
        self.refused = {}
        self._configuration = found
        self._apply(found)

    def _refuse(self, digest: str, problem: str) -> None:
        self.refused = {"digest": digest, "problem": problem}
        LOG.error(
            "cannot apply the new configuration, the previous one stays active: %s",
            problem,
            extra=fields(digest=digest),
        )
