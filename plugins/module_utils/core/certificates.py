# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The CA of the admission webhook and the serving certificates below it: creation, and the steps of a rotation.

No side effects. The module ``webhook_authority`` keeps the CA, the controller issues its own serving certificate. The
package ``cryptography`` is imported when a function needs it. A rotation has an overlap: the API server trusts the next
CA before anything is signed with it, and the previous CA until it expires.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

#: A CA and a certificate are renewed when less than this part of their lifetime remains.
RENEW_BELOW = 1 / 3
#: A certificate is valid from this time before its creation on, because clocks differ.
CLOCK_TOLERANCE = datetime.timedelta(minutes=5)
#: How long the API server must have trusted the next CA before it signs certificates, in seconds.
TRUST_SECONDS = 30.0

# The steps of a rotation: create the active CA, create the next CA, make the next CA the active one, delete the previous CA.
MAKE, MAKE_NEXT, PROMOTE, FORGET, NOTHING = "make", "make-next", "promote", "forget", "nothing"


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, both in PEM format."""

    certificate: bytes
    key: bytes

    @property
    def parsed(self) -> x509.Certificate:
        """Return the parsed certificate. Raises ValueError."""
        from cryptography import x509

        return x509.load_pem_x509_certificate(self.certificate)

    @property
    def expires(self) -> datetime.datetime:
        """Return the time when the certificate expires. Raises ValueError."""
        return _certificate_time(self.parsed, "not_valid_after")

    def remaining_seconds(self, now: datetime.datetime) -> float:
        """Return the remaining lifetime in seconds."""
        return (self.expires - now).total_seconds()

    def needs_renewal(self, now: datetime.datetime) -> bool:
        """Return whether the certificate must be renewed."""
        life = self.expires - _certificate_time(self.parsed, "not_valid_before") - CLOCK_TOLERANCE
        return self.remaining_seconds(now) <= RENEW_BELOW * life.total_seconds()


@dataclass(frozen=True)
class Authorities:
    """The CAs of a Secret: the active CA, during a rotation the next CA, and the certificate of the previous CA."""

    active: KeyPair | None = None
    next: KeyPair | None = None
    previous: bytes = b""

    @property
    def bundle(self) -> bytes:
        """Return the CA certificates that the API server must trust, PEM."""
        pairs = [pair.certificate for pair in (self.active, self.next) if pair is not None]
        return b"".join(part.strip() + b"\n" for part in (*pairs, self.previous) if part.strip())

    def to_data(self) -> dict[str, str]:
        """Return the content of the Secret."""
        parts = {"former.crt": self.previous}
        for name, pair in (("active", self.active), ("next", self.next)):
            parts[f"{name}.crt"] = pair.certificate if pair is not None else b""
            parts[f"{name}.key"] = pair.key if pair is not None else b""
        return {name: base64.b64encode(content).decode() for name, content in parts.items()}


def _certificate_time(certificate: x509.Certificate, name: str) -> datetime.datetime:
    """Return a time of a certificate in UTC. ``cryptography`` before 42 has the times without a time zone only."""
    found: datetime.datetime | None = getattr(certificate, f"{name}_utc", None)
    if found is None:
        found = getattr(certificate, name).replace(tzinfo=datetime.timezone.utc)
    return found


def read_authorities(data: Mapping[str, str]) -> Authorities:
    """Read the content of the Secret. A pair that cannot be parsed, or whose key does not match, is ignored."""
    parts = {name: base64.b64decode(content) for name, content in data.items()}

    def pair(name: str) -> KeyPair | None:
        found = KeyPair(parts.get(f"{name}.crt", b""), parts.get(f"{name}.key", b""))
        return found if found.certificate and _key_matches(found) else None

    return Authorities(pair("active"), pair("next"), parts.get("former.crt", b""))


def read_tls(data: Mapping[str, str]) -> KeyPair | None:
    """Read the certificate of a Secret of type ``kubernetes.io/tls``; None if it does not exist or its key does not match."""
    found = KeyPair(*(base64.b64decode(data.get(name, "")) for name in ("tls.crt", "tls.key")))
    return found if found.certificate and _key_matches(found) else None


def _key_matches(pair: KeyPair) -> bool:
    from cryptography.hazmat.primitives import serialization

    try:
        public = serialization.load_pem_private_key(pair.key, None).public_key()
        # Public keys of cryptography before 40 compare by identity.
        form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        return public.public_bytes(*form) == pair.parsed.public_key().public_bytes(*form)
    except (ValueError, TypeError):
        return False


def next_step(
    authorities: Authorities,
    *,
    trusted_for: float,
    now: datetime.datetime,
    rotate: bool = False,
    lifetime: float = 0.0,
) -> str:
    """Return the next step.

    ``trusted_for`` is the time in seconds for which the API server has trusted the whole bundle. ``rotate`` requests a
    new CA although the active one has enough lifetime left. ``lifetime`` is the lifetime of a new CA in seconds. An
    active CA with a shorter lifetime, for example of an earlier release, is replaced when less than a third of
    ``lifetime`` remains.
    """
    if authorities.active is None or authorities.active.remaining_seconds(now) <= 0:
        return PROMOTE if authorities.next is not None and trusted_for >= TRUST_SECONDS else MAKE
    if authorities.next is not None:
        return PROMOTE if trusted_for >= TRUST_SECONDS else NOTHING
    if authorities.previous and _has_expired(authorities.previous, now):
        return FORGET
    is_too_old = authorities.active.remaining_seconds(now) <= RENEW_BELOW * lifetime
    return MAKE_NEXT if rotate or is_too_old or authorities.active.needs_renewal(now) else NOTHING


def apply_step(authorities: Authorities, step: str, *, now: datetime.datetime, seconds: float) -> Authorities:
    """Return the CAs after a step. Store them before the next step."""
    if step == MAKE:
        return Authorities(create_ca(now, seconds), None, b"")
    if step == MAKE_NEXT:
        return replace(authorities, next=create_ca(now, seconds))
    if step == PROMOTE:
        return Authorities(authorities.next, None, authorities.active.certificate if authorities.active else b"")
    if step == FORGET:
        return replace(authorities, previous=b"")
    return authorities


def _has_expired(certificate: bytes, now: datetime.datetime) -> bool:
    from cryptography import x509

    try:
        return _certificate_time(x509.load_pem_x509_certificate(certificate), "not_valid_after") <= now
    except ValueError:
        return True


def _pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def create_ca(now: datetime.datetime, seconds: float) -> KeyPair:
    """Create a CA that signs serving certificates and nothing else. ``seconds`` is its lifetime."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    number = x509.random_serial_number()
    # Each CA has a unique name: with two CAs of one name, a client may try only the wrong one.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dra-accelerators-controller {number:x}"[:64])])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(number)
        .not_valid_before(now - CLOCK_TOLERANCE)
        .not_valid_after(now + datetime.timedelta(seconds=seconds))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def create_serving_certificate(
    authority: KeyPair, names: Sequence[str], *, now: datetime.datetime, seconds: float
) -> KeyPair:
    """Create a serving certificate for host names and addresses. It expires with its CA at the latest."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    signer = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise TypeError("The CA's key is not an elliptic curve key, so this program did not create it")
    issuer, key = authority.parsed, ec.generate_private_key(ec.SECP256R1())
    end = min(now + datetime.timedelta(seconds=seconds), authority.expires)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dra-accelerators-controller webhook")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_TOLERANCE)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return x509.DNSName(name)


def is_signed_by(certificate: KeyPair, authority: KeyPair) -> bool:
    """Return whether the CA has signed the certificate."""
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.parsed.verify_directly_issued_by(authority.parsed)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
