"""The certificate that both clients' ports show, and another one in its place while they serve."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path

import grpc

from maskserve_common.config import ConfigError
from maskserve_router.config import Listen


class Certificates:
    """Of one router.

    Args:
        listen: where its files are.

    Raises:
        ConfigError: they are no certificate and its key.
    """

    def __init__(self, listen: Listen) -> None:
        self.files: Sequence[str] = [listen.tls_cert, listen.tls_key] if listen.tls_cert else []
        self._contexts: list[ssl.SSLContext] = []
        self._pair = self.read()

    def read(self) -> tuple[bytes, bytes]:
        """Chain and key as they are in the files now.

        Raises:
            ConfigError: as above.
        """
        if not self.files:
            return b"", b""
        try:
            certificate, key = (Path(file).read_bytes() for file in self.files)
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
        except OSError as error:  # of ssl, too
            why = getattr(error, "reason", None) or error.strerror
            file_names = " and ".join(self.files)
            raise ConfigError(
                f"[listen] tls_cert and tls_key: {file_names} are no certificate and its key: {why}"
            ) from None
        return certificate, key

    def take_on(self, pair: tuple[bytes, bytes]) -> None:
        """Show what `read` gave from now on, on connections that begin then."""
        self._pair = pair
        for context in self._contexts:
            _load(context, *pair)

    def shown_by(self, context: ssl.SSLContext) -> None:
        """An HTTP listener's: it is kept up to date."""
        self._contexts.append(context)

    def for_grpc(self) -> grpc.ServerCredentials:
        """Credentials that ask at each handshake."""
        return grpc.dynamic_ssl_server_credentials(self._of_grpc(), self._of_grpc)

    def _of_grpc(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = self._pair
        return grpc.ssl_server_certificate_configuration([(key, certificate)])


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Have a context show them; the module reads files alone, and theirs may change meanwhile."""
    memory = os.memfd_create("certificate")
    try:
        os.write(memory, certificate + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
