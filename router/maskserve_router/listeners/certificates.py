"""The TLS certificate of the clients' HTTP and gRPC ports, which can change while they serve."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path

import grpc

from maskserve_common.config import ConfigError
from maskserve_router.config import Listen


class Certificates:
    """The certificate of one router.

    Args:
        listen: configuration with the paths of the files.

    Raises:
        ConfigError: the files are not a certificate and its key.
    """

    def __init__(self, listen: Listen) -> None:
        self.files: Sequence[str] = [listen.tls_cert, listen.tls_key] if listen.tls_cert else []
        self._contexts: list[ssl.SSLContext] = []
        self._pair = self.read()

    def read(self) -> tuple[bytes, bytes]:
        """Read the certificate chain and the key from the files.

        Raises:
            ConfigError: the files are not a certificate and its key.
        """
        if not self.files:
            return b"", b""
        try:
            certificate, key = (Path(file).read_bytes() for file in self.files)
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
        except OSError as error:  # ssl.SSLError too
            why = getattr(error, "reason", None) or error.strerror
            file_names = " and ".join(self.files)
            raise ConfigError(
                f"[listen] tls_cert and tls_key: {file_names} are not a certificate and its "
                f"key: {why}"
            ) from None
        return certificate, key

    def replace(self, pair: tuple[bytes, bytes]) -> None:
        """Use this chain and key for new connections."""
        self._pair = pair
        for context in self._contexts:
            _load(context, *pair)

    def apply_to(self, context: ssl.SSLContext) -> None:
        """Register the context of an HTTP listener: `replace` changes its certificate."""
        self._contexts.append(context)

    def for_grpc(self) -> grpc.ServerCredentials:
        """Return credentials that read the present certificate at each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(), self._grpc_configuration
        )

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = self._pair
        return grpc.ssl_server_certificate_configuration([(key, certificate)])


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a certificate into a context. `ssl` reads only files, and the files on disk may have
    changed, so it reads a file in memory.
    """
    memory = os.memfd_create("certificate")
    try:
        os.write(memory, certificate + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
