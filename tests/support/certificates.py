"""A certificate for signing C2PA manifests, from an authority that nobody trusts."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def write_signer(folder: Path) -> tuple[Path, Path]:
    """Write PEM files of a chain and of the key of its first certificate (es256)."""
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    top = _certificate("authority", authority, authority, ["key_cert_sign"], ca=True)
    certificate = _certificate("signer", key, authority, ["digital_signature"], ca=False)
    chain, secret = folder / "chain.pem", folder / "key.pem"
    pem = serialization.Encoding.PEM
    chain.write_bytes(certificate.public_bytes(pem) + top.public_bytes(pem))
    plain = serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return chain, secret


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: ec.EllipticCurvePrivateKey,
    uses: list[str],
    *,
    ca: bool,
) -> x509.Certificate:
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    usage = x509.KeyUsage(**{use: use in uses for use in _USES})
    add_extension = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name("authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 30 * day)
        .add_extension(x509.BasicConstraints(ca, None), True)
        .add_extension(usage, True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), False
        )
    )
    if not ca:
        mail = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION])
        add_extension = add_extension.add_extension(mail, False)
    return add_extension.sign(issuer, hashes.SHA256())


def _name(common: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "tests"),
            x509.NameAttribute(NameOID.COMMON_NAME, common),
        ]
    )
