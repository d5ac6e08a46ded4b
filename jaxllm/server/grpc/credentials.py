"""Set up TLS for gRPC, with HTTP's files and flags."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

import grpc

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.tls import check_files, file_times

logger = logging.getLogger(__name__)


def check_tls(args: ServerArgs) -> None:
    """Raise VLLMValidationError for TLS flags that gRPC does not support."""
    if args.ssl_ciphers is not None:
        message = "ssl_ciphers does not go with grpc_port: gRPC has ciphers of its own. Leave one of the two out."
        raise VLLMValidationError(message, parameter="ssl_ciphers", value=args.ssl_ciphers)
    if args.ssl_cert_reqs == ssl.CERT_OPTIONAL:
        message = "ssl_cert_reqs=1 does not go with grpc_port: gRPC asks for none, 0, or for every client's, 2."
        raise VLLMValidationError(message, parameter="ssl_cert_reqs", value=args.ssl_cert_reqs)


def server_credentials(args: ServerArgs) -> grpc.ServerCredentials | None:
    """Return gRPC's credentials from checked files; None without a certificate."""
    if args.ssl_certfile is None:
        return None
    files = _Files(args)
    fetch: Any = files.fetch_changed if args.enable_ssl_refresh else _keep  # its type leaves out None
    return grpc.dynamic_ssl_server_credentials(files.read(), fetch, args.ssl_cert_reqs == ssl.CERT_REQUIRED)


def _keep() -> None:
    """Return None: nothing changes."""


class _Files:
    """The certificate and key files, which gRPC reads at each connection in its own threads."""

    def __init__(self, args: ServerArgs) -> None:
        self._args = args
        self._cert = Path(str(args.ssl_certfile))
        self._key = self._cert if args.ssl_keyfile is None else Path(args.ssl_keyfile)
        self._loaded = file_times([self._cert, self._key])

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Return the credentials in the files."""
        authorities = None if self._args.ssl_ca_certs is None else Path(self._args.ssl_ca_certs).read_bytes()
        pair = (self._key.read_bytes(), self._cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    def fetch_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the credentials if the files changed and are usable, else None."""
        now = file_times([self._cert, self._key])
        if now == self._loaded:
            return None
        self._loaded = now
        try:
            check_files(self._args)
            return self.read()
        except (VLLMValidationError, OSError) as error:  # they are being written, or do not fit each other yet
            logger.warning("the new certificate cannot be used yet: %s", error)
            return None
