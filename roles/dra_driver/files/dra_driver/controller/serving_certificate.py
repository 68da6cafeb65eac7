# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keep the serving certificate of the webhook valid.

The playbook or cert-manager writes the Secret and the webhook's configuration; the controller only reads the Secret. Each controller
issues its own certificate, keeps its key in memory only, and continues with it while the API server is unreachable.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import ssl
from collections.abc import Sequence
from typing import Callable

from ..api.client import ApiClient
from ..core import certificates
from ..core.certificates import Authorities, KeyPair
from ..core.errors import AcceleratorError
from ..logs import StateLog, fields

LOG = logging.getLogger(__name__)

#: How often the Secret is read, in seconds: with a valid certificate, and without one.
READ_SECONDS, SOON_SECONDS = 30.0, 2.0


def utc_now() -> datetime.datetime:
    """Return the current time, for dates in certificates."""
    return datetime.datetime.now(datetime.timezone.utc)


class WebhookSecret:
    """Reads the Secret with the webhook's certificate.

    The Secret of the module ``webhook_authority`` has CAs, and the controller issues its certificate below the active one. A Secret
    of type ``kubernetes.io/tls``, for example of cert-manager, has the certificate itself.
    """

    def __init__(self, client: ApiClient, namespace: str, name: str) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/secrets/{name}"

    async def read(self) -> tuple[Authorities, KeyPair | None]:
        """Return the CAs, and the certificate of a Secret of type ``kubernetes.io/tls``; nothing without a Secret. Raises ApiError, ApiUnreachable."""
        secret = await self._client.find(self._path)
        data = (secret or {}).get("data") or {}
        return certificates.read_authorities(data), certificates.read_tls(data)


class ServingCertificate:
    """The serving certificate, in a TLS context that is updated in place.

    ``renewed`` is called with the expiry time of each new one.
    """

    def __init__(
        self,
        secret: WebhookSecret,
        names: Sequence[str],
        *,
        seconds: float,
        renewed: Callable[[float], None] = lambda _expires: None,
        now: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        self._secret = secret
        self._renewed = renewed
        self._names = tuple(names)
        self._seconds = seconds
        self._now = now
        self._log = StateLog(LOG)
        self.key_pair: KeyPair | None = None
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Keep the certificate valid until canceled."""
        while True:
            try:
                await self.refresh()
                self._log.report(
                    "the webhook has its certificate"
                    if self.key_pair
                    else "the webhook's Secret has no CA and no certificate"
                )
            except AcceleratorError as error:
                self._log.report(f"the webhook's Secret cannot be read: {error}", level=logging.WARNING)
            await asyncio.sleep(self.pause)

    @property
    def pause(self) -> float:
        """Return the seconds until the next check.

        A short-lived certificate is checked twice between its renewal time and its end.
        """
        return SOON_SECONDS if self.key_pair is None else min(READ_SECONDS, self._seconds / 6)

    async def refresh(self) -> None:
        """Issue or load a new certificate if it is due or if the Secret has another one. Raises ApiError, ApiUnreachable."""
        authorities, ready = await self._secret.read()
        now = self._now()
        if ready is not None:
            if self.key_pair is None or ready.certificate != self.key_pair.certificate:
                self._use(ready)
            return
        active = authorities.active
        if active is None:
            return
        if (
            self.key_pair is not None
            and certificates.is_signed_by(self.key_pair, active)
            and not self.key_pair.needs_renewal(now)
        ):
            return
        self._use(certificates.create_serving_certificate(active, self._names, now=now, seconds=self._seconds))

    def _use(self, own: KeyPair) -> None:
        load_pair(self.context, own)
        self.key_pair = own
        expires = own.parsed.not_valid_after_utc
        self._renewed(expires.timestamp())
        LOG.info("new webhook certificate", extra=fields(expires=expires.isoformat()))
        self.ready.set()


def load_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Use a certificate and key for new connections; they are never written to a disk. Raises OSError (SSLError) for a pair that does not fit.

    OpenSSL deletes the key of a context that gets a certificate with another key. So a separate context checks the pair first.
    """
    descriptor = os.memfd_create("certificate")
    with os.fdopen(descriptor, "wb") as file:
        file.write(pair.certificate + b"\n" + pair.key)
        file.flush()
        for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            each.load_cert_chain(f"/proc/self/fd/{descriptor}")
