# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""CA and certificates of the webhook: renewed in time, and trusted by the API server at each moment."""

from __future__ import annotations

import base64
import datetime
import ssl
from typing import Any

import pytest
from dra_driver.core.certificates import (
    CLOCK_TOLERANCE,
    FORGET,
    MAKE,
    MAKE_NEXT,
    NOTHING,
    PROMOTE,
    TRUST_SECONDS,
    Authorities,
    KeyPair,
    apply_step,
    create_ca,
    create_serving_certificate,
    is_signed_by,
    next_step,
    read_authorities,
)
from hypothesis import given
from hypothesis import strategies as st

NOW = datetime.datetime(2026, 11, 22, tzinfo=datetime.timezone.utc)
LIFE, SHORT = 3600.0, 900.0


def later(seconds: float) -> datetime.datetime:
    return NOW + datetime.timedelta(seconds=seconds)


def handshake(bundle: bytes, served: KeyPair, tmp: Any, name: str = "10.0.0.1") -> None:
    """Connect a client that trusts a bundle with a server. Raise ssl.SSLError if the client does not trust the server."""
    file = tmp / "served.pem"
    file.write_bytes(served.certificate + served.key)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(file)
    client = ssl.create_default_context(cadata=bundle.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _turn in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_certificate_with_its_name_and_ca_is_trusted(tmp_path: Any) -> None:
    now = datetime.datetime.now(datetime.timezone.utc)
    authority, another = create_ca(now, LIFE), create_ca(now, LIFE)
    own = create_serving_certificate(authority, ["10.0.0.1", "node-1.example.com"], now=now, seconds=SHORT)
    for name in ("10.0.0.1", "node-1.example.com"):
        handshake(authority.certificate, own, tmp_path, name)
    handshake(another.certificate + authority.certificate, own, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(another.certificate, own, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(authority.certificate, own, tmp_path, "10.0.0.2")
    assert is_signed_by(own, authority) and not is_signed_by(own, another)


def test_certificate_expires_no_later_than_its_ca() -> None:
    authority = create_ca(NOW, LIFE)
    own = create_serving_certificate(authority, ["a"], now=later(LIFE - 100), seconds=SHORT)
    assert own.parsed.not_valid_after_utc == authority.parsed.not_valid_after_utc
    assert own.parsed.not_valid_before_utc == later(LIFE - 100) - CLOCK_TOLERANCE


def test_renewal_is_due_at_one_third_of_the_lifetime() -> None:
    authority = create_ca(NOW, LIFE)
    assert not authority.needs_renewal(later(LIFE * 0.66)) and authority.needs_renewal(later(LIFE * 0.67))


def test_read_authorities_returns_stored_ones_and_skips_damaged_ones() -> None:
    authorities = Authorities(create_ca(NOW, LIFE), create_ca(NOW, LIFE), b"former\n")
    assert read_authorities(authorities.to_data()) == authorities
    data = authorities.to_data()
    assert read_authorities({**data, "active.key": data["next.key"]}).active is None, "another one's key"
    assert read_authorities({**data, "next.crt": base64.b64encode(b"no certificate").decode()}).next is None
    assert read_authorities({}) == Authorities()


def test_rotation_runs_its_steps_in_order() -> None:
    assert next_step(Authorities(), trusted_for=0, now=NOW) == MAKE
    first = apply_step(Authorities(), MAKE, now=NOW, seconds=LIFE)
    assert next_step(first, trusted_for=1e9, now=later(10)) == NOTHING
    due = later(LIFE * 0.7)
    assert next_step(first, trusted_for=1e9, now=due) == MAKE_NEXT
    both = apply_step(first, MAKE_NEXT, now=due, seconds=LIFE)
    assert both.active == first.active and both.next is not None
    assert next_step(both, trusted_for=TRUST_SECONDS - 1, now=due) == NOTHING, "it is not known to be trusted yet"
    assert next_step(both, trusted_for=TRUST_SECONDS, now=due) == PROMOTE
    second = apply_step(both, PROMOTE, now=due, seconds=LIFE)
    assert (second.active, second.next, second.previous) == (both.next, None, first.active.certificate)
    assert next_step(second, trusted_for=1e9, now=due) == NOTHING
    over = later(LIFE + 1)
    assert next_step(second, trusted_for=1e9, now=over) == FORGET
    assert apply_step(second, FORGET, now=over, seconds=LIFE).bundle == second.active.certificate
    assert next_step(first, trusted_for=1e9, now=over) == MAKE, "it expired between two checks"


@given(st.data())
def test_rotation_no_request_sees_an_untrusted_certificate(data: st.DataObject) -> None:
    """The rotation of the CA and two servers run at different times, and the API server gets a bundle up to 20 s late."""
    authorities, trusted, trusted_at, shown = Authorities(), b"", 0.0, b""
    own: list[KeyPair | None] = [None, None]
    now = 0.0
    for _turn in range(data.draw(st.integers(20, 40))):
        now += data.draw(st.sampled_from((2.0, 5.0, 30.0, 60.0, 200.0)))
        moment = later(now)
        if now - trusted_at >= 20:
            shown = trusted
        if data.draw(st.booleans()):
            if authorities.bundle != trusted:
                trusted, trusted_at = authorities.bundle, now
            elif authorities.bundle:
                what = next_step(authorities, trusted_for=now - trusted_at, now=moment)
                if what == MAKE:
                    return  # no check for a third of the certificate's life: the one case in which no delay would help
                authorities = apply_step(authorities, what, now=moment, seconds=LIFE)
            else:
                authorities = apply_step(authorities, MAKE, now=moment, seconds=LIFE)
        # A server checks about every 30 s, at the latest when a third of its certificate's life is left.
        for number, present in enumerate(own):
            active = authorities.active
            stale = present is None or not is_signed_by(present, active) if active is not None else False
            if active is not None and (
                (stale and data.draw(st.booleans())) or (present is not None and present.needs_renewal(moment))
            ):
                own[number] = create_serving_certificate(active, ["a"], now=moment, seconds=SHORT)
        for present in own:
            if present is None or present.remaining_seconds(moment) <= 0 or not shown:
                continue
            known = [
                KeyPair(part.encode() + b"-----END CERTIFICATE-----\n", b"")
                for part in shown.decode().split("-----END CERTIFICATE-----")
                if part.strip()
            ]
            assert any(is_signed_by(present, each) and each.remaining_seconds(moment) > 0 for each in known)
