"""Load TLS certificates before an engine starts, and again when the files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import VLLMValidationError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


def tls_settings(args: ServerArgs) -> dict[str, Any]:
    """Return uvicorn's settings, empty without a certificate. Raises VLLMValidationError for unusable files."""
    if args.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(args, name) is not None:
                raise VLLMValidationError(f"{name} needs a certificate: give ssl_certfile too.", parameter=name)
        for name in ("ssl_cert_reqs", "enable_ssl_refresh"):
            if getattr(args, name):
                raise VLLMValidationError(f"{name} needs a certificate: give ssl_certfile.", parameter=name)
        return {}
    if args.ssl_cert_reqs and args.ssl_ca_certs is None:
        message = "ssl_cert_reqs needs the authorities that clients' certificates come from: give ssl_ca_certs too."
        raise VLLMValidationError(message, parameter="ssl_cert_reqs", value=args.ssl_cert_reqs)
    check_files(args)
    settings = {name: getattr(args, name) for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")}
    return settings if args.ssl_ciphers is None else {**settings, "ssl_ciphers": args.ssl_ciphers}


def check_files(args: ServerArgs) -> None:
    """Load all files once. Raises VLLMValidationError for an unusable one."""
    if args.ssl_keyfile is None and _has_no_key(str(args.ssl_certfile)):
        message = f"ssl_certfile={args.ssl_certfile!r} has no private key in it: give ssl_keyfile too."
        raise VLLMValidationError(message, parameter="ssl_keyfile")
    context, parameter = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "ssl_certfile"
    try:
        context.load_cert_chain(str(args.ssl_certfile), args.ssl_keyfile, password=_no_password)
        if args.ssl_ca_certs is not None:
            parameter = "ssl_ca_certs"
            context.load_verify_locations(args.ssl_ca_certs)
        if args.ssl_ciphers is not None:
            parameter = "ssl_ciphers"
            context.set_ciphers(args.ssl_ciphers)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        value = getattr(args, parameter)
        message = f"{parameter}={value!r} cannot be used: {error}."
        raise VLLMValidationError(message, parameter=parameter, value=value) from error


def _has_no_key(certfile: str) -> bool:
    """Return whether a readable file holds no key. An unreadable one is refused later, with the reason."""
    try:
        return b"PRIVATE KEY" not in Path(certfile).read_bytes()
    except OSError:
        return False


def _no_password() -> str:
    raise ValueError("the key has a password, which nobody is there to type")


async def refresh(context: ssl.SSLContext, args: ServerArgs) -> None:
    """Load certificate and key again whenever their files have changed; new connections get them. Does not end."""
    files = [Path(each) for each in (args.ssl_certfile, args.ssl_keyfile) if each is not None]
    loaded = file_times(files)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = file_times(files)
        if now == loaded:
            continue
        loaded = now
        try:  # into another context first: a failed load leaves half of them
            check_files(args)
        except VLLMValidationError as error:  # they are being written, or do not fit each other yet
            logger.warning("the new certificate cannot be used yet: %s", error)
            continue
        context.load_cert_chain(str(args.ssl_certfile), args.ssl_keyfile, password=_no_password)
        logger.info("the certificate was loaded again")


def file_times(files: list[Path]) -> list[int | None]:
    """Return when each file was last changed; None for a missing one."""
    return [each.stat().st_mtime_ns if each.is_file() else None for each in files]
