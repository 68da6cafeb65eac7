# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Shorten the timeouts and retry intervals of the daemons, so that a fault and its recovery take seconds.

``python -m tests.oracles.short_waits run --config FILE`` runs the controller with them.
"""

from __future__ import annotations

import sys

from dra_driver import renew_token
from dra_driver.api import client, events, liveness, throttling, watching
from dra_driver.controller import claim_lists, serving_certificate
from dra_driver.controller.cleanup import cleanup_loop
from dra_driver.monitoring import pods
from dra_driver.publish import publish_plan, publisher
from dra_driver.supervisors import claim_status_writer, driver_state, pre_binding, reconciler, token_renewal


def shorten() -> None:
    """Change the constants of this process. The token is renewed at each start."""
    client.REQUEST_SECONDS = client.HEAD_SECONDS = 2.0
    client.WATCH_SECONDS = (4, 6)
    watching.RETRY_FIRST, watching.RETRY_LIMIT = 0.4, 2.0
    liveness.SILENCE_SECONDS = (2.0, 2.5)
    watching.LASTING_SECONDS = 0.5
    throttling.PAUSE_FIRST, throttling.PAUSE_LIMIT = 0.2, 1.0
    events.REPEAT_SECONDS = 0.0
    cleanup_loop.GATHER_SECONDS = 0.2
    claim_lists.COMPARE_SECONDS, claim_lists.RETRY_SECONDS = 4.0, 0.5
    claim_lists.RETRY_FIRST, claim_lists.RETRY_LIMIT = 0.3, 1.0
    serving_certificate.READ_SECONDS, serving_certificate.SOON_SECONDS = 2.0, 0.5
    pods.RETRY_SECONDS = 1.0
    publisher.CHECK_SECONDS, publisher.CHECK_INTERVAL = 2.0, (2.0, 3.0)
    publish_plan.Pace.__init__.__defaults__ = tuple(
        1.0 if value == publish_plan.Pace.leftover else value for value in publish_plan.Pace.__init__.__defaults__ or ()
    )
    token_renewal.RETRY_FIRST, token_renewal.RETRY_LIMIT, token_renewal.TICK_SECONDS = 0.5, 2.0, 1.0
    reconciler.RECONCILE_SECONDS, reconciler.RETRY_LIMIT = 1.0, 2.0
    driver_state.RETRY_FIRST, driver_state.RETRY_LIMIT = 0.5, 2.0
    pre_binding.SIGN_SECONDS, pre_binding.SIGN_RETRY, pre_binding.RETRY_FIRST = 1.0, 0.3, 0.3
    claim_status_writer.RETRY_FIRST, claim_status_writer.RETRY_LIMIT, claim_status_writer.SPREAD_SECONDS = 0.5, 2.0, 1.0
    claim_status_writer.REFUSED_FIRST, claim_status_writer.REFUSED_LIMIT = 1.0, 2.0
    defaults = renew_token.renew.__kwdefaults__
    assert defaults is not None
    defaults["renew_below"] = 1.0


if __name__ == "__main__":
    from dra_driver.controller.commands import main

    shorten()
    sys.exit(main(sys.argv[1:]))
