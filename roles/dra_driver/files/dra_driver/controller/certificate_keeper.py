# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Keeps the webhook trusted: the authority in a Secret and in the webhook's configuration, and this server's own certificate.

The one controller that acts looks after the authority. Every one makes its own certificate from it, keeps the key of that in memory
alone, and goes on with the one it has while the API server is away.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import logging
import os
import ssl
import time
from collections.abc import Sequence
from typing import Callable

from ..api.client import ApiClient, ApiError, Json
from ..core.errors import AcceleratorError
from ..logs import StateLog
from . import certificates
from .certificates import Authorities, Pair

LOG = logging.getLogger(__name__)

#: How often the Secret and the configuration are looked at, and how often while something is to be done.
LOOK_SECONDS, SOON_SECONDS = 30.0, 2.0
LABELS = {"app.kubernetes.io/managed-by": "dra-accelerators", "app.kubernetes.io/component": "controller"}


def utc_now() -> datetime.datetime:
    """The time, for what is written into certificates."""
    return datetime.datetime.now(datetime.timezone.utc)


class AuthoritySecret:
    """The Secret that keeps the authorities."""

    def __init__(self, client: ApiClient, namespace: str, name: str) -> None:
        self._client = client
        self._collection = f"/api/v1/namespaces/{namespace}/secrets"
        self._path = f"{self._collection}/{name}"
        self._name, self._namespace = name, namespace

    async def read(self) -> tuple[Authorities, str]:
        """What it keeps, and its resource version; nothing and "" where there is none. Raises ApiError, ApiUnreachable."""
        try:
            secret = await self._client.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            return Authorities(), ""
        version = str((secret.get("metadata") or {}).get("resourceVersion", ""))
        return certificates.read_authorities(secret.get("data") or {}), version

    async def write(self, authorities: Authorities, version: str) -> None:
        """Store what was made of what was read at that version. Raises ApiError 409 where somebody was faster."""
        metadata: Json = {"name": self._name, "namespace": self._namespace, "labels": LABELS}
        body: Json = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": metadata,
            "data": authorities.to_data(),
        }
        if version:
            metadata["resourceVersion"] = version
            await self._client.request("PUT", self._path, body=body)
        else:
            await self._client.request("POST", self._collection, body=body)


class AuthorityKeeper:
    """Looks after the authority. ``may_act`` is asked before every write."""

    def __init__(
        self,
        client: ApiClient,
        secret: AuthoritySecret,
        *,
        configuration: str,
        seconds: float,
        may_act: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        self._client = client
        self._secret = secret
        self._path = f"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/{configuration}"
        self._seconds = seconds
        self._may_act = may_act
        self._clock = clock
        self._now = now
        self._trusted: tuple[bytes, float] | None = None
        self._log = StateLog(LOG)

    async def run(self) -> None:
        """Look after it until cancelled."""
        while True:
            try:
                done = await self.look()
                self._log.report("the webhook's authority is looked after")
            except AcceleratorError as error:
                done = True
                if not (isinstance(error, ApiError) and error.status == 409):
                    self._log.report(f"the webhook's authority cannot be looked after: {error}", level=logging.WARNING)
            await asyncio.sleep(SOON_SECONDS if done else LOOK_SECONDS)

    async def look(self) -> bool:
        """Do what is to be done next, and say whether there may be more to do soon. Raises ApiError, ApiUnreachable."""
        authorities, version = await self._secret.read()
        trusted_for = await self._have_trusted(authorities.bundle)
        what = certificates.decide(authorities, trusted_for=trusted_for, now=self._now())
        if what == certificates.NOTHING:
            return authorities.next is not None or trusted_for <= 0
        if self._may_act():
            changed = certificates.step(authorities, what, now=self._now(), seconds=self._seconds)
            await self._secret.write(changed, version)
            LOG.info("the webhook's authority: %s", what)
        return True

    async def _have_trusted(self, bundle: bytes) -> float:
        """Have the API server trust all of a bundle, and say for how many seconds it is seen to do so."""
        if not bundle:
            return 0.0
        try:
            present = await self._client.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            self._trusted = None
            return 0.0
        wanted = base64.b64encode(bundle).decode()
        webhooks = present.get("webhooks") or ()
        wrong = [
            number
            for number, webhook in enumerate(webhooks)
            if (webhook.get("clientConfig") or {}).get("caBundle") != wanted
        ]
        if not wrong:
            if self._trusted is None or self._trusted[0] != bundle:
                self._trusted = (bundle, self._clock())
            return self._clock() - self._trusted[1]
        self._trusted = None
        if self._may_act():
            version = present["metadata"]["resourceVersion"]
            patch = [{"op": "test", "path": "/metadata/resourceVersion", "value": version}]
            patch += [
                {"op": "add", "path": f"/webhooks/{number}/clientConfig/caBundle", "value": wanted} for number in wrong
            ]
            await self._client.request("PATCH", self._path, body=patch, content_type="application/json-patch+json")
            LOG.info("the API server was told which authority to trust")
        return 0.0


class CertificateKeeper:
    """This server's own certificate, in a TLS context that is changed while it serves. ``told`` is when a new one ends."""

    def __init__(
        self,
        secret: AuthoritySecret,
        names: Sequence[str],
        *,
        seconds: float,
        told: Callable[[float], None] = lambda _expires: None,
        now: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        self._secret = secret
        self._told = told
        self._names = tuple(names)
        self._seconds = seconds
        self._now = now
        self._log = StateLog(LOG)
        self._own: Pair | None = None
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Have a good certificate until cancelled."""
        while True:
            try:
                await self.look()
                self._log.report("the webhook has its certificate" if self._own else "the webhook has no authority yet")
            except AcceleratorError as error:
                self._log.report(f"the webhook's authority cannot be read: {error}", level=logging.WARNING)
            await asyncio.sleep(self.pause)

    @property
    def pause(self) -> float:
        """For how many seconds it looks away: a certificate that lives shorter is looked at twice after it is due and before its end."""
        return SOON_SECONDS if self._own is None else min(LOOK_SECONDS, self._seconds / 6)

    async def look(self) -> None:
        """Make a new certificate if it is time, or if another authority signs now. Raises ApiError, ApiUnreachable."""
        authorities, _version = await self._secret.read()
        active, now = authorities.active, self._now()
        if active is None:
            return
        if self._own is not None and certificates.signed_by(self._own, active) and not self._own.due(now):
            return
        own = certificates.make_certificate(active, self._names, now=now, seconds=self._seconds)
        _load(self.context, own)
        self._own = own
        self._told(own.parsed.not_valid_after_utc.timestamp())
        LOG.info("the webhook has a new certificate until %s", own.parsed.not_valid_after_utc.isoformat())
        self.ready.set()


def _load(context: ssl.SSLContext, pair: Pair) -> None:
    """Serve connections that come from now on with a pair. The ssl module reads files alone; this one is never on a disk."""
    descriptor = os.memfd_create("webhook-certificate")
    with os.fdopen(descriptor, "wb") as file:
        file.write(pair.certificate + pair.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
